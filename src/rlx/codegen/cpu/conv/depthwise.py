"""Depthwise convolution of blocked images: every lane is a channel with a separate kernel.

Lines are cut in strips of a few columns, which run down an image. Which taps of a column read padding is
known when the code of a strip is written, and they are left out; lines of a window that are padding are left
out line by line. Where a size is known only at run time, columns at an edge that nothing is known of are
summed one by one. So are all pixels of a block with a weight that is NaN or infinite: there padding is
multiplied, so that it shows. Threads share planes or bands of lines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby, pairwise

from rlx.codegen.cpu.conv.end import Epilogue
from rlx.codegen.cpu.conv.shape import Geometry, Image, static
from rlx.codegen.cpu.conv.skip import has_wild_weight, taps_inside
from rlx.codegen.cpu.expression import Expression, Lane
from rlx.codegen.cpu.frame import EmittedKernel, KernelFrame, Slot
from rlx.codegen.cpu.primitives import memory_type
from rlx.codegen.cpu.product.gemm_cut import Count
from rlx.codegen.cpu.product.gemm_end import Frame
from rlx.codegen.cpu.product.microkernel import kind_of
from rlx.codegen.native.irtext import Module, Value, vector
from rlx.codegen.native.notation import inline, native, write
from rlx.codegen.native.words import (
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
from rlx.ir.dim import known_eq
from rlx.kernel.nests import ConvNest

MOST_COLUMNS = 8
FEWEST_COLUMNS = 4  # of a strip with all weights in registers
MOST_UNROLLED = 16  # window elements whose weights may stay in registers; else they are read line by line

Range = tuple[Count, Count]
Inside = tuple[tuple[int, int], ...]  # first and last + 1 tap of a line of the window, for each column


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
        beside = self.fitting(self.taps)
        self.keeps_weights = self.taps <= MOST_UNROLLED and beside >= FEWEST_COLUMNS
        self.columns = beside if self.keeps_weights else self.fitting(1)

    def fitting(self, weights: int) -> int:
        """Columns of a strip whose sums and pixels fit the registers next to some weights."""
        target = self.table.fn.module.target
        spare = target.registers - weights - 3
        return max(min(MOST_COLUMNS, spare // (1 + self.shape.strides[2])), 1)

    # ---- columns of a line

    def cut(self, inside: Inside) -> list[Inside]:
        """Neighbouring columns in strips of equal width, give or take one."""
        count = -(-len(inside) // self.columns)
        low, tall = divmod(len(inside), max(count, 1))
        starts = [t * low + min(t, tall) for t in range(count + 1)]
        return [inside[first:last] for first, last in pairwise(starts)]

    def all_columns(self) -> Inside | None:
        """Of a line whose size is known."""
        shape = self.shape
        size, out, low = shape.size[2], shape.out[2], shape.low[2]
        if isinstance(size, int) and isinstance(out, int) and isinstance(low, int):
            return tuple(self.inside(at * shape.strides[2] - low, size) for at in range(out))
        return None

    def left_columns(self) -> Inside | None:
        """Of lines that have a column whose window is inside: those to the left of it, if they are known."""
        shape, low = self.shape, self.shape.low[2]
        if not isinstance(low, int):
            return None
        starts = range(-low, 0, shape.strides[2])
        return tuple(self.inside(start, shape.reach[2]) for start in starts)

    def right_columns(self) -> Inside | None:
        """Of such lines, those to the right of the last such column, if they are known."""
        shape, (_, high) = self.shape, self.nest.form.padding[-1]
        if not isinstance(high, int) or shape.strides[2] != 1:
            return None
        return tuple(self.inside(past, shape.reach[2]) for past in range(1, high + 1))

    def inside(self, start: int, size: int) -> tuple[int, int]:
        """The taps of a window that begins at place `start` of a line."""
        taps, dilation = self.shape.window[2], self.shape.dilations[2]
        first = min(-(min(start, 0) // dilation), taps)
        return first, max(min(-(-(size - start) // dilation), taps), first)

    # ---- the nest of loops

    @inline
    def emit(self) -> EmittedKernel:
        table, shape = self.table, self.shape
        lines = table.size(shape.out[1])
        planes = table.size(shape.images) * self.blocks
        bands = select(ult(planes, table.threads), table.threads, 1)
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
            self.plane(x, w, first, last)
        return table.finish()

    @inline
    def inner_columns(self) -> Range:
        """Columns whose windows are inside."""
        table, shape, stride = self.table, self.shape, self.shape.strides[2]
        out, low = table.size(shape.out[2]), table.size(shape.low[2])
        first = min(udiv(max(low, 0) + (stride - 1), stride), out)
        room = table.size(shape.size[2]) + low - shape.reach[2]
        last = select(room < 0, 0, udiv(max(room, 0), stride) + 1)
        return first, max(min(last, out), first)

    @inline
    def plane(self, x: ptr, w: ptr, first: i64, last: i64) -> None:
        """Lines first..last of one block of channels."""
        args, frame, width = self.table.args, self.frame.pointer, self.table.size(self.shape.out[2])
        whole = (0, self.shape.window[2])

        def pixels(begin: Count, end: Count, padded: bool) -> None:
            """Columns one by one."""
            name = f"{self.name}.{'padded' if padded else 'border'}"
            border = _border.written(name, kernel=self, padded=padded)
            for h in loop(first, last):
                call(border, args, frame, x, w, h, begin, end)

        def strips(inside: Inside, begin: Count, count: Count) -> None:
            strip = _strip.written(self.strip_name(inside), kernel=self, inside=inside)
            for t in loop(count):
                call(strip, args, frame, x, w, first, last, begin + t * len(inside))

        def known(inside: Inside, begin: Count) -> None:
            """Columns in strips; neighbours that are alike share a loop."""
            for strip, group in groupby(self.cut(inside)):
                count = len(list(group))
                strips(strip, begin, count)
                begin = begin + count * len(strip)

        def unknown() -> None:
            """All columns of a line whose size is not known."""
            low, high = self.inner_columns()
            fill = bool(self.nest.form.fill)
            left, right = self.left_columns(), self.right_columns()
            if low < high:
                if left is None:
                    pixels(0, low, fill)
                else:
                    known(left, 0)
                at, rest = low, high - low
                for n in range(self.columns.bit_length()):
                    wide = self.columns >> n
                    count = udiv(rest, wide)
                    strips((whole,) * wide, at, count)
                    at = at + count * wide
                    rest = urem(rest, wide)
                if right is None:
                    pixels(high, width, fill)
                else:
                    known(right, high)
            else:
                pixels(0, width, fill)

        def each() -> None:
            inside = self.all_columns()
            if inside is None:
                unknown()
            else:
                known(inside, 0)

        if self.may_be_wild:
            if has_wild_weight(self.kind, w, self.taps):
                pixels(0, width, True)
            else:
                each()
        else:
            each()

    @property
    def may_be_wild(self) -> bool:
        """Whether padding shows only where a weight is NaN or infinite."""
        return self.shape.padded and self.dtype.is_float and not self.nest.form.fill

    def strip_name(self, inside: Inside) -> str:
        whole = (0, self.shape.window[2])
        clipped = [f".{p}_{begin}_{end}" for p, (begin, end) in enumerate(inside) if (begin, end) != whole]
        return f"{self.name}.strip{len(inside)}" + "".join(clipped)

    # ---- what strips and borders share

    def places(self, inside: Inside, k: int) -> dict[int, int | None]:
        """What tap k multiplies, by column of a strip that it adds to: a place in its line, or padding."""
        stride, start = self.shape.strides[2], k * self.shape.dilations[2]
        read = {p: p * stride + start for p, taps in enumerate(inside) if k in range(*taps)}
        return {p: read.get(p) for p in range(len(inside)) if p in read or self.nest.form.fill}

    @inline
    def lines_inside(self, h: Count) -> Range:
        """The lines of the window of output line h that read x: first and last + 1."""
        if known_eq(self.shape.low[1], 0) is True and known_eq(self.nest.form.padding[0][1], 0) is True:
            return 0, self.shape.window[1]
        return taps_inside(self.table, self.shape, 1, h)

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
    inside: Inside,
) -> None:
    """Lines first..last of neighbouring columns, of which taps `inside` read x."""
    f, shape, kind, width = builder(), kernel.shape, kernel.kind, kernel.lanes
    line = kernel.table.size(kernel.x.axes[1])
    low_h, low_w = kernel.table.size(shape.low[1]), kernel.table.size(shape.low[2])
    common = kernel.common(frame)
    left = (pixel * shape.strides[2] - low_w) * width
    _, taps_h, taps_w = shape.window
    fill = kernel.nest.form.fill
    padding = splat(fill, width, kind.accumulator)
    nothing = ((0, 0),) * len(inside)
    kept = [kernel.weight(w, k) for k in range(kernel.taps)] if kernel.keeps_weights else []

    def add_line(row: ptr, r: Count, inside: Inside, sums: list[Value]) -> list[Value]:
        """Sums with the products of line r of the windows."""
        pixels = _Pixels(lambda place: kernel.pixel(gep(row, place * width, kernel.element)))
        for k in range(taps_w):
            places = kernel.places(inside, k)
            if places:
                factor = kept[r * taps_w + k] if kept else kernel.weight(w, r * taps_w + k)
                for p, place in places.items():
                    value = padding if place is None else pixels[place]
                    made = f.done_first([kind.multiply_add(f, value, factor, sums[p])])
                    sums = [*sums[:p], *made, *sums[p + 1 :]]
        return sums

    for h in loop(first, last):
        window = gep(x, (h * shape.strides[1] - low_h) * line + left, kernel.element)
        sums = [kind.zero] * len(inside)
        low_r, high_r = kernel.lines_inside(h)
        if kept:
            for r in range(taps_h):
                row = gep(window, line * shape.dilations[1] * r, kernel.element)
                if (r >= low_r) & (r < high_r):
                    sums = add_line(row, r, inside, sums)
                else:
                    sums = add_line(row, r, nothing, sums)
        else:
            for r in loop(0, low_r if fill else 0):
                sums = add_line(window, r, nothing, sums)
            for r in loop(low_r, high_r):
                row = gep(window, line * shape.dilations[1] * r, kernel.element)
                sums = add_line(row, r, inside, sums)
            for r in loop(high_r if fill else taps_h, taps_h):
                sums = add_line(window, r, nothing, sums)
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
    """Pixels begin..end of a line, one by one; padding is multiplied or left out."""
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

    top = h * shape.strides[1] - table.size(shape.low[1])
    first_h, last_h = kernel.lines_inside(h)
    outside = kind.zero  # of window lines that are padding: the same for all pixels of the line
    if padded:
        for r in loop(0, first_h):
            outside = add_padding(r, 0, taps_w, outside)
        for r in loop(last_h, taps_h):
            outside = add_padding(r, 0, taps_w, outside)
    # Products of 0 have a sum of their own: a -0 in another channel of the block stays what it is.
    apart = padded and not kernel.nest.form.fill

    for p in loop(begin, end):
        left = p * shape.strides[2] - table.size(shape.low[2])
        first_w, last_w = taps_inside(table, shape, 2, p)
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
