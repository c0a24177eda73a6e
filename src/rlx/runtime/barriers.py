"""Which threads run a call, and where all of them must meet first.

Calls that touch each other's memory (one of them writing) must not overlap in time. Two calls of one thread
never do, so only calls of different threads need a barrier between them:

- A call with little work is given to one thread: that of the small calls before it whose results it reads,
  else the one that has least to do. A chain of small calls runs without any barrier.
- Calls of all threads meet only where the bytes they touch say so. Kernels that read the same value and write
  different ones follow each other freely.
- Wherever a jump may lead, all threads meet: what ran before depends on the way there.

Results do not depend on any of this: a kernel has the same bits on any number of threads. `verify` proves a
list of calls without using how it was settled.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field

from rlx.errors import PlanError
from rlx.records import dataclass
from rlx.target.prices import FEW_PS, SMALL_PS

ALL = -1  # every thread takes its share
EVERYWHERE = (0, 1 << 62)  # bytes of a place whose size does not matter
TOGETHER = -1  # the space of all bound values that may share memory


@dataclass(frozen=True)
class Span:
    """Bytes start..end of a space: of all addresses (None), or of a value that is bound at every run."""

    space: int | None
    start: int
    end: int


@dataclass
class Mark:
    """A place in a list of calls that jumps go to."""

    at: int = -1


@dataclass
class Turn:
    """What deciding about one call needs: what it touches, how long it takes, and where it may lead.

    `alone` calls must run on one thread. All threads meet before those that `wait_for_all`, and after those
    that `all_wait_for`. `owner` and `meets` are the decision: the thread that runs it (or ALL), and whether
    all threads meet before it.
    """

    reads: list[Span] = field(default_factory=list)
    writes: list[Span] = field(default_factory=list)
    work: int = 0
    alone: bool = False
    waits_for_all: bool = False
    all_wait_for: bool = False
    to: Mark | None = None
    owner: int = ALL
    meets: bool = True


class _Bytes:
    """A set of bytes as ranges, united where they meet: a list of thousands of calls is settled at once."""

    def __init__(self) -> None:
        self.starts: list[int] = []  # of disjoint ranges, in order
        self.ends: list[int] = []

    def add(self, start: int, end: int) -> None:
        first, last = bisect_left(self.ends, start), bisect_left(self.starts, end + 1)
        if first < last:
            start, end = min(start, self.starts[first]), max(end, self.ends[last - 1])
        self.starts[first:last], self.ends[first:last] = [start], [end]

    def touch(self, start: int, end: int) -> bool:
        before = bisect_left(self.starts, end)
        return before > 0 and self.ends[before - 1] > start


class _Epoch:
    """What has been touched since the last barrier, and by whom."""

    def __init__(self, threads: int) -> None:
        self.reads: dict[int | None, dict[int, _Bytes]] = {}  # by space and owner
        self.writes: dict[int | None, dict[int, _Bytes]] = {}
        self.load = [0] * threads

    def add(self, turn: Turn) -> None:
        for spans, seen in ((turn.reads, self.reads), (turn.writes, self.writes)):
            for s in spans:
                owners = seen.setdefault(s.space, {})
                if turn.owner not in owners:
                    owners[turn.owner] = _Bytes()
                owners[turn.owner].add(s.start, s.end)
        if turn.owner != ALL:
            self.load[turn.owner] += turn.work

    def in_the_way(self, turn: Turn) -> set[int]:
        """Owners of what a call must not overlap in time."""
        found: set[int] = set()
        for spans, seen in ((turn.reads, self.writes), (turn.writes, self.writes), (turn.writes, self.reads)):
            for s in spans:
                found |= {o for o, held in seen.get(s.space, {}).items() if held.touch(s.start, s.end)}
        return found

    def least_busy(self) -> int:
        """The first thread, unless it has much more to do than another."""
        least = min(range(len(self.load)), key=self.load.__getitem__)
        return least if self.load[0] - self.load[least] > SMALL_PS else 0


@contextmanager
def all_shared() -> Iterator[None]:
    """Programs that first run here share every call among all threads, however small: tests of shares.

    >>> small = [Turn([], [], 1000)]
    >>> with all_shared():
    ...     settle(small, threads=2)
    >>> small[0].owner == ALL
    True
    """
    global SMALL_PS, FEW_PS
    before = SMALL_PS, FEW_PS
    SMALL_PS = FEW_PS = 0
    try:
        yield
    finally:
        SMALL_PS, FEW_PS = before


def settle(turns: Sequence[Turn], threads: int) -> None:
    """Decide about all calls of a list, in its order.

    >>> x, y, z = (Span(None, at, at + 64) for at in (0, 64, 128))
    >>> chain = [Turn([x], [y], 1000), Turn([y], [z], 9_000_000), Turn([x], [Span(7, 0, 9)], 9_000_000)]
    >>> settle(chain, threads=2)
    >>> [(t.owner, t.meets) for t in chain]
    [(0, False), (-1, True), (-1, False)]
    """
    targets = {t.to.at for t in turns if t.to is not None}
    loops = any(t.to is not None and t.to.at <= i for i, t in enumerate(turns))
    few = not loops and sum(t.work for t in turns) < FEW_PS
    epoch = _Epoch(threads)
    awaited = False
    for i, turn in enumerate(turns):
        single = turn.to is None and (turn.alone or few or turn.work < SMALL_PS)
        turn.meets = i in targets or (bool(i) and (awaited or turn.waits_for_all))
        turn.owner = 0 if single else ALL
        if not turn.meets:
            others = epoch.in_the_way(turn)
            if single:
                turn.owner = 0 if few else epoch.least_busy() if not others else min(others)
            turn.meets = bool(others - {turn.owner}) or ALL in others
        if turn.meets:
            epoch = _Epoch(threads)
            turn.owner = 0 if single else ALL
        epoch.add(turn)
        awaited = turn.all_wait_for


def verify(turns: Sequence[Turn]) -> None:
    """Prove that a barrier separates any two calls of different threads that touch the same bytes, on every
    path through the list; or raise a PlanError that names them."""
    open_before: list[set[int]] = [set() for _ in turns]  # calls that may still run when this one begins
    waiting = list(range(len(turns) - 1, -1, -1))
    while waiting:
        i = waiting.pop()
        after = (set() if turns[i].meets else set(open_before[i])) | {i}
        for following in _following(turns, i):
            if following < len(turns) and not after <= open_before[following]:
                open_before[following] |= after
                waiting.append(following)
    for i, turn in enumerate(turns):
        for j in () if turn.meets else sorted(open_before[i]):
            if turn.waits_for_all or turns[j].all_wait_for:
                raise PlanError(f"call {j} may still run when call {i} begins; a barrier is missing")
            if not _one_thread(turn, turns[j]) and _touch(turn, turns[j]):
                raise PlanError(f"calls {j} and {i} touch the same bytes; a barrier is missing between them")


def _following(turns: Sequence[Turn], i: int) -> Iterator[int]:
    yield i + 1
    to = turns[i].to
    if to is not None:
        yield to.at


def _one_thread(a: Turn, b: Turn) -> bool:
    return a.owner == b.owner != ALL


def _touch(a: Turn, b: Turn) -> bool:
    pairs = ((a.writes, b.writes), (a.writes, b.reads), (a.reads, b.writes))
    return any(
        x.space == y.space and x.start < y.end and y.start < x.end for xs, ys in pairs for x in xs for y in ys
    )
