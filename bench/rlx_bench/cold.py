"""Cold starts of models: fresh processes with an empty cache, from the file to the first result.

Imports are not counted: a first process, which is not measured, says what an engine imports, and measured
ones import that before the clock starts. Each engine uses all cores that it may use.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np

from rlx.config import CACHE
from rlx.records import dataclass
from rlx_bench import cold_worker
from rlx_bench.engines import ENGINES
from rlx_bench.quiet import take_precedence
from rlx_bench.workloads.base import Workload

ENGINES_WITH_FILES = ("rlx", "onnxruntime", "openvino")


@dataclass
class Cold:
    """Starts of one engine with one model."""

    engine: str
    seconds: list[float] = field(default_factory=list)
    peak: float = 0.0
    """Largest resident memory of the process, in bytes."""
    thunks: list[str] = field(default_factory=list)
    """Kernels that the host runs. Of RLX only."""
    error: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def measure(w: Workload, rounds: int, engines: Sequence[str] = ENGINES_WITH_FILES) -> list[Cold]:
    """Cold starts of the installed engines, in turn."""
    found = [Cold(e) for e in engines if ENGINES[e].installed]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, feeds = w.path, folder / "feeds.npz"
        if model is None:
            assert w.onnx is not None, f"{w.name} has no model that engines could load"
            model = folder / "model.onnx"
            model.write_bytes(w.onnx().SerializeToString())
        np.savez(feeds, allow_pickle=False, **w.feed)
        for cold in found:
            answer = _start(cold, [str(model), str(feeds)], folder / "cache-before")
            (folder / f"{cold.engine}.json").write_text(json.dumps(answer.get("modules", [])))
        for i in range(rounds):
            for cold in (c for c in found if not c.error):
                arguments = [str(model), str(feeds), str(folder / f"{cold.engine}.json")]
                answer = _start(cold, arguments, folder / f"cache-{i}-{cold.engine}")
                if not cold.error:
                    cold.seconds.append(answer["seconds"])
                    cold.peak = max(cold.peak, answer["peak"])
                    cold.thunks = answer.get("thunks", [])
    return found


def _start(cold: Cold, arguments: Sequence[str], cache: Path) -> dict[str, Any]:
    """One process; what it says, or nothing and the error of the engine."""
    env = {**os.environ, CACHE.name: str(cache), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-P", cold_worker.__file__, cold.engine, *arguments]
    ahead = take_precedence if os.name == "posix" else None
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, preexec_fn=ahead)
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        cold.error = lines[-1] if lines else f"its process ended with code {done.returncode}"
        return {}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
