"""What is known about symbolic sizes before they have values: bounds, order, equality, min and max."""

from __future__ import annotations

import math

from rlx.errors import ShapeError
from rlx.ir.dims.atom import INF, Atom, CeilDiv, DimCall, FloorDiv, Max, Min, Mod, Number, Sym, interval
from rlx.ir.dims.expr import Dim, Expr, floordiv, mod, of_atom, polynomial, sym


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
    kept: list[Dim] = []
    for d in sorted(set(flat), key=lambda d: (isinstance(d, int), str(d))):
        if any(proven_lower((d - other) * sign, 0) >= 0 for other in kept):
            continue
        kept = [other for other in kept if proven_lower((other - d) * sign, 0) < 0]
        kept.append(d)
    return kept[0] if len(kept) == 1 else of_atom(kind(*kept))


# -- bounds


_MAX_TERMS = 8
"""Longer sums are bounded by intervals only: the search through their atoms would grow with their number."""


def proven_lower(d: Dim, enough: Number = INF, depth: int = 2) -> Number:
    """The best lower bound found, or any that is at least `enough`.

    Intervals come first, then what ties an atom to its own arguments: h - ceildiv(h,2) has no lower bound
    by intervals, but ceildiv(h,2) <= (h+1)/2 gives 0.
    """
    if isinstance(d, int):
        return d
    best = d.bounds[0]
    if best >= enough:
        return best
    best = max(best, _shifted_lower(d))
    if depth == 0 or len(d.terms) > _MAX_TERMS:
        return best
    for monomial, c in d.terms:
        atom, power = monomial[0]
        if len(monomial) == 1 and power == 1 and isinstance(atom, DimCall):
            for scale, bound in _relaxations(d - of_atom(atom) * c, atom, c):
                if best >= enough:
                    return best
                low = proven_lower(bound, enough * scale, depth - 1)
                best = max(best, -(-low // scale) if isinstance(low, int) else low)
    return best


def _relaxations(others: Dim, atom: DimCall, c: int) -> list[tuple[int, Dim]]:
    """Pairs (s, e) with s * (others + c * atom) >= e, where e has one atom less."""
    if isinstance(atom, Min if c < 0 else Max):
        return [(1, others + arg * c) for arg in atom.args]
    if isinstance(atom, Mod) and c < 0:  # at most one less than the divisor, and than what is divided
        whole = [(1, others + atom.args[0] * c)] if interval(atom.args[0])[0] >= 0 else []
        return [*whole, (1, others + (atom.args[1] - 1) * c)]
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


def lower_bound(d: Dim) -> int | None:
    """A value that `d` is never below, or None if none was found.

    >>> lower_bound(2 * sym("n", min=1) + 3), lower_bound(-sym("n"))
    (5, None)
    """
    low = proven_lower(d)
    return int(low) if low > -math.inf else None


def upper_bound(d: Dim) -> int | None:
    """A value that `d` is never above, or None if none was found.

    >>> upper_bound(sym("n") % 4), upper_bound(sym("n", max=7) + 1), upper_bound(sym("n"))
    (3, 8, None)
    """
    low = proven_lower(-d)
    return -int(low) if low > -math.inf else None


def known_eq(a: Dim, b: Dim) -> bool | None:
    """True if a == b for all sizes, False if for none, None if that is not known.

    >>> n = sym("n")
    >>> known_eq(n + n, 2 * n), known_eq(n, n + 1), known_eq(n, 3)
    (True, False, None)
    """
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    if a == b:
        return True
    difference = a - b
    if isinstance(difference, int):
        return difference == 0
    if difference.const % math.gcd(*(c for _, c in difference.terms)):
        return False  # for example 2*n - 2*m == 1
    low, high = proven_lower(difference, 1), -proven_lower(-difference, 1)
    if low > 0 or high < 0:
        return False
    if low == high == 0:
        return True
    if any(isinstance(atom, DimCall) for monomial, _ in difference.terms for atom, _ in monomial):
        difference = _one_spelling(difference)
        if isinstance(difference, int):
            return difference == 0
    return None


def _one_spelling(d: Dim) -> Dim:
    """`d` with every atom written in terms of floor division and min alone, each in one way.

    The normal form keeps the spelling that reads best (n%4, ceildiv(n,2), max(n,1)), so identities between
    atoms, such as 4*(n//4) + n%4 = n, escape it. Here they cancel. The result is for comparison only.
    """
    if isinstance(d, int):
        return d
    total: Dim = d.const
    for monomial, c in d.terms:
        product: Dim = c
        for atom, power in monomial:
            product = product * _respelled(atom) ** power
        total = total + product
    return total


def _respelled(atom: Atom) -> Dim:
    if not isinstance(atom, DimCall):
        return of_atom(atom)
    args = [_one_spelling(a) for a in atom.args]
    if isinstance(atom, Min):
        return _min_by_differences(args)
    if isinstance(atom, Max):
        return -_min_by_differences([-a for a in args])
    a, b = args
    if isinstance(atom, FloorDiv):
        return _floor_in_one_way(a, b)
    if isinstance(atom, CeilDiv):
        return _floor_in_one_way(a + b - 1, b)
    return a - b * _floor_in_one_way(a, b)


def _min_by_differences(args: list[Dim]) -> Dim:
    """min(x, y) as x + min(0, y - x), for the x that gives the first text, so shifting all args shifts it."""
    choices = []
    for base in args:
        differences = sorted({a - base for a in args}, key=str)
        choices.append((",".join(map(str, differences)), differences, base))
    _, differences, base = min(choices, key=lambda choice: choice[0])
    return base + of_atom(Min(*differences)) if len(differences) > 1 else base


def _floor_in_one_way(a: Dim, b: Dim) -> Dim:
    """a // b with numbers in [0, b), as itself or as -((b-1-a) // b), whichever has the lower numbers."""
    if isinstance(a, int) or not isinstance(b, int):
        return floordiv(a, b)
    whole, rest = _split_multiples(a, b)
    flipped_whole, flipped_rest = _split_multiples(b - 1 - a, b)
    if isinstance(rest, int) or isinstance(flipped_rest, int):
        return whole if isinstance(rest, int) else -flipped_whole
    if _numbers(flipped_rest) < _numbers(rest):
        return -(flipped_whole + of_atom(FloorDiv(flipped_rest, b)))
    return whole + of_atom(FloorDiv(rest, b))


def _split_multiples(a: Dim, k: int) -> tuple[Dim, Dim]:
    """(q, r) with a = q * k + r and all numbers of r in [0, k)."""
    if isinstance(a, int):
        return divmod(a, k)
    return (
        polynomial({m: c // k for m, c in a.terms}, a.const // k),
        polynomial({m: c % k for m, c in a.terms}, a.const % k),
    )


def _numbers(d: Expr) -> tuple[int, ...]:
    return (*(c for _, c in d.terms), d.const)


def known_le(a: Dim, b: Dim) -> bool | None:
    """True if a <= b for all sizes, False if for none, None if that is not known.

    >>> n = sym("n")
    >>> known_le(n // 2, n), known_le(n + 1, n), known_le(n, 3)
    (True, False, None)
    """
    if isinstance(a, int) and isinstance(b, int):
        return a <= b
    if proven_lower(b - a, 0) >= 0:
        return True
    return False if proven_lower(a - b, 1) > 0 else None


def never_falls(d: Dim, name: str) -> bool:
    """Whether `d` is seen to keep or grow its value when the symbol `name` grows.

    >>> n, m = sym("n"), sym("m")
    >>> never_falls(3 * n * m + n // 2, "n"), never_falls(m - n, "n"), never_falls(n % 4, "n")
    (True, False, False)
    """
    if isinstance(d, int):
        return True
    for monomial, c in d.terms:
        changing = [atom for atom, _ in monomial if _speaks_of(atom, name)]
        if not changing:
            continue
        rises = c > 0 and all(atom.bounds[0] >= 0 for atom, _ in monomial)
        if not rises or not all(_atom_never_falls(atom, name) for atom in changing):
            return False
    return True


def _atom_never_falls(atom: Atom, name: str) -> bool:
    if not isinstance(atom, DimCall):
        return True
    if isinstance(atom, (FloorDiv, CeilDiv)):
        top, divisor = atom.args
        return never_falls(top, name) and not _mentions(divisor, name)
    return isinstance(atom, (Min, Max)) and all(never_falls(a, name) for a in atom.args)


def _speaks_of(atom: Atom, name: str) -> bool:
    if isinstance(atom, Sym):
        return atom.name == name
    return isinstance(atom, DimCall) and any(_mentions(a, name) for a in atom.args)


def _mentions(d: Dim, name: str) -> bool:
    return isinstance(d, Expr) and any(_speaks_of(atom, name) for m, _ in d.terms for atom, _ in m)


def known_lt(a: Dim, b: Dim) -> bool | None:
    """True if a < b for all sizes, False if for none, None if that is not known."""
    return known_le(a + 1, b)


def divides(k: Dim, d: Dim) -> bool | None:
    """True if `d` is a multiple of `k` for all sizes, False if for none, None if that is not known.

    >>> divides(4, 8 * sym("n")), divides(4, 8 * sym("n") + 1), divides(4, sym("n"))
    (True, False, None)
    """
    rest = mod(d, k)
    if isinstance(rest, int):
        return rest == 0
    return False if proven_lower(rest, 1) > 0 else None
