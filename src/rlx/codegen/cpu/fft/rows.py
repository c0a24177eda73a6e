"""Fourier transforms of one long row, with lanes inside of it.

n = n1 n2: the row is a matrix [n1, n2]. Its columns are transformed first, a vector of neighbouring columns
at a time, and multiplied by the roots that join both halves; then its rows, a vector of neighbouring rows at
a time, whose results are adjacent. Both halves are the transforms of `fft_lanes`, short enough
for the caches however long the row is. Real and imaginary parts are in two planes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rlx.codegen.cpu.fft.lanes import Complex, LaneBuffer, LaneShape, LaneTransform, lane_transform
from rlx.codegen.cpu.fft.plan import (
    Split,
    chirp,
    chirp_spectrum,
    convolution_size,
    pairs,
    radices,
    roots_of_unity,
    split,
)
from rlx.codegen.native.irtext import Module
from rlx.codegen.native.irtypes import Value
from rlx.codegen.native.notation import inline, native
from rlx.codegen.native.words import (
    Int,
    Word,
    builder,
    byte_at,
    call,
    gep,
    lanes,
    load,
    loop,
    lshr,
    masked_load,
    masked_store,
    noalias,
    ptr,
    shuffle,
    splat,
    store,
    transpose,
)
from rlx.records import dataclass

SHORTEST_ROW = 128  # points from which lanes inside of a row pay


class Planes:
    """Real and imaginary parts of one row, `stride` elements apart."""

    def __init__(self, pointer: ptr, stride: int, shape: LaneShape) -> None:
        self.pointer, self.stride, self.shape = pointer, stride, shape

    @inline
    def place(self, part: int, t: Int) -> ptr:
        return gep(self.pointer, t + part * self.stride, self.shape.element)

    @inline
    def vector(self, part: int, t: Int, mask: Value | None = None) -> Word:
        place = self.place(part, t)
        return load(self.shape.type, place) if mask is None else masked_load(self.shape.type, place, mask)

    @inline
    def put(self, x: Value, part: int, t: Int, mask: Value | None = None) -> None:
        place = self.place(part, t)
        if mask is None:
            store(x, place)
        else:
            masked_store(x, place, mask)

    def points(self, t: Int, mask: Value | None = None) -> Complex:
        """Points t, t + 1 ... in the lanes."""
        return Complex(self.vector(0, t, mask), self.vector(1, t, mask))

    def put_points(self, z: Complex, t: Int, mask: Value | None = None) -> None:
        self.put(z.re, 0, t, mask)
        self.put(z.im, 1, t, mask)

    @inline
    def reversed(self, last: Int) -> Complex:
        """Points last, last - 1 ... in the lanes."""
        z = self.points(last - (self.shape.width - 1))
        return Complex(turned(z.re), turned(z.im))

    @inline
    def put_reversed(self, z: Complex, last: Int) -> None:
        self.put_points(Complex(turned(z.re), turned(z.im)), last - (self.shape.width - 1))


@inline
def turned(x: Word) -> Word:
    """Lanes in the other order."""
    return shuffle(x, None, range(x.width - 1, -1, -1))


@inline
def across(n: int, width: int, block: Callable[[Int, Value | None], None], overlap: bool = True) -> None:
    """Vectors that cover n elements: `block` gets the first one's number, and which lanes exist (None: all).

    The last vector overlaps the one before, or is masked where it must not.
    """
    if n < width:
        block(0, lanes(n, width))
    elif n % width == 0:
        for i in loop(0, n, width):
            block(i, None)
    elif overlap:
        for i in loop(0, n, width):
            block(min(i, n - width), None)
    else:
        whole = n - n % width
        for i in loop(0, whole, width):
            block(i, None)
        block(whole, lanes(n - whole, width))


@inline
def turn_rows(
    n: int, width: int, read: Callable[[int, Int, Value | None], Value], put: Callable[[Value, Int], None]
) -> None:
    """`width` rows of n elements, read along the row, put as one vector per element, lane = row."""

    def block(base: Int, mask: Value | None) -> None:
        vectors = transpose([read(row, base, mask) for row in range(width)])
        for j in range(min(n, width)):
            put(vectors[j], base + j)

    across(n, width, block)


@dataclass(frozen=True)
class RowTransform:
    """A transform of one row as a function `name(source, target, work)` of the module.

    source and target are planes of `points` elements each, `stride` apart; the result is in the target, what
    is in the source is lost. `work` has room for two lane buffers of `lane_points`.
    """

    name: str
    n: int
    points: int
    stride: int
    lane_points: int
    cost: float  # per point, as `fft_plan` counts it

    def planes_bytes(self, shape: LaneShape) -> int:
        return 2 * self.stride * (shape.bytes // shape.width)

    def call(self, source: Planes, target: Planes, work: ptr) -> None:
        call(self.name, source.pointer, target.pointer, work)


def row_transform(module: Module, n: int, shape: LaneShape) -> RowTransform | None:
    """The transform of one row of n points, written into the module once; None where lanes would not pay."""
    smooth = radices(n, module.target.registers) is not None
    size = n if smooth else convolution_size(n)
    cut = split(size, shape.width)
    if n < SHORTEST_ROW or cut is None:
        return None
    halves = [lane_transform(module, m, shape) for m in (cut.n1, cut.n2)]
    stride = -(-(size + 1) // shape.width) * shape.width + shape.width  # planes shall not share cache sets
    name = f"fft_row{n}_{shape.element}"
    cost = cut.cost if smooth else 2 * (cut.cost + 2) * size / n
    made = RowTransform(name, n, size, stride, max(h.points for h in halves), cost)
    if not module.defines(name):
        inner = None if smooth else row_transform(module, size, shape)
        if inner is None:
            _four_steps.emit(module, name, cut=cut, halves=halves, stride=stride, shape=shape)
        else:
            _bluestein.emit(module, name, n=n, inner=inner, stride=stride, shape=shape)
    return made


@native(internal=True, noinline=True)
def _four_steps(
    source: noalias,
    target: noalias,
    work: noalias,
    *,
    cut: Split,
    halves: Sequence[LaneTransform],
    stride: int,
    shape: LaneShape,
) -> None:
    """A matrix [n1, n2]: its columns, the roots that join both halves, its rows."""
    n1, n2, width = cut.n1, cut.n2, shape.width
    row, result = Planes(source, stride, shape), Planes(target, stride, shape)
    first = LaneBuffer(work, shape)
    second = LaneBuffer(byte_at(work, shape.buffer_bytes(max(h.points for h in halves))), shape)
    roots = RootsOfRow(n1 * n2, n1, shape)

    def columns(c: Int, mask: Value | None) -> None:
        for t in loop(n1):
            first[t] = row.points(t * n2 + c, mask)
        found, _ = halves[0].call(first, second)
        for k in loop(n1):
            z = found[k] * roots.at(k * c, k)
            row.put_points(z, k * n2 + c, mask)

    def rows(k: Int, mask: Value | None) -> None:
        for part in range(2):

            def read(number: int, t: Int, inside: Value | None, part: int = part) -> Word:
                at = k + min(number, n1 - 1)
                return row.vector(part, at * n2 + t, inside)

            def put(x: Value, t: Int, part: int = part) -> None:
                first.put(x, t * 2 + part)

            turn_rows(n2, width, read, put)
        found, _ = halves[1].call(first, second)
        for t in loop(n2):
            z = found[t]
            result.put_points(z, t * n1 + k, mask)

    across(n2, width, columns, overlap=False)  # in place: a column is not transformed twice
    across(n1, width, rows)


class RootsOfRow:
    """exp(-2 pi i (base + step * lane) / n) in vectors: a vector for the lanes, read from a table, times a
    scalar for the base, which is a product of two table entries. So tables stay small for long rows."""

    def __init__(self, n: int, steps: int, shape: LaneShape) -> None:
        self.shape = shape
        self.bits = (n.bit_length() + 1) // 2
        low = np.arange(min(1 << self.bits, n))
        high = np.arange(-(-n // (1 << self.bits))) << self.bits
        lanes = roots_of_unity(n, np.arange(steps)[:, None] * np.arange(shape.width))
        flat = np.stack([lanes.real, lanes.imag], 1).reshape(-1)
        element, table = shape.element, builder().module.table
        name = f"fft_lane_roots_{n}_{steps}_{element}x{shape.width}"
        self.lanes = LaneBuffer(ptr(table(name, element, [float(v) for v in flat])), shape)
        self.low = table(f"fft_low_roots_{n}_{element}", element, pairs(roots_of_unity(n, low)))
        self.high = table(f"fft_high_roots_{n}_{element}", element, pairs(roots_of_unity(n, high)))

    @inline
    def at(self, base: Int, step: Int) -> Complex:
        """base < n, step < `steps`."""
        a = self.entry(self.low, base & ((1 << self.bits) - 1))
        b = self.entry(self.high, lshr(Word(base), self.bits))
        z, width = a * b, self.shape.width
        return Complex(splat(z.re, width), splat(z.im, width)) * self.lanes[step]

    @inline
    def entry(self, table: Value, index: Word | int) -> Complex:
        element = self.shape.element
        place = gep(table, index * 2, element)
        return Complex(load(element, place), load(element, gep(place, 1, element)))


@native(internal=True, noinline=True)
def _bluestein(
    source: noalias,
    target: noalias,
    work: noalias,
    *,
    n: int,
    inner: RowTransform,
    stride: int,
    shape: LaneShape,
) -> None:
    """As in `fft_lanes`, with points in the lanes."""
    size, width = inner.n, shape.width
    row, other = Planes(source, stride, shape), Planes(target, stride, shape)
    chirps = _planes(f"fft_chirp_{n}", chirp(n), shape)
    spectrum = _planes(f"fft_chirp_spectrum_{n}", chirp_spectrum(n, size), shape)

    def chirped(t: Int, mask: Value | None) -> None:
        row.put_points(row.points(t, mask) * chirps.points(t, mask), t, mask)

    def zeros(t: Int, mask: Value | None) -> None:
        row.put_points(shape.zero, t + n, mask)

    def multiplied(t: Int, mask: Value | None) -> None:
        z = other.points(t, mask) * spectrum.points(t, mask)
        other.put_points(z.swapped(), t, mask)

    def last(t: Int, mask: Value | None) -> None:
        other.put_points(row.points(t, mask).swapped() * chirps.points(t, mask), t, mask)

    across(n, width, chirped, overlap=False)
    across(size - n, width, zeros)
    inner.call(row, other, work)
    across(size, width, multiplied, overlap=False)
    inner.call(other, row, work)
    across(n, width, last)


def _planes(name: str, z: np.ndarray, shape: LaneShape) -> Planes:
    """A table of complex numbers."""
    stride = -(-len(z) // shape.width) * shape.width
    planes = np.zeros((2, stride))
    planes[:, : len(z)] = z.real, z.imag
    table = builder().module.table
    made = table(f"{name}_{shape.element}_planes", shape.element, [float(v) for v in planes.reshape(-1)])
    return Planes(ptr(made), stride, shape)
