"""What a kernel does, whatever its kind: instructions of one core, shares of threads, bytes that it moves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import field
from math import ceil

from rlx.cost.time.owners import Box, Share
from rlx.cost.time.reads import Read, Size
from rlx.records import dataclass
from rlx.target.cpu import Target
from rlx.target.rates import Rates

BESIDE = 2.0  # exponent of the norm of times side by side; infinite: the longest alone counts
ANY_SHARE = 1 << 30  # units of work that threads share evenly


@dataclass(frozen=True)
class Setting:
    """Where a kernel runs, and with what. Operands are numbered, and results follow them."""

    target: Target
    size: Size
    strides: tuple[tuple[int, ...], ...]  # of operands, in elements
    nbytes: tuple[int, ...]
    itemsizes: tuple[int, ...]

    @property
    def operands(self) -> int:
        """How many there are; it is also the number of the first result."""
        return len(self.strides)

    @property
    def rates(self) -> Rates:
        return self.target.rates

    @property
    def lanes(self) -> int:
        return self.target.lanes("f32")


@dataclass(frozen=True)
class Traffic:
    """Bytes of an operand or result, by number, that a kernel moves once through the caches."""

    operand: int
    nbytes: float
    strided: bool = False
    share: Share = Share()
    box: Box | None = None  # the part of the operand that is touched; None: all of it
    waits: bool = False  # whether nothing is computed meanwhile


@dataclass
class Work:
    """A kernel at known sizes."""

    compute_ps: float = field(default=0.0)
    units: int = ANY_SHARE
    traffic: list[Traffic] = field(default_factory=list)
    lines: int = 8  # of code that come one after the other
    inner: dict[str, float] = field(default_factory=dict)  # bytes between a core and a cache, beyond operands

    def add_inner(self, cache: str, nbytes: float) -> None:
        """Bytes that a kernel reads again from a cache, or moves through scratch there."""
        self.inner[cache] = self.inner.get(cache, 0.0) + nbytes

    def read(self, operand: int, nbytes: float, share: Share) -> None:
        """Move bytes of an operand or result."""
        self.traffic.append(Traffic(operand, nbytes, False, share))

    def end(
        self, at: Setting, reads: Iterable[Read], space: Sequence[int], stores: int, share: Share
    ) -> None:
        """Move what an epilogue reads, and the results; values as large as a result are shared as it is."""
        seen, first = {t.operand for t in self.traffic}, at.operands
        for read in reads:
            if read.operand not in seen:
                seen.add(read.operand)
                whole = at.nbytes[read.operand]
                alike = share if whole == at.nbytes[first] else Share()
                self.read(read.operand, read.footprint(space, whole), alike)
        for result in range(first, first + stores):
            self.read(result, at.nbytes[result], share)

    def speedup(self, threads: int) -> float:
        """How much faster threads are than one, as shares are whole units."""
        units = max(self.units, 1)
        return units / ceil(units / threads)


def level_ps(rates: Rates, cache: str, nbytes: float, threads: float) -> float:
    """The time in which so many bytes pass between cores and a cache."""
    if cache == "memory":
        return 1000 * nbytes / min(rates.memory_rate * threads, rates.all_memory_rate)
    rate = {"l1": rates.l1_rate, "l2": rates.l2_rate, "l3": rates.l3_rate}[cache]
    return 1000 * nbytes / (rate * threads)


def kernel_ps(
    rates: Rates, work: Work, levels: Sequence[dict[str, float]], threads: int, foreign_ps: float
) -> float:
    """The time of a kernel: its launch, and the slowest of instructions and of traffic at each level.

    `levels` says, for each item of traffic, which part of it is found in which cache; `foreign_ps` is the
    time in which a core gets what another one has.
    """
    share = work.speedup(threads)
    bytes_at, waiting = dict(work.inner), 0.0
    for traffic, found in zip(work.traffic, levels, strict=True):
        for cache, part in found.items():
            factor = rates.strided if traffic.strided and cache != "l1" else 1.0
            nbytes = traffic.nbytes * part * factor
            if traffic.waits:
                waiting += level_ps(rates, cache, nbytes, share)
            else:
                bytes_at[cache] = bytes_at.get(cache, 0.0) + nbytes
    moving = (level_ps(rates, cache, nbytes, share) for cache, nbytes in bytes_at.items())
    return rates.launch_ps + slowest([work.compute_ps / share + waiting, foreign_ps, *moving])


def slowest(times: Sequence[float]) -> float:
    """The longest of things that happen next to each other; those that take nearly as long disturb it.

    >>> slowest([10.0, 1.0]) < 10.1, round(slowest([10.0, 10.0]), 1)
    (True, 14.1)
    """
    longest = max(times, default=0.0)
    return longest * sum((t / longest) ** BESIDE for t in times) ** (1 / BESIDE) if longest else 0.0
