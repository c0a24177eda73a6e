"""The symmetric heap in memory that all ranks of one machine share, and the control words in front of it.

Layout, everything page aligned; the mapping is sparse, so what is never touched costs nothing:

    header      what the heap is, so that a rank that attaches can check it
    entries     per rank: has it joined, which process is it, why did it end
    signals     per rank: SIGNALS counters, each next to its count of sleepers
    lines       per group and rank: epoch and posts of the barrier (see `sync`)
    records     per group and rank: the failure it has seen; one word says which one all members agree on
    stages      per group and rank: a ring of staging memory for arrays that are not in the heap
    heaps       per rank: heap_size bytes for the user
"""

from __future__ import annotations

import mmap
import os
import struct
from rlx.records import dataclass
from typing import Any

import numpy as np

from rlx.dist.errors import OutOfBounds, TransportError, UnknownRank
from rlx.dist.transports.remote import TOKEN_BYTES
from rlx.dist.native.sync import LINE_BYTES
from rlx.system import SYSTEM

PAGE = 4096
GROUPS = 64
SIGNALS = 64
SIGNAL_BYTES = 8
ENTRY_BYTES = RECORD_BYTES = 1024
# What is staged at once at most, and the ring of memory for it. Of three pieces in a row no two may overlap;
# so large a ring also comes round when its lines have left the other cores' caches (see `exchange`).
STAGE_BYTES = 1 << 20
RING_BYTES = 4 * STAGE_BYTES

_MAGIC = b"RLXHEAP1"
_HEADER = struct.Struct("<8sQQ")
_ENTRY = struct.Struct("<iiQH")  # state, then what must be there before it
_STATE, _PROCESS, _LENGTH = struct.Struct("=i"), struct.Struct("<iQ"), struct.Struct("<H")
_TOKEN = struct.Struct(f"<Q{TOKEN_BYTES}s")  # at the end of an entry

# States of a rank's entry.
ABSENT, JOINED, LEFT, FAILED = range(4)


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


@dataclass(frozen=True)
class _Layout:
    """Offsets of the parts in the mapping, and its whole size."""

    entries: int
    signals: int
    lines: int
    records: int
    stages: int
    heaps: int
    total: int

    @staticmethod
    def of(num_ranks: int, heap_size: int) -> _Layout:
        if num_ranks < 1 or heap_size < 0:
            raise TransportError(
                f"cannot create a heap of {num_ranks} ranks with {heap_size} bytes each; "
                "give at least 1 rank and 0 bytes"
            )
        per_rank = (ENTRY_BYTES, SIGNALS * SIGNAL_BYTES, GROUPS * LINE_BYTES, GROUPS * RECORD_BYTES)
        sizes = [*(_pages(num_ranks * size) for size in per_rank), num_ranks * GROUPS * RING_BYTES]
        sizes.append(num_ranks * _pages(heap_size))
        places = [PAGE]
        for size in sizes:
            places.append(places[-1] + size)
        return _Layout(*places)


class SymmetricHeap:
    """Memory of `num_ranks` equal heaps in one mapping.

    `SymmetricHeap(n, size)` is private to the process, for ranks that are threads. `SymmetricHeap.shared(n,
    size)` is in anonymous shared memory: `fileno()` is handed to the processes of the other ranks, which
    `attach`. It has no name, so nothing can be left behind.

    >>> heap = SymmetricHeap(2, 1000)
    >>> heap.num_ranks, heap.heap_size, heap.rank_view(1).nbytes
    (2, 1000, 1000)
    """

    def __init__(self, num_ranks: int, heap_size: int, *, _fd: int | None = None) -> None:
        self.num_ranks, self.heap_size = int(num_ranks), int(heap_size)
        self._layout = _Layout.of(self.num_ranks, self.heap_size)
        self._stride = _pages(self.heap_size)
        self._fd = _fd
        if _fd is None:
            self._map = SYSTEM.map_pages(self._layout.total, reserve=False)
        else:
            self._map = mmap.mmap(_fd, self._layout.total)
        if self._stride:
            SYSTEM.use_huge_pages(self._map, self._layout.heaps, self._layout.total - self._layout.heaps)
        self.bytes: np.ndarray = np.frombuffer(self._map, np.uint8)
        self.base = int(self.bytes.ctypes.data)

    @classmethod
    def shared(cls, num_ranks: int, heap_size: int) -> SymmetricHeap:
        """A heap in anonymous shared memory (a memfd), for ranks that are processes."""
        layout = _Layout.of(num_ranks, heap_size)
        fd = SYSTEM.shared_memory("rlx-heap")
        try:
            os.ftruncate(fd, layout.total)
            os.pwrite(fd, _HEADER.pack(_MAGIC, num_ranks, heap_size), 0)
            return cls(num_ranks, heap_size, _fd=fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int) -> SymmetricHeap:
        """The heap behind a file descriptor from `shared`, here or in another process; takes it over."""
        try:
            magic, num_ranks, heap_size = _HEADER.unpack(os.pread(fd, _HEADER.size, 0))
        except (OSError, struct.error) as error:
            raise TransportError(
                f"file descriptor {fd} is not a symmetric heap: {error}; use `rlx launch`"
            ) from error
        if magic != _MAGIC or os.fstat(fd).st_size != _Layout.of(num_ranks, heap_size).total:
            raise TransportError(f"file descriptor {fd} is not a symmetric heap of this version of RLX")
        return cls(num_ranks, heap_size, _fd=fd)

    def fileno(self) -> int:
        """The descriptor to hand to other processes."""
        if self._fd is None:
            raise TransportError("this heap is private to its process; create it with SymmetricHeap.shared")
        return self._fd

    def close(self) -> None:
        """Let go of the memory. Views that are still held keep it mapped until they go."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        self.bytes = np.empty(0, np.uint8)
        try:
            self._map.close()
        except BufferError:
            pass

    # ---- addresses

    def rank_view(self, rank: int) -> np.ndarray:
        """The heap of one rank, zero-copy."""
        start = self.heap_address(rank) - self.base
        return self.bytes[start : start + self.heap_size]

    def heap_address(self, rank: int) -> int:
        if not 0 <= rank < self.num_ranks:
            raise UnknownRank(rank, self.num_ranks)
        return self.base + self._layout.heaps + rank * self._stride

    def check(self, rank: int, offset: int, len: int) -> int:
        """Address of a region, which must be inside the rank's heap."""
        address = self.heap_address(rank)
        if offset < 0 or len < 0 or offset + len > self.heap_size:
            raise OutOfBounds(rank, offset, len, self.heap_size)
        return address + offset

    def line(self, group: int, rank: int) -> int:
        return self.base + self._layout.lines + (group * self.num_ranks + rank) * LINE_BYTES

    def record(self, group: int, rank: int) -> int:
        return self.base + self._layout.records + (group * self.num_ranks + rank) * RECORD_BYTES

    def stage(self, group: int, rank: int) -> int:
        return self.base + self._layout.stages + (group * self.num_ranks + rank) * RING_BYTES

    def signal(self, rank: int, number: int) -> int:
        if not 0 <= number < SIGNALS:
            raise TransportError(f"there is no signal {number}; use one of 0 to {SIGNALS - 1}")
        return self.base + self._layout.signals + (rank * SIGNALS + number) * SIGNAL_BYTES

    # ---- entries: who is there

    def write_entry(self, rank: int, state: int, pid: int = 0, started: int = 0, reason: str = "") -> None:
        """Say what became of a rank. Others may read at any moment, so its state, one aligned word, is
        written last; a process that has joined stays written down when it leaves or fails."""
        place = self._layout.entries + rank * ENTRY_BYTES
        if state == JOINED:
            self._write(place + _STATE.size, _PROCESS.pack(pid, started))
        else:
            text = reason.encode()[: ENTRY_BYTES - _ENTRY.size - _TOKEN.size]
            self._write(place + _ENTRY.size, text)
            self._write(place + _ENTRY.size - _LENGTH.size, _LENGTH.pack(len(text)))
        self._write(place, _STATE.pack(state))

    def _write(self, place: int, data: bytes) -> None:
        self._map[place : place + len(data)] = data

    def write_token(self, rank: int, address: int, token: bytes) -> None:
        """Say where in its own memory a rank has its token (see `remote`), and what it is."""
        _TOKEN.pack_into(
            self._map, self._layout.entries + (rank + 1) * ENTRY_BYTES - _TOKEN.size, address, token
        )

    def read_token(self, rank: int) -> tuple[int, bytes]:
        """(address, token) of a rank."""
        place = self._layout.entries + (rank + 1) * ENTRY_BYTES - _TOKEN.size
        address, token = _TOKEN.unpack_from(self._map, place)
        return address, token

    def read_entry(self, rank: int) -> tuple[int, int, int, str]:
        """(state, pid, start time, reason) of a rank."""
        place = self._layout.entries + rank * ENTRY_BYTES
        state, pid, started, length = _ENTRY.unpack_from(self._map, place)
        text = self._map[place + _ENTRY.size : place + _ENTRY.size + length]
        return state, pid, started, text.decode(errors="replace")
