"""Convolution of planar images with few channels in a group (depthwise among them): pixels of a line in
lanes.

The lines of a band are copied to scratch with zeros around, split by phases of the stride (pixels j, j +
stride, ...), so that the window element of neighbouring outputs is always adjacent. A register tile is
some output channels by some vectors of pixels; weights are read one by one where they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlx.codegen.cpu.conv.end import Epilogue, PlanarStore
from rlx.codegen.cpu.conv.lines import LinePacker, PhasedMover
from rlx.codegen.cpu.conv.shape import Geometry, Image
from rlx.codegen.cpu.conv.tile import TilePlace
from rlx.codegen.cpu.frame import EmittedKernel, KernelFrame, Slot
from rlx.codegen.cpu.product.gemm_cut import Count
from rlx.codegen.cpu.product.gemm_end import Frame
from rlx.codegen.native.irtext import Module, Value, vector
from rlx.codegen.native.notation import inline, native, write
from rlx.codegen.native.words import (
    Word,
    broadcast,
    builder,
    call,
    ceildiv,
    fma,
    gep,
    i64,
    load,
    loop,
    noalias,
    ptr,
    round_up,
    select,
    splat,
    udiv,
    ult,
    umax,
    urem,
)
from rlx.ir import dim
from rlx.ir.dim import Dim
from rlx.kernel.nests import ConvNest
from rlx.records import dataclass

ELEMENT = "float"
MOST_VECTORS = 8
SUMS = 24  # accumulators of a register tile
MOST_UNROLLED = 25  # window elements that are written out, with weights that stay in registers
UNROLLED = 8  # at least so many of a longer line


def emit_planar(
    module: Module, name: str, nest: ConvNest, inputs: Sequence[Slot], outputs: Sequence[Slot]
) -> EmittedKernel:
    """Write the kernel of a planar convolution with weights as they are, [O, I, window] without gaps."""
    made = _Planar(module, name, nest, inputs, outputs)
    return write(made.table.fn, made.emit)


@dataclass(frozen=True)
class _Unit:
    """Lines of one plane of one image that are computed for all channels of a group."""

    image: Count
    group: Count
    d: Count
    first: Count
    last: Count


class _Planar:
    def __init__(
        self, module: Module, name: str, nest: ConvNest, inputs: Sequence[Slot], outputs: Sequence[Slot]
    ) -> None:
        self.module, self.name, self.nest = module, name, nest
        self.table = KernelFrame(module, name, inputs, outputs)
        self.shape = shape = Geometry.of(nest)
        self.lanes = module.target.lanes("f32")
        x, out = inputs[nest.x], nest.form.out
        self.x = Image.planar(x.steps, x.shape)
        store = nest.stores[0]
        self.frame = Frame(self.table.fn, 8)
        self.end = PlanarStore(
            name,
            self.table,
            self.frame,
            Epilogue.planar(self.table, store, out, shape.out),
            Image.planar(store.strides, out),
            int(out[1]),
            self.lanes,
            False,
        )
        few_registers = module.target.registers < 32
        sums = SUMS // 2 if few_registers else SUMS
        # With one channel in a group, a tile is some lines of it: lines of x are then read once for several.
        self.by_lines = shape.per_in == shape.per_out == shape.window[0] == 1 and shape.depth <= MOST_UNROLLED
        self.rows = min(4 if few_registers or self.by_lines else 8, 4 if self.by_lines else shape.per_out)
        self.vectors = max(min(sums // self.rows, 4 if self.by_lines else MOST_VECTORS), 1)
        if isinstance(shape.out[2], int):
            self.vectors = max(min(self.vectors, -(-shape.out[2] // self.lanes)), 1)

    # ---- lines in scratch

    @property
    def positions(self) -> Dim:
        """Places of a line that windows read."""
        return (self.shape.out[2] - 1) * self.shape.strides[2] + self.shape.reach[2]

    @property
    def phase_width(self) -> Dim:
        """Pixels of one phase of a line, with room to read whole vectors past its end."""
        return dim.ceildiv(self.positions, self.shape.strides[2]) + self.vectors * self.lanes

    @property
    def line_elements(self) -> Dim:
        return self.phase_width * self.shape.strides[2]

    @property
    def group_line_bytes(self) -> Dim:
        return self.line_elements * (self.shape.per_in * self.shape.window[0] * 4)

    @property
    def budget(self) -> int:
        return self.module.target.l1_bytes // 2

    @property
    def scratch_bytes(self) -> Dim:
        return dim.dim_max(self.group_line_bytes * self.shape.reach[1], self.budget)

    # ---- the nest of loops

    @inline
    def emit(self) -> EmittedKernel:
        table, shape, frame = self.table, self.shape, self.frame
        lines, planes = table.size(shape.out[1]), table.size(shape.out[0])
        fit = udiv(self.budget, umax(table.size(self.group_line_bytes), 1))
        tallest = udiv(max(fit - shape.reach[1], 0), shape.strides[1]) + 1
        bands = ceildiv(lines, tallest)
        groups = table.size(shape.images) * shape.groups * planes
        few = ult(groups, table.threads)
        bands = umax(select(few, round_up(bands, table.threads), bands), 1)
        height = umax(ceildiv(lines, bands), 1)
        bands = umax(ceildiv(lines, height), 1)
        self.band_lines: Count = (height - 1) * shape.strides[1] + shape.reach[1]
        self.line: Count = table.size(self.line_elements)
        plane = self.line * self.band_lines
        frame.share("x_block", plane * shape.window[0])
        frame.share("x_d", plane)
        frame.share("x_h", self.line * shape.dilations[1])
        frame.share("line", self.line)
        frame.share("phase", table.size(self.phase_width))
        mover = PhasedMover(shape.strides[2], self.lanes)
        self.packer = LinePacker(self.name, table, shape, self.x, mover).function()
        low, high = table.share(groups * bands)
        for u in loop(low, high):
            at, band = udiv(u, bands), urem(u, bands)
            at, d = udiv(at, umax(planes, 1)), urem(at, umax(planes, 1))
            image, group = udiv(at, shape.groups), urem(at, shape.groups)
            first = band * height
            frame.change("image", image)
            frame.change("d", d)
            self.run(_Unit(image, group, d, first, min(first + height, lines)))
        return table.finish(self.scratch_bytes)

    @inline
    def run(self, unit: _Unit) -> None:
        """Lines of one plane, for all channels of a group."""
        table, shape = self.table, self.shape
        start = unit.image * table.size(self.x.batch) + unit.group * shape.per_in * table.size(self.x.block)
        x = gep(table.start(self.nest.x), start, ELEMENT)
        scratch = table.scratch()
        sizes = [self.band_lines, table.size(self.phase_width), table.size(self.positions)]
        call(self.packer, table.args, scratch, x, unit.d, unit.first, 0, *sizes)
        weights = table.start(self.nest.w)

        def run_lines(first: Count, last: Count, step: int) -> None:
            for h in loop(first, last, step):
                self.frame.change("h", h)
                above = (h - unit.first) * shape.strides[1]
                there = gep(scratch, above * self.line, ELEMENT)
                self.channels(there, weights, unit.group * shape.per_out, step)

        step = self.rows if self.by_lines else 1
        whole = unit.first + udiv(unit.last - unit.first, step) * step
        run_lines(unit.first, whole, step)
        if step > 1:
            run_lines(whole, unit.last, 1)

    @inline
    def channels(self, x: ptr, weights: ptr, first: i64, lines: int) -> None:
        """Some lines of all channels of a group."""
        depth = self.shape.depth
        if self.by_lines:
            self.run_line(x, gep(weights, first * depth, ELEMENT), first, lines)
            return
        count = -(-self.shape.per_out // self.rows)  # tiles of channels, the first `tall` of one more
        low, tall = divmod(self.shape.per_out, count)
        for before, number, rows in ((0, tall, low + 1), (tall * (low + 1), count - tall, low)):
            for t in loop(number):
                channel = first + (t * rows + before)
                self.run_line(x, gep(weights, channel * depth, ELEMENT), channel, rows)

    @inline
    def run_line(self, x: ptr, w: ptr, channel: Count, rows: int) -> None:
        """Rows of tiles: full ones, then one of as many vectors as are left."""
        width = self.table.size(self.shape.out[2])
        wide = self.vectors * self.lanes
        whole = udiv(width, wide) * wide

        def run_tile(pixel: Count, vectors: int, masked: bool) -> None:
            name = f"{self.name}.{rows}x{vectors}" + ("m" if masked else "")
            tile = _tile.written(name, kernel=self, rows=rows, vectors=vectors, masked=masked)
            call(tile, self.table.args, self.frame.pointer, gep(x, pixel, ELEMENT), w, channel, pixel)

        def run_rest(vectors: int) -> None:
            if vectors == self.vectors or width - whole <= vectors * self.lanes:
                run_tile(whole, vectors, True)
            else:
                run_rest(vectors + 1)

        for p in loop(0, whole, wide):
            run_tile(p, self.vectors, False)
        if width > whole:
            run_rest(1)

    # ---- the register tile

    def steps(self, frame: Value, *names: str) -> list[Count]:
        """Elements of scratch that the frame has by name."""
        return [self.frame.read(builder(), frame, name) for name in names]

    def met_lines(self, i: int, rows: int) -> list[tuple[int, int]]:
        """(line of output, line of its window) of all windows of `rows` lines that read line i of x."""
        stride, dilation, taps = self.shape.strides[1], self.shape.dilations[1], self.shape.window[1]
        places = [(r, divmod(i - r * stride, dilation)) for r in range(rows)]
        return [(r, tap) for r, (tap, rest) in places if rest == 0 and 0 <= tap < taps]

    @inline
    def line_sums(self, frame: ptr, x: ptr, w: ptr, rows: int, vectors: int) -> list[Word]:
        """Sums of `rows` lines of one channel: a line of x is read once for all windows that meet it."""
        shape, width = self.shape, self.lanes
        _, taps_h, taps_w = shape.window
        phase, x_h = self.steps(frame, "phase", "line")
        weights = [broadcast(gep(w, k, ELEMENT), ELEMENT, width) for k in range(taps_h * taps_w)]
        sums = [splat(0.0, width)] * (rows * vectors)
        for i in range((rows - 1) * shape.strides[1] + shape.reach[1]):
            met = self.met_lines(i, rows)
            for k in range(taps_w if met else 0):
                place, number = divmod(k * shape.dilations[2], shape.strides[2])
                there = gep(x, x_h * i + (phase * number + place), ELEMENT)
                for j in range(vectors):
                    pixels = load(vector(ELEMENT, width), gep(there, j * width, ELEMENT))
                    for r, tap in met:
                        at = r * vectors + j
                        made = fma(weights[tap * taps_w + k], pixels, sums[at])
                        sums[at : at + 1] = [Word(total) for total in builder().done_first([made])]
        return sums

    @inline
    def sums(self, frame: ptr, x: ptr, w: ptr, rows: int, vectors: int) -> list[Word]:
        """Sums of one line of `rows` channels."""
        shape, width, type_ = self.shape, self.lanes, vector(ELEMENT, self.lanes)
        taps_d, taps_h, taps_w = shape.window
        phase, x_block, x_d, x_h = self.steps(frame, "phase", "x_block", "x_d", "x_h")

        def add_taps(x: ptr, w: ptr, sums: list[Word], count: int) -> list[Word]:
            """Sums with products of `count` elements of a line of the window, written out."""
            for k in range(count):
                place, number = divmod(k * shape.dilations[2], shape.strides[2])
                there = gep(x, phase * number + place, ELEMENT)
                pixels = [load(type_, gep(there, j * width, ELEMENT)) for j in range(vectors)]
                before, sums = sums, []
                for i in range(rows):
                    weight = broadcast(gep(w, i * shape.depth + k, ELEMENT), ELEMENT, width)
                    made = [fma(weight, pixels[j], before[i * vectors + j]) for j in range(vectors)]
                    sums += [Word(total) for total in builder().done_first(made)]
            return sums

        def add_line(x: ptr, w: ptr, sums: list[Word]) -> list[Word]:
            """Sums with all products of a line of the window; a long one is a loop over parts with equal
            phases.
            """
            if taps_w <= MOST_UNROLLED:
                return add_taps(x, w, sums, taps_w)
            turn = math.lcm(shape.dilations[2], shape.strides[2]) // shape.dilations[2]
            part = turn * -(-UNROLLED // turn)
            step = part * shape.dilations[2] // shape.strides[2]
            whole, rest = divmod(taps_w, part)
            for k in loop(whole):
                there = gep(w, k * part, ELEMENT)
                sums = add_taps(gep(x, k * step, ELEMENT), there, sums, part)
            return add_taps(gep(x, whole * step, ELEMENT), gep(w, whole * part, ELEMENT), sums, rest)

        sums = [splat(0.0, width)] * (rows * vectors)
        for c in loop(shape.per_in):
            w_channel = gep(w, c * (taps_d * taps_h * taps_w), ELEMENT)
            x_channel = gep(x, c * x_block, ELEMENT)
            for d in loop(taps_d):
                w_plane = gep(w_channel, d * (taps_h * taps_w), ELEMENT)
                x_plane = gep(x_channel, d * x_d, ELEMENT)
                for h in loop(taps_h):
                    w_line = gep(w_plane, h * taps_w, ELEMENT)
                    sums = add_line(gep(x_plane, h * x_h, ELEMENT), w_line, sums)
        return sums


@native(internal=True, noinline=True)
def _tile(
    args: ptr,
    frame: ptr,
    x: noalias,
    w: noalias,
    channel: i64,
    pixel: i64,
    *,
    kernel: _Planar,
    rows: int,
    vectors: int,
    masked: bool,
) -> None:
    """Sum a tile and end it: some channels, or with one channel in a group some lines."""
    if kernel.by_lines:
        sums = kernel.line_sums(frame, x, w, rows, vectors)
    else:
        sums = kernel.sums(frame, x, w, rows, vectors)
    for i in range(rows):
        row, below = sums[i * vectors : (i + 1) * vectors], i if kernel.by_lines else 0
        place = TilePlace(frame, channel if kernel.by_lines else channel + i, pixel)
        kernel.end.store_row(place, row, masked, below)
