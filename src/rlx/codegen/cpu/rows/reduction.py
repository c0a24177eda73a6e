"""How reductions combine: start values, one step, and the fixed tree that ends them."""

from __future__ import annotations

from collections.abc import Callable

from rlx.codegen.cpu.primitives import PRIMITIVES, emit_cast, register_type
from rlx.codegen.native.irtext import Function, Int
from rlx.codegen.native.irtypes import Value, constant, vector
from rlx.errors import UnsupportedError
from rlx.ir.dtype import DType
from rlx.kernel.nests import Stat


class Round:
    """Where a loop over the vectors of a row stands."""

    def __init__(self, fn: Function, count: Callable[[], Int]) -> None:
        self.fn, self._count = fn, count
        self._inverse: dict[str, Value] = {}

    def inverse(self, element: str) -> Value:
        """1 / (how many vectors a group has, with the one that is added now), computed once per round."""
        if element not in self._inverse:
            count = self.fn.sitofp(self.fn.value(self._count()), element)
            self._inverse[element] = self.fn.fdiv(constant(element, 1.0), count)
        return self._inverse[element]


_PRIMITIVE = {
    "sum": "add",
    "prod": "mul",
    "max": "maximum",
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

    def identity(self, type_: str) -> Value:
        d, combine = self.dtype, self.stat.combine
        if combine in ("any", "all"):
            return constant(type_, combine == "all")
        if combine in ("sum", "prod"):
            return constant(type_, float(combine == "prod") if d.is_float else int(combine == "prod"))
        if d.is_float:
            return constant(type_, float("-inf") if combine == "max" else float("inf"))
        return constant(type_, int(d.min_value if combine == "max" else d.max_value))

    def start(self) -> list[Value]:
        return [self.identity(self.type)]

    def combine(self, a: Value, b: Value) -> Value:
        return PRIMITIVES[_PRIMITIVE[self.stat.combine]](self.fn, self.dtype, [a, b])

    def add(
        self, carried: list[Value], x: Value, position: Int, mask: Value | None, now: Round
    ) -> list[Value]:
        """Add one vector of a row."""
        return self.step(carried, x, position, mask)

    def step(
        self, carried: list[Value], x: Value, position: Int, mask: Value | None, per_lane: bool = False
    ) -> list[Value]:
        """Add one vector; lanes off the mask do not count."""
        new = self.combine(carried[0], x)
        return [new if mask is None else self.fn.select(mask, new, carried[0])]

    def finish(self, groups: list[list[Value]]) -> Value:
        """All accumulators and lanes as one scalar."""
        vectors = [g[0] for g in groups]
        while len(vectors) > 1:
            vectors = [self.combine(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
        return self.cast(self.fn.reduce(self.combine, vectors[0]))

    def results(self, groups: list[list[Value]], pivot: Value | None = None) -> list[Value]:
        """The statistics, of which one reduction may give several."""
        return [self.finish(groups)]

    # -- rows in blocks: what is held between them, what a block begins with, what it leaves

    def held(self) -> list[Value]:
        return self.start()

    def enter(self, held: list[Value]) -> list[Value]:
        return held

    def leave(self, held: list[Value], found: list[Value]) -> list[Value]:
        return found

    def lane_result(self, carried: list[Value]) -> Value:
        """The result of every lane by itself."""
        return self.cast(carried[0])

    def cast(self, x: Value) -> Value:
        if self.stat.dtype is self.dtype or register_type(self.stat.dtype) == register_type(self.dtype):
            return x
        return emit_cast(self.fn, x, self.dtype, self.stat.dtype)


def is_float_sum(stat: Stat) -> bool:
    """Whether a statistic is a sum that rounds."""
    return stat.combine == "sum" and stat.body.dtype.is_float


class BlockedSum(Reducer):
    """A sum over blocks: each is summed from 0, and totals keep what their additions round off.

    One chain of additions over a long row would lose more with every element.
    """

    def held(self) -> list[Value]:
        return [*self.start(), *self.start()]

    def enter(self, held: list[Value]) -> list[Value]:
        return self.start()

    def leave(self, held: list[Value], found: list[Value]) -> list[Value]:
        fn, (total, rest), (x,) = self.fn, held, found
        new = fn.fadd(total, x)
        part = fn.fsub(new, total)
        lost = fn.fadd(fn.fsub(total, fn.fsub(new, part)), fn.fsub(x, part))
        return [new, fn.fadd(rest, lost)]

    def whole(self, held: list[Value]) -> Value:
        """The total; of an infinite one the rest is NaN and does not count."""
        fn, (total, rest) = self.fn, held
        return fn.select(fn.is_nan(rest), total, fn.fadd(total, rest))

    def finish(self, groups: list[list[Value]]) -> Value:
        return super().finish([[self.whole(held)] for held in groups])

    def lane_result(self, carried: list[Value]) -> Value:
        return super().lane_result([self.whole(carried)])


class ArgReducer(Reducer):
    """argmax and argmin: carries the best value and where it was; NaN beats everything."""

    @property
    def result_types(self) -> list[str]:
        return ["i64"]

    def identity(self, type_: str) -> Value:
        highest = self.stat.combine == "argmin"
        if self.dtype.is_float:
            return constant(type_, float("inf") if highest else float("-inf"))
        return constant(type_, int(self.dtype.max_value if highest else self.dtype.min_value))

    def start(self) -> list[Value]:
        # position -1: nothing seen yet, so that an element equal to the identity still counts
        return [self.identity(self.type), constant(vector("i64", self.lanes), -1)]

    def better(self, x: Value, best: Value) -> Value:
        name = "greater" if self.stat.combine == "argmax" else "less"
        wins = PRIMITIVES[name](self.fn, self.dtype, [x, best])
        if self.dtype.is_float:
            fresh = self.fn.and_(self.fn.is_nan(x), self.fn.fcmp("ord", best, best))
            wins = self.fn.value(self.fn.or_(wins, self.fn.value(fresh)))
        return wins

    def same(self, x: Value, best: Value) -> Value:
        equal = PRIMITIVES["equal"](self.fn, self.dtype, [x, best])
        if self.dtype.is_float:
            both = self.fn.and_(self.fn.is_nan(x), self.fn.is_nan(best))
            equal = self.fn.value(self.fn.or_(equal, self.fn.value(both)))
        return equal

    def choose(self, a: list[Value], b: list[Value]) -> list[Value]:
        """The better of two candidates; of equals the first (or last) position; -1 means none."""
        fn = self.fn
        order = "sgt" if self.stat.last else "slt"
        tie = fn.value(fn.and_(self.same(b[0], a[0]), fn.value(fn.cmp(order, b[1], a[1]))))
        wins = fn.value(fn.or_(self.better(b[0], a[0]), tie))
        none_a = fn.value(fn.cmp("slt", a[1], constant(a[1].type, 0)))
        none_b = fn.value(fn.cmp("slt", b[1], constant(b[1].type, 0)))
        present = fn.value(fn.xor(none_b, constant(none_b.type, True)))
        wins = fn.value(fn.and_(fn.value(fn.or_(wins, none_a)), present))
        return [fn.select(wins, b[0], a[0]), fn.select(wins, b[1], a[1])]

    def step(
        self, carried: list[Value], x: Value, position: Int, mask: Value | None, per_lane: bool = False
    ) -> list[Value]:
        fn = self.fn
        at = fn.splat(fn.value(position), self.lanes)
        if not per_lane:
            at = fn.value(fn.add(at, fn.iota(self.lanes))) if self.lanes > 1 else at
        new = self.choose(carried, [x, at])
        if mask is None:
            return new
        return [fn.select(mask, n, c) for n, c in zip(new, carried, strict=True)]

    def finish(self, groups: list[list[Value]]) -> Value:
        pairs = list(groups)
        while len(pairs) > 1:
            pairs = [self.choose(a, b) for a, b in zip(pairs[::2], pairs[1::2], strict=True)]
        value, where = pairs[0]
        while value.width > 1:
            half = value.width // 2
            low = [self.fn.part(value, 0, half), self.fn.part(where, 0, half)]
            high = [self.fn.part(value, half, half), self.fn.part(where, half, half)]
            value, where = self.choose(low, high)
        return where

    def lane_result(self, carried: list[Value]) -> Value:
        return carried[1]
