"""The algebra behind `rlx.ir.dim`: polynomials with integer coefficients over atoms, in one normal form.

An atom is a symbol or a floor/ceil division, modulo, min or max of dims. Every constructor function returns
an `int` as soon as the value is constant. Divisors are sizes, so they are taken to be positive.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeAlias

from rlx.errors import ShapeError

INF = math.inf
Number: TypeAlias = "int | float"  # an int, or an infinity as the end of an interval
Interval: TypeAlias = "tuple[Number, Number]"

_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
FUNCTIONS = ("ceildiv", "min", "max")


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

    def __reduce__(self) -> tuple[Any, ...]:
        return Sym, (self.name, self.min, self.max)


class Call(Atom):
    """An atom that is a function of other dims."""

    __slots__ = ("args",)

    def __init__(self, *args: Dim) -> None:
        self.args = args
        super().__init__(self._text(), self._bounds([interval(a) for a in args]))

    def _text(self) -> str:
        raise NotImplementedError

    def _bounds(self, args: list[Interval]) -> Interval:
        raise NotImplementedError

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args


class FloorDiv(Call):
    """args[0] // args[1]; never written where `CeilDiv` needs fewer terms."""

    __slots__ = ()

    def _text(self) -> str:
        return f"{_operand(self.args[0])}//{_operand(self.args[1])}"

    def _bounds(self, args: list[Interval]) -> Interval:
        return _quotient_bounds(args, rounds_up=False)


class CeilDiv(Call):
    """The quotient of args[0] by args[1] rounded up."""

    __slots__ = ()

    def _text(self) -> str:
        return f"ceildiv({self.args[0]},{self.args[1]})"

    def _bounds(self, args: list[Interval]) -> Interval:
        return _quotient_bounds(args, rounds_up=True)


class Mod(Call):
    """args[0] % args[1], never negative."""

    __slots__ = ()

    def _text(self) -> str:
        return f"{_operand(self.args[0])}%{_operand(self.args[1])}"

    def _bounds(self, args: list[Interval]) -> Interval:
        (low, high), (_, divisor) = args
        return 0, min(divisor - 1, high) if low >= 0 else divisor - 1


class Min(Call):
    """The smallest of two or more args: expressions in the order of their texts, then at most one int."""

    __slots__ = ()

    def _text(self) -> str:
        return f"min({','.join(map(str, self.args))})"

    def _bounds(self, args: list[Interval]) -> Interval:
        return min(low for low, _ in args), min(high for _, high in args)


class Max(Call):
    """The greatest of two or more args: expressions in the order of their texts, then at most one int."""

    __slots__ = ()

    def _text(self) -> str:
        return f"max({','.join(map(str, self.args))})"

    def _bounds(self, args: list[Interval]) -> Interval:
        return max(low for low, _ in args), max(high for _, high in args)


Monomial: TypeAlias = tuple[tuple[Atom, int], ...]
Terms: TypeAlias = dict[Monomial, int]


class Expr:
    """A dim that is not constant: `const` plus the sum of coefficient * monomial over `terms`.

    Immutable. `terms` are ordered (highest degree first, then by text), a monomial is a tuple of
    (atom, power) ordered by text; so equal expressions are equal tuples.

    >>> n = sym("n")
    >>> (n + 1) * 2 - 1 == 2 * n + 1, str((4 * n + 3) // 4), n - n
    (True, 'n', 0)
    """

    __slots__ = ("_bounds", "_hash", "_text", "const", "terms")
    __array_ufunc__ = None  # NumPy integers on the left leave the arithmetic to us

    def __init__(self, terms: tuple[tuple[Monomial, int], ...], const: int) -> None:
        self.terms = terms
        self.const = const
        self._hash: int | None = None
        self._text: str | None = None
        self._bounds: Interval | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Expr, (self.terms, self.const)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Expr) and self.const == other.const and self.terms == other.terms

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash((self.terms, self.const))
        return self._hash

    def __str__(self) -> str:
        if self._text is None:
            text = "".join(_term_text(m, c) for m, c in self.terms)
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
            self._bounds = _polynomial_bounds(self.terms, self.const)
        return self._bounds

    def _refuse(self, *_: object) -> NoReturn:
        raise ShapeError(
            f"the size {self} is symbolic, so it has no value yet; bind its symbols first, "
            "or compare with known_eq, known_le or known_lt"
        )

    __bool__ = __int__ = __index__ = __float__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse

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
            return NotImplemented
        return Expr(self.terms, self.const + number) if number else self

    __radd__ = __add__

    def __sub__(self, other: Dim) -> Dim:
        if isinstance(other, Expr):
            return self + -other
        number = _integer(other)
        return NotImplemented if number is None else self + -number

    def __rsub__(self, other: Dim) -> Dim:
        return -self + other

    def __mul__(self, other: Dim) -> Dim:
        if isinstance(other, Expr):
            return _product(self, other)
        number = _integer(other)
        if number is None:
            return NotImplemented
        if number == 1:
            return self
        if number == 0:
            return 0
        return Expr(tuple((m, c * number) for m, c in self.terms), self.const * number)

    __rmul__ = __mul__

    def __pow__(self, power: int) -> Dim:
        number = _integer(power)
        if number is None:
            return NotImplemented
        if number < 0:
            raise ShapeError(f"a size cannot be raised to the negative power {number}")
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
    """The symbol `name` as a dim. Bounds are facts about the symbol: give them wherever it is made.

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


def quote(name: str) -> str:
    """A symbol name as written in text: bare if it is a plain identifier, otherwise in backticks."""
    if _PLAIN_NAME.match(name) and name not in FUNCTIONS:
        return name
    escaped = name.replace("\\", "\\\\").replace("`", "\\`").replace("\n", "\\n").replace("\r", "\\r")
    return f"`{escaped}`"


def interval(d: Dim) -> Interval:
    return (d, d) if isinstance(d, int) else d.bounds


def _binary(function: Callable[[Dim, Dim], Dim], a: Dim, b: Dim) -> Dim:
    left = a if isinstance(a, Expr) else _integer(a)
    right = b if isinstance(b, Expr) else _integer(b)
    return NotImplemented if left is None or right is None else function(left, right)


def _integer(value: object) -> int | None:
    """A Python or NumPy integer as an int, anything else as None."""
    if isinstance(value, int):
        return int(value)
    return int(value.__index__()) if hasattr(value, "__index__") and not isinstance(value, Expr) else None


# -- text


def _term_text(monomial: Monomial, coefficient: int) -> str:
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


def _monomial_order(monomial: Monomial) -> tuple[int, tuple[tuple[str, int], ...]]:
    """Graded lexicographic order: products keep it, which is what makes division of polynomials end."""
    if len(monomial) == 1:
        atom, power = monomial[0]
        return -power, ((atom.text, -power),)
    return -sum(p for _, p in monomial), tuple((a.text, -p) for a, p in monomial)


def _term_order(term: tuple[Monomial, int]) -> tuple[int, tuple[tuple[str, int], ...]]:
    return _monomial_order(term[0])


# -- bounds


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


def _polynomial_bounds(terms: Iterable[tuple[Monomial, int]], const: int) -> Interval:
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


def _quotient_bounds(args: list[Interval], rounds_up: bool) -> Interval:
    (a_low, a_high), (b_low, b_high) = args
    corners = [_quotient(a, b, rounds_up) for a in (a_low, a_high) for b in (max(b_low, 1), max(b_high, 1))]
    return min(corners), max(corners)


def _quotient(a: Number, b: Number, rounds_up: bool) -> Number:
    if isinstance(a, float):
        return a
    if isinstance(b, float):  # an infinite divisor: what the quotient tends to
        return (1 if a > 0 else 0) if rounds_up else (-1 if a < 0 else 0)
    return -(-a // b) if rounds_up else a // b


# -- products and divisions


def _product(a: Expr, b: Expr) -> Dim:
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


def _divide(a: Dim, b: Expr) -> tuple[Dim, Dim]:
    """Polynomials (q, r) with a = q * b + r, taking out of `a` every multiple of the first term of `b`."""
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
    return scale, leftover, _scaled_down(a_terms, shared, common, quotient), _scaled_down(
        b.terms, shared, common, b.const // common
    )


def _scaled_down(terms: Iterable[tuple[Monomial, int]], shared: Monomial, common: int, const: int) -> Dim:
    total: Terms = {}
    for monomial, c in terms:
        ratio = _split(monomial, shared)
        assert ratio is not None, "shared divides every monomial"
        total[ratio] = c // common
    constant = total.pop((), 0)
    return polynomial(total, constant + const)


def floordiv(a: Dim, b: Dim) -> Dim:
    """a // b, simplified."""
    if isinstance(b, int):
        if b == 0:
            raise ShapeError(f"cannot divide the size {a} by 0")
        if isinstance(a, int):
            return a // b
        if b < 0:
            a, b = -a, -b
        if b == 1:
            return a
        whole = polynomial({m: _toward_zero(c, b) for m, c in a.terms}, a.const // b)
        rest: Dim = a - whole * b
    else:
        whole, rest = _divide(a, b)
    return whole + _quotient_of_rest(rest, b)


def _quotient_of_rest(a: Dim, b: Dim) -> Dim:
    """a // b where no multiple of b is left in a to take out."""
    low, high = _quotient_bounds([interval(a), interval(b)], rounds_up=False)
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
        return -floordiv(-a + (b - 1), b)
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
    atom = (a - a.const).atom if isinstance(a - a.const, Expr) else None  # type: ignore[union-attr]
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


# -- smallest and greatest


def dim_min(*dims: Dim) -> Dim:
    """The smallest of some dims.

    >>> dim_min(3, 4), dim_min(sym("n") + 1, sym("n")), dim_min(sym("n"), 512)
    (3, n, min(n,512))
    """
    return _extreme(Min, dims, 1)


def dim_max(*dims: Dim) -> Dim:
    """The greatest of some dims.

    >>> dim_max(sym("n"), 0), dim_max(sym("n"), 1)
    (n, max(n,1))
    """
    return _extreme(Max, dims, -1)


def _extreme(kind: type[Min] | type[Max], dims: tuple[Dim, ...], sign: int) -> Dim:
    if not dims:
        raise ShapeError(f"{kind.__name__.lower()} of no sizes; give at least one")
    if all(isinstance(d, int) for d in dims):
        return min(dims) if sign > 0 else max(dims)
    flat: list[Dim] = []
    for d in dims:
        atom = d.atom if isinstance(d, Expr) else None
        flat.extend(atom.args if isinstance(atom, kind) else (d,))
    ordered = sorted(set(flat), key=lambda d: (isinstance(d, int), str(d)))
    kept: list[Dim] = []
    for d in ordered:
        if any(proven_lower((d - other) * sign) >= 0 for other in kept):
            continue
        kept = [other for other in kept if proven_lower((other - d) * sign) < 0]
        kept.append(d)
    return kept[0] if len(kept) == 1 else of_atom(kind(*kept))


# -- sharper bounds


def proven_lower(d: Dim, depth: int = 2) -> Number:
    """The best lower bound found: intervals first, then what ties an atom to its own arguments.

    For example h - ceildiv(h,2) has no lower bound by intervals, but ceildiv(h,2) <= (h+1)/2 gives 0.
    """
    if isinstance(d, int):
        return d
    best = d.bounds[0]
    if best > -INF:
        return best
    best = _shifted_lower(d)
    if depth and len(d.terms) <= 8:
        for monomial, c in d.terms:
            atom, power = monomial[0]
            if len(monomial) == 1 and power == 1 and isinstance(atom, Call):
                for scale, bound in _relaxations(d - of_atom(atom) * c, atom, c):
                    low = proven_lower(bound, depth - 1)
                    best = max(best, -(-low // scale) if isinstance(low, int) else low)
    return best


def _relaxations(others: Dim, atom: Call, c: int) -> list[tuple[int, Dim]]:
    """Pairs (s, e) with s * (others + c * atom) >= e, where e has one atom less."""
    if isinstance(atom, Min if c < 0 else Max):
        return [(1, others + arg * c) for arg in atom.args]
    if isinstance(atom, Mod) and c < 0 and interval(atom.args[0])[0] >= 0:
        return [(1, others + atom.args[0] * c)]
    if isinstance(atom, (FloorDiv, CeilDiv)) and isinstance(atom.args[1], int):
        x, k = atom.args[0], atom.args[1]
        if isinstance(atom, FloorDiv):
            x = x if c < 0 else x - (k - 1)
        else:
            x = x + (k - 1) if c < 0 else x
        return [(k, others * k + x * c)]
    return []


def _shifted_lower(d: Expr) -> Number:
    """The lower bound after writing every atom as its minimum plus something >= 0.

    Shows for example that n*m - n >= 0 for m >= 1.
    """
    if all(len(m) == 1 and m[0][1] == 1 for m, _ in d.terms):
        return d.bounds[0]
    shifted: Dim = d.const
    slack: dict[Atom, Expr] = {}
    for monomial, c in d.terms:
        product: Dim = c
        for atom, power in monomial:
            low, high = atom.bounds
            if not isinstance(low, int):
                return -INF
            if atom not in slack:
                slack[atom] = sym(atom.text, 0, None if isinstance(high, float) else high - low)
            product = product * (slack[atom] + low) ** power
        shifted = shifted + product
    return interval(shifted)[0]
