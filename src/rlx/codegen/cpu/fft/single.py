"""One row through a Fourier transform, with lanes inside of it."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from rlx.codegen.cpu.fft.lanes import minus, plus, swapped, times
from rlx.codegen.cpu.fft.rows import Planes, RootsOfRow, RowTransform, across
from rlx.codegen.cpu.frame import unflatten
from rlx.codegen.native.irtext import Int
from rlx.codegen.native.irtypes import Value, constant

if TYPE_CHECKING:
    from rlx.codegen.cpu.fft.kernel import FftKernel


class SingleTransform:
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
        kernel = self.kernel
        return kernel.point(self.row, t, kernel.lane(t, mask)).vector(self.what.sources[part])

    def store(self, k: Int, *parts: Value) -> None:
        kernel, lane = self.kernel, self.kernel.lane(k, None)
        at = kernel.point(self.row, k, lane, parts)
        for i, store in enumerate(self.what.stores):
            kernel.put(i, at.vector(store.body), [*self.row, k], lane)

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
            self.store(k, *z[:parts])

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
            self.store(k, fn.fmul(z[0], scale), fn.fmul(z[1], scale))

        across(fn, h + 1, width, block)

    def write_elements(self, found: Planes) -> None:
        fn, width = self.fn, self.width
        order = [i for j in range(width) for i in (j, width + j)]

        def block(t: Int, mask: Value | None) -> None:
            odd, even = found.points(t)  # parts are exchanged
            both = fn.shuffle(even, odd, order)
            for i in range(2):
                part = fn.part(both, i * width, width)
                self.store(fn.add(fn.mul(t, 2), i * width), part)

        across(fn, self.what.n // 2, width, block)
