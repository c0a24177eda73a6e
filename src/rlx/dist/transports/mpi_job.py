"""What one rank has to do with MPI: the communicator, messages sent and answered, the heap of its host."""

from __future__ import annotations

import faulthandler
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field
from rlx.records import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from rlx.dist.allocator import SymmetricAllocator
from rlx.dist.errors import TransportError
from rlx.errors import how_to_install
from rlx.dist.heap import SymmetricHeap
from rlx.dist.transport import Array

if TYPE_CHECKING:
    from mpi4py.MPI import Comm, Request

# Channels: a message tag is group * CHANNELS + channel.
POSTS, DATA, PUTS, SIGNALS, FAILURES, GETS, REPLIES, CHANNELS = 0, 1, 2, 3, 4, 5, 6, 8
KEPT_MESSAGES = 64

_HEADER = struct.Struct("<qqq")


def _start_mpi() -> ModuleType:
    """mpi4py; its import starts MPI, which waits for all ranks."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise TransportError(f"MPI is not available ({error}); {how_to_install('mpi')}") from error
    return MPI


@contextmanager
def _end_process_after(seconds: float) -> Iterator[None]:
    """End this process, with a traceback, if the block takes longer.

    The start of MPI waits for a missing rank for ever and holds the GIL, so only a C thread can watch it.
    """
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@dataclass
class Pending:
    """Requests under way, the rank that each one waits for, and buffers that must outlive them."""

    requests: list[Request] = field(default_factory=list)
    peers: list[int] = field(default_factory=list)
    buffers: list[Array] = field(default_factory=list)

    def add(self, request: Request, peer: int, buffer: Array) -> None:
        self.requests.append(request)
        self.peers.append(peer)
        self.buffers.append(buffer)

    def keep(self, places: Sequence[int]) -> None:
        """Forget all but these."""
        self.requests[:] = [self.requests[i] for i in places]
        self.peers[:] = [self.peers[i] for i in places]
        self.buffers[:] = [self.buffers[i] for i in places]


class MpiJob:
    """What all groups of one rank have in common: the communicator, and the heaps of its host."""

    def __init__(self, comm: Comm | None, heap_size: int, timeout: float, share: bool) -> None:
        self.timeout = timeout
        self.allocator = SymmetricAllocator(heap_size)
        self.heap_size = heap_size
        with _end_process_after(timeout):
            self.MPI = _start_mpi()
            self.comm = (comm or self.MPI.COMM_WORLD).Dup()
            self.comm.Set_errhandler(self.MPI.ERRORS_RETURN)
            self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
            self._share_heap(share)
        self.signals: dict[int, int] = {}
        self.outgoing = Pending()
        self.next_group = 1
        self.closed = False

    def _share_heap(self, wanted: bool) -> None:
        """One heap for all ranks of this host, or a private one where they cannot share it."""
        host = self.comm.Split_type(self.MPI.COMM_TYPE_SHARED, key=self.rank)
        self.host: list[int] = host.allgather(self.rank)
        heap = SymmetricHeap.shared(len(self.host), self.heap_size) if host.Get_rank() == 0 else None
        pid, descriptor = host.bcast((os.getpid(), heap.fileno()) if heap else None)
        try:
            if heap is None:
                heap = SymmetricHeap.attach(os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC))
            attached = wanted
        except OSError:
            attached = False
        self.shared = all(host.allgather(attached))
        if not self.shared:
            if heap is not None:
                heap.close()
            heap, self.host = SymmetricHeap(1, self.heap_size), [self.rank]
        assert heap is not None
        self.heap, self.index = heap, self.host.index(self.rank)
        host.Free()

    def send(self, rank: int, tag: int, number: int, offset: int, data: Array) -> None:
        """Send without waiting: the message is copied, so the caller may go on and change `data`."""
        message = np.concatenate([np.frombuffer(_HEADER.pack(number, offset, data.nbytes), np.uint8), data])
        request = self.comm.Isend([message, self.MPI.BYTE], rank, tag)
        self.outgoing.add(request, rank, message)

    def receive(self, rank: int, tag: int) -> tuple[int, int, int, Array] | None:
        """(sender, number, offset, data) of a waiting message, if there is one."""
        status = self.MPI.Status()
        found = self.comm.Improbe(rank, tag, status)
        if found is None:
            return None
        message = np.empty(status.Get_count(self.MPI.BYTE), np.uint8)
        found.Recv([message, self.MPI.BYTE])
        number, offset, _ = _HEADER.unpack_from(message.data)
        return status.Get_source(), number, offset, message[_HEADER.size :]

    def serve(self) -> None:
        """Answer those who want to read from this rank's heap."""
        while (wish := self.receive(self.MPI.ANY_SOURCE, GETS)) is not None:
            sender, nbytes, offset, _ = wish
            own = self.heap.rank_view(self.index)[offset : offset + nbytes].copy()
            self.outgoing.add(self.comm.Isend([own, self.MPI.BYTE], sender, REPLIES), sender, own)

    def prune(self) -> None:
        """Forget messages that have gone out."""
        pending = self.outgoing
        if len(pending.requests) > KEPT_MESSAGES:
            kept = [i for i, request in enumerate(pending.requests) if not request.Test()]
            pending.keep(kept)

    def memory(self, rank: int) -> Array | None:
        """The heap of a rank, if it is mapped here."""
        return self.heap.rank_view(self.host.index(rank)) if rank in self.host else None
