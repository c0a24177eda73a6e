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
from rlx.codegen.cpu.conv.lines import PhasedMover, emit_line_packer
from rlx.codegen.cpu.conv.shape import Geometry, Image
from rlx.codegen.cpu.conv.tile import TILE, TilePlace
from rlx.codegen.cpu.frame import EmittedKernel, KernelFrame, Slot
from rlx.codegen.cpu.product.gemm_end import Frame
from rlx.codegen.native.irtext import Function, Int, Module, Value, vector
from rlx.ir.dim import Dim, ceildiv, dim_max
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
    return _Planar(module, name, nest, inputs, outputs).emit()


@dataclass(frozen=True)
class _Unit:
    """Lines of one plane of one image that are computed for all channels of a group."""

    image: Int
    group: Int
    d: Int
    first: Int
    last: Int


class _Planar:
    def __init__(
        self, module: Module, name: str, nest: ConvNest, inputs: Sequence[Slot], outputs: Sequence[Slot]
    ) -> None:
        self.module, self.name, self.nest = module, name, nest
        self.table = KernelFrame(module, name, inputs, outputs)
        self.fn = self.table.fn
        self.shape = shape = Geometry.of(nest)
        self.lanes = module.target.lanes("f32")
        x, out = inputs[nest.x], nest.form.out
        self.x = Image.planar(x.steps, x.shape)
        store = nest.stores[0]
        self.frame = Frame(self.fn, 8)
        self.end = PlanarStore(
            module,
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

    def size(self, d: Dim) -> Int:
        return self.table.dim(self.fn, d)

    # ---- lines in scratch

    @property
    def positions(self) -> Dim:
        """Places of a line that windows read."""
        return (self.shape.out[2] - 1) * self.shape.strides[2] + self.shape.reach[2]

    @property
    def phase_width(self) -> Dim:
        """Pixels of one phase of a line, with room to read whole vectors past its end."""
        return ceildiv(self.positions, self.shape.strides[2]) + self.vectors * self.lanes

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
        return dim_max(self.group_line_bytes * self.shape.reach[1], self.budget)

    # ---- the nest of loops

    def emit(self) -> EmittedKernel:
        fn, shape = self.fn, self.shape
        lines, planes = self.size(shape.out[1]), self.size(shape.out[0])
        fit = fn.udiv(self.budget, fn.umax(self.size(self.group_line_bytes), 1))
        tallest = fn.add(fn.udiv(fn.smax(fn.sub(fit, shape.reach[1]), 0), shape.strides[1]), 1)
        bands = fn.ceildiv(lines, tallest)
        groups = fn.mul(fn.mul(self.size(shape.images), shape.groups), planes)
        few = fn.cmp("ult", groups, self.table.threads)
        bands = fn.umax(fn.select(few, fn.round_up(bands, self.table.threads), bands), 1)
        height = fn.umax(fn.ceildiv(lines, bands), 1)
        bands = fn.umax(fn.ceildiv(lines, height), 1)
        self.band_lines = fn.add(fn.mul(fn.sub(height, 1), shape.strides[1]), shape.reach[1])
        self.line = self.size(self.line_elements)
        plane = fn.mul(self.line, self.band_lines)
        self.frame.share("x_block", fn.mul(plane, shape.window[0]))
        self.frame.share("x_d", plane)
        self.frame.share("x_h", fn.mul(self.line, shape.dilations[1]))
        self.frame.share("line", self.line)
        self.frame.share("phase", self.size(self.phase_width))
        mover = PhasedMover(shape.strides[2], self.lanes)
        self.packer = emit_line_packer(self.module, self.name, self.table, shape, self.x, mover)
        low, high = self.table.share(fn.mul(groups, bands))

        def unit(u: Int, _: list[Value]) -> None:
            at, band = fn.udiv(u, bands), fn.urem(u, bands)
            at, d = fn.udiv(at, fn.umax(planes, 1)), fn.urem(at, fn.umax(planes, 1))
            image, group = fn.udiv(at, shape.groups), fn.urem(at, shape.groups)
            first = fn.mul(band, height)
            self.frame.change("image", image)
            self.frame.change("d", d)
            self.run(_Unit(image, group, d, first, fn.smin(fn.add(first, height), lines)))

        fn.loop(low, high, 1, [], unit)
        return self.table.finish(self.scratch_bytes)

    def run(self, unit: _Unit) -> None:
        fn, shape = self.fn, self.shape
        start = fn.add(
            fn.mul(unit.image, self.size(self.x.batch)),
            fn.mul(fn.mul(unit.group, shape.per_in), self.size(self.x.block)),
        )
        x = fn.gep(self.table.operand(fn, self.nest.x).pointer, start, ELEMENT)
        scratch = self.table.scratch()
        sizes = [self.band_lines, self.size(self.phase_width), self.size(self.positions)]
        fn.call(self.packer, [fn.args[0], scratch, x, unit.d, unit.first, 0, *sizes])
        weights = self.table.operand(fn, self.nest.w).pointer

        def lines(first: Int, last: Int, step: int) -> None:
            def line(h: Int, _: list[Value]) -> None:
                self.frame.change("h", h)
                above = fn.mul(fn.sub(h, unit.first), shape.strides[1])
                there = fn.gep(scratch, fn.mul(above, self.line), ELEMENT)
                self.channels(there, weights, fn.mul(unit.group, shape.per_out), step)

            fn.loop(first, last, step, [], line)

        step = self.rows if self.by_lines else 1
        count = fn.sub(unit.last, unit.first)
        whole = fn.add(unit.first, fn.mul(fn.udiv(count, step), step))
        lines(unit.first, whole, step)
        if step > 1:
            lines(whole, unit.last, 1)

    def channels(self, x: Value, weights: Value, first: Int, lines: int) -> None:
        """Some lines of all channels of a group."""
        fn, shape = self.fn, self.shape
        if self.by_lines:
            self.run_line(x, fn.gep(weights, fn.mul(first, shape.depth), ELEMENT), first, lines)
            return
        count = -(-shape.per_out // self.rows)  # tiles of channels, the first `tall` of one more
        low, tall = divmod(shape.per_out, count)

        def tiles(before: int, number: int, rows: int) -> None:
            def tile(t: Int, _: list[Value]) -> None:
                channel = fn.add(first, fn.add(fn.mul(t, rows), before))
                self.run_line(x, fn.gep(weights, fn.mul(channel, shape.depth), ELEMENT), channel, rows)

            fn.loop(0, number, 1, [], tile)

        tiles(0, tall, low + 1)
        tiles(tall * (low + 1), count - tall, low)

    def run_line(self, x: Value, w: Value, channel: Int, rows: int) -> None:
        """Rows of tiles: full ones, then one of as many vectors as are left."""
        fn = self.fn
        width = self.size(self.shape.out[2])
        wide = self.vectors * self.lanes
        whole = fn.mul(fn.udiv(width, wide), wide)

        def call(pixel: Int, vectors: int, masked: bool) -> None:
            name = self.tile(rows, vectors, masked)
            fn.call(name, [fn.args[0], self.frame.pointer, fn.gep(x, pixel, ELEMENT), w, channel, pixel])

        fn.loop(0, whole, wide, [], lambda p, _: call(p, self.vectors, False))

        def rest(vectors: int) -> None:
            enough = vectors == self.vectors or fn.cmp("sle", fn.sub(width, whole), vectors * self.lanes)
            fn.branch(enough, lambda: call(whole, vectors, True), lambda: rest(vectors + 1))

        fn.branch(fn.cmp("sgt", width, whole), lambda: rest(1))

    # ---- the register tile

    def tile(self, rows: int, vectors: int, masked: bool) -> str:
        """Name of the function tile(args, frame, x, w, channel, pixel)."""
        name = f"{self.name}.{rows}x{vectors}" + ("m" if masked else "")
        if self.module.defines(name):
            return name
        fn = self.module.function(name, TILE, internal=True, noinline=True)
        _, frame, x, w, channel, pixel = fn.args
        sums = (self.line_sums if self.by_lines else self.sums)(fn, frame, x, w, rows, vectors)
        for i in range(rows):
            row = sums[i * vectors : (i + 1) * vectors]
            below = i if self.by_lines else 0
            place = TilePlace(fn, frame, channel if self.by_lines else fn.add(channel, i), pixel)
            self.end.store_row(place, row, masked, below)
        return name

    def line_sums(
        self, fn: Function, frame: Value, x: Value, w: Value, rows: int, vectors: int
    ) -> list[Value]:
        """Sums of `rows` lines of one channel: a line of x is read once for all windows that meet it."""
        shape, lanes = self.shape, self.lanes
        _, taps_h, taps_w = shape.window
        _, stride, _ = shape.strides
        _, dilation, _ = shape.dilations
        phase, x_h = self.frame.read(fn, frame, "phase"), self.frame.read(fn, frame, "line")
        weights = [fn.broadcast(fn.gep(w, k, ELEMENT), ELEMENT, lanes) for k in range(taps_h * taps_w)]
        sums = [fn.splat(0.0, lanes)] * (rows * vectors)
        for i in range((rows - 1) * stride + shape.reach[1]):
            met = [(r, (i - r * stride) // dilation) for r in range(rows) if (i - r * stride) % dilation == 0]
            met = [(r, k) for r, k in met if 0 <= k < taps_h]
            for k in range(taps_w if met else 0):
                place, number = divmod(k * shape.dilations[2], shape.strides[2])
                there = fn.gep(x, fn.add(fn.mul(x_h, i), fn.add(fn.mul(phase, number), place)), ELEMENT)
                for j in range(vectors):
                    pixels = fn.load(vector(ELEMENT, lanes), fn.gep(there, j * lanes, ELEMENT))
                    for r, tap in met:
                        at = r * vectors + j
                        sums[at] = fn.fma(weights[tap * taps_w + k], pixels, sums[at])
        return sums

    def sums(self, fn: Function, frame: Value, x: Value, w: Value, rows: int, vectors: int) -> list[Value]:
        shape, lanes = self.shape, self.lanes
        taps_d, taps_h, taps_w = shape.window
        phase = self.frame.read(fn, frame, "phase")
        loops = (  # extent, step in x, step in w of what is looped over
            (shape.per_in, self.frame.read(fn, frame, "x_block"), taps_d * taps_h * taps_w),
            (taps_d, self.frame.read(fn, frame, "x_d"), taps_h * taps_w),
            (taps_h, self.frame.read(fn, frame, "x_h"), taps_w),
        )
        type_ = vector(ELEMENT, lanes)

        def taps(x: Value, w: Value, sums: list[Value], count: int) -> list[Value]:
            """Products of `count` elements of a line of the window, written out."""
            for k in range(count):
                place, number = divmod(k * shape.dilations[2], shape.strides[2])
                there = fn.gep(x, fn.add(fn.mul(phase, number), place), ELEMENT)
                pixels = [fn.load(type_, fn.gep(there, j * lanes, ELEMENT)) for j in range(vectors)]
                for i in range(rows):
                    weight = fn.broadcast(fn.gep(w, i * shape.depth + k, ELEMENT), ELEMENT, lanes)
                    for j in range(vectors):
                        sums[i * vectors + j] = fn.fma(weight, pixels[j], sums[i * vectors + j])
            return sums

        def line(x: Value, w: Value, sums: list[Value]) -> list[Value]:
            """All products of a line of the window; a long one is a loop over parts with equal phases."""
            if taps_w <= MOST_UNROLLED:
                return taps(x, w, sums, taps_w)
            turn = math.lcm(shape.dilations[2], shape.strides[2]) // shape.dilations[2]
            part = turn * -(-UNROLLED // turn)
            step = part * shape.dilations[2] // shape.strides[2]
            whole, rest = divmod(taps_w, part)

            def inside(k: Int, sums: list[Value]) -> list[Value]:
                there = fn.gep(w, fn.mul(k, part), ELEMENT)
                return taps(fn.gep(x, fn.mul(k, step), ELEMENT), there, list(sums), part)

            sums = fn.loop(0, whole, 1, sums, inside)
            return taps(fn.gep(x, whole * step, ELEMENT), fn.gep(w, whole * part, ELEMENT), sums, rest)

        def level(number: int, x: Value, w: Value, sums: list[Value]) -> list[Value]:
            if number == len(loops):
                return line(x, w, list(sums))
            extent, x_step, w_step = loops[number]

            def inside(k: Int, sums: list[Value]) -> list[Value]:
                there = fn.gep(w, fn.mul(k, w_step), ELEMENT)
                return level(number + 1, fn.gep(x, fn.mul(k, x_step), ELEMENT), there, sums)

            return fn.loop(0, extent, 1, sums, inside)

        return level(0, x, w, [fn.splat(0.0, lanes)] * (rows * vectors))
