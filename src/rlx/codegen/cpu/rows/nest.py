"""Loop nests as native code: fused maps, reductions and row kernels (softmax, norms).

Lanes run along the innermost axis (rows), or along the last kept axis (columns). The order of every sum
depends on its shape and the target only: lanes and unrolled accumulators combine in a fixed tree, and threads
split rows, never a reduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import TypeAlias

from rlx.codegen.cpu.expression import AHEAD, STREAM_AHEAD, Expression, Lane
from rlx.codegen.cpu.frame import EmittedKernel, KernelFrame, Slot
from rlx.codegen.cpu.rows.chained import DEEP_TOGETHER, is_deep, is_plain
from rlx.codegen.cpu.rows.collapse import accesses, bodies, collapse, map_bodies, split_blocks
from rlx.codegen.cpu.rows.nest_base import NestEmitter
from rlx.codegen.cpu.rows.ranges import cuts, decided_within
from rlx.codegen.cpu.rows.reduction import BlockedSum, Reducer, is_float_sum, reducer_for
from rlx.codegen.cpu.rows.row_nest import RowNest
from rlx.codegen.cpu.rows.transposed import TransposedNest, read_axis
from rlx.codegen.native.irtext import Module
from rlx.codegen.native.irtypes import Value
from rlx.codegen.native.notation import inline, write
from rlx.codegen.native.words import Index, Word, ceildiv, lanes, loop, udiv, urem
from rlx.ir.types import Shape
from rlx.kernel.affine import affine
from rlx.kernel.nests import Nest, Stat, Store
from rlx.kernel.scalar import LOADS, Scalar, axis, replace_axes
from rlx.target.cpu import Target


def emit_nest(
    module: Module, name: str, nest: Nest, inputs: Sequence[Slot], outputs: Sequence[Slot]
) -> EmittedKernel:
    """Write the kernel of a nest into the module."""
    flat = _flat(nest, inputs)
    frame = KernelFrame(module, name, inputs, outputs)
    return write(frame.fn, lambda: _emitter(frame, flat).emit())


def _emitter(frame: KernelFrame, flat: Nest) -> _MapNest | TransposedNest | _ColumnNest | RowNest:
    """What writes the kernel of a nest with these axes."""
    if flat.stats:
        if not _prefers_columns(flat):
            return RowNest(frame, flat)
        return _ColumnNest(frame, _lane_axis_last(flat, frame.module.target))
    flat = _wide_axis_last(flat, frame.inputs, frame.module.target)
    turned = read_axis(flat)
    return _MapNest(frame, flat) if turned is None else TransposedNest(frame, flat, turned)


def _flat(nest: Nest, inputs: Sequence[Slot]) -> Nest:
    """The axes that a kernel loops over."""
    flat = collapse(split_blocks(nest), [slot.shape for slot in inputs], [slot.steps for slot in inputs])
    return _with_inner_axis(flat) if flat.stats and flat.outer == len(flat.space) else flat


def order_of_sums(nest: Nest, inputs: Sequence[Slot]) -> Shape:
    """What decides in which order sums add: whether lanes run along columns, and the axes that are summed."""
    flat = _flat(nest, inputs)
    return (int(_prefers_columns(flat)), *flat.space[flat.outer :])


def _wide_axis_last(nest: Nest, inputs: Sequence[Slot], target: Target) -> Nest:
    """A map whose last axis leaves most lanes empty runs along the axis that most of its loads are contiguous
    along, if that is wide enough: its stores are scattered then.
    """
    lanes, rank = target.lanes("f32"), len(nest.space)
    last = nest.space[-1] if rank else lanes
    if not isinstance(last, int) or 2 * last > lanes:
        return nest
    along = [0] * rank
    for body in bodies(nest):
        for e in body.walk():
            whole = e.prim == "at" or (e.prim in LOADS and inputs[e.data].steps[-1:] == (1,))
            parts = affine(e.args[-1], rank) if whole else None
            if parts is not None:
                along = [n + (step == 1) for n, step in zip(along, parts[0], strict=True)]
    wide = [a for a, d in enumerate(nest.space) if not isinstance(d, int) or d >= lanes]
    best = max(wide, key=lambda a: (along[a], a), default=None)
    if best is None or along[best] <= along[-1]:
        return nest
    return _reordered(nest, [*(a for a in range(rank) if a != best), best])


def _lane_axis_last(nest: Nest, target: Target) -> Nest:
    """Columns whose last kept axis is the one that most accesses are contiguous along, if it fills the lanes.

    Each column adds for itself, so that lanes along any kept axis give the same bits.
    """
    last, lanes = nest.outer - 1, target.lanes("f32")
    steps = accesses(nest).steps
    along = [sum(s[a] == 1 for s in steps) for a in range(nest.outer)]
    wide = [a for a, d in enumerate(nest.space[:last]) if not isinstance(d, int) or d >= lanes]
    best = max(wide, key=lambda a: along[a], default=last)
    if along[best] <= along[last]:
        return nest
    others = [a for a in range(nest.outer) if a != best]
    return _reordered(nest, [*others, best, *range(nest.outer, len(nest.space))])


def _reordered(nest: Nest, order: Sequence[int]) -> Nest:
    """The same nest with its axes in another order; kept ones stay before those that are reduced."""
    place = [axis(order.index(a)) for a in range(len(order))]
    moved = map_bodies(nest, lambda s: replace_axes(s, place))
    stores = tuple(
        replace(s, strides=tuple(s.strides[a] for a in order if a < len(s.strides))) for s in moved.stores
    )
    return replace(moved, space=tuple(nest.space[a] for a in order), stores=stores)


def _with_inner_axis(nest: Nest) -> Nest:
    """Reductions over nothing but axes of size 1 still need one inner axis to run along."""
    stores = tuple(replace(s, strides=(*s.strides, 0)) if s.full else s for s in nest.stores)
    return Nest((*nest.space, 1), nest.outer, nest.stats, stores, nest.columns)


def _prefers_columns(nest: Nest) -> bool:
    """Whether lanes run along the last kept axis: by the order of additions, or if any will do, where
    neighbours in memory are along it rather than along the last reduced one."""
    if nest.outer == 0 or nest.outer == len(nest.space):
        return False
    if nest.columns is not None and not _adds_in_any_order(nest):
        return nest.columns
    steps = accesses(nest).steps
    rows = sum(1 for s in steps if s[-1] == 1)
    columns = sum(1 for s in steps if s[nest.outer - 1] == 1)
    return columns > rows


def _adds_in_any_order(nest: Nest) -> bool:
    """One sum of two terms has the same bits in either direction. Mean and variance are not one sum."""
    inner = nest.space[nest.outer :]
    known = [d for d in inner if isinstance(d, int)]
    return len(nest.stats) == 1 and len(known) == len(inner) and prod(known) <= 2


Piece: TypeAlias = tuple[int, Index, Sequence[Store]]  # first and last + 1 index along an axis
MOST_PIECES = 8  # of an axis that have code of their own


class _MapNest(NestEmitter):
    """No reduction: lanes along the last axis."""

    @inline
    def emit(self) -> EmittedKernel:
        if self.nest.space:
            self.with_streaming(self.all)
        elif self.frame.thread == 0:
            self.stores(self.point([], None), [], self.nest.stores)
        return self.frame.finish()

    @inline
    def all(self) -> None:
        *outer, inner = self.sizes
        stores = self.nest.stores
        if not outer:
            first, end = self.share([ceildiv(inner, self.lanes)])
            start, stop = first * self.lanes, min(end * self.lanes, inner)
            self.sweep([], start, stop, self.pieces(0, stores))
            return
        number = next((n for n in range(len(outer)) if len(self.pieces(n, stores)) > 1), 0)
        for low, high, inside in self.pieces(number, stores):
            parts = self.pieces(len(outer), inside)
            space = [*outer[:number], high - low, *outer[number + 1 :]]
            first, end = self.share(space)
            begins = [low if n == number else 0 for n in range(len(outer))]
            if self.goes_by_lines:
                self.lines(first, end, space, begins, parts)
                continue
            for r in loop(first, end):
                row = self.indices(r, space)
                row = [i + low if n == number else i for n, i in enumerate(row)]
                self.sweep(row, 0, inner, parts)

    @property
    def goes_by_lines(self) -> bool:
        """Whether rows are so short that finding each by divisions takes longer than what is computed."""
        short = isinstance(self.sizes[-1], int) and self.sizes[-1] <= 2 * self.lanes
        return short and len(self.sizes) > 2 and self.frame.module.target.divides_slowly

    @inline
    def lines(
        self, first: Word, end: Word, space: Sequence[Index], begins: Sequence[Index], parts: Sequence[Piece]
    ) -> None:
        """Rows `first` to `end`: what depends on the axes before the last kept one is computed once for all
        rows of a line."""
        *before, size = space
        length, last = Word(max(size, 1)), len(space) - 1
        for line in loop(udiv(first, length), ceildiv(end, length)):
            start = line * length
            row = [i + begin for i, begin in zip(self.indices(line, before), begins, strict=False)]
            shared = self.point([*row, 0, 0], None)
            self.prepare(shared, [s.body for _, _, stores in parts for s in stores], set(range(last)))
            for place in loop(max(first, start) - start, min(end - start, length)):
                self.sweep([*row, Word(place + begins[last])], 0, self.sizes[-1], parts, shared)

    def pieces(self, number: int, stores: Sequence[Store]) -> list[Piece]:
        """Parts of an axis, and what is stored there: which part of a concatenation a point is in, or whether
        in padding, is not asked at every point."""
        space, extent = self.nest.space, self.sizes[number]
        is_last = number == len(space) - 1
        if not isinstance(extent, int) or (is_last and self.streaming):  # streaming stores need whole vectors
            return [(0, extent, stores)]
        least = self.lanes if is_last else 1
        made: list[Piece] = []
        left: list[tuple[int, int, Sequence[Store]]] = [(0, extent, stores)]
        while left:
            low, high, inside = left.pop()
            bodies = [s.body for s in inside]
            found = cuts(bodies, space, number, is_last) if len(made) + len(left) < MOST_PIECES else []
            cut = next((c for c in found if min(c - low, high - c) >= least), None)
            if cut is None:
                made.append((low, high, inside))
                continue
            for a, b in ((cut, high), (low, cut)):
                part = [replace(s, body=decided_within(s.body, space, number, a, b)) for s in inside]
                left.append((a, b, part))
        return made

    @inline
    def sweep(
        self,
        row: list[Word],
        start: Index,
        stop: Index,
        pieces: Sequence[Piece],
        known: Expression | None = None,
    ) -> None:
        if len(pieces) == 1:
            self.piece(row, start, stop, pieces[0][2], known)
        else:
            for low, high, stores in pieces:
                first = max(start, low)
                # A thread's share may end before a piece begins: then nothing of the piece is its own.
                self.piece(row, first, max(first, min(stop, high)), stores, known)

    @inline
    def piece(
        self,
        row: list[Word],
        start: Index,
        stop: Index,
        stores: Sequence[Store],
        known: Expression | None = None,
    ) -> None:
        last = len(row)
        outside = self.point([*row, 0], None, known)
        self.prepare(outside, [s.body for s in stores], set(range(last)))

        def vector_at(i: Index, mask: Value | None, width: int = self.lanes) -> None:
            at = self.point([*row, i], Lane(last, i, width, mask), outside)
            at.ahead = STREAM_AHEAD if self.streaming else AHEAD
            self.stores(at, [*row, i], stores)

        wide = self.together(stores) * self.lanes
        if wide > self.lanes:
            end = stop - urem(Word(stop - start), wide)
            for i in loop(start, end, wide):
                vector_at(i, None, wide)
            start = end
        self.along(stop, self.lanes, vector_at, start)

    def together(self, stores: Sequence[Store]) -> int:
        """Vectors that are computed side by side.

        A processor looks ahead over so many instructions: these are few vectors, where each is a chain of
        twenty that wait for each other. Non-temporal stores are faster with more of them at once, too.
        """
        extent, least = self.nest.space[-1], 2 if self.streaming else 1
        if self.frame.module.target.web or (isinstance(extent, int) and extent < DEEP_TOGETHER * self.lanes):
            return least  # modules for browsers are loaded over a net: their size counts
        deep = is_deep([s.body for s in stores]) and is_plain(stores, len(self.nest.space))
        return DEEP_TOGETHER if deep else least

    def stores(self, at: Expression, axes: Sequence[Index], stores: Sequence[Store]) -> None:
        for number, store in enumerate(stores):
            step = store.strides[-1] if store.strides else 1
            self.write(at, store, number, axes, step)


COLUMN_BLOCK = 256  # elements of a column that one chain of additions sums
COLUMN_CHAINS = 4  # columns that are summed side by side where they fill one vector


class _ColumnNest(NestEmitter):
    """Lanes along the last kept axis: every lane reduces its own column, in ascending order.

    Columns that one vector holds, as the channels of a block, are taken from several places of the other kept
    axes at once: a single chain of additions would wait for each.
    """

    @inline
    def emit(self) -> EmittedKernel:
        *outer, columns = self.sizes[: self.nest.outer]
        if isinstance(columns, int) and columns <= self.lanes:
            self.wide = self.lanes
            self.narrow(outer, columns)
        else:
            self.wide = self.lanes * 2
            self.broad(outer, columns)
        return self.frame.finish()

    @inline
    def narrow(self, outer: Sequence[Index], columns: int) -> None:
        """Columns that fit one vector."""
        mask = None if columns == self.wide else lanes(columns, self.wide)
        low, high = self.share(outer)
        whole = high - urem(Word(high - low), COLUMN_CHAINS)
        for r in loop(low, whole, COLUMN_CHAINS):
            self.column([[*self.indices(r + n, outer), Word(0)] for n in range(COLUMN_CHAINS)], mask)
        for r in loop(whole, high):
            self.column([[*self.indices(r, outer), Word(0)]], mask)

    @inline
    def broad(self, outer: Sequence[Index], columns: Index) -> None:
        """Any number of columns, two vectors at a time."""
        space = [*outer, ceildiv(columns, self.wide)]
        low, high = self.share(space)
        for r in loop(low, high):
            *row, block = self.indices(r, space)
            base = block * self.wide
            left = columns - base
            if left >= self.wide:
                self.column([[*row, base]], None)
            else:
                self.column([[*row, base]], lanes(left, self.wide))

    @inline
    def column(self, rows: Sequence[list[Word]], mask: Value | None) -> None:
        """The columns of one vector, at some places of the other axes."""
        number = len(rows[0])
        inner = [0 for _ in self.sizes[number:]]
        heads = [self.point([*row, *inner], Lane(number - 1, row[-1], self.wide, mask)) for row in rows]
        for stat in self.nest.stats:
            reducer = self.reducer(stat)
            totals = self.reduce(reducer, stat.body, rows, [reducer.held() for _ in rows], heads)
            for head, total in zip(heads, totals, strict=True):
                head.accs = [*head.accs, reducer.lane_result(total)]
        for row, head in zip(rows, heads, strict=True):
            for number, output in enumerate(self.nest.stores):
                if not output.full:
                    self.write(head, output, number, row, output.strides[-1])
            if any(output.full for output in self.nest.stores):
                self.store_all(row, head)

    @inline
    def reduce(
        self,
        reducer: Reducer,
        body: Scalar,
        points: Sequence[Sequence[Index]],
        totals: list[list[Word]],
        heads: Sequence[Expression],
    ) -> list[list[Word]]:
        """Reduce the axes behind those of each point, in blocks where a sum is long."""
        number = len(points[0])
        if number == len(self.sizes):
            position = self.position(points[0])
            values = [
                self.point(axes, head.lane, head).vector(body)
                for axes, head in zip(points, heads, strict=True)
            ]
            return [
                reducer.step(total, value, position, None, per_lane=True)
                for total, value in zip(totals, values, strict=True)
            ]
        extent = self.sizes[number]
        if not isinstance(reducer, BlockedSum):
            for i in loop(extent):
                totals = self.reduce(reducer, body, [[*axes, i] for axes in points], totals, heads)
            return totals
        for start in loop(0, extent, COLUMN_BLOCK):
            parts = [reducer.enter(total) for total in totals]
            for i in loop(start, min(start + COLUMN_BLOCK, extent)):
                parts = self.reduce(reducer, body, [[*axes, i] for axes in points], parts, heads)
            totals = [reducer.leave(total, part) for total, part in zip(totals, parts, strict=True)]
        return totals

    @inline
    def store_all(self, axes: Sequence[Index], head: Expression) -> None:
        """Store what covers the reduced axes, of which those behind `axes` are open."""
        if len(axes) < len(self.sizes):
            for i in loop(self.sizes[len(axes)]):
                self.store_all([*axes, i], head)
        else:
            at = self.point(axes, head.lane, head)
            for number, output in enumerate(self.nest.stores):
                if output.full:
                    self.write(at, output, number, axes, output.strides[self.nest.outer - 1])

    def reducer(self, stat: Stat) -> Reducer:
        """Sums of long columns go by blocks."""
        extent, single = self.nest.space[-1], len(self.nest.space) - self.nest.outer == 1
        if single and is_float_sum(stat) and not (isinstance(extent, int) and extent <= COLUMN_BLOCK):
            return BlockedSum(self.fn, stat, self.wide)
        return reducer_for(self.fn, stat, self.wide)
