"""One engine in one process: reads commands as JSON lines, answers with times. Started by the harness."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

from rlx.bench.engines import ENGINES, choices
from rlx.bench.quiet import take_precedence
from rlx.bench.workloads import make
from rlx.bench.workloads.base import Run
from rlx.bench.yardsticks import YARDSTICK, Yardstick, yardsticks


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


class _Bench:
    """An engine, or the yardstick, on the workload that was asked for last."""

    def __init__(self, engine: str, threads: int) -> None:
        self.engine, self.threads = engine, threads
        self.run: Run = list
        self.yardsticks: list[Yardstick] = []

    def make(self, spec: str) -> dict[str, Any]:
        self.run, self.yardsticks = list, []  # lets go of the last workload
        self.workload = workload = make(spec)  # kept: engines hold addresses of its arrays
        if self.engine == YARDSTICK:
            self.yardsticks = yardsticks(workload, self.threads)
            return {"ready": 0.0, "chosen": ""}
        start = time.perf_counter()
        choices.clear()
        self.run = ENGINES[self.engine].prepare(workload, self.threads)
        self.run()
        return {"ready": time.perf_counter() - start, "chosen": ", ".join(dict.fromkeys(choices))}

    def time(self, samples: int, inner: int) -> dict[str, Any]:
        """Seconds of a run; of the yardstick its best rate, in flops or bytes per second."""
        if self.engine != YARDSTICK:
            return {"times": _time(self.run, samples, inner)}
        rates = [[way.amount / t for t in _time(way.run, samples, 1)] for way in self.yardsticks]
        return {"times": [max(found) for found in zip(*rates, strict=True)]}

    def save(self, path: str) -> dict[str, Any]:
        np.savez(path, *[np.asarray(value) for value in self.run()])
        return {"saved": True}


def main() -> None:
    take_precedence()
    bench = _Bench(sys.argv[1], int(sys.argv[2]))
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(bench, command.pop("do"))(**command)
        except Exception as error:  # told to the harness, which goes on with the other engines
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
