"""One engine in one process: reads commands as JSON lines, answers with times. Started by the harness."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def _quieten(cpus: list[int]) -> None:
    """Pin to the given cores and ask the scheduler for precedence, where it lets us."""
    os.sched_setaffinity(0, set(cpus))
    try:
        os.setsid()
        with open("/proc/self/autogroup", "w") as f:
            f.write("-19")
    except OSError:
        pass


def main() -> None:
    engine, spec, threads, cpus = (
        sys.argv[1],
        sys.argv[2],
        int(sys.argv[3]),
        [int(c) for c in sys.argv[4].split(",")],
    )
    _quieten(cpus)
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(threads)
    import numpy as np

    from rlx.bench.engines import ENGINES
    from rlx.bench.workloads import make

    answer: dict[str, Any]
    workload = make(spec)
    start = time.perf_counter()
    run, results = ENGINES[engine][2](workload, threads)
    run()
    _say({"ready": time.perf_counter() - start})
    for line in sys.stdin:
        command = json.loads(line)
        if "time" in command:
            times = []
            for _ in range(command["time"]):
                start = time.perf_counter()
                for _ in range(command["inner"]):
                    run()
                times.append((time.perf_counter() - start) / command["inner"])
            answer = {"times": times}
        elif "save" in command:
            run()
            np.savez(command["save"], *results())
            answer = {"saved": True}
        else:
            break
        _say(answer)


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
