"""MiniLM on 2 ranks with 1 thread each, against one program with 2 threads; and that the results agree.

    python bench/tensor_parallel.py [--batch 1] [--seq 128]

Laps alternate between the two, so a noisy neighbour hits both; the median of the laps' ratios counts. While
one program runs with two threads, the other rank sleeps in a barrier. Ranks run on cores of their own, as
the launcher binds them; the program with two threads on all cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

import rlx
import rlx.zoo
from rlx.dist import Mesh, init
from rlx.dist.launch import launch
from rlx.zoo.minilm import load_graph, tensor_parallel

RANKS = 2


def lap(run: Callable[[], object], runs: int) -> float:
    """Microseconds of one run, after one that wakes the other rank or thread up."""
    run()
    begin = time.perf_counter_ns()
    for _ in range(runs):
        run()
    return (time.perf_counter_ns() - begin) / runs / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--laps", type=int, default=40)
    parser.add_argument("--runs", type=int, default=10)
    options = parser.parse_args()
    transport = init()
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))  # before the runtime counts the cores
    if transport.num_ranks == 1:
        sys.exit(launch(RANKS, __file__, sys.argv[1:]))
    graph = load_graph(rlx.zoo.fetch("minilm").parent)
    mesh = Mesh({"tp": RANKS})
    sizes = {"batch": options.batch, "seq": options.seq}
    part = rlx.compile(graph, threads=1, assume=sizes, mesh=mesh, shardings=tensor_parallel(graph))
    rng = np.random.default_rng(0)
    inputs = {
        "input_ids": rng.integers(0, 30_000, (options.batch, options.seq)),
        "attention_mask": np.ones((options.batch, options.seq), np.int64),
    }
    first = int(transport.this_rank) == 0
    whole = rlx.compile(graph, threads=RANKS, assume=sizes) if first else None
    got = part.run(inputs)
    if whole is not None:
        want = whole.run(inputs)
        worst = max(float(np.abs(got[name] - want[name]).max()) for name in want)
        print(f"batch {options.batch}, seq {options.seq}: largest difference {worst:.2e}")
        share = part.stats["weights"] / whole.stats["weights"]
        print(f"weights per rank {part.stats['weights'] / 2**20:.1f} MiB, {share:.1%} of one program's")
        received = part.stats["bytes_moved"] / 1024
        print(f"collectives {len(part.stats['collectives'])}, each rank receives {received:.0f} KiB")
    ranks, threads = [], []
    for _ in range(options.laps):
        transport.barrier()
        os.sched_setaffinity(0, own)
        ranks.append(lap(lambda: part.run(inputs), options.runs))
        transport.barrier()
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        if whole is not None:
            threads.append(lap(lambda: whole.run(inputs), options.runs))
    transport.barrier()
    if whole is not None:
        ratio = statistics.median(a / b for a, b in zip(ranks, threads, strict=True))
        a, b = statistics.median(ranks), statistics.median(threads)
        print(f"{RANKS} ranks {a:.0f} us, {RANKS} threads {b:.0f} us; ratio of laps {ratio:.3f}")
        a, b = min(ranks), min(threads)
        print(f"best laps: {RANKS} ranks {a:.0f} us, {RANKS} threads {b:.0f} us; ratio {a / b:.3f}")


if __name__ == "__main__":
    main()
