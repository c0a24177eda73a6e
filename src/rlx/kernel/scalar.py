"""The expression language of kernel bodies.

A `Scalar` is an immutable expression evaluated at one point of an iteration space:

    const(v)            a literal                        data: Python number
    axis(i)             index along iteration axis i     data: int            dtype i64
    size(d)             a dim as a value                 data: Dim            dtype i64
    load(k, idx)        operand k at an index            data: operand number args: one i64 index per axis
    load_or(k, idx, guard, fill)   the same where `guard` holds, `fill` elsewhere (never reads outside)
    load_checked(k, idx)           index comes from data: out of range is a run-time error
    acc()               the accumulated value, in epilogues
    cast(x)             to the expression's dtype        data: None or the cast op's `saturate`
    <primitive>(args)   an elementwise primitive of `PRIMITIVES`

Operators build primitives; integers on the right become constants; small index arithmetic folds.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import numpy as np

from rlx.ir.attr import AttrValue
from rlx.ir.dim import Dim, substitute
from rlx.ir.dtype import BOOL, I64, DType
from rlx.records import dataclass

LOADS = ("load", "load_or", "load_checked")
COMPARED = ("less", "greater_equal")
VARYING = frozenset((*LOADS, "axis", "acc"))
_PLAIN = frozenset((int, type(None)))  # data whose hash differs where `repr` does


@dataclass(frozen=True)
class Primitive:
    """A scalar function: its NumPy meaning and the dtype of its result from those of its arguments."""

    name: str
    arity: int
    ref: Callable[..., object]
    result: Callable[..., DType]
    cost: int = 1  # scalar operations, for the cost model


PRIMITIVES: dict[str, Primitive] = {}


def primitive(
    name: str, arity: int, ref: Callable[..., object], result: Callable[..., DType], cost: int = 1
) -> Primitive:
    """Register a primitive; the elementwise op of the same name declares it."""
    PRIMITIVES[name] = made = Primitive(name, arity, ref, result, cost)
    return made


primitive("rounded", 1, lambda x: x, lambda d: d)  # registers hold 16-bit floats as f32: what a store leaves

primitive("exp_below", 2, lambda x, y: np.exp(x - y), lambda a, b: a, cost=10)  # for x <= y, or NaN

EXACT = ("abs", "ceil", "floor", "maximum", "minimum", "neg", "round", "sign", "trunc", "where")
"""Primitives whose results need no rounding: the dtype of their arguments has them."""


class Scalar:
    """One expression; equal structure compares and hashes equal."""

    __slots__ = ("_below", "_hash", "args", "data", "dtype", "is_uniform", "prim")

    def __init__(self, prim: str, args: tuple[Scalar, ...], dtype: DType, data: AttrValue = None) -> None:
        self.prim, self.args, self.dtype, self.data = prim, args, dtype, data
        self._hash = hash((prim, args, dtype.name, data if data.__class__ in _PLAIN else repr(data)))
        self._below: tuple[Scalar, ...] | None = None  # what `walk` gives, without the expression itself
        self.is_uniform = prim not in VARYING  # the same at every point
        for arg in args:
            if not arg.is_uniform:
                self.is_uniform = False
                break

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Scalar) or self._hash != other._hash:
            return False
        same_data = repr(self.data) == repr(other.data)  # repr: NaN equals itself, 0.0 differs from -0.0
        return self.prim == other.prim and self.dtype is other.dtype and same_data and self.args == other.args

    def __repr__(self) -> str:
        if self.prim == "const":
            return repr(self.data)
        if self.prim == "axis":
            return f"i{self.data}"
        if self.prim == "size":
            return f"size({self.data})"
        if self.prim == "acc":
            return f"acc{self.data or 0}" + (f"({', '.join(map(repr, self.args))})" if self.args else "")
        inner = ", ".join(map(repr, self.args))
        head = f"{self.prim}[{self.data}]" if self.prim in LOADS else self.prim
        return f"{head}:{self.dtype}({inner})"

    def __add__(self, other: Scalar | int) -> Scalar:
        return _index("add", self, other)

    def __radd__(self, other: int) -> Scalar:
        return _index("add", self, other)

    def __sub__(self, other: Scalar | int) -> Scalar:
        return _index("sub", self, other)

    def __rsub__(self, other: int) -> Scalar:
        return _index("sub", const(other, self.dtype), self)

    def __mul__(self, other: Scalar | int) -> Scalar:
        return _index("mul", self, other)

    def __rmul__(self, other: int) -> Scalar:
        return _index("mul", self, other)

    def __floordiv__(self, other: Scalar | int) -> Scalar:
        return _index("floor_div", self, other)

    def __mod__(self, other: Scalar | int) -> Scalar:
        return _index("mod", self, other)

    def __lt__(self, other: Scalar | int) -> Scalar:
        return call("less", self, _lift(other, self.dtype))

    def __le__(self, other: Scalar | int) -> Scalar:
        return call("less_equal", self, _lift(other, self.dtype))

    def __ge__(self, other: Scalar | int) -> Scalar:
        return call("greater_equal", self, _lift(other, self.dtype))

    def __gt__(self, other: Scalar | int) -> Scalar:
        return call("greater", self, _lift(other, self.dtype))

    def __and__(self, other: Scalar) -> Scalar:
        if self.prim == "const":
            return other if self.data else self
        if other.prim == "const":
            return self if other.data else other
        return call("logical_and", self, other)

    def walk(self) -> tuple[Scalar, ...]:
        """Every distinct sub-expression, arguments before users."""
        if self._below is None:
            self._below = self._find_below()
        return (*self._below, self)

    def _find_below(self) -> tuple[Scalar, ...]:
        order: list[Scalar] = []
        seen: set[Scalar] = set()
        stack: list[Scalar | None] = [*reversed(self.args)]  # None: the expression under it is complete
        while stack:
            s = stack.pop()
            if s is None:
                order.append(stack.pop())  # type: ignore[arg-type]
            elif s not in seen:
                seen.add(s)
                if s.args:
                    stack += (s, None, *reversed(s.args))
                else:
                    order.append(s)
        return tuple(order)


def _lift(value: Scalar | int | float | bool, like: DType) -> Scalar:
    return value if isinstance(value, Scalar) else const(value, like)


def _index(name: str, a: Scalar, b: Scalar | int) -> Scalar:
    """Arithmetic with the folds that keep index expressions small."""
    b = b if isinstance(b, Scalar) else const(b, a.dtype)
    if a.dtype is not I64 or b.dtype is not I64:
        return call(name, a, b)
    x = a.data if a.prim == "const" else None
    y = b.data if b.prim == "const" else None
    if x is not None and y is not None and (y != 0 or name in _RING):
        return const(_FOLDS[name](x, y), I64)
    if name == "add":
        if y == 0:
            return a
        if x == 0:
            return b
        if whole := _undivided(a, b) or _undivided(b, a):
            return whole
    elif name == "mul":
        if y == 1:
            return a
        if x == 1:
            return b
        if x == 0 or y == 0:
            return const(0, I64)
    elif name == "sub":
        if y == 0:
            return a
    elif y == 1:  # floor_div, mod
        return a if name == "floor_div" else const(0, I64)
    return Scalar(name, (a, b), I64)


_RING: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
}
_FOLDS = {**_RING, "floor_div": operator.floordiv, "mod": operator.mod}


def _undivided(a: Scalar, b: Scalar) -> Scalar | None:
    """(x // k) * k + x % k is x."""
    if a.prim == "mul" and b.prim == "mod" and a.args[0].prim == "floor_div":
        if a.args[1] == b.args[1] == a.args[0].args[1] and a.args[0].args[0] == b.args[0]:
            return b.args[0]
    return None


def const(value: int | float | bool | complex, dtype: DType = I64) -> Scalar:
    """A literal of a dtype."""
    if dtype is I64 and value.__class__ is int:
        return _small(value) if -2 < value < 1024 else Scalar("const", (), I64, value)
    if dtype.is_bool:
        value = bool(value)
    elif dtype.is_int:
        value = int(value)  # type: ignore[arg-type]
    elif dtype.is_float:
        value = float(value)  # type: ignore[arg-type]
    return Scalar("const", (), dtype, value)


@cache
def _small(value: int) -> Scalar:
    """A number that many indices have."""
    return Scalar("const", (), I64, value)


@cache
def axis(i: int) -> Scalar:
    """The index along iteration axis i."""
    return Scalar("axis", (), I64, i)


@cache
def axes(n: int, start: int = 0) -> tuple[Scalar, ...]:
    """The first n axes."""
    return tuple(axis(i) for i in range(start, start + n))


def size(d: Dim) -> Scalar:
    """A dim as an i64 value."""
    return const(d, I64) if isinstance(d, int) else Scalar("size", (), I64, d)


def acc(dtype: DType) -> Scalar:
    """The accumulated value, inside an epilogue."""
    return Scalar("acc", (), dtype)


def is_acc(s: Scalar, number: int) -> bool:
    """Whether an expression is accumulated value `number`."""
    return s.prim == "acc" and (s.data or 0) == number


def uses_acc(body: Scalar, number: int) -> bool:
    """Whether an expression reads accumulated value `number`."""
    return any(is_acc(e, number) for e in body.walk())


def load(operand: int, index: Sequence[Scalar | int], dtype: DType) -> Scalar:
    """Operand at an index that is always in range."""
    return Scalar("load", tuple(_lift(i, I64) for i in index), dtype, operand)


def load_or(operand: int, index: Sequence[Scalar | int], guard: Scalar, fill: Scalar) -> Scalar:
    """Operand where the guard holds, `fill` elsewhere."""
    if guard.prim == "const":
        return load(operand, index, fill.dtype) if guard.data else fill
    return Scalar("load_or", (guard, fill, *(_lift(i, I64) for i in index)), fill.dtype, operand)


def load_checked(operand: int, index: Sequence[Scalar | int], dtype: DType) -> Scalar:
    """Operand at an index that comes from data; out of range is reported when the program runs."""
    return Scalar("load_checked", tuple(_lift(i, I64) for i in index), dtype, operand)


def call(name: str, *args: Scalar) -> Scalar:
    """A primitive applied to expressions."""
    return Scalar(name, args, PRIMITIVES[name].result(*[a.dtype for a in args]))


def select(condition: Scalar, yes: Scalar, no: Scalar) -> Scalar:
    """yes where the condition holds, else no."""
    if condition.prim == "const":
        return yes if condition.data else no
    return call("where", condition, yes, no)


def convert(value: Scalar, to: DType, saturate: bool | None = None) -> Scalar:
    """Cast to a dtype (the `cast` op's rules; data holds its `saturate`)."""
    return value if value.dtype is to else Scalar("cast", (value,), to, saturate)


def as_stored(value: Scalar) -> Scalar:
    """The value as another op reads it. A 16-bit float is rounded as if it had been stored: its bits must not
    depend on what shares a kernel.

    >>> import rlx.ops
    >>> from rlx.ir.dtype import BF16
    >>> x = load(0, axes(1), BF16)
    >>> [as_stored(e).prim for e in (x, call("neg", x), call("exp", x))]
    ['load', 'neg', 'rounded']
    """
    halves = value.dtype.is_float and value.dtype.bits == 16
    return call("rounded", value) if halves and not _is_half(value) else value


def _is_half(value: Scalar) -> bool:
    """Whether an expression of a 16-bit dtype has a value of that dtype without being rounded."""
    if value.prim in EXACT:
        return all(_is_half(a) for a in value.args if a.dtype is value.dtype)
    return value.prim in (*LOADS, "at", "const", "cast", "rounded")


def in_range(index: Scalar, extent: Dim) -> Scalar:
    """0 <= index < extent."""
    return (index >= 0) & (index < size(extent))


def rebuild(s: Scalar, change: Callable[[Scalar, tuple[Scalar, ...]], Scalar | None]) -> Scalar:
    """A copy in which `change(old, new_args)` may replace sub-expressions (None keeps them)."""
    memo: dict[Scalar, Scalar] = {}
    for e in s.walk():
        old = e.args
        args = tuple([memo[a] for a in old]) if old else old
        made = change(e, args)
        if made is None:
            made = e if args == old else remake(e, args)
        memo[e] = made
    return memo[s]


def remake(e: Scalar, args: tuple[Scalar, ...]) -> Scalar:
    """The same kind of expression on other arguments, with index folds."""
    if e.dtype is I64 and e.prim in ("add", "sub", "mul", "floor_div", "mod") and len(args) == 2:
        return _index(e.prim, args[0], args[1])
    if e.prim == "logical_and":
        return args[0] & args[1]
    return Scalar(e.prim, args, e.dtype, e.data)


def replace_axes(s: Scalar, index: Sequence[Scalar]) -> Scalar:
    """The expression at another point: axis i becomes index[i]."""
    if all(e.prim == "axis" and e.data == i for i, e in enumerate(index)):
        return s
    return rebuild(s, lambda e, _: index[e.data] if e.prim == "axis" else None)


def replace_loads(s: Scalar, change: Callable[[Scalar, tuple[Scalar, ...]], Scalar | None]) -> Scalar:
    """Replace loads by other expressions (inlining a producer); change gets the load and its new args."""
    return rebuild(s, lambda e, args: change(e, args) if e.prim in LOADS else None)


def substitute_sizes(s: Scalar, mapping: Mapping[str, Dim]) -> Scalar:
    """Replace symbols inside `size` leaves."""
    return rebuild(s, lambda e, _: size(substitute(e.data, dict(mapping))) if e.prim == "size" else None)


def operands_of(s: Scalar) -> list[int]:
    """Operand numbers that an expression loads, sorted."""
    return sorted({e.data for e in s.walk() if e.prim in LOADS})


def load_index(e: Scalar) -> tuple[Scalar, ...]:
    """The index expressions of a load of any kind."""
    return e.args[2:] if e.prim == "load_or" else e.args


def body_cost(s: Scalar) -> int:
    """Scalar operations per point."""
    return sum(PRIMITIVES[e.prim].cost if e.prim in PRIMITIVES else 0 for e in s.walk())


TRUE = const(True, BOOL)
