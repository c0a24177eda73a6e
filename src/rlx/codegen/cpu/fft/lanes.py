"""Fourier transforms of one vector's lanes at a time: every lane is a separate row.

Rows are in a lane buffer: for each point one vector of real and one of imaginary parts, lane = row. A
transform is a function of the module that takes two such buffers and leaves the result in one of them; it is
Stockham's (each pass reads one buffer and writes the other, no reordering), its twiddles are scalars
broadcast to all lanes. Lengths with a large prime go through Bluestein's convolution. The sign is always -1:
with real and imaginary parts exchanged on the way in and out it is +1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlx.codegen.cpu.fft.plan import (
    Stage,
    chirp,
    chirp_spectrum,
    convolution_size,
    pairs,
    radices,
    roots_of_unity,
    stages,
)
from rlx.codegen.native.irtext import Function, Int, Module
from rlx.codegen.native.irtypes import Value, constant, size_bytes, vector
from rlx.records import dataclass

Complex = tuple[Value, Value]


@dataclass(frozen=True)
class LaneShape:
    """The element type of a lane buffer and how many rows are adjacent."""

    element: str
    width: int

    @property
    def type(self) -> str:
        return vector(self.element, self.width)

    @property
    def bytes(self) -> int:
        """Of one vector."""
        return size_bytes(self.element) * self.width

    def buffer_bytes(self, points: int) -> int:
        return 2 * self.bytes * points


class LaneBuffer:
    """Access to the points of a lane buffer."""

    def __init__(self, fn: Function, pointer: Value, shape: LaneShape) -> None:
        self.fn, self.pointer, self.shape = fn, pointer, shape

    def place(self, vector_number: Int) -> Value:
        return self.fn.gep(self.pointer, self.fn.mul(vector_number, self.shape.width), self.shape.element)

    def vector(self, number: Int) -> Value:
        """One vector; number 2 t is the real part of point t, 2 t + 1 the imaginary part."""
        return self.fn.load(self.shape.type, self.place(number), self.shape.bytes)

    def put(self, x: Value, number: Int) -> None:
        self.fn.store(x, self.place(number), self.shape.bytes)

    def point(self, t: Int) -> Complex:
        first = self.fn.mul(t, 2)
        return self.vector(first), self.vector(self.fn.add(first, 1))

    def put_point(self, z: Complex, t: Int) -> None:
        first = self.fn.mul(t, 2)
        self.put(z[0], first)
        self.put(z[1], self.fn.add(first, 1))

    def at(self, t: Int) -> LaneBuffer:
        """The buffer from point t on."""
        return LaneBuffer(self.fn, self.place(self.fn.mul(t, 2)), self.shape)


# -- arithmetic


def plus(fn: Function, a: Complex, b: Complex) -> Complex:
    return fn.fadd(a[0], b[0]), fn.fadd(a[1], b[1])


def minus(fn: Function, a: Complex, b: Complex) -> Complex:
    return fn.fsub(a[0], b[0]), fn.fsub(a[1], b[1])


def times(fn: Function, a: Complex, b: Complex) -> Complex:
    re = fn.fma(a[0], b[0], fn.fneg(fn.fmul(a[1], b[1])))
    return re, fn.fma(a[0], b[1], fn.fmul(a[1], b[0]))


def swapped(z: Complex) -> Complex:
    """Real and imaginary parts exchanged: what turns the sign of a transform round."""
    return z[1], z[0]


def factor(fn: Function, table: Value, index: Int, shape: LaneShape) -> Complex:
    """Entry of a table of complex numbers, in every lane."""
    first = fn.gep(table, fn.mul(index, 2), shape.element)
    second = fn.gep(first, 1, shape.element)
    return fn.broadcast(first, shape.element, shape.width), fn.broadcast(second, shape.element, shape.width)


def butterfly(fn: Function, z: Sequence[Complex]) -> list[Complex]:
    """The transform of a few points, by its definition with what symmetry saves."""
    n = len(z)
    if n == 2:
        return [plus(fn, *z), minus(fn, *z)]
    if n == 4:
        s, d, t, u = plus(fn, z[0], z[2]), minus(fn, z[0], z[2]), plus(fn, z[1], z[3]), minus(fn, z[1], z[3])
        # -i u = (im u, -re u)
        return [
            plus(fn, s, t),
            (fn.fadd(d[0], u[1]), fn.fsub(d[1], u[0])),
            minus(fn, s, t),
            (fn.fsub(d[0], u[1]), fn.fadd(d[1], u[0])),
        ]
    if n == 8:
        return _eight(fn, z)
    return _odd(fn, z)


def _eight(fn: Function, z: Sequence[Complex]) -> list[Complex]:
    even, odd = butterfly(fn, z[0::2]), butterfly(fn, z[1::2])
    half = constant(z[0][0].type, float(np.sqrt(0.5)))
    (a, b), (c, d) = odd[1], odd[3]
    turned = [
        odd[0],
        (fn.fmul(fn.fadd(a, b), half), fn.fmul(fn.fsub(b, a), half)),
        (odd[2][1], fn.fneg(odd[2][0])),
        (fn.fmul(fn.fsub(d, c), half), fn.fneg(fn.fmul(fn.fadd(c, d), half))),
    ]
    first = [plus(fn, e, o) for e, o in zip(even, turned, strict=True)]
    return first + [minus(fn, e, o) for e, o in zip(even, turned, strict=True)]


def _odd(fn: Function, z: Sequence[Complex]) -> list[Complex]:
    """Points k and n - k together: their sums meet cosines, their differences sines."""
    n, half = len(z), len(z) // 2
    sums = [plus(fn, z[k], z[n - k]) for k in range(1, half + 1)]
    differences = [minus(fn, z[k], z[n - k]) for k in range(1, half + 1)]
    total = z[0]
    for s in sums:
        total = plus(fn, total, s)
    out = [total] * n
    for j in range(1, half + 1):
        w = roots_of_unity(n, np.arange(1, half + 1) * j)
        even, odd = z[0], None
        for k in range(half):
            cos, sin = float(w[k].real), -float(w[k].imag)
            even = (fn.fma(sums[k][0], cos, even[0]), fn.fma(sums[k][1], cos, even[1]))
            re, im = differences[k]
            odd = (
                (fn.fmul(re, sin), fn.fmul(im, sin))
                if odd is None
                else (fn.fma(re, sin, odd[0]), fn.fma(im, sin, odd[1]))
            )
        assert odd is not None
        out[j] = fn.fadd(even[0], odd[1]), fn.fsub(even[1], odd[0])
        out[n - j] = fn.fsub(even[0], odd[1]), fn.fadd(even[1], odd[0])
    return out


# -- whole transforms


@dataclass(frozen=True)
class LaneTransform:
    """A transform of n points as a function `name(first, second)` of the module.

    The rows are in the first buffer. Both buffers have room for `points` points; the result is in the second
    one if `in_second`.
    """

    name: str
    n: int
    points: int
    in_second: bool

    def call(self, fn: Function, first: LaneBuffer, second: LaneBuffer) -> tuple[LaneBuffer, LaneBuffer]:
        """Run it; gives the buffer with the result, then the other one."""
        fn.call(self.name, [first.pointer, second.pointer])
        return (second, first) if self.in_second else (first, second)


def lane_transform(module: Module, n: int, shape: LaneShape) -> LaneTransform:
    """The transform of n points, written into the module once."""
    name = f"fft{n}_{shape.element}x{shape.width}"
    registers = module.target.registers
    small = radices(n, registers)
    size = n if small is not None else convolution_size(n)
    swaps = len(stages(size, registers)) % 2
    made = LaneTransform(name, n, size, bool(swaps) if small is not None else False)
    if not module.defines(name):
        fn = module.function(
            name, [("ptr noalias", "first"), ("ptr noalias", "second")], internal=True, noinline=True
        )
        first, second = (LaneBuffer(fn, p, shape) for p in fn.args)
        if small is not None:
            for number, stage in enumerate(stages(n, registers)):
                _pass(fn, stage, *((first, second) if number % 2 == 0 else (second, first)))
        else:
            _bluestein(fn, n, lane_transform(module, size, shape), first, second)
    return made


def _pass(fn: Function, stage: Stage, source: LaneBuffer, target: LaneBuffer) -> None:
    """y[q + done (radix p + j)] = w^(p j) sum over k of x[q + done (p + left k)] exp(-2 pi i j k / radix)."""
    shape, r, done, left = source.shape, stage.radix, stage.done, stage.left
    table = (
        fn.module.table(f"fft_twiddles_{left * r}_{r}_{shape.element}", shape.element, pairs(stage.twiddles))
        if left > 1
        else None
    )

    def group(p: Int, _: list[Value]) -> None:
        x, y = source.at(fn.mul(p, done)), target.at(fn.mul(p, done * r))
        w: list[Complex] = []
        if table is not None:
            w = [factor(fn, table, fn.add(fn.mul(p, r - 1), j), shape) for j in range(r - 1)]

        def one(q: Int, _: list[Value]) -> None:
            z = butterfly(fn, [x.point(fn.add(q, k * left * done)) for k in range(r)])
            for j, value in enumerate(z):
                y.put_point(times(fn, value, w[j - 1]) if j and w else value, fn.add(q, j * done))

        fn.loop(0, done, 1, [], one)

    fn.loop(0, left, 1, [], group)


def _bluestein(fn: Function, n: int, inner: LaneTransform, first: LaneBuffer, second: LaneBuffer) -> None:
    """The row times a chirp, convolved with the chirp's inverse by two longer transforms, times the chirp.

    The convolution's second transform has the other sign: parts are exchanged as the spectra are multiplied,
    and exchanged back at the end.
    """
    shape, size = first.shape, inner.n
    table = fn.module.table(f"fft_chirp_{n}_{shape.element}", shape.element, pairs(chirp(n)))
    spectrum = fn.module.table(
        f"fft_chirp_spectrum_{n}_{shape.element}", shape.element, pairs(chirp_spectrum(n, size))
    )
    zero = constant(shape.type, 0)

    def scale(buffer: LaneBuffer, by: Value, count: int, swap: bool) -> None:
        def one(t: Int, _: list[Value]) -> None:
            z = times(fn, buffer.point(t), factor(fn, by, t, shape))
            buffer.put_point(swapped(z) if swap else z, t)

        fn.loop(0, count, 1, [], one)

    scale(first, table, n, False)
    fn.loop(n, size, 1, [], lambda t, _: first.put_point((zero, zero), t))
    found, other = inner.call(fn, first, second)
    scale(found, spectrum, size, True)
    result, _ = inner.call(fn, found, other)
    assert result.pointer is first.pointer  # two equal transforms: whatever one moves, the other moves back

    def last(t: Int, _: list[Value]) -> None:
        result.put_point(times(fn, swapped(result.point(t)), factor(fn, table, t, shape)), t)

    fn.loop(0, n, 1, [], last)
