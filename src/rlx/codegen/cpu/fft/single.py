"""One row through a Fourier transform, with lanes inside of it."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from rlx.codegen.cpu.fft.lanes import Complex
from rlx.codegen.cpu.fft.rows import Planes, RootsOfRow, RowTransform, across
from rlx.codegen.cpu.frame import unflatten
from rlx.codegen.native.irtypes import Value, constant
from rlx.codegen.native.notation import inline
from rlx.codegen.native.words import Int, Word, byte_at, load, part, ptr, shuffle, store

if TYPE_CHECKING:
    from rlx.codegen.cpu.fft.kernel import FftKernel


class SingleTransform:
    """Row `number`, with lanes inside."""

    def __init__(self, kernel: FftKernel, transform: RowTransform, number: Value | int) -> None:
        self.kernel, self.what, self.transform = kernel, kernel.what, transform
        self.width, self.shape, self.halved = kernel.width, kernel.shape, kernel.halved
        self.number = number

    @inline
    def run(self) -> None:
        kernel, transform, kind = self.kernel, self.transform, self.what.kind
        room = transform.planes_bytes(self.shape)
        lanes = 2 * self.shape.buffer_bytes(transform.lane_points)
        kernel.need(2 * room + lanes)
        work = ptr(kernel.frame.scratch())
        first, second = [
            Planes(byte_at(work, lanes + i * room), transform.stride, self.shape) for i in range(2)
        ]
        self.row = unflatten(kernel.frame.fn, self.number, kernel.sizes)
        if kind == "to_real":
            self.read_bins(first, second)
        else:
            self.read_points(first)
        transform.call(first, second, work)
        if kind == "complex" or not self.halved:
            self.write_points(second)
        elif kind == "real":
            self.write_bins(second)
        else:
            self.write_elements(second)

    def source(self, part: int, t: Int, mask: Value | None = None) -> Word:
        kernel = self.kernel
        return Word(kernel.point(self.row, t, kernel.lane(t, mask)).vector(self.what.sources[part]))

    def store(self, k: Int, *parts: Value) -> None:
        kernel, lane = self.kernel, self.kernel.lane(k, None)
        at = kernel.point(self.row, k, lane, parts)
        for i, result in enumerate(self.what.stores):
            kernel.put(i, at.vector(result.body), [*self.row, k], lane)

    @inline
    def read_points(self, first: Planes) -> None:
        """Complex or real elements."""
        what, width = self.what, self.width

        def halved(t: Int, mask: Value | None) -> None:
            a, b = self.source(0, t * 2), self.source(0, t * 2 + width)
            even, odd = (shuffle(a, b, range(i, 2 * width, 2)) for i in range(2))
            first.put_points(Complex(even, odd), t)

        def whole(t: Int, mask: Value | None) -> None:
            re = self.source(0, t)
            z = Complex(re, self.source(1, t) if what.kind == "complex" else self.shape.zero.im)
            first.put_points(z if what.forward else z.swapped(), t)

        across(self.kernel.points, width, halved if self.halved else whole)

    @inline
    def read_bins(self, first: Planes, second: Planes) -> None:
        """Coefficients of a real row."""
        what, width, n = self.what, self.width, self.what.n
        h, zero = n // 2, constant(self.shape.element, 0.0)
        bins = second if self.halved else first

        def given(k: Int, mask: Value | None) -> None:
            bins.put_points(Complex(self.source(0, k), self.source(1, k)), k)

        def mirrored(i: Int, mask: Value | None) -> None:
            k = i + 1
            first.put_reversed(first.points(k).conjugate(), n - k)

        def exchanged(t: Int, mask: Value | None) -> None:
            first.put_points(first.points(t, mask).swapped(), t, mask)

        def folded(k: Int, mask: Value | None) -> None:
            a, c = bins.points(k), bins.reversed(h - k).conjugate()
            odd = (a - c) * self.roots.at(k, 1).swapped()
            first.put_points((a + c + odd).swapped(), k)

        across(what.read, width, given)
        store(zero, bins.place(1, 0))
        if self.halved:
            store(zero, bins.place(1, h))
            across(h, width, folded)
        else:
            across(h, width, mirrored)
            across(n, width, exchanged, overlap=False)

    @cached_property
    def roots(self) -> RootsOfRow:
        """exp(-2 pi i k / n): `at(k, 1)` for neighbouring k."""
        return RootsOfRow(self.what.n, 2, self.shape)

    @inline
    def write_points(self, found: Planes) -> None:
        what = self.what

        def block(k: Int, mask: Value | None) -> None:
            z = found.points(k)
            z = z if what.forward else z.swapped()
            if what.kind == "to_real":
                self.store(k, z.re)
            else:
                self.store(k, z.re, z.im)

        across(what.written, self.width, block)

    @inline
    def write_bins(self, half: Planes) -> None:
        h = self.what.n // 2
        for number in range(2):
            store(load(self.shape.element, half.place(number, 0)), half.place(number, h))

        def block(k: Int, mask: Value | None) -> None:
            a, c = half.points(k), half.reversed(h - k).conjugate()
            w = self.roots.at(k, 1)
            odd = (a - c) * Complex(w.im, -w.re)  # -i w
            z = (a + c + odd).scaled(0.5)
            self.store(k, z.re, z.im)

        across(h + 1, self.width, block)

    @inline
    def write_elements(self, found: Planes) -> None:
        width = self.width
        order = [i for j in range(width) for i in (j, width + j)]

        def block(t: Int, mask: Value | None) -> None:
            z = found.points(t)  # parts are exchanged
            both = shuffle(z.im, z.re, order)
            for i in range(2):
                elements = part(both, i * width, width)
                self.store(t * 2 + i * width, elements)

        across(self.what.n // 2, width, block)
