"""One engine in one process: reads commands as JSON lines, answers with times. Started by the harness."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from rlx.bench.workloads.base import Run, Workload

YARDSTICK = "yardstick"


def _quieten(cpus: list[int]) -> None:
    """Pin to the given cores and ask the scheduler for precedence, where it lets us."""
    os.sched_setaffinity(0, set(cpus))
    try:
        os.setsid()
        with open("/proc/self/autogroup", "w") as f:
            f.write("-19")
    except OSError:
        pass


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


def _measure_yardstick(workload: Workload, threads: int) -> None:
    """Answers with the best rate of each sample, in flops or bytes per second."""
    from rlx.bench.yardsticks import yardsticks

    ways = yardsticks(workload, threads)
    for way in ways:
        way.run()
    _say({"ready": 0.0})
    for line in sys.stdin:
        samples = json.loads(line).get("time")
        if not samples:
            break
        rates = [[way.amount / t for t in _time(way.run, samples, 1)] for way in ways]
        _say({"times": [max(found) for found in zip(*rates, strict=True)]})


def main() -> None:
    engine, spec, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    _quieten([int(c) for c in sys.argv[4].split(",")])
    import numpy as np

    from rlx.bench.engines import ENGINES
    from rlx.bench.workloads import make

    answer: dict[str, Any]
    workload = make(spec)
    if engine == YARDSTICK:
        return _measure_yardstick(workload, threads)
    start = time.perf_counter()
    run = ENGINES[engine].prepare(workload, threads)
    run()
    _say({"ready": time.perf_counter() - start})
    for line in sys.stdin:
        command = json.loads(line)
        if "time" in command:
            answer = {"times": _time(run, command["time"], command["inner"])}
        elif "save" in command:
            np.savez(command["save"], *[np.asarray(value) for value in run()])
            answer = {"saved": True}
        else:
            break
        _say(answer)


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
