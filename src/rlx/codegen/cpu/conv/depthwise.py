"""Depthwise convolution of blocked images: every lane is a channel with a separate kernel.

Where no window meets an edge, strips of a few columns run down the lines with all weights in registers. The
pixels around are summed one by one. Where a block has a weight that is NaN or infinite, padding is
multiplied, too, so that it shows. Threads share planes or bands of lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlx.codegen.cpu.conv.end import Epilogue
from rlx.codegen.cpu.conv.shape import Geometry, Image, static
from rlx.codegen.cpu.expression import Expression, Lane
from rlx.codegen.cpu.frame import EmittedKernel, KernelFrame, Slot
from rlx.codegen.cpu.primitives import memory_type
from rlx.codegen.cpu.product.gemm_cut import Tiles
from rlx.codegen.cpu.product.gemm_end import Frame
from rlx.codegen.cpu.product.microkernel import kind_of
from rlx.codegen.native.irtext import Function, Int, Module, Value, constant, vector
from rlx.ir.dim import Dim
from rlx.kernel.nests import ConvNest

MOST_COLUMNS = 8
MOST_UNROLLED = 16  # window elements whose weights stay in registers; lines of a larger window are a loop


def emit_depthwise(
    module: Module, name: str, nest: ConvNest, inputs: Sequence[Slot], outputs: Sequence[Slot]
) -> EmittedKernel:
    """Write the kernel of a depthwise convolution over one or two axes; weights are as
    [C/lanes][window][lanes].
    """
    return _Depthwise(module, name, nest, inputs, outputs).emit()


class _Depthwise:
    def __init__(
        self, module: Module, name: str, nest: ConvNest, inputs: Sequence[Slot], outputs: Sequence[Slot]
    ) -> None:
        self.module, self.name, self.nest = module, name, nest
        self.table = KernelFrame(module, name, inputs, outputs)
        self.fn = self.table.fn
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
        self.frame = Frame(self.fn, 4)
        self.taps = self.shape.window[1] * self.shape.window[2]
        spare = module.target.registers - min(self.taps, 9) - 3
        self.columns = max(min(MOST_COLUMNS, spare // (1 + self.shape.strides[2])), 1)

    def size(self, d: Dim) -> Int:
        return self.table.dim(self.fn, d)

    # ---- the nest of loops

    def inner_range(self, axis: int) -> tuple[Int, Int]:
        """Outputs along an axis whose windows are inside."""
        fn, shape = self.fn, self.shape
        out, low, stride = self.size(shape.out[axis]), self.size(shape.low[axis]), shape.strides[axis]
        first = fn.smin(fn.udiv(fn.add(fn.smax(low, 0), stride - 1), stride), out)
        room = fn.sub(fn.add(self.size(shape.size[axis]), low), shape.reach[axis])
        last = fn.select(fn.cmp("slt", room, 0), 0, fn.add(fn.udiv(fn.smax(room, 0), stride), 1))
        return first, fn.smax(fn.smin(last, out), first)

    def emit(self) -> EmittedKernel:
        fn = self.fn
        lines = self.size(self.shape.out[1])
        planes = fn.mul(self.size(self.shape.images), self.blocks)
        few = fn.cmp("ult", planes, self.table.threads)
        bands = fn.select(few, self.table.threads, 1)
        rows, columns = self.inner_range(1), self.inner_range(2)
        low, high = self.table.share(fn.mul(planes, bands))

        def unit(u: Int, _: list[Value]) -> None:
            plane, band = fn.udiv(u, bands), fn.urem(u, bands)
            image, block = fn.udiv(plane, self.blocks), fn.urem(plane, self.blocks)
            first = fn.udiv(fn.mul(band, lines), bands)
            last = fn.udiv(fn.mul(fn.add(band, 1), lines), bands)
            start = fn.add(fn.mul(image, self.size(self.x.batch)), fn.mul(block, self.size(self.x.block)))
            x = fn.gep(self.table.operand(fn, self.nest.x).pointer, start, self.element)
            weights = self.table.operand(fn, self.nest.w).pointer
            w = fn.gep(weights, fn.mul(block, self.taps * self.lanes), self.element)
            self.frame.change("image", image)
            self.frame.change("block", block)
            self.plane(x, w, first, last, rows, columns)

        fn.loop(low, high, 1, [], unit)
        return self.table.finish()

    def padding_counts(self, w: Value) -> bool | Value:
        """Whether products with padding show in sums: 0 times infinity is NaN."""
        fn = self.fn
        if self.nest.form.fill or not self.dtype.is_float:
            return bool(self.nest.form.fill)

        def product(k: Int, now: list[Value]) -> list[Value]:
            return [self.kind.multiply_add(fn, self.kind.zero, self.weight(fn, w, k), now[0])]

        (total,) = fn.loop(0, self.taps, 1, [self.kind.zero], product)
        return fn.any_lane(fn.is_nan(total))

    def plane(
        self, x: Value, w: Value, first: Int, last: Int, rows: tuple[Int, Int], columns: tuple[Int, Int]
    ) -> None:
        """Lines first..last of one block of channels."""
        fn = self.fn
        width = self.size(self.shape.out[2])
        top, bottom = fn.smin(fn.smax(rows[0], first), last), fn.smax(fn.smin(rows[1], last), first)
        top, bottom = fn.smin(top, bottom), bottom
        pixel = columns[0]
        for wide, count in self.strips(fn.sub(columns[1], columns[0])):

            def strip(t: Int, _: list[Value], wide: int = wide, first: Int = pixel) -> None:
                at = fn.add(first, fn.mul(t, wide))
                fn.call(self.strip(wide), [fn.args[0], self.frame.pointer, x, w, top, bottom, at])

            fn.loop(0, count, 1, [], strip)
            pixel = fn.add(pixel, fn.mul(count, wide))

        def borders(padded: bool) -> None:
            border = self.border(padded)

            def around(h: Int, begin: Int, end: Int) -> None:
                fn.call(border, [fn.args[0], self.frame.pointer, x, w, h, begin, end])

            def sides(h: Int, _: list[Value]) -> None:
                around(h, 0, columns[0])
                around(h, columns[1], width)

            fn.loop(first, top, 1, [], lambda h, _: around(h, 0, width))
            fn.loop(bottom, last, 1, [], lambda h, _: around(h, 0, width))
            fn.loop(top, bottom, 1, [], sides)

        counts = self.padding_counts(w)
        if isinstance(counts, bool):
            borders(counts)
        else:
            fn.branch(counts, lambda: borders(True), lambda: borders(False))

    def strips(self, columns: Int) -> Iterator[tuple[int, Int]]:
        """Widths of the strips that columns are cut in, and how many there are of each.

        Every width has its own code. A known number is cut in strips of equal width, give or take one; of
        another, as many as fit of the widest, then of half of that, and so on.
        """
        if isinstance(columns, int):
            cut = Tiles.of(self.fn, columns, self.columns)
            assert isinstance(cut.low, int) and isinstance(cut.tall, int) and isinstance(cut.count, int)
            yield from ((w, n) for w, n in ((cut.low + 1, cut.tall), (cut.low, cut.count - cut.tall)) if n)
            return
        wide = self.columns
        while wide:
            yield wide, self.fn.udiv(columns, wide)
            columns = self.fn.urem(columns, wide)
            wide //= 2

    # ---- functions

    def weight(self, fn: Function, w: Value, k: Int) -> Value:
        """Window element k of all channels of a block."""
        return self.kind.read_b(fn, fn.gep(w, fn.mul(k, self.lanes), self.element), None)

    def pixel(self, fn: Function, place: Value) -> Value:
        """The channels of one pixel, as wide as the sums."""
        if self.dtype.is_float:
            return self.kind.read_b(fn, place, None)
        return fn.zext(fn.load(vector(self.element, self.lanes), place), self.kind.accumulator)

    def store(
        self, fn: Function, frame: Value, sums: Sequence[Value], h: Int, pixel: Int, common: Expression
    ) -> None:
        """The epilogue and store of neighbouring pixels."""
        image, block = (self.frame.read(fn, frame, f) for f in ("image", "block"))
        element = memory_type(self.table.outputs[0].dtype)
        offset: Int = 0
        for index, step in ((image, self.y.batch), (block, self.y.block), (h, self.y.axes[1])):
            offset = fn.add(offset, fn.mul(index, self.table.dim(fn, step)))
        offset = fn.add(offset, fn.mul(pixel, self.lanes))
        there = fn.gep(self.table.operand(fn, len(self.table.inputs)).pointer, offset, element)
        for p, total in enumerate(sums):
            point = [image, block, 0, 0, h, fn.add(pixel, p)]
            assert common.lane is not None
            value = self.epilogue.value(self.epilogue.at(fn, point, common.lane, total, common))
            if common.lane.mask is not None:
                value = fn.select(common.lane.mask, value, constant(value.type, 0))
            fn.store(value, fn.gep(there, p * self.lanes, element))

    def common(self, fn: Function, frame: Value) -> Expression:
        """What the epilogue computes once for all pixels."""
        image, block = (self.frame.read(fn, frame, f) for f in ("image", "block"))
        mask = None
        if self.channels % self.lanes:
            mask = fn.lanes(fn.sub(self.channels, fn.mul(block, self.lanes)), self.lanes)
        made = self.epilogue.at(fn, [image, block, 0, 0, 0, 0], Lane(2, 0, self.lanes, mask), None, None)
        for e in self.epilogue.fixed:
            made(e)
        return made

    def strip(self, columns: int) -> str:
        """Name of strip(args, frame, x, w, first, last, pixel): lines first..last of some columns, all
        inside.
        """
        name = f"{self.name}.strip{columns}"
        if self.module.defines(name):
            return name
        words = ("first", "last", "pixel")
        params = [("ptr", "args"), ("ptr", "frame"), ("ptr noalias", "x"), ("ptr noalias", "w")]
        fn = self.module.function(name, [*params, *(("i64", p) for p in words)], internal=True, noinline=True)
        _, frame, x, w, first, last, pixel = fn.args
        shape, lanes = self.shape, self.lanes
        line = self.table.dim(fn, self.x.axes[1])
        low_h, low_w = (self.table.dim(fn, d) for d in shape.low[1:])
        common = self.common(fn, frame)
        left = fn.mul(fn.sub(fn.mul(pixel, shape.strides[2]), low_w), lanes)
        taps_h, taps_w = shape.window[1:]
        unrolled = self.taps <= MOST_UNROLLED

        kept = [self.weight(fn, w, k) for k in range(self.taps)] if unrolled else []

        def window_line(x: Value, weights: Sequence[Value], sums: list[Value]) -> list[Value]:
            """Products of one line of the windows; a pixel of x is loaded once."""
            seen: dict[int, Value] = {}
            for k, factor in enumerate(weights):
                for p in range(columns):
                    at = p * shape.strides[2] + k * shape.dilations[2]
                    if at not in seen:
                        seen[at] = self.pixel(fn, fn.gep(x, at * lanes, self.element))
                    sums[p] = self.kind.multiply_add(fn, seen[at], factor, sums[p])
            return sums

        def one(h: Int, _: list[Value]) -> None:
            at = fn.mul(fn.sub(fn.mul(h, shape.strides[1]), low_h), line)
            there = fn.gep(x, fn.add(at, left), self.element)
            sums = [self.kind.zero] * columns

            def tap_line(r: Int, sums: list[Value]) -> list[Value]:
                row = fn.gep(there, fn.mul(fn.mul(line, shape.dilations[1]), r), self.element)
                if isinstance(r, int) and unrolled:
                    return window_line(row, kept[r * taps_w : (r + 1) * taps_w], list(sums))
                return window_line(
                    row, [self.weight(fn, w, fn.add(fn.mul(r, taps_w), k)) for k in range(taps_w)], list(sums)
                )

            if unrolled:
                for r in range(taps_h):
                    sums = tap_line(r, sums)
            else:
                sums = fn.loop(0, taps_h, 1, sums, tap_line)
            self.store(fn, frame, sums, h, pixel, common)

        fn.loop(first, last, 1, [], one)
        return name

    def border(self, padded: bool) -> str:
        """Name of border(args, frame, x, w, h, begin, end): pixels begin..end of a line whose windows meet
        padding, which is multiplied or left out.
        """
        name = f"{self.name}.{'padded' if padded else 'border'}"
        if self.module.defines(name):
            return name
        params = [("ptr", "args"), ("ptr", "frame"), ("ptr noalias", "x"), ("ptr noalias", "w")]
        words = [("i64", p) for p in ("h", "begin", "end")]
        fn = self.module.function(name, [*params, *words], internal=True, noinline=True)
        _, frame, x, w, h, begin, end = fn.args
        shape, lanes = self.shape, self.lanes
        line = self.table.dim(fn, self.x.axes[1])
        low = [self.table.dim(fn, d) for d in shape.low]
        size = [self.table.dim(fn, d) for d in shape.size]
        common = self.common(fn, frame)

        taps_w = shape.window[2]
        padding = fn.splat(self.nest.form.fill, lanes, self.kind.accumulator)

        def clipped(at: Int, axis: int) -> tuple[Int, Int, Int]:
            """(first element's place, first and last + 1 window element inside) of output `at`."""
            start, window = fn.sub(fn.mul(at, shape.strides[axis]), low[axis]), shape.window[axis]
            dilation = shape.dilations[axis]
            before = fn.udiv(fn.add(fn.smax(fn.sub(0, start), 0), dilation - 1), dilation)
            room = fn.add(fn.sub(size[axis], start), dilation - 1)
            first = fn.smin(before, window)
            return start, first, fn.smax(fn.smin(fn.udiv(fn.smax(room, 0), dilation), window), first)

        def factor(r: Int, k: Int) -> Value:
            return self.weight(fn, w, fn.add(fn.mul(r, taps_w), k))

        def padding_of(r: Int, first: Int, last: Int, sums: list[Value]) -> list[Value]:
            """Products of padding with weights first..last of window line r."""
            product = lambda k, now: [self.kind.multiply_add(fn, padding, factor(r, k), now[0])]  # noqa: E731
            return fn.loop(first, last, 1, sums, product)

        top, first_h, last_h = clipped(h, 1)
        outside = [self.kind.zero]  # of window lines that are padding: the same for all pixels of the line
        for first, last in ((0, first_h), (last_h, shape.window[1])) if padded else ():
            outside = fn.loop(first, last, 1, outside, lambda r, now: padding_of(r, 0, taps_w, now))
        # Products of 0 have a sum of their own: a -0 in another channel of the block stays what it is.
        apart = padded and not self.nest.form.fill
        start = [self.kind.zero, *outside] if apart else outside

        def pixel(p: Int, _: list[Value]) -> None:
            left, first_w, last_w = clipped(p, 2)

            def lines(r: Int, sums: list[Value]) -> list[Value]:
                row = fn.mul(fn.add(top, fn.mul(r, shape.dilations[1])), line)

                def taps(k: Int, sums: list[Value]) -> list[Value]:
                    at = fn.add(row, fn.mul(fn.add(left, fn.mul(k, shape.dilations[2])), lanes))
                    value = self.pixel(fn, fn.gep(x, at, self.element))
                    return [self.kind.multiply_add(fn, value, factor(r, k), sums[0])]

                if not padded:
                    return fn.loop(first_w, last_w, 1, sums, taps)
                *inside, edge = sums
                edges = padding_of(r, 0, first_w, [edge])
                inside = fn.loop(first_w, last_w, 1, inside or edges, taps)
                edges = padding_of(r, last_w, taps_w, edges if apart else inside)
                return [*inside, *edges] if apart else edges

            sums = fn.loop(first_h, last_h, 1, start, lines)
            if apart:
                sums = [fn.value(fn.select(fn.is_nan(sums[1]), sums[1], sums[0]))]
            self.store(fn, frame, sums, h, p, common)

        fn.loop(begin, end, 1, [], pixel)
        return name
