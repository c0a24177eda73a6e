"""Direct convolution: output channels in lanes, weights in panels, any window, stride, dilation and padding.

Lines of the output are taken in bands (of pieces, where they are very long) whose part of x fits L2. Where
windows may reach past an edge, or x is planar, the band's lines of x are first copied to scratch with zeros
around; else x is read in place. A band meets one panel of weights after the other, a panel all tiles of the
band; planes and lines of a window that read only padding are left out (`skip.py`). Threads share bands or,
where weights outweigh the image, panels: every output is one chain of products in a fixed order, so bits do
not depend on threads, bands or tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.codegen.cpu.conv.end import BlockedEnd, Epilogue, PlanarEnd
from rlx.codegen.cpu.conv.lines import LinePacker, PixelMover
from rlx.codegen.cpu.conv.shape import (
    VECTORS,
    Geometry,
    Image,
    as_signed,
    static,
    takes_two_tiles,
    tile_pixels,
)
from rlx.codegen.cpu.conv.skip import Taps, has_wild_weight, may_skip, taps_inside
from rlx.codegen.cpu.conv.source import ImageSource, SourceMover, as_one_line
from rlx.codegen.cpu.conv.tile import ConvTile
from rlx.codegen.cpu.frame import EmittedKernel, KernelFrame, Slot
from rlx.codegen.cpu.product.gemm_cut import Count, Tiles
from rlx.codegen.cpu.product.gemm_end import Frame
from rlx.codegen.cpu.product.gemm_tile import LINE
from rlx.codegen.cpu.product.microkernel import kind_of
from rlx.codegen.native.irtext import Module, Value
from rlx.codegen.native.irtypes import size_bytes
from rlx.codegen.native.notation import inline, write
from rlx.codegen.native.words import (
    alloca,
    builder,
    call,
    ceildiv,
    gep,
    load,
    loop,
    ptr,
    round_up,
    select,
    store,
    udiv,
    ult,
    umax,
    umin,
    urem,
)
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
    made = _Direct(module, name, nest, layout, inputs, outputs)
    return write(made.table.fn, made.emit)


@dataclass(frozen=True)
class Band:
    """What goes through all panels together: some tiles of lines first..last of one plane."""

    image: Count
    group: Count
    d: Count
    first: Count
    last: Count
    first_tile: Count
    last_tile: Count


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
        self.skips = may_skip(nest, self.kind)
        self.frame = Frame(self.table.fn, 8 + self.skips * (len(Taps.NAMES) + 1))
        self.end: BlockedEnd | PlanarEnd = (BlockedEnd if nest.out_blocked else PlanarEnd)(
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
        self.tile = ConvTile(name, self.kind, shape, self.x.lanes, pixel, self.frame, self.skips)
        self.blocks = -(-shape.per_in // self.x.lanes)
        self.pixels = tile_pixels(module.target, self.kind)

    # ---- sizes

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

    @inline
    def emit(self) -> EmittedKernel:
        table, shape = self.table, self.shape
        pixels = table.size(shape.out[2])
        if self.flat:
            pixels = table.size(shape.out[0]) * table.size(shape.out[1]) * pixels
        self.tiles = Tiles.of(builder(), pixels, self.pixels)
        # a flat image has one tile to a line
        self.lines: Count = self.tiles.count if self.flat else table.size(shape.out[1])
        self.planes: Count = 1 if self.flat else table.size(shape.out[0])
        panels = self.layout.panels
        self.panels = panels.full + (1 if panels.tail else 0)
        images = table.size(shape.images) * shape.groups * self.planes
        chunks = self.chunks()
        self.plan_pieces(images, chunks)
        self.plan_bands(images, chunks)
        self.share_steps()
        squares = (n * -(-(VECTORS // n) * self.pixels // self.lanes) for n in (1, VECTORS))
        room = max(squares) * self.lanes * self.lanes
        self.stage = alloca(self.kind.accumulator, room)
        if self.skips:
            self.start = alloca(self.kind.accumulator, VECTORS * self.lanes)
        low, high = table.share(images * self.bands * self.pieces * chunks)
        for u in loop(low, high):
            number, chunk = udiv(u, chunks), urem(u, chunks)
            band = self.locate(number)
            first, last = udiv(chunk * self.panels, chunks), udiv((chunk + 1) * self.panels, chunks)
            self.run_band(band, first, last)
        return table.finish(self.scratch_bytes)

    @inline
    def chunks(self) -> Count:
        """Parts that panels are cut in: one per thread where the weights outweigh the image, else one."""
        table, shape = self.table, self.shape
        weights = shape.depth * shape.per_out * shape.groups
        image = table.size(shape.images) * (shape.groups * shape.per_in)
        for extent in shape.size:
            image *= table.size(extent)
        return select(weights > image, umin(table.threads, self.panels), 1)

    @inline
    def plan_pieces(self, images: Count, chunks: Count) -> None:
        """Cut lines of which not even one fits the budget into pieces of whole tiles; a single line, or one
        that holds all pixels, also to busy all threads.
        """
        table, shape = self.table, self.shape
        self.pieces: Count = 1
        self.piece_tiles: Count = umax(self.tiles.count, 1)
        self.piece_pixels: Count = self.pixels
        if self.flat:
            return
        whole = table.size(self.line_pixels) * (self.pixel_bytes * shape.reach[1])
        pieces = umax(ceildiv(whole, self.budget), 1)
        if self.one_line or (isinstance(self.lines, int) and self.lines == 1):
            alone = ult(images, table.threads) & (chunks == 1)
            pieces = select(alone, round_up(pieces, table.threads), pieces)
        self.piece_tiles = umax(ceildiv(self.tiles.count, pieces), 1)
        self.pieces = ceildiv(self.tiles.count, self.piece_tiles)
        outputs = min(self.piece_tiles * self.pixels, table.size(shape.out[2]))
        self.piece_pixels = (outputs - 1) * shape.strides[2] + shape.reach[2]

    @inline
    def plan_bands(self, images: Count, chunks: Count) -> None:
        """Cut the lines of an image into bands of equal height that fit the budget and busy all threads."""
        threads = self.table.threads
        fit = udiv(self.budget, umax(self.piece_pixels * self.pixel_bytes, 1))
        reach = 1 if self.flat else self.shape.reach[1]
        stride = 1 if self.flat else self.shape.strides[1]
        tallest: Count = udiv(max(fit - reach, 0), stride) + 1
        bands = ceildiv(self.lines, umax(tallest, 1))
        alone = ult(images * self.pieces, threads) & (chunks == 1)
        bands = select(alone, round_up(bands, threads), bands)
        self.height: Count = umax(ceildiv(self.lines, umax(bands, 1)), 1)
        self.bands: Count = ceildiv(self.lines, self.height)
        self.band_lines: Count = (self.height - 1) * stride + reach

    @inline
    def share_steps(self) -> None:
        """Steps through x, in the frame."""
        table, frame, dilations = self.table, self.frame, self.shape.dilations
        if self.packs:
            line = self.piece_pixels * self.x.lanes
            plane = line * self.band_lines
            self.x_line = line
            frame.share("x_block", plane * self.shape.window[0])
            frame.share("x_d", plane)  # only planes of a window are copied
            frame.share("x_h", line * dilations[1])
            args = (self.x.lanes, self.lanes, self.kind.moved, as_signed(self.nest.form.fill))
            mover = PixelMover(*args) if self.source is None else SourceMover(*args, source=self.source)
            computed = self.source is not None
            self.packer = LinePacker(self.name, table, self.shape, self.x, mover, computed).function()
        else:
            frame.share("x_block", table.size(self.x.block))
            frame.share("x_d", table.size(self.x.axes[0]) * dilations[0])
            frame.share("x_h", table.size(self.x.axes[1]) * dilations[1])

    @inline
    def locate(self, number: Count) -> Band:
        """The band of a number; the frame gets what is known of it."""
        pieces, bands = umax(self.pieces, 1), umax(self.bands, 1)
        at, piece = udiv(number, pieces), urem(number, pieces)
        at, band = udiv(at, bands), urem(at, bands)
        planes = umax(self.planes, 1)
        at, d = udiv(at, planes), urem(at, planes)
        image, group = udiv(at, self.shape.groups), urem(at, self.shape.groups)
        first = band * self.height
        self.frame.change("image", image)
        if not self.flat:
            self.frame.change("d", d)
        channel_end = (group + 1) * self.shape.per_out
        if not self.nest.out_blocked:
            self.frame.change("channel_end", channel_end)
        first_tile = piece * self.piece_tiles
        last_tile = min(first_tile + self.piece_tiles, self.tiles.count)
        last = min(first + self.height, self.lines)
        return Band(image, group, d, first, last, first_tile, last_tile)

    @inline
    def run_band(self, band: Band, first: Count, last: Count) -> None:
        """Panels first..last of a band."""
        table, shape, panels = self.table, self.shape, self.layout.panels
        blocks = band.group * (self.blocks if self.x.lanes > 1 else shape.per_in)
        start = band.image * table.size(self.x.batch) + blocks * table.size(self.x.block)
        # a computed image has no place in memory, but the packer gets the part that is needed
        memory = table.scratch() if self.source else table.start(self.nest.x)
        x = gep(memory, 0 if self.source else start, self.element)
        if self.packs:
            scratch = table.scratch()
            pixel: Count = self.tiles.row(builder(), band.first_tile)
            place = [band.d, band.first, pixel, self.band_lines, self.piece_pixels, self.piece_pixels]
            more = (band.image, blocks) if self.source else ()
            call(self.packer, table.args, scratch, x, *place, *more)
            before = pixel * self.tile.pixel_step
        else:
            plane = band.d * shape.strides[0] * table.size(self.x.axes[0])

        def line_of(h: Count) -> ptr:
            """Where windows of line h begin."""
            if self.packs:
                line = (h - band.first) * shape.strides[1] * self.x_line
                return gep(scratch, line - before, self.element)
            if self.flat:
                return x
            return gep(x, plane + h * shape.strides[1] * table.size(self.x.axes[1]), self.element)

        weights = table.start(self.nest.w)
        group_start = band.group * panels.elements

        def run_panel(j: Count, vectors: int, masked: bool) -> None:
            column = j * panels.columns
            w = gep(weights, group_start + column * panels.depth, self.element)
            channel = band.group * shape.per_out + column
            self.run_panel(band, line_of, w, channel, vectors, masked)

        for j in loop(first, min(last, panels.full)):
            run_panel(j, panels.columns // self.lanes, False)
        if panels.tail:
            if last > panels.full:
                run_panel(panels.full, panels.tail // self.lanes, shape.per_out % self.lanes != 0)

    def end_in_registers(self, heights: int) -> BlockedEnd | None:
        """The end, if tiles apply it themselves: what follows is short, and few heights of tiles are needed.

        Else sums go through a stage in L1: code for tiles of all heights is shared by the kernels of a
        module, and an epilogue is written once. A symbolic width has tiles of every height.
        """
        short = self.end.epilogue.length <= MOST_IN_REGISTERS
        return self.end if isinstance(self.end, BlockedEnd) and short and heights <= 2 else None

    @inline
    def run_panel(
        self, band: Band, line_of: Callable[[Count], ptr], w: ptr, channel: Count, vectors: int, masked: bool
    ) -> None:
        """All tiles of a band with one panel."""
        tiles, args, frame = self.tiles, self.table.args, self.frame.pointer
        heights = tiles.heights(self.pixels)
        in_registers = self.end_in_registers(len(heights))
        if in_registers is None:
            finisher = self.end.finisher(vectors, masked)
            steps = self.tile.steps(frame)

        def functions(heights: Sequence[int]) -> Callable[[Count], ptr]:
            """What finds the function of tiles of so many pixels, among neighbouring heights."""
            if in_registers is not None:
                names = [self.tile.function(height, vectors, masked, in_registers) for height in heights]
            else:
                names = [self.tile.summing(height, vectors) for height in heights]

            def function(pixels: Count) -> ptr:
                if len(names) == 1:
                    return ptr(Value("ptr", f"@{names[0]}"))
                table = self.module.table(f"{names[0]}.table", "ptr", names)
                return load(ptr, gep(table, umin(pixels - heights[0], len(names) - 1), ptr))

            return function

        single, least = functions(heights), tiles.low
        low, high = single(least), single(least + 1)
        pair: Callable[[Count], ptr] | None = None
        if takes_two_tiles(self.module.target, self.kind, vectors):
            pair = functions(range(2 * heights[0], 2 * heights[-1] + 1))

        skipping = self.skipping(band, w, vectors) if self.skips else None
        lines = 1 if self.flat else band.last - band.first
        first_tile, last_tile = (band.first, band.last) if self.flat else (band.first_tile, band.last_tile)
        tiles_of_line = last_tile - first_tile
        panel_bytes = self.layout.panels.columns * self.layout.panels.depth * size_bytes(self.element)
        last_tiles = lines * tiles_of_line - umin(self.tile.step_lines(vectors), lines * tiles_of_line)

        def ahead(line: Count, t: Count) -> Count:
            """Bytes from the weights of a tile to what it prefetches: the last tiles share the next panel. A
            tile that has a panel to itself waits for memory anyway.
            """
            part = line * tiles_of_line + (t - first_tile) - last_tiles
            return select((part >= 0) & (lines * tiles_of_line > 1), panel_bytes + part * LINE, 0)

        def run_tile(
            x: ptr, function: ptr, pixel: Count, pixels: Count, taps: Sequence[Count], ahead: Count
        ) -> None:
            place = gep(x, pixel * self.tile.pixel_step, self.element)
            if in_registers is not None:
                call(function, args, frame, place, w, ahead, channel, pixel)
            else:
                call(function, place, w, ahead, self.stage, *steps, *taps)
                call(finisher, args, frame, self.stage, channel, pixel, pixels)

        def run_line(x: ptr, line: Count, taps: Sequence[Count]) -> None:
            start: Count = first_tile
            if pair is not None:
                start = last_tile - urem(tiles_of_line, 2)
                for t in loop(first_tile, start, 2):
                    pixel: Count = tiles.row(builder(), t)
                    pixels = tiles.row(builder(), t + 2) - pixel
                    run_tile(x, pair(pixels), pixel, pixels, taps, 0)
            for t in loop(start, last_tile):
                pixel = tiles.row(builder(), t)
                taller = ult(t, tiles.tall)
                pixels = select(taller, least + 1, least)
                run_tile(x, select(taller, high, low), pixel, pixels, taps, ahead(line, t))

        if self.flat:
            run_line(line_of(0), 0, ())
        else:
            for h in loop(band.first, band.last):
                x = line_of(h)
                self.frame.change("h", h)
                taps = skipping(h) if skipping else ()
                if in_registers is not None:
                    for key, value in zip((*Taps.NAMES, "start"), taps, strict=False):
                        self.frame.change(key, value)
                run_line(x, h - band.first, taps)

    @inline
    def skipping(self, band: Band, w: ptr, vectors: int) -> Callable[[Count], tuple[Count, ...]]:
        """What tiles of a line take for a panel: the taps that read x, and what sums start with."""
        table, shape, kind = self.table, self.shape, self.kind
        planes = taps_inside(table, shape, 0, band.d)
        top, bottom = taps_inside(table, shape, 1, band.first), taps_inside(table, shape, 1, band.last - 1)
        whole = (planes[0] == 0) & (planes[1] == shape.window[0])
        whole = whole & (top[0] == 0) & (bottom[1] == shape.window[1])
        wild = False
        if not whole:
            wild = has_wild_weight(kind, w, self.layout.panels.depth * vectors)
        for n in range(vectors):
            store(kind.zero, gep(self.start, n * kind.lanes, kind.accumulator))
        padding_sums = self.tile.padding_sums(vectors)

        def of_line(h: Count) -> tuple[Count, ...]:
            taps = Taps(planes, taps_inside(table, shape, 1, h)).numbers
            if wild:
                call(padding_sums, w, self.start, shape.per_in // self.x.lanes, *taps)
            return (*taps, self.start)

        return of_line
