"""How a matmul is cut: balanced row tiles, column panels, blocks of k, and shares of threads."""

from __future__ import annotations

from collections.abc import Callable

from rlx.codegen.cpu.frame import Count as Count
from rlx.codegen.cpu.kernels import PART_BITS
from rlx.codegen.native.irtext import Function
from rlx.codegen.native.notation import inline
from rlx.codegen.native.words import ceildiv, lshr, ptr, select, udiv, ugt, ult, umax, umin
from rlx.records import dataclass


@dataclass(frozen=True)
class Tiles:
    """A balanced cut of m rows into `count` tiles: the first `tall` of low + 1 rows, then of low rows."""

    count: Count
    low: Count
    tall: Count

    @staticmethod
    @inline
    def of(f: Function, m: Count, height: int) -> Tiles:
        count = ceildiv(m, height)
        low = udiv(m, umax(count, 1))
        return Tiles(count, low, m - low * count)

    @inline
    def row(self, f: Function, tile: Count) -> Count:
        """First row of a tile."""
        return tile * self.low + umin(tile, self.tall)

    @inline
    def height(self, tile: Count) -> Count:
        """Rows of a tile."""
        return self.low + select(ult(tile, self.tall), 1, 0)

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

    start: Count
    size: Count
    padded: Count  # in whole groups


PanelOfB = Callable[[Count, PanelForm], ptr]
"""Address of a panel of B."""

TileOfA = Callable[[Count, Count], ptr]
"""Address of A for (tile, its first row)."""


@dataclass(frozen=True)
class RowBlock:
    """Row tiles start..stop, and where their rows of A are."""

    start: Count
    stop: Count
    tile_of_a: TileOfA


@inline
def share(total: Count, thread: Count, threads: Count) -> tuple[Count, Count]:
    """The contiguous part of range(total) that belongs to one thread."""
    return udiv(total * thread, threads), udiv(total * (thread + 1), threads)


@inline
def part_window(part: Count, panels: Count) -> tuple[Count, Count]:
    """What the last argument of a kernel says: the first panel, and where panels end. For a run of the whole
    kernel it is 0."""
    first, stop = part & ((1 << PART_BITS) - 1), lshr(part, PART_BITS)
    return first, select(stop == 0, panels, stop)


@dataclass(frozen=True)
class Units:
    """The row tiles of all panels of one matmul, counted down the rows of one panel, then of the next.

    Panels are as dear as they are wide: the last one may hold a third of the columns of the others.
    """

    tiles: Count
    full: Count
    full_weight: int
    tail_weight: Count  # 0 where there is no last, narrower panel

    @inline
    def count(self) -> Count:
        return self.tiles * (self.full + select(self.tail_weight != 0, 1, 0))

    @property
    def has_no_tail(self) -> bool:
        """Whether it is known that no panel is narrower."""
        return isinstance(self.tail_weight, int) and self.tail_weight == 0

    @inline
    def window(self, first: Count, stop: Count) -> Units:
        """The units of panels first..stop only."""
        full = max(min(stop, self.full) - first, 0)
        tail = 0 if self.has_no_tail else select(ugt(stop, self.full), self.tail_weight, 0)
        return Units(self.tiles, full, self.full_weight, tail)

    @inline
    def of_thread(self, items: Count, thread: Count, threads: Count) -> tuple[Count, Count]:
        """The contiguous part of the units of `items` matmuls that belongs to one thread."""
        if self.has_no_tail:
            return share(self.count() * items, thread, threads)
        in_full = self.tiles * self.full * self.full_weight
        each = in_full + self.tiles * self.tail_weight

        def unit(weight: Count) -> Count:
            """The unit that holds a place on the scale of weights."""
            item = udiv(weight, umax(each, 1))
            rest = weight - item * each
            behind = udiv(rest - in_full, umax(self.tail_weight, 1))
            in_tail = self.tiles * self.full + behind
            found = select(ult(rest, in_full), udiv(rest, self.full_weight), in_tail)
            return item * self.count() + found

        low, high = share(each * items, thread, threads)
        return unit(low), unit(high)
