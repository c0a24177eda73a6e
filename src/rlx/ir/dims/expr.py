"""The algebra behind `rlx.ir.dim`: polynomials with integer coefficients over atoms, in one normal form.

Every function returns an `int` as soon as the value is constant. Divisors are sizes: taken to be positive.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from typing import TypeAlias

import numpy as np

from rlx.errors import ShapeError
from rlx.ir.dims.atom import (
    INF,
    Atom,
    CeilDiv,
    FloorDiv,
    Interval,
    Mod,
    Monomial,
    Sym,
    interval,
    polynomial_bounds,
    quotient_bounds,
    term_text,
)
from rlx.ir.dims.read import COMPARABLE, READER, Readable, asked_by_user, equals

Terms: TypeAlias = dict[Monomial, int]

_MAX_TERMS = 10_000
"""No model has such sizes, but a hostile text can: (a+b)*(c+d)*... doubles with every factor."""


class Expr(Readable):
    """A dim that is not constant: `const` plus the sum of coefficient * monomial over `terms`.

    Immutable. `terms` are ordered (highest degree first, then by text), a monomial is a tuple of
    (atom, power) ordered by text; so equal expressions are equal tuples.

    >>> n = sym("n")
    >>> (n + 1) * 2 - 1 == 2 * n + 1, str((4 * n + 3) // 4), n - n
    (True, 'n', 0)
    """

    __slots__ = ("_bounds", "_hash", "_text", "const", "terms")

    def __init__(self, terms: tuple[tuple[Monomial, int], ...], const: int) -> None:
        self.terms = terms
        self.const = const
        self._hash: int | None = None
        self._text: str | None = None
        self._bounds: Interval | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return Expr, (self.terms, self.const)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if isinstance(other, Expr) and self.const == other.const and self.terms == other.terms:
            return True
        if not isinstance(other, COMPARABLE):
            return NotImplemented  # the other side may be a traced value, which compares elementwise
        reader = asked_by_user()
        return reader is not None and equals(self, other, reader)

    def __hash__(self) -> int:
        reader = asked_by_user()
        if reader is not None:  # a key of the user's dict or set: found where the number would be
            return hash(reader.read(self))
        if self._hash is None:
            self._hash = hash((self.terms, self.const))
        return self._hash

    def __str__(self) -> str:
        if self._text is None:
            text = "".join(term_text(m, c) for m, c in self.terms)
            self._text = text.removeprefix("+") + (f"{self.const:+d}" if self.const else "")
        return self._text

    def __repr__(self) -> str:
        return str(self)

    @property
    def atom(self) -> Atom | None:
        """The atom, if this expression is nothing but one atom."""
        if self.const == 0 and len(self.terms) == 1:
            monomial, coefficient = self.terms[0]
            if coefficient == 1 and len(monomial) == 1 and monomial[0][1] == 1:
                return monomial[0][0]
        return None

    @property
    def bounds(self) -> Interval:
        """An interval that holds every value, from the intervals of the atoms."""
        if self._bounds is None:
            self._bounds = polynomial_bounds(self.terms, self.const)
        return self._bounds

    def __neg__(self) -> Expr:
        return Expr(tuple((m, -c) for m, c in self.terms), -self.const)

    def __pos__(self) -> Expr:
        return self

    def __add__(self, other: Dim) -> Dim:
        if isinstance(other, Expr):
            total = dict(self.terms)
            for monomial, c in other.terms:
                total[monomial] = total.get(monomial, 0) + c
            return polynomial(total, self.const + other.const)
        number = _integer(other)
        if number is None:
            return self._real_arithmetic(operator.add, other)
        return Expr(self.terms, self.const + number) if number else self

    __radd__ = __add__

    def __sub__(self, other: Dim) -> Dim:
        if isinstance(other, Expr):
            return self + -other
        number = _integer(other)
        return self._real_arithmetic(operator.sub, other) if number is None else self + -number

    def __rsub__(self, other: Dim) -> Dim:
        return -self + other

    def __mul__(self, other: Dim) -> Dim:
        if isinstance(other, Expr):
            return _product(self, other)
        number = _integer(other)
        if number is None:
            return self._real_arithmetic(operator.mul, other)
        if number == 1:
            return self
        if number == 0:
            return 0
        return Expr(tuple((m, c * number) for m, c in self.terms), self.const * number)

    __rmul__ = __mul__

    def __pow__(self, power: int) -> Dim:
        number = _integer(power)
        if number is not None and number < 0 and READER.get() is None:
            raise ShapeError(f"a size cannot be raised to the negative power {number}")
        if number is None or number < 0:
            return self._real_arithmetic(operator.pow, power)
        result: Dim = 1
        for _ in range(number):
            result = result * self
        return result

    def __floordiv__(self, other: Dim) -> Dim:
        return _binary(floordiv, self, other)

    def __rfloordiv__(self, other: Dim) -> Dim:
        return _binary(floordiv, other, self)

    def __mod__(self, other: Dim) -> Dim:
        return _binary(mod, self, other)

    def __rmod__(self, other: Dim) -> Dim:
        return _binary(mod, other, self)


Dim: TypeAlias = int | Expr


def sym(name: str, min: int = 0, max: int | None = None) -> Expr:
    """The symbol `name` as a dim. Bounds are facts about the symbol: give them wherever it is created.

    >>> sym("seq"), sym("batch size") + 1
    (seq, `batch size`+1)
    """
    return of_atom(Sym(name, min, max))


def of_atom(atom: Atom) -> Expr:
    return Expr(((((atom, 1),), 1),), 0)


def polynomial(terms: Terms, const: int) -> Dim:
    """The normal form of a sum given as {monomial: coefficient} plus a constant."""
    kept = [item for item in terms.items() if item[1]]
    if not kept:
        return const
    if len(kept) > 1:
        kept.sort(key=_term_order)
    return Expr(tuple(kept), const)


def _binary(function: Callable[[Dim, Dim], Dim], a: Dim, b: Dim) -> Dim:
    left = a if isinstance(a, Expr) else _integer(a)
    right = b if isinstance(b, Expr) else _integer(b)
    if left is not None and right is not None:
        return function(left, right)
    calculate = operator.floordiv if function is floordiv else operator.mod
    if isinstance(a, Expr):
        return a._real_arithmetic(calculate, b)
    return b._real_arithmetic(calculate, a, swap=True) if isinstance(b, Expr) else NotImplemented


def _integer(value: object) -> int | None:
    """A Python or NumPy integer as an int, anything else as None."""
    if isinstance(value, int):
        return int(value)
    return (
        int(value.__index__())
        if hasattr(value, "__index__") and not isinstance(value, (Expr, np.ndarray))
        else None
    )


def _monomial_order(monomial: Monomial) -> tuple[int, tuple[tuple[str, int], ...]]:
    """Graded lexicographic order: products keep it, so division of polynomials ends."""
    if len(monomial) == 1:
        atom, power = monomial[0]
        return -power, ((atom.text, -power),)
    return -sum(p for _, p in monomial), tuple((a.text, -p) for a, p in monomial)


def _term_order(term: tuple[Monomial, int]) -> tuple[int, tuple[tuple[str, int], ...]]:
    return _monomial_order(term[0])


# -- products and divisions


def _product(a: Expr, b: Expr) -> Dim:
    if len(a.terms) * len(b.terms) > _MAX_TERMS:
        raise ShapeError(f"a product of sizes would have more than {_MAX_TERMS} terms; simplify the shapes")
    total: Terms = {}
    factors = [*b.terms, ((), b.const)] if b.const else list(b.terms)
    for x, c in [*a.terms, ((), a.const)] if a.const else list(a.terms):
        for y, e in factors:
            monomial = _join(x, y)
            total[monomial] = total.get(monomial, 0) + c * e
    const = total.pop((), 0)
    return polynomial(total, const)


def _join(x: Monomial, y: Monomial) -> Monomial:
    if not x or not y:
        return x or y
    powers = dict(x)
    for atom, power in y:
        powers[atom] = powers.get(atom, 0) + power
    return tuple(sorted(powers.items(), key=lambda item: item[0].text))


def _split(x: Monomial, y: Monomial) -> Monomial | None:
    """x / y, or None if y does not divide x."""
    powers = dict(x)
    for atom, power in y:
        left = powers.get(atom, 0) - power
        if left < 0:
            return None
        powers[atom] = left
    return tuple(item for item in powers.items() if item[1])


def _toward_zero(a: int, b: int) -> int:
    return a // b if (a < 0) == (b < 0) else -(-a // b)


def _divide(a: Dim, b: Dim) -> tuple[Dim, Dim]:
    """Polynomials (q, r) with a = q * b + r, taking out of `a` every multiple of the first term of `b`."""
    if isinstance(b, int):
        if isinstance(a, int):
            return divmod(a, b)
        if 0 <= a.const < b and all(-b < c < b for _, c in a.terms):
            return 0, a
        whole = polynomial({m: _toward_zero(c, b) for m, c in a.terms}, a.const // b)
        return whole, a - whole * b
    if isinstance(a, int):
        return 0, a
    lead, lead_coefficient = b.terms[0]
    work: Terms = dict(a.terms)
    const = a.const
    rest: Terms = {}
    quotient: Dim = 0
    while work:
        monomial = min(work, key=_monomial_order)
        c = work.pop(monomial)
        ratio = _split(monomial, lead)
        q = 0 if ratio is None else _toward_zero(c, lead_coefficient)
        if c - q * lead_coefficient:
            rest[monomial] = c - q * lead_coefficient
        if ratio is None or q == 0:
            continue
        quotient = quotient + (Expr(((ratio, q),), 0) if ratio else q)
        for m, e in b.terms[1:]:
            shifted = _join(ratio, m)
            work[shifted] = work.get(shifted, 0) - q * e
        if ratio:
            work[ratio] = work.get(ratio, 0) - q * b.const
        else:
            const -= q * b.const
    return quotient, polynomial(rest, const)


def _cancel(a: Dim, b: Expr) -> tuple[Dim, int, Dim, Dim]:
    """Take out what a and b share: (s, t, a', b') with a = s * a' + t, b = s * b' and 0 <= t < s."""
    a_terms = () if isinstance(a, int) else a.terms
    a_const = a if isinstance(a, int) else a.const
    common = math.gcd(b.const, *(c for _, c in b.terms), *(c for _, c in a_terms))
    shared: Monomial = ()
    if a_const == 0 and b.const == 0:
        powers = dict(b.terms[0][0])
        for monomial, _ in (*b.terms, *a_terms):
            found = dict(monomial)
            powers = {atom: min(power, found.get(atom, 0)) for atom, power in powers.items()}
        shared = tuple(item for item in powers.items() if item[1])
    if common == 1 and not shared:
        return 1, 0, a, b
    scale: Dim = Expr(((shared, common),), 0) if shared else common
    quotient, leftover = divmod(a_const, common)
    return (
        scale,
        leftover,
        _scaled_down(a_terms, shared, common, quotient),
        _scaled_down(b.terms, shared, common, b.const // common),
    )


def _scaled_down(terms: Iterable[tuple[Monomial, int]], shared: Monomial, common: int, const: int) -> Dim:
    total: Terms = {}
    for monomial, c in terms:
        ratio = _split(monomial, shared)
        assert ratio is not None, "shared divides every monomial"
        total[ratio] = c // common
    constant = total.pop((), 0)
    return polynomial(total, constant + const)


def reduced_equality(a: Dim, b: Dim) -> tuple[Dim, Dim]:
    """The same equality without what both sides share.

    >>> n, m = sym("n", 1), sym("m", 1)
    >>> reduced_equality(3 * n * m, 3 * m * m), reduced_equality(2 * n + 4, 10)
    ((n, m), (3, n))
    """
    if isinstance(b, int):
        a, b = b, a
    if isinstance(b, int):
        return a, b
    a, b = a - b.const, b - b.const
    assert isinstance(b, Expr)
    scale, leftover, a_left, b_left = _cancel(a, b)
    positive = scale if isinstance(scale, int) else scale.bounds[0]
    return (a_left, b_left) if not leftover and positive >= 1 else (a, b)


def floordiv(a: Dim, b: Dim) -> Dim:
    """a // b, simplified."""
    if isinstance(b, int):
        if b == 0:
            raise ShapeError(f"cannot divide the size {a} by 0")
        if isinstance(a, int):
            return a // b
        if b < 0:
            a, b = -a, -b
    whole, rest = _divide(a, b)
    return whole + _quotient_of_rest(rest, b)


def _quotient_of_rest(a: Dim, b: Dim) -> Dim:
    """a // b where no multiple of b is left in a to take out."""
    low, high = quotient_bounds([interval(a), interval(b)], rounds_up=False)
    if low == high:
        assert isinstance(low, int)
        return low
    if isinstance(b, int):
        assert isinstance(a, Expr), "an int is less than b, so its quotient is constant"
        common = math.gcd(b, *(c for _, c in a.terms))
        if common > 1:
            return floordiv(_scaled_down(a.terms, (), common, a.const // common), b // common)
    else:
        scale, _, a_left, b_left = _cancel(a, b)
        if scale != 1:
            return floordiv(a_left, b_left)
    if _is_negative(a):
        whole, rest = _divide(-a + (b - 1), b)
        if not _is_negative(rest):
            return -(whole + _quotient_of_rest(rest, b))
    inner = _inner_division(a)
    if inner is not None:
        numerator, divisor = inner
        return floordiv(numerator, divisor * b)
    const = a if isinstance(a, int) else a.const
    if isinstance(b, int):
        if const == b - 1:
            return of_atom(CeilDiv(a - const, b))
    elif const == -1:
        return of_atom(CeilDiv(a + 1, b)) - 1
    return of_atom(FloorDiv(a, b))


def _is_negative(a: Dim) -> bool:
    """Whether the normal form is about -a: true for exactly one of a and -a (constants aside)."""
    if isinstance(a, int):
        return a < 0
    negative = sum(c < 0 for _, c in a.terms)
    positive = len(a.terms) - negative
    return negative > positive or (negative == positive and a.terms[0][1] < 0)


def _inner_division(a: Dim) -> tuple[Dim, Dim] | None:
    """If a is x // y + const: (x + const * y, y), so that a // b = (x + const * y) // (y * b)."""
    if isinstance(a, int):
        return None
    atom = Expr(a.terms, 0).atom
    if isinstance(atom, FloorDiv):
        return atom.args[0] + a.const * atom.args[1], atom.args[1]
    if isinstance(atom, CeilDiv):
        return atom.args[0] + (a.const + 1) * atom.args[1] - 1, atom.args[1]
    return None


def ceildiv(a: Dim, b: Dim) -> Dim:
    """a / b rounded up.

    >>> ceildiv(7, 2), ceildiv(sym("h"), 2), ceildiv(sym("h"), 2) == (sym("h") + 1) // 2
    (4, ceildiv(h,2), True)
    """
    if isinstance(b, int):
        if b == 0:
            raise ShapeError(f"cannot divide the size {a} by 0")
        if isinstance(a, int):
            return -(-a // b)
        if b < 0:
            a, b = -a, -b
    return floordiv(a + (b - 1), b)


def mod(a: Dim, b: Dim) -> Dim:
    """a % b, simplified."""
    if isinstance(b, int):
        if b == 0:
            raise ShapeError(f"cannot take the size {a} modulo 0")
        if isinstance(a, int):
            return a % b
        if b < 0:
            return -mod(-a, -b)
    low, high = interval(a)
    if low >= 0 and high < max(1, interval(b)[0]):
        return a
    if isinstance(b, int):
        return _mod_int(a, b)
    rest = _divide(a, b)[1]
    if rest != a:
        return mod(rest, b)
    scale, leftover, a_left, b_left = _cancel(a, b)
    if scale != 1:
        return scale * mod(a_left, b_left) + leftover
    return of_atom(Mod(a, b))


def _mod_int(a: Dim, k: int) -> Dim:
    if isinstance(a, int):
        return a % k
    total: Dim = a.const % k
    for monomial, c in a.terms:
        c -= k * -((k - 2 * c) // (2 * k))  # the nearest multiple of k: -k/2 < c <= k/2
        atom = monomial[0][0]
        if len(monomial) == 1 and monomial[0][1] == 1 and isinstance(atom, Mod) and c:
            x, m = atom.args
            if isinstance(m, int) and c * m % k == 0:  # c*(x % m) and c*x differ by a multiple of k
                return mod(a - of_atom(atom) * c + x * c, k)
        if c:
            total = total + Expr(((monomial, c),), 0)
    if isinstance(total, int):
        return total % k
    common = math.gcd(k, *(c for _, c in total.terms))
    if common > 1:
        quotient, leftover = divmod(total.const, common)
        return mod(_scaled_down(total.terms, (), common, quotient), k // common) * common + leftover
    low, high = total.bounds
    if low > -INF and high < INF and low // k == high // k:
        return total - k * int(low // k)
    return of_atom(Mod(total, k))
