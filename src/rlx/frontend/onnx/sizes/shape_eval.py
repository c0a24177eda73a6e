"""Values that are known while a model is imported: a partial evaluator over nodes of small tensors.

A known value is an array of numbers, or an object array whose elements are numbers, sizes (`Dim`, so a symbol
stays a symbol), exact quotients of sizes, or UNKNOWN. Shape arithmetic of models (Shape, Gather, Concat, Mul,
Where, ...) is imported as ordinary nodes; whoever needs a shape asks here, and the nodes themselves die when
nothing else reads them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

import numpy as np

from rlx.errors import RlxError
from rlx.frontend.onnx.sizes.arithmetic import (
    ELEMENT,
    UNKNOWN,
    Element,
    Rule,
    cast,
    filled,
    is_number,
    scaled,
)
from rlx.ir.assume import ConstraintLog, inferring
from rlx.ir.body import Body
from rlx.ir.dim import (
    Dim,
    Expr,
    mod,
    sym,
    symbols,
)
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Role
from rlx.ir.types import TensorType, TupleType

MOST_ELEMENTS = 4096
"""Larger tensors are data, not shapes."""


COMBINE = {
    "sum": ("add", 0),
    "prod": ("mul", 1),
    "max": ("maximum", None),
    "min": ("minimum", None),
    "all": ("logical_and", True),
    "any": ("logical_or", False),
}
"""How elements are combined along axes -> the rule of two elements, and what nothing gives."""


class PartialEvaluator:
    """Answers what is known about the value of a node."""

    def __init__(self) -> None:
        self.given: dict[Node, np.ndarray] = {}
        """Inputs whose values the caller vouches for."""
        self.steps: set[str] = set()
        """Symbols that stand for the step of a loop: never sizes of a program."""
        self._memo: dict[Node, np.ndarray | None] = {}

    def give(self, node: Node, value: np.ndarray) -> None:
        """Know the value of a node from now on."""
        self.given[node] = self._memo[node] = value

    def new_step(self, loop: str, count: Dim | None = None) -> Expr:
        """A symbol for the step of a loop, which has `count` steps at most."""
        name = f"step {len(self.steps)} of {loop}"
        self.steps.add(name)
        if isinstance(count, int):
            return sym(name, 0, max(count - 1, 0))
        step = sym(name)
        within = step if count is None else mod(step, count)
        assert isinstance(within, Expr)
        return within

    def is_step(self, value: object) -> bool:
        """Whether a size or number differs from step to step of a loop."""
        return isinstance(value, Expr) and not self.steps.isdisjoint(symbols(value))

    def __call__(self, node: Node) -> np.ndarray | None:
        """The value, as far as it is known; None if nothing is."""
        stack = [node]
        while stack:
            top = stack[-1]
            if top in self._memo:
                stack.pop()
                continue
            waiting = [o for o in self._sources(top) if o not in self._memo]
            if waiting:
                stack += waiting
            else:
                self._memo[top] = self._value(top)
        return self._memo[node]

    def unknown_inputs(self, node: Node) -> list[Node]:
        """Inputs (of any graph) whose values would have to be known for the value of a node."""
        seen: dict[Node, None] = {}
        stack, found = [node], []
        while stack:
            top = stack.pop()
            if top in seen:
                continue
            seen[top] = None
            outer = outer_value(top)
            if outer is not None:
                stack.append(outer)
            elif top.op.role is Role.INPUT and top not in self.given:
                found.append(top)
            stack += top.operands
        return found

    def _sources(self, node: Node) -> Iterable[Node]:
        outer = outer_value(node)
        if outer is not None:
            return (outer,)
        return node.operands if node.op.role is Role.COMPUTE and _is_small(node) else ()

    def _value(self, node: Node) -> np.ndarray | None:
        role = node.op.role
        if node in self.given:
            return self.given[node]
        outer = outer_value(node)
        if outer is not None:
            return self._memo[outer]
        if role is Role.CONSTANT:
            array: np.ndarray = node.attrs["value"].array
            return array
        if role is Role.PARAM:
            found = node.graph.param_values.get(node.attrs["name"])
            return None if found is None else np.asarray(found)
        if role is not Role.COMPUTE or not _is_small(node) or node.bodies or node.op.effects != "none":
            return None
        values = [self._memo[o] for o in node.operands]
        for i in moved_operands(node):  # places of what is not known among what is
            if values[i] is None and _is_small(node.operands[i]):
                values[i] = filled(node.operands[i].shape, UNKNOWN)
        operands = [value for value in values if value is not None]
        if len(operands) < len(node.operands):
            return _counted(node)
        log = ConstraintLog()
        with inferring(log, node.where):
            found = evaluate(node, operands)
        for constraint in log.take():
            node.graph.assume(constraint)
        return found


def _counted(node: Node) -> np.ndarray | None:
    """How many elements of a mask hold, for a sum over one whose positions are used, too: their number,
    a size that the run finds. So exporters write x[mask] = value."""
    if node.op.family != "reduction" or node.op.combine != "sum" or node.operands[0].op.family != "cast":
        return None
    numbers = node.operands[0]
    if len(node.attrs["axes"]) != numbers.rank or not numbers.operands[0].dtype.is_bool:
        return None
    mask = _before_moves(numbers.operands[0])
    for other in node.graph.nodes:
        if other.op.counts is not None and _before_moves(other.operands[0]) is mask:
            return _object(other.attrs[other.op.counts]).reshape((1,) * node.rank)
    return None


def _before_moves(node: Node) -> Node:
    """What a value was before all of its elements were moved, or copied."""
    while (node.op.lossless or node.op.family == "copy") and len(node.operands) == 1:
        node = node.operands[0]
    return node


def evaluate(node: Node, operands: list[np.ndarray]) -> np.ndarray | None:
    """The value of one node from known values of its operands."""
    symbolic = any(o.dtype == object for o in operands) or any(_has_symbol(v) for v in node.attrs.values())
    try:
        with np.errstate(all="ignore"):
            if not symbolic:
                return np.asarray(node.op.ref(*operands, **node.attrs))
            return _plain(_symbolic(node, operands), node.tensor)
    except (RlxError, TypeError, ValueError, ArithmeticError, IndexError):
        return None  # not a fault here: the op says what is wrong when it runs


def _symbolic(node: Node, operands: list[np.ndarray]) -> np.ndarray | None:
    op, attrs = node.op, node.attrs
    if op.size_value is not None:
        return _object(attrs[op.size_value])
    if op.family == "cast":
        return _each(lambda a: cast(a, attrs["dtype"]), operands[0])
    if op.scalar == "mul" and node.dtype.is_float:
        return _each(lambda a, b: scaled(a, b, node.dtype), *operands)
    if op.scalar is not None and op.scalar in ELEMENT:
        return _each(ELEMENT[op.scalar], *operands)
    if any(_has_symbol(v) for v in attrs.values()):
        return None
    if moved := moved_operands(node):
        return _moved(node, operands, moved)
    if op.combine is None or op.combine not in COMBINE:
        return None
    rule, start = COMBINE[op.combine]
    if op.family == "reduction":
        axes, keep = attrs["axes"], attrs["keepdims"]
        x = operands[0]
        for axis in sorted(axes, reverse=True):
            rows = _rows(x, axis)
            if start is not None:
                rows.insert(0, np.full(np.delete(x.shape, axis), start, object))
            x = reduce(lambda a, b: _each(ELEMENT[rule], a, b), rows)
            if keep:
                x = np.expand_dims(x, axis)
        return x
    if attrs.get("exclusive") or attrs.get("reverse"):
        return None
    rows = _rows(operands[0], attrs["axis"])
    for i in range(1, len(rows)):
        rows[i] = _each(ELEMENT[rule], rows[i - 1], rows[i])
    return np.stack(rows, attrs["axis"])


def _rows(x: np.ndarray, axis: int) -> list[np.ndarray]:
    """The slices along an axis, without it."""
    return [np.take(_objects(x), [i], axis).reshape(np.delete(x.shape, axis)) for i in range(x.shape[axis])]


def moved_operands(node: Node) -> list[int]:
    """Operands whose elements a node only rearranges; none if it computes."""
    moves = node.op.moves
    if moves is None or node.attrs.get("reduction", "none") != "none":
        return []
    return [i for i in range(len(node.operands)) if i in moves]


def _moved(node: Node, operands: list[np.ndarray], moved: list[int]) -> np.ndarray:
    """A rearrangement: done to the numbers of the elements, which then name the elements."""
    elements: list[Element] = []
    numbered = list(operands)
    for i in moved:
        x = operands[i]
        numbered[i] = np.arange(len(elements), len(elements) + x.size).reshape(x.shape)
        elements += list(_objects(x).flat)
    order = np.asarray(node.op.ref(*numbered, **node.attrs))
    out = np.empty(order.shape, object)
    for at, number in np.ndenumerate(order):
        out[at] = elements[number]
    return out


def _each(rule: Rule, *arrays: np.ndarray) -> np.ndarray:
    out = np.frompyfunc(rule, len(arrays), 1)(*(_objects(a) for a in arrays))
    return out if isinstance(out, np.ndarray) else _object(out)


def _object(x: object) -> np.ndarray:
    out = np.empty((), object)
    out[()] = x
    return out


def _objects(array: np.ndarray) -> np.ndarray:
    """The same elements as Python objects."""
    return array if array.dtype == object else array.astype(object)


def _plain(value: np.ndarray | None, t: TensorType) -> np.ndarray | None:
    """Numbers in the dtype of the tensor, where nothing symbolic is left."""
    if value is None or value.dtype != object:
        return value
    if all(is_number(x) for x in value.flat):
        return value.astype(t.dtype.np)
    return value


def _is_small(node: Node) -> bool:
    if isinstance(node.type, TupleType):
        return False
    count = node.type.numel
    return isinstance(count, int) and count <= MOST_ELEMENTS


def _has_symbol(value: object) -> bool:
    if isinstance(value, tuple):
        return any(map(_has_symbol, value))
    return isinstance(value, Expr)


def outer_value(node: Node) -> Node | None:
    """For an input of a body that stands for a value around it: that value."""
    graph: Graph = node.graph
    if node.op.role is Role.INPUT and isinstance(graph, Body):
        for outer, inner in graph.captured.items():
            if inner is node:
                return outer
    return None
