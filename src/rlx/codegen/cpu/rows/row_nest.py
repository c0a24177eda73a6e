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
from rlx.codegen.cpu.rows.reduction import (
    BlockedSum,
    Reducer,
    Round,
    enter_all,
    is_float_sum,
    leave_all,
    reducer_for,
)
from rlx.codegen.cpu.rows.row_pipeline import RowPipeline
from rlx.codegen.cpu.rows.transposed import SquareReader, load_steps
from rlx.codegen.cpu.rows.turned_rows import TurnedRows
from rlx.codegen.native.irtypes import Value, vector
from rlx.codegen.native.notation import inline
from rlx.codegen.native.words import (
    Index,
    Word,
    address_of,
    byte_at,
    concat,
    gep,
    lanes,
    load,
    loop,
    masked_load,
    masked_store,
    part,
    ptr,
    splat,
    store,
    udiv,
    ugt,
    urem,
)
from rlx.ir.dim import Dim
from rlx.kernel.affine import affine, to_dim
from rlx.kernel.nests import Nest
from rlx.kernel.scalar import PRIMITIVES, Scalar, load_index
from rlx.records import dataclass

ALIASED = 4096  # a load waits for a recent store if their addresses agree modulo this
SAVE_COST = (
    8  # expressions at least this expensive are kept for the next pass over a row instead of recomputed
)

Visit = Callable[[Lane, list[Word], Round], list[Word]]
AheadAt = Callable[[Index], Sequence[Ahead]]  # what a place in a row prefetches


def _nothing_ahead(base: Index) -> Sequence[Ahead]:
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
    row: Sequence[Index]
    outside: Expression
    ready: set[Scalar]
    ahead: AheadAt = _nothing_ahead
    cached: Collection[int] = ()
    turn: Index = 0
    pivot: Word | None = None
    copy: Index | None = None  # number of the row among those that are copied at a time


class RowNest(SquareReader):
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
        self.turned = TurnedRows.of(self)
        parts = [{e for body in bodies for e in body.walk()} for bodies in self.bodies]
        self.saved = self.choose_saved(parts) if len(self.inner) == 1 else {}
        first = {e: next(n for n, inside in enumerate(parts) if e in inside) for e in self.saved}
        self.fresh = [[e for e in self.saved if first[e] == n] for n in range(len(parts))]
        """Expressions that each pass is the first to compute and keeps for later ones."""

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

    def gathers(self, e: Scalar) -> bool:
        """Whether an expression reads elements of a row that are apart, one by one."""
        if not is_load(e) or e in self.turned.loads:
            return False
        rank, number = len(self.nest.space), self.inner[-1]
        if e.prim == "at":
            steps = load_steps(e, rank)
            return steps is None or steps[-1] not in (0, 1)
        *others, last = load_index(e)
        parts = affine(last, rank)
        return (
            parts is None or to_dim(parts[0][-1]) not in (0, 1) or any(_uses_axis(i, number) for i in others)
        )

    def choose_saved(self, parts: Sequence[set[Scalar]]) -> dict[Scalar, Saved]:
        """Expensive expressions that a later pass needs again; `parts` are all expressions of each."""
        axis_number, out, rows = self.inner[0], dict[Scalar, Saved](), 0
        for number, bodies in enumerate(self.bodies):
            stack, seen = list(bodies), set[Scalar]()
            while stack:
                e = stack.pop()
                if e in out or e in seen:
                    continue
                seen.add(e)
                last = max(n for n, inside in enumerate(parts) if e in inside)
                if (
                    last > number
                    and (_cost(e) >= SAVE_COST or self.gathers(e))
                    and _uses_axis(e, axis_number)
                    and e.dtype.name in ("f32", "f64")
                ):
                    out[e] = Saved(rows, last - number)
                    rows += last - number
                else:
                    stack.extend(e.args)
        return out

    def emit(self) -> EmittedKernel:
        scratch: Dim = self.turned.nbytes
        if self.turned.loads:
            self.copies = ptr(self.frame.scratch())
        if self.saved:
            self.scratch = self.apart(byte_at(self.frame.scratch(), self.size(scratch)))
            per_row = self.nest.space[self.inner[0]] * 8 + 64
            scratch += per_row * sum(place.rows for place in self.saved.values()) + ALIASED
        self.with_streaming(self.all_rows)
        return self.frame.finish(scratch)

    @inline
    def apart(self, scratch: Value) -> Value:
        """Scratch that begins, within a page, a quarter page behind the operand that rows read first.

        A load waits for a recent store if the last 12 bits of addresses agree: scratch just behind an operand
        costs a softmax larger than the caches a fifth of its speed.
        """
        read = next((e.data for e in self.bodies[0][0].walk() if is_load(e)), None)
        if read is None:
            return scratch
        place, now = address_of(self.operands[read].pointer), address_of(scratch)
        return byte_at(scratch, (place + ALIASED // 4 - now) & (ALIASED - LINE_BYTES))

    @inline
    def all_rows(self) -> None:
        outer = self.sizes[: self.nest.outer]
        if not outer:
            if self.frame.thread == 0:
                self.row([])
        elif self.streaming and len(self.inner) == 1:
            RowPipeline(self).emit()
        elif self.turned.loads:
            space = [*outer[:-1], self.turned.blocks()]
            low, high = self.share(space)
            for u in loop(low, high):
                *others, block = self.indices(u, space)
                first = block * self.turned.rows
                count = min(outer[-1] - first, self.turned.rows)
                self.turned.fill(self.copies, others, first, count)
                for r in loop(count):
                    self.row([*others, first + r], r)
        else:
            low, high = self.share(outer)
            for r in loop(low, high):
                self.row(self.indices(r, outer))

    def row(self, row: Sequence[Index], copy: Index | None = None) -> None:
        """All passes over a row, of which there may be copies."""
        outside = self.outside(row)
        for number in range(self.last):
            found = self.reduce(self.begin(number, row, outside, self.ahead_in(number), copy=copy))
            outside.accs = [*outside.accs, *found]
        now = self.begin(self.last, row, outside, self.ahead_in(self.last), copy=copy)
        for number, output in enumerate(self.nest.stores):
            if not output.full:
                self.write(outside, output, number, row)
        if self.full:
            self.store_from(row, now)

    def outside(self, row: Sequence[Index]) -> Expression:
        """Expressions of a row outside its loops."""
        return self.point([*row, *(0 for _ in self.inner)], None)

    def begin(
        self,
        number: int,
        row: Sequence[Index],
        outside: Expression,
        ahead: AheadAt = _nothing_ahead,
        cached: Collection[int] = (),
        turn: Index = 0,
        copy: Index | None = None,
    ) -> Pass:
        """Start a pass: what its loop does not change is computed."""
        self.prepare(outside, self.bodies[number], set(range(self.nest.outer)), self.known_before(number))
        ready = {e for n in range(number) for e in self.fresh[n]}
        pivot = None
        known = isinstance(self.nest.space[-1], int)
        if number < self.last and self.long and known and len(self.reductions[number]) > 1:
            first = self.outside(row)
            first.accs = outside.accs
            pivot = Word(first(self.bodies[number][0]))
        return Pass(number, row, outside, ready, ahead, cached, turn, pivot, copy)

    def ahead_in(self, number: int) -> AheadAt:
        """The second pass over a row prefetches the next row, which arrives while this one is computed."""
        if self.last + bool(self.full) == 1:
            return lambda base: AHEAD
        if number != 1 or len(self.inner) != 1:
            return _nothing_ahead
        return lambda base: (Ahead(self.sizes[self.inner[-1]]),)

    def store_all(self, at: Expression, axes: Sequence[Index]) -> None:
        """Every store of one vector."""
        for number, output in self.full:
            self.write(at, output, number, axes, output.strides[-1])

    def at(self, axes: Sequence[Index], lane: Lane, now: Pass) -> Expression:
        """Expressions at one vector of a pass."""
        at = self.point(axes, lane, now.outside)
        at.ahead, at.cached = now.ahead(axes[-1]), now.cached
        at.saved = {e: partial(self.read_saved, e, lane, now) for e in now.ready}
        if now.copy is not None:
            for e in self.turned.loads:
                at.saved[e] = partial(self.turned.read, self.copies, e, now.copy, lane)
        return at

    def read_saved(self, e: Scalar, lane: Lane, now: Pass) -> Value:
        """What an earlier pass has kept."""
        place, type_ = self.saved_place(e, lane.base, now), vector(register_type(e.dtype), lane.width)
        return load(type_, place) if lane.mask is None else masked_load(type_, place, lane.mask)

    @inline
    def saved_place(self, e: Scalar, i: Value | int, now: Pass) -> ptr:
        kept = self.saved[e]
        row_bytes = self.sizes[-1] * 8 + 64
        row = kept.first + urem(Word(now.turn), kept.rows)
        return gep(byte_at(self.scratch, row_bytes * row), i, register_type(e.dtype))

    def keep(self, at: Expression, now: Pass) -> None:
        """Write freshly computed expensive expressions to scratch for later passes."""
        lane = at.lane
        assert lane is not None
        for e in self.fresh[now.number]:
            value, place = at.vector(e), self.saved_place(e, lane.base, now)
            if lane.mask is None:
                store(value, place)
            else:
                masked_store(value, place, lane.mask)

    @inline
    def store_from(self, axes: Sequence[Index], now: Pass) -> None:
        """Store all vectors of the inner axes, of which those behind `axes` are open."""
        number = len(axes)

        def vector_at(i: Index, mask: Value | None) -> None:
            here = [*axes, i]
            self.store_all(self.at(here, Lane(number, i, self.lanes, mask), now), here)

        if number == len(self.sizes) - 1:
            self.along(self.sizes[number], self.lanes, vector_at)
        else:
            for i in loop(self.sizes[number]):
                self.store_from([*axes, i], now)

    @inline
    def reduce(self, now: Pass) -> list[Word]:
        """The statistics of one pass over the inner axes, as scalars."""
        reducer, extent = self.reducer(now.number), self.sizes[-1]
        if isinstance(extent, int) or len(self.inner) == 1 or not is_float_sum(reducer.stat):
            return self.reduce_by(reducer, now)
        # Not in blocks always: each row of several begins a block.
        blocked = BlockedSum(self.fn, reducer.stat, self.lanes)
        return self.reduce_by(blocked, now) if ugt(extent, LONG) else self.reduce_by(reducer, now)

    def reduce_by(self, reducer: Reducer, now: Pass) -> list[Word]:
        """What a reducer finds in one pass."""
        start = [reducer.held() for _ in range(self.groups)]
        return reducer.results(self.reduce_from(now.row, start, reducer, now), now.pivot)

    @inline
    def reduce_from(
        self, axes: Sequence[Index], groups: list[list[Word]], reducer: Reducer, now: Pass
    ) -> list[list[Word]]:
        """Reduce the inner axes behind `axes`."""
        if len(axes) < len(self.sizes) - 1:
            for i in loop(self.sizes[len(axes)]):
                groups = self.reduce_from([*axes, i], groups, reducer, now)
            return groups

        def visit(lane: Lane, group: list[Word], turn: Round) -> list[Word]:
            return self.add_vector(now, reducer, [*axes, Word(lane.base)], lane, group, turn)

        return self.over_row([reducer], groups, visit)

    @inline
    def add_vector(
        self, now: Pass, reducer: Reducer, axes: Sequence[Index], lane: Lane, group: list[Word], turn: Round
    ) -> list[Word]:
        """One step of a reduction."""
        at = self.at(axes, lane, now)
        value = at.vector(self.bodies[now.number][0])
        self.keep(at, now)
        if now.pivot is not None:
            value -= splat(now.pivot, lane.width)
        return reducer.add(group, value, self.position(axes), lane.mask, turn)

    @inline
    def over_row(
        self, reducers: Sequence[Reducer], groups: list[list[Word]], visit: Visit, paired: bool = False
    ) -> list[list[Word]]:
        """Every vector of the last axis, in blocks where sums are long; groups hold parts of all reducers."""
        extent = self.sizes[-1]
        if not any(isinstance(r, BlockedSum) for r in reducers):
            return self.over_vectors(groups, visit, 0, extent, paired)
        block = LONG - LONG % (self.lanes * len(groups))
        for i in loop(0, extent, block):
            begin = [enter_all(reducers, held) for held in groups]
            found = self.over_vectors(begin, visit, i, min(i + block, extent), paired)
            groups = [leave_all(reducers, held, new) for held, new in zip(groups, found, strict=True)]
        return groups

    @inline
    def over_vectors(
        self, groups: list[list[Word]], visit: Visit, start: Index, stop: Index, paired: bool = False
    ) -> list[list[Word]]:
        """Every vector of a part of the last axis that starts with a whole round, in a fixed order: vector n
        belongs to group n modulo their number, the rest that fills no whole round to the first.

        With `paired`, two neighbouring groups are visited as one of twice the width where that is possible.
        """
        last, width = len(self.sizes) - 1, self.lanes * (2 if paired else 1)
        block = self.lanes * len(groups)
        whole = stop - urem(Word(stop), block)
        if paired:
            groups = _pairs(groups)

        def round_at(i: Index) -> Round:
            return Round(lambda: udiv(Word(i), block) + 1)

        for i in loop(start, whole, block):
            turn = round_at(i)
            places = [Lane(last, i + n * width, width) for n in range(len(groups))]
            groups = [visit(lane, group, turn) for lane, group in zip(places, groups, strict=True)]
        if paired:
            groups = _halves(groups, self.lanes)

        def visit_one(i: Index, mask: Value | None, group: list[Word]) -> list[Word]:
            rounds, more = udiv(whole, block), udiv(i - whole, self.lanes)
            return visit(Lane(last, i, self.lanes, mask), group, Round(lambda: rounds + more + 1))

        first, *others = groups
        rest = stop - urem(Word(stop), self.lanes)
        for i in loop(whole, rest, self.lanes):
            first = visit_one(i, None, first)
        left = stop - rest
        first = visit_one(rest, lanes(left, self.lanes), first) if left > 0 else first
        return [first, *others]


def _pairs(groups: list[list[Word]]) -> list[list[Word]]:
    """Neighbouring groups as one of twice the width."""
    neighbours = zip(groups[::2], groups[1::2], strict=True)
    return [[concat(a, b) for a, b in zip(*two, strict=True)] for two in neighbours]


def _halves(groups: list[list[Word]], width: int) -> list[list[Word]]:
    """What `_pairs` put together."""
    return [[part(v, first, width) for v in group] for group in groups for first in (0, width)]


def _cost(e: Scalar) -> int:
    return PRIMITIVES[e.prim].cost if e.prim in PRIMITIVES else 0


def _uses_axis(e: Scalar, number: int) -> bool:
    return any(x.prim == "axis" and x.data == number for x in e.walk())
