"""Nodes: one value of a graph each, with the operators of Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from rlx.errors import MissingAttribute, RlxError, TypeMismatchError, current_where
from rlx.ir.dim import Dim
from rlx.ir.dtype import DType
from rlx.ir.later import later
from rlx.ir.op import Op, get_op
from rlx.ir.types import TensorType, TupleType, Type

if TYPE_CHECKING:
    import numpy as np

    from rlx.ir.attr import AttrValue
    from rlx.ir.graph import Graph
    from rlx.ir.operand import DimLike, DTypeLike, Operand


class Node:
    """One value: an op applied to operands, with its type and the source locations it came from."""

    __slots__ = ("_form", "_number", "attrs", "bodies", "graph", "id", "op", "operands", "type", "where")
    __array_priority__ = 1000  # ndarray + node is node's business
    __array_ufunc__ = None

    def __init__(
        self,
        graph: Graph,
        id: int,
        op: Op,
        operands: tuple[Node, ...],
        attrs: Mapping[str, AttrValue],
        bodies: Sequence[Graph],
        type: Type,
        where: tuple[str, ...],
    ) -> None:
        self.graph, self.id, self.op, self.operands = graph, id, op, operands
        self.attrs = attrs if isinstance(attrs, MappingProxyType) else MappingProxyType(dict(attrs))
        self.bodies, self.type, self.where = bodies, type, where
        self._form: object = None  # kept by `rlx.kernel.compose.lower_node`
        self._number: tuple[np.ndarray | None] | None = None  # kept by `rlx.rewrite.numbers.number_of`

    def __reduce__(self) -> tuple[Callable[..., Node], tuple[Graph, int]]:
        """A node goes with its graph: a copy is the node of that number in the graph's copy."""
        return type(self.graph).node, (self.graph, self.id)

    @property
    def tensor(self) -> TensorType:
        """The type, for a node that is one tensor."""
        if isinstance(self.type, TupleType):
            raise TypeMismatchError(
                f"%{self.id} ({self.op.name}) has {len(self.type.items)} results; pick one first"
            )
        return self.type

    @property
    def shape(self) -> tuple[Dim, ...]:
        return self.tensor.shape

    @property
    def dtype(self) -> DType:
        return self.tensor.dtype

    @property
    def rank(self) -> int:
        return len(self.tensor.shape)

    @property
    def reader_side(self) -> bool:
        """Whether a value belongs to its readers, as a view on its first operand that they read in place."""
        return self.op.reader_side or (self.op.decodes and self.storage is not None)

    @property
    def storage(self) -> Node | None:
        """What a value that belongs to its readers is read from; None if that is not one thing."""
        if self.op.reader_side:
            return self.operands[0]
        if not self.op.decodes:
            return None
        first, *others = (o.storage for o in self.operands)
        return first if all(other is first for other in others) else None

    def __repr__(self) -> str:
        args = ", ".join(f"%{o.id}" for o in self.operands)
        return f"%{self.id} = {self.op.name}({args}) : {self.type}"

    def __iter__(self) -> Iterator[Node]:
        if isinstance(self.type, TupleType):
            return iter(self.graph.results(self))
        raise TypeMismatchError(f"%{self.id} ({self.op.name}) is a tensor; iterate over indices instead")

    def __len__(self) -> int:
        if self.rank == 0:
            raise TypeMismatchError(f"%{self.id} ({self.op.name}) is a scalar, which has no length")
        return int(self.shape[0])

    def __bool__(self) -> bool:
        advice = "use rlx.ops.where or rlx.ops.cond"
        if isinstance(self.type, TensorType) and self.dtype.is_bool:  # `if a == b`, `a in [b, c]`
            advice += "; == and != compare elements, `is` compares identity"
        self._refuse_value(advice)

    def __int__(self) -> int:
        self._refuse_value("keep it a node; rlx.ops.cast changes its dtype")

    def __float__(self) -> float:
        self._refuse_value("keep it a node; rlx.ops.cast changes its dtype")

    if not TYPE_CHECKING:  # what is refused is not there for type checkers

        def __array__(self, dtype: object = None, copy: bool | None = None) -> NoReturn:
            self._refuse_value("NumPy cannot compute with it; functions of rlx.ops can")

        def __getattr__(self, name: str) -> NoReturn:
            """What a node does not have; the functions of NumPy's methods are in rlx.ops."""
            told = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name.startswith("_"):  # Python and NumPy ask for many of these
                raise MissingAttribute(told)
            if name in ("item", "numpy", "tolist"):
                self._refuse_value("return it from the function to see its numbers", MissingAttribute)
            hint = f"; call rlx.ops.{name}(x)" if callable(getattr(later().ops, name, None)) else ""
            raise MissingAttribute(f"a traced value has no attribute {name!r}{hint}", current_where())

    def __setitem__(self, index: object, value: object) -> NoReturn:
        told = f"%{self.id} ({self.op.name}) cannot be changed in place"
        raise TypeMismatchError(
            f"{told}; make a new value with rlx.ops.where, concat or dynamic_update_slice"
        )

    def _refuse_value(self, advice: str, kind: type[RlxError] = TypeMismatchError) -> NoReturn:
        told = f"%{self.id} ({self.op.name}) has no value while the graph is built; {advice}"
        raise kind(told, current_where())

    def __hash__(self) -> int:
        return id(self)  # nodes that a dict or set holds differ in it, so that none is compared with ==

    def _call(self, name: str, *operands: object, **attrs: object) -> Node:
        made: Node = get_op(name)(*operands, **attrs)  # type: ignore[call-overload]
        return made

    def __add__(self, other: Operand) -> Node:
        return self._call("add", self, other)

    def __radd__(self, other: Operand) -> Node:
        return self._call("add", other, self)

    def __sub__(self, other: Operand) -> Node:
        return self._call("sub", self, other)

    def __rsub__(self, other: Operand) -> Node:
        return self._call("sub", other, self)

    def __mul__(self, other: Operand) -> Node:
        return self._call("mul", self, other)

    def __rmul__(self, other: Operand) -> Node:
        return self._call("mul", other, self)

    def __truediv__(self, other: Operand) -> Node:
        return self._call("div", self, other)

    def __rtruediv__(self, other: Operand) -> Node:
        return self._call("div", other, self)

    def __floordiv__(self, other: Operand) -> Node:
        return self._call("floor_div", self, other)

    def __mod__(self, other: Operand) -> Node:
        return self._call("mod", self, other)

    def __pow__(self, other: Operand) -> Node:
        return self._call("pow", self, other)

    def __rpow__(self, other: Operand) -> Node:
        return self._call("pow", other, self)

    def __matmul__(self, other: Operand) -> Node:
        return self._call("matmul", self, other)

    def __rmatmul__(self, other: Operand) -> Node:
        return self._call("matmul", other, self)

    def __neg__(self) -> Node:
        return self._call("neg", self)

    def __abs__(self) -> Node:
        return self._call("abs", self)

    def __invert__(self) -> Node:
        return self._call("logical_not" if self.dtype.is_bool else "bitwise_not", self)

    def __and__(self, other: Operand) -> Node:
        return self._call("logical_and" if self.dtype.is_bool else "bitwise_and", self, other)

    def __or__(self, other: Operand) -> Node:
        return self._call("logical_or" if self.dtype.is_bool else "bitwise_or", self, other)

    def __xor__(self, other: Operand) -> Node:
        return self._call("logical_xor" if self.dtype.is_bool else "bitwise_xor", self, other)

    def __eq__(self, other: object) -> Any:
        """Elementwise, as in NumPy. No value is None, so that `x == None` is plainly False.

        RLX's own code asks with `is` whether two nodes are one (`rlx.ir.node.is_among`, `place_of`).
        """
        return False if other is None else self._call("equal", self, other)

    def __ne__(self, other: object) -> Any:
        return True if other is None else self._call("not_equal", self, other)

    def __lt__(self, other: Operand) -> Node:
        return self._call("less", self, other)

    def __le__(self, other: Operand) -> Node:
        return self._call("less_equal", self, other)

    def __gt__(self, other: Operand) -> Node:
        return self._call("greater", self, other)

    def __ge__(self, other: Operand) -> Node:
        return self._call("greater_equal", self, other)

    def __getitem__(self, index: object) -> Node:
        return later().getitem(self, index)

    @property
    def T(self) -> Node:
        """The transpose (all axes reversed)."""
        return self._call("transpose", self, perm=tuple(reversed(range(self.rank))))

    def reshape(self, *shape: DimLike | Sequence[DimLike]) -> Node:
        whole = len(shape) == 1 and isinstance(shape[0], (tuple, list))
        made: Node = later().ops.reshape(self, shape[0] if whole else shape)
        return made

    def astype(self, to: DTypeLike) -> Node:
        return self._call("cast", self, dtype=to)


def place_of(node: Node, nodes: Iterable[Node]) -> int:
    """The place of a node among others; `list.index` would compare elements."""
    return next(i for i, n in enumerate(nodes) if n is node)


def is_among(node: Node, nodes: Iterable[Node]) -> bool:
    """Whether a node is one of these; `in` would compare elements."""
    return any(n is node for n in nodes)


def are_same(nodes: Sequence[Node], others: Sequence[Node]) -> bool:
    """Whether these are the same nodes in the same order; `==` would compare elements."""
    return len(nodes) == len(others) and all(a is b for a, b in zip(nodes, others, strict=True))
