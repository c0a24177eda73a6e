"""Symbolic sizes. A `Dim` is an `int` or an `Expr` in normal form; equal expressions compare and hash equal.

>>> seq = sym("seq")
>>> str((2 * seq + 1) * 3), (4 * seq) // 4 == seq, str(parse_dim("ceildiv(seq,2)") - 1)
('6*seq+3', True, 'ceildiv(seq,2)-1')
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rlx.errors import ShapeError
from rlx.ir.dims.atom import Atom, CeilDiv, DimCall, FloorDiv, Max, Min, Mod, Sym
from rlx.ir.dims.bounds import (
    dim_max,
    dim_min,
    divides,
    known_eq,
    known_le,
    known_lt,
    lower_bound,
    never_falls,
    upper_bound,
)
from rlx.ir.dims.expr import Dim, Expr, ceildiv, floordiv, mod, of_atom, sym
from rlx.ir.dims.text import parse_dim
from rlx.records import dataclass

__all__ = [
    "Atom",
    "CeilDiv",
    "Constraint",
    "Dim",
    "DimCall",
    "Expr",
    "FloorDiv",
    "Max",
    "Min",
    "Mod",
    "Sym",
    "ceildiv",
    "compile_dims",
    "dim_max",
    "dim_min",
    "divides",
    "evaluate",
    "floordiv",
    "known_eq",
    "known_le",
    "known_lt",
    "lower_bound",
    "mod",
    "never_falls",
    "parse_dim",
    "substitute",
    "sym",
    "symbols",
    "upper_bound",
]


# -- symbols and values


def symbols(d: Dim) -> tuple[str, ...]:
    """Names of the symbols in `d`, sorted.

    >>> symbols(sym("b") * (sym("a") // 2)), symbols(3)
    (('a', 'b'), ())
    """
    if isinstance(d, int):
        return ()
    found: set[str] = set()
    _collect(d, found)
    return tuple(sorted(found))


def _collect(d: Dim, found: set[str]) -> None:
    if isinstance(d, int):
        return
    for monomial, _ in d.terms:
        for atom, _ in monomial:
            if isinstance(atom, Sym):
                found.add(atom.name)
            elif isinstance(atom, DimCall):
                for arg in atom.args:
                    _collect(arg, found)


def evaluate(d: Dim, binding: Mapping[str, int]) -> int:
    """The value of `d` with each symbol replaced by its size.

    >>> evaluate(sym("seq") // 2 + 1, {"seq": 9})
    5
    """
    if isinstance(d, int):
        return d
    total = d.const
    for monomial, c in d.terms:
        for atom, power in monomial:
            c *= _atom_value(atom, binding) ** power
        total += c
    return total


def _atom_value(atom: Atom, binding: Mapping[str, int]) -> int:
    if isinstance(atom, Sym):
        if atom.name not in binding:
            raise ShapeError(f"symbol {atom.text} has no size; give one, for example {{{atom.name!r}: 128}}")
        return binding[atom.name]
    assert isinstance(atom, DimCall)
    args = [evaluate(a, binding) for a in atom.args]
    if isinstance(atom, (Min, Max)):
        return min(args) if isinstance(atom, Min) else max(args)
    a, b = args
    b = _positive(b, atom.text)
    return a // b if isinstance(atom, FloorDiv) else a % b if isinstance(atom, Mod) else -(-a // b)


def _positive(divisor: int, text: str) -> int:
    if divisor <= 0:
        raise ShapeError(f"the divisor of {text} must be positive, but these sizes make it {divisor}")
    return divisor


def substitute(d: Dim, mapping: Mapping[str, Dim]) -> Dim:
    """`d` with some symbols replaced by dims, simplified again.

    >>> substitute(sym("a") + sym("b"), {"a": 3 * sym("b")})
    4*b
    """
    if isinstance(d, int) or mapping.keys().isdisjoint(symbols(d)):
        return d
    total: Dim = d.const
    for monomial, c in d.terms:
        product: Dim = c
        for atom, power in monomial:
            product = product * _replaced(atom, mapping) ** power
        total = total + product
    return total


def _replaced(atom: Atom, mapping: Mapping[str, Dim]) -> Dim:
    if isinstance(atom, Sym):
        return mapping.get(atom.name, of_atom(atom))
    assert isinstance(atom, DimCall)
    return _BUILD[type(atom)](*(substitute(a, mapping) for a in atom.args))


_BUILD: Mapping[type[DimCall], Callable[..., Dim]] = {
    FloorDiv: floordiv,
    CeilDiv: ceildiv,
    Mod: mod,
    Min: dim_min,
    Max: dim_max,
}


# -- assumptions


@dataclass(frozen=True, slots=True)
class Constraint:
    """A fact about sizes that a graph assumes: proved, refuted, or checked when the sizes are known.

    >>> c = Constraint("multiple", sym("seq"), 4, ("model.py:3",))
    >>> c.check({"seq": 8}), c.describe()
    (True, 'seq is a multiple of 4')
    """

    kind: str
    """"eq": lhs == rhs; "ne": lhs != rhs; "multiple": lhs is a multiple of rhs; "min": lhs >= rhs."""
    lhs: Dim
    rhs: Dim
    where: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in _CONSTRAINT_WORDS:
            raise ShapeError(f"unknown constraint kind {self.kind!r}; use {', '.join(_CONSTRAINT_WORDS)}")

    def known(self) -> bool | None:
        """True if it always holds, False if never, None if it depends on the sizes."""
        if self.kind in ("eq", "ne"):
            equal = known_eq(self.lhs, self.rhs)
            return equal if self.kind == "eq" or equal is None else not equal
        return divides(self.rhs, self.lhs) if self.kind == "multiple" else known_le(self.rhs, self.lhs)

    def check(self, binding: Mapping[str, int]) -> bool:
        """Whether it holds for these sizes."""
        left, right = evaluate(self.lhs, binding), evaluate(self.rhs, binding)
        if self.kind in ("eq", "ne"):
            return (left == right) is (self.kind == "eq")
        return left % _positive(right, self.describe()) == 0 if self.kind == "multiple" else left >= right

    @property
    def symbols(self) -> list[str]:
        """Symbols of both sides, sorted."""
        return sorted({*symbols(self.lhs), *symbols(self.rhs)})

    def describe(self) -> str:
        """What it says, for people."""
        stretched = _stretched(self.lhs) if self.kind == "eq" and self.rhs == 0 else None
        if stretched is not None:
            return "{} is 1 or {}".format(*stretched)
        return f"{self.lhs} {_CONSTRAINT_WORDS[self.kind]} {self.rhs}"


def _stretched(d: Dim) -> tuple[Dim, Dim] | None:
    """(w, h) if the size is (w - 1) * (h - w), which is 0 where w stretches to h.

    >>> w = sym("w")
    >>> _stretched((w - 1) * (3 - w)), _stretched(w * w - 4)
    ((w, 3), None)
    """
    for monomial, coefficient in d.terms if isinstance(d, Expr) else ():
        if coefficient == -1 and len(monomial) == 1 and monomial[0][1] == 2:
            w = of_atom(monomial[0][0])
            for name in symbols(w):
                h = -1 * substitute(d, {name: 0})
                if (w - 1) * (h - w) == d:
                    return w, h
    return None


_CONSTRAINT_WORDS = {
    "eq": "equals",
    "ne": "differs from",
    "multiple": "is a multiple of",
    "min": "is at least",
}


# -- many at once


def compile_dims(exprs: Sequence[Dim], names: Sequence[str]) -> Callable[[Sequence[int]], tuple[int, ...]]:
    """One generated function from the sizes of `names`, in that order, to the values of all `exprs`.

    Equal atoms and equal expressions are computed once.

    >>> n, m = sym("n"), sym("m")
    >>> compile_dims([n * m, n // 2, 7], ["m", "n"])([3, 10])
    (30, 5, 7)
    """
    return _Generator(names).function(exprs)


class _Generator:
    """Writes straight-line Python: one assignment per distinct atom and expression."""

    def __init__(self, names: Sequence[str]) -> None:
        self.slots = {name: f"s{i}" for i, name in enumerate(names)}
        self.lines: list[str] = []
        self.known: dict[Atom | Expr, str] = {}

    def function(self, exprs: Sequence[Dim]) -> Callable[[Sequence[int]], tuple[int, ...]]:
        results = [self.dim(d) for d in exprs]
        body = [f"    {', '.join(self.slots.values())}, = sizes" if self.slots else "    pass", *self.lines]
        body.append(f"    return ({', '.join(results)}{',' if results else ''})")
        source = "def evaluate_dims(sizes):\n    if len(sizes) != count: refuse(sizes)\n" + "\n".join(body)
        scope: dict[str, object] = {"count": len(self.slots), "refuse": self._refuse, "positive": _positive}
        exec(compile(source, "<rlx sizes>", "exec"), scope)
        return scope["evaluate_dims"]  # type: ignore[return-value]

    def _refuse(self, sizes: Sequence[int]) -> None:
        raise ShapeError(f"expected {len(self.slots)} sizes ({', '.join(self.slots)}), got {len(sizes)}")

    def assign(self, key: Atom | Expr, code: str) -> str:
        name = f"t{len(self.known)}"
        self.lines.append(f"    {name} = {code}")
        self.known[key] = name
        return name

    def dim(self, d: Dim) -> str:
        if isinstance(d, int):
            return str(d) if d >= 0 else f"({d})"
        if d.atom is not None:
            return self.atom(d.atom)
        if d in self.known:
            return self.known[d]
        parts = [] if d.const == 0 else [str(d.const)]
        for monomial, c in d.terms:
            factors = [self.atom(a) + (f"**{p}" if p > 1 else "") for a, p in monomial]
            parts.append("*".join(factors if c == 1 else [str(c), *factors]))
        return self.assign(d, " + ".join(parts))

    def atom(self, atom: Atom) -> str:
        if isinstance(atom, Sym):
            if atom.name not in self.slots:
                given = ", ".join(self.slots) or "none"
                raise ShapeError(f"symbol {atom.text} is not among the names given ({given}); add it")
            return self.slots[atom.name]
        if atom in self.known:
            return self.known[atom]
        assert isinstance(atom, DimCall)
        args = [self.dim(a) for a in atom.args]
        if isinstance(atom, (Min, Max)):
            return self.assign(atom, f"{'min' if isinstance(atom, Min) else 'max'}({', '.join(args)})")
        a, b = args
        if isinstance(atom.args[1], Expr):
            b = f"positive({b}, {atom.text!r})"
        if isinstance(atom, CeilDiv):
            return self.assign(atom, f"-(-{a} // {b})")
        return self.assign(atom, f"{a} {'//' if isinstance(atom, FloorDiv) else '%'} {b}")
