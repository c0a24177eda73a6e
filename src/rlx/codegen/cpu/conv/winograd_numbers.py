"""What Winograd's transforms are computed in: f32, or bytes by way of 16-bit points and i32 sums."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import itemgetter

from rlx.codegen.native.irtext import vector
from rlx.codegen.native.notation import inline
from rlx.codegen.native.words import Word, fma, load, ptr, zext
from rlx.ops.storage.winograd import INPUT, OUTPUT, WHOLE
from rlx.records import dataclass

Grid = list[list[Word]]
Line = Callable[[Sequence[Word]], list[Word]]


def both_sides(change: Line, grid: Grid) -> Grid:
    """A change of lines made on all columns of a grid, then on all rows of what that gives."""
    columns = [change([line[j] for line in grid]) for j in range(len(grid[0]))]
    return [change([c[i] for c in columns]) for i in range(len(columns[0]))]


@inline
def _scaled(value: Word, factor: float) -> Word:
    return value * factor


@inline
def _plus(total: Word, value: Word, factor: float) -> Word:
    return total + value


@inline
def _minus(total: Word, value: Word, factor: float) -> Word:
    return total - value


def _plus_scaled(total: Word, value: Word, factor: float) -> Word:
    return fma(value, factor, total)


_ADD = {1.0: _plus, -1.0: _minus}


@functools.cache
def _terms(row: tuple[float, ...]) -> list[tuple[int, float]]:
    """Places and factors that are not 0, the largest factor first."""
    terms = sorted(enumerate(row), key=itemgetter(1), reverse=True)
    return [(place, float(factor)) for place, factor in terms if factor != 0]


def _combine(terms: Sequence[tuple[int, float]], values: Sequence[Word]) -> Word:
    """A sum of values with small constant factors."""
    (place, factor), *rest = terms
    total = values[place] if factor == 1 else _scaled(values[place], factor)
    for place, factor in rest:
        total = _ADD.get(factor, _plus_scaled)(total, values[place], factor)
    return total


def _times(matrix: Sequence[Sequence[float]]) -> Line:
    """The product of a matrix with a line."""
    rows = [_terms(tuple(row)) for row in matrix]
    return lambda line: [_combine(terms, line) for terms in rows]


@dataclass(frozen=True)
class Reals:
    """f32."""

    name: str = "f32"
    image: str = "float"
    point: str = "float"
    sums: str = "float"

    def read(self, place: ptr, lanes: int) -> Word:
        """Channels of a pixel, as they are transformed."""
        return load(vector(self.image, lanes), place)

    def into(self, m: int, grid: Grid) -> Grid:
        """A transformed tile of the image."""
        return both_sides(_times(INPUT[m]), grid)

    def out(self, m: int, grid: Grid) -> Grid:
        """Sums of pixels from those of points."""
        return both_sides(_times(OUTPUT[m]), grid)


@dataclass(frozen=True)
class Integers:
    """Bytes: points are exact in 16 bits (68 * 255 at most), sums in i32 modulo 2 ** 32."""

    name: str = "u8"
    image: str = "i8"
    point: str = "i16"
    sums: str = "i32"

    def read(self, place: ptr, lanes: int) -> Word:
        return zext(load(vector(self.image, lanes), place), self.point)

    def into(self, m: int, grid: Grid) -> Grid:
        assert m == 4
        return both_sides(_into_points, grid)

    def out(self, m: int, grid: Grid) -> Grid:
        assert m == 4
        return [[_exact(total) for total in line] for line in both_sides(_out_of_points, grid)]


@inline
def _exact(total: Word) -> Word:
    """A sum without the factor of WHOLE ** 2: modulo 2 ** 32 its odd part has an inverse."""
    inverse = pow(WHOLE**2 >> 6, -1, 2**32)
    signed = inverse - 2**32 if inverse >= 2**31 else inverse
    return (total * signed) >> 6


@inline
def _into_points(x: Sequence[Word]) -> list[Word]:
    """INPUT[4] times a line, with what its rows share computed once."""
    even, odd = x[4] - (x[2] << 2), x[3] - (x[1] << 2)
    near, apart = x[4] - x[2], x[3] - x[1]
    twice = apart << 1
    first = ((x[0] - x[2]) << 2) + near
    last = (x[5] - x[3]) - (apart << 2)
    return [first, even + odd, even - odd, near + twice, near - twice, last]


@inline
def _out_of_points(x: Sequence[Word]) -> list[Word]:
    """OUTPUT[4] times a line whose points have the factors INTEGER_ROWS, times WHOLE."""
    near, near_apart = (x[1] + x[2]) << 2, (x[1] - x[2]) << 2
    far, far_apart = x[3] + x[4], (x[3] - x[4]) << 1
    first, last = (x[0] + (x[0] << 1)) << 1, (x[5] + (x[5] << 1)) << 3  # times 6 and 24
    return [
        first + near + far,
        near_apart + far_apart,
        near + (far << 2),
        near_apart + (far_apart << 2) + last,
    ]
