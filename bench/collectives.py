"""Collectives against a memcpy that all ranks do at the same time, in the same lap.

    python bench/collectives.py            # where mpi4py is: under mpiexec, MPI's collectives next to ours
    python bench/collectives.py --no-mpi   # processes with shared memory, started by rlx itself

Every lap runs each candidate once, so a noisy neighbour hits all of them; the ratio of a lap is memcpy time
per byte over candidate time per byte moved, and the median over laps counts. "heap" means that arrays are
in the symmetric heap, results too; "private" that they are ordinary arrays. memcpy is a rank's private copy,
met by a barrier before and after like the collectives' own meetings. FLOORS says what is promised for arrays
in the heap of two ranks with a core each; the verdict is next to it.
"""

from __future__ import annotations

import argparse
import importlib.util
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
from rlx.dist.launch import find_mpiexec, launch
from rlx_bench.quiet import take_precedence

KIB, MIB = 1 << 10, 1 << 20
SIZES = (64 * KIB, MIB, 16 * MIB, 64 * MIB)
# Percent of memcpy per byte, by collective and size; None stands for the other sizes.
FLOORS = {
    ("all_reduce", MIB): 75,
    ("all_reduce", 64 * MIB): 90,
    ("all_gather", None): 100,
    ("all_to_all", None): 85,
}
WARM_UPS = 2
BARRIER_FLOOR = 2.0  # microseconds
MPI_NAMES = {
    "all_reduce": "Allreduce",
    "all_gather": "Allgather",
    "broadcast": "Bcast",
    "all_to_all": "Alltoall",
}


@dataclass
class Candidate:
    """Something to time; `moved` is how many bytes it writes on each rank per byte of the array."""

    name: str
    run: Callable[[], Any]
    moved: float = 1.0
    seconds: list[float] = field(default_factory=list)


@dataclass
class Arrays:
    """What collectives read and write, all in one place; results have the size, n times it, an n-th."""

    buf: dist.SymmetricBuffer | None
    operand: Any
    exchanged: Any
    gathered: Any
    chunk: Any

    @staticmethod
    def sizes(size: int, n: int) -> tuple[int, ...]:
        return size, size, n * size, size // n

    @staticmethod
    def private(size: int, n: int) -> Arrays:
        return Arrays(None, *(np.full(part // 4, 0.5, np.float32) for part in Arrays.sizes(size, n)))

    @staticmethod
    def in_heap(transport: dist.SymmetricTransport, size: int) -> Arrays:
        bufs = [transport.alloc(part) for part in Arrays.sizes(size, transport.num_ranks)]
        views = [transport.view(transport.this_rank, buf).view(np.float32) for buf in bufs]
        for view in views:
            view[:] = 0.5
        return Arrays(bufs[0], *views)


def candidates(transport: dist.SymmetricTransport, size: int) -> list[Candidate]:
    n = transport.num_ranks
    outside = Arrays.private(size, n)
    private, target = outside.operand, np.zeros_like(outside.operand)

    def memcpy() -> None:
        transport.barrier()
        np.copyto(target, private)
        transport.barrier()

    made = [Candidate("memcpy", memcpy)]
    for place, all_ in (("heap", Arrays.in_heap(transport, size)), ("private", outside)):
        b, a = all_.buf, all_.operand
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": partial(dist.all_reduce, transport, b, a),
            "all_gather": partial(dist.all_gather, transport, b, a, out=all_.gathered),
            "reduce_scatter": partial(dist.reduce_scatter, transport, b, a, out=all_.chunk),
            "broadcast": partial(dist.broadcast, transport, b, a, 0),
            "all_to_all": partial(dist.all_to_all, transport, b, a, out=all_.exchanged),
        }
        made += [
            Candidate(f"{name} {place}", call, n if name == "all_gather" else 1)
            for name, call in calls.items()
        ]
    if mpi_rank() is not None:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        theirs: dict[str, Callable[[], Any]] = {
            "all_reduce": partial(world.Allreduce, MPI.IN_PLACE, private),
            "all_gather": partial(world.Allgather, private, outside.gathered),
            "broadcast": partial(world.Bcast, private, 0),
            "all_to_all": partial(world.Alltoall, private, outside.exchanged),
        }
        made += [
            Candidate(f"MPI {MPI_NAMES[name]}", call, n if name == "all_gather" else 1)
            for name, call in theirs.items()
        ]
    return made


def measure(transport: dist.SymmetricTransport, made: list[Candidate], size: int, seconds: float) -> None:
    repeats = max(1, 8 * MIB // size)
    end = time.monotonic() + seconds
    laps = 0
    # The first rank decides when it is enough, because clocks differ.
    while laps < 5 or dist.broadcast(transport, None, np.array([time.monotonic() < end]))[0]:
        laps += 1
        for candidate in made:
            for _ in range(WARM_UPS):  # others have had the caches
                candidate.run()
            transport.barrier()
            start = time.perf_counter()
            for _ in range(repeats):
                candidate.run()
            candidate.seconds.append((time.perf_counter() - start) / repeats)


def report(made: list[Candidate], size: int) -> None:
    base = made[0]
    by_name = {candidate.name: candidate for candidate in made}
    print(f"{size // KIB} KiB per rank, {len(base.seconds)} laps")
    for candidate in made:
        share = lap_ratio(base, candidate) * candidate.moved
        middle = statistics.median(candidate.seconds)
        speed = candidate.moved * size / middle / 1e9
        best = min(base.seconds) * candidate.moved / min(candidate.seconds)
        line = f"  {candidate.name:24} {middle * 1e6:10.1f} us  {speed:6.2f} GB/s"
        line += f"  {100 * share:4.0f} % of memcpy (best laps {100 * best:3.0f} %)"
        name, _, place = candidate.name.partition(" ")
        floor = FLOORS.get((name, size), FLOORS.get((name, None)))
        if floor and place == "heap":
            line += f", floor {floor} %: {'held' if 100 * share >= floor else 'MISSED'}"
        if theirs := by_name.get(f"MPI {MPI_NAMES.get(name)}"):
            line += f", {lap_ratio(theirs, candidate):.1f} x MPI's speed"
        print(line)


def lap_ratio(base: Candidate, other: Candidate) -> float:
    """How many times as fast as `base` the other is, the median over laps."""
    return statistics.median(a / b for a, b in zip(base.seconds, other.seconds, strict=True))


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


def work(seconds: float, sizes: list[int]) -> None:
    take_precedence()
    transport = dist.init()
    barrier = barrier_time(transport)
    if transport.this_rank == 0:
        verdict = "held" if barrier < BARRIER_FLOOR else "MISSED"
        print(
            f"{transport.num_ranks} ranks, {type(transport).__name__}; "
            f"barrier {barrier:.2f} us, floor {BARRIER_FLOOR} us: {verdict}",
            flush=True,
        )
    for size in sizes:
        made = candidates(transport, size)
        measure(transport, made, size, seconds)
        if transport.this_rank == 0:
            report(made, size)
            sys.stdout.flush()


def has_mpi() -> bool:
    """Whether this environment has mpi4py and an mpiexec."""
    if importlib.util.find_spec("mpi4py") is None:
        return False
    try:
        find_mpiexec()
    except dist.TransportError:
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3.0, help="per size")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of an array")
    parser.add_argument("--mpi", action=argparse.BooleanOptionalAction, default=has_mpi())
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.seconds, options.sizes)
        return 0
    take_precedence()  # mpiexec and its ranks inherit it
    arguments = ["--worker", "--seconds", str(options.seconds), "--sizes", *map(str, options.sizes)]
    heap_bytes = sum(sum(Arrays.sizes(size, options.ranks)) for size in options.sizes) + MIB
    return launch(options.ranks, __file__, arguments, mpi=options.mpi, heap_size=heap_bytes)


if __name__ == "__main__":
    sys.exit(main())
