"""Sizes in native code: which expressions `bind` computes, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rlx.codegen.native.irtext import Bool, Function, Int
from rlx.errors import CompileError
from rlx.export.bounds import within
from rlx.export.tables import (
    Assumed,
    Condition,
    Copy,
    Every,
    KernelCall,
    Place,
    Repeat,
    Step,
    Tables,
    every_step,
)
from rlx.ir.dim import Atom, CeilDiv, Constraint, Dim, DimCall, FloorDiv, Max, Min, Mod, Sym


class Words:
    """Words of a context that hold what depends on sizes: the symbols, then one per expression and condition.

    Expressions in steps that assume something about sizes come last: they may make no sense at others.
    """

    def __init__(self, tables: Tables, start: int) -> None:
        self.ranges = tables.ranges
        self.start = start
        self.symbols = {s.name: start + i for i, s in enumerate(tables.symbols)}
        self._at: dict[Dim, int] = {}
        self.conditions: dict[Condition, int] = {}  # and the words that are 1 where they hold
        self.end = start + len(self.symbols)
        for entry in (*tables.inputs, *tables.outputs):
            for d in entry.shape:
                self._add(d)
        assumed = {id(inner) for s in every_step(tables.steps) for inner in _assumed(s)}
        steps = list(every_step(tables.steps))
        for step in (s for s in steps if id(s) not in assumed):
            self._add_all(step)
        self.checked = self.end  # expressions before this word must make sense
        for step in (s for s in steps if id(s) in assumed):
            self._add_all(step)

    def _add_all(self, step: Step) -> None:
        for d in _dims(step):
            self._add(d)
        if isinstance(step, Assumed) and step.condition not in self.conditions:
            self.conditions[step.condition] = self.end
            self.end += 1

    def _add(self, d: Dim) -> None:
        d = within(d, self.ranges)
        if isinstance(d, int) or d in self._at or (isinstance(d.atom, Sym) and d.atom.name in self.symbols):
            return
        self._at[d] = self.end
        self.end += 1

    def expressions(self) -> Iterator[tuple[Dim, int]]:
        """Sizes that are computed, and the words that hold them."""
        yield from self._at.items()

    def at(self, d: Dim) -> int | None:
        """The word that holds a size; None if the size is a number."""
        d = within(d, self.ranges)
        if isinstance(d, int):
            return None
        if isinstance(d.atom, Sym):
            return self.symbols[d.atom.name]
        return self._at[d]

    def number(self, d: Dim) -> int:
        """A size that is a number in the ranges of this export."""
        d = within(d, self.ranges)
        assert isinstance(d, int), "asked only where `at` gives None"
        return d


def _assumed(step: Step) -> Iterator[Step]:
    """Steps inside one that assumes something."""
    if isinstance(step, Assumed):
        yield from every_step(step.steps)


def _dims(step: Step) -> Iterator[Dim]:
    """All sizes of one step, without those of steps inside it."""
    places: list[Place | None] = []
    if isinstance(step, KernelCall):
        yield from step.sizes
        places += step.places
    elif isinstance(step, Copy):
        yield step.nbytes
        places += [step.source, step.target]
    elif isinstance(step, Repeat):
        yield step.limit
        places += [step.trips, step.go, step.flag]
    else:
        places.append(getattr(step, "flag", None))
    for place in places:
        if place is not None:
            yield place.moving
            yield from (row for _, row in place.rows)


class Evaluator:
    """Writes the instructions that compute sizes from symbols; equal parts are computed once.

    `refuse` writes what happens where a divisor is not positive.
    """

    def __init__(
        self, f: Function, symbols: dict[str, Int], refuse: Callable[[Bool], None] | None = None
    ) -> None:
        self.f, self.symbols, self.refuse = f, symbols, refuse
        self._known: dict[object, Int] = {}

    def dim(self, d: Dim) -> Int:
        """The value of a size."""
        if isinstance(d, int):
            return d
        if d not in self._known:
            f, total = self.f, d.const
            value: Int = total
            for monomial, c in d.terms:
                product: Int = c
                for atom, power in monomial:
                    for _ in range(power):
                        product = f.mul(product, self.atom(atom))
                value = f.add(value, product)
            self._known[d] = value
        return self._known[d]

    def atom(self, atom: Atom) -> Int:
        if isinstance(atom, Sym):
            return self.symbols[atom.name]
        assert isinstance(atom, DimCall)
        if atom not in self._known:
            self._known[atom] = self._call(atom)
        return self._known[atom]

    def _call(self, atom: DimCall) -> Int:
        f, args = self.f, [self.dim(a) for a in atom.args]
        if isinstance(atom, (Min, Max)):
            out = args[0]
            for other in args[1:]:
                out = f.smin(out, other) if isinstance(atom, Min) else f.smax(out, other)
            return out
        a, b = args[0], self.divisor(args[1])
        if isinstance(atom, FloorDiv):
            return f.floordiv(a, b)
        if isinstance(atom, Mod):
            return f.floormod(a, b)
        if isinstance(atom, CeilDiv):
            return f.sub(0, f.floordiv(f.sub(0, a), b))
        raise CompileError(f"sizes of kind {type(atom).__name__} have no native code")

    def divisor(self, b: Int) -> Int:
        """A number to divide by, at least 1."""
        if isinstance(b, int):
            return max(b, 1)
        if self.refuse is not None:
            self.refuse(self.f.cmp("slt", b, 1))
        return self.f.smax(b, 1)

    def condition(self, condition: Condition) -> Bool:
        """Whether something holds of sizes."""
        f = self.f
        if isinstance(condition, Constraint):
            left, right = self.dim(condition.lhs), self.dim(condition.rhs)
            if condition.kind == "multiple":
                return f.cmp("eq", f.floormod(left, self.divisor(right)), 0)
            return f.cmp({"eq": "eq", "ne": "ne", "min": "sge"}[condition.kind], left, right)
        joined = f.value(isinstance(condition, Every), "i1")
        for part in condition.parts:
            holds = self.condition(part)
            both = f.and_(joined, holds) if isinstance(condition, Every) else f.or_(joined, holds)
            joined = f.value(both, "i1")
        return joined
