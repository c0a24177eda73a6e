"""Panels of weights for products of bytes that are summed in pairs in 16 bits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rlx.errors import InputError, ShapeError
from rlx.kernel.panels import Panels
from rlx.records import dataclass

GROUP = 4  # k of a step
LARGEST_PAIR = 128  # size of two weights together: 255 times as much is less than 2**15
OFFSET = 128  # what makes a signed byte an unsigned one


@dataclass(frozen=True)
class QuadPanels:
    """A matrix [k, n] of signed bytes in panels whose steps take four k, in two pairs.

    The products of a pair with any unsigned bytes have a sum of 16 bits if the two weights are at most
    `LARGEST_PAIR` together. The second weight of a larger pair waits: after its steps, a panel has room for
    `room` more, each for any four k side by side. Then come, as i32, what the sums of every column begin
    with where `OFFSET` was added to the bytes that it meets, how many steps wait, and the first k of each.

    >>> QuadPanels(8, 3, columns=4, lanes=2, room=1).elements
    72
    """

    k: int
    n: int
    columns: int
    lanes: int
    room: int

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

    def count_at(self, width: int) -> int:
        """First byte of the number of steps that wait."""
        return self.starts_at(width) + 4 * width

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
        wide = np.zeros((self.panels.depth, self.n), np.int8)
        wide[: self.k] = w
        large = _large(wide)
        waiting = np.zeros_like(wide)
        waiting[1::2][large] = wide[1::2][large]
        sums = w.astype(np.int32).sum(0, dtype=np.int32) * -OFFSET
        steps = (wide - waiting).reshape(-1, GROUP, self.n).swapaxes(1, 2)
        for first, stop, part in self._parts(out):
            part.steps[:, : stop - first] = steps[:, first:stop]
            part.starts[: stop - first] = sums[first:stop]
            found = np.flatnonzero(large[:, first:stop].reshape(-1, 2 * (stop - first)).any(1))
            if len(found) > self.room:
                raise InputError(
                    f"a matrix [{self.k},{self.n}] whose larger weights need {len(found)} steps does not fit "
                    f"where it was compiled with {self.room}; compile the program again with this value"
                )
            part.count[0] = len(found)
            for i, quad in enumerate(found):
                rows = np.arange(int(quad) * GROUP, min(int(quad) * GROUP + GROUP, self.k))
                part.places[i] = place = min(int(quad) * GROUP, self.k - GROUP)
                part.more[i, : stop - first, rows - place] = waiting[rows, first:stop]
        return out

    def unpack(self, packed: np.ndarray) -> np.ndarray:
        """The matrix that panels hold."""
        out = np.zeros((self.panels.depth, self.n), np.int8)
        for first, stop, part in self._parts(np.ascontiguousarray(packed).view(np.uint8)):
            out[:, first:stop] = part.steps[:, : stop - first].swapaxes(1, 2).reshape(-1, stop - first)
            count = min(int(part.count.view(np.uint32)[0]), self.room)
            for place, step in zip(part.places.view(np.uint32)[:count], part.more, strict=False):
                at = min(int(place), self.k - GROUP)
                out[at : at + GROUP, first:stop] += step[: stop - first].T
        return out[: self.k]

    def fault(self, packed: np.ndarray) -> str | None:
        """What is wrong with bytes that are not known to come from `pack`; kernels go where they point."""
        for _, _, part in self._parts(np.ascontiguousarray(packed).view(np.uint8)):
            if not 0 <= part.count[0] <= self.room:
                return f"panels of quads with more steps than their room of {self.room}"
            if np.any((part.places < 0) | (part.places > self.k - GROUP)):
                return f"panels of quads with a step outside of their {self.k} rows"
        return None


@dataclass(frozen=True, eq=False)
class _Part:
    """Views on one panel: [step, column, k] of steps and of those that wait, what sums begin with, how many
    wait and where they begin."""

    steps: np.ndarray
    more: np.ndarray
    starts: np.ndarray
    count: np.ndarray
    places: np.ndarray

    @staticmethod
    def of(quads: QuadPanels, panel: np.ndarray, width: int) -> _Part:
        room, starts = quads.room_at(width), quads.starts_at(width)
        count, places = quads.count_at(width), quads.places_at(width)
        return _Part(
            panel[:room].view(np.int8).reshape(-1, width, GROUP),
            panel[room:starts].view(np.int8).reshape(quads.room, width, GROUP),
            panel[starts:count].view(np.int32),
            panel[count:places].view(np.int32),
            panel[places:].view(np.int32),
        )


def _large(w: np.ndarray) -> np.ndarray:
    """Which pairs of rows do not fit 16 bits, by column."""
    sizes = np.abs(w.astype(np.int16))
    large: np.ndarray = sizes[::2] + sizes[1::2] > LARGEST_PAIR
    return large


def room_for(w: np.ndarray, columns: int) -> int:
    """Steps that the larger weights of [k, n] need in the panel of `columns` columns that has most of them.

    >>> room_for(np.array([[100, 1], [-100, 1], [3, 1], [4, 1]], np.int8), columns=1)
    1
    """
    k, n = w.shape
    wide = np.zeros((-(-k // GROUP) * GROUP, -(-n // columns) * columns), np.int8)
    wide[:k, :n] = w
    quads = _large(wide).reshape(-1, 2, wide.shape[1] // columns, columns)
    return int(quads.any((1, 3)).sum(0).max(initial=0))
