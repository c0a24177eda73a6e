"""Fourier transforms of one long row, with lanes inside of it.

n = n1 n2: the row is a matrix [n1, n2]. Its columns are transformed first, a vector of neighbouring columns
at a time, and multiplied by the roots that join both halves; then its rows, a vector of neighbouring rows at
a time, whose results are adjacent. Both halves are the transforms of `fft_lanes`, short enough
for the caches however long the row is. Real and imaginary parts are in two planes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rlx.codegen.cpu.fft.lanes import (
    Complex,
    LaneBuffer,
    LaneShape,
    LaneTransform,
    lane_transform,
    swapped,
    times,
)
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
from rlx.codegen.native.irtext import Function, Int, Module
from rlx.codegen.native.irtypes import Value, constant
from rlx.records import dataclass

SHORTEST_ROW = 128  # points from which lanes inside of a row pay


class Planes:
    """Real and imaginary parts of one row, `stride` elements apart."""

    def __init__(self, fn: Function, pointer: Value, stride: int, shape: LaneShape) -> None:
        self.fn, self.pointer, self.stride, self.shape = fn, pointer, stride, shape

    def place(self, part: int, t: Int) -> Value:
        return self.fn.gep(self.pointer, self.fn.add(t, part * self.stride), self.shape.element)

    def vector(self, part: int, t: Int, mask: Value | None = None) -> Value:
        fn, place = self.fn, self.place(part, t)
        return (
            fn.load(self.shape.type, place) if mask is None else fn.masked_load(self.shape.type, place, mask)
        )

    def put(self, x: Value, part: int, t: Int, mask: Value | None = None) -> None:
        fn, place = self.fn, self.place(part, t)
        if mask is None:
            fn.store(x, place)
        else:
            fn.masked_store(x, place, mask)

    def points(self, t: Int, mask: Value | None = None) -> Complex:
        return self.vector(0, t, mask), self.vector(1, t, mask)

    def put_points(self, z: Complex, t: Int, mask: Value | None = None) -> None:
        self.put(z[0], 0, t, mask)
        self.put(z[1], 1, t, mask)

    def reversed(self, last: Int) -> Complex:
        """Points last, last - 1 ... in the lanes."""
        fn, width = self.fn, self.shape.width
        re, im = self.points(fn.sub(last, width - 1))
        return turned(fn, re), turned(fn, im)

    def put_reversed(self, z: Complex, last: Int) -> None:
        fn, width = self.fn, self.shape.width
        self.put_points((turned(fn, z[0]), turned(fn, z[1])), fn.sub(last, width - 1))


def turned(fn: Function, x: Value) -> Value:
    """Lanes in the other order."""
    return fn.shuffle(x, None, range(x.width - 1, -1, -1))


def across(
    fn: Function, n: int, width: int, body: Callable[[Int, Value | None], None], overlap: bool = True
) -> None:
    """Vectors that cover n elements. The last one overlaps the one before, or is masked where it must not."""
    if n < width:
        body(0, fn.lanes(n, width))
    elif n % width == 0:
        fn.loop(0, n, width, [], lambda i, _: body(i, None))
    elif overlap:
        fn.loop(0, n, width, [], lambda i, _: body(fn.smin(i, n - width), None))
    else:
        whole = n - n % width
        fn.loop(0, whole, width, [], lambda i, _: body(i, None))
        body(whole, fn.lanes(n - whole, width))


def turn_rows(
    fn: Function,
    n: int,
    width: int,
    read: Callable[[int, Int, Value | None], Value],
    put: Callable[[Value, Int], None],
) -> None:
    """`width` rows of n elements, read along the row, put as one vector per element, lane = row."""

    def block(base: Int, mask: Value | None) -> None:
        vectors = fn.transpose([read(row, base, mask) for row in range(width)])
        for j in range(min(n, width)):
            put(vectors[j], fn.add(base, j))

    across(fn, n, width, block)


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
        params = [("ptr noalias", p) for p in ("source", "target", "work")]
        fn = module.function(name, params, internal=True, noinline=True)
        source, target = (Planes(fn, p, stride, shape) for p in fn.args[:2])
        if inner is None:
            _four_steps(fn, cut, halves, source, target, fn.args[2])
        else:
            _bluestein(fn, n, inner, source, target, fn.args[2])
    return made


def _four_steps(
    fn: Function, cut: Split, halves: list[LaneTransform], source: Planes, target: Planes, work: Value
) -> None:
    n1, n2, shape, width = cut.n1, cut.n2, source.shape, source.shape.width
    first = LaneBuffer(fn, work, shape)
    second = LaneBuffer(fn, fn.gep(work, shape.buffer_bytes(max(h.points for h in halves)), "i8"), shape)
    roots = RootsOfRow(fn, n1 * n2, n1, shape)

    def columns(c: Int, mask: Value | None) -> None:
        fn.loop(0, n1, 1, [], lambda t, _: first.put_point(source.points(fn.add(fn.mul(t, n2), c), mask), t))
        found, _ = halves[0].call(fn, first, second)

        def put(k: Int, _: list[Value]) -> None:
            source.put_points(
                times(fn, found.point(k), roots.at(fn.mul(k, c), k)), fn.add(fn.mul(k, n2), c), mask
            )

        fn.loop(0, n1, 1, [], put)

    across(fn, n2, width, columns, overlap=False)  # in place: a column is not transformed twice

    def rows(k: Int, mask: Value | None) -> None:
        for part in range(2):

            def read(row: int, t: Int, inside: Value | None, part: int = part) -> Value:
                at = fn.add(k, min(row, n1 - 1))
                return source.vector(part, fn.add(fn.mul(at, n2), t), inside)

            def write(x: Value, t: Int, part: int = part) -> None:
                first.put(x, fn.add(fn.mul(t, 2), part))

            turn_rows(fn, n2, width, read, write)
        found, _ = halves[1].call(fn, first, second)
        fn.loop(0, n2, 1, [], lambda t, _: target.put_points(found.point(t), fn.add(fn.mul(t, n1), k), mask))

    across(fn, n1, width, rows)


class RootsOfRow:
    """exp(-2 pi i (base + step * lane) / n) in vectors: a vector for the lanes, read from a table, times a
    scalar for
    the base, which is a product of two table entries. So tables stay small for long rows."""

    def __init__(self, fn: Function, n: int, steps: int, shape: LaneShape) -> None:
        self.fn, self.shape = fn, shape
        self.bits = (n.bit_length() + 1) // 2
        low = np.arange(min(1 << self.bits, n))
        high = np.arange(-(-n // (1 << self.bits))) << self.bits
        lanes = roots_of_unity(n, np.arange(steps)[:, None] * np.arange(shape.width))
        flat = np.stack([lanes.real, lanes.imag], 1).reshape(-1)
        element, table = shape.element, fn.module.table
        self.lanes = table(
            f"fft_lane_roots_{n}_{steps}_{element}x{shape.width}", element, [float(v) for v in flat]
        )
        self.low = table(f"fft_low_roots_{n}_{element}", element, pairs(roots_of_unity(n, low)))
        self.high = table(f"fft_high_roots_{n}_{element}", element, pairs(roots_of_unity(n, high)))

    def at(self, base: Int, step: Int) -> Complex:
        """base < n, step < `steps`."""
        fn, shape = self.fn, self.shape
        a = self.entry(self.low, fn.and_(base, (1 << self.bits) - 1))
        b = self.entry(self.high, fn.lshr(base, self.bits))
        spread = tuple(fn.splat(part, shape.width) for part in times(fn, a, b))
        return times(fn, (spread[0], spread[1]), LaneBuffer(fn, self.lanes, shape).point(step))

    def entry(self, table: Value, index: Int) -> Complex:
        fn, element = self.fn, self.shape.element
        place = fn.gep(table, fn.mul(index, 2), element)
        return fn.load(element, place), fn.load(element, fn.gep(place, 1, element))


def _bluestein(
    fn: Function, n: int, inner: RowTransform, source: Planes, target: Planes, work: Value
) -> None:
    """As in `fft_lanes`, with points in the lanes."""
    shape, size = source.shape, inner.n

    def table(name: str, z: np.ndarray) -> Planes:
        stride = -(-len(z) // shape.width) * shape.width
        planes = np.zeros((2, stride))
        planes[:, : len(z)] = z.real, z.imag
        made = fn.module.table(
            f"{name}_{n}_{shape.element}_planes", shape.element, [float(v) for v in planes.reshape(-1)]
        )
        return Planes(fn, made, stride, shape)

    chirps, spectrum = table("fft_chirp", chirp(n)), table("fft_chirp_spectrum", chirp_spectrum(n, size))
    zero = constant(shape.type, 0)

    def scaled(planes: Planes, by: Planes, count: int, swap: bool) -> None:
        def block(t: Int, mask: Value | None) -> None:
            z = times(fn, planes.points(t, mask), by.points(t, mask))
            planes.put_points(swapped(z) if swap else z, t, mask)

        across(fn, count, shape.width, block, overlap=False)

    def last(t: Int, mask: Value | None) -> None:
        target.put_points(times(fn, swapped(source.points(t, mask)), chirps.points(t, mask)), t, mask)

    scaled(source, chirps, n, False)
    across(fn, size - n, shape.width, lambda t, mask: source.put_points((zero, zero), fn.add(t, n), mask))
    fn.call(inner.name, [source.pointer, target.pointer, work])
    scaled(target, spectrum, size, True)
    fn.call(inner.name, [target.pointer, source.pointer, work])
    across(fn, n, shape.width, last)
