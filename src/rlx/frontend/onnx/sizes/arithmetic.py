"""Arithmetic of what is known while a model is imported, element by element: numbers, sizes and unknowns.

A size is a `Dim`, so a symbol stays a symbol. Models compute with sizes in floating point and round again:
exact quotients of sizes are kept as such until then.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np

from rlx.frontend.onnx.sizes.scaled import LARGEST, MOST_DENOMINATOR, simple_fraction
from rlx.ir.assume import require_at_least
from rlx.ir.dim import (
    Dim,
    Expr,
    ceildiv,
    dim_max,
    dim_min,
    divides,
    floordiv,
    known_eq,
    known_le,
    known_lt,
    mod,
)
from rlx.ir.dtype import DType
from rlx.records import dataclass


class Unknown:
    """An element about which nothing is known."""

    def __repr__(self) -> str:
        return "?"


UNKNOWN = Unknown()


@dataclass(frozen=True, repr=False)
class Undecided(Unknown):
    """A comparison of two sizes that depends on symbols; `relation` is eq, ne, lt or le."""

    lhs: Dim
    rhs: Dim
    relation: str = "eq"

    def negated(self) -> Undecided:
        """The opposite."""
        if self.relation in ("eq", "ne"):
            return Undecided(self.lhs, self.rhs, "ne" if self.relation == "eq" else "eq")
        return Undecided(self.rhs, self.lhs, "le" if self.relation == "lt" else "lt")


@dataclass(frozen=True)
class Quotient:
    """A size divided by a number, as models compute it in floating point before rounding to a size again."""

    size: Dim
    by: int


@dataclass(frozen=True, repr=False)
class Scaled(Unknown):
    """A size times a float that is not a simple fraction: only known once it is rounded, down or up."""

    down: Dim | Unknown
    up: Dim | Unknown


def filled(shape: Sequence[Dim], size: Dim | Unknown) -> np.ndarray:
    """A known value all of whose elements are one size."""
    out = np.empty([int(d) for d in shape], object)
    out[...] = size
    return out


Element: TypeAlias = Any
"""What is known of one element: a number, a size, a `Quotient` of sizes, or `UNKNOWN`."""


def is_number(x: Element) -> bool:
    """Whether an element is a plain number."""
    return isinstance(x, (bool, int, float, np.generic))


def _parts(x: Element) -> tuple[Dim, int] | None:
    """x as an exact quotient (size, by)."""
    if isinstance(x, Quotient):
        return x.size, x.by
    if isinstance(x, Expr):
        return x, 1
    if isinstance(x, (bool, np.bool_)) or not is_number(x):
        return None
    if isinstance(x, (int, np.integer)):
        return int(x), 1
    if not np.isfinite(x):
        return None
    exact = Fraction(float(x))
    return (exact.numerator, exact.denominator) if exact.denominator <= MOST_DENOMINATOR else None


def _quotient(size: Dim, by: int) -> Element:
    if by < 0:
        size, by = -size, -by
    if by == 1:
        return size
    return floordiv(size, by) if divides(by, size) is True else Quotient(size, by)


Rule = Callable[..., Element]


def _exact(f: Callable[[Dim, int, Dim, int], Element]) -> Rule:
    """A rule of two exact quotients."""

    def rule(a: Element, b: Element) -> Element:
        left, right = _parts(a), _parts(b)
        return UNKNOWN if left is None or right is None else f(*left, *right)

    return rule


def _divide(a: Dim, p: int, b: Dim, q: int) -> Element:
    """(a / p) / (b / q), for a divisor that is a number or divides exactly."""
    if isinstance(b, int):
        return UNKNOWN if b == 0 else _quotient(a * q, p * b)
    return _quotient(floordiv(a, b) * q, p) if divides(b, a) is True else UNKNOWN


def scaled(a: Element, b: Element, dtype: DType) -> Element:
    """A product in floating point."""
    found = ELEMENT["mul"](a, b)
    size, factor = (a, b) if isinstance(a, Expr) else (b, a)
    if (
        found is not UNKNOWN
        or not isinstance(size, Expr)
        or not is_number(factor)
        or known_le(0, size) is not True
    ):
        return found
    simple = simple_fraction(float(factor), dtype.np)
    if simple is None:
        return UNKNOWN
    require_at_least(LARGEST - size, 0, f"{size} is too large")
    fraction, down, up = simple
    times, by = size * fraction.numerator, fraction.denominator
    return Scaled(floordiv(times, by) if down else UNKNOWN, ceildiv(times, by) if up else UNKNOWN)


def _floor_divide(a: Dim, p: int, b: Dim, q: int) -> Element:
    """Of whole sizes, by one that is not negative: sizes that make it 0 are refused when the program runs."""
    return floordiv(a, b) if p == q == 1 and known_le(0, b) is True else UNKNOWN


def _trunc_divide(a: Dim, p: int, b: Dim, q: int) -> Element:
    return _toward_zero(a, b) if p == q == 1 and known_le(0, b) is True else UNKNOWN


def _toward_zero(a: Dim, b: Dim) -> Dim:
    """a / b without its fraction, for a `b` that is not negative.

    A size less a number, like the h - 1 of a strided window, is assumed to be 0 or more: the quotient is
    then spelled like the sizes of other ops, and only sizes too small to be meant are refused.
    """
    if known_le(0, a) is not True:
        if known_le(a, 0) is True:
            return ceildiv(a, b)
        if not isinstance(a, Expr) or any(c < 0 for _, c in a.terms):
            return dim_max(floordiv(a, b), 0) + dim_min(ceildiv(a, b), 0)
        require_at_least(a, 0, f"{a} must not be negative")
    return floordiv(a, b)


def _mod(a: Dim, p: int, b: Dim, q: int) -> Element:
    return mod(a, b) if p == q == 1 and known_le(0, b) is True else UNKNOWN


def _fmod(a: Dim, p: int, b: Dim, q: int) -> Element:
    return _mod(a, p, b, q) if known_le(0, a) is True else UNKNOWN


def _extreme(f: Callable[..., Dim]) -> Rule:
    return _exact(lambda a, p, b, q: _quotient(f(a * q, b * p), p * q))


def _compare(relation: str, swapped: bool = False) -> Rule:
    f = known_lt if relation == "lt" else known_le

    def rule(a: Dim, p: int, b: Dim, q: int) -> Element:
        lhs, rhs = (b * p, a * q) if swapped else (a * q, b * p)
        found = f(lhs, rhs)
        return Undecided(lhs, rhs, relation) if found is None else found

    return _exact(rule)


def _negated(f: Callable[[Dim, Dim], bool | None]) -> Callable[[Dim, Dim], bool | None]:
    def rule(a: Dim, b: Dim) -> bool | None:
        found = f(a, b)
        return None if found is None else not found

    return rule


def _equal(a: Element, b: Element) -> Element:
    if isinstance(a, (bool, np.bool_)) and isinstance(b, (bool, np.bool_)):
        return bool(a) == bool(b)
    return _exact(_same_quotient)(a, b)


def _same_quotient(a: Dim, p: int, b: Dim, q: int) -> Element:
    found = known_eq(a * q, b * p)
    return Undecided(a * q, b * p) if found is None else found


def _logic(f: Callable[[bool, bool], bool], decisive: bool | None = None) -> Rule:
    def rule(a: Element, b: Element) -> Element:
        for x in (a, b):
            if decisive is not None and not isinstance(x, Unknown) and bool(x) is decisive:
                return decisive
        for x, other in ((a, b), (b, a)):  # where one value is not decisive, the other one decides
            if decisive is not None and not isinstance(x, Unknown) and isinstance(other, Undecided):
                return other
        return UNKNOWN if isinstance(a, Unknown) or isinstance(b, Unknown) else f(bool(a), bool(b))

    return rule


def _not(a: Element) -> Element:
    if isinstance(a, Undecided):
        return a.negated()
    return UNKNOWN if isinstance(a, Unknown) else not a


def _choose(condition: Element, a: Element, b: Element) -> Element:
    if isinstance(condition, Unknown):
        return a if _equal(a, b) is True else UNKNOWN
    return a if condition else b


def _rounded(f: Callable[[Dim, int], Element], number: Callable[[float], float]) -> Rule:
    def rule(a: Element) -> Element:
        if is_number(a):
            return number(float(a))
        if isinstance(a, Scaled):
            return a.up if number is np.ceil else a.down
        parts = _parts(a)
        return UNKNOWN if parts is None else f(*parts)

    return rule


def _absolute(a: Element) -> Element:
    parts = _parts(a)
    if parts is None:
        return UNKNOWN
    size, by = parts
    return a if known_le(0, size) is True else _quotient(-size, by) if known_le(size, 0) is True else UNKNOWN


def _sign(a: Element) -> Element:
    parts = _parts(a)
    if parts is None:
        return UNKNOWN
    size = parts[0]
    if known_eq(size, 0) is True:
        return 0
    return 1 if known_lt(0, size) is True else -1 if known_lt(size, 0) is True else UNKNOWN


def _power(a: Element, b: Element) -> Element:
    whole = is_number(b) and float(b) == int(b) and 0 <= int(b) <= 8
    return a ** int(b) if isinstance(a, Expr) and whole else UNKNOWN


def cast(a: Element, to: DType) -> Element:
    """An element as another dtype holds it."""
    if isinstance(a, Undecided):
        return a  # as a number it is 0 or 1; arithmetic with it is not known
    if isinstance(a, Scaled) and not to.is_bool:
        return a if to.is_float else a.down
    if isinstance(a, Unknown):
        return UNKNOWN
    if to.is_bool:
        return _not(_equal(a, 0)) if not isinstance(a, (bool, np.bool_)) else bool(a)
    if to.is_float or isinstance(a, Expr):
        return a  # sizes fit every integer dtype they are cast to
    if isinstance(a, Quotient):
        return _toward_zero(a.size, a.by)
    return int(a)


# element by element; all but the last group know what to do with UNKNOWN themselves
ELEMENT: Mapping[str, Rule] = {
    "add": _exact(lambda a, p, b, q: _quotient(a * q + b * p, p * q)),
    "sub": _exact(lambda a, p, b, q: _quotient(a * q - b * p, p * q)),
    "mul": _exact(lambda a, p, b, q: _quotient(a * b, p * q)),
    "div": _exact(_divide),
    "floor_div": _exact(_floor_divide),
    "trunc_div": _exact(_trunc_divide),
    "mod": _exact(_mod),
    "fmod": _exact(_fmod),
    "minimum": _extreme(dim_min),
    "maximum": _extreme(dim_max),
    "relu": lambda a: _extreme(dim_max)(a, 0),
    "less": _compare("lt"),
    "less_equal": _compare("le"),
    "greater": _compare("lt", swapped=True),
    "greater_equal": _compare("le", swapped=True),
    "equal": _equal,
    "not_equal": lambda a, b: _not(_equal(a, b)),
    "logical_and": _logic(operator.and_, decisive=False),
    "logical_or": _logic(operator.or_, decisive=True),
    "logical_xor": _logic(operator.xor),
    "logical_not": _not,
    "where": _choose,
    "floor": _rounded(floordiv, np.floor),
    "ceil": _rounded(ceildiv, np.ceil),
    "trunc": _rounded(_toward_zero, np.trunc),
    "abs": _absolute,
    "neg": lambda a: _exact(lambda x, p, y, q: _quotient(-x, p))(a, 1),
    "sign": _sign,
    "pow": _power,
}
