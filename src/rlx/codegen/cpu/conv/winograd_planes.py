"""Winograd convolution over three axes: two are transformed, planes of a window are summed at points.

The planes that an output plane reads are further input channels of its tiles: inputs are transformed once for
each plane of the window (a few hundredths of the products), sums once. A strip holds runs of tiles, each of
one output plane. A run leaves out planes of the window that lie in the padding, so what is summed for an
output does not depend on how tiles are cut. A panel of weights meets all runs of a strip while it is near.

A product with padding adds 0, unless its weight is NaN or infinite (`skip.py`). One point of a kernel holds
all its taps; where it is not finite in a plane that is left out, the tiles of that run are computed again
directly, and their sums start with NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rlx.codegen.cpu.conv.skip import taps_inside
from rlx.codegen.cpu.conv.winograd import Winograd
from rlx.codegen.cpu.conv.winograd_direct import ELEMENT
from rlx.codegen.cpu.product.gemm_cut import Count, Tiles
from rlx.codegen.native.irtext import constant, vector
from rlx.codegen.native.notation import inline, native
from rlx.codegen.native.words import (
    Word,
    any_lane,
    builder,
    call,
    ceildiv,
    fma,
    gep,
    i64,
    is_nan,
    load,
    loop,
    noalias,
    ptr,
    select,
    store,
    udiv,
    uge,
    umax,
    urem,
)
from rlx.ir.dim import known_eq
from rlx.records import dataclass


@dataclass(frozen=True)
class Run:
    """Tiles of one output plane that follow each other, after `before` others of the strip."""

    plane: Count  # among those of all images
    inside: Count  # the first tile's number in the plane
    tiles: Count
    before: Count
    taps: tuple[Count, Count]  # planes of the window that are inside the image: first and last + 1


class WinogradPlanes(Winograd):
    """Writes the kernel of a convolution over three axes."""

    @property
    def depth_blocks(self) -> int:
        """Blocks of input channels, of all planes of a window."""
        return self.layout.depth // self.lanes

    @inline
    def images(self) -> Count:
        return self.table.size(self.shape.images) * self.table.size(self.shape.out[0])

    @inline
    def strips(self, total: Count, per_image: Count) -> Count:
        """Whole planes, or equal parts of planes."""
        planes, per = self.images(), umax(per_image, 1)
        parts = planes * ceildiv(per, self.most)
        return select(uge(per, self.most), parts, ceildiv(planes, max(udiv(self.most, per), 1)))

    @inline
    def run(self, plane: Count, first: Count, tiles: Count, per_plane: Count) -> Run:
        """The part of a strip that is in one plane."""
        begin = max(first, plane * per_plane)
        stop = min(first + tiles, (plane + 1) * per_plane)
        taps = taps_inside(self.table, self.shape, 0, urem(plane, self.table.size(self.shape.out[0])))
        return Run(plane, begin - plane * per_plane, stop - begin, begin - first, taps)

    @inline
    def source(self, image: Count, plane: Count, tap: Count) -> ptr:
        """Where the plane of an image begins that a tap of an output plane reads."""
        table, shape = self.table, self.shape
        read = plane * shape.strides[0] + tap * shape.dilations[0] - table.size(shape.low[0])
        start = image * table.size(self.x.batch) + read * table.size(self.x.axes[0])
        return gep(table.start(self.nest.x), start, ELEMENT)

    @inline
    def strip(
        self, first: i64, tiles: i64, begin: Count, end: Count, per_image: Count, tiles_w: Count
    ) -> None:
        table, layout = self.table, self.layout
        into, sums = self.point_step(self.depth_blocks, tiles), self.point_step(self.out_blocks, tiles)
        u: Count = table.scratch()
        v = gep(u, into * layout.points, ELEMENT)
        planes = udiv(first, per_image), ceildiv(first + tiles, per_image)
        cut = [udiv(per_image, tiles_w), tiles_w]
        for plane in loop(*planes):
            self.transform_run(self.run(plane, first, tiles, per_image), u, into, cut)

        def run_panel(x: ptr, w: ptr, y: ptr, j: Count, vectors: int) -> None:
            for plane in loop(*planes):
                self.multiply_run(self.run(plane, first, tiles, per_image), x, w, y, j, vectors)

        def spoil_panel(j: Count, vectors: int) -> None:
            for plane in loop(*planes):
                self.spoil_run(self.run(plane, first, tiles, per_image), v, j, vectors)

        for p in loop(layout.points):
            w = gep(table.start(self.nest.w), p * layout.panels.elements, ELEMENT)
            x, y = gep(u, p * into, ELEMENT), gep(v, p * sums, ELEMENT)
            self.each_panel(begin, end, run_panel, x, w, y)
        if self.skips:
            self.each_panel(begin, end, spoil_panel)
        per_panel = layout.columns // self.lanes
        blocks = [begin * per_panel, min(end * per_panel, self.out_blocks)]
        for plane in loop(*planes):
            run = self.run(plane, first, tiles, per_image)
            place = [run.plane, udiv(run.inside, tiles_w), urem(run.inside, tiles_w)]
            at = gep(v, run.before * layout.wide_out, ELEMENT)
            call(self.finish, table.args, at, at, sums, *blocks, run.tiles, *place, *cut)

    @inline
    def transform_run(self, run: Run, u: ptr, into: i64, cut: Sequence[Count]) -> None:
        """The inputs of a run, plane after plane of the window."""
        table, layout, planes = self.table, self.layout, self.table.size(self.shape.out[0])
        steps = [table.size(s) for s in (self.x.batch, self.x.block, self.x.axes[1])]
        sizes = [table.size(s) for s in self.shape.size[1:]]
        lows = [table.size(s) for s in self.shape.low[1:]]
        place = [0, udiv(run.inside, cut[1]), urem(run.inside, cut[1])]
        image, plane = udiv(run.plane, planes), urem(run.plane, planes)
        for k in loop(*run.taps):
            x = self.source(image, plane, k)
            to = gep(u, run.before * layout.depth + k * layout.channels * run.tiles, ELEMENT)
            call(
                self.transform,
                x,
                *steps,
                *sizes,
                *lows,
                to,
                into,
                self.in_blocks,
                run.tiles,
                *place,
                *cut,
            )

    @inline
    def multiply_run(self, run: Run, x: ptr, w: ptr, y: ptr, j: Count, vectors: int) -> None:
        """Products of a run at one point with a panel of weights."""
        layout, lanes = self.layout, self.lanes
        (low, high), column = run.taps, j * layout.columns
        cut = Tiles.of(builder(), run.tiles, self.pixels)
        there = gep(x, run.before * layout.depth + low * layout.channels * run.tiles, ELEMENT)
        panel = gep(w, column * layout.depth + low * (layout.channels * vectors * lanes), ELEMENT)
        out = gep(y, run.before * layout.wide_out + column * run.tiles, ELEMENT)
        blocks, block = (high - low) * self.in_blocks, run.tiles * lanes
        self.sum_tiles(cut, cut.low, there, panel, out, blocks, block, vectors)

    @property
    def skips(self) -> bool:
        """Whether planes of a window may lie in the padding."""
        return any(known_eq(p, 0) is not True for p in self.nest.form.padding[0])

    @inline
    def spoil_run(self, run: Run, v: ptr, j: Count, vectors: int) -> None:
        """Make the sums of a run at the first point NaN where a weight that is left out is not finite."""
        layout, lanes, (low, high) = self.layout, self.lanes, run.taps
        if (low > 0) | (high < layout.planes):
            column = j * layout.columns
            spoil = _spoil.written(f"winograd.spoil{layout.planes}", planes=layout.planes, lanes=lanes)
            for n in range(vectors):
                w = self.all_taps(column * layout.depth + n * lanes)
                y = gep(v, run.before * layout.wide_out + (column + n * lanes) * run.tiles, ELEMENT)
                call(spoil, w, y, low, high, layout.channels, vectors * lanes, run.tiles)

    @inline
    def all_taps(self, first: Count) -> ptr:
        """Where weights are at the point to which all taps of a window contribute."""
        point = self.layout.m + 2 + 1
        return gep(self.table.start(self.nest.w), first + point * self.layout.panels.elements, ELEMENT)

    @inline
    def repair(self, place: Sequence[Count], stage: ptr) -> None:
        image, block, plane, top, left = place
        layout, lanes = self.layout, self.lanes
        low, high = taps_inside(self.table, self.shape, 0, plane)
        first, wide = self.weights_of(block)
        start = _start.written(
            f"winograd.start{layout.m}.{layout.planes}", planes=layout.planes, lanes=lanes, sums=layout.m**2
        )
        call(start, self.all_taps(first), stage, low, high, layout.channels, wide)
        for k in loop(low, high):
            source = partial(self.source, image, plane, k)
            self.sum_directly(source, k, block, top, left, stage, adds=True)


@inline
def _left_out(w: ptr, low: i64, high: i64, channels: i64, wide: i64, planes: int, lanes: int) -> Word:
    """The sum of 0 times the weights of planes outside of low..high: NaN, or 0."""
    type_ = vector(ELEMENT, lanes)
    total = Word(constant(type_, 0))
    for k in loop(planes):
        if (k < low) | (k >= high):
            for c in loop(channels):
                total = fma(load(type_, gep(w, (k * channels + c) * wide, ELEMENT)), 0.0, total)
    return total


@native(internal=True, noinline=True)
def _spoil(
    w: noalias,
    y: noalias,
    low: i64,
    high: i64,
    channels: i64,
    wide: i64,
    tiles: i64,
    *,
    planes: int,
    lanes: int,
) -> None:
    """Add what is left out to the sums of some tiles, if it is not 0."""
    total = _left_out(w, low, high, channels, wide, planes, lanes)
    if any_lane(is_nan(total)):
        for t in loop(tiles):
            there = gep(y, t * lanes, ELEMENT)
            store(load(vector(ELEMENT, lanes), there) + total, there)


@native(internal=True, noinline=True)
def _start(
    w: noalias,
    to: noalias,
    low: i64,
    high: i64,
    channels: i64,
    wide: i64,
    *,
    planes: int,
    lanes: int,
    sums: int,
) -> None:
    """Store what is left out as the start of the sums of a tile."""
    total = _left_out(w, low, high, channels, wide, planes, lanes)
    for n in range(sums):
        store(total, gep(to, n * lanes, ELEMENT))
