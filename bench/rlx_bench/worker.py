"""One engine in one process: reads commands as JSON lines, answers with times. Started by the harness."""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

from rlx_bench.commands import answer_commands
from rlx_bench.engines import ENGINES, beyond, choices
from rlx_bench.flops import counted_flops
from rlx_bench.oracle import expected
from rlx_bench.quiet import take_precedence
from rlx_bench.workloads import make
from rlx_bench.workloads.base import Run
from rlx_bench.yardsticks import Yardstick, peaks, yardsticks

LONGEST = 0.1  # seconds of one timing of a yardstick


def _time(run: Run, samples: int, inner: int) -> list[float]:
    """Seconds of one run, `samples` times; each sample repeats it until it is long enough for the clock."""
    run()  # wakes sleeping threads and fills caches
    times = []
    for _ in range(samples):
        start = time.perf_counter()
        for _ in range(inner):
            run()
        times.append((time.perf_counter() - start) / inner)
    return times


def _rate(yardstick: Yardstick) -> float:
    """What a yardstick gives at best, in a few runs."""
    return yardstick.amount / min(_time(yardstick.run, 3, 1))


class _Bench:
    """An engine on the last requested workload; RLX with a yardstick."""

    def __init__(self, engine: str, threads: int) -> None:
        self.engine, self.threads = engine, threads
        self.run: Run = list
        self.yardstick: Yardstick | None = None

    def make(self, spec: str) -> dict[str, Any]:
        self.run, self.yardstick = list, None  # lets go of the last workload
        self.workload = workload = make(spec)  # kept: engines hold addresses of its arrays
        start = time.perf_counter()
        choices.clear()
        beyond.clear()
        self.run = ENGINES[self.engine].prepare(workload, self.threads)
        self.run()
        ready = time.perf_counter() - start
        if self.engine == "rlx":
            if not workload.bytes and not workload.flops and workload.in_mean:
                workload.flops = counted_flops(workload)
            self.yardstick = max(yardsticks(workload, self.threads), key=_rate, default=None)
        chosen = ", ".join(dict.fromkeys(choices))
        return {"ready": ready, "chosen": chosen, "beyond": ", ".join(beyond), "flops": workload.flops}

    def warm(self, runs: int) -> dict[str, Any]:
        """Run some times without a clock."""
        for _ in range(runs):
            self.run()
        return {"runs": runs}

    def peaks(self) -> dict[str, Any]:
        """What the machine gives at best now: flops of multiply-adds, and bytes of a copy, per second."""
        return {name: max(map(_rate, ways)) for name, ways in peaks(self.threads).items()}

    def expect(self, spec: str, path: str) -> dict[str, Any]:
        """Save what the NumPy reference gives."""
        np.savez(path, *expected(make(spec)))
        return {"saved": True}

    def time(self, samples: int, inner: int) -> dict[str, Any]:
        """Seconds of a run, and what the machine gave right after it, in flops or bytes per second.

        Engine and yardstick take turns, sample by sample, each as long as the other: memory of a shared
        machine is fast for a second and slow for the next, and what else runs there takes its turns, too.
        """
        if self.yardstick is None:
            return {"times": _time(self.run, samples, inner)}
        once = self.yardstick.amount / _rate(self.yardstick)
        times, rates = list[float](), list[float]()
        for _ in range(samples):
            times += _time(self.run, 1, inner)
            repeated = max(round(min(inner * times[-1], LONGEST) / once), 1)
            rates += [self.yardstick.amount / t for t in _time(self.yardstick.run, 1, repeated)]
        return {"times": times, "rates": rates}

    def save(self, path: str) -> dict[str, Any]:
        np.savez(path, *[np.asarray(value) for value in self.run()])
        return {"saved": True}


if __name__ == "__main__":
    take_precedence()
    answer_commands(_Bench(sys.argv[1], int(sys.argv[2])))
