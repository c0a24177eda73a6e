"""How long until the first result, and how much memory: each engine in fresh processes, in turn.

Times are of the work beyond importing NumPy. *cold* starts from the model with empty caches, *warm* again
with what the first start left behind (RLX: its code cache), *new length* is the first run at a size not seen
before minus a run at a size that was, *peak* the largest resident memory of the process.

Every engine starts once before anything is measured: Python has compiled all its modules then, as installing
does, and libraries are in memory. After an edit of its own source RLX compiles models anew, so a measurement
during which somebody edits it says nothing.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import field
from pathlib import Path
from typing import Any

from rlx.config import CACHE
from rlx.records import dataclass
from rlx_bench import start_worker
from rlx_bench.engines import ENGINES
from rlx_bench.quiet import take_precedence
from rlx_bench.report import markdown_table

FIRST, NEW = 128, 77  # lengths of sentences
ENGINES_WITH_STARTS = ("rlx", "rlx from .rlx", "onnxruntime", "openvino")


@dataclass
class Start:
    """Medians over processes, in seconds and bytes."""

    engine: str
    cold: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)
    new_length: list[float] = field(default_factory=list)
    peak: list[float] = field(default_factory=list)


def measure(rounds: int, say: Callable[[str], None]) -> list[Start]:
    """MiniLM from its ONNX file, batch 1."""
    found = [Start(e) for e in ENGINES_WITH_STARTS if ENGINES[e.split()[0]].installed]
    with tempfile.TemporaryDirectory() as folder:
        model = _write_model(Path(folder))
        for start in found:
            say(f"starts: {start.engine}, not measured")
            _child(start.engine, model, Path(folder) / "cache-before")
        for i in range(rounds):
            for start in found:
                say(f"starts: round {i + 1} of {rounds}, {start.engine}")
                cache = Path(folder) / f"cache-{i}-{start.engine.split()[0]}"
                if start.engine != "rlx from .rlx":  # its file is what the cold start leaves
                    start.cold.append(_child(start.engine, model, cache)["first"])
                warm = _child(start.engine, model, cache)
                start.warm.append(warm["first"])
                start.new_length.append(warm["new"])
                start.peak.append(warm["peak"])
    return found


def _write_model(folder: Path) -> Path:
    from rlx_bench.workloads import make

    model = make(f"minilm:1,{FIRST}").onnx
    assert model is not None
    path = folder / "minilm.onnx"
    path.write_bytes(model().SerializeToString())
    return path


def _child(engine: str, model: Path, cache: Path) -> dict[str, float]:
    env = {**os.environ, CACHE.name: str(cache), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    # -P: do not import from the file's own folder
    command = [sys.executable, "-P", start_worker.__file__, engine, str(model), str(FIRST), str(NEW)]
    ahead = take_precedence if os.name == "posix" else None
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, preexec_fn=ahead)
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def table(starts: list[Start]) -> tuple[list[str], list[list[str]]]:
    """Head and cells."""

    def ms(values: list[float]) -> str:
        return f"{statistics.median(values) * 1e3:.1f} ms" if values else "-"

    cells = [
        [s.engine, ms(s.cold), ms(s.warm), ms(s.new_length), f"{statistics.median(s.peak) / 2**20:.0f} MiB"]
        for s in starts
    ]
    return ["MiniLM", "cold start", "warm start", "new length", "peak memory"], cells


def as_markdown(starts: list[Start]) -> str:
    """A section of a page."""
    told = (
        "*cold* starts from the ONNX file with empty caches, *warm* with what that left behind; both to the\n"
        "first result, beyond importing NumPy. *new length* is the first run at a length minus later ones."
    )
    return "\n".join(["", "## Starts", "", told, "", *markdown_table(*table(starts)), ""])


def as_json(starts: list[Start]) -> list[dict[str, Any]]:
    """Rows for machines."""
    return [{"start": s.engine, **{k: v for k, v in vars(s).items() if k != "engine"}} for s in starts]
