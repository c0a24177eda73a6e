"""One ONNX node as its conversion sees it: operands, attributes, and what is known about values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlx.errors import ModelImportError, ShapeError
from rlx.frontend.onnx.proto import DTYPES, attribute_value, element_dtype
from rlx.frontend.onnx.sizes.arithmetic import UNKNOWN, Quotient, Unknown, filled
from rlx.frontend.onnx.value import Outputs, Strings, Value, kind_of
from rlx.ir.attr import AttrValue
from rlx.ir.dim import Dim, Expr
from rlx.ir.dtype import DType, ParamValue
from rlx.ir.graph import Graph, Node, current_graph
from rlx.ir.op import Role
from rlx.ir.operand import DTypeLike

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto

    from rlx.frontend.onnx.importer import Importer, Scope


class NeedsValue(ModelImportError):
    """A shape or structure depends on the value of graph inputs; with these the model can be imported."""

    def __init__(self, message: str, inputs: Sequence[str]) -> None:
        super().__init__(message)
        self.inputs = tuple(inputs)


class _Required:
    pass


REQUIRED = _Required()
MOST_AXES = 64  # of an array of NumPy


class Call:
    """An ONNX node, its operands resolved; `n[i]` is operand i as a tensor."""

    def __init__(self, importer: Importer, scope: Scope, proto: NodeProto, version: int) -> None:
        self.importer, self.scope, self.proto, self.version = importer, scope, proto, version
        self.operands: list[Value] = [scope.lookup(name) if name else None for name in proto.input]
        while self.operands and self.operands[-1] is None:
            self.operands.pop()
        self.outputs = list(proto.output)
        self._attributes = {a.name: a for a in scope.attributes_of(proto)}
        self._read: set[str] = set()

    # -- operands

    def __len__(self) -> int:
        return len(self.operands)

    def __getitem__(self, i: int) -> Node:
        """Operand i, which must be a tensor."""
        value = self.value(i)
        if not isinstance(value, Node):
            raise ModelImportError(f"its input {i} must be a tensor, but is {kind_of(value)}")
        return value

    def get(self, i: int) -> Node | None:
        """Operand i, or None if it is not given."""
        return None if self.value(i) is None else self[i]

    def value(self, i: int) -> Value:
        """Operand i, whatever it is; None if it is not given."""
        return self.operands[i] if i < len(self.operands) else None

    def nodes(self, start: int = 0) -> list[Node]:
        """All operands from `start` on, as tensors."""
        return [self[i] for i in range(start, len(self.operands))]

    def sequence(self, i: int) -> list[Value]:
        """Operand i, which must be a sequence."""
        value = self.value(i)
        if not isinstance(value, list):
            raise ModelImportError(f"its input {i} must be a sequence, but is {kind_of(value)}")
        return value

    def tensors(self, i: int) -> list[Node]:
        """Operand i, which must be a sequence of tensors."""
        found: list[Node] = []
        for value in self.sequence(i):
            if not isinstance(value, Node):
                raise ModelImportError(
                    f"its input {i} must be a sequence of tensors, but has {kind_of(value)}"
                )
            found.append(value)
        return found

    def strings(self, i: int) -> np.ndarray:
        """Operand i, which must be a tensor of text."""
        value = self.value(i)
        if not isinstance(value, Strings):
            raise ModelImportError(f"its input {i} must be a tensor of text, but is {kind_of(value)}")
        return value.array

    def wants(self, i: int) -> bool:
        """Whether output i is read by anyone."""
        return i < len(self.outputs) and bool(self.outputs[i])

    @property
    def graph(self) -> Graph:
        """The graph being built here."""
        graph = current_graph()
        assert graph is not None, "conversions run while a graph is built"
        return graph

    def constant(self, value: object, dtype: DTypeLike | None = None) -> Node:
        """A constant of the graph being built."""
        return self.graph.constant(np.asarray(value), dtype)

    def weight(self, array: ParamValue, name: str) -> Node:
        """Numbers of this node's attributes, as a constant or a param of the model."""
        value = self.importer.constant(array, f"{self.label}.{name}")
        assert isinstance(value, Node), "only text is not a tensor"
        return value

    # -- what is known about values

    def partial(self, node: Node) -> np.ndarray | None:
        """What is known about a value: numbers, or objects some of which are sizes or unknown."""
        return self.importer.known(node)

    def known_value(self, node: Node) -> np.ndarray | None:
        """A value as numbers, if all of them are known."""
        found = self.partial(node)
        return None if found is None or found.dtype == object else found

    def known(self, i: int) -> np.ndarray | None:
        """Operand i as numbers, if all of them are known."""
        return self.known_value(self[i])

    def stored(self, i: int) -> ParamValue | None:
        """The same, but a param may be a lazy array: it is not read."""
        node = self[i]
        is_param = node.op.role is Role.PARAM
        return node.graph.param_values.get(node.attrs["name"]) if is_param else self.known(i)

    def array(self, i: int) -> np.ndarray:
        """Operand i as numbers, which must be known."""
        found = self.known(i)
        if found is None:
            self.demand(self[i], f"the value of its input {i}")
        assert found is not None
        return found

    def is_open(self, i: int) -> bool:
        """Whether a number in operand i is neither known nor a size."""
        found = self.partial(self[i])
        return found is None or any(isinstance(x, Unknown) for x in found.reshape(-1))

    def ints(self, i: int) -> tuple[int, ...]:
        """Operand i as integers, which must be known."""
        return tuple(int(x) for x in self.array(i).reshape(-1))

    def dims(self, i: int, fed: bool = False) -> tuple[Dim, ...]:
        """Operand i as sizes: known, symbolic, or found by each run. If `fed`, also where an input of the
        model holds them; else that is refused, as -1 and 0 may have special meanings."""
        return self.sizes(self[i], f"the sizes in its input {i}", fed)

    def sizes(self, node: Node, what: str, fed: bool = False) -> tuple[Dim, ...]:
        """The elements of a node as sizes."""
        found = self.places(node, what, fed)
        for x in found:
            self.refuse_step(x, what)
        return found

    def places(self, node: Node, what: str, fed: bool = False) -> tuple[Dim, ...]:
        """The elements of a node as sizes that may differ from step to step of a loop around it."""
        found = self.partial(node)
        if found is None and isinstance(count := node.tensor.numel, int):
            found = filled((count,), UNKNOWN)
        if found is None:
            self.demand(node, f"how many there are of {what}")
        assert found is not None
        flat = list(found.reshape(-1))
        if sum(isinstance(x, (Unknown, Quotient)) for x in flat) > MOST_AXES:
            raise ShapeError(
                f"{len(flat)} numbers from data are {what}; an array has at most {MOST_AXES} axes"
            )
        return tuple(
            self.importer.data_sizes.size(node, i, lambda: self.demand(node, what), fed)
            if isinstance(x, (Unknown, Quotient))
            else x
            if isinstance(x, Expr)
            else int(x)
            for i, x in enumerate(flat)
        )

    def refuse_step(self, size: Dim, what: str) -> None:
        """Refuse a size that differs from step to step of a loop."""
        if self.importer.known.is_step(size):
            raise ModelImportError(
                f"{what} must be the same in every step of the loop around it, but one is {size}; sizes that "
                "grow with the steps are not supported: write into a buffer of the full size instead"
            )

    def size(self, i: int) -> Dim:
        """Operand i as one size."""
        found = self.dims(i)
        if len(found) != 1:
            raise ModelImportError(f"its input {i} must hold one number, but holds {len(found)}")
        return found[0]

    def number(self, i: int) -> Dim | float:
        """Operand i as one number: a size, or a float that is none."""
        found = self.partial(self[i])
        if found is None or found.dtype == object or not self[i].dtype.is_float:
            return self.size(i)
        value = float(self.array(i).reshape(-1)[0])
        return int(value) if value.is_integer() else value

    def place(self, i: int) -> Dim | float:
        """Operand i as one number that may differ from step to step of a loop around it."""
        found = self.partial(self[i])
        if found is not None and found.size == 1 and self.importer.known.is_step(found.reshape(-1)[0]):
            return self.places(self[i], f"the number in its input {i}")[0]
        return self.number(i)

    def integer(self, i: int) -> int:
        """Operand i as one integer, which must be known."""
        found = self.ints(i)
        if len(found) != 1:
            raise ModelImportError(f"its input {i} must hold one number, but holds {len(found)}")
        return found[0]

    def demand(self, node: Node, what: str) -> None:
        """Refuse: a value is not known. Says which graph inputs would have to be."""
        blockers = self.importer.known.unknown_inputs(node)
        names = [b.attrs["name"] for b in blockers if b.graph is self.importer.graph]
        if len(names) < len(blockers):
            raise ModelImportError(f"{what} must be known, but depends on a value of the loop around it")
        if not names:
            raise ModelImportError(
                f"{what} must be known, but is computed by ops that only run with the program"
            )
        listed = ", ".join(map(repr, names))
        raise NeedsValue(f"{what} must be known, but depends on the value of input {listed}", names)

    # -- attributes

    def has(self, name: str) -> bool:
        """Whether an attribute is given."""
        self._read.add(name)
        return name in self._attributes

    def attr(self, name: str, default: object = REQUIRED) -> AttrValue:
        """An attribute as a Python value."""
        self._read.add(name)
        if name in self._attributes:
            return attribute_value(self._attributes[name], self.importer.folder)
        if default is REQUIRED:
            raise ModelImportError(f"its attribute {name!r} is missing")
        return default

    def choice(self, name: str, default: object, known: Sequence[str]) -> str:
        """An attribute that is one of some words."""
        value = str(self.attr(name, default))
        if value not in known:
            raise ModelImportError(
                f"its attribute {name} is {value!r}; RLX knows {', '.join(map(repr, known))}"
            )
        return value

    def flag(self, name: str, default: int = 0) -> bool:
        """An attribute that is 0 or 1."""
        return bool(self.attr(name, default))

    def dtype(self, name: str, default: object = REQUIRED) -> DType:
        """An attribute that is an element type."""
        number = self.attr(name, default)
        return number if isinstance(number, DType) else element_dtype(int(number), f"its attribute {name}")

    def unread(self, ignored: frozenset[str]) -> list[str]:
        """Attributes that the conversion did not look at."""
        return sorted(set(self._attributes) - self._read - ignored)

    # -- sub-graphs and host work

    def subgraph(self, name: str) -> GraphProto:
        """An attribute that is a graph."""
        graph: GraphProto = self.attr(name)
        return graph

    def run_subgraph(self, graph: GraphProto, inputs: Sequence[Value]) -> list[Value]:
        """Convert the nodes of a sub-graph here, with values for its inputs; returns its outputs."""
        return self.importer.run_graph(graph, inputs, self.scope)

    def expand(self) -> Outputs:
        """This node by ONNX's own definition of its op."""
        self._read |= self._attributes.keys()
        return self.importer.expand(self)

    def on_host(self, why: str) -> None:
        """Record that the value of this node is computed on the host while importing, not by the program."""
        self.importer.host_ops.append({"node": self.label, "op": self.proto.op_type, "why": why})

    @property
    def label(self) -> str:
        """The node's name, for messages."""
        return str(self.proto.name) or next((o for o in self.proto.output if o), "") or "unnamed"


def is_constant(node: Node) -> bool:
    return node.op.role is Role.CONSTANT


__all__ = ["DTYPES", "REQUIRED", "Call", "NeedsValue", "is_constant"]
