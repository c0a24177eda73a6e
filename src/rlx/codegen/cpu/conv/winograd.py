"""Winograd convolution of 3x3 windows that move by one, on images with blocked channels.

Tiles of m x m outputs are taken in strips whose transformed inputs and sums fit the caches. A strip is
transformed into scratch, multiplied with the transformed weights point by point, and transformed back with
the epilogue: one kernel, no barrier in between. Threads share strips or, where weights outweigh
the image by far, output channels; then each transforms all inputs for itself. Tiles whose window holds an Inf
or NaN are summed again without transforms. Bytes are transformed to 16 bits, and sums are exact: many input
channels are summed in parts, each of which is transformed back.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rlx.codegen.cpu.conv.end import Epilogue
from rlx.codegen.cpu.conv.shape import Geometry, Image, as_signed, tile_pixels
from rlx.codegen.cpu.conv.winograd_direct import ELEMENT, emit_direct_tile
from rlx.codegen.cpu.conv.winograd_numbers import Integers, Reals
from rlx.codegen.cpu.conv.winograd_parts import (
    emit_input_transform,
    emit_output_transform,
    emit_part,
    emit_products,
)
from rlx.codegen.cpu.frame import EmittedKernel, KernelFrame, Slot
from rlx.codegen.cpu.product.gemm_cut import Tiles
from rlx.codegen.cpu.product.microkernel import kind_of
from rlx.codegen.native.irtext import Function, Int, Module, Value
from rlx.errors import UnsupportedError
from rlx.ir.dim import Dim
from rlx.kernel.nests import ConvNest
from rlx.ops.storage.winograd import WinogradLayout

PAD = 16  # elements between the points of a strip, so that they do not share cache sets
HEAVY_WEIGHTS = 8  # times the size of the image from which threads share output channels, not tiles


def strip_tiles(layout: WinogradLayout, cache: int, pixels: int) -> int:
    """Most tiles in a strip: whole register tiles whose inputs and sums at all points fit `cache` bytes."""
    exact = layout.group > 1  # points of 16 bits; half of the cache is for their weights
    per_tile = layout.points * (layout.channels * (2 if exact else 4) + layout.wide_out * 4)
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
) -> EmittedKernel:
    """Write the kernel of a convolution whose weights are transformed."""
    if not (nest.x_blocked and nest.out_blocked):
        raise UnsupportedError("transformed weights need images with blocked channels on both sides")
    return _Winograd(module, name, nest, layout, inputs, outputs).emit()


class _Winograd:
    def __init__(
        self,
        module: Module,
        name: str,
        nest: ConvNest,
        layout: WinogradLayout,
        inputs: Sequence[Slot],
        outputs: Sequence[Slot],
    ) -> None:
        self.module, self.name, self.nest, self.layout = module, name, nest, layout
        self.table = KernelFrame(module, name, inputs, outputs)
        self.fn = self.table.fn
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

    def size(self, d: Dim) -> Int:
        return self.table.dim(self.fn, d)

    def point_step(self, blocks: int, tiles: Int) -> Int:
        """Elements from one point of a strip to the next."""
        return self.fn.add(self.fn.mul(tiles, blocks * self.lanes), PAD)

    @property
    def scratch_bytes(self) -> int:
        layout = self.layout
        total = layout.points * (layout.channels + layout.wide_out)
        total += layout.m**2 * layout.wide_out if layout.parts > 1 else 0
        return (self.most * total + 2 * PAD * layout.points) * 4

    def emit(self) -> EmittedKernel:
        fn, m = self.fn, self.layout.m
        threads = self.table.threads
        tiles_h, tiles_w = (fn.ceildiv(self.size(d), m) for d in self.shape.out[1:])
        per_image = fn.mul(tiles_h, tiles_w)
        total = fn.mul(self.size(self.shape.images), per_image)
        panels = self.layout.panels
        count = panels.full + (1 if panels.tail else 0)
        image: Int = fn.mul(self.size(self.shape.images), self.shape.per_in)
        for extent in self.shape.size:
            image = fn.mul(image, self.size(extent))
        weights = self.layout.points * self.layout.channels * self.layout.out
        heavy = fn.cmp("sgt", weights, fn.mul(image, HEAVY_WEIGHTS))
        chunks: Int = fn.select(heavy, fn.umin(threads, count), 1)
        strips = fn.ceildiv(total, self.most)
        shared = fn.umin(fn.round_up(strips, threads), total)
        strips = fn.select(fn.cmp("eq", chunks, 1), shared, strips)
        strips = fn.umax(strips, 1)
        low, high = self.table.share(fn.mul(strips, chunks))
        fill = as_signed(self.nest.form.fill)
        self.transform = emit_input_transform(self.module, self.numbers, m, self.lanes, fill)
        self.finish = emit_output_transform(
            self.module,
            self.name,
            self.table,
            self.epilogue,
            self.y,
            m,
            self.lanes,
            self.shape.out,
            self.layout.out,
            self.numbers,
            self.layout.parts > 1,
            self.repair,
        )

        def unit(u: Int, _: list[Value]) -> None:
            strip, chunk = fn.udiv(u, chunks), fn.urem(u, chunks)
            first = fn.udiv(fn.mul(strip, total), strips)
            tiles = fn.sub(fn.udiv(fn.mul(fn.add(strip, 1), total), strips), first)
            begin = fn.udiv(fn.mul(chunk, count), chunks)
            end = fn.udiv(fn.mul(fn.add(chunk, 1), count), chunks)
            fn.branch(
                fn.cmp("sgt", tiles, 0), lambda: self.strip(first, tiles, begin, end, per_image, tiles_w)
            )

        fn.loop(low, high, 1, [], unit)
        return self.table.finish(self.scratch_bytes)

    def strip(self, first: Int, tiles: Int, begin: Int, end: Int, per_image: Int, tiles_w: Int) -> None:
        """Tiles from `first` on, for panels begin..end of output channels."""
        fn, layout = self.fn, self.layout
        into, sums = self.point_step(self.in_blocks, tiles), self.point_step(self.out_blocks, tiles)
        u = self.table.scratch()
        v = fn.gep(u, fn.mul(into, layout.points), self.kind.element)
        image = fn.udiv(first, per_image)
        inside = fn.urem(first, per_image)
        place = [image, fn.udiv(inside, tiles_w), fn.urem(inside, tiles_w)]
        steps = [self.size(s) for s in (self.x.batch, self.x.block, self.x.axes[1])]
        sizes = [self.size(s) for s in self.shape.size[1:]]
        lows = [self.size(s) for s in self.shape.low[1:]]
        tiles_h = fn.udiv(per_image, tiles_w)
        x = self.table.operand(fn, self.nest.x).pointer
        fn.call(
            self.transform,
            [x, *steps, *sizes, *lows, u, into, self.in_blocks, tiles, *place, tiles_h, tiles_w],
        )
        per_panel = layout.columns // self.lanes
        blocks = [fn.mul(begin, per_panel), fn.smin(fn.mul(end, per_panel), self.out_blocks)]
        before = fn.gep(v, fn.mul(sums, layout.points), self.kind.accumulator)
        cuts = [self.in_blocks * n // layout.parts for n in range(layout.parts + 1)]
        for n, some in enumerate(pairwise(cuts)):
            self.products(u, v, into, sums, tiles, begin, end, some)
            if n < layout.parts - 1:
                part = emit_part(self.module, self.numbers, layout.m, self.lanes, n > 0)
                fn.call(part, [v, before, sums, *blocks, tiles])
        fn.call(self.finish, [fn.args[0], v, before, sums, *blocks, tiles, *place, tiles_h, tiles_w])

    def repair(self, fn: Function, place: Sequence[Int], stage: Value) -> None:
        """Sum a tile directly whose transforms hold Inf or NaN."""
        image, block, top, left = place
        table, layout, panels = self.table, self.layout, self.layout.panels
        batch, step, line = (table.dim(fn, s) for s in (self.x.batch, self.x.block, self.x.axes[1]))
        sizes = [table.dim(fn, s) for s in self.shape.size[1:]]
        low = [table.dim(fn, s) for s in self.shape.low[1:]]
        column = fn.mul(block, self.lanes)
        panel = fn.udiv(column, panels.columns)
        inside = fn.sub(column, fn.mul(panel, panels.columns))
        first = fn.add(fn.mul(fn.mul(panel, panels.columns), panels.depth), inside)
        wide = fn.select(fn.cmp("ult", panel, panels.full), panels.columns, panels.tail)
        x = fn.gep(table.operand(fn, self.nest.x).pointer, fn.mul(image, batch), ELEMENT)
        w = fn.gep(table.operand(fn, self.nest.w).pointer, first, ELEMENT)
        begin = [fn.sub(top, low[0]), fn.sub(left, low[1])]
        callee = emit_direct_tile(self.module, layout.m, self.lanes)
        fn.call(callee, [x, w, stage, step, line, *sizes, *begin, self.in_blocks, panels.elements, wide])

    def products(
        self,
        u: Value,
        v: Value,
        into: Int,
        sums: Int,
        tiles: Int,
        begin: Int,
        end: Int,
        some: tuple[int, int],
    ) -> None:
        """At every point, transformed inputs times weights, of `some` blocks of input channels."""
        fn, panels, lanes = self.fn, self.layout.panels, self.lanes
        cut = Tiles.of(fn, tiles, self.pixels)
        weights = self.table.operand(fn, self.nest.w).pointer
        block = fn.mul(tiles, lanes)
        element, total = self.kind.element, self.kind.accumulator

        def point(p: Int, _: list[Value]) -> None:
            w = fn.gep(weights, fn.mul(p, panels.elements), element)
            x = fn.gep(u, fn.add(fn.mul(p, into), fn.mul(block, some[0])), element)
            y = fn.gep(v, fn.mul(p, sums), total)

            def panel(j: Int, vectors: int) -> None:
                column = fn.mul(j, panels.columns)
                skipped = some[0] * lanes * vectors * lanes
                there = fn.gep(w, fn.add(fn.mul(column, panels.depth), skipped), element)
                out = fn.gep(y, fn.mul(fn.udiv(column, lanes), block), total)
                names = [emit_products(self.module, self.kind, n, vectors) for n in range(1, self.pixels + 1)]
                table = self.module.table(f"winograd.products{vectors}.{element}", "ptr", names)
                low, high = (
                    fn.load(
                        "ptr", fn.gep(table, fn.umin(fn.sub(fn.add(cut.low, i), 1), self.pixels - 1), "ptr")
                    )
                    for i in (0, 1)
                )

                def tile(t: Int, _: list[Value]) -> None:
                    at = fn.mul(cut.row(fn, t), lanes)
                    callee = fn.select(fn.cmp("ult", t, cut.tall), high, low)
                    args = [fn.gep(x, at, element), there, fn.gep(out, at, total), some[1] - some[0], block]
                    fn.call(callee, args)  # type: ignore[arg-type]

                fn.loop(0, cut.count, 1, [], tile)

            full = panels.columns // lanes
            fn.loop(begin, fn.smin(end, panels.full), 1, [], lambda j, _: panel(j, full))
            if panels.tail:
                fn.branch(fn.cmp("sgt", end, panels.full), lambda: panel(panels.full, panels.tail // lanes))

        fn.loop(0, self.layout.points, 1, [], point)
