"""One start of one engine: time to the first result, beyond importing NumPy, to a new length; peak memory."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rlx.bench.quiet import take_precedence

Model = Callable[[dict[str, np.ndarray]], Any]


def _rlx(path: Path) -> Model:
    from rlx.session import load

    run: Model = load(str(path)).run
    return run


def _rlx_file(path: Path) -> Model:
    """From an artefact beside the model, made on the first start."""
    from rlx.session import load

    saved = path.with_suffix(".rlx")
    if not saved.exists():
        load(str(path)).save(str(saved))
    run: Model = load(str(saved)).run
    return run


def _onnxruntime(path: Path) -> Model:
    import onnxruntime as ort

    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda feed: session.run(None, feed)


def _openvino(path: Path) -> Model:
    import openvino as ov

    settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    compiled = ov.Core().compile_model(str(path), "CPU", settings)
    return lambda feed: list(compiled(feed).values())


LOADERS = {"rlx": _rlx, "rlx from .rlx": _rlx_file, "onnxruntime": _onnxruntime, "openvino": _openvino}


def main() -> None:
    engine, path, first, new = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])

    def feed(length: int) -> dict[str, np.ndarray]:
        return {
            "input_ids": np.arange(1000, 1000 + length)[None],
            "attention_mask": np.ones((1, length), np.int64),
        }

    def spent(model: Model, values: dict[str, np.ndarray]) -> float:
        start = time.perf_counter()
        model(values)
        return time.perf_counter() - start

    take_precedence()
    if engine == "rlx from .rlx" and not path.with_suffix(".rlx").exists():
        _rlx_file(path)  # not timed: the file is there when a user starts
    start = time.perf_counter()
    model = LOADERS[engine](path)
    model(feed(first))
    until_first = time.perf_counter() - start
    again = spent(model, feed(new))
    usual = min(spent(model, feed(new)) for _ in range(5))
    print(json.dumps({"first": until_first, "new": max(again - usual, 0.0), "peak": _peak_bytes()}))


def _peak_bytes() -> int:
    """Largest resident size since this program began (rusage also counts the process that started it)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    main()
