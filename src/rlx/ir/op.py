"""What an op is: one class, declared once in `rlx.ops`, that carries every rule about it.

A MIR op gives:    infer, ref, vjp (or `not_differentiable`), batch, lower, cost, samples.
An HIR op gives:   infer, ref, expand, samples; gradient, batching and cost come from its expansion.
A missing rule is an error when the declaration is imported.

Calling conventions (`T` a TensorType, `N` a Node, attributes always as keywords):
    infer(*T, **attrs) -> T | TupleType             shape rule and verifier in one
    ref(*ndarray, **attrs) -> ndarray | tuple       the meaning; dims in attrs are already ints
    expand(*N, **attrs) -> N | tuple                HIR only: the same in other ops
    vjp(g, y, *N, **attrs) -> tuple[N | None, ...]  one gradient per operand; g, y may be tuples
    saving(*N, **attrs) -> N | None                 optional: the op in a graph to be differentiated, its
                                                    results followed by more that its vjp will read;
                                                    None is as it is
    batch(flags, *N, **attrs) -> N | tuple          operands with flags[i] and the result have a batch axis 0
    lower(*T, **attrs) -> Form                      MIR only: the form a backend implements
    cost(*T, **attrs) -> Dim                        scalar operations
    store_in(place, ndarray, **attrs)               optional: `ref` of operand 0 in place: in an array that
                                                    holds operand 1, or zeros where there is none
    store_part(place, ndarray, axis, first, **attrs) optional: `store_in` of a part of operand 0, its elements
                                                    from `first` on along an axis
    store_step(axis, **attrs) -> int | None         what `first` is a multiple of; None: no parts along it
    check_stored(ndarray, **attrs) -> str | None    optional: what is wrong with a result that comes from a
                                                    file and that kernels compute addresses from
    view(layout, *T, **attrs) -> Layout | None      ops that can be a view: the result's layout in operand 0
    samples() -> list[Sample]                       inputs that drive every generated test
Ops with bodies receive `bodies=` (graphs) in infer, expand, vjp, saving, batch, lower and cost, and
`run=` (call body i on arrays) in ref.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, overload

import numpy as np

from rlx.errors import OpAttributeError, RlxError, TypeMismatchError, UnknownOpError
from rlx.ir.attr import REQUIRED, Attr, AttrValue
from rlx.ir.dim import Dim
from rlx.ir.later import later
from rlx.records import dataclass

if TYPE_CHECKING:
    from rlx.ir.graph import Graph, Node
    from rlx.ir.operand import ArrayLike, Arrays, Nodes, Operand, Tensor
    from rlx.ir.types import Type


class Level(StrEnum):
    """HIR holds the blocks that users write; MIR holds what lowers to a backend form."""

    HIR = "hir"
    MIR = "mir"


class Role(StrEnum):
    """How a node takes part in a graph; everything but COMPUTE costs no kernel."""

    COMPUTE = "compute"
    INPUT = "input"
    PARAM = "param"
    CONSTANT = "constant"
    STATE = "state"
    RESULT = "result"
    TUPLE = "tuple"
    REGION = "region"


@dataclass(frozen=True)
class Sample:
    """One way to call an op in generated tests.

    `args` are type texts ("f32[2,3]"), arrays, or `Arg` for values in a range. `grad=False` says that
    the point is not smooth (a kink, a tie, NaN) so finite differences mean nothing there.
    """

    args: tuple[str | np.ndarray | Arg, ...]
    attrs: Mapping[str, AttrValue] = field(default_factory=dict)
    grad: bool = True
    bodies: tuple[Graph, ...] = ()


@dataclass(frozen=True)
class Arg:
    """A random operand: type text, range of values, and whether values are distinct (no ties)."""

    type: str
    low: float = -2.0
    high: float = 2.0
    distinct: bool = False
    special: bool = False  # sprinkle NaN, inf, -inf, 0, -0.0


EVERY_OPERAND = range(1 << 62)


class Op:
    """Base of all op declarations; subclasses are registered by `declare`."""

    if TYPE_CHECKING:  # after `declare` the name of a class is its instance: calling it creates a node

        @overload
        def __new__(cls, x: Node, /, *rest: Operand, **attrs: object) -> Node: ...  # type: ignore[misc]
        @overload
        def __new__(  # type: ignore[misc]
            cls, x: ArrayLike, y: Node, /, *rest: Operand, **attrs: object
        ) -> Node: ...
        @overload
        def __new__(  # type: ignore[misc]
            cls, x: ArrayLike, y: ArrayLike, z: Node, /, *rest: Operand, **attrs: object
        ) -> Node: ...
        @overload
        def __new__(cls, /, *operands: Operand, **attrs: object) -> Tensor: ...
        def __new__(cls, /, *operands: Operand, **attrs: object) -> Tensor: ...

    name: ClassVar[str]
    level: ClassVar[Level] = Level.MIR
    role: ClassVar[Role] = Role.COMPUTE
    attrs: ClassVar[Mapping[str, Attr]] = {}
    arity: ClassVar[int | None] = None  # None: any number of operands
    bodies: ClassVar[int] = 0
    condition: ClassVar[int | None] = None  # the operand that only chooses: numbers do not take its dtype
    effects: ClassVar[str] = "none"  # none | ordered | rng
    not_differentiable: ClassVar[str | None] = None  # the reason, where mathematics has no gradient
    # for passes: elementwise, cast, reduction, conv, pool, concat, slice, fourier, copy, update
    family: ClassVar[str] = ""
    # its function of one element (for elementwise ops a primitive of kernels), or how it combines elements
    scalar: ClassVar[str | None] = None
    combine: ClassVar[str | None] = None
    # operands whose elements it only rearranges (the others say where); None: it computes
    moves: ClassVar[Container[int] | None] = None
    heavy: ClassVar[bool] = False  # matmul, conv, attention, recurrent cell: what phases turn on
    finds_size: ClassVar[bool] = False  # a size of its result depends on data
    counts: ClassVar[str | None] = None  # the attribute with the number of elements of its operand that hold
    size_value: ClassVar[str | None] = None  # the attribute with the size that is its value
    selects: ClassVar[bool] = False  # sampling and top-k: begins the epilogue phase
    reader_side: ClassVar[bool] = False  # belongs to its readers (like a view), never computed early
    decodes: ClassVar[bool] = False  # of stored operands alone, it belongs to its readers, too
    writer_side: ClassVar[bool] = False  # a layout that a kernel may store its result in
    sees_constants: ClassVar[bool] = False  # its expansion depends on the values of constant operands
    in_place: ClassVar[bool] = False  # may write its result over its only operand
    lossless: ClassVar[bool] = False  # keeps all elements of its operands; its vjp moves them back, unchanged
    storage: ClassVar[bool] = False  # a layout of the compiler's: graphs from outside hold none
    user_function: ClassVar[str | None] = None  # the attribute that names the user's function it calls
    host_only: ClassVar[str | None] = None  # why no backend form exists: runs as a host thunk

    infer: Callable[..., Type]
    ref: Callable[..., Arrays]
    samples: Callable[[], Sequence[Sample]]
    expand: Callable[..., Nodes]
    vjp: Callable[..., Sequence[Node | None]]
    saving: Callable[..., Node | None]
    batch: Callable[..., Nodes]
    lower: Callable[..., Any]
    cost: Callable[..., Dim]
    view: Callable[..., Any]
    store_in: Callable[..., None]
    store_part: Callable[..., None]
    store_step: Callable[..., int | None]
    check_stored: Callable[..., str | None]  # what is wrong with stored results that hold addresses
    joined: Callable[
        ..., Node | None
    ]  # one op that does this and what gives its operand; None where there is none

    def has(self, rule: str) -> bool:
        """Whether this declaration gives the rule."""
        return hasattr(type(self), rule)

    def canonical_attrs(self, given: Mapping[str, object]) -> dict[str, AttrValue]:
        """Check attributes against the schema; defaults filled in, in schema order."""
        schema = self.attrs
        for key in given:
            if key not in schema:
                known = ", ".join(schema) or "none"
                raise OpAttributeError(f"{self.name}: unknown attribute {key!r}; it takes: {known}")
        out: dict[str, AttrValue] = {}
        for key, spec in schema.items():
            value = given.get(key, spec.default)
            if value is REQUIRED:
                raise OpAttributeError(f"{self.name}: attribute {key!r} is missing")
            try:
                out[key] = spec.kind(value)
            except RlxError as e:
                raise OpAttributeError(f"{self.name}: attribute {key!r}: {e.message}") from None
            except (ValueError, TypeError) as e:
                raise OpAttributeError(f"{self.name}: attribute {key!r} {e}") from None
        return out

    @overload
    def __call__(self, x: Node, /, *rest: Operand, **attrs: object) -> Node: ...
    @overload
    def __call__(self, x: ArrayLike, y: Node, /, *rest: Operand, **attrs: object) -> Node: ...
    @overload
    def __call__(self, x: ArrayLike, y: ArrayLike, z: Node, /, *rest: Operand, **attrs: object) -> Node: ...
    @overload
    def __call__(self, /, *operands: Operand, **attrs: object) -> Tensor: ...
    def __call__(self, /, *operands: Operand, **attrs: object) -> Tensor:
        """Build a node from nodes, arrays and numbers; on arrays alone, evaluate at once."""
        return later().apply(self, operands, attrs)

    def __repr__(self) -> str:
        return f"<op {self.name}>"


class MultiOp(Op):
    """Base of ops with several results: a call gives a tuple."""

    if TYPE_CHECKING:

        @overload
        def __new__(  # type: ignore[misc]
            cls, x: Node, /, *rest: Operand, **attrs: object
        ) -> tuple[Node, ...]: ...
        @overload
        def __new__(cls, /, *operands: Operand, **attrs: object) -> Tensor: ...
        def __new__(cls, /, *operands: Operand, **attrs: object) -> Tensor: ...

        @overload  # type: ignore[override]
        def __call__(self, x: Node, /, *rest: Operand, **attrs: object) -> tuple[Node, ...]: ...
        @overload
        def __call__(self, /, *operands: Operand, **attrs: object) -> Tensor: ...
        def __call__(self, /, *operands: Operand, **attrs: object) -> Tensor: ...


_REGISTRY: dict[str, Op] = {}

_NEEDED = {
    Level.MIR: ("infer", "ref", "batch", "lower", "cost", "samples"),
    Level.HIR: ("infer", "ref", "expand", "samples"),
}


def declare(cls: type[Op]) -> Op:
    """Class decorator: check that the declaration is whole, register it, return the op itself."""
    op: Op = cls()
    if not cls.__dict__.get("name"):
        raise TypeError(f"{cls.__name__}: an op declaration needs a name")
    if op.name in _REGISTRY:
        raise TypeError(f"op {op.name!r} is declared twice")
    needed = list(_NEEDED[op.level])
    if op.role is not Role.COMPUTE:
        needed = ["infer", "samples"]
    if op.host_only is not None:
        needed.remove("lower")
    if op.level is Level.MIR and op.role is Role.COMPUTE and op.not_differentiable is None:
        needed.append("vjp")
    missing = [rule for rule in needed if not op.has(rule)]
    if missing:
        raise TypeError(f"op {op.name!r} is incomplete: it lacks {', '.join(missing)}")
    op.__doc__ = cls.__doc__
    _REGISTRY[op.name] = op
    return op


def _load_declarations() -> None:
    """Import the ops of the package; what is looked up before is not there yet."""
    later().ops  # noqa: B018 - loads them


def get_op(name: str) -> Op:
    """The op of that name; an unknown one names its nearest relatives."""
    if name not in _REGISTRY:
        _load_declarations()
    try:
        return _REGISTRY[name]
    except KeyError:
        import difflib

        close = difflib.get_close_matches(name, _REGISTRY, 3)
        hint = f"; did you mean {', '.join(close)}?" if close else ""
        raise UnknownOpError(f"unknown op {name!r}{hint}") from None


def all_ops() -> list[Op]:
    """Every declared op, sorted by name."""
    _load_declarations()
    return [_REGISTRY[k] for k in sorted(_REGISTRY)]


def withdraw(name: str) -> None:
    """Remove a declaration (for tests and user-registered ops)."""
    del _REGISTRY[name]


def operand_range(op: Op) -> tuple[int, int | None]:
    """Least and greatest number of operands (None: no limit), from the type rule where no arity is given."""
    if op.arity is not None:
        return op.arity, op.arity
    rule = getattr(op.infer, "__func__", op.infer)
    most = rule.__code__.co_argcount - (rule is not op.infer)  # a method's first argument is the op
    least = most - len(rule.__defaults__ or ())
    return least, None if rule.__code__.co_flags & inspect.CO_VARARGS else most


def check_arity(op: Op, count: int) -> None:
    """Refuse a number of operands that the op does not take."""
    if op.arity == count:
        return
    least, most = operand_range(op)
    if count < least or (most is not None and count > most):
        range_ = (
            f"{least}" if least == most else f"at least {least}" if most is None else f"{least} to {most}"
        )
        raise TypeMismatchError(f"{op.name}: takes {range_} operand{'s' * (range_ != '1')}, got {count}")


def run_rule(op: Op, rule: str, *args: Any, node: Node, **extra: Any) -> Any:
    """Call a rule with a node's attributes and, for ops with bodies, its bodies."""
    if op.bodies and rule != "ref":
        extra["bodies"] = node.bodies
    return getattr(op, rule)(*args, **node.attrs, **extra)


class BodyRunner(Protocol):
    """The bodies of a node as its `ref` sees them."""

    def __call__(self, number: int, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Results of a body applied to arrays."""
        ...

    def empty(self, number: int) -> list[np.ndarray]:
        """An uninitialised array of the type of each result of a body."""
        ...

    def planned(self, number: int, symbol: str) -> int | None:
        """The size of a symbol that a body is planned for, where the run follows a plan."""
        ...


__all__ = [
    "Arg",
    "Attr",
    "BodyRunner",
    "Level",
    "MultiOp",
    "Op",
    "Role",
    "Sample",
    "all_ops",
    "check_arity",
    "declare",
    "get_op",
    "run_rule",
    "withdraw",
]
