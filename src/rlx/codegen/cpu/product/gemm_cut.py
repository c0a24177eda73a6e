"""How a matmul is cut: balanced row tiles, column panels, blocks of k, and shares of threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from rlx.codegen.cpu.frame import Count as Count
from rlx.codegen.cpu.kernels import PART_BITS
from rlx.codegen.native.irtext import Function
from rlx.codegen.native.notation import inline, native
from rlx.codegen.native.words import ceildiv, i64, lshr, ptr, select, udiv, ugt, ule, ult, umax, umin
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
class Part:
    """What a thread has of a band of one matmul: tiles start..end, counted down rows low..high of one panel,
    then of the next."""

    start: Count
    end: Count
    low: Count
    high: Count

    @inline
    def height(self) -> Count:
        """Row tiles of the band; at least 1, to divide by."""
        return umax(self.high - self.low, 1)

    @inline
    def panels(self) -> tuple[Count, Count]:
        """Its first panel, and where panels end."""
        return udiv(self.start, self.height()), ceildiv(self.end, self.height())

    @inline
    def of_panel(self, j: Count) -> tuple[Count, Count]:
        """Its row tiles of panel j; more than there are, where it has all of them."""
        before = j * self.height() - self.low
        return self.start - before, self.end - before

    @inline
    def needed_rows(self, first: Count, stop: Count) -> tuple[Count, Count]:
        """Its row tiles of all its panels first..stop: of one panel, no more than are needed."""
        single, (top, bottom) = ule(stop - first, 1), self.of_panel(first)
        return select(single, max(self.low, top), self.low), select(single, min(self.high, bottom), self.high)


@dataclass(frozen=True)
class PanelCosts:
    """The panels of one matmul. They are as dear as they are wide: the last one may hold a third of the
    columns of the others."""

    full: Count
    full_weight: int
    tail_weight: Count  # 0 where there is no last, narrower panel

    @property
    def has_no_tail(self) -> bool:
        """Whether it is known that no panel is narrower."""
        return isinstance(self.tail_weight, int) and self.tail_weight == 0

    @inline
    def weight(self) -> Count:
        """Of all panels, for one row tile."""
        return self.full if self.has_no_tail else self.full * self.full_weight + self.tail_weight

    @inline
    def window(self, first: Count, stop: Count) -> PanelCosts:
        """Panels first..stop only."""
        full = max(min(stop, self.full) - first, 0)
        tail = 0 if self.has_no_tail else select(ugt(stop, self.full), self.tail_weight, 0)
        return PanelCosts(full, self.full_weight, tail)

    @inline
    def unit(self, place: Count, height: Count, up: Count) -> Count:
        """The tile that begins at or before a place on the scale of weights of `height` row tiles; with `up`
        of 1, at or after it."""
        if self.has_no_tail:
            return place
        full, tail = self.full_weight, umax(self.tail_weight, 1)
        in_full = height * self.full * full
        in_tail = height * self.full + udiv(place - in_full + up * (tail - 1), tail)
        return select(ult(place, in_full), udiv(place + up * (full - 1), full), in_tail)


BANDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of bands that row tiles may be cut in."""


@inline
def bands_for(threads: Count, most: Count, a: Count, b: Count) -> Count:
    """In how many bands, at most `most`, the rows of a matmul are cut for so many threads, of which `a` and
    `b` are what reading all of A and of B costs.

    A thread then reads a / bands + b * bands / threads: a number of bands is as good as the next one where
    their product is threads * a / b.
    """
    bands: Count = 1
    scaled, limit = threads * a, umin(most, threads)
    for fewer, more in itertools.pairwise(BANDS):
        pays = ugt(scaled, b * (fewer * more)) & ule(more, limit)
        bands = select(pays, more, bands)
    return bands


@native(internal=True, noinline=True)
def count_bands(threads: i64, most: i64, a: i64, b: i64) -> i64:
    """`bands_for` as a function that all kernels of a module share."""
    return bands_for(threads, most, a, b)


@dataclass(frozen=True)
class Cut:
    """How the tiles of all matmuls of a batch are shared among threads.

    The row tiles of each matmul are cut in `bands`, as high as they have `threads`. Tiles are counted down
    the rows of one panel of a band, then of the next: in one band from the first panel to the last, in the
    next one back. A thread has a contiguous part of them all, so shares are equal but for a tile; threads of
    a band read the same rows of A, those of different bands the same panels of B.
    """

    tiles: Count
    panels: PanelCosts
    bands: Count = 1
    threads: Count = 1  # for one matmul

    @inline
    def weight(self) -> Count:
        """Of one matmul."""
        return self.tiles * self.panels.weight()

    @inline
    def first_tile(self, band: Count) -> Count:
        """Where a band begins."""
        if isinstance(self.bands, int) and self.bands == 1:
            return band * self.tiles
        return udiv(self.tiles * udiv(band * self.threads, self.bands), self.threads)

    @inline
    def bands_of(self, start: Count, end: Count) -> tuple[Count, Count]:
        """Bands that hold places start..end on the scale of weights, and perhaps one more at the end."""
        if isinstance(self.bands, int) and self.bands == 1:
            return 0, 1
        row, tiles = umax(self.panels.weight(), 1), umax(self.tiles, 1)
        first = udiv(udiv(start, row) * self.bands, tiles)
        last = udiv((udiv(end, row) + 1) * self.bands, tiles)
        return first, umin(last + 2, self.bands)

    @inline
    def part(self, band: Count, start: Count, end: Count) -> Part:
        """The tiles of a band at places start..end on the scale of weights."""
        low, high = self.first_tile(band), self.first_tile(band + 1)
        before, height = low * self.panels.weight(), high - low
        all_of_it = height * self.panels.weight()
        from_, to = min(max(start - before, 0), all_of_it), max(min(end - before, all_of_it), 0)
        up = band & 1
        back = up != 0
        first, last = select(back, all_of_it - to, from_), select(back, all_of_it - from_, to)
        return Part(self.panels.unit(first, height, up), self.panels.unit(last, height, up), low, high)
