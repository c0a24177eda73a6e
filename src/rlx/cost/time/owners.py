"""Which core's caches hold what: lines that another core wrote, or still has, take long to come.

Memory is looked at in grains. A read of a grain that another core wrote last fetches it from there; a write
first takes it away from every core that has it. What a core touched before is its own.
"""

from __future__ import annotations

from math import prod

import numpy as np

from rlx.records import dataclass

GRAIN = 256  # bytes
MOST_RUNS = 1 << 18  # of a value that are looked at one by one
NOBODY = -1
ALL = 255  # threads, as bits


@dataclass(frozen=True)
class Share:
    """How threads share the bytes that a kernel touches of a value: along an axis that goes `step` bytes
    further `extent` times; a step of 0 means that every thread touches all of them."""

    step: int = 0
    extent: int = 1

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
    """What a kernel met: bytes that the thread waits for that fetches most from others, and how many bytes
    were moved since each grain was touched before."""

    foreign: float
    ages: np.ndarray


class Owners:
    """Who wrote every grain of memory last, and who has a copy of it.

    >>> owners, row = Owners(), Box(0, (2, 256), (1024, 4), 4)
    >>> half = Share(1024, 2)  # a row for each of two threads
    >>> owners.touch("a", row, half, 2, True, 0, 1e6).foreign
    0.0
    >>> owners.touch("a", row, Share(4, 256), 2, False, 0, 1e6).foreign  # half of every row
    512.0
    """

    def __init__(self) -> None:
        self._writers: dict[str, np.ndarray] = {}
        self._copies: dict[str, np.ndarray] = {}
        self._times: dict[str, np.ndarray] = {}

    def touch(
        self, space: str, place: Box, share: Share, threads: int, written: bool, now: float, kept: float
    ) -> Touched:
        """Let threads touch a value. `now` is how many bytes were moved before; what was touched more than
        `kept` bytes ago, no core has.
        """
        grains = place.grains()
        if not len(grains):
            return Touched(0.0, np.zeros(1))
        self._reserve(space, int(grains[-1]) + 1)
        writers, copies = self._writers[space], self._copies[space]
        times = self._times[space]
        number = self._threads_at(grains * GRAIN - place.offset, share, threads, place.end)
        worst = 0
        for thread in range(threads):
            mine = grains if number is None else grains[number == thread]
            had, bit = copies[mine], 1 << thread
            near = times[mine] > now - kept
            apart = near & (writers[mine] != NOBODY) & (writers[mine] != thread)
            foreign = apart | (near & ((had & (ALL - bit)) != 0)) if written else apart & ((had & bit) == 0)
            worst = max(worst, int(foreign.sum()))
            if written:
                writers[mine], copies[mine] = thread, bit
            elif number is None:
                copies[mine] = had | bit
            else:  # who alone reads what another core has changed, has it from then on
                writers[mine[apart]] = thread
                copies[mine] = np.where(apart, bit, had | bit)
        ages = now - times[grains]
        times[grains] = now
        return Touched(float(worst * GRAIN), ages)

    def _reserve(self, space: str, grains: int) -> None:
        had = self._writers.get(space)
        if had is None or len(had) < grains:
            size = max(grains, 2 * len(had) if had is not None else 0)
            writers, copies = np.full(size, NOBODY, np.int8), np.zeros(size, np.uint8)
            times = np.full(size, -np.inf)
            if had is not None:
                writers[: len(had)], copies[: len(had)] = had, self._copies[space]
                times[: len(had)] = self._times[space]
            self._writers[space], self._copies[space], self._times[space] = writers, copies, times

    def _threads_at(self, offsets: np.ndarray, share: Share, threads: int, end: int) -> np.ndarray | None:
        """The thread that touches each grain; None if every thread touches all."""
        if threads == 1 or not share.step:
            return None
        last = np.clip(offsets + (GRAIN - 1), 0, max(end - 1, 0))  # whoever writes last, has the grain
        place = last // share.step % max(share.extent, 1)
        found: np.ndarray = place * threads // max(share.extent, 1)
        return found
