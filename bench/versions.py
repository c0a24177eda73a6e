"""Is a version slower than another? Both in one interleaved run, row by row, as paired ratios.

    git worktree add /tmp/before COMMIT
    python bench/versions.py /tmp/before . quick minilm attention --rounds 5

Each checkout runs its own RLX, its own workloads and a cache of its own, in a process that is stopped while
the other is timed. A round times both, in turns that alternate; its ratio is before / after. A row counts as
slower if the 95 % interval of its ratios lies below the limit. Exit code 1 if one does.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from rlx_bench.harness import SAMPLES, TARGET_SECONDS, EngineError, Worker
from rlx_bench.workloads import SUITES

# Two-sided 95 % points of Student's distribution, by degrees of freedom.
STUDENT = {
    1: 12.71,
    2: 4.30,
    3: 3.18,
    4: 2.78,
    5: 2.57,
    6: 2.45,
    7: 2.36,
    8: 2.31,
    9: 2.26,
    10: 2.23,
    14: 2.14,
}
LIMIT = 0.99
TURNS = 4  # of both versions in one round


def worker(checkout: Path, threads: int, cache: str) -> Worker:
    """RLX of a checkout, whose workloads may live in the package (until 0.1) or in bench/."""
    folders = [str(checkout / "src")]
    inside = (checkout / "src/rlx/bench/worker.py").exists()
    if not inside:
        folders.append(str(checkout / "bench"))
    module = "rlx.bench.worker" if inside else "rlx_bench.worker"
    return Worker("rlx", threads, module, folders, {"RLX_CACHE": cache})


def ratios(spec: str, before: Worker, after: Worker, rounds: int) -> tuple[list[float], float, float]:
    """Ratio before / after of every round, and the medians of both in seconds."""
    both = (before, after)
    for each in both:
        each.ask("make", spec=spec)
    once = min(min(each.ask("time", samples=SAMPLES, inner=1)["times"]) for each in both)
    inner = max(int(TARGET_SECONDS / max(once, 1e-7)), 1)
    found, medians = list[float](), list[tuple[float, float]]()
    for i in range(rounds):
        times: list[list[float]] = [[], []]
        for turn in range(TURNS):
            for n in (0, 1) if (i + turn) % 2 == 0 else (1, 0):
                times[n] += both[n].ask("time", samples=1, inner=inner)["times"]
        medians.append((statistics.median(times[0]), statistics.median(times[1])))
        found.append(medians[-1][0] / medians[-1][1])
    return found, *(statistics.median(m) for m in zip(*medians, strict=True))


def interval(values: list[float]) -> tuple[float, float, float]:
    """(low, mean, high): the geometric mean with its 95 % interval.

    >>> low, mean, high = interval([1.0, 1.0, 1.0])
    >>> low, mean, high
    (1.0, 1.0, 1.0)
    """
    logs = [math.log(v) for v in values]
    mean, degrees = statistics.fmean(logs), len(logs) - 1
    if not degrees:
        return 0.0, math.exp(mean), math.inf
    point = STUDENT.get(degrees, STUDENT[max(d for d in STUDENT if d <= degrees)])
    half = point * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean - half), math.exp(mean), math.exp(mean + half)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="a checkout")
    parser.add_argument("after", type=Path, help="another checkout")
    parser.add_argument("workloads", nargs="*", default=["quick"], help="suites or workloads of `rlx bench`")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--limit", type=float, default=LIMIT)
    given = parser.parse_args()
    specs = list(dict.fromkeys(s for w in given.workloads for s in SUITES.get(w, (w,))))
    slower = list[str]()
    print(f"{'workload':28} {'before':>10} {'after':>10}   ratio, 95 % interval", flush=True)
    for spec in specs:
        with tempfile.TemporaryDirectory() as cache:
            pair = [
                worker(path.resolve(), given.threads, f"{cache}/{n}")
                for n, path in enumerate((given.before, given.after))
            ]
            try:
                found, old, new = ratios(spec, *pair, given.rounds)
            except EngineError as error:
                print(f"{spec:28} not measured: {error}", flush=True)
                continue
            finally:
                for each in pair:
                    each.close()
        low, mean, high = interval(found)
        verdict = ""
        if high < given.limit:
            verdict = "  SLOWER"
            slower.append(spec)
        line = f"{old * 1e6:8.1f}us {new * 1e6:8.1f}us   {mean:.3f} [{low:.3f}, {high:.3f}]"
        print(f"{spec:28} {line}{verdict}", flush=True)
    print(
        f"{len(slower)} of {len(specs)} rows below {given.limit}"
        + (f": {', '.join(slower)}" if slower else "")
    )
    sys.exit(bool(slower))


if __name__ == "__main__":
    main()
