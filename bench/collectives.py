"""Collectives against a memcpy that all ranks do at the same time, in the same lap.

    python bench/collectives.py --ranks 2                 # processes with shared memory python
    bench/collectives.py --ranks 2 --mpi           # under mpiexec, with MPI's own collectives beside ours

Every lap runs each candidate once, so a noisy neighbour hits all of them; the ratio of a lap is memcpy time
per byte over candidate time per byte moved, and the median over laps counts. "heap" means that arrays lie
in the symmetric heap; "private" that they are ordinary arrays. memcpy is one rank's private copy, met by a
barrier before and after like the collectives' own meetings.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

import rlx.dist as dist
from rlx.dist.environment import mpi_rank
from rlx.dist.launch import launch

KIB, MIB = 1 << 10, 1 << 20
SIZES = (64 * KIB, MIB, 16 * MIB, 64 * MIB)
LARGEST = max(SIZES)


@dataclass
class Candidate:
    """Something to time; `moved` is how many bytes it writes on each rank per byte of the array."""

    name: str
    run: Callable[[], Any]
    moved: float = 1.0
    seconds: list[float] = field(default_factory=list)


def heap_array(transport: dist.SymmetricTransport, nbytes: int) -> tuple[dist.SymmetricBuffer, Any]:
    buf = transport.alloc(nbytes)
    return buf, transport.view(transport.this_rank, buf).view(np.float32)


def candidates(transport: dist.SymmetricTransport, size: int) -> list[Candidate]:
    n = transport.num_ranks
    private = np.full(size // 4, 0.5, np.float32)
    target, gathered = np.zeros_like(private), np.zeros(n * size // 4, np.float32)
    exchanged, chunk = np.zeros_like(private), np.zeros(size // 4 // n, np.float32)
    buf, shared = heap_array(transport, size)
    shared[:] = private

    def memcpy() -> None:
        transport.barrier()
        np.copyto(target, private)
        transport.barrier()

    made = [Candidate("memcpy", memcpy)]
    for place, a, b in (("heap", shared, buf), ("private", private, None)):
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": partial(dist.all_reduce, transport, b, a),
            "all_gather": partial(dist.all_gather, transport, b, a, out=gathered),
            "reduce_scatter": partial(dist.reduce_scatter, transport, b, a, out=chunk),
            "broadcast": partial(dist.broadcast, transport, b, a, 0),
            "all_to_all": partial(dist.all_to_all, transport, b, a, out=exchanged),
        }
        made += [
            Candidate(f"{name} {place}", call, n if name == "all_gather" else 1)
            for name, call in calls.items()
        ]
    if mpi_rank() is not None:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        made += [
            Candidate("MPI Allreduce", partial(world.Allreduce, MPI.IN_PLACE, private)),
            Candidate("MPI Allgather", partial(world.Allgather, private, gathered), n),
            Candidate("MPI Bcast", partial(world.Bcast, private, 0)),
            Candidate("MPI Alltoall", partial(world.Alltoall, private, exchanged)),
        ]
    return made


def measure(transport: dist.SymmetricTransport, made: list[Candidate], size: int, seconds: float) -> None:
    repeats = max(1, 4 * MIB // size)
    for candidate in made:
        candidate.run()
    end = time.monotonic() + seconds
    laps = 0
    # The first rank decides when it is enough, because clocks differ.
    while laps < 5 or dist.broadcast(transport, None, np.array([time.monotonic() < end]))[0]:
        laps += 1
        for candidate in made:
            transport.barrier()
            start = time.perf_counter()
            for _ in range(repeats):
                candidate.run()
            candidate.seconds.append((time.perf_counter() - start) / repeats)


def report(made: list[Candidate], size: int) -> None:
    base = made[0]
    print(f"{size // KIB} KiB per rank, {len(base.seconds)} laps")
    for candidate in made:
        ratios = [m * candidate.moved / c for m, c in zip(base.seconds, candidate.seconds, strict=True)]
        middle = statistics.median(candidate.seconds)
        speed = candidate.moved * size / middle / 1e9
        best = min(base.seconds) * candidate.moved / min(candidate.seconds)
        share = f"{100 * statistics.median(ratios):4.0f} % of memcpy per byte (best laps {100 * best:.0f} %)"
        print(f"  {candidate.name:24} {middle * 1e6:10.1f} us  {speed:6.2f} GB/s  {share}")


def barrier_time(transport: dist.SymmetricTransport) -> float:
    """Microseconds per barrier, the best of several batches."""
    best = float("inf")
    for _ in range(20):
        transport.barrier()
        start = time.perf_counter()
        for _ in range(500):
            transport.barrier()
        best = min(best, (time.perf_counter() - start) / 500)
    return best * 1e6


def work(seconds: float) -> None:
    transport = dist.init()
    barrier = barrier_time(transport)
    if transport.this_rank == 0:
        print(
            f"{transport.num_ranks} ranks, {type(transport).__name__}; barrier {barrier:.2f} us", flush=True
        )
    for size in SIZES:
        made = candidates(transport, size)
        measure(transport, made, size, seconds)
        if transport.this_rank == 0:
            report(made, size)
            sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3.0, help="per size")
    parser.add_argument("--mpi", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.seconds)
        return 0
    arguments = ["--worker", "--seconds", str(options.seconds)]
    heap_bytes = sum(SIZES) + MIB
    return launch(options.ranks, __file__, arguments, mpi=options.mpi, heap_size=heap_bytes)


if __name__ == "__main__":
    sys.exit(main())
