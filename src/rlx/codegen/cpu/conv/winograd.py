"""Winograd convolution of 3x3 windows that move by one, on images with blocked channels.

Tiles of m x m outputs are taken in strips whose transformed inputs and sums fit the caches. A strip is
transformed into scratch, multiplied with the transformed weights point by point, and transformed back with
the epilogue: one kernel, no barrier in between. Threads share strips or, where weights outweigh
the image by far, output channels; then each transforms all inputs for itself. Tiles whose window holds an Inf
or NaN are summed again without transforms. Bytes are transformed to 16 bits, and sums are exact: many input
channels are summed in parts, each of which is transformed back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

from rlx.codegen.cpu.conv.end import Epilogue
from rlx.codegen.cpu.conv.shape import Geometry, Image, as_signed, tile_pixels
from rlx.codegen.cpu.conv.winograd_direct import ELEMENT, direct_tile
from rlx.codegen.cpu.conv.winograd_numbers import Integers, Reals
from rlx.codegen.cpu.conv.winograd_parts import OutputTransform, input_transform, part, products
from rlx.codegen.cpu.frame import EmittedKernel, KernelFrame, Slot
from rlx.codegen.cpu.product.gemm_cut import Count, Tiles
from rlx.codegen.cpu.product.microkernel import kind_of
from rlx.codegen.native.irtext import Module
from rlx.codegen.native.notation import inline, write
from rlx.codegen.native.words import (
    builder,
    call,
    ceildiv,
    gep,
    i64,
    load,
    loop,
    ptr,
    round_up,
    select,
    udiv,
    ult,
    umax,
    umin,
    urem,
)
from rlx.errors import UnsupportedError
from rlx.kernel.nests import ConvNest
from rlx.ops.storage.winograd import WinogradLayout

PAD = 16  # elements between the points of a strip, so that they do not share cache sets
HEAVY_WEIGHTS = 8  # times the size of the image from which threads share output channels, not tiles


def strip_tiles(layout: WinogradLayout, cache: int, pixels: int) -> int:
    """Most tiles in a strip: whole register tiles whose inputs and sums at all points fit `cache` bytes."""
    exact = layout.group > 1  # points of 16 bits; half of the cache is for their weights
    per_tile = layout.points * (layout.depth * (2 if exact else 4) + layout.wide_out * 4)
    per_tile += layout.m**2 * layout.wide_out * 4 if layout.parts > 1 else 0
    cache = cache // 2 if exact else cache
    return max(cache // per_tile // pixels, 2) * pixels


def emit_winograd(
    module: Module,
    name: str,
    nest: ConvNest,
    layout: WinogradLayout,
    inputs: Sequence[Slot],
    outputs: Sequence[Slot],
    kernel: type[Winograd],
) -> EmittedKernel:
    """Write a kernel of a convolution whose weights are transformed."""
    if not (nest.x_blocked and nest.out_blocked):
        raise UnsupportedError("transformed weights need images with blocked channels on both sides")
    made = kernel(module, name, nest, layout, inputs, outputs)
    return write(made.table.fn, made.emit)


class Winograd:
    """Writes the kernel of a convolution over two axes."""

    def __init__(
        self,
        module: Module,
        name: str,
        nest: ConvNest,
        layout: WinogradLayout,
        inputs: Sequence[Slot],
        outputs: Sequence[Slot],
    ) -> None:
        self.name, self.nest, self.layout = name, nest, layout
        self.table = KernelFrame(module, name, inputs, outputs)
        self.shape = Geometry.of(nest)
        self.lanes = module.target.lanes("f32")
        self.x, self.y = Image.blocked(inputs[nest.x]), Image.blocked(outputs[0])
        self.epilogue = Epilogue.blocked(
            self.table, nest.stores[0], nest.form.out, self.shape.out, self.lanes
        )
        self.numbers = Reals() if layout.group == 1 else Integers()
        self.kind = kind_of("f32" if layout.group == 1 else "i16", module.target)
        self.pixels = tile_pixels(module.target, self.kind)
        self.in_blocks, self.out_blocks = layout.channels // self.lanes, layout.wide_out // self.lanes
        self.most = strip_tiles(layout, module.target.l2_bytes, self.pixels)

    @inline
    def point_step(self, blocks: int, tiles: i64) -> i64:
        """Elements from one point of a strip to the next."""
        return tiles * (blocks * self.lanes) + PAD

    @property
    def scratch_bytes(self) -> int:
        layout = self.layout
        total = layout.points * (layout.depth + layout.wide_out)
        total += layout.m**2 * layout.wide_out if layout.parts > 1 else 0
        return (self.most * total + 2 * PAD * layout.points) * 4

    @inline
    def images(self) -> Count:
        """Images, or planes of all images, that are computed."""
        return self.table.size(self.shape.images)

    @inline
    def strips(self, total: Count, per_image: Count) -> Count:
        """Into how many strips all tiles are cut at least."""
        return ceildiv(total, self.most)

    @inline
    def emit(self) -> EmittedKernel:
        table, shape, layout = self.table, self.shape, self.layout
        threads, m = table.threads, layout.m
        tiles_h, tiles_w = ceildiv(table.size(shape.out[1]), m), ceildiv(table.size(shape.out[2]), m)
        per_image = tiles_h * tiles_w
        total = self.images() * per_image
        count = layout.panels.full + (1 if layout.panels.tail else 0)
        image = table.size(shape.images) * shape.per_in
        for extent in shape.size:
            image *= table.size(extent)
        weights = layout.points * layout.depth * layout.out
        heavy = weights > image * HEAVY_WEIGHTS
        chunks = select(heavy, umin(threads, count), 1)
        strips = self.strips(total, per_image)
        shared = umin(round_up(strips, threads), total)
        strips = umax(select(chunks == 1, shared, strips), 1)
        low, high = table.share(strips * chunks)
        fill = as_signed(self.nest.form.fill)
        self.transform = input_transform(self.numbers, m, self.lanes, fill)
        self.finish = OutputTransform(
            self.name,
            table,
            self.epilogue,
            self.y,
            m,
            self.lanes,
            shape.out,
            layout.out,
            self.numbers,
            layout.parts > 1,
            self.repair,
            layout.planes > 0,
        ).function()
        for u in loop(low, high):
            strip, chunk = udiv(u, chunks), urem(u, chunks)
            first = udiv(strip * total, strips)
            tiles = udiv((strip + 1) * total, strips) - first
            begin, end = udiv(chunk * count, chunks), udiv((chunk + 1) * count, chunks)
            if tiles > 0:
                self.strip(first, tiles, begin, end, per_image, tiles_w)
        return table.finish(self.scratch_bytes)

    @inline
    def strip(
        self, first: i64, tiles: i64, begin: Count, end: Count, per_image: Count, tiles_w: Count
    ) -> None:
        """Tiles from `first` on, for panels begin..end of output channels."""
        table, layout = self.table, self.layout
        into, sums = self.point_step(self.in_blocks, tiles), self.point_step(self.out_blocks, tiles)
        u: Count = table.scratch()
        v = gep(u, into * layout.points, self.kind.element)
        image, inside = udiv(first, per_image), urem(first, per_image)
        place = [image, udiv(inside, tiles_w), urem(inside, tiles_w)]
        steps = [table.size(s) for s in (self.x.batch, self.x.block, self.x.axes[1])]
        sizes = [table.size(s) for s in self.shape.size[1:]]
        lows = [table.size(s) for s in self.shape.low[1:]]
        cut = [udiv(per_image, tiles_w), tiles_w]
        x = table.start(self.nest.x)
        call(self.transform, x, *steps, *sizes, *lows, u, into, self.in_blocks, tiles, *place, *cut)
        per_panel = layout.columns // self.lanes
        blocks = [begin * per_panel, min(end * per_panel, self.out_blocks)]
        before = gep(v, sums * layout.points, self.kind.accumulator)
        cuts = [self.in_blocks * n // layout.parts for n in range(layout.parts + 1)]
        for n, some in enumerate(pairwise(cuts)):
            self.multiply(u, v, into, sums, tiles, begin, end, some)
            if n < layout.parts - 1:
                call(part(self.numbers, layout.m, self.lanes, n > 0), v, before, sums, *blocks, tiles)
        call(self.finish, table.args, v, before, sums, *blocks, tiles, *place, *cut)

    @inline
    def repair(self, place: Sequence[Count], stage: ptr) -> None:
        """Sum a tile directly whose transforms hold Inf or NaN."""
        image, block, _, top, left = place
        batch = self.table.size(self.x.batch)
        self.sum_directly(partial(self.start_of, image, batch), 0, block, top, left, stage)

    @inline
    def start_of(self, image: Count, batch: Count) -> ptr:
        """Where an image begins."""
        return gep(self.table.start(self.nest.x), image * batch, ELEMENT)

    @inline
    def sum_directly(
        self,
        source: Callable[[], ptr],
        plane: Count,
        block: Count,
        top: Count,
        left: Count,
        stage: ptr,
        adds: bool = False,
    ) -> None:
        """Sum products of a tile with one plane of the window into the stage; source() is its image."""
        table, layout, panels = self.table, self.layout, self.layout.panels
        step, line = (table.size(s) for s in (self.x.block, self.x.axes[1]))
        sizes = [table.size(s) for s in self.shape.size[1:]]
        low = [table.size(s) for s in self.shape.low[1:]]
        first, wide = self.weights_of(block)
        x = source()
        w = gep(table.start(self.nest.w), first + plane * layout.channels * wide, ELEMENT)
        begin = [top - low[0], left - low[1]]
        sum_tile = direct_tile(layout.m, self.lanes, adds)
        call(sum_tile, x, w, stage, step, line, *sizes, *begin, self.in_blocks, panels.elements, wide)

    @inline
    def weights_of(self, block: Count) -> tuple[Count, Count]:
        """The first weight of a block of output channels at a point; elements of a row of its panel."""
        panels, column = self.layout.panels, block * self.lanes
        panel = udiv(column, panels.columns)
        inside = column - panel * panels.columns
        first = panel * panels.columns * panels.depth + inside
        return first, select(ult(panel, panels.full), panels.columns, panels.tail)

    @inline
    def multiply(
        self,
        u: ptr,
        v: ptr,
        into: i64,
        sums: i64,
        tiles: i64,
        begin: Count,
        end: Count,
        some: tuple[int, int],
    ) -> None:
        """At every point, transformed inputs times weights, of `some` blocks of input channels."""
        f, panels, kind, lanes = builder(), self.layout.panels, self.kind, self.lanes
        cut = Tiles.of(f, tiles, self.pixels)
        least: Count = cut.low
        weights = self.table.start(self.nest.w)
        block = tiles * lanes
        element, total = kind.element, kind.accumulator

        def run_panel(x: ptr, w: ptr, y: ptr, j: Count, vectors: int) -> None:
            column = j * panels.columns
            skipped = some[0] * lanes * vectors * lanes
            there = gep(w, column * panels.depth + skipped, element)
            out = gep(y, udiv(column, lanes) * block, total)
            self.sum_tiles(cut, least, x, there, out, some[1] - some[0], block, vectors)

        for p in loop(self.layout.points):
            w = gep(weights, p * panels.elements, element)
            x = gep(u, p * into + block * some[0], element)
            y = gep(v, p * sums, total)
            self.each_panel(begin, end, run_panel, x, w, y)

    @inline
    def each_panel(self, begin: Count, end: Count, run: Callable[..., None], *operands: ptr) -> None:
        """run(*operands, panel, vectors) for panels begin..end of weights."""
        panels, lanes = self.layout.panels, self.lanes
        for j in loop(begin, min(end, panels.full)):
            run(*operands, j, panels.columns // lanes)
        if panels.tail:
            if end > panels.full:
                run(*operands, panels.full, panels.tail // lanes)

    @inline
    def sum_tiles(
        self, cut: Tiles, least: Count, x: ptr, w: ptr, y: ptr, blocks: Count, block: Count, vectors: int
    ) -> None:
        """Products of all tiles of a cut with `blocks` blocks of input channels of a panel."""
        f, kind, lanes = builder(), self.kind, self.lanes
        element, total = kind.element, kind.accumulator
        names = [products(kind, n, vectors) for n in range(1, self.pixels + 1)]
        table = f.module.table(f"winograd.products{vectors}.{element}", "ptr", names)
        low, high = (load(ptr, gep(table, umin(least + i - 1, self.pixels - 1), ptr)) for i in (0, 1))
        for t in loop(cut.count):
            row: Count = cut.row(f, t)
            at = row * lanes
            sum_tile = select(ult(t, cut.tall), high, low)
            call(sum_tile, gep(x, at, element), w, gep(y, at, total), blocks, block)
