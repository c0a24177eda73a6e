"""A group of rows through a Fourier transform, one row per lane.

Rows are read as they are stored: along the row, then transposed so that lanes are rows, or straight across
rows where those are neighbours. Results go back in the same two ways.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlx.codegen.cpu.expression import Lane
from rlx.codegen.cpu.fft.lanes import Complex, Factors, LaneBuffer, lane_transform
from rlx.codegen.cpu.fft.plan import roots_of_unity
from rlx.codegen.cpu.fft.rows import across, turn_rows
from rlx.codegen.native.irtypes import Value
from rlx.codegen.native.notation import inline
from rlx.codegen.native.words import Int, Word, byte_at, loop, ptr, transpose
from rlx.kernel.scalar import LOADS, Scalar
from rlx.records import dataclass

if TYPE_CHECKING:
    from rlx.codegen.cpu.fft.kernel import FftKernel


@dataclass(frozen=True)
class Rows:
    """The rows of a group: their indices, and which exist (one past the last repeats it and is not stored).

    `lane` runs along the last row axis where that is a way to read or store them.
    """

    index: Sequence[Sequence[Value | int]]
    exists: Sequence[bool]
    lane: Lane | None


class GroupTransform:
    """A group of rows, one per lane."""

    def __init__(self, kernel: FftKernel, rows: Rows) -> None:
        self.kernel, self.what, self.rows = kernel, kernel.what, rows
        self.width, self.shape, self.halved = kernel.width, kernel.shape, kernel.halved
        self.transform = lane_transform(kernel.frame.module, kernel.points, self.shape)

    @inline
    def run(self) -> None:
        kernel = self.kernel
        room = self.shape.buffer_bytes(max(self.transform.points, kernel.points + 1))
        kernel.need(2 * room)
        base = ptr(kernel.frame.scratch())
        first, second = LaneBuffer(base, self.shape), LaneBuffer(byte_at(base, room), self.shape)
        if self.what.kind == "to_real":
            self.back(first, second)
        else:
            self.forth(first, second)

    @inline
    def read(self, part: int, buffer: LaneBuffer, step: int, offset: int) -> None:
        """Elements t of the rows to vectors step * t + offset of a buffer."""
        kernel, rows, n = self.kernel, self.rows, self.what.read
        source = self.what.sources[part]

        def element(row: int, t: Int, mask: Value | None) -> Word:
            return Word(kernel.point(rows.index[row], t, kernel.lane(t, mask)).vector(source))

        def put(x: Value, t: Int) -> None:
            buffer.put(x, t * step + offset)

        if rows.lane is not None and kernel.lies_across(source):
            for t in loop(n):
                put(kernel.point(rows.index[0], t, rows.lane).vector(source), t)
        else:
            turn_rows(n, self.width, element, put)

    @inline
    def forth(self, first: LaneBuffer, second: LaneBuffer) -> None:
        """Complex or real rows to coefficients."""
        what = self.what
        turn = 0 if what.forward else 1  # for the other sign parts are exchanged
        if self.halved:
            self.read(0, first, 1, 0)
        else:
            self.read(0, first, 2, turn)
            if what.kind == "complex":
                self.read(1, first, 2, 1 - turn)
            else:
                for t in loop(what.n):
                    first.put(self.shape.zero.im, t * 2 + 1)
        found, other = self.transform.call(first, second)
        if self.halved:
            self.unfold(found, other)
            found = other

        def parts(k: Int) -> list[Word]:
            return [found.vector(k * 2 + turn), found.vector(k * 2 + (1 - turn))]

        self.write(parts)

    @inline
    def unfold(self, half: LaneBuffer, bins: LaneBuffer) -> None:
        """Coefficients of real rows from those of the complex rows of half their length."""
        h = self.what.n // 2
        half[h] = half[0]
        roots = self.roots()
        minus_half_i = self.shape.number(0.0, -0.5)
        for k in loop(h // 2 + 1):
            mirror = h - k
            a, c = half[k], half[mirror].conjugate()
            even = (a + c).scaled(0.5)
            odd = (a - c) * (roots[k] * minus_half_i)
            bins[k] = even + odd
            bins[mirror] = Complex(even.re - odd.re, odd.im - even.im)

    @inline
    def back(self, first: LaneBuffer, second: LaneBuffer) -> None:
        """Coefficients to real rows."""
        n = self.what.n
        h, bins = n // 2, second if self.halved else first
        zero = self.shape.zero.im
        self.read(0, bins, 2, 0)
        self.read(1, bins, 2, 1)
        bins.put(zero, 1)
        if self.halved:
            bins.put(zero, 2 * h + 1)
            for k in loop(h):
                first[k] = self.fold(bins, k).swapped()
        else:  # all n coefficients, parts exchanged
            first[0] = first[0].swapped()
            for k in loop(1, h + 1):
                z = first[k]
                first[k] = z.swapped()
                mirrored = Complex(-z.im, z.re)
                first[n - k] = mirrored
        found, _ = self.transform.call(first, second)

        # Parts are exchanged: elements 2 t + 1 and 2 t of a halved row, imaginary and real parts of a whole
        # one.
        def parts(e: Int) -> list[Word]:
            return [found.vector(e ^ 1 if self.halved else e * 2 + 1)]

        self.write(parts)

    @inline
    def fold(self, bins: LaneBuffer, k: Int) -> Complex:
        """Coefficient k of the complex row of half the length, twice."""
        a, c = bins[k], bins[self.what.n // 2 - k].conjugate()
        w = self.roots()[k]
        odd = (a - c) * w.swapped()  # i conj(w) = (im w, re w)
        return a + c + odd

    def roots(self) -> Factors:
        """exp(-2 pi i k / n) for k up to half of n."""
        n = self.what.n
        return Factors(f"fft_half_roots_{n}", roots_of_unity(n, np.arange(n // 2 + 1)), self.shape)

    def write(self, parts: Callable[[Int], list[Word]]) -> None:
        """Results of all rows: parts(k) are the vectors of the parts of result k."""
        lane, strides = self.rows.lane, [s.strides for s in self.what.stores]
        if lane is not None and all(s[-1] != 1 and s[-2] == 1 for s in strides):
            self.write_across(parts, lane)
        else:
            self.write_turned(parts)

    @inline
    def write_across(self, parts: Callable[[Int], list[Word]], lane: Lane) -> None:
        """Neighbours in memory are rows: one store per result."""
        kernel, first = self.kernel, self.rows.index[0]
        for k in loop(self.what.written):
            at = kernel.point(first, k, lane, parts(k))
            for i, result in enumerate(self.what.stores):
                kernel.put(i, at.vector(result.body), [*first, k], lane)

    @inline
    def write_turned(self, parts: Callable[[Int], list[Word]]) -> None:
        """Vectors transposed back along rows. Where a store needs nothing but the result itself, it is
        computed before, so that only what is stored is turned.
        """
        kernel, rows, stores = self.kernel, self.rows, self.what.stores
        width, written = self.width, self.what.written
        before = all(_only_results(s.body) for s in stores)

        def block(base: Int, mask: Value | None) -> None:
            lane = kernel.lane(base, mask)
            columns: list[Sequence[Value]] = []
            for j in range(min(written, width)):
                found: Sequence[Value] = parts(base + j)
                if before:
                    at = kernel.point(rows.index[0], base, lane, found)
                    found = [at.vector(s.body) for s in stores]
                columns.append(found)
            columns += [columns[-1]] * (width - len(columns))
            turned = [transpose([c[i] for c in columns]) for i in range(len(columns[0]))]
            for r in range(width):
                if rows.exists[r]:
                    put_row(r, base, [t[r] for t in turned], lane)

        def put_row(r: int, base: Int, found: list[Value], lane: Lane) -> None:
            at = kernel.point(rows.index[r], base, lane, found)
            for i, result in enumerate(stores):
                value = found[i] if before else at.vector(result.body)
                kernel.put(i, value, [*rows.index[r], base], lane)

        across(written, width, block)


def _only_results(body: Scalar) -> bool:
    """Whether an expression depends on nothing but the result that it is stored for."""
    return all(e.args or e.prim in ("acc", "const") for e in body.walk()) and not any(
        e.prim in LOADS or e.prim == "axis" for e in body.walk()
    )
