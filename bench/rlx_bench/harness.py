"""Workloads on all engines in one interleaved run: ABAB rounds, medians with spread, outputs compared.

Every engine lives in a process of its own that is stopped (SIGSTOP) while another is timed: thread pools that
spin after their work would otherwise take the cores of the next engine.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np

from rlx.errors import ConfigError, RlxError
from rlx.records import dataclass
from rlx_bench.engines import ENGINES, TORCH_COMPILE, installed
from rlx_bench.workloads import check_name, make

TARGET_SECONDS = 0.02  # one timing lasts at least this long: shorter runs are repeated inside it
SAMPLES = 3  # timings of an engine in one round


class EngineError(RlxError):
    """An engine cannot run a workload, or its process ended."""


@dataclass
class Measured:
    """Times of one engine on one workload, in seconds."""

    engine: str
    times: list[float] = field(default_factory=list)
    ready: float = 0.0
    error: str = ""
    difference: float = 0.0
    chosen: str = ""
    """What was faster, where its documentation leaves a choice."""
    rates: list[float] = field(default_factory=list)
    """What the machine gave right after every timing: flops (or bytes) per second. Of RLX only."""

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    @property
    def machine(self) -> float:
        """The rate next to the median time: pair by pair, since both follow the same moments."""
        pairs = zip(self.times, self.rates, strict=True)
        return statistics.median(time * rate for time, rate in pairs) / self.median

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
    copies: int = 1
    rate: float = 0.0
    """What the machine gave in the same rounds: flops (or bytes) per second."""

    def of(self, engine: str) -> Measured | None:
        return next((m for m in self.engines if m.engine == engine and m.times and not m.error), None)

    def best_peer(self) -> Measured | None:
        peers = [m for m in self.engines if m.engine != "rlx" and m.times and not m.error]
        return min(peers, key=lambda m: m.median, default=None)

    def ratio(self) -> float | None:
        """How many times faster RLX is than the best other engine."""
        own, best = self.of("rlx"), self.best_peer()
        return best.median / own.median if own and best else None

    def share(self) -> float | None:
        """RLX's part of what the machine can do."""
        own = self.of("rlx")
        return (self.bytes or self.flops) / own.median / self.rate if own and self.rate else None


class Worker:
    """A process with one engine, stopped unless it is asked something."""

    def __init__(
        self,
        engine: str,
        threads: int,
        module: str = "rlx_bench.worker",
        folders: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.engine = engine
        cpus = sorted(os.sched_getaffinity(0))[:threads]
        command = [sys.executable, "-m", module, engine, str(threads)]
        path = os.pathsep.join([*folders, *(p for p in sys.path if p)])
        env = {**os.environ, **(variables or {}), "PYTHONPATH": path}
        for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            env[variable] = str(threads)
        pin = functools.partial(os.sched_setaffinity, 0, cpus)  # before libraries start their threads
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=env, preexec_fn=pin
        )

    def ask(self, do: str, **command: Any) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout and self.process.stderr
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.write(json.dumps({"do": do, **command}) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("{"):
                self.process.send_signal(signal.SIGSTOP)
                answer: dict[str, Any] = json.loads(line)
                if "error" in answer:
                    raise EngineError(f"engine {self.engine}: {answer['error']}")
                return answer
        tail = self.process.stderr.read().strip().splitlines()
        raise EngineError(f"engine {self.engine} ended: {tail[-1] if tail else 'no message'}")

    def close(self, patience: float = 10.0) -> None:
        """Let the process end, and end it if it has not after `patience` seconds."""
        self.process.send_signal(signal.SIGCONT)
        if self.process.stdin:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Workers:
    """One process per engine, started when first needed, for all workloads at one number of threads."""

    def __init__(self, threads: int) -> None:
        self.threads, self._running = threads, dict[str, Worker]()

    def get(self, engine: str) -> Worker:
        worker = self._running.get(engine)
        if worker is None or worker.process.poll() is not None:
            worker = self._running[engine] = Worker(engine, self.threads)
        return worker

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        for worker in self._running.values():
            worker.close() if failure is None else worker.close(patience=0.1)


def run_row(
    spec: str,
    workers: Workers,
    engines: Sequence[str] | None,
    rounds: int,
    say: Callable[[str], None],
    torch_compile: bool = False,
) -> Row:
    """Measure one workload."""
    workload = make(spec)
    peers = [*workload.peers, *[TORCH_COMPILE] * (torch_compile and "torch" in workload.peers)]
    able = [e for e in engines or ("rlx", *peers) if e in installed() and ENGINES[e].can(workload)]
    measured = {e: Measured(e) for e in able}
    ready: dict[str, Worker] = {}
    for e, into in measured.items():
        say(f"{workload.name}: preparing {e}")
        try:
            answer = workers.get(e).ask("make", spec=spec)
            into.ready, into.chosen = answer["ready"], answer["chosen"]
            ready[e] = workers.get(e)
        except EngineError as error:
            into.error = str(error)
    _measure(workload.name, ready, measured, rounds, say)
    _compare(ready, measured)
    for m in measured.values():
        if m.difference > workload.tolerance:
            m.error = f"outputs differ from RLX by {m.difference:.2g} of the largest"
    return Row(
        workload.name,
        workers.threads,
        workload.flops,
        workload.bytes,
        list(measured.values()),
        workload.copies,
        next((m.machine for m in measured.values() if m.rates), 0.0),
    )


def _measure(
    name: str,
    workers: dict[str, Worker],
    measured: dict[str, Measured],
    rounds: int,
    say: Callable[[str], None],
) -> None:
    inner: dict[str, int] = {}
    for i in range(rounds):
        say(f"{name}: round {i + 1} of {rounds}")
        for e in list(workers):
            try:
                if e not in inner:
                    once = min(workers[e].ask("time", samples=SAMPLES, inner=1)["times"])
                    inner[e] = max(int(TARGET_SECONDS / max(once, 1e-7)), 1)
                answer = workers[e].ask("time", samples=SAMPLES, inner=inner[e])
                measured[e].times += answer["times"]
                measured[e].rates += answer.get("rates", [])
            except EngineError as error:
                measured[e].error = str(error)
                del workers[e]


def _compare(workers: dict[str, Worker], measured: dict[str, Measured]) -> None:
    """Largest difference of every engine's outputs from RLX's, relative to the largest value."""
    if "rlx" not in workers:
        return
    with tempfile.TemporaryDirectory() as folder:
        values = {}
        for e in measured:
            if e in workers:
                path = str(Path(folder) / f"{e}.npz")
                workers[e].ask("save", path=path)
                with np.load(path) as data:
                    values[e] = [data[k].astype(np.float64) for k in data.files]
        for e, arrays in values.items():
            measured[e].difference = max(
                (
                    float(np.abs(a - b).max(initial=0)) / max(float(np.abs(a).max(initial=0)), 1e-30)
                    if a.shape == b.shape
                    else np.inf
                    for a, b in zip(values["rlx"], arrays, strict=True)
                ),
                default=0.0,
            )


def measure(
    specs: Sequence[str],
    threads: Sequence[int] = (1, 2),
    engines: Sequence[str] | None = None,
    rounds: int = 7,
    say: Callable[[str], None] = lambda line: None,
    torch_compile: bool = False,
) -> Generator[Row, None, None]:
    """Each row as soon as it is measured: all workloads at the first thread count, then at the next.

    By default each workload has the engines that it names as peers, and torch.compile, too, on request,
    which takes seconds to minutes per workload to prepare.
    """
    for spec in specs:
        check_name(spec)
    for name in engines or ():
        if name not in ENGINES:
            raise ConfigError(f"unknown engine {name!r}; use one of {', '.join(ENGINES)}")
    for count in threads:
        with Workers(count) as workers:
            for spec in specs:
                yield run_row(spec, workers, engines, rounds, say, torch_compile)


def by_workload(rows: Sequence[Row]) -> list[Row]:
    """Rows of one workload side by side: workloads, and thread counts of each, as they first came.

    >>> rows = [Row(name, threads, 0, 0, []) for threads in (1, 2) for name in ("b", "a")]
    >>> [(r.workload, r.threads) for r in by_workload(rows)]
    [('b', 1), ('b', 2), ('a', 1), ('a', 2)]
    """
    order = {name: i for i, name in enumerate(dict.fromkeys(r.workload for r in rows))}
    return sorted(rows, key=lambda r: order[r.workload])
