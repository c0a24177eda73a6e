"""A group of rows through a Fourier transform, one row per lane.

Rows are read as they are stored: along the row, then transposed so that lanes are rows, or straight across
rows where those are neighbours. Results go back in the same two ways.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from rlx.codegen.cpu.expression import Lane
from rlx.codegen.cpu.fft.lanes import (
    Complex,
    LaneBuffer,
    factor,
    lane_transform,
    minus,
    plus,
    swapped,
    times,
)
from rlx.codegen.cpu.fft.rows import across, turn_rows
from rlx.codegen.native.irtext import Bool, Int
from rlx.codegen.native.irtypes import Value, constant
from rlx.kernel.scalar import LOADS, Scalar
from rlx.records import dataclass

if TYPE_CHECKING:
    from rlx.codegen.cpu.fft.kernel import FftKernel


@dataclass(frozen=True)
class Rows:
    """The rows of a group: their indices, and which exist (one past the last repeats it and is not stored).

    `lane` runs along the last row axis where that is a way to read or store them.
    """

    index: Sequence[Sequence[Int]]
    exists: Sequence[Bool]
    lane: Lane | None


class GroupTransform:
    """A group of rows, one per lane."""

    def __init__(self, kernel: FftKernel, rows: Rows) -> None:
        self.kernel, self.fn, self.what, self.rows = kernel, kernel.fn, kernel.what, rows
        self.width, self.shape, self.halved = kernel.width, kernel.shape, kernel.halved
        self.transform = lane_transform(kernel.frame.module, self.kernel.points, self.shape)

    def run(self) -> None:
        fn, what, kernel = self.fn, self.what, self.kernel
        room = self.shape.buffer_bytes(max(self.transform.points, kernel.points + 1))
        kernel.need(2 * room)
        base = kernel.frame.scratch()
        first = LaneBuffer(fn, base, self.shape)
        second = LaneBuffer(fn, fn.gep(base, room, "i8"), self.shape)
        if what.kind == "to_real":
            self.back(first, second)
        else:
            self.forth(first, second)

    def read(self, part: int, buffer: LaneBuffer, step: int, offset: int) -> None:
        """Elements t of the rows to vectors step * t + offset of a buffer."""
        fn, kernel, rows = self.fn, self.kernel, self.rows
        source = self.what.sources[part]

        def put(x: Value, t: Int) -> None:
            buffer.put(x, fn.add(fn.mul(t, step), offset))

        def along(t: Int, _: list[Value]) -> None:
            assert rows.lane is not None
            put(kernel.point(rows.index[0], t, rows.lane).vector(source), t)

        if rows.lane is not None and kernel.lies_across(source):
            fn.loop(0, self.what.read, 1, [], along)
        else:
            turn_rows(
                fn,
                self.what.read,
                self.width,
                lambda row, t, mask: kernel.point(rows.index[row], t, kernel.lane(t, mask)).vector(source),
                put,
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
        """Results of all rows: number[p](k) is the vector that holds part p of result k."""

        def parts(k: Int) -> list[Value]:
            return [buffer.vector(of(k)) for of in number]

        lane, strides = self.rows.lane, [s.strides for s in self.what.stores]
        if lane is not None and all(s[-1] != 1 and s[-2] == 1 for s in strides):
            self.write_across(parts, lane)
        else:
            self.write_turned(parts)

    def write_across(self, parts: Callable[[int | Value], list[Value]], lane: Lane) -> None:
        """Neighbours in memory are rows: one store per result."""
        kernel, first = self.kernel, self.rows.index[0]

        def one(k: Int, _: list[Value]) -> None:
            at = kernel.point(first, k, lane, parts(k))
            for i, store in enumerate(self.what.stores):
                kernel.put(i, at.vector(store.body), [*first, k], lane)

        self.fn.loop(0, self.what.written, 1, [], one)

    def write_turned(self, parts: Callable[[Int], list[Value]]) -> None:
        """Vectors transposed back along rows. Where a store needs nothing but the result itself, it is
        computed before, so that only what is stored is turned.
        """
        fn, width, kernel, rows = self.fn, self.width, self.kernel, self.rows
        stores = self.what.stores
        before = all(_only_results(s.body) for s in stores)

        def block(base: Int, mask: Value | None) -> None:
            lane = kernel.lane(base, mask)
            columns = []
            for j in range(min(self.what.written, width)):
                found = parts(fn.add(base, j))
                if before:
                    at = kernel.point(rows.index[0], base, lane, found)
                    found = [at.vector(s.body) for s in stores]
                columns.append(found)
            columns += [columns[-1]] * (width - len(columns))
            turned = [fn.transpose([c[i] for c in columns]) for i in range(len(columns[0]))]
            for r in range(width):
                fn.branch(rows.exists[r], partial(row, r, base, [t[r] for t in turned], lane))

        def row(r: int, base: Int, found: list[Value], lane: Lane) -> None:
            at = kernel.point(rows.index[r], base, lane, found)
            for i, store in enumerate(stores):
                kernel.put(i, found[i] if before else at.vector(store.body), [*rows.index[r], base], lane)

        across(fn, self.what.written, width, block)


def _only_results(body: Scalar) -> bool:
    """Whether an expression depends on nothing but the result that it is stored for."""
    return all(e.args or e.prim in ("acc", "const") for e in body.walk()) and not any(
        e.prim in LOADS or e.prim == "axis" for e in body.walk()
    )
