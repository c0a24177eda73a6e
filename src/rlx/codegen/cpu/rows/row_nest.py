"""Nests whose lanes run along the last reduced axis: reductions, softmax, norms.

Rows are passed over once per reduction and once more where a store covers the reduced axes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

from rlx.codegen.cpu.expression import AHEAD, LINE_BYTES, Ahead, Expression, Lane, is_load
from rlx.codegen.cpu.frame import EmittedKernel, KernelFrame
from rlx.codegen.cpu.primitives import register_type
from rlx.codegen.cpu.rows.moments import (
    LONG,
    MomentsReducer,
    SquaresReducer,
    are_moments,
    distance_of,
    in_one_pass,
    mean_of,
    with_rest,
)
from rlx.codegen.cpu.rows.nest_base import NestEmitter
from rlx.codegen.cpu.rows.reduction import BlockedSum, Reducer, Round, is_float_sum, reducer_for
from rlx.codegen.cpu.rows.row_pipeline import RowPipeline
from rlx.codegen.native.irtext import Int
from rlx.codegen.native.irtypes import Value, vector
from rlx.ir.dim import Dim
from rlx.kernel.nests import Nest
from rlx.kernel.scalar import PRIMITIVES, Scalar
from rlx.records import dataclass

ALIASED = 4096  # a load waits for a recent store if their addresses agree modulo this
SAVE_COST = (
    8  # expressions at least this expensive are kept for the next pass over a row instead of recomputed
)

Visit = Callable[[Lane, list[Value], Round], list[Value]]
AheadAt = Callable[[Int], Sequence[Ahead]]  # what a place in a row asks memory for


def _nothing_ahead(base: Int) -> Sequence[Ahead]:
    return ()


@dataclass(frozen=True)
class Saved:
    """Where an expensive expression is kept between passes: scratch rows from `first` on, used in turn.

    One row does unless passes over several rows overlap in time.
    """

    first: int
    rows: int


@dataclass(frozen=True)
class Pass:
    """One pass over one row: what is known outside its loop, what earlier passes have left in scratch."""

    number: int
    row: list[Int]
    outside: Expression
    ready: set[Scalar]
    ahead: AheadAt = _nothing_ahead
    cached: Collection[int] = ()
    turn: Int = 0
    pivot: Value | None = None


class RowNest(NestEmitter):
    """Passes are numbered: those that reduce, then the one that stores."""

    groups = 4  # independent accumulators of a reduction, to hide the latency of its chain

    def __init__(self, frame: KernelFrame, nest: Nest) -> None:
        super().__init__(frame, nest)
        nest = self.nest
        self.inner = list(range(nest.outer, len(nest.space)))
        self.full = [(n, s) for n, s in enumerate(nest.stores) if s.full]
        self.reductions = self.choose_reductions()
        self.keep_means_exact()
        nest = self.nest
        self.last = len(self.reductions)  # number of the pass that stores
        self.bodies = [
            *([self.reduced(numbers)] for numbers in self.reductions),
            [s.body for _, s in self.full],
        ]
        self.saved = self.choose_saved() if len(self.inner) == 1 else {}

    def choose_reductions(self) -> list[tuple[int, ...]]:
        """The statistics that each pass computes."""
        nest, out, number = self.nest, list[tuple[int, ...]](), 0
        while number < len(nest.stats):
            two = len(self.inner) == 1 and in_one_pass(nest.stats, nest.stores, number, nest.space[-1])
            out.append((number, number + 1) if two else (number,))
            number += len(out[-1])
        return out

    @property
    def long(self) -> bool:
        """Whether rows are, or may be, too long for one chain of additions."""
        extent = self.nest.space[-1]
        return extent > LONG if isinstance(extent, int) else len(self.inner) == 1

    def keep_means_exact(self) -> None:
        """Distances from the mean of a long row take into account what the mean was rounded by.

        The rest of a mean is one more statistic, which takes the number behind all others.
        """
        nest, numbers, extent = self.nest, self.reductions[-1], self.nest.space[-1]
        first = numbers[0] if isinstance(extent, int) else numbers[0] - 1  # of the two that may be moments
        if not self.long or len(self.inner) > 1 or first < 0:
            return
        if not are_moments(nest.stats, nest.stores, first, extent):
            return
        mean, rest = mean_of(nest.stats, first), len(nest.stats)
        full = {n for n, _ in self.full}
        stores = tuple(
            replace(s, body=with_rest(s.body, mean, rest)) if n in full else s
            for n, s in enumerate(nest.stores)
        )
        self.nest = replace(nest, stores=stores)
        self.full = [(n, stores[n]) for n, _ in self.full]
        self.reductions[-1] = (*numbers, rest)

    def reduced(self, numbers: tuple[int, ...]) -> Scalar:
        """What the pass that computes these statistics adds up."""
        stats = self.nest.stats
        if len(numbers) > 1 and not isinstance(self.nest.space[-1], int):
            return distance_of(stats, numbers[0] - 1)
        return stats[numbers[0]].body

    def reducer(self, number: int, width: int = 0) -> Reducer:
        """The reducer of a pass for vectors of `width` lanes (0: the usual ones)."""
        numbers, width = self.reductions[number], width or self.lanes
        stat = self.nest.stats[numbers[0]]
        extent = self.nest.space[-1]
        if len(numbers) > 1 and isinstance(extent, int):
            mean = mean_of(self.nest.stats, numbers[0])
            return MomentsReducer(self.fn, stat, width, extent, self.groups, mean, len(numbers))
        if len(numbers) > 1:
            return SquaresReducer(self.fn, stat, width, self.sizes[-1])
        if self.long and is_float_sum(stat):
            return BlockedSum(self.fn, stat, width)
        return reducer_for(self.fn, stat, width)

    def known_before(self, number: int) -> int:
        """How many statistics the passes before have computed."""
        return sum(len(numbers) for numbers in self.reductions[:number])

    def choose_saved(self) -> dict[Scalar, Saved]:
        """Expensive expressions that a later pass needs again."""
        axis_number, out, rows = self.inner[0], dict[Scalar, Saved](), 0
        for number, bodies in enumerate(self.bodies):
            stack, seen = list(bodies), set[Scalar]()
            while stack:
                e = stack.pop()
                if e in out or e in seen:
                    continue
                seen.add(e)
                last = max((n for n, later in enumerate(self.bodies) if _holds(later, e)), default=0)
                if (
                    last > number
                    and _cost(e) >= SAVE_COST
                    and _uses_axis(e, axis_number)
                    and e.dtype.name in ("f32", "f64")
                ):
                    out[e] = Saved(rows, last - number)
                    rows += last - number
                else:
                    stack.extend(e.args)
        return out

    def emit(self) -> EmittedKernel:
        scratch: Dim = 0
        if self.saved:
            self.scratch = self.apart(self.frame.scratch())
            per_row = self.nest.space[self.inner[0]] * 8 + 64
            scratch = per_row * sum(place.rows for place in self.saved.values()) + ALIASED
        self.with_streaming(self.all_rows)
        return self.frame.finish(scratch)

    def apart(self, scratch: Value) -> Value:
        """Scratch that begins, within a page, a quarter page behind the operand that rows read first.

        A load waits for a recent store if the last 12 bits of addresses agree: scratch just behind an operand
        costs a softmax larger than the caches a fifth of its speed.
        """
        fn = self.fn
        read = next((e.data for e in self.bodies[0][0].walk() if is_load(e)), None)
        if read is None:
            return scratch
        place, now = (
            fn.op("i64", f"ptrtoint {pointer} to i64") for pointer in (self.operands[read].pointer, scratch)
        )
        shift = fn.and_(fn.sub(fn.add(place, ALIASED // 4), now), ALIASED - LINE_BYTES)
        return fn.gep(scratch, shift, "i8")

    def all_rows(self) -> None:
        if not self.nest.outer:
            self.fn.branch(self.fn.cmp("eq", self.frame.thread, 0), lambda: self.row([]))
        elif self.streaming and len(self.inner) == 1:
            RowPipeline(self).emit()
        else:
            self.rows(self.sizes[: self.nest.outer], self.row)

    def row(self, row: list[Int]) -> None:
        outside = self.outside(row)
        for number in range(self.last):
            found = self.reduce(self.begin(number, row, outside, self.ahead_in(number)))
            outside.accs = [*outside.accs, *found]
        now = self.begin(self.last, row, outside, self.ahead_in(self.last))
        for number, store in enumerate(self.nest.stores):
            if not store.full:
                self.write(outside, store, number, row)
        if self.full:
            self.nested(row, lambda axes, lane: self.store_all(self.at(axes, lane, now)))

    def outside(self, row: list[Int]) -> Expression:
        """Expressions of a row outside its loops."""
        return self.point([*row, *(0 for _ in self.inner)], None)

    def begin(
        self,
        number: int,
        row: list[Int],
        outside: Expression,
        ahead: AheadAt = _nothing_ahead,
        cached: Collection[int] = (),
        turn: Int = 0,
    ) -> Pass:
        """Start a pass: what its loop does not change is computed."""
        self.prepare(outside, self.bodies[number], set(range(self.nest.outer)), self.known_before(number))
        ready = {e for n in range(number) for e in self.fresh(n)}
        pivot = None
        known = isinstance(self.nest.space[-1], int)
        if number < self.last and self.long and known and len(self.reductions[number]) > 1:
            first = self.outside(row)
            first.accs = outside.accs
            pivot = first(self.bodies[number][0])
        return Pass(number, row, outside, ready, ahead, cached, turn, pivot)

    def fresh(self, number: int) -> list[Scalar]:
        """Expressions that a pass is the first to compute and keeps for later ones."""
        held = [e for e in self.saved if _holds(self.bodies[number], e)]
        return [e for e in held if not any(_holds(earlier, e) for earlier in self.bodies[:number])]

    def ahead_in(self, number: int) -> AheadAt:
        """The second pass over a row prefetches the next row, which arrives while this one is computed."""
        if self.last + bool(self.full) == 1:
            return lambda base: AHEAD
        if number != 1 or len(self.inner) != 1:
            return _nothing_ahead
        return lambda base: (Ahead(self.sizes[self.inner[-1]]),)

    def store_all(self, at: Expression) -> None:
        """Every store of one vector."""
        for number, store in self.full:
            self.write(at, store, number, at.axes, store.strides[-1])

    def at(self, axes: list[Int], lane: Lane, now: Pass) -> Expression:
        """Expressions at one vector of a pass."""
        fn, at = self.fn, self.point(axes, lane, now.outside)
        at.ahead, at.cached = now.ahead(lane.base), now.cached

        def load(e: Scalar) -> Value:
            place, type_ = self.saved_place(e, lane.base, now), vector(register_type(e.dtype), lane.width)
            return fn.load(type_, place) if lane.mask is None else fn.masked_load(type_, place, lane.mask)

        at.saved = {e: partial(load, e) for e in now.ready}
        return at

    def saved_place(self, e: Scalar, i: Int, now: Pass) -> Value:
        fn, place = self.fn, self.saved[e]
        stride = fn.add(fn.mul(self.sizes[self.inner[0]], 8), 64)
        row = fn.add(place.first, fn.urem(now.turn, place.rows))
        return fn.gep(fn.gep(self.scratch, fn.mul(stride, row), "i8"), i, register_type(e.dtype))

    def keep(self, at: Expression, now: Pass) -> None:
        """Write freshly computed expensive expressions to scratch for later passes."""
        fn, lane = self.fn, at.lane
        assert lane is not None
        for e in self.fresh(now.number):
            value, place = at.vector(e), self.saved_place(e, lane.base, now)
            if lane.mask is None:
                fn.store(value, place)
            else:
                fn.masked_store(value, place, lane.mask)

    def nested(self, row: list[Int], visit: Callable[[list[Int], Lane], None]) -> None:
        """Visit every vector of the inner axes."""

        def level(axes: list[Int]) -> None:
            number = len(axes)
            if number == len(self.nest.space) - 1:
                self.along(
                    self.sizes[number],
                    self.lanes,
                    lambda i, mask: visit([*axes, i], Lane(number, i, self.lanes, mask)),
                )
            else:
                self.fn.loop(0, self.sizes[number], 1, [], lambda i, _: level([*axes, i]))

        level(list(row))

    def reduce(self, now: Pass) -> list[Value]:
        """The statistics of one pass over the inner axes, as scalars."""
        reducer, extent = self.reducer(now.number), self.sizes[-1]
        if isinstance(extent, int) or len(self.inner) == 1 or not is_float_sum(reducer.stat):
            return self.reduce_by(reducer, now)
        blocked = BlockedSum(self.fn, reducer.stat, self.lanes)
        return self.fn.if_value(  # not in blocks always: each row of several begins a block
            self.fn.cmp("ugt", extent, LONG),
            lambda: self.reduce_by(blocked, now),
            lambda: self.reduce_by(reducer, now),
        )

    def reduce_by(self, reducer: Reducer, now: Pass) -> list[Value]:
        """What a reducer finds in one pass."""
        fn, last = self.fn, len(self.nest.space) - 1

        def level(axes: list[Int], carried: list[list[Value]]) -> list[list[Value]]:
            number = len(axes)
            if number == last:
                return self.over_row(
                    [reducer],
                    carried,
                    lambda lane, group, turn: self.add_vector(
                        now, reducer, [*axes, lane.base], lane, group, turn
                    ),
                )
            out = fn.loop(
                0,
                self.sizes[number],
                1,
                [v for group in carried for v in group],
                lambda i, flat: [v for g in level([*axes, i], _groups(flat, len(carried))) for v in g],
            )
            return _groups(out, len(carried))

        return reducer.results(level(list(now.row), [reducer.held() for _ in range(self.groups)]), now.pivot)

    def add_vector(
        self, now: Pass, reducer: Reducer, axes: list[Int], lane: Lane, group: list[Value], turn: Round
    ) -> list[Value]:
        """One step of a reduction."""
        at = self.at(axes, lane, now)
        value = at.vector(self.bodies[now.number][0])
        self.keep(at, now)
        if now.pivot is not None:
            value = self.fn.fsub(value, self.fn.splat(now.pivot, lane.width))
        return reducer.add(group, value, self.position(axes), lane.mask, turn)

    def over_row(
        self, reducers: Sequence[Reducer], held: list[list[Value]], visit: Visit, paired: bool = False
    ) -> list[list[Value]]:
        """Every vector of the last axis, in blocks where sums are long; groups hold parts of all reducers."""
        if not any(isinstance(r, BlockedSum) for r in reducers):
            return self.over_vectors(held, visit, paired)
        fn, extent, count = self.fn, self.sizes[-1], len(held)
        block = LONG - LONG % (self.lanes * count)

        def one(i: Int, flat: list[Value]) -> list[Value]:
            before = _groups(flat, count)
            begin = [_each(reducers, g, lambda r, own, _: r.enter(own)) for g in before]
            found = self.over_vectors(begin, visit, paired, i, fn.smin(fn.add(i, block), extent))
            after = (
                _each(reducers, g, lambda r, own, new: r.leave(own, new), f)
                for g, f in zip(before, found, strict=True)
            )
            return [v for group in after for v in group]

        return _groups(fn.loop(0, extent, block, [v for g in held for v in g], one), count)

    def over_vectors(
        self,
        carried: list[list[Value]],
        visit: Visit,
        paired: bool = False,
        start: Int = 0,
        stop: Int | None = None,
    ) -> list[list[Value]]:
        """Every vector of the last axis, or of a part of it that starts with a whole round, in a fixed order:
        vector n belongs to group n modulo their number, the rest that fills no whole round to the first.

        With `paired`, two neighbouring groups are visited as one of twice the width where that is possible.
        """
        fn, count, last = self.fn, len(carried), len(self.nest.space) - 1
        extent = self.sizes[-1] if stop is None else stop
        block, width = self.lanes * count, self.lanes * (2 if paired else 1)
        whole = fn.sub(extent, fn.urem(extent, block))
        loops = self.pairs(carried) if paired else carried

        def unrolled(i: Int, flat: list[Value]) -> list[Value]:
            groups, turn = _groups(flat, len(loops)), Round(fn, lambda: fn.add(fn.udiv(i, block), 1))
            lanes = [Lane(last, fn.add(i, u * width), width) for u in range(len(loops))]
            return [v for lane, group in zip(lanes, groups, strict=True) for v in visit(lane, group, turn)]

        flat = fn.loop(start, whole, block, [v for group in loops for v in group], unrolled)
        groups = _groups(flat, len(loops))
        groups = self.halves(groups) if paired else groups
        rest = fn.sub(extent, fn.urem(extent, self.lanes))

        def one(i: Int, mask: Value | None, group: list[Value]) -> list[Value]:
            rounds, more = fn.udiv(whole, block), fn.udiv(fn.sub(i, whole), self.lanes)
            turn = Round(fn, lambda: fn.add(fn.add(rounds, more), 1))
            return visit(Lane(last, i, self.lanes, mask), group, turn)

        first = fn.loop(whole, rest, self.lanes, groups[0], lambda i, now: one(i, None, now))
        left = fn.sub(extent, rest)
        tail = lambda: one(rest, fn.lanes(left, self.lanes), first)  # noqa: E731
        first = fn.if_value(fn.cmp("sgt", left, 0), tail, lambda: first)
        return [first, *groups[1:]]

    def pairs(self, groups: list[list[Value]]) -> list[list[Value]]:
        """Neighbouring groups as one."""
        neighbours = zip(groups[::2], groups[1::2], strict=True)
        return [[self.fn.concat(a, b) for a, b in zip(*two, strict=True)] for two in neighbours]

    def halves(self, groups: list[list[Value]]) -> list[list[Value]]:
        """What `pairs` put together."""
        return [[self.fn.part(v, first, self.lanes) for v in g] for g in groups for first in (0, self.lanes)]

    def position(self, axes: list[Int]) -> Int:
        """Flat index within the reduced axes (what argmax reports)."""
        flat: Int = 0
        for number in self.inner:
            flat = self.fn.add(self.fn.mul(flat, self.sizes[number]), axes[number])
        return flat


def _groups(flat: list[Value], count: int) -> list[list[Value]]:
    """`count` lists of equal length."""
    size = len(flat) // count
    return [flat[i * size : (i + 1) * size] for i in range(count)]


def _each(
    reducers: Sequence[Reducer],
    held: list[Value],
    change: Callable[[Reducer, list[Value], list[Value]], list[Value]],
    found: Sequence[Value] = (),
) -> list[Value]:
    """One group's values after every reducer has changed its own."""
    old, new = iter(held), iter(found)
    return [
        v
        for r in reducers
        for v in change(r, [next(old) for _ in r.held()], [next(new) for _ in r.start()] if found else [])
    ]


def _holds(bodies: Sequence[Scalar], e: Scalar) -> bool:
    return any(e in body.walk() for body in bodies)


def _cost(e: Scalar) -> int:
    return PRIMITIVES[e.prim].cost if e.prim in PRIMITIVES else 0


def _uses_axis(e: Scalar, number: int) -> bool:
    return any(x.prim == "axis" and x.data == number for x in e.walk())
