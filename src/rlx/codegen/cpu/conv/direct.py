"""Direct convolution: output channels in lanes, weights in panels, any window, stride, dilation and padding.

Lines of the output are taken in bands (of pieces, where they are very long) whose part of x fits L2. Where
windows may reach past an edge, or x is planar, the band's lines of x are first copied to scratch with zeros
around; else x is read in place. A band meets one panel of weights after the other, a panel all tiles of the
band. Threads share bands or, where weights outweigh the image, panels: every output is one chain of products
in a fixed order, so bits do not depend on threads, bands or tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.codegen.cpu.conv.end import BlockedEnd, Epilogue, PlanarEnd
from rlx.codegen.cpu.conv.lines import PixelMover, emit_line_packer
from rlx.codegen.cpu.conv.shape import VECTORS, Geometry, Image, as_signed, static, tile_pixels
from rlx.codegen.cpu.conv.source import ImageSource, SourceMover, as_one_line
from rlx.codegen.cpu.conv.tile import ConvTile
from rlx.codegen.cpu.frame import EmittedKernel, KernelFrame, Slot
from rlx.codegen.cpu.product.gemm_cut import Tiles, both
from rlx.codegen.cpu.product.gemm_end import Frame
from rlx.codegen.cpu.product.microkernel import kind_of
from rlx.codegen.native.irtext import Int, Module, Value
from rlx.codegen.native.irtypes import size_bytes
from rlx.ir.dim import Dim
from rlx.kernel.nests import ConvNest
from rlx.kernel.panels import KernelPanels
from rlx.records import dataclass

MOST_IN_REGISTERS = 8  # operations of an epilogue that tiles apply themselves


def emit_direct(
    module: Module,
    name: str,
    nest: ConvNest,
    layout: KernelPanels,
    inputs: Sequence[Slot],
    outputs: Sequence[Slot],
) -> EmittedKernel:
    """Write the kernel of a convolution whose weights are in panels."""
    return _Direct(module, name, nest, layout, inputs, outputs).emit()


@dataclass(frozen=True)
class Band:
    """What goes through all panels together: some tiles of lines first..last of one plane."""

    image: Int
    group: Int
    d: Int
    first: Int
    last: Int
    first_tile: Int
    last_tile: Int


class _Direct:
    def __init__(
        self,
        module: Module,
        name: str,
        nest: ConvNest,
        layout: KernelPanels,
        inputs: Sequence[Slot],
        outputs: Sequence[Slot],
    ) -> None:
        self.module, self.name, self.nest, self.layout = module, name, nest, layout
        self.table = KernelFrame(module, name, inputs, outputs)
        self.fn = self.table.fn
        shape = Geometry.of(nest)
        self.lanes = module.target.lanes("f32")
        store, out = nest.stores[0], nest.form.out
        self.source = ImageSource.of(nest, self.table) if nest.has_prologue else None
        if self.source is None:
            x = inputs[nest.x]
            self.x = Image.blocked(x) if nest.x_blocked else Image.planar(x.steps, x.shape)
        else:
            self.x = self.source.image
        dtype = inputs[nest.x].dtype if self.source is None else self.source.dtype
        self.kind = kind_of(dtype.name, module.target)
        self.element = self.kind.element
        self.y = Image.blocked(outputs[0]) if nest.out_blocked else Image.planar(store.strides, out)
        self.packs = shape.padded or self.x.lanes == 1 or self.source is not None
        if nest.out_blocked:
            epilogue = Epilogue.blocked(self.table, store, out, shape.out, self.lanes)
        else:
            epilogue = Epilogue.planar(self.table, store, out, shape.out)
        in_line = shape.moves_by_one and self.x.dense and self.y.dense
        in_line = in_line and (nest.out_blocked or epilogue.sees_one_axis)
        self.flat = in_line and not self.packs
        self.one_line = in_line and self.source is not None and self.source.sees_one_axis
        self.shape = shape = as_one_line(shape) if self.one_line else shape
        self.frame = Frame(self.fn, 8)
        self.end: BlockedEnd | PlanarEnd = (BlockedEnd if nest.out_blocked else PlanarEnd)(
            module,
            name,
            self.table,
            self.frame,
            epilogue,
            self.y,
            static(out[1]),
            self.lanes,
            self.flat or self.one_line,
            self.kind.accumulator,
        )
        pixel = shape.strides[2] * self.x.lanes
        self.tile = ConvTile(module, name, self.kind, shape, self.x.lanes, pixel, self.frame)
        self.blocks = -(-shape.per_in // self.x.lanes)
        self.pixels = tile_pixels(module.target, self.kind)

    # ---- sizes

    def size(self, d: Dim) -> Int:
        return self.table.dim(self.fn, d)

    @property
    def pixel_bytes(self) -> int:
        """Bytes of x at one place, of all channels and planes of a window."""
        return self.blocks * self.shape.window[0] * self.x.lanes * size_bytes(self.element)

    @property
    def line_pixels(self) -> Dim:
        """Pixels of x that the windows of a line of output read."""
        return (self.shape.out[2] - 1) * self.shape.strides[2] + self.shape.reach[2]

    @property
    def budget(self) -> int:
        return self.module.target.l2_bytes // 2

    @property
    def scratch_bytes(self) -> int:
        """The budget, and what pieces may take more because they are whole tiles."""
        if not self.packs:
            return 0
        more = 2 * (self.pixels + 1) * self.shape.strides[2] + self.shape.reach[2]
        return self.budget + more * self.pixel_bytes * self.shape.reach[1]

    # ---- the nest of loops

    def emit(self) -> EmittedKernel:
        fn, shape = self.fn, self.shape
        self.threads = self.table.threads
        pixels = self.size(shape.out[2])
        if self.flat:
            pixels = fn.mul(fn.mul(self.size(shape.out[0]), self.size(shape.out[1])), pixels)
        self.tiles = Tiles.of(fn, pixels, self.pixels)
        # a flat image has one tile to a line
        self.lines = self.tiles.count if self.flat else self.size(shape.out[1])
        self.planes: Int = 1 if self.flat else self.size(shape.out[0])
        panels = self.layout.panels
        self.panels = panels.full + (1 if panels.tail else 0)
        images = fn.mul(fn.mul(self.size(shape.images), shape.groups), self.planes)
        chunks = self.chunks()
        self.plan_pieces(images, chunks)
        self.plan_bands(images, chunks)
        self.share_steps()
        room = VECTORS * self.lanes * (-(-self.pixels // self.lanes) * self.lanes)
        self.stage = fn.alloca(self.kind.accumulator, room)

        outer = fn.mul(fn.mul(images, self.bands), self.pieces)
        low, high = self.table.share(fn.mul(outer, chunks))

        def unit(u: Int, _: list[Value]) -> None:
            band_number, chunk = fn.udiv(u, chunks), fn.urem(u, chunks)
            band = self.locate(band_number)
            first = fn.udiv(fn.mul(chunk, self.panels), chunks)
            last = fn.udiv(fn.mul(fn.add(chunk, 1), self.panels), chunks)
            self.run_band(band, first, last)

        fn.loop(low, high, 1, [], unit)
        return self.table.finish(self.scratch_bytes)

    def chunks(self) -> Int:
        """Parts that panels are cut in: one per thread where the weights outweigh the image, else one."""
        fn, shape = self.fn, self.shape
        weights = shape.depth * shape.per_out * shape.groups
        image: Int = fn.mul(self.size(shape.images), shape.groups * shape.per_in)
        for extent in shape.size:
            image = fn.mul(image, self.size(extent))
        heavy = fn.cmp("sgt", weights, image)
        return fn.select(heavy, fn.umin(self.threads, self.panels), 1)

    def plan_pieces(self, images: Int, chunks: Int) -> None:
        """Cut lines of which not even one fits the budget into pieces of whole tiles; one line that holds all
        pixels also to busy all threads.
        """
        fn, shape = self.fn, self.shape
        self.pieces: Int = 1
        self.piece_tiles = fn.umax(self.tiles.count, 1)
        if self.flat:
            self.piece_pixels: Int = self.pixels
            return
        whole = fn.mul(self.size(self.line_pixels), self.pixel_bytes * shape.reach[1])
        pieces = fn.umax(fn.ceildiv(whole, self.budget), 1)
        if self.one_line:
            alone = both(fn, fn.cmp("ult", images, self.threads), fn.cmp("eq", chunks, 1))
            pieces = fn.select(alone, fn.round_up(pieces, self.threads), pieces)
        self.piece_tiles = fn.umax(fn.ceildiv(self.tiles.count, pieces), 1)
        self.pieces = fn.ceildiv(self.tiles.count, self.piece_tiles)
        outputs = fn.smin(fn.mul(self.piece_tiles, self.pixels), self.size(shape.out[2]))
        self.piece_pixels = fn.add(fn.mul(fn.sub(outputs, 1), shape.strides[2]), shape.reach[2])

    def plan_bands(self, images: Int, chunks: Int) -> None:
        """Cut the lines of an image into bands of equal height that fit the budget and busy all threads."""
        fn, shape = self.fn, self.shape
        fit = fn.udiv(self.budget, fn.umax(fn.mul(self.piece_pixels, self.pixel_bytes), 1))
        reach = 1 if self.flat else shape.reach[1]
        stride = 1 if self.flat else shape.strides[1]
        tallest = fn.add(fn.udiv(fn.smax(fn.sub(fit, reach), 0), stride), 1)
        bands = fn.ceildiv(self.lines, fn.umax(tallest, 1))
        few = fn.cmp("ult", fn.mul(images, self.pieces), self.threads)
        alone = both(fn, few, fn.cmp("eq", chunks, 1))
        bands = fn.select(alone, fn.round_up(bands, self.threads), bands)
        self.height = fn.umax(fn.ceildiv(self.lines, fn.umax(bands, 1)), 1)
        self.bands = fn.ceildiv(self.lines, self.height)
        self.band_lines = fn.add(fn.mul(fn.sub(self.height, 1), stride), reach)

    def share_steps(self) -> None:
        """Steps through x, in the frame."""
        fn, frame = self.fn, self.frame
        if self.packs:
            line = fn.mul(self.piece_pixels, self.x.lanes)
            plane = fn.mul(line, self.band_lines)
            self.x_line = line
            frame.share("x_block", fn.mul(plane, self.shape.window[0]))
            frame.share("x_d", plane)  # only planes of a window are copied
            frame.share("x_h", fn.mul(line, self.shape.dilations[1]))
            args = (self.x.lanes, self.lanes, self.kind.moved, as_signed(self.nest.form.fill))
            mover = PixelMover(*args) if self.source is None else SourceMover(*args, source=self.source)
            self.packer = emit_line_packer(
                self.module, self.name, self.table, self.shape, self.x, mover, mover.told
            )
        else:
            frame.share("x_block", self.size(self.x.block))
            frame.share("x_d", fn.mul(self.size(self.x.axes[0]), self.shape.dilations[0]))
            frame.share("x_h", fn.mul(self.size(self.x.axes[1]), self.shape.dilations[1]))

    def locate(self, number: Int) -> Band:
        fn = self.fn
        pieces, bands = fn.umax(self.pieces, 1), fn.umax(self.bands, 1)
        at, piece = fn.udiv(number, pieces), fn.urem(number, pieces)
        at, band = fn.udiv(at, bands), fn.urem(at, bands)
        planes = fn.umax(self.planes, 1)
        at, d = fn.udiv(at, planes), fn.urem(at, planes)
        image, group = fn.udiv(at, self.shape.groups), fn.urem(at, self.shape.groups)
        first = fn.mul(band, self.height)
        self.frame.change("image", image)
        if not self.flat:
            self.frame.change("d", d)
        channel_end = fn.mul(fn.add(group, 1), self.shape.per_out)
        if not self.nest.out_blocked:
            self.frame.change("channel_end", channel_end)
        first_tile = fn.mul(piece, self.piece_tiles)
        last_tile = fn.smin(fn.add(first_tile, self.piece_tiles), self.tiles.count)
        last = fn.smin(fn.add(first, self.height), self.lines)
        return Band(image, group, d, first, last, first_tile, last_tile)

    def run_band(self, band: Band, first: Int, last: Int) -> None:
        fn, shape = self.fn, self.shape
        blocks = fn.mul(band.group, self.blocks if self.x.lanes > 1 else shape.per_in)
        start = fn.add(fn.mul(band.image, self.size(self.x.batch)), fn.mul(blocks, self.size(self.x.block)))
        # a computed image has no place in memory, but the packer gets the part that is needed
        memory = self.table.scratch() if self.source else self.table.operand(fn, self.nest.x).pointer
        x = fn.gep(memory, 0 if self.source else start, self.element)
        if self.packs:
            scratch = self.table.scratch()
            pixel = self.tiles.row(fn, band.first_tile)
            place = [band.d, band.first, pixel, self.band_lines, self.piece_pixels, self.piece_pixels]
            told = (band.image, blocks) if self.source else ()
            fn.call(self.packer, [fn.args[0], scratch, x, *place, *told])
            before = fn.mul(pixel, self.tile.pixel_step)

            def line_of(h: Int) -> Value:
                line = fn.mul(fn.mul(fn.sub(h, band.first), shape.strides[1]), self.x_line)
                return fn.gep(scratch, fn.sub(line, before), self.element)

        else:
            plane = fn.mul(fn.mul(band.d, shape.strides[0]), self.size(self.x.axes[0]))

            def line_of(h: Int) -> Value:
                if self.flat:
                    return x
                offset = fn.add(plane, fn.mul(fn.mul(h, shape.strides[1]), self.size(self.x.axes[1])))
                return fn.gep(x, offset, self.element)

        weights = self.table.operand(fn, self.nest.w).pointer
        group_start = fn.mul(band.group, self.layout.panels.elements)
        panels = self.layout.panels

        def panel(j: Int, vectors: int, masked: bool) -> None:
            column = fn.mul(j, panels.columns)
            w = fn.gep(weights, fn.add(group_start, fn.mul(column, panels.depth)), self.element)
            channel = fn.add(fn.mul(band.group, shape.per_out), column)
            self.run_panel(band, line_of, w, channel, vectors, masked)

        full = panels.columns // self.lanes
        fn.loop(first, fn.smin(last, panels.full), 1, [], lambda j, _: panel(j, full, False))
        if panels.tail:
            masked = shape.per_out % self.lanes != 0
            fn.branch(
                fn.cmp("sgt", last, panels.full),
                lambda: panel(panels.full, panels.tail // self.lanes, masked),
            )

    def end_in_registers(self, heights: int) -> BlockedEnd | None:
        """The end, if tiles apply it themselves: what follows is short, and few heights of tiles are needed.

        Else sums go through a stage in L1: code for tiles of all heights is shared by the kernels of a
        module, and an epilogue is written once. A symbolic width has tiles of every height.
        """
        short = self.end.epilogue.length <= MOST_IN_REGISTERS
        return self.end if isinstance(self.end, BlockedEnd) and short and heights <= 2 else None

    def run_panel(
        self, band: Band, line_of: Callable[[Int], Value], w: Value, channel: Int, vectors: int, masked: bool
    ) -> None:
        """All tiles of a band with one panel."""
        fn, tiles = self.fn, self.tiles
        heights = tiles.heights(self.pixels)
        in_registers = self.end_in_registers(len(heights))
        if in_registers is not None:
            names = [self.tile.function(height, vectors, masked, in_registers) for height in heights]
        else:
            names = [self.tile.summing(height, vectors) for height in heights]
            finisher = self.end.finisher(vectors, masked)
            steps = self.tile.steps(fn, self.frame.pointer)

        def function(pixels: Int) -> Value:
            if len(names) == 1:
                return Value("ptr", f"@{names[0]}")
            table = self.module.table(f"{names[0]}.table", "ptr", names)
            return fn.load("ptr", fn.gep(table, fn.umin(fn.sub(pixels, heights[0]), len(names) - 1), "ptr"))

        low, high = function(tiles.low), function(fn.add(tiles.low, 1))

        def run(x: Value, t: Int) -> None:
            pixel, args = tiles.row(fn, t), (fn.args[0], self.frame.pointer)
            taller = fn.cmp("ult", t, tiles.tall)
            callee: Value = fn.select(taller, high, low)
            place = fn.gep(x, fn.mul(pixel, self.tile.pixel_step), self.element)
            if in_registers is not None:
                fn.call(callee, [*args, place, w, channel, pixel])
            else:
                fn.call(callee, [place, w, self.stage, *steps])
                pixels = fn.select(taller, fn.add(tiles.low, 1), tiles.low)
                fn.call(finisher, [*args, self.stage, channel, pixel, pixels])

        def line(h: Int, _: list[Value]) -> None:
            x = line_of(h)
            if self.flat:
                run(x, h)
                return
            self.frame.change("h", h)
            fn.loop(band.first_tile, band.last_tile, 1, [], lambda t, _: run(x, t))

        fn.loop(band.first, band.last, 1, [], line)
