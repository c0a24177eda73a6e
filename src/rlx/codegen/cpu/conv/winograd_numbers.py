"""What Winograd's transforms are computed in: f32, or bytes by way of 16-bit points and i32 sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.codegen.native.irtext import Function, Value, constant, vector
from rlx.ops.storage.winograd import INPUT, OUTPUT, WHOLE
from rlx.records import dataclass

Grid = list[list[Value]]
_Two = Callable[[Value, Value], Value]
Line = Callable[[Function, Sequence[Value]], list[Value]]


def both_sides(fn: Function, change: Line, grid: Grid) -> Grid:
    """A change of lines made on all columns of a grid, then on all rows of what that gives."""
    columns = [change(fn, [line[j] for line in grid]) for j in range(len(grid[0]))]
    return [change(fn, [c[i] for c in columns]) for i in range(len(columns[0]))]


def _combine(fn: Function, row: Sequence[float], values: Sequence[Value]) -> Value:
    """A sum of values with small constant factors."""
    total: Value | None = None
    for factor, value in sorted(zip(row, values, strict=True), key=lambda pair: -pair[0]):
        if factor == 0:
            continue
        if total is None:
            total = value if factor == 1 else fn.fmul(value, constant(value.type, float(factor)))
        elif abs(factor) == 1:
            total = fn.fadd(total, value) if factor == 1 else fn.fsub(total, value)
        else:
            total = fn.fma(value, constant(value.type, float(factor)), total)
    assert total is not None
    return total


@dataclass(frozen=True)
class Reals:
    """f32."""

    name: str = "f32"
    image: str = "float"
    point: str = "float"
    sums: str = "float"

    def read(self, fn: Function, place: Value, lanes: int) -> Value:
        """Channels of a pixel, as they are transformed."""
        return fn.load(vector(self.image, lanes), place)

    def into(self, fn: Function, m: int, grid: Grid) -> Grid:
        """A transformed tile of the image."""
        return both_sides(fn, lambda fn, line: [_combine(fn, row, line) for row in INPUT[m]], grid)

    def out(self, fn: Function, m: int, grid: Grid) -> Grid:
        """Sums of pixels from those of points."""
        return both_sides(fn, lambda fn, line: [_combine(fn, row, line) for row in OUTPUT[m]], grid)


@dataclass(frozen=True)
class Integers:
    """Bytes: points are exact in 16 bits (68 * 255 at most), sums in i32 modulo 2 ** 32."""

    name: str = "u8"
    image: str = "i8"
    point: str = "i16"
    sums: str = "i32"

    def read(self, fn: Function, place: Value, lanes: int) -> Value:
        return fn.zext(fn.load(vector(self.image, lanes), place), self.point)

    def into(self, fn: Function, m: int, grid: Grid) -> Grid:
        assert m == 4
        return both_sides(fn, _into_points, grid)

    def out(self, fn: Function, m: int, grid: Grid) -> Grid:
        assert m == 4
        odd = WHOLE**2 >> 6
        inverse = pow(odd, -1, 2**32)
        signed = inverse - 2**32 if inverse >= 2**31 else inverse

        def exact(total: Value) -> Value:
            """Without the factor of WHOLE ** 2: modulo 2 ** 32 its odd part has an inverse."""
            return fn.value(fn.ashr(fn.value(fn.mul(total, signed)), 6))

        return [[exact(total) for total in line] for line in both_sides(fn, _out_of_points, grid)]


def _arithmetic(fn: Function) -> tuple[_Two, _Two, Callable[[Value, int], Value]]:
    """a - b, a + b and a * 2 ** bits of integers."""
    return (
        lambda a, b: fn.value(fn.sub(a, b)),
        lambda a, b: fn.value(fn.add(a, b)),
        lambda a, bits: fn.value(fn.shl(a, bits)),
    )


def _into_points(fn: Function, x: Sequence[Value]) -> list[Value]:
    """INPUT[4] times a line, with what its rows share computed once."""
    less, plus, times = _arithmetic(fn)
    even, odd = less(x[4], times(x[2], 2)), less(x[3], times(x[1], 2))
    near, apart = less(x[4], x[2]), less(x[3], x[1])
    twice = times(apart, 1)
    first = plus(times(less(x[0], x[2]), 2), near)
    last = less(less(x[5], x[3]), times(apart, 2))
    return [first, plus(even, odd), less(even, odd), plus(near, twice), less(near, twice), last]


def _out_of_points(fn: Function, x: Sequence[Value]) -> list[Value]:
    """OUTPUT[4] times a line whose points have the factors INTEGER_ROWS, times WHOLE."""
    less, plus, times = _arithmetic(fn)
    near, near_apart = times(plus(x[1], x[2]), 2), times(less(x[1], x[2]), 2)
    far, far_apart = plus(x[3], x[4]), times(less(x[3], x[4]), 1)
    first, last = (times(plus(v, times(v, 1)), bits) for v, bits in ((x[0], 1), (x[5], 3)))  # times 6 and 24
    return [
        plus(plus(first, near), far),
        plus(near_apart, far_apart),
        plus(near, times(far, 2)),
        plus(plus(near_apart, times(far_apart, 2)), last),
    ]
