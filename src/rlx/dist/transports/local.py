"""Ranks that are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Self, TypeVar

from rlx.config import DIST_TIMEOUT
from rlx.dist.errors import TransportError, UnknownRank
from rlx.dist.heap import ABSENT, JOINED, SymmetricHeap
from rlx.dist.transports.mapped import MappedTransport, RankState

T = TypeVar("T")


class LocalTransport(MappedTransport):
    """One rank of a job whose ranks are threads.

    `LocalTransport.fan_out(n, heap_size)` creates one transport per thread. A lone `LocalTransport(n, size,
    rank)` has its own heap; give it `heap=` to meet others. A rank counts as dead when the thread that last
    used its transport has ended.

    >>> import numpy as np, rlx.dist as dist
    >>> def work(transport):
    ...     return dist.all_reduce(transport, None, np.full(2, transport.this_rank + 1.0))
    >>> run_threads(3, work)
    [array([6., 6.]), array([6., 6.]), array([6., 6.])]
    """

    def __init__(
        self,
        num_ranks: int,
        heap_size: int,
        this_rank: int,
        *,
        heap: SymmetricHeap | None = None,
        timeout: float | None = None,
    ) -> None:
        heap = heap or SymmetricHeap(num_ranks, heap_size)
        if (heap.num_ranks, heap.heap_size) != (num_ranks, heap_size):
            raise TransportError(
                f"the heap given has {heap.num_ranks} ranks of {heap.heap_size} bytes; "
                f"pass the same numbers, not {num_ranks} of {heap_size}"
            )
        if not 0 <= this_rank < num_ranks:
            raise UnknownRank(this_rank, num_ranks)
        self._threads = _threads_of(heap)
        state = RankState(heap, int(this_rank), DIST_TIMEOUT.get() if timeout is None else timeout)
        super().__init__(state, 0, tuple(range(num_ranks)))

    @classmethod
    def fan_out(cls, num_ranks: int, heap_size: int, timeout: float | None = None) -> list[Self]:
        """One transport per rank over a common heap, to be handed to the threads."""
        heap = SymmetricHeap(num_ranks, heap_size)
        return [cls(num_ranks, heap_size, rank, heap=heap, timeout=timeout) for rank in range(num_ranks)]

    def _enter(self) -> None:
        super()._enter()
        rank, thread = self._state.rank, threading.current_thread()
        if self._threads[rank] is not thread:
            self._threads[rank] = thread
            if self._heap.read_entry(rank)[0] == ABSENT:
                self._heap.write_entry(rank, JOINED)

    def _cause_of_death(self, rank: int) -> str | None:
        thread = self._threads[rank]
        return None if thread is None or thread.is_alive() else f"ended: its thread {thread.name} is over"

    def _about(self, rank: int) -> str:
        thread = self._threads[rank]
        return "never joined" if thread is None else f"is late, in thread {thread.name}"

    def _regroup(self, group: int, members: tuple[int, ...]) -> Self:
        made = type(self).__new__(type(self))
        made._threads = self._threads
        MappedTransport.__init__(made, self._state, group, members)
        return made


def _threads_of(heap: SymmetricHeap) -> list[threading.Thread | None]:
    """Who uses the ranks of a heap; the list belongs to the heap, because its transports share it."""
    threads: list[threading.Thread | None] = heap.__dict__.setdefault("threads", [None] * heap.num_ranks)
    return threads


def run_threads(
    num_ranks: int,
    work: Callable[[LocalTransport], T],
    heap_size: int = 1 << 20,
    timeout: float | None = None,
) -> list[T]:
    """Run `work(transport)` on every rank in its own thread and return the results in rank order.

    The first rank that raises is named to the others, and its error is raised here when all threads are over.
    """
    transports = LocalTransport.fan_out(num_ranks, heap_size, timeout)
    results: list[T | None] = [None] * num_ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with transports[rank] as transport:
                results[rank] = work(transport)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results  # type: ignore[return-value]
