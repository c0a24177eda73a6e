"""What every rank runs under mpiexec: `suite` or a fault, over MPI `alone` or with memory `shared` inside
the host.

Every rank writes what it saw into a file of its own.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import rlx.dist as dist
from conformance import dist_cases as cases
from rlx.dist import environment
from rlx.dist.mpi import MpiTransport, connect
from rlx.dist.shm import SharedMemoryTransport

VICTIM = 1


def main(what: str, mode: str, folder: str, timeout: str) -> None:
    transport = connect(heap_size=8 << 20, timeout=float(timeout), share=mode == "shared")
    environment._transport = transport  # so that the worker can abort it, as if init() had made it
    assert isinstance(transport, SharedMemoryTransport if mode == "shared" else MpiTransport)
    out = Path(folder) / f"{transport.this_rank}.json"
    if what == "suite":
        out.write_text(json.dumps(cases.everything(transport, cases.FEW)))
        transport.close()
        return
    transport.barrier()
    if transport.this_rank == VICTIM:
        strike(what)
    begin = time.monotonic()
    try:
        for _ in range(3):
            transport.barrier()
    except dist.RanksMissing as error:
        facts = {"kind": type(error).__name__, "ranks": error.ranks, "after": time.monotonic() - begin}
        out.write_text(json.dumps(facts))
        raise


def strike(what: str) -> None:
    if what == "raise":
        raise ValueError("on purpose")
    os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)


if __name__ == "__main__":
    main(*sys.argv[1:])
