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
from rlx.codegen.cpu.rows.collapse import accesses, bodies, collapse, map_bodies, split_blocks
from rlx.codegen.cpu.rows.nest_base import NestEmitter
from rlx.codegen.cpu.rows.ranges import cuts, decided_within
from rlx.codegen.cpu.rows.reduction import BlockedSum, Reducer, is_float_sum, reducer_for
from rlx.codegen.cpu.rows.row_nest import RowNest
from rlx.codegen.cpu.rows.transposed import TransposedNest, read_axis
from rlx.codegen.native.irflow import Body
from rlx.codegen.native.irtext import Int, Module
from rlx.codegen.native.irtypes import Value
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
    if not flat.stats:
        flat = _wide_axis_last(flat, inputs, module.target)
        turned = read_axis(flat)
        return _MapNest(frame, flat).emit() if turned is None else TransposedNest(frame, flat, turned).emit()
    if _prefers_columns(flat):
        return _ColumnNest(frame, flat).emit()
    return RowNest(frame, flat).emit()


def _flat(nest: Nest, inputs: Sequence[Slot]) -> Nest:
    """The axes that a kernel loops over."""
    flat = collapse(split_blocks(nest), [slot.steps for slot in inputs])
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
    order = [*(a for a in range(rank) if a != best), best]
    place = [axis(order.index(a)) for a in range(rank)]
    moved = map_bodies(nest, lambda s: replace_axes(s, place))
    stores = tuple(replace(s, strides=tuple(s.strides[a] for a in order)) for s in moved.stores)
    return Nest(tuple(nest.space[a] for a in order), rank, moved.stats, stores)


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


Piece: TypeAlias = tuple[int, Int, Sequence[Store]]  # first and last + 1 index along an axis
MOST_PIECES = 8  # of an axis that have code of their own


class _MapNest(NestEmitter):
    """No reduction: lanes along the last axis."""

    def emit(self) -> EmittedKernel:
        fn, rank = self.fn, len(self.nest.space)
        if rank == 0:
            fn.branch(
                fn.cmp("eq", self.frame.thread, 0),
                lambda: self.stores(self.point([], None), [], self.nest.stores),
            )
        else:
            self.with_streaming(self.all)
        return self.frame.finish()

    def all(self) -> None:
        fn, stores = self.fn, self.nest.stores
        if len(self.nest.space) == 1:
            blocks = fn.ceildiv(self.sizes[0], self.lanes)
            low, high = self.frame.share(blocks)
            start = fn.mul(low, self.lanes)
            stop = fn.smin(fn.mul(high, self.lanes), self.sizes[0])
            return self.sweep([], start, stop, self.pieces(0, stores))
        outer = range(len(self.nest.space) - 1)
        number = next((n for n in outer if len(self.pieces(n, stores)) > 1), 0)
        for low, high, inside in self.pieces(number, stores):
            sizes = [*self.sizes[:number], fn.sub(high, low), *self.sizes[number + 1 : -1]]
            parts = self.pieces(len(outer), inside)

            def sweep(row: list[Int], low: int = low, parts: Sequence[Piece] = parts) -> None:
                row[number] = fn.add(row[number], low)
                self.sweep(row, 0, self.sizes[-1], parts)

            self.rows(sizes, sweep)

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

    def sweep(self, row: list[Int], start: Int, stop: Int, pieces: Sequence[Piece]) -> None:
        if len(pieces) == 1:
            return self.piece(row, start, stop, pieces[0][2])
        for low, high, stores in pieces:
            first = self.fn.smax(start, low)
            # A thread's share may end before a piece begins: then nothing of the piece is its own.
            self.piece(row, first, self.fn.smax(first, self.fn.smin(stop, high)), stores)

    def piece(self, row: list[Int], start: Int, stop: Int, stores: Sequence[Store]) -> None:
        last = len(row)
        outside = self.point([*row, 0], None)
        self.prepare(outside, [s.body for s in stores], set(range(last)))

        def vector_at(i: Int, mask: Value | None, width: int = self.lanes) -> None:
            axes = [*row, i]
            at = self.point(axes, Lane(last, i, width, mask), outside)
            at.ahead = STREAM_AHEAD if self.streaming else AHEAD
            self.stores(at, axes, stores)

        if self.streaming:  # two vectors at once: more of them are under way
            pair = 2 * self.lanes
            end = self.fn.sub(stop, self.fn.urem(self.fn.sub(stop, start), pair))
            self.fn.loop(start, end, pair, [], lambda i, _: vector_at(i, None, pair))
            start = end
        self.along(stop, self.lanes, vector_at, start)

    def stores(self, at: Expression, axes: list[Int], stores: Sequence[Store]) -> None:
        for number, store in enumerate(stores):
            step = store.strides[-1] if store.strides else 1
            self.write(at, store, number, axes, step)


COLUMN_BLOCK = 256  # elements of a column that one chain of additions sums


class _ColumnNest(NestEmitter):
    """Lanes along the last kept axis: every lane reduces its own column, in ascending order."""

    def emit(self) -> EmittedKernel:
        fn, outer = self.fn, self.nest.outer
        last = outer - 1
        self.wide = self.lanes * 2
        columns = self.sizes[last]
        blocks = fn.ceildiv(columns, self.wide)

        def unit(row: list[Int]) -> None:
            base = fn.mul(row[-1], self.wide)
            left = fn.sub(columns, base)
            full = fn.cmp("sge", left, self.wide)
            fn.branch(
                full,
                lambda: self.column([*row[:-1], base], None),
                lambda: self.column([*row[:-1], base], fn.lanes(left, self.wide)),
            )

        self.rows([*self.sizes[:last], blocks], unit)
        return self.frame.finish()

    def column(self, row: list[Int], mask: Value | None) -> None:
        fn, outer = self.fn, self.nest.outer
        inner = len(self.nest.space) - outer
        lane = Lane(outer - 1, row[-1], self.wide, mask)
        head = self.point([*row, *(0 for _ in range(inner))], lane)
        for stat in self.nest.stats:
            reducer = self.reducer(stat)

            def level(
                axes: list[Int], carried: list[Value], reducer: Reducer = reducer, body: Scalar = stat.body
            ) -> list[Value]:
                number = len(axes)
                if number == len(self.nest.space):
                    at = self.point(axes, lane, head)
                    flat: Int = 0
                    for n in range(outer, number):
                        flat = fn.add(fn.mul(flat, self.sizes[n]), axes[n])
                    return reducer.step(carried, at.vector(body), flat, None, per_lane=True)
                return self.elements(reducer, number, carried, lambda i, now: level([*axes, i], now))

            carried = level(list(row), reducer.held())
            head.accs = [*head.accs, reducer.lane_result(carried)]
        for number, store in enumerate(self.nest.stores):
            if not store.full:
                self.write(head, store, number, row, store.strides[-1])
        full = [(n, s) for n, s in enumerate(self.nest.stores) if s.full]
        if full:

            def write_level(axes: list[Int]) -> None:
                number = len(axes)
                if number < len(self.nest.space):
                    fn.loop(0, self.sizes[number], 1, [], lambda i, _: write_level([*axes, i]))
                    return
                at = self.point(axes, lane, head)
                for n, store in full:
                    self.write(at, store, n, axes, store.strides[outer - 1])

            write_level(list(row))

    def reducer(self, stat: Stat) -> Reducer:
        """Sums of long columns go by blocks."""
        extent, single = self.nest.space[-1], len(self.nest.space) - self.nest.outer == 1
        if single and is_float_sum(stat) and not (isinstance(extent, int) and extent <= COLUMN_BLOCK):
            return BlockedSum(self.fn, stat, self.wide)
        return reducer_for(self.fn, stat, self.wide)

    def elements(self, reducer: Reducer, number: int, carried: list[Value], body: Body) -> list[Value]:
        """One reduced axis, in blocks where its sum is long."""
        fn, extent = self.fn, self.sizes[number]
        if not isinstance(reducer, BlockedSum):
            return fn.loop(0, extent, 1, carried, body)

        def block(i: Int, held: list[Value]) -> list[Value]:
            stop = fn.smin(fn.add(i, COLUMN_BLOCK), extent)
            return reducer.leave(held, fn.loop(i, stop, 1, reducer.enter(held), body))

        return fn.loop(0, extent, COLUMN_BLOCK, carried, block)
