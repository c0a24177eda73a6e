"""What every rank runs under mpiexec: a suite or a fault, over MPI `alone` or with memory `shared`.

`mixed` pretends that pairs of ranks are on different hosts. Every rank writes what it saw into a file.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import rlx.dist as dist
from conformance import dist_cases as cases
from rlx.dist import environment
from rlx.dist.transports.mpi import MpiTransport, connect
from rlx.dist.transports.shm import SharedMemoryTransport

VICTIM = 1
PATIENCE = 8.0  # seconds for one that does not come: enough for the others not to be late too
SUITES = {"suite": cases.FEW, "suite of all": cases.ALL}


def two_hosts() -> Any:
    """A communicator that finds ranks 0 and 1 on one host, 2 and 3 on another."""
    from mpi4py import MPI

    class TwoHosts(MPI.Intracomm):  # type: ignore[misc]
        def Split_type(self, split_type: int, key: int = 0, info: object = None) -> Any:
            return self.Split(self.Get_rank() // 2, key)

    return TwoHosts(MPI.COMM_WORLD)


def main(what: str, mode: str, folder: str, timeout: str) -> None:
    if what == "never join" and os.environ["RANK"] == str(VICTIM):
        sys.exit(0)
    comm = two_hosts() if mode == "mixed" else None
    transport = connect(heap_size=8 << 20, timeout=float(timeout), comm=comm, share=mode != "alone")
    environment._transport = transport  # so that the worker can abort it, as if init() had made it
    assert isinstance(transport, SharedMemoryTransport if mode == "shared" else MpiTransport)
    out = Path(folder) / f"{transport.this_rank}.json"
    if what in SUITES:
        out.write_text(json.dumps(cases.everything(transport, SUITES[what])))
        transport.close()
        return
    transport.barrier()
    if what == "raise":
        survivors = [Path(folder) / f"{rank}.json" for rank in range(transport.num_ranks) if rank != VICTIM]
        end_the_job_after(survivors, float(timeout))
    if transport.this_rank == VICTIM:
        strike(what)
    for _ in range(3):
        try:
            transport.barrier(timeout=None if what == "raise" else PATIENCE)
        except dist.RanksMissing as error:
            facts = {"kind": type(error).__name__, "ranks": error.ranks}
            out.write_text(json.dumps(facts))
            raise


def end_the_job_after(files: list[Path], seconds: float) -> None:
    """A rank that fails leaves the others a second to speak before it ends the job, which may be too short
    where many processes share a core: here it also waits until they have written their files."""
    end = environment.end_mpi_job

    def end_later(code: int) -> None:
        deadline = time.monotonic() + seconds
        while not all(file.exists() for file in files) and time.monotonic() < deadline:
            time.sleep(0.05)
        end(code)

    environment.end_mpi_job = end_later


def strike(what: str) -> None:
    if what == "raise":
        raise ValueError("on purpose")
    os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)


if __name__ == "__main__":
    main(*sys.argv[1:])
