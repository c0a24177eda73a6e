"""How a matmul is cut: balanced row tiles, column panels, blocks of k, and shares of threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from rlx.codegen.cpu.kernels import PART_BITS
from rlx.codegen.native.irtext import Bool, Function, Int, Value
from rlx.records import dataclass


@dataclass(frozen=True)
class Tiles:
    """A balanced cut of m rows into `count` tiles: the first `tall` of low + 1 rows, then of low rows."""

    count: Int
    low: Int
    tall: Int

    @staticmethod
    def of(fn: Function, m: Int, height: int) -> Tiles:
        count = fn.ceildiv(m, height)
        low = fn.udiv(m, fn.umax(count, 1))
        return Tiles(count, low, fn.sub(m, fn.mul(low, count)))

    def row(self, fn: Function, tile: Int) -> Int:
        """First row of a tile."""
        return fn.add(fn.mul(tile, self.low), fn.umin(tile, self.tall))

    def heights(self, limit: int) -> list[int]:
        """Every height that a tile may have."""
        if isinstance(self.low, int) and isinstance(self.tall, int):
            return [h for h in (self.low, self.low + 1) if h and (h == self.low or self.tall)]
        return list(range(1, limit + 1))


@dataclass(frozen=True)
class PanelForm:
    """What the code of a panel depends on: its vectors, a ragged last one, being the last of all."""

    vectors: int
    masked: bool
    last: bool


@dataclass(frozen=True)
class Depth:
    """A block of k."""

    start: Int
    size: Int
    padded: Int  # in whole groups


PanelOfB = Callable[[Int, PanelForm], Value]
"""Address of a panel of B."""

TileOfA = Callable[[Int, Int], Value]
"""Address of A for (tile, its first row)."""


def share(fn: Function, total: Int, thread: Int, threads: Int) -> tuple[Int, Int]:
    """The contiguous part of range(total) that belongs to one thread."""
    return fn.udiv(fn.mul(total, thread), threads), fn.udiv(fn.mul(total, fn.add(thread, 1)), threads)


def part_window(fn: Function, part: Int, panels: Int) -> tuple[Int, Int]:
    """What the last argument of a kernel says: the first panel, and where panels end. For a run of the whole
    kernel it is 0."""
    first, stop = fn.and_(part, (1 << PART_BITS) - 1), fn.lshr(part, PART_BITS)
    return first, fn.select(fn.cmp("eq", stop, 0), panels, stop)


@dataclass(frozen=True)
class Units:
    """The row tiles of all panels of one matmul, counted down the rows of one panel, then of the next.

    Panels are as dear as they are wide: the last one may hold a third of the columns of the others.
    """

    tiles: Int
    full: Int
    full_weight: int
    tail_weight: Int  # 0 where there is no last, narrower panel

    def count(self, fn: Function) -> Int:
        return fn.mul(self.tiles, fn.add(self.full, fn.select(fn.cmp("ne", self.tail_weight, 0), 1, 0)))

    def window(self, fn: Function, first: Int, stop: Int) -> Units:
        """The units of panels first..stop only."""
        full = fn.smax(fn.sub(fn.smin(stop, self.full), first), 0)
        none = isinstance(self.tail_weight, int) and self.tail_weight == 0
        tail = 0 if none else fn.select(fn.cmp("ugt", stop, self.full), self.tail_weight, 0)
        return Units(self.tiles, full, self.full_weight, tail)

    def share(self, fn: Function, items: Int, thread: Int, threads: Int) -> tuple[Int, Int]:
        """The contiguous part of the units of `items` matmuls that belongs to one thread."""
        if isinstance(self.tail_weight, int) and self.tail_weight == 0:
            return share(fn, fn.mul(self.count(fn), items), thread, threads)
        in_full = fn.mul(fn.mul(self.tiles, self.full), self.full_weight)
        each = fn.add(in_full, fn.mul(self.tiles, self.tail_weight))

        def unit(weight: Int) -> Int:
            """The unit that holds a place on the scale of weights."""
            item = fn.udiv(weight, fn.umax(each, 1))
            rest = fn.sub(weight, fn.mul(item, each))
            behind = fn.udiv(fn.sub(rest, in_full), fn.umax(self.tail_weight, 1))
            in_tail = fn.add(fn.mul(self.tiles, self.full), behind)
            inside = fn.cmp("ult", rest, in_full)
            found = fn.select(inside, fn.udiv(rest, self.full_weight), in_tail)
            return fn.add(fn.mul(item, self.count(fn)), found)

        low, high = share(fn, fn.mul(each, items), thread, threads)
        return unit(low), unit(high)


def both(fn: Function, a: Bool, b: Bool) -> Bool:
    """Whether both hold; Python bools decide while generating."""
    return cast(Bool, fn.and_(a, b))


def either(fn: Function, a: Bool, b: Bool) -> Bool:
    """Whether one of the two holds; Python bools decide while generating."""
    return cast(Bool, fn.or_(a, b))


def choose(fn: Function, condition: Bool, a: Int, b: Int) -> Int:
    """`a` where the condition holds, else `b`."""
    return fn.select(condition, a, b)
