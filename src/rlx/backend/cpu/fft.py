"""The Fourier kernel: rows of a tensor, real or complex, forward or back, any length known when it is
written.

Where there are enough rows, each lane of a vector transforms one (`fft_lanes`): groups of rows are read along
the row, turned so that lanes are rows, transformed, and turned back. A long row, or one of the few rows left
over, is transformed by itself (`fft_rows`). What is read and stored are expressions, so that elementwise work
before and after the transform happens on the way. Threads share groups and rows; which rows form a group does
not depend on them.

A real row of even length is a complex row of half of it: even elements are real parts, odd ones imaginary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial

import numpy as np

from rlx.backend.cpu.expression import Expression, Lane
from rlx.backend.cpu.fft_lanes import (
    Complex,
    LaneBuffer,
    LaneShape,
    factor,
    lane_transform,
    minus,
    plus,
    swapped,
    times,
)
from rlx.backend.cpu.fft_plan import convolution_size, lanes_cost, pairs, radices, roots_of_unity
from rlx.backend.cpu.fft_rows import Planes, RootsOfRow, RowTransform, across, row_transform, turn_rows
from rlx.backend.cpu.frame import EmittedKernel, KernelFrame, Slot, unflatten
from rlx.backend.cpu.irtext import Int, Module
from rlx.backend.cpu.irtypes import Value, constant
from rlx.backend.cpu.primitives import memory_type, to_memory
from rlx.ir.kernel import TransformNest
from rlx.ir.scalar import LOADS, Scalar


def is_halved(what: TransformNest) -> bool:
    """Whether real rows are transformed as complex rows of half their length."""
    return what.kind != "complex" and what.n % 2 == 0


def emit_fft(
    module: Module, name: str, what: TransformNest, inputs: Sequence[Slot], outputs: Sequence[Slot]
) -> EmittedKernel:
    """Write the kernel of a transform."""
    return FftKernel(KernelFrame(module, name, inputs, outputs), what).emit()


class FftKernel:
    """Reads, transforms and stores; see the module's text."""

    def __init__(self, frame: KernelFrame, what: TransformNest) -> None:
        self.frame, self.fn, self.what = frame, frame.fn, what
        self.halved = is_halved(what)
        self.points = what.n // 2 if self.halved else what.n  # of the complex transform inside
        element = memory_type(what.dtype)
        self.width = frame.module.target.lanes(what.dtype.name)
        self.shape = LaneShape(element, self.width)
        self.operands = frame.operands(frame.fn)
        self.sizes = [frame.dim(frame.fn, d) for d in what.rows]
        self.scratch = 0

    def emit(self) -> EmittedKernel:
        fn, width = self.fn, self.width
        total: Int = 1
        for d in self.sizes:
            total = fn.mul(total, d)
        if self.what.n == 0:
            return self.frame.finish()
        single = row_transform(self.frame.module, self.points, self.shape)
        groups, alone = self.split(total, single)
        low, high = self.frame.share(fn.add(groups, alone))

        def unit(u: Int, _: list[Value]) -> None:
            def group() -> None:
                LaneMode(self, total).run(fn.mul(u, width))

            def row() -> None:
                assert single is not None
                RowMode(self, single).run(fn.add(fn.sub(u, groups), fn.mul(groups, width)))

            only_groups = isinstance(alone, int) and alone == 0
            only_rows = isinstance(groups, int) and groups == 0
            in_group = True if only_groups else False if only_rows else fn.cmp("slt", u, groups)
            fn.branch(in_group, group, row)

        fn.loop(low, high, 1, [], unit)
        return self.frame.finish(self.scratch)

    def split(self, total: Int, single: RowTransform | None) -> tuple[Int, Int]:
        """How many groups there are, the last one perhaps with lanes to spare, and how many rows go alone."""
        fn, width = self.fn, self.width
        if single is None:
            return fn.ceildiv(total, width), 0
        if single.cost < self.lanes_cost():
            return 0, total
        rest = fn.urem(total, width)
        few = fn.cmp("slt", rest, max(width // 4, 2))
        alone = fn.select(few, rest, 0)
        return fn.ceildiv(fn.sub(total, alone), width), alone

    def lanes_cost(self) -> float:
        target, n = self.frame.module.target, self.points
        cost = lanes_cost(n, self.shape.bytes, target.l1_bytes, target.l2_bytes)
        return cost if radices(n) is not None else 2 * (cost + 2) * convolution_size(n) / n

    def need(self, nbytes: int) -> None:
        """Ask for scratch."""
        self.scratch = max(self.scratch, nbytes)

    def root_table(self, n: int, count: int) -> Value:
        """exp(-2 pi i k / n) for k < count."""
        name = f"fft_half_roots_{n}_{self.shape.element}"
        return self.frame.module.table(name, self.shape.element, pairs(roots_of_unity(n, np.arange(count))))

    def source(self, part: int, row: Sequence[Int], t: Int, mask: Value | None) -> Value:
        """A vector of neighbouring elements of a row."""
        at = self.point(row, t, mask, ())
        return at.vector(self.what.sources[part])

    def point(self, row: Sequence[Int], t: Int, mask: Value | None, accs: Sequence[Value]) -> Expression:
        lane = Lane(len(self.sizes), t, self.width, mask)
        return Expression(
            self.fn, self.frame.dim, self.operands, [*row, t], lane, accs, error=self.frame.error
        )

    def values(self, row: Sequence[Int], k: Int, accs: Sequence[Value], mask: Value | None) -> list[Value]:
        """What is stored of neighbouring results of a row."""
        at = self.point(row, k, mask, accs)
        return [at.vector(store.body) for store in self.what.stores]

    def store(self, row: Sequence[Int], k: Int, accs: Sequence[Value], mask: Value | None) -> None:
        for number, value in enumerate(self.values(row, k, accs, mask)):
            self.put(number, value, row, k, mask)

    def put(self, number: int, value: Value, row: Sequence[Int], k: Int, mask: Value | None) -> None:
        fn, store, dtype = self.fn, self.what.stores[number], self.frame.outputs[number].dtype
        offset: Int = 0
        for i, step in zip((*row, k), store.strides, strict=True):
            offset = fn.add(offset, fn.mul(i, self.frame.dim(fn, step)))
        place = fn.gep(self.frame.output(number).pointer, offset, memory_type(dtype))
        value = to_memory(fn, value, dtype)
        if store.strides[-1] != 1:
            steps = fn.mul(
                fn.iota(self.width), fn.splat(self.frame.dim(fn, store.strides[-1]), self.width, "i64")
            )
            fn.scatter(value, place, fn.value(steps), mask)
        elif mask is None:
            fn.store(value, place)
        else:
            fn.masked_store(value, place, mask)


class LaneMode:
    """A group of rows, one per lane. Rows past the last one repeat it and are not stored."""

    def __init__(self, kernel: FftKernel, total: Int) -> None:
        self.kernel, self.fn, self.what, self.total = kernel, kernel.fn, kernel.what, total
        self.width, self.shape, self.halved = kernel.width, kernel.shape, kernel.halved
        self.transform = lane_transform(kernel.frame.module, self.kernel.points, self.shape)

    def run(self, start: Int) -> None:
        fn, what, kernel = self.fn, self.what, self.kernel
        room = self.shape.buffer_bytes(max(self.transform.points, kernel.points + 1))
        kernel.need(2 * room)
        base = kernel.frame.scratch()
        first = LaneBuffer(fn, base, self.shape)
        second = LaneBuffer(fn, fn.gep(base, room, "i8"), self.shape)
        last = fn.sub(self.total, 1)
        numbers = [fn.smin(fn.add(start, i), last) for i in range(self.width)]
        self.rows = [unflatten(fn, r, kernel.sizes) for r in numbers]
        self.exists = [fn.cmp("slt", fn.add(start, i), self.total) for i in range(self.width)]
        if what.kind == "to_real":
            self.back(first, second)
        else:
            self.forth(first, second)

    def read(self, part: int, buffer: LaneBuffer, step: int, offset: int) -> None:
        """Elements t of the rows to vectors step * t + offset of a buffer."""
        fn = self.fn
        turn_rows(
            fn,
            self.what.read,
            self.width,
            lambda row, t, mask: self.kernel.source(part, self.rows[row], t, mask),
            lambda x, t: buffer.put(x, fn.add(fn.mul(t, step), offset)),
        )

    def forth(self, first: LaneBuffer, second: LaneBuffer) -> None:
        """Complex or real rows to coefficients."""
        fn, what = self.fn, self.what
        turn = 0 if what.forward else 1  # for the other sign parts are exchanged
        if self.halved:
            self.read(0, first, 1, 0)
        else:
            self.read(0, first, 2, turn)
            if what.kind == "complex":
                self.read(1, first, 2, 1 - turn)
            else:
                zero = constant(self.shape.type, 0)
                fn.loop(0, what.n, 1, [], lambda t, _: first.put(zero, fn.add(fn.mul(t, 2), 1)))
        found, other = self.transform.call(fn, first, second)
        if self.halved:
            self.unfold(found, other)
            found = other
        self.write([lambda k: fn.add(fn.mul(k, 2), turn), lambda k: fn.add(fn.mul(k, 2), 1 - turn)], found)

    def unfold(self, half: LaneBuffer, bins: LaneBuffer) -> None:
        """Coefficients of real rows from those of the complex rows of half their length."""
        fn, shape, n = self.fn, self.shape, self.what.n
        h = n // 2
        half.put_point(half.point(0), h)
        roots = self.kernel.root_table(n, h + 1)
        minus_half_i = (constant(shape.type, 0.0), constant(shape.type, -0.5))
        scale = constant(shape.type, 0.5)

        def pair(k: Int, _: list[Value]) -> None:
            mirror = fn.sub(h, k)
            a, c = half.point(k), half.point(mirror)
            c = (c[0], fn.fneg(c[1]))
            even = tuple(fn.fmul(x, scale) for x in plus(fn, a, c))
            odd = times(fn, minus(fn, a, c), times(fn, factor(fn, roots, k, shape), minus_half_i))
            bins.put_point((fn.fadd(even[0], odd[0]), fn.fadd(even[1], odd[1])), k)
            bins.put_point((fn.fsub(even[0], odd[0]), fn.fsub(odd[1], even[1])), mirror)

        fn.loop(0, h // 2 + 1, 1, [], pair)

    def back(self, first: LaneBuffer, second: LaneBuffer) -> None:
        """Coefficients to real rows."""
        fn, n = self.fn, self.what.n
        h, bins = n // 2, second if self.halved else first
        zero = constant(self.shape.type, 0)
        self.read(0, bins, 2, 0)
        self.read(1, bins, 2, 1)
        bins.put(zero, 1)
        if self.halved:
            bins.put(zero, 2 * h + 1)
            fn.loop(0, h, 1, [], lambda k, _: first.put_point(swapped(self.fold(bins, k)), k))
        else:  # all n coefficients, parts exchanged
            first.put_point(swapped(first.point(0)), 0)

            def mirrored(k: Int, _: list[Value]) -> None:
                re, im = first.point(k)
                first.put_point((im, re), k)
                first.put_point((fn.fneg(im), re), fn.sub(n, k))

            fn.loop(1, h + 1, 1, [], mirrored)
        found, _ = self.transform.call(fn, first, second)
        # parts are exchanged: elements 2 t + 1 and 2 t of a halved row, imaginary and real parts of a whole
        # one
        self.write([(lambda e: fn.xor(e, 1)) if self.halved else (lambda e: fn.add(fn.mul(e, 2), 1))], found)

    def fold(self, bins: LaneBuffer, k: Int) -> Complex:
        """Coefficient k of the complex row of half the length, twice."""
        fn, h = self.fn, self.what.n // 2
        a, c = bins.point(k), bins.point(fn.sub(h, k))
        c = (c[0], fn.fneg(c[1]))
        wr, wi = factor(fn, self.kernel.root_table(self.what.n, h + 1), k, self.shape)
        odd = times(fn, minus(fn, a, c), (wi, wr))  # i conj(w) = (im w, re w)
        return plus(fn, plus(fn, a, c), odd)

    def write(self, number: Sequence[Callable[[Int], Int]], buffer: LaneBuffer) -> None:
        """Results of all rows: number[p](k) is the vector that holds part p of result k.

        Vectors are turned back to lie along rows. Where a store needs nothing but the result itself, it is
        computed before, so that only what is stored is turned.
        """
        fn, width, kernel = self.fn, self.width, self.kernel
        stores = range(len(self.what.stores))
        before = all(_only_results(s.body) for s in self.what.stores)

        def block(base: Int, mask: Value | None) -> None:
            columns = []
            for j in range(min(self.what.written, width)):
                parts = [buffer.vector(of(fn.add(base, j))) for of in number]
                columns.append(kernel.values(self.rows[0], base, parts, mask) if before else parts)
            columns += [columns[-1]] * (width - len(columns))
            turned = [fn.transpose([c[i] for c in columns]) for i in range(len(columns[0]))]
            for r in range(width):
                fn.branch(self.exists[r], partial(row, r, base, [t[r] for t in turned], mask))

        def row(r: int, base: Int, found: list[Value], mask: Value | None) -> None:
            at = self.rows[r]
            values = found if before else kernel.values(at, base, found, mask)
            for i in stores:
                kernel.put(i, values[i], at, base, mask)

        across(fn, self.what.written, width, block)


def _only_results(body: Scalar) -> bool:
    """Whether an expression depends on nothing but results of the transform."""
    return all(e.args or e.prim in ("acc", "const") for e in body.walk()) and not any(
        e.prim in LOADS or e.prim == "axis" for e in body.walk()
    )


class RowMode:
    """One row, with lanes inside."""

    def __init__(self, kernel: FftKernel, transform: RowTransform) -> None:
        self.kernel, self.fn, self.what = kernel, kernel.fn, kernel.what
        self.width, self.shape, self.halved = kernel.width, kernel.shape, kernel.halved
        self.transform = transform

    def run(self, number: Int) -> None:
        fn, what, kernel, transform = self.fn, self.what, self.kernel, self.transform
        room = transform.planes_bytes(self.shape)
        lanes = 2 * self.shape.buffer_bytes(transform.lane_points)
        kernel.need(2 * room + lanes)
        base = kernel.frame.scratch()
        work, place = base, [fn.gep(base, lanes + i * room, "i8") for i in range(2)]
        first, second = (Planes(fn, p, transform.stride, self.shape) for p in place)
        self.row = unflatten(fn, number, kernel.sizes)
        (self.back_in if what.kind == "to_real" else self.forth_in)(first, second)
        fn.call(transform.name, [first.pointer, second.pointer, work])
        if what.kind == "complex" or not self.halved:
            self.write_points(second)
        elif what.kind == "real":
            self.write_bins(second)
        else:
            self.write_elements(second)

    def source(self, part: int, t: Int, mask: Value | None = None) -> Value:
        return self.kernel.source(part, self.row, t, mask)

    def forth_in(self, first: Planes, second: Planes) -> None:
        fn, what, width = self.fn, self.what, self.width
        zero = constant(self.shape.type, 0)

        def halved(t: Int, mask: Value | None) -> None:
            a, b = self.source(0, fn.mul(t, 2)), self.source(0, fn.add(fn.mul(t, 2), width))
            first.put_points(
                (fn.shuffle(a, b, range(0, 2 * width, 2)), fn.shuffle(a, b, range(1, 2 * width, 2))), t
            )

        def whole(t: Int, mask: Value | None) -> None:
            z = (self.source(0, t), self.source(1, t) if what.kind == "complex" else zero)
            first.put_points(z if what.forward else swapped(z), t)

        across(fn, self.kernel.points, width, halved if self.halved else whole)

    def back_in(self, first: Planes, second: Planes) -> None:
        fn, what, width, n = self.fn, self.what, self.width, self.what.n
        h, zero = n // 2, constant(self.shape.element, 0.0)
        bins = second if self.halved else first
        across(
            fn, what.read, width, lambda k, mask: bins.put_points((self.source(0, k), self.source(1, k)), k)
        )
        fn.store(zero, bins.place(1, 0))
        if not self.halved:

            def mirrored(i: Int, mask: Value | None) -> None:
                k = fn.add(i, 1)
                re, im = first.points(k)
                first.put_reversed((re, fn.fneg(im)), fn.sub(n, k))

            across(fn, h, width, mirrored)

            def exchanged(t: Int, mask: Value | None) -> None:
                first.put_points(swapped(first.points(t, mask)), t, mask)

            across(fn, n, width, exchanged, overlap=False)
            return
        fn.store(zero, bins.place(1, h))

        def fold(k: Int, mask: Value | None) -> None:
            a, c = bins.points(k), bins.reversed(fn.sub(h, k))
            c = (c[0], fn.fneg(c[1]))
            odd = times(fn, minus(fn, a, c), swapped(self.roots.at(k, 1)))
            first.put_points(swapped(plus(fn, plus(fn, a, c), odd)), k)

        across(fn, h, width, fold)

    @cached_property
    def roots(self) -> RootsOfRow:
        """exp(-2 pi i k / n): `at(k, 1)` for neighbouring k."""
        return RootsOfRow(self.fn, self.what.n, 2, self.shape)

    def write_points(self, found: Planes) -> None:
        what = self.what
        parts = {"complex": 2, "real": 2, "to_real": 1}[what.kind]

        def block(k: Int, mask: Value | None) -> None:
            z = found.points(k)
            z = z if what.forward else swapped(z)
            self.kernel.store(self.row, k, z[:parts], None)

        across(self.fn, what.written, self.width, block)

    def write_bins(self, half: Planes) -> None:
        fn, h, width = self.fn, self.what.n // 2, self.width
        for part in range(2):
            fn.store(fn.load(self.shape.element, half.place(part, 0)), half.place(part, h))
        scale = constant(self.shape.type, 0.5)

        def block(k: Int, mask: Value | None) -> None:
            a, c = half.points(k), half.reversed(fn.sub(h, k))
            c = (c[0], fn.fneg(c[1]))
            wr, wi = self.roots.at(k, 1)
            odd = times(fn, minus(fn, a, c), (wi, fn.fneg(wr)))  # -i w
            z = plus(fn, plus(fn, a, c), odd)
            self.kernel.store(self.row, k, (fn.fmul(z[0], scale), fn.fmul(z[1], scale)), None)

        across(fn, h + 1, width, block)

    def write_elements(self, found: Planes) -> None:
        fn, width = self.fn, self.width
        order = [i for j in range(width) for i in (j, width + j)]

        def block(t: Int, mask: Value | None) -> None:
            odd, even = found.points(t)  # parts are exchanged
            both = fn.shuffle(even, odd, order)
            for i in range(2):
                part = fn.part(both, i * width, width)
                self.kernel.store(self.row, fn.add(fn.mul(t, 2), i * width), (part,), None)

        across(fn, self.what.n // 2, width, block)
