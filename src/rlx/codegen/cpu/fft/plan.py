"""How a Fourier transform of n points is cut up: radices, the split of a long row, sizes for Bluestein,
tables.

Everything here is known before a line of code is written. Angles are reduced to an eighth of the circle in
integers, so that tables are as exact as f64 allows.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from rlx.records import dataclass

LARGEST_PRIME = 31  # radices up to this are computed by their definition, larger primes by Bluestein
_RADICES = (8, 5, 4, 3, 2)
_WORK = {2: 1.0, 3: 1.4, 4: 1.2, 5: 1.7, 8: 1.8}  # vector operations per point of a pass
# Rooms in the first and second cache. They are the same on every machine, since the choice shows in bits.
_NEAR_BYTES, _FAR_BYTES = 32 << 10, 512 << 10
_LONG_HALF = 2048  # points of half a row from which its lane buffers are too large


def roots_of_unity(n: int, powers: np.ndarray) -> np.ndarray:
    """exp(-2 pi i p / n) for integers p, in c128; the same angle always gives the same bits.

    >>> roots_of_unity(4, np.arange(4)).tolist() == [1, -1j, -1, 1j]
    True
    """
    p = np.asarray(powers, np.int64) % n
    # p / n of a turn = eighth / 8 + rest / n, counted back from the next eighth where that is the smaller
    # angle
    eighth = 8 * p // n
    odd = eighth % 2 == 1
    rest = 8 * p - eighth * n  # in eighths of 1 / n
    small = np.where(odd, n - rest, rest) * (np.pi / 4 / n)
    cos, sin = np.cos(small), np.sin(small)
    quarter = (
        (eighth + odd) // 2 % 4
    )  # the multiple of a quarter turn that `small` is added to (or taken from)
    sin = np.where(odd, -sin, sin)
    real = np.choose(quarter, [cos, -sin, -cos, sin])
    imag = np.choose(quarter, [sin, cos, -sin, -cos])
    return (real + 0.0) - 1j * (imag + 0.0)


def radices(n: int, registers: int = 32) -> tuple[int, ...] | None:
    """Factors of n that are computed in one pass each, large ones first; None where a prime is too large.

    >>> radices(200), radices(16), radices(2 * 37)
    ((8, 5, 5), (4, 4), None)
    """
    out = []
    for r in _RADICES:
        if r == 8 and registers < 32:  # a butterfly of eight complex vectors does not fit
            continue
        while n % r == 0 and not (r == 8 and n == 16):
            out.append(r)
            n //= r
    for r in range(7, LARGEST_PRIME + 1, 2):
        while n % r == 0:
            out.append(r)
            n //= r
    return tuple(sorted(out, reverse=True)) if n == 1 else None


@lru_cache(maxsize=256)
def convolution_size(n: int) -> int:
    """Points of the transforms that Bluestein's method uses for one of n: at least 2 n - 1, only factors 2,
    3, 5.

    >>> convolution_size(37)
    75
    """
    least = 2 * n - 1
    best = 1 << (least - 1).bit_length()
    five = 1
    while five < best:
        three = five
        while three < best:
            two = max(least - 1, 0) // three
            size = three << two.bit_length()
            if least <= size < best:
                best = size
            three *= 3
        five *= 5
    return best


def work(n: int) -> float:
    """Vector operations per point of a transform of n points whose factors are small, roughly."""
    return sum(_WORK.get(r, r / 2) for r in radices(n) or ())


@dataclass(frozen=True)
class Split:
    """n = n1 * n2, and what transforming one row by them costs per point, in vector operations."""

    n1: int
    n2: int
    cost: float


@lru_cache(maxsize=256)
def split(n: int, width: int) -> Split | None:
    """The cheapest split of a row of n points into a matrix, for vectors of `width` lanes; None for a prime.

    >>> split(400, 16).n1, split(7, 16)
    (16, None)
    """

    def filled(m: int) -> float:
        """Lanes computed for each one that is needed."""
        return -(-m // width) * width / m

    found = []
    small = [d for d in range(2, math.isqrt(n) + 1) if n % d == 0]
    for n1 in {*small, *(n // d for d in small)}:
        n2 = n // n1
        # every half is loaded and stored; the second one also turns rows into lanes
        cost = filled(n2) * (work(n1) + 2) + filled(n1) * (work(n2) + 4)
        too_long = max(n1, n2) > _LONG_HALF
        found.append((too_long, cost, abs(n1 - n2), n1))
    if not found:
        return None
    _, cost, _, n1 = min(found)
    return Split(n1, n // n1, cost)


def lanes_cost(n: int, vector_bytes: int) -> float:
    """What transforming rows side by side costs per point: two lane buffers of n points
    shall stay in a cache.
    """
    size = convolution_size(n) if radices(n) is None else n
    room = 4 * size * vector_bytes
    return (work(size) + 4) * (1.0 if room <= _NEAR_BYTES else 1.3 if room <= _FAR_BYTES else 3.0)


@dataclass(frozen=True)
class Stage:
    """One pass over n points: `radix` of them at a time, `left` groups still to come,
    `done` points finished.
    """

    radix: int
    left: int
    done: int

    @property
    def twiddles(self) -> np.ndarray:
        """Factors of results 1 .. radix - 1 for each of the `left` groups, [left, radix - 1]."""
        p, j = np.arange(self.left)[:, None], np.arange(1, self.radix)
        return roots_of_unity(self.left * self.radix, p * j)


def stages(n: int, registers: int = 32) -> list[Stage]:
    """The passes of a transform whose factors are all small."""
    found = radices(n, registers)
    assert found is not None
    out, left, done = [], n, 1
    for r in found:
        left //= r
        out.append(Stage(r, left, done))
        done *= r
    return out


def chirp(n: int) -> np.ndarray:
    """exp(-pi i t^2 / n) for t < n."""
    t = np.arange(n, dtype=object)
    return roots_of_unity(2 * n, np.asarray(t * t % (2 * n), np.int64))


def chirp_spectrum(n: int, size: int) -> np.ndarray:
    """What Bluestein's method multiplies the transform of the chirped row by, over `size`."""
    c = np.conj(chirp(n))
    kernel = np.zeros(size, np.complex128)
    kernel[:n] = c
    kernel[size - n + 1 :] = c[:0:-1]
    return np.fft.fft(kernel) / size


def pairs(z: np.ndarray) -> list[float]:
    """Real and imaginary parts in turn."""
    flat = np.ascontiguousarray(z.reshape(-1)).view(np.float64)
    return [float(v) for v in flat]
