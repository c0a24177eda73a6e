"""Which job this process is a rank of: `init()` reads it from what the launcher has set."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING

from rlx.dist.errors import TransportError
from rlx.dist.transports.local import LocalTransport
from rlx.dist.transports.shm import SharedMemoryTransport
from rlx.dist.transport import DEFAULT_HEAP_BYTES, SymmetricTransport
from rlx.dist.transports.mpi import connect

if TYPE_CHECKING:
    from collections.abc import Mapping

# Set by the launcher for its ranks, next to RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE.
HEAP_FD = "RLX_HEAP_FD"
HEAP_BYTES = "RLX_HEAP_BYTES"
LAUNCHER_PID = "RLX_LAUNCHER_PID"
REPORT_FD = "RLX_REPORT_FD"
BIND = "RLX_BIND"
ENDINGS = "RLX_ENDINGS"  # a folder in which ranks under mpiexec say how they ended

# How Open MPI, MPICH and Slurm say that a process is one of several, and which.
_MPI_RANKS = (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))

# So long may the others raise and speak before a failed rank ends an MPI job.
MPI_GRACE_SECONDS = 1.0
MPI_ABORT_SECONDS = 10

_transport: SymmetricTransport | None = None


def mpi_rank(environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """(rank, ranks) if this process was started by an MPI launcher.

    >>> mpi_rank({"PMI_RANK": "1", "PMI_SIZE": "4"}), mpi_rank({})
    ((1, 4), None)
    """
    for rank, size in _MPI_RANKS:
        if rank in environment and size in environment:
            return int(environment[rank]), int(environment[size])
    return None


def init(heap_size: int | None = None, timeout: float | None = None) -> SymmetricTransport:
    """The transport of this process: one rank of the job that `rlx launch` or mpiexec started, else a job
    of one.

    Calling it again returns the same transport.

    >>> transport = init()
    >>> transport.this_rank, transport.num_ranks
    (Rank(0), 1)
    """
    global _transport
    if _transport is None:
        _transport = _make(heap_size, timeout)
    if heap_size is not None and heap_size > _transport.heap_size:
        raise TransportError(
            f"this job has {_transport.heap_size} bytes of heap per rank, {heap_size} were asked for; "
            "start it with `rlx launch --heap BYTES`"
        )
    return _transport


def _make(heap_size: int | None, timeout: float | None) -> SymmetricTransport:
    if HEAP_FD in os.environ:
        return SharedMemoryTransport.attach(int(os.environ[HEAP_FD]), int(os.environ["RANK"]), timeout)
    size = heap_size or int(os.environ.get(HEAP_BYTES, DEFAULT_HEAP_BYTES))
    if mpi_rank() is not None:
        return connect(size, timeout)
    return LocalTransport(1, size, 0, timeout=timeout)


def end_mpi_job(code: int) -> None:
    """A rank that fails ends an MPI job, which the others could not leave; they may speak first."""
    if mpi_rank() is not None and "mpi4py.MPI" in sys.modules:
        time.sleep(MPI_GRACE_SECONDS)
        # An Abort that mpiexec does not hear, because it has ended already, may wait for ever: the kernel
        # ends this process then.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(MPI_ABORT_SECONDS)
        sys.modules["mpi4py.MPI"].COMM_WORLD.Abort(code)


def abort_if_joined(reason: str) -> None:
    """Tell the other ranks why this one ends, if it ever joined them."""
    if _transport is not None:
        _transport.abort(reason)
