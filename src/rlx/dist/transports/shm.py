"""Ranks that are processes of one machine, with the heap in anonymous shared memory."""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from typing import Self

from rlx.config import DIST_TIMEOUT
from rlx.dist.transports import remote
from rlx.dist.errors import TransportError, UnknownRank
from rlx.dist.heap import ABSENT, JOINED, SymmetricHeap
from rlx.dist.transports.mapped import MappedTransport, RankState
from rlx.system import SYSTEM


class SharedMemoryTransport(MappedTransport):
    """One rank of a job whose ranks are processes on this machine.

    `rlx launch` starts the processes and hands them the heap; `rlx.dist.init()` then creates this transport.
    Without the launcher: create `SymmetricHeap.shared(n, size)`, pass its descriptor to the children, and
    `attach` there.

    >>> heap = SymmetricHeap.shared(1, 4096)
    >>> with SharedMemoryTransport(heap, 0) as transport:
    ...     transport.barrier()
    """

    def __init__(self, heap: SymmetricHeap, this_rank: int, timeout: float | None = None) -> None:
        if not 0 <= this_rank < heap.num_ranks:
            raise UnknownRank(this_rank, heap.num_ranks)
        joined, pid, started, _ = heap.read_entry(this_rank)
        if joined == JOINED and not process_is_gone(pid, started):
            raise TransportError(
                f"rank {this_rank} has already joined as process {pid}; give each process its own rank"
            )
        if joined != ABSENT:
            raise TransportError(
                f"rank {this_rank} of this heap was used before; create a new heap for a new job"
            )
        state = RankState(heap, int(this_rank), DIST_TIMEOUT.get() if timeout is None else timeout)
        super().__init__(state, 0, tuple(range(heap.num_ranks)))
        self._pid, self._token = os.getpid(), remote.Token()
        heap.write_token(this_rank, self._token.address, self._token.value)
        heap.write_entry(this_rank, JOINED, self._pid, process_started(self._pid))
        # Who ends without closing has left, not died; a forked child is not this rank.
        atexit.register(self.close)

    @classmethod
    def attach(cls, fd: int, this_rank: int, timeout: float | None = None) -> Self:
        """Join the heap behind a descriptor that this process inherited, and take the descriptor over."""
        return cls(SymmetricHeap.attach(fd), this_rank, timeout)

    def close(self) -> None:
        """Leave, and let go of the memory as soon as no view of it is held."""
        if os.getpid() != self._pid or self._state.closed:
            return
        super().close()
        if self._group == 0:
            atexit.unregister(self.close)
            self._heap.close()

    def _readable(self) -> Sequence[int] | None:
        pids = []
        for rank in self._members:
            state, pid, _, _ = self._heap.read_entry(rank)
            if state != JOINED:
                return None
            pids.append(pid)
        tokens = [self._heap.read_token(rank) for rank in self._members]
        pairs = zip(pids, tokens, strict=True)
        found = all(remote.read(pid, address, len(token)) == token for pid, (address, token) in pairs)
        return pids if found else ()

    def _cause_of_death(self, rank: int) -> str | None:
        _, pid, started, _ = self._heap.read_entry(rank)
        return f"died: its process {pid} is gone" if process_is_gone(pid, started) else None

    def _about(self, rank: int) -> str:
        state, pid, _, _ = self._heap.read_entry(rank)
        return "never joined" if state == ABSENT else f"is late: its process {pid} is {process_state(pid)}"

    def _regroup(self, group: int, members: tuple[int, ...]) -> Self:
        made = type(self).__new__(type(self))
        made._pid, made._token = self._pid, self._token
        MappedTransport.__init__(made, self._state, group, members)
        return made


def process_started(pid: int) -> int:
    """Start time of a living process in clock ticks, 0 if it is gone or only waits to be reaped.

    Together with the pid it names one process for good: a reused pid has another start time.
    """
    fields = SYSTEM.process_fields(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else 0


def process_is_gone(pid: int, started: int) -> bool:
    """Whether the process that was started then has ended.

    It is not if that is unknown: where this process may open no more files, all others would look dead.
    """
    try:
        return process_started(pid) != started
    except OSError:
        return False


def process_state(pid: int) -> str:
    """What a process is doing, for people."""
    try:
        fields = SYSTEM.process_fields(pid)
    except OSError:
        return "in a state that cannot be read"
    names = {
        "R": "running",
        "S": "sleeping",
        "D": "waiting for a device",
        "T": "stopped",
        "t": "being traced",
    }
    return names.get(fields[0], "gone") if fields else "gone"
