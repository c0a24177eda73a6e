"""Symbolic sizes. A `Dim` is an `int` or an `Expr` in normal form; equal expressions compare and hash equal.

>>> seq = sym("seq")
>>> str((2 * seq + 1) * 3), (4 * seq) // 4 == seq, str(parse_dim("ceildiv(seq,2)") - 1)
('6*seq+3', True, 'ceildiv(seq,2)-1')
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from rlx.errors import ParseError, ShapeError
from rlx.ir.dim_expr import (
    Atom,
    Call,
    CeilDiv,
    Dim,
    Expr,
    FloorDiv,
    Max,
    Min,
    Mod,
    Sym,
    ceildiv,
    dim_max,
    dim_min,
    floordiv,
    mod,
    of_atom,
    proven_lower,
    sym,
)

__all__ = [
    "Atom",
    "Call",
    "CeilDiv",
    "Constraint",
    "Dim",
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
            elif isinstance(atom, Call):
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
    assert isinstance(atom, Call)
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
    assert isinstance(atom, Call)
    return _BUILD[type(atom)](*(substitute(a, mapping) for a in atom.args))


_BUILD: Mapping[type[Call], Callable[..., Dim]] = {
    FloorDiv: floordiv,
    CeilDiv: ceildiv,
    Mod: mod,
    Min: dim_min,
    Max: dim_max,
}


# -- what is known without values


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
    difference = a - b
    if isinstance(difference, int):
        return difference == 0
    if difference.const % math.gcd(*(c for _, c in difference.terms)):
        return False  # for example 2*n - 2*m == 1
    low, high = proven_lower(difference), -proven_lower(-difference)
    if low > 0 or high < 0:
        return False
    return True if low == high == 0 else None


def known_le(a: Dim, b: Dim) -> bool | None:
    """True if a <= b for all sizes, False if for none, None if that is not known.

    >>> n = sym("n")
    >>> known_le(n // 2, n), known_le(n + 1, n), known_le(n, 3)
    (True, False, None)
    """
    if isinstance(a, int) and isinstance(b, int):
        return a <= b
    if proven_lower(b - a) >= 0:
        return True
    return False if proven_lower(a - b) > 0 else None


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
    return False if proven_lower(rest) > 0 else None


@dataclass(frozen=True, slots=True)
class Constraint:
    """A fact about sizes that a graph assumes: proved, refuted, or checked when the sizes are known.

    >>> c = Constraint("multiple", sym("seq"), 4, ("model.py:3",))
    >>> c.check({"seq": 8}), c.describe()
    (True, 'seq is a multiple of 4')
    """

    kind: str
    """"eq": lhs == rhs; "multiple": lhs is a multiple of rhs; "min": lhs >= rhs."""
    lhs: Dim
    rhs: Dim
    where: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in _CONSTRAINT_WORDS:
            raise ShapeError(f"unknown constraint kind {self.kind!r}; use {', '.join(_CONSTRAINT_WORDS)}")

    def known(self) -> bool | None:
        """True if it always holds, False if never, None if it depends on the sizes."""
        if self.kind == "eq":
            return known_eq(self.lhs, self.rhs)
        return divides(self.rhs, self.lhs) if self.kind == "multiple" else known_le(self.rhs, self.lhs)

    def check(self, binding: Mapping[str, int]) -> bool:
        """Whether it holds for these sizes."""
        left, right = evaluate(self.lhs, binding), evaluate(self.rhs, binding)
        if self.kind == "eq":
            return left == right
        return left % _positive(right, self.describe()) == 0 if self.kind == "multiple" else left >= right

    def describe(self) -> str:
        return f"{self.lhs} {_CONSTRAINT_WORDS[self.kind]} {self.rhs}"


_CONSTRAINT_WORDS = {"eq": "equals", "multiple": "is a multiple of", "min": "is at least"}


# -- text


_TOKEN = re.compile(r"\s*([0-9]+|[A-Za-z_][A-Za-z0-9_]*|`(?:[^`\\]|\\.)+`|\*\*|//|[-+*%(),])", re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED = {"n": "\n", "r": "\r"}
_FUNCTIONS: Mapping[str, Callable[..., Dim]] = {"ceildiv": ceildiv, "min": dim_min, "max": dim_max}
_MAX_NESTING = 100
_MAX_POWER = 1000


def parse_dim(text: str, symbols: Mapping[str, Expr] | None = None) -> Dim:
    """The dim that `text` says: the inverse of `str`. Names other than plain identifiers stand in backticks.

    `symbols` gives the symbol for some names, where their bounds matter.

    >>> parse_dim("2*seq+1"), parse_dim("`batch size`//4"), parse_dim("7")
    (2*seq+1, `batch size`//4, 7)
    """
    return _Parser(text, symbols or {}).parse()


class _Parser:
    """Recursive descent with the precedence of Python."""

    def __init__(self, text: str, symbols: Mapping[str, Expr]) -> None:
        self.text = text
        self.symbols = symbols
        self.tokens = self._tokens()
        self.at = 0
        self.nesting = 0

    def _tokens(self) -> list[str]:
        found, end = [], 0
        stop = len(self.text.rstrip())
        while end < stop:
            match = _TOKEN.match(self.text, end)
            if match is None:
                self.fail(f"{self.text[end:].strip()[:20]!r} is not understood")
            found.append(match[1])
            end = match.end()
        return found

    def fail(self, why: str) -> NoReturn:
        raise ParseError(f"cannot read the size {self.text!r}: {why}")

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self) -> str:
        token = self.peek()
        self.at += 1
        return token

    def expect(self, token: str) -> None:
        if self.take() != token:
            self.fail(f"{token!r} is missing")

    def parse(self) -> Dim:
        try:
            result = self.sum()
        except ShapeError as error:
            raise ParseError(f"cannot read the size {self.text!r}: {error.message}") from None
        if self.peek():
            self.fail(f"{self.peek()!r} is not expected there")
        return result

    def sum(self) -> Dim:
        result = self.product()
        while self.peek() in ("+", "-"):
            result = result + self.product() if self.take() == "+" else result - self.product()
        return result

    def product(self) -> Dim:
        result = self.factor()
        while self.peek() in ("*", "//", "%"):
            operator, other = self.take(), self.factor()
            if operator == "*":
                result = result * other
            else:
                result = floordiv(result, other) if operator == "//" else mod(result, other)
        return result

    def factor(self) -> Dim:
        sign = 1
        while self.peek() in ("-", "+"):
            sign = -sign if self.take() == "-" else sign
        base = self.primary()
        if self.peek() == "**":
            self.take()
            power = self.take()
            if not power.isdecimal() or int(power) > _MAX_POWER:
                self.fail(f"a power must be a number up to {_MAX_POWER}, not {power!r}")
            base = base ** int(power)
        return base * sign

    def primary(self) -> Dim:
        self.nesting += 1
        if self.nesting > _MAX_NESTING:
            self.fail(f"it is nested more than {_MAX_NESTING} deep")
        token = self.take()
        if token.isdecimal():
            result: Dim = int(token)
        elif token == "(":
            result = self.sum()
            self.expect(")")
        elif token in _FUNCTIONS and self.peek() == "(":
            result = self.call(token)
        elif token[:1] == "`":
            result = self.symbol(_ESCAPE.sub(lambda m: _ESCAPED.get(m[1], m[1]), token[1:-1]))
        elif token.isidentifier():
            result = self.symbol(token)
        else:
            self.fail(f"{token!r} is not expected there" if token else "it ends too early")
        self.nesting -= 1
        return result

    def call(self, name: str) -> Dim:
        self.expect("(")
        args = [self.sum()]
        while self.peek() == ",":
            self.take()
            args.append(self.sum())
        self.expect(")")
        if name == "ceildiv" and len(args) != 2:
            self.fail("ceildiv takes two sizes")
        return _FUNCTIONS[name](*args)

    def symbol(self, name: str) -> Expr:
        return self.symbols[name] if name in self.symbols else sym(name)


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
        # The tuple is built from a list display: Python compiles those of any length quickly.
        body.append(f"    return ({', '.join(results)}{',' if results else ''})")
        source = "def evaluate_dims(sizes):\n    if len(sizes) != count: refuse(sizes)\n" + "\n".join(body)
        scope: dict[str, object] = {"count": len(self.slots), "refuse": self._refuse, "positive": _positive}
        exec(compile(source, "<sizes>", "exec"), scope)
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
        assert isinstance(atom, Call)
        args = [self.dim(a) for a in atom.args]
        if isinstance(atom, (Min, Max)):
            return self.assign(atom, f"{'min' if isinstance(atom, Min) else 'max'}({', '.join(args)})")
        a, b = args
        if isinstance(atom.args[1], Expr):
            b = f"positive({b}, {atom.text!r})"
        if isinstance(atom, CeilDiv):
            return self.assign(atom, f"-(-{a} // {b})")
        return self.assign(atom, f"{a} {'//' if isinstance(atom, FloorDiv) else '%'} {b}")
