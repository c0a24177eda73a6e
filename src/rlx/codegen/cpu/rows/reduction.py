"""How reductions combine: start values, one step, and the fixed tree that ends them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.codegen.cpu.primitives import PRIMITIVES, emit_cast, register_type
from rlx.codegen.native.irtext import Function
from rlx.codegen.native.irtypes import Value, constant, vector
from rlx.codegen.native.notation import inline
from rlx.codegen.native.words import Index, Word, i64, iota, is_nan, is_number, part, select, sitofp, splat
from rlx.errors import UnsupportedError
from rlx.ir.dtype import DType
from rlx.kernel.nests import Stat


class Round:
    """Where a loop over the vectors of a row stands."""

    def __init__(self, count: Callable[[], Index]) -> None:
        self._count = count
        self._inverse: dict[str, Word] = {}

    def inverse(self, element: str) -> Word:
        """1 / (how many vectors a group has, with the one that is added now), computed once per round."""
        if element not in self._inverse:
            self._inverse[element] = _inverse(self._count(), element)
        return self._inverse[element]


@inline
def _inverse(count: Index, element: str) -> Word:
    return Word(constant(element, 1.0)) / sitofp(count, element)


def only_where(mask: Value | None, new: list[Word], old: list[Word]) -> list[Word]:
    """New values in the lanes that exist, which all do without a mask."""
    return new if mask is None else [select(mask, n, o) for n, o in zip(new, old, strict=True)]


_PRIMITIVE = {
    "sum": "add",
    "prod": "mul",
    "max": "maximum",
    "largest": "larger",
    "min": "minimum",
    "any": "logical_or",
    "all": "logical_and",
}


def reducer_for(fn: Function, stat: Stat, lanes: int) -> Reducer:
    """The reducer of a statistic."""
    if stat.combine in ("argmax", "argmin"):
        return ArgReducer(fn, stat, lanes)
    if stat.combine not in _PRIMITIVE:
        raise UnsupportedError(f"reduction {stat.combine!r} has no native code")
    return Reducer(fn, stat, lanes)


class Reducer:
    """A reduction with one carried vector per accumulator."""

    def __init__(self, fn: Function, stat: Stat, lanes: int) -> None:
        self.fn, self.stat, self.lanes = fn, stat, lanes
        self.dtype: DType = stat.body.dtype
        self.type = vector(register_type(self.dtype), lanes)

    @property
    def result_types(self) -> list[str]:
        """What `results` gives."""
        return [register_type(self.stat.dtype)]

    def identity(self, type_: str) -> Word:
        d, combine = self.dtype, self.stat.combine
        if combine in ("any", "all"):
            return Word(constant(type_, combine == "all"))
        if combine in ("sum", "prod"):
            one = combine == "prod"
            return Word(constant(type_, float(one) if d.is_float else int(one)))
        if d.is_float:
            return Word(constant(type_, float("-inf") if combine in ("max", "largest") else float("inf")))
        return Word(constant(type_, int(d.min_value if combine == "max" else d.max_value)))

    def start(self) -> list[Word]:
        return [self.identity(self.type)]

    def combine(self, a: Value, b: Value) -> Word:
        return Word(PRIMITIVES[_PRIMITIVE[self.stat.combine]](self.fn, self.dtype, [a, b]))

    def add(
        self, carried: list[Word], x: Word, position: Index, mask: Value | None, now: Round
    ) -> list[Word]:
        """Add one vector of a row."""
        return self.step(carried, x, position, mask)

    def step(
        self, carried: list[Word], x: Word, position: Index, mask: Value | None, per_lane: bool = False
    ) -> list[Word]:
        """Add one vector; lanes off the mask do not count."""
        return only_where(mask, [self.combine(carried[0], x)], carried)

    def finish(self, groups: list[list[Word]]) -> Word:
        """All accumulators and lanes as one scalar."""
        vectors = [g[0] for g in groups]
        while len(vectors) > 1:
            vectors = [self.combine(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
        return self.cast(Word(self.fn.reduce(self.combine, vectors[0])))

    def results(self, groups: list[list[Word]], pivot: Word | None = None) -> list[Word]:
        """The statistics, of which one reduction may give several."""
        return [self.finish(groups)]

    # -- rows in blocks: what is held between them, what a block begins with, what it leaves

    def held(self) -> list[Word]:
        return self.start()

    def enter(self, held: list[Word]) -> list[Word]:
        return held

    def leave(self, held: list[Word], found: list[Word]) -> list[Word]:
        return found

    def lane_result(self, carried: list[Word]) -> Word:
        """The result of every lane by itself."""
        return self.cast(carried[0])

    def cast(self, x: Word) -> Word:
        if self.stat.dtype is self.dtype or register_type(self.stat.dtype) == register_type(self.dtype):
            return x
        return Word(emit_cast(self.fn, x, self.dtype, self.stat.dtype))


def is_float_sum(stat: Stat) -> bool:
    """Whether a statistic is a sum that rounds."""
    return stat.combine == "sum" and stat.body.dtype.is_float


class BlockedSum(Reducer):
    """A sum over blocks: each is summed from 0, and totals keep what their additions round off.

    One chain of additions over a long row would lose more with every element.
    """

    def held(self) -> list[Word]:
        return [*self.start(), *self.start()]

    def enter(self, held: list[Word]) -> list[Word]:
        return self.start()

    @inline
    def leave(self, held: list[Word], found: list[Word]) -> list[Word]:
        (total, rest), (x,) = held, found
        new = total + x
        added = new - total
        lost = (total - (new - added)) + (x - added)
        return [new, rest + lost]

    @inline
    def whole(self, held: list[Word]) -> Word:
        """The total; of an infinite one the rest is NaN and does not count."""
        total, rest = held
        return select(is_nan(rest), total, total + rest)

    def finish(self, groups: list[list[Word]]) -> Word:
        return super().finish([[self.whole(held)] for held in groups])

    def lane_result(self, carried: list[Word]) -> Word:
        return super().lane_result([self.whole(carried)])


class ArgReducer(Reducer):
    """argmax and argmin: carries the best value and where it was; NaN beats everything."""

    @property
    def result_types(self) -> list[str]:
        return ["i64"]

    def identity(self, type_: str) -> Word:
        highest = self.stat.combine == "argmin"
        if self.dtype.is_float:
            return Word(constant(type_, float("inf") if highest else float("-inf")))
        return Word(constant(type_, int(self.dtype.max_value if highest else self.dtype.min_value)))

    def start(self) -> list[Word]:
        # position -1: nothing seen yet, so that an element equal to the identity still counts
        return [self.identity(self.type), Word(constant(vector("i64", self.lanes), -1))]

    def compare(self, name: str, x: Word, best: Word) -> Word:
        """One comparison of elements: less, equal or greater."""
        return Word(PRIMITIVES[name](self.fn, self.dtype, [x, best]))

    @inline
    def better(self, x: Word, best: Word) -> Word:
        wins = self.compare("greater" if self.stat.combine == "argmax" else "less", x, best)
        if self.dtype.is_float:
            wins |= is_nan(x) & is_number(best)
        return wins

    @inline
    def same(self, x: Word, best: Word) -> Word:
        equal = self.compare("equal", x, best)
        if self.dtype.is_float:
            equal |= is_nan(x) & is_nan(best)
        return equal

    @inline
    def choose(self, a: list[Word], b: list[Word]) -> list[Word]:
        """The better of two candidates; of equals the first (or last) position; -1 means none."""
        (old, old_place), (new, place) = a, b
        is_tie = self.same(new, old) & (place > old_place if self.stat.last else place < old_place)
        wins = self.better(new, old) | is_tie
        none_before, none_now = old_place < 0, place < 0
        is_present = ~none_now
        wins = (wins | none_before) & is_present
        return [select(wins, new, old), select(wins, place, old_place)]

    @inline
    def step(
        self, carried: list[Word], x: Word, position: Index, mask: Value | None, per_lane: bool = False
    ) -> list[Word]:
        place = splat(i64(position), self.lanes)
        if not per_lane and self.lanes > 1:
            place += iota(self.lanes)
        return only_where(mask, self.choose(carried, [x, place]), carried)

    def finish(self, groups: list[list[Word]]) -> Word:
        pairs = list(groups)
        while len(pairs) > 1:
            pairs = [self.choose(a, b) for a, b in zip(pairs[::2], pairs[1::2], strict=True)]
        value, where = pairs[0]
        while value.width > 1:
            half = value.width // 2
            low = [part(value, 0, half), part(where, 0, half)]
            high = [part(value, half, half), part(where, half, half)]
            value, where = self.choose(low, high)
        return where

    def lane_result(self, carried: list[Word]) -> Word:
        return carried[1]


def enter_all(reducers: Sequence[Reducer], held: list[Word]) -> list[Word]:
    """What a block begins with: one group's values of all reducers."""
    old = iter(held)
    return [v for r in reducers for v in r.enter([next(old) for _ in r.held()])]


def leave_all(reducers: Sequence[Reducer], held: list[Word], found: list[Word]) -> list[Word]:
    """What is held after a block that found these values."""
    old, new = iter(held), iter(found)
    return [
        v for r in reducers for v in r.leave([next(old) for _ in r.held()], [next(new) for _ in r.start()])
    ]
