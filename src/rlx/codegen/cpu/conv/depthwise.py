"""Depthwise convolution of blocked images: every lane is a channel with a separate kernel.

Where no window meets an edge, strips of a few columns run down the lines with all weights in registers. At
the upper and lower edge, strips leave out the lines of the window that are padding. The pixels at the left
and right are summed one by one. Where a block has a weight that is NaN or infinite, padding is multiplied,
too, so that it shows. Threads share planes or bands of lines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.codegen.cpu.conv.end import Epilogue
from rlx.codegen.cpu.conv.shape import Geometry, Image, static
from rlx.codegen.cpu.expression import Expression, Lane
from rlx.codegen.cpu.frame import EmittedKernel, KernelFrame, Slot
from rlx.codegen.cpu.primitives import memory_type
from rlx.codegen.cpu.product.gemm_cut import Count, Tiles
from rlx.codegen.cpu.product.gemm_end import Frame
from rlx.codegen.cpu.product.microkernel import kind_of
from rlx.codegen.native.irtext import Module, Value, vector
from rlx.codegen.native.notation import inline, native, write
from rlx.codegen.native.words import (
    any_lane,
    builder,
    call,
    gep,
    i64,
    is_nan,
    lanes,
    load,
    loop,
    noalias,
    ptr,
    select,
    splat,
    store,
    udiv,
    ult,
    urem,
    zext,
)
from rlx.kernel.nests import ConvNest

MOST_COLUMNS = 8
MOST_UNROLLED = 16  # window elements whose weights stay in registers; lines of a larger window are a loop

Range = tuple[Count, Count]


def emit_depthwise(
    module: Module, name: str, nest: ConvNest, inputs: Sequence[Slot], outputs: Sequence[Slot]
) -> EmittedKernel:
    """Write the kernel of a depthwise convolution over one or two axes; weights are as
    [C/lanes][window][lanes].
    """
    made = _Depthwise(module, name, nest, inputs, outputs)
    return write(made.table.fn, made.emit)


class _Pixels(dict[int, Value]):
    """Pixels by their place in a line, each loaded at its first use."""

    def __init__(self, load: Callable[[int], Value]) -> None:
        self._load = load

    def __missing__(self, place: int) -> Value:
        found = self[place] = self._load(place)
        return found


class _Depthwise:
    def __init__(
        self, module: Module, name: str, nest: ConvNest, inputs: Sequence[Slot], outputs: Sequence[Slot]
    ) -> None:
        self.name, self.nest = name, nest
        self.table = KernelFrame(module, name, inputs, outputs)
        self.shape = Geometry.of(nest)
        self.lanes = module.target.lanes("f32")
        self.dtype = inputs[nest.x].dtype
        self.kind = kind_of(self.dtype.name, module.target, grouped=False)
        self.element = self.kind.element
        self.x, self.y = Image.blocked(inputs[nest.x]), Image.blocked(outputs[0])
        self.epilogue = Epilogue.blocked(
            self.table, nest.stores[0], nest.form.out, self.shape.out, self.lanes
        )
        self.channels = static(nest.form.out[1])
        self.blocks = -(-self.channels // self.lanes)
        self.frame = Frame(self.table.fn, 4)
        self.taps = self.shape.window[1] * self.shape.window[2]
        self.unrolled = self.taps <= MOST_UNROLLED
        self.columns = self.fitting(min(self.taps, 9) if self.unrolled else 1)
        self.edge_columns = self.fitting(1)

    def fitting(self, weights: int) -> int:
        """Columns of a strip whose sums and pixels fit the registers next to some weights."""
        target = self.table.fn.module.target
        spare = target.registers - weights - 3 - target.web  # engines keep a register for themselves
        return max(min(MOST_COLUMNS, spare // (1 + self.shape.strides[2])), 1)

    # ---- the nest of loops

    @inline
    def emit(self) -> EmittedKernel:
        table, shape = self.table, self.shape
        lines = table.size(shape.out[1])
        planes = table.size(shape.images) * self.blocks
        bands = select(ult(planes, table.threads), table.threads, 1)
        rows, columns = self.inner_range(1), self.inner_range(2)
        low, high = table.share(planes * bands)
        for u in loop(low, high):
            plane, band = udiv(u, bands), urem(u, bands)
            image, block = udiv(plane, self.blocks), urem(plane, self.blocks)
            first, last = udiv(band * lines, bands), udiv((band + 1) * lines, bands)
            start = image * table.size(self.x.batch) + block * table.size(self.x.block)
            x = gep(table.start(self.nest.x), start, self.element)
            w = gep(table.start(self.nest.w), block * (self.taps * self.lanes), self.element)
            self.frame.change("image", image)
            self.frame.change("block", block)
            self.plane(x, w, first, last, rows, columns)
        return table.finish()

    @inline
    def inner_range(self, axis: int) -> Range:
        """Outputs along an axis whose windows are inside."""
        table, shape, stride = self.table, self.shape, self.shape.strides[axis]
        out, low = table.size(shape.out[axis]), table.size(shape.low[axis])
        first = min(udiv(max(low, 0) + (stride - 1), stride), out)
        room = table.size(shape.size[axis]) + low - shape.reach[axis]
        last = select(room < 0, 0, udiv(max(room, 0), stride) + 1)
        return first, max(min(last, out), first)

    @inline
    def plane(self, x: ptr, w: ptr, first: i64, last: i64, rows: Range, columns: Range) -> None:
        """Lines first..last of one block of channels."""
        args, frame = self.table.args, self.frame.pointer
        width = self.table.size(self.shape.out[2])
        top, bottom = min(max(rows[0], first), last), max(min(rows[1], last), first)
        top = min(top, bottom)
        pixel, left = columns[0], columns[1] - columns[0]
        for wide, known in self.strips(left):
            count = udiv(left, wide) if known is None else known
            for t in loop(count):
                at = pixel + t * wide
                strip = _strip.written(f"{self.name}.strip{wide}", kernel=self, columns=wide)
                call(strip, args, frame, x, w, top, bottom, at)
            pixel += count * wide
            if known is None:
                left = urem(left, wide)

        def borders(padded: bool) -> None:
            name = f"{self.name}.{'padded' if padded else 'border'}"
            border = _border.written(name, kernel=self, padded=padded)

            def lines(low: Count, high: Count, begin: Count, end: Count) -> None:
                for h in loop(low, high):
                    call(border, args, frame, x, w, h, begin, end)

            if padded or self.shape.window[1] == 1:
                lines(first, top, 0, width)
                lines(bottom, last, 0, width)
            else:
                wide = self.edge_columns
                count = udiv(columns[1] - columns[0], wide)
                edge = _strip.written(f"{self.name}.edge{wide}", kernel=self, columns=wide, edge=True)
                for t in loop(count):
                    call(edge, args, frame, x, w, first, top, columns[0] + t * wide)
                    call(edge, args, frame, x, w, bottom, last, columns[0] + t * wide)
                for low, high in ((first, top), (bottom, last)):
                    lines(low, high, 0, columns[0])
                    lines(low, high, columns[0] + count * wide, width)
            lines(top, bottom, 0, columns[0])
            lines(top, bottom, columns[1], width)

        if self.padding_counts(w):
            borders(True)
        else:
            borders(False)

    def strips(self, columns: Count) -> list[tuple[int, int | None]]:
        """Widths of the strips that columns are cut in, and how many there are of each, where that is known.

        Every width has its own code. A known number is cut in strips of equal width, give or take one; of
        another, as many as fit of the widest, then of half of that, and so on.
        """
        if not isinstance(columns, int):
            return [(self.columns >> n, None) for n in range(self.columns.bit_length())]
        cut = Tiles.of(self.table.fn, columns, self.columns)
        assert isinstance(cut.low, int) and isinstance(cut.tall, int) and isinstance(cut.count, int)
        return [(w, n) for w, n in ((cut.low + 1, cut.tall), (cut.low, cut.count - cut.tall)) if n]

    @inline
    def padding_counts(self, w: ptr) -> bool:
        """Whether products with padding show in sums: 0 times infinity is NaN."""
        if self.nest.form.fill or not self.dtype.is_float:
            return bool(self.nest.form.fill)
        total = self.kind.zero
        for k in loop(self.taps):
            total = self.kind.multiply_add(builder(), self.kind.zero, self.weight(w, k), total)
        return any_lane(is_nan(total))

    # ---- what strips and borders share

    @inline
    def clipped(self, at: Count, axis: int) -> tuple[Count, Count, Count]:
        """(first element's place, first and last + 1 window element inside) of output `at`."""
        table, shape = self.table, self.shape
        dilation, window = shape.dilations[axis], shape.window[axis]
        start = at * shape.strides[axis] - table.size(shape.low[axis])
        before = udiv(max(0 - start, 0) + (dilation - 1), dilation)
        room = table.size(shape.size[axis]) - start + (dilation - 1)
        first = min(before, window)
        return start, first, max(min(udiv(max(room, 0), dilation), window), first)

    @inline
    def weight(self, w: ptr, k: Count) -> Value:
        """Window element k of all channels of a block."""
        return self.kind.read_b(builder(), gep(w, k * self.lanes, self.element), None)

    @inline
    def pixel(self, place: ptr) -> Value:
        """The channels of one pixel, as wide as the sums."""
        if self.dtype.is_float:
            return self.kind.read_b(builder(), place, None)
        return zext(load(vector(self.element, self.lanes), place), self.kind.accumulator)

    def indices(self, frame: Value) -> tuple[Count, Count]:
        """Image and block of channels of a plane."""
        return self.frame.read(builder(), frame, "image"), self.frame.read(builder(), frame, "block")

    @inline
    def common(self, frame: ptr) -> Expression:
        """What the epilogue computes once for all pixels."""
        image, block = self.indices(frame)
        mask = None
        if self.channels % self.lanes:
            mask = lanes(self.channels - block * self.lanes, self.lanes)
        return self.epilogue.common([image, block, 0, 0, 0, 0], Lane(2, 0, self.lanes, mask))

    @inline
    def store(self, frame: ptr, sums: Sequence[Value], h: Count, pixel: Count, common: Expression) -> None:
        """The epilogue and store of neighbouring pixels."""
        lane = common.lane
        assert lane is not None
        image, block = self.indices(frame)
        offset: Count = 0
        for index, step in ((image, self.y.batch), (block, self.y.block), (h, self.y.axes[1])):
            offset += index * self.table.size(step)
        offset += pixel * self.lanes
        element = memory_type(self.table.outputs[0].dtype)
        there = gep(self.table.start(len(self.table.inputs)), offset, element)
        for p, total in enumerate(sums):
            point = [image, block, 0, 0, h, pixel + p]
            value = self.epilogue.value(self.epilogue.at(point, lane, total, common))
            if lane.mask is not None:
                value = select(lane.mask, value, 0)
            store(value, gep(there, p * self.lanes, element))


@native(internal=True, noinline=True)
def _strip(
    args: ptr,
    frame: ptr,
    x: noalias,
    w: noalias,
    first: i64,
    last: i64,
    pixel: i64,
    *,
    kernel: _Depthwise,
    columns: int,
    edge: bool = False,
) -> None:
    """Lines first..last of some columns, whose windows are all inside; with `edge`, but for whole lines."""
    f, shape, kind, width = builder(), kernel.shape, kernel.kind, kernel.lanes
    line = kernel.table.size(kernel.x.axes[1])
    low_h, low_w = kernel.table.size(shape.low[1]), kernel.table.size(shape.low[2])
    common = kernel.common(frame)
    left = (pixel * shape.strides[2] - low_w) * width
    _, taps_h, taps_w = shape.window
    unrolled = kernel.unrolled and not edge
    kept = [kernel.weight(w, k) for k in range(kernel.taps)] if unrolled else []

    def add_line(row: ptr, weights: Sequence[Value], sums: list[Value]) -> list[Value]:
        """Sums with the products of one line of the windows."""
        pixels = _Pixels(lambda place: kernel.pixel(gep(row, place * width, kernel.element)))
        for k, factor in enumerate(weights):
            places = [p * shape.strides[2] + k * shape.dilations[2] for p in range(columns)]
            sums = [
                kind.multiply_add(f, pixels[place], factor, total)
                for place, total in zip(places, sums, strict=True)
            ]
        return sums

    for h in loop(first, last):
        window = gep(x, (h * shape.strides[1] - low_h) * line + left, kernel.element)
        sums = [kind.zero] * columns
        if unrolled:
            for r in range(taps_h):
                row = gep(window, line * shape.dilations[1] * r, kernel.element)
                sums = add_line(row, kept[r * taps_w : (r + 1) * taps_w], sums)
        else:
            _, low_r, high_r = kernel.clipped(h, 1) if edge else (0, 0, taps_h)
            for r in loop(low_r, high_r):
                row = gep(window, line * shape.dilations[1] * r, kernel.element)
                sums = add_line(row, [kernel.weight(w, r * taps_w + k) for k in range(taps_w)], sums)
        kernel.store(frame, sums, h, pixel, common)


@native(internal=True, noinline=True)
def _border(
    args: ptr,
    frame: ptr,
    x: noalias,
    w: noalias,
    h: i64,
    begin: i64,
    end: i64,
    *,
    kernel: _Depthwise,
    padded: bool,
) -> None:
    """Pixels begin..end of a line whose windows include padding, which is multiplied or left out."""
    f, table, shape, kind, width = builder(), kernel.table, kernel.shape, kernel.kind, kernel.lanes
    line = table.size(kernel.x.axes[1])
    common = kernel.common(frame)
    _, taps_h, taps_w = shape.window
    padding = splat(kernel.nest.form.fill, width, kind.accumulator)

    def add_padding(r: Count, first: Count, last: Count, total: Value) -> Value:
        """`total` with products of padding with weights first..last of window line r."""
        for k in loop(first, last):
            total = kind.multiply_add(f, padding, kernel.weight(w, r * taps_w + k), total)
        return total

    top, first_h, last_h = kernel.clipped(h, 1)
    outside = kind.zero  # of window lines that are padding: the same for all pixels of the line
    if padded:
        for r in loop(0, first_h):
            outside = add_padding(r, 0, taps_w, outside)
        for r in loop(last_h, taps_h):
            outside = add_padding(r, 0, taps_w, outside)
    # Products of 0 have a sum of their own: a -0 in another channel of the block stays what it is.
    apart = padded and not kernel.nest.form.fill

    for p in loop(begin, end):
        left, first_w, last_w = kernel.clipped(p, 2)
        sums = [kind.zero, outside] if apart else [outside]  # of pixels first, of padding last
        for r in loop(first_h, last_h):
            row = (top + r * shape.dilations[1]) * line
            if padded:
                sums = [*sums[:-1], add_padding(r, 0, first_w, sums[-1])]
            total = sums[0]
            for k in loop(first_w, last_w):
                at = row + (left + k * shape.dilations[2]) * width
                value = kernel.pixel(gep(x, at, kernel.element))
                total = kind.multiply_add(f, value, kernel.weight(w, r * taps_w + k), total)
            sums = [total, *sums[1:]]
            if padded:
                sums = [*sums[:-1], add_padding(r, last_w, taps_w, sums[-1])]
        if apart:
            sums = [select(is_nan(sums[1]), sums[1], sums[0])]
        kernel.store(frame, sums, h, p, common)
