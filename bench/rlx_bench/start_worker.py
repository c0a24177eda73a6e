"""One start of one engine: time to the first result, beyond importing NumPy, to a new length; peak memory.

It is run as a file, and imports nothing but NumPy before the clock starts: `import rlx` is part of a start.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from os.path import exists
from typing import Any

import numpy as np

Model = Callable[[dict[str, np.ndarray]], Any]


def _rlx(path: str) -> Model:
    from rlx.api.session import load

    run: Model = load(path).run
    return run


def _rlx_file(path: str) -> Model:
    """From an artefact next to the model, written by the first start, which is not measured."""
    from rlx.api.session import load

    saved = path.removesuffix(".onnx") + ".rlx"
    if not exists(saved):
        load(path).save(saved)
    run: Model = load(saved).run
    return run


def _onnxruntime(path: str) -> Model:
    import onnxruntime as ort

    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda feed: session.run(None, feed)


def _openvino(path: str) -> Model:
    import openvino as ov

    settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    compiled = ov.Core().compile_model(path, "CPU", settings)
    return lambda feed: list(compiled(feed).values())


LOADERS = {"rlx": _rlx, "rlx from .rlx": _rlx_file, "onnxruntime": _onnxruntime, "openvino": _openvino}


def main() -> None:
    engine, path, first, new = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])

    def feed(length: int) -> dict[str, np.ndarray]:
        return {
            "input_ids": np.arange(1000, 1000 + length)[None],
            "attention_mask": np.ones((1, length), np.int64),
        }

    def spent(model: Model, values: dict[str, np.ndarray]) -> float:
        start = time.perf_counter()
        model(values)
        return time.perf_counter() - start

    start = time.perf_counter()
    model = LOADERS[engine](path)
    model(feed(first))
    until_first = time.perf_counter() - start
    again = spent(model, feed(new))
    usual = min(spent(model, feed(new)) for _ in range(5))
    import json

    print(json.dumps({"first": until_first, "new": max(again - usual, 0.0), "peak": peak_bytes()}))


def peak_bytes() -> int:
    """Largest resident size since this program began (rusage also counts the process that started it)."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    main()
