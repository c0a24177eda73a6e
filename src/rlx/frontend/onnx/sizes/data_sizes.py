"""Sizes that models compute from data, like the sum of predicted durations: symbols that each run finds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rlx import ops
from rlx.frontend.onnx.sizes.arithmetic import UNKNOWN, filled
from rlx.frontend.onnx.sizes.shape_eval import PartialEvaluator, moved_operands, outer_value
from rlx.ir.dim import Dim
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Role


class DataSizes:
    """A symbol for each number of the data that is used as a size: one number, one symbol."""

    def __init__(self, graph: Graph, known: PartialEvaluator) -> None:
        self.graph, self.known = graph, known
        self._found: dict[Node, dict[int, Dim]] = {}  # by place in the node

    def size(self, node: Node, index: int, refuse: Callable[[], None], fed: bool = False) -> Dim:
        """Element `index` of a node as a size, which must not be negative when the program runs.

        A number that an input holds may stand for more than a size (-1: what is left), so that it is refused
        unless `fed`; so is what the steps of a loop decide.
        """
        node, index = self._origin(node, index)
        found = self._found.setdefault(node, {})
        if index in found:
            return found[index]
        is_fed = node.op.role is Role.INPUT
        of_steps = any(b.graph is not self.graph for b in self.known.unknown_inputs(node))
        if not node.dtype.is_int or of_steps or (is_fed and not fed):
            refuse()
        with node.graph.building():
            element = ops.slice_axis(ops.reshape(node, (-1,)), 0, index, 1)
            size: Dim = ops.data_size(ops.reshape(element, ()))
        found[index] = size
        self._tell(node, index, size)
        return size

    def holds(self, d: Dim) -> bool:
        """Whether a size is one of these."""
        return any(d == size for found in self._found.values() for size in found.values())

    def _tell(self, node: Node, index: int, size: Dim) -> None:
        """What is computed from this number later on is computed from the size."""
        found = self.known(node)
        have = filled(node.shape, UNKNOWN) if found is None else np.array(found, object)
        have.reshape(-1)[index] = size
        self.known.give(node, have)

    def _origin(self, node: Node, index: int) -> tuple[Node, int]:
        """The value, and the element of it, that this element was before it was moved around."""
        while True:
            source = self._before(node, index)
            if source is None:
                return node, index
            node, index = source

    def _before(self, node: Node, index: int) -> tuple[Node, int] | None:
        outer = outer_value(node)
        if outer is not None:
            return outer, index
        if node.op.family == "cast" and node.operands[0].dtype.is_int:
            return node.operands[0], index
        moved = moved_operands(node)
        if not moved:
            return None
        places: list[tuple[Node, int]] = []
        numbered: list[np.ndarray] = []
        for i, operand in enumerate(node.operands):
            if i in moved:
                count = operand.tensor.numel
                if not isinstance(count, int):
                    return None
                numbers = np.arange(len(places), len(places) + count)
                numbered.append(numbers.reshape([int(d) for d in operand.shape]))
                places += [(operand, k) for k in range(count)]
            else:
                value = self.known(operand)
                if value is None or value.dtype == object:
                    return None
                numbered.append(value)
        return places[int(np.asarray(node.op.ref(*numbered, **node.attrs)).reshape(-1)[index])]
