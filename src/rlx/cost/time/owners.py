"""Which core's caches hold what: lines that another core wrote, or still has, take long to come.

Memory is looked at in grains. What another core has, a core fetches from there. Lines that the other one has
changed go with all rights: who reads them may write them at once, and the other one has them no more. Lines
that several have read are copies: a write takes them away from the others, which takes five times as long.
"""

from __future__ import annotations

from math import prod

import numpy as np

from rlx.records import dataclass

GRAIN = 256  # bytes
MOST_RUNS = 1 << 18  # of a value that are looked at one by one
ALL = 255  # threads, as bits


@dataclass(frozen=True)
class Share:
    """How threads share the bytes that a kernel touches of a value: along an axis that goes `step` bytes
    further `extent` times, the value's first byte being at index `first`; a step of 0 means that every thread
    touches all of them."""

    step: int = 0
    extent: int = 1
    first: int = 0

    def of(self, nbytes: int) -> Share:
        """The same along the first axis of a value of so many bytes."""
        return Share(max(nbytes // max(self.extent, 1), 1), self.extent) if self.step else self


@dataclass(frozen=True)
class Box:
    """Elements of a value: the first, and the sizes and steps of axes, in bytes."""

    offset: int
    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    itemsize: int

    @property
    def end(self) -> int:
        """Bytes from its first to its last."""
        return self.itemsize + sum(s * (n - 1) for s, n in zip(self.steps, self.sizes, strict=True) if n)

    def grains(self) -> np.ndarray:
        """The grains that it touches, in ascending order."""
        run, axes = self.itemsize, list[tuple[int, int]]()
        for step, extent in sorted(zip(self.steps, self.sizes, strict=True)):
            if extent == 0:
                return np.empty(0, np.int64)
            if extent > 1 and step:
                if step <= max(run, GRAIN) and not axes:  # it leaves no grain out
                    run = step * (extent - 1) + run
                else:
                    axes.append((step, extent))
        if prod(extent for _, extent in axes) > MOST_RUNS:
            run, axes = self.end, []
        starts = np.array([self.offset], np.int64)
        for step, extent in axes:
            starts = (starts[:, None] + np.arange(extent, dtype=np.int64) * step).ravel()
        count = -(-run // GRAIN) + 1
        found = (starts[:, None] // GRAIN + np.arange(count, dtype=np.int64)).ravel()
        last = np.repeat((starts + run - 1) // GRAIN, count)
        return np.unique(found[found <= last])


@dataclass(frozen=True)
class Touched:
    """What a kernel met, in bytes by thread: what it fetches from others, and what it takes from those that
    have read it. `ages` says how many bytes were moved since each grain was touched before, `elapsed` how
    many picoseconds went by."""

    fetched: np.ndarray
    taken: np.ndarray
    ages: np.ndarray
    elapsed: np.ndarray


class Owners:
    """Which cores have each grain of memory, and whether the one that has it alone has changed it.

    >>> owners, row = Owners(), Box(0, (2, 256), (1024, 4), 4)
    >>> half = Share(1024, 2)  # a row for each of two threads
    >>> owners.touch("a", row, half, 2, True, 0, 1e6).fetched.tolist()
    [0.0, 0.0]
    >>> owners.touch("a", row, Share(4, 256), 2, False, 0, 1e6).fetched.tolist()  # half of every row
    [512.0, 512.0]
    """

    def __init__(self) -> None:
        self._copies: dict[str, np.ndarray] = {}  # a bit for each core
        self._changed: dict[str, np.ndarray] = {}
        self._times: dict[str, np.ndarray] = {}  # in bytes that were moved
        self._clocks: dict[str, np.ndarray] = {}  # in picoseconds

    def touch(
        self,
        space: str,
        place: Box,
        share: Share,
        threads: int,
        written: bool,
        now: float,
        kept: float,
        first: int = 0,
        clock: float = 0.0,
    ) -> Touched:
        """Let threads touch a value, from the `first` on. `now` is how many bytes were moved before, `clock`
        how many picoseconds; what was touched more than `kept` bytes ago, no core has.
        """
        grains = place.grains()
        if not len(grains):
            return Touched(np.zeros(threads), np.zeros(threads), np.zeros(1), np.zeros(1))
        self._reserve(space, int(grains[-1]) + 1)
        copies, times = self._copies[space], self._times[space]
        number = self._threads_at(grains * GRAIN - place.offset, share, threads, place.end)
        if number is None and written:
            number = np.zeros(len(grains), np.int64)  # the first thread does it alone
        near = times[grains] > now - kept
        had, changed = np.where(near, copies[grains], 0), near & self._changed[space][grains]
        several = (had & (had - 1)) != 0
        fetched, taken, has = np.zeros(threads), np.zeros(threads), np.zeros_like(had)
        for thread in range(threads):
            bit = 1 << (first + thread)
            mine = np.full(len(grains), True) if number is None else number == thread
            foreign, own = mine & ((had & (ALL - bit)) != 0), (had & bit) != 0
            shared = foreign & several if written else np.zeros_like(mine)
            fetched[thread] = GRAIN * (foreign & ~own & ~shared).sum()
            taken[thread] = GRAIN * shared.sum()
            has[mine] |= bit
        moved = changed & ((has & ~had) != 0)  # who reads what another one has changed, has it alone
        copies[grains] = has if written else np.where(moved, has, had | has)
        self._changed[space][grains] = True if written else changed & ~moved
        clocks = self._clocks[space]
        ages, elapsed = now - times[grains], clock - clocks[grains]
        times[grains], clocks[grains] = now, clock
        return Touched(fetched, taken, ages, elapsed)

    def _reserve(self, space: str, grains: int) -> None:
        had = self._copies.get(space)
        if had is None or len(had) < grains:
            size = max(grains, 2 * len(had) if had is not None else 0)
            copies, changed, times = np.zeros(size, np.uint8), np.zeros(size, bool), np.full(size, -np.inf)
            clocks = np.zeros(size)
            if had is not None:
                copies[: len(had)], changed[: len(had)] = had, self._changed[space]
                times[: len(had)], clocks[: len(had)] = self._times[space], self._clocks[space]
            self._copies[space], self._changed[space] = copies, changed
            self._times[space], self._clocks[space] = times, clocks

    def _threads_at(self, offsets: np.ndarray, share: Share, threads: int, end: int) -> np.ndarray | None:
        """The thread that touches each grain; None if every thread touches all."""
        if threads == 1 or not share.step:
            return None
        last = np.clip(offsets + (GRAIN - 1), 0, max(end - 1, 0))  # whoever writes last, has the grain
        place = (last // share.step + share.first) % max(share.extent, 1)
        found: np.ndarray = -(-(place + 1) * threads // max(share.extent, 1)) - 1
        return found
