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
from rlx.codegen.native.irtext import Module
from rlx.codegen.native.irtypes import Value, constant, size_bytes, vector
from rlx.codegen.native.notation import inline, native
from rlx.codegen.native.operators import InMemory
from rlx.codegen.native.words import (
    Int,
    Word,
    broadcast,
    builder,
    call,
    fma,
    gep,
    load,
    loop,
    noalias,
    ptr,
    store,
)
from rlx.records import dataclass


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

    def number(self, re: float, im: float) -> Complex:
        """A complex number in every lane."""
        return Complex(Word(constant(self.type, re)), Word(constant(self.type, im)))

    @property
    def zero(self) -> Complex:
        return self.number(0, 0)

    def buffer_bytes(self, points: int) -> int:
        return 2 * self.bytes * points


class Complex:
    """Complex numbers: a vector of real and one of imaginary parts. Operators write instructions."""

    __slots__ = ("im", "re")

    def __init__(self, re: Word, im: Word) -> None:
        self.re, self.im = re, im

    @inline
    def __add__(self, other: Complex) -> Complex:
        return Complex(self.re + other.re, self.im + other.im)

    @inline
    def __sub__(self, other: Complex) -> Complex:
        return Complex(self.re - other.re, self.im - other.im)

    @inline
    def __mul__(self, other: Complex) -> Complex:
        re = fma(self.re, other.re, -(self.im * other.im))
        return Complex(re, fma(self.re, other.im, self.im * other.re))

    @inline
    def scaled(self, by: float) -> Complex:
        return Complex(self.re * by, self.im * by)

    @inline
    def plus_scaled(self, z: Complex, by: float) -> Complex:
        """self + z * by, rounded once where the target can."""
        return Complex(fma(z.re, by, self.re), fma(z.im, by, self.im))

    @inline
    def conjugate(self) -> Complex:
        return Complex(self.re, -self.im)

    def swapped(self) -> Complex:
        """Real and imaginary parts exchanged: this changes the sign of a transform."""
        return Complex(self.im, self.re)

    @inline
    def plus_i_times(self, z: Complex) -> Complex:
        """self + i z."""
        return Complex(self.re - z.im, self.im + z.re)

    @inline
    def minus_i_times(self, z: Complex) -> Complex:
        """self - i z."""
        return Complex(self.re + z.im, self.im - z.re)


class LaneBuffer(InMemory):
    """A lane buffer; `x[t]` is point t of all rows."""

    def __init__(self, pointer: ptr, shape: LaneShape) -> None:
        self.pointer, self.shape = pointer, shape

    @inline
    def place(self, number: Int) -> ptr:
        """Where a vector is: number 2 t is the real part of point t, 2 t + 1 the imaginary part."""
        return gep(self.pointer, number * self.shape.width, self.shape.element)

    @inline
    def vector(self, number: Int) -> Word:
        return load(self.shape.type, self.place(number), self.shape.bytes)

    @inline
    def put(self, x: Value, number: Int) -> None:
        store(x, self.place(number), self.shape.bytes)

    @inline
    def __getitem__(self, t: Int) -> Complex:
        first = t * 2
        return Complex(self.vector(first), self.vector(first + 1))

    @inline
    def __setitem__(self, t: Int, z: Complex) -> None:
        first = t * 2
        self.put(z.re, first)
        self.put(z.im, first + 1)

    @inline
    def at(self, t: Int) -> LaneBuffer:
        """The buffer from point t on."""
        return LaneBuffer(self.place(t * 2), self.shape)


class Factors(InMemory):
    """A table of complex numbers; `x[k]` has number k in every lane."""

    def __init__(self, name: str, z: np.ndarray, shape: LaneShape) -> None:
        table = builder().module.table(f"{name}_{shape.element}", shape.element, pairs(z))
        self.pointer, self.shape = table, shape

    @inline
    def __getitem__(self, k: Int) -> Complex:
        element, width = self.shape.element, self.shape.width
        re = gep(self.pointer, k * 2, element)
        im = gep(re, 1, element)
        return Complex(broadcast(re, element, width), broadcast(im, element, width))


# -- a few points


@inline
def butterfly(z: Sequence[Complex]) -> list[Complex]:
    """The transform of a few points, by its definition with what symmetry saves."""
    n = len(z)
    if n == 2:
        return [z[0] + z[1], z[0] - z[1]]
    if n == 4:
        s, d, t, u = z[0] + z[2], z[0] - z[2], z[1] + z[3], z[1] - z[3]
        return [s + t, d.minus_i_times(u), s - t, d.plus_i_times(u)]
    return _eight(z) if n == 8 else _odd(z)


@inline
def _eight(z: Sequence[Complex]) -> list[Complex]:
    even, odd = butterfly(z[0::2]), butterfly(z[1::2])
    half = float(np.sqrt(0.5))
    b, d = odd[1], odd[3]
    turned = [
        odd[0],
        Complex((b.re + b.im) * half, (b.im - b.re) * half),
        Complex(odd[2].im, -odd[2].re),
        Complex((d.im - d.re) * half, -((d.re + d.im) * half)),
    ]
    first = [e + o for e, o in zip(even, turned, strict=True)]
    return first + [e - o for e, o in zip(even, turned, strict=True)]


@inline
def _odd(z: Sequence[Complex]) -> list[Complex]:
    """Points k and n - k together: their sums meet cosines, their differences sines."""
    n, half = len(z), len(z) // 2
    sums = [z[k] + z[n - k] for k in range(1, half + 1)]
    differences = [z[k] - z[n - k] for k in range(1, half + 1)]
    total = z[0]
    for s in sums:
        total += s
    first, last = [], []
    for j in range(1, half + 1):
        w = roots_of_unity(n, np.arange(1, half + 1) * j)
        even, odd = z[0], None
        for k in range(half):
            cos, sin = float(w[k].real), -float(w[k].imag)
            even = even.plus_scaled(sums[k], cos)
            odd = differences[k].scaled(sin) if odd is None else odd.plus_scaled(differences[k], sin)
        assert odd is not None
        first.append(even.minus_i_times(odd))
        last.append(even.plus_i_times(odd))
    return [total, *first, *reversed(last)]


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

    @inline
    def call(self, first: LaneBuffer, second: LaneBuffer) -> tuple[LaneBuffer, LaneBuffer]:
        """Run it; gives the buffer with the result, then the other one."""
        call(self.name, first.pointer, second.pointer)
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
        if small is not None:
            _passes.emit(module, name, passes=stages(n, registers), shape=shape)
        else:
            _bluestein.emit(module, name, n=n, size=size, shape=shape)
    return made


@native(internal=True, noinline=True)
def _passes(first: noalias, second: noalias, *, passes: Sequence[Stage], shape: LaneShape) -> None:
    source, target = LaneBuffer(first, shape), LaneBuffer(second, shape)
    for stage in passes:
        _pass(stage, source, target)
        source, target = target, source


@inline
def _pass(stage: Stage, source: LaneBuffer, target: LaneBuffer) -> None:
    """y[q + done (radix p + j)] = w^(p j) sum over k of x[q + done (p + left k)] exp(-2 pi i j k / radix)."""
    shape, r, done, left = source.shape, stage.radix, stage.done, stage.left
    twiddles = Factors(f"fft_twiddles_{left * r}_{r}", stage.twiddles, shape) if left > 1 else None
    for p in loop(left):
        x, y = source.at(p * done), target.at(p * (done * r))
        w = [] if twiddles is None else [twiddles[p * (r - 1) + j] for j in range(r - 1)]
        for q in loop(done):
            z = butterfly([x[q + k * left * done] for k in range(r)])
            for j, value in enumerate(z):
                turned = value * w[j - 1] if j and w else value
                y[q + j * done] = turned


@native(internal=True, noinline=True)
def _bluestein(first: noalias, second: noalias, *, n: int, size: int, shape: LaneShape) -> None:
    """The row times a chirp, convolved with the chirp's inverse by two longer transforms, times the chirp.

    The convolution's second transform has the other sign: parts are exchanged as the spectra are multiplied,
    and exchanged back at the end.
    """
    rows, other = LaneBuffer(first, shape), LaneBuffer(second, shape)
    inner = lane_transform(builder().module, size, shape)
    chirps = Factors(f"fft_chirp_{n}", chirp(n), shape)
    spectrum = Factors(f"fft_chirp_spectrum_{n}", chirp_spectrum(n, size), shape)
    for t in loop(n):
        rows[t] = rows[t] * chirps[t]
    for t in loop(n, size):
        rows[t] = shape.zero
    found, other = inner.call(rows, other)
    for t in loop(size):
        found[t] = (found[t] * spectrum[t]).swapped()
    result, _ = inner.call(found, other)
    assert result.pointer is first  # two equal transforms: the second one undoes the order of the first
    for t in loop(n):
        result[t] = result[t].swapped() * chirps[t]
