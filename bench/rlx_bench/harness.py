"""Workloads on all engines in one interleaved run: medians with spread, outputs compared with the reference.

Every engine lives in a process of its own that is stopped (SIGSTOP) while another is timed: thread pools that
spin after their work would otherwise take the cores of the next engine. On one thread engines take turns in
every round. On several, each has two long blocks, in opposite order: threads that were stopped or spin for
somebody else's work spoil the first runs after every change of turns.
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
from collections.abc import Callable, Generator, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rlx.errors import ConfigError, RlxError
from rlx.records import dataclass
from rlx_bench.engines import ENGINES, TORCH_COMPILE, installed
from rlx_bench.machine import beyond_limit, limits
from rlx_bench.oracle import difference
from rlx_bench.workloads import check_name, make

TARGET_SECONDS = 0.02  # one timing lasts at least this long: shorter runs are repeated inside it
SAMPLES = 3  # timings of an engine in one round
SETTLE_SECONDS = 0.2  # runs before a block is timed: threads wake up, and clocks find their speed


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
    beyond: str = ""
    """Why it is not compared: it uses more of the machine than RLX may."""

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
    in_mean: bool = True
    """Whether it counts in the geometric mean."""
    peaks: Mapping[str, float] = field(default_factory=dict)
    """What the machine gave at the start of the run: flops of multiply-adds, bytes of a copy, per second."""

    def of(self, engine: str) -> Measured | None:
        return next((m for m in self.engines if m.engine == engine and m.times and not m.error), None)

    def best_peer(self) -> Measured | None:
        peers = [m for m in self.engines if not is_own(m.engine) and m.times and not m.error and not m.beyond]
        return min(peers, key=lambda m: m.median, default=None)

    def ratio(self, engine: str = "rlx") -> float | None:
        """How many times faster RLX is than the best other engine."""
        own, best = self.of(engine), self.best_peer()
        return best.median / own.median if own and best else None

    def ratio_beyond(self) -> float | None:
        """The same against engines that use more of the machine than RLX may."""
        own = self.of("rlx")
        wide = [m.median for m in self.engines if m.beyond and m.times and not m.error]
        return min(wide) / own.median if own and wide else None

    def share(self) -> float | None:
        """RLX's part of what the machine can do."""
        own = self.of("rlx")
        return (self.bytes or self.flops) / own.median / self.rate if own and self.rate else None


def is_own(engine: str) -> bool:
    """Whether an engine is RLX, with whatever options.

    >>> is_own("rlx"), is_own("rlx-i8"), is_own("llama.cpp")
    (True, True, False)
    """
    return engine.partition("-")[0] == "rlx"


def _how(code: int) -> str:
    """How a process ended.

    >>> _how(1), _how(-11)
    ('exit code 1', 'SIGSEGV')
    """
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


class Asked(Protocol):
    """Something with one engine that is asked to run it."""

    def ask(self, do: str, **command: Any) -> dict[str, Any]: ...


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
        with contextlib.suppress(
            BrokenPipeError
        ):  # a process that has ended gives no line, and an error below
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
        how = _how(self.process.wait())
        raise EngineError(f"engine {self.engine} ended ({how}): {tail[-1] if tail else 'no message'}")

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
        self._peaks: dict[str, float] | None = None

    def get(self, engine: str) -> Worker:
        worker = self._running.get(engine)
        if worker is None or worker.process.poll() is not None:
            worker = self._running[engine] = Worker(engine, self.threads, variables=limits(engine))
        return worker

    @property
    def peaks(self) -> dict[str, float]:
        """What the machine gives at best, measured before the first row."""
        if self._peaks is None:
            self._peaks = self.get("rlx").ask("peaks")
        return self._peaks

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        for worker in self._running.values():
            worker.close() if failure is None else worker.close(patience=0.1)


class Expected:
    """What the reference gives for workloads; each is computed once for all numbers of threads."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._paths: dict[str, Path] = {}

    def of(self, spec: str) -> list[np.ndarray]:
        if spec not in self._paths:
            path = Path(self._folder.name) / f"{len(self._paths)}.npz"
            with Workers(os.cpu_count() or 1) as workers:  # a process that ends: it may take a lot of memory
                workers.get("rlx").ask("expect", spec=spec, path=str(path))
            self._paths[spec] = path
        return _arrays(self._paths[spec])

    def __enter__(self) -> Expected:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()


def _arrays(path: Path) -> list[np.ndarray]:
    with np.load(path) as data:
        return [data[f"arr_{i}"] for i in range(len(data.files))]


def run_row(
    spec: str,
    workers: Workers,
    engines: Sequence[str] | None,
    rounds: int,
    say: Callable[[str], None],
    expected: Expected,
    torch_compile: bool = False,
) -> Row:
    """Measure one workload."""
    workload = make(spec)
    peers = [*workload.peers, *[TORCH_COMPILE] * (torch_compile and "torch" in workload.peers)]
    able = [e for e in engines or ("rlx", *peers) if e in installed() and ENGINES[e].can(workload)]
    measured = {e: Measured(e) for e in able}
    ready: dict[str, Asked] = {}
    for e, into in measured.items():
        say(f"{workload.name}: preparing {e}")
        try:
            answer = workers.get(e).ask("make", spec=spec)
            into.ready, into.chosen = answer["ready"], answer["chosen"]
            into.beyond = "it cannot be limited" if beyond_limit(e) else answer["beyond"]
            ready[e] = workers.get(e)
            workload.flops = workload.flops or answer["flops"]
        except EngineError as error:
            into.error = str(error)
    peaks = workers.peaks if "rlx" in ready else {}
    take_times(workload.name, ready, measured, rounds, workers.threads, say)
    say(f"{workload.name}: comparing with the reference")
    compare(ready, measured, expected, spec, workload.tolerance)
    return Row(
        workload.name,
        workers.threads,
        workload.flops,
        workload.bytes,
        list(measured.values()),
        workload.copies,
        next((m.machine for m in measured.values() if m.rates), 0.0),
        workload.in_mean,
        peaks,
    )


def turns(engines: Sequence[str], rounds: int, threads: int) -> Iterator[tuple[str, int]]:
    """Whose turn it is, and how many timings it has.

    >>> list(turns(["a", "b"], rounds=2, threads=1))
    [('a', 3), ('b', 3), ('a', 3), ('b', 3)]
    >>> list(turns(["a", "b"], rounds=5, threads=2))
    [('a', 8), ('b', 8), ('b', 7), ('a', 7)]
    """
    if threads == 1:
        for _ in range(rounds):
            yield from ((e, SAMPLES) for e in engines)
        return
    second = rounds * SAMPLES // 2
    yield from ((e, rounds * SAMPLES - second) for e in engines)
    yield from ((e, second) for e in reversed(engines))


def take_times(
    name: str,
    workers: MutableMapping[str, Asked],
    measured: dict[str, Measured],
    rounds: int,
    threads: int,
    say: Callable[[str], None],
) -> None:
    """Time all engines in turns; one that fails leaves."""
    inner: dict[str, int] = {}
    once: dict[str, float] = {}
    settle = SETTLE_SECONDS if threads > 1 else 0.0
    for e, samples in turns(list(workers), rounds, threads):
        if e not in workers:
            continue
        say(f"{name}: timing {e}")
        try:
            if e not in inner:
                once[e] = max(min(workers[e].ask("time", samples=SAMPLES, inner=1)["times"]), 1e-7)
                inner[e] = max(int(TARGET_SECONDS / once[e]), 1)
            if settle:
                workers[e].ask("warm", runs=max(round(settle / once[e]), 1))
            answer = workers[e].ask("time", samples=samples, inner=inner[e])
            measured[e].times += answer["times"]
            measured[e].rates += answer.get("rates", [])
        except EngineError as error:
            measured[e].error = str(error)
            del workers[e]


def compare(
    workers: Mapping[str, Asked],
    measured: dict[str, Measured],
    expected: Expected,
    spec: str,
    tolerance: float,
) -> None:
    """Compare every engine's outputs with the reference; one that differs too much has not been measured."""
    try:
        wanted = expected.of(spec)
    except EngineError as error:
        for m in measured.values():
            m.error = m.error or f"not compared, the reference fails: {error}"
        return
    with tempfile.TemporaryDirectory() as folder:
        for e, worker in workers.items():
            path = Path(folder) / f"{e}.npz"
            worker.ask("save", path=str(path))
            measured[e].difference = apart = difference(_arrays(path), wanted)
            if not apart <= tolerance:
                measured[e].error = f"outputs differ from the reference by {apart:.2g} of the largest"


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
    with Expected() as expected:
        for count in threads:
            with Workers(count) as workers:
                for spec in specs:
                    yield run_row(spec, workers, engines, rounds, say, expected, torch_compile)


def by_workload(rows: Sequence[Row]) -> list[Row]:
    """Rows of one workload side by side: workloads, and thread counts of each, as they first came.

    >>> rows = [Row(name, threads, 0, 0, []) for threads in (1, 2) for name in ("b", "a")]
    >>> [(r.workload, r.threads) for r in by_workload(rows)]
    [('b', 1), ('b', 2), ('a', 1), ('a', 2)]
    """
    order = {name: i for i, name in enumerate(dict.fromkeys(r.workload for r in rows))}
    return sorted(rows, key=lambda r: order[r.workload])
