"""Workloads on all engines in one interleaved run: ABAB rounds, medians with spread, outputs compared."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlx.bench.engines import ENGINES, installed
from rlx.bench.workloads import Workload, make
from rlx.errors import RlxError

TARGET_SECONDS = 0.02  # one timing lasts at least this long: shorter runs are repeated inside it


@dataclass
class Measured:
    """Times of one engine on one workload, in seconds."""

    engine: str
    times: list[float] = field(default_factory=list)
    ready: float = 0.0
    error: str = ""
    difference: float = 0.0

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, relative to the median."""
        low, _, high = statistics.quantiles(self.times, n=4) if len(self.times) > 1 else (0.0, 0.0, 0.0)
        return (high - low) / 2 / self.median if self.times else 0.0


@dataclass
class Row:
    """All engines on one workload."""

    workload: str
    threads: int
    flops: float
    bytes: float
    engines: list[Measured]

    def ratio(self) -> float | None:
        """How many times faster RLX is than the best other engine."""
        own = next((m for m in self.engines if m.engine == "rlx" and m.times), None)
        others = [m.median for m in self.engines if m.engine != "rlx" and m.times]
        return min(others) / own.median if own and others else None


class _Worker:
    def __init__(self, engine: str, spec: str, threads: int, cpus: Sequence[int]) -> None:
        self.engine = engine
        command = [
            sys.executable,
            "-m",
            "rlx.bench.worker",
            engine,
            spec,
            str(threads),
            ",".join(map(str, cpus)),
        ]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            env[variable] = str(threads)
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        )

    def ask(self, command: dict[str, Any] | None = None) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        if command is not None:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        assert self.process.stderr
        tail = self.process.stderr.read().strip().splitlines()
        raise RlxError(f"engine {self.engine} failed: {tail[-1] if tail else 'no message'}")

    def close(self) -> None:
        if self.process.stdin:
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def run_row(spec: str, threads: int, engines: Sequence[str], rounds: int, say: Callable[[str], None]) -> Row:
    """Measure one workload."""
    workload: Workload = make(spec)
    able = [e for e in engines if ENGINES[e][1](workload)]
    cpus = sorted(os.sched_getaffinity(0))[:threads]
    measured = {e: Measured(e) for e in able}
    workers: dict[str, _Worker] = {}
    try:
        for e in able:
            say(f"{workload.name}: starting {e}")
            worker = _Worker(e, spec, threads, cpus)
            try:
                measured[e].ready = worker.ask()["ready"]
                workers[e] = worker
            except RlxError as error:
                measured[e].error = str(error)
                worker.close()
        inner = {}
        for e, worker in workers.items():
            once = min(worker.ask({"time": 3, "inner": 1})["times"])
            inner[e] = max(int(TARGET_SECONDS / max(once, 1e-7)), 1)
        for i in range(rounds):
            say(f"{workload.name}: round {i + 1} of {rounds}")
            for e, worker in workers.items():
                measured[e].times += worker.ask({"time": 3, "inner": inner[e]})["times"]
        _compare(workers, measured)
    finally:
        for worker in workers.values():
            worker.close()
    for m in measured.values():
        if m.difference > workload.tolerance:
            m.error = f"outputs differ from RLX by {m.difference:.2g}"
    return Row(workload.name, threads, workload.flops, workload.bytes, list(measured.values()))


def _compare(workers: dict[str, _Worker], measured: dict[str, Measured]) -> None:
    """Largest difference of every engine's outputs from RLX's."""
    with tempfile.TemporaryDirectory() as folder:
        values = {}
        for e, worker in workers.items():
            path = str(Path(folder) / f"{e}.npz")
            worker.ask({"save": path})
            with np.load(path) as data:
                values[e] = [data[k] for k in data.files]
        if "rlx" in values:
            for e, arrays in values.items():
                pairs = zip(values["rlx"], arrays, strict=False)
                measured[e].difference = max(
                    (float(np.abs(a - b).max(initial=0)) for a, b in pairs), default=0.0
                )


def run(
    specs: Sequence[str],
    threads: Sequence[int] = (1, 2),
    engines: Sequence[str] | None = None,
    rounds: int = 7,
    say: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """All workloads at all thread counts."""
    chosen = list(engines) if engines else installed()
    return [run_row(spec, t, chosen, rounds, say) for spec in specs for t in threads]


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows for machines."""
    return [
        {
            "workload": r.workload,
            "threads": r.threads,
            "ratio": r.ratio(),
            "engines": {
                m.engine: {
                    "median_s": m.median if m.times else None,
                    "spread": m.spread if m.times else None,
                    "start_s": m.ready,
                    "gflops": r.flops / m.median / 1e9 if m.times and r.flops else None,
                    "gbytes_per_s": r.bytes / m.median / 1e9 if m.times and r.bytes else None,
                    "difference": m.difference,
                    "error": m.error,
                }
                for m in r.engines
            },
        }
        for r in rows
    ]
