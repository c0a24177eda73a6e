"""Panels of weights for products of bytes, four k at a time, that are exact for small weights only."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rlx.errors import InputError, ShapeError
from rlx.kernel.panels import Panels
from rlx.records import dataclass

GROUP = 4  # k of a step
LARGEST_PAIR = 128  # size of two weights together: 255 times as much is less than 2**15
OFFSET = 128  # what makes a signed byte an unsigned one, and back
MIDDLE = 64  # what is added to a weight of seven bits that waits
TOP = 127  # the largest number of seven bits


@dataclass(frozen=True)
class QuadPanels:
    """A matrix [k, n] of signed bytes in panels whose steps take four k.

    What a step can take depends on what multiplies. Two products of a signed byte and an unsigned one have a
    sum of 16 bits for any unsigned bytes if the two weights are at most `LARGEST_PAIR` together. Where
    weights have `seven` bits, they are the unsigned bytes: every column has an offset of its own, which is
    added to its weights, and those that then lie outside of 0..127 are cut. What is missing waits: the second
    weight of a pair that is too large, or the rest of a weight. After its steps, a panel has room for `room`
    more, each for any four k side by side; weights of seven bits have `MIDDLE` added there.

    Then come, as i32, what the sums of every column begin with where `OFFSET` was added to the bytes that it
    meets (or taken off, to make them signed), the offsets of columns where weights have seven bits, how many
    steps wait, and the first k of each.

    >>> QuadPanels(8, 3, columns=4, lanes=2, room=1).elements
    72
    """

    k: int
    n: int
    columns: int
    lanes: int
    room: int
    seven: bool = False

    def __post_init__(self) -> None:
        if self.k < GROUP or self.room < 0:
            raise ShapeError(f"panels of quads have at least {GROUP} k and no negative room, not {self}")

    @property
    def panels(self) -> Panels:
        """The same matrix without what waits."""
        return Panels(self.k, self.n, self.columns, self.lanes, GROUP)

    def room_at(self, width: int) -> int:
        """First byte of the steps in `room` of a panel of `width` columns."""
        return self.panels.depth * width

    def starts_at(self, width: int) -> int:
        """First byte of what the sums begin with."""
        return self.room_at(width) + self.room * GROUP * width

    def offsets_at(self, width: int) -> int:
        """First byte of the offsets of columns, where there are some."""
        return self.starts_at(width) + 4 * width

    def count_at(self, width: int) -> int:
        """First byte of the number of steps that wait."""
        return self.offsets_at(width) + (4 * width if self.seven else 0)

    def places_at(self, width: int) -> int:
        """First byte of the k at which they begin."""
        return self.count_at(width) + 4

    def panel_bytes(self, width: int) -> int:
        return self.places_at(width) + 4 * self.room

    @property
    def elements(self) -> int:
        panels = self.panels
        tail = self.panel_bytes(panels.tail) if panels.tail else 0
        return panels.full * self.panel_bytes(self.columns) + tail

    def _parts(self, packed: np.ndarray) -> Iterator[tuple[int, int, _Part]]:
        """Panel by panel: its first column, the column after its last one, views on its parts."""
        at = 0
        for first in range(0, self.n, self.columns):
            width = self.columns if first + self.columns <= self.n else self.panels.tail
            panel = packed[at : at + self.panel_bytes(width)]
            at += self.panel_bytes(width)
            yield first, min(first + width, self.n), _Part.of(self, panel, width)

    def pack(self, w: np.ndarray) -> np.ndarray:
        """The panels of a matrix, as bytes.

        >>> quads = QuadPanels(4, 1, columns=1, lanes=1, room=1)
        >>> quads.pack(np.array([[100], [-100], [3], [4]], np.int8))[:8]
        array([100,   0,   3,   4,   0, 156,   0,   0], dtype=uint8)
        """
        out = np.zeros(self.elements, np.uint8)
        wide = np.zeros((self.panels.depth, self.n), np.int16)
        wide[: self.k] = w
        taken, waiting, offsets = _cut_to_seven(wide) if self.seven else _cut_pairs(wide)
        sums = w.astype(np.int32).sum(0, dtype=np.int32) * (OFFSET if self.seven else -OFFSET)
        steps = taken.astype(np.int8).reshape(-1, GROUP, self.n).swapaxes(1, 2)
        for first, stop, part in self._parts(out):
            width = stop - first
            part.steps[:, :width] = steps[:, first:stop]
            part.starts[:width] = sums[first:stop]
            part.offsets[:width] = offsets[first:stop]
            found = list(self._more(waiting[:, first:stop]))
            if len(found) > self.room:
                raise InputError(
                    f"a matrix [{self.k},{self.n}] whose larger weights need {len(found)} steps does not fit "
                    f"where it was compiled with {self.room}; compile the program again with this value"
                )
            part.count[0] = len(found)
            for i, (place, values) in enumerate(found):
                part.places[i] = place
                part.more[i, :width] = values.T
        return out

    def _more(self, waiting: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """The steps of what waits in the columns of a panel: the first k of each, and its weights."""
        for quad, times in enumerate(_times(waiting, self.seven)):
            rows = np.arange(quad * GROUP, min(quad * GROUP + GROUP, self.k))
            place = min(quad * GROUP, self.k - GROUP)
            rest = np.zeros((GROUP, waiting.shape[1]), np.int16)
            rest[rows - place] = waiting[rows]
            for _ in range(times):
                now = np.clip(rest, -MIDDLE, MIDDLE - 1) if self.seven else rest
                yield place, (now + MIDDLE if self.seven else now).astype(np.int8)
                rest = rest - now

    def unpack(self, packed: np.ndarray) -> np.ndarray:
        """The matrix that panels hold."""
        out = np.zeros((self.panels.depth, self.n), np.int16)
        for first, stop, part in self._parts(np.ascontiguousarray(packed).view(np.uint8)):
            width = stop - first
            steps = part.steps[:, :width].swapaxes(1, 2).reshape(-1, width).astype(np.int16)
            out[:, first:stop] = steps - part.offsets[:width].astype(np.int16)
            count = min(int(part.count.view(np.uint32)[0]), self.room)
            for place, step in zip(part.places.view(np.uint32)[:count], part.more, strict=False):
                at = min(int(place), self.k - GROUP)
                out[at : at + GROUP, first:stop] += step[:width].T - np.int16(MIDDLE if self.seven else 0)
        return out[: self.k].astype(np.int8)

    def fault(self, packed: np.ndarray) -> str | None:
        """What is wrong with bytes that are not known to come from `pack`; kernels go where they point."""
        for _, _, part in self._parts(np.ascontiguousarray(packed).view(np.uint8)):
            if not 0 <= part.count[0] <= self.room:
                return f"panels of quads with more steps than their room of {self.room}"
            if np.any((part.places < 0) | (part.places > self.k - GROUP)):
                return f"panels of quads with a step outside of their {self.k} rows"
            if self.seven and min(part.steps.min(initial=0), part.more.min(initial=0)) < 0:
                return "panels of quads with a weight of more than seven bits"
        return None


@dataclass(frozen=True, eq=False)
class _Part:
    """Views on one panel: [step, column, k] of steps and of those that wait, what sums begin with, offsets
    of columns (zeros, if there are none), how many steps wait and where they begin."""

    steps: np.ndarray
    more: np.ndarray
    starts: np.ndarray
    offsets: np.ndarray
    count: np.ndarray
    places: np.ndarray

    @staticmethod
    def of(quads: QuadPanels, panel: np.ndarray, width: int) -> _Part:
        room, starts, offsets = quads.room_at(width), quads.starts_at(width), quads.offsets_at(width)
        count, places = quads.count_at(width), quads.places_at(width)
        return _Part(
            panel[:room].view(np.int8).reshape(-1, width, GROUP),
            panel[room:starts].view(np.int8).reshape(quads.room, width, GROUP),
            panel[starts:offsets].view(np.int32),
            panel[offsets:count].view(np.int32) if quads.seven else np.zeros(width, np.int32),
            panel[count:places].view(np.int32),
            panel[places:].view(np.int32),
        )


def _cut_pairs(w: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A matrix as the sum of one whose pairs of rows have sums of products in 16 bits, and of what waits;
    columns have no offsets."""
    sizes, waiting = np.abs(w), np.zeros_like(w)
    large = sizes[::2] + sizes[1::2] > LARGEST_PAIR
    waiting[1::2][large] = w[1::2][large]
    return w - waiting, waiting, np.zeros(w.shape[1], np.int16)


def _cut_to_seven(w: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A matrix in seven bits, each column with its offset added; what waits; the offsets."""
    offsets = _offsets(w)
    taken = np.clip(w, -offsets, TOP - offsets)
    return taken + offsets, w - taken, offsets


def _offsets(w: np.ndarray) -> np.ndarray:
    """For every column, what brings most of its weights into seven bits; of several, the nearest to the
    middle."""
    n, levels = w.shape[1], 2 * OFFSET
    places = w.astype(np.int64) + OFFSET + levels * np.arange(n)
    below = np.cumsum(np.bincount(places.reshape(-1), minlength=levels * n).reshape(n, levels), 1)
    offsets = np.array(sorted(range(OFFSET + 1), key=lambda o: abs(o - MIDDLE)))
    lowest = OFFSET - offsets  # level of the least weight that fits
    fit = below[:, lowest + TOP] - np.where(lowest > 0, below[:, lowest - 1], 0)
    found: np.ndarray = offsets[fit.argmax(1)].astype(np.int16)
    return found


def _times(waiting: np.ndarray, seven: bool) -> np.ndarray:
    """How many steps more each quad of rows needs; [k, columns] has whole quads."""
    parts = np.where(waiting > 0, -(-waiting // (MIDDLE - 1)), -(waiting // MIDDLE))
    sizes = parts if seven else waiting != 0
    times: np.ndarray = sizes.reshape(-1, GROUP * waiting.shape[1]).max(1, initial=0).astype(np.int64)
    return times


def room_for(w: np.ndarray, columns: int, seven: bool = False) -> int:
    """Steps that the larger weights of [k, n] need in the panel of `columns` columns that has most of them.

    >>> room_for(np.array([[100, 1], [-100, 1], [3, 1], [4, 1]], np.int8), columns=1)
    1
    """
    k, n = w.shape
    wide = np.zeros((-(-k // GROUP) * GROUP, n), np.int16)
    wide[:k] = w
    _, waiting, _ = _cut_to_seven(wide) if seven else _cut_pairs(wide)
    panels = (waiting[:, first : first + columns] for first in range(0, n, columns))
    return max((int(_times(panel, seven).sum()) for panel in panels), default=0)
