"""Atoms of symbolic sizes: symbols, and divisions, modulo, min and max of sizes; their text and bounds."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

from rlx.errors import ShapeError

if TYPE_CHECKING:
    from rlx.ir.dims.expr import Dim

INF = math.inf
Number: TypeAlias = int | float
"""An int, or an infinity as the end of an interval."""
Interval: TypeAlias = tuple[Number, Number]

_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_FUNCTION_NAMES = ("ceildiv", "min", "max")


class Atom:
    """An indivisible factor. Two atoms are equal if their texts are: a symbol is known by its name alone."""

    __slots__ = ("_hash", "bounds", "text")

    def __init__(self, text: str, bounds: Interval) -> None:
        self.text = text
        self.bounds = bounds
        self._hash = hash(text)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Atom) and self.text == other.text)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return self.text


class Sym(Atom):
    """A size known at run time, at least `min` and, if `max` is given, at most that."""

    __slots__ = ("max", "min", "name")

    def __init__(self, name: str, min: int = 0, max: int | None = None) -> None:
        if not isinstance(name, str) or not name:
            raise ShapeError(f"a symbol needs a non-empty name, got {name!r}")
        if min < 0 or (max is not None and max < min):
            raise ShapeError(f"symbol {name} needs 0 <= min <= max, got min={min}, max={max}")
        self.name, self.min, self.max = name, min, max
        super().__init__(quote(name), (min, INF if max is None else max))

    def __reduce__(self) -> tuple[object, ...]:
        return Sym, (self.name, self.min, self.max)


class DimCall(Atom):
    """An atom that is a function of other dims."""

    __slots__ = ("args",)

    def __init__(self, *args: Dim) -> None:
        self.args = args
        super().__init__(self._text(), self._bounds([interval(a) for a in args]))

    def _text(self) -> str:
        raise NotImplementedError

    def _bounds(self, args: list[Interval]) -> Interval:
        raise NotImplementedError

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), self.args


class FloorDiv(DimCall):
    """args[0] // args[1]; never written where `CeilDiv` needs fewer terms."""

    __slots__ = ()

    def _text(self) -> str:
        return f"{_operand(self.args[0])}//{_operand(self.args[1])}"

    def _bounds(self, args: list[Interval]) -> Interval:
        return quotient_bounds(args, rounds_up=False)


class CeilDiv(DimCall):
    """The quotient of args[0] by args[1] rounded up."""

    __slots__ = ()

    def _text(self) -> str:
        return f"ceildiv({self.args[0]},{self.args[1]})"

    def _bounds(self, args: list[Interval]) -> Interval:
        return quotient_bounds(args, rounds_up=True)


class Mod(DimCall):
    """args[0] % args[1], never negative."""

    __slots__ = ()

    def _text(self) -> str:
        return f"{_operand(self.args[0])}%{_operand(self.args[1])}"

    def _bounds(self, args: list[Interval]) -> Interval:
        (low, high), (_, divisor) = args
        return 0, min(divisor - 1, high) if low >= 0 else divisor - 1


class Min(DimCall):
    """The smallest of two or more args: expressions in the order of their texts, then at most one int."""

    __slots__ = ()

    def _text(self) -> str:
        return f"min({','.join(map(str, self.args))})"

    def _bounds(self, args: list[Interval]) -> Interval:
        return min(low for low, _ in args), min(high for _, high in args)


class Max(DimCall):
    """The greatest of two or more args: expressions in the order of their texts, then at most one int."""

    __slots__ = ()

    def _text(self) -> str:
        return f"max({','.join(map(str, self.args))})"

    def _bounds(self, args: list[Interval]) -> Interval:
        return max(low for low, _ in args), max(high for _, high in args)


Monomial: TypeAlias = tuple[tuple[Atom, int], ...]
"""A product of powers of atoms, ordered by the texts of the atoms."""


# -- text


def quote(name: str) -> str:
    """A symbol name as written in text: bare if it is a plain identifier, otherwise in backticks."""
    if _PLAIN_NAME.match(name) and name not in _FUNCTION_NAMES:
        return name
    escaped = name.replace("\\", "\\\\").replace("`", "\\`").replace("\n", "\\n").replace("\r", "\\r")
    return f"`{escaped}`"


def term_text(monomial: Monomial, coefficient: int) -> str:
    sign = "-" if coefficient < 0 else "+"
    size = abs(coefficient)
    alone = coefficient == 1 and len(monomial) == 1 and monomial[0][1] == 1
    if alone:
        return sign + monomial[0][0].text
    factors = [_factor(atom) + (f"**{power}" if power > 1 else "") for atom, power in monomial]
    return sign + "*".join(factors if size == 1 else [str(size), *factors])


def _factor(atom: Atom) -> str:
    return f"({atom.text})" if isinstance(atom, (FloorDiv, Mod)) else atom.text


def _operand(d: Dim) -> str:
    if isinstance(d, int):
        return str(d) if d >= 0 else f"({d})"
    return f"({d})" if d.atom is None else _factor(d.atom)


# -- bounds


def interval(d: Dim) -> Interval:
    return (d, d) if isinstance(d, int) else d.bounds


def _scale(x: Number, y: Number) -> Number:
    """x * y where 0 * infinity is 0 and no int is ever turned into a float."""
    if x == 0 or y == 0:
        return 0
    if isinstance(x, int) and isinstance(y, int):
        return x * y
    return INF if (x > 0) == (y > 0) else -INF


def _monomial_bounds(factors: Iterable[tuple[Interval, int]]) -> Interval:
    low: Number = 1
    high: Number = 1
    for (a, b), power in factors:
        for _ in range(power):
            corners = (_scale(low, a), _scale(low, b), _scale(high, a), _scale(high, b))
            low, high = min(corners), max(corners)
    return low, high


def polynomial_bounds(terms: Iterable[tuple[Monomial, int]], const: int) -> Interval:
    low: Number = const
    high: Number = const
    for monomial, c in terms:
        if len(monomial) == 1 and monomial[0][1] == 1:
            a, b = monomial[0][0].bounds
        else:
            a, b = _monomial_bounds((atom.bounds, power) for atom, power in monomial)
        if c < 0:
            a, b = b, a
        low, high = low + _scale(a, c), high + _scale(b, c)
    return low, high


def quotient_bounds(args: list[Interval], rounds_up: bool) -> Interval:
    (a_low, a_high), (b_low, b_high) = args
    corners = [_quotient(a, b, rounds_up) for a in (a_low, a_high) for b in (max(b_low, 1), max(b_high, 1))]
    return min(corners), max(corners)


def _quotient(a: Number, b: Number, rounds_up: bool) -> Number:
    if isinstance(a, float):
        return a
    if isinstance(b, float):  # an infinite divisor: what the quotient tends to
        return (1 if a > 0 else 0) if rounds_up else (-1 if a < 0 else 0)
    return -(-a // b) if rounds_up else a // b
