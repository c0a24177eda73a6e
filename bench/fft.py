"""Fourier kernels against SciPy, and the whisper front end against ONNX Runtime, interleaved.

python bench/fft.py [--threads 1] [--only whisper] [--seconds 0.5]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import rlx
from rlx.ops.signal.fft_split import fft_split, rfft_split

CASES = [  # kind, rows, elements, dtype
    ("real", 3000, 400, "f32"),
    ("real", 3000, 512, "f32"),
    ("real", 1000, 1024, "f32"),
    ("real", 300, 4096, "f32"),
    ("real", 1, 400, "f32"),
    ("real", 1, 4096, "f32"),
    ("real", 1, 65536, "f32"),
    ("real", 1, 1 << 20, "f32"),
    ("real", 1000, 37, "f32"),
    ("real", 100, 401, "f32"),
    ("real", 16, 10007, "f32"),
    ("complex", 1000, 256, "f32"),
    ("complex", 1000, 1000, "f32"),
    ("real", 1000, 1024, "f64"),
    ("complex", 1, 65536, "f64"),
]
ZOO = Path.home() / ".cache" / "rlx" / "zoo"


def interleaved(functions: dict[str, Callable[[], Any]], seconds: float) -> dict[str, tuple[float, float]]:
    """(median, best) seconds of each; rounds alternate, so that noise meets all of them."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for f in functions.values():
        f()
    end = time.perf_counter() + seconds * len(functions)
    while time.perf_counter() < end or len(next(iter(times.values()))) < 5:
        for name, f in functions.items():
            start = time.perf_counter()
            f()
            times[name].append(time.perf_counter() - start)
    return {name: (float(np.median(t)), min(t)) for name, t in times.items()}


def transform(kind: str, rows: int, n: int, dtype: str, threads: int, seconds: float) -> None:
    import scipy.fft

    real = np.float32 if dtype == "f32" else np.float64
    graph = rlx.Graph("transform")
    parts = [graph.input(f"x{i}", (rows, n), dtype) for i in range(1 if kind == "real" else 2)]
    with graph.building():
        for i, y in enumerate(rfft_split(*parts) if kind == "real" else fft_split(*parts)):
            graph.output(f"y{i}", y)
    program = rlx.compile(graph, threads=threads)
    rng = np.random.default_rng(0)
    inputs = {f"x{i}": rng.standard_normal((rows, n)).astype(real) for i in range(len(parts))}
    bins = n // 2 + 1 if kind == "real" else n
    outputs = {f"y{i}": np.empty((rows, bins), real) for i in range(2)}
    run = program.bind(inputs, outputs)
    if kind == "real":
        peer = lambda: scipy.fft.rfft(inputs["x0"], workers=threads)  # noqa: E731
    else:
        z = inputs["x0"] + 1j * inputs["x1"]
        peer = lambda: scipy.fft.fft(z, workers=threads)  # noqa: E731
    run()
    want = peer()
    error = np.abs(outputs["y0"] + 1j * outputs["y1"] - want).max() / np.abs(want).max()
    found = interleaved({"rlx": run, "scipy": peer}, seconds)
    (ours, best), (theirs, _) = found["rlx"], found["scipy"]
    print(
        f"{kind:8s} {rows:5d} x {n:8d} {dtype}  rlx {ours * 1e3:9.4f} ms (best {best * 1e3:.4f})  "
        f"scipy {theirs * 1e3:9.4f} ms  {theirs / ours:5.2f}x  difference {error:.1e}",
        flush=True,
    )


def whisper(threads: int, seconds: float) -> None:
    import onnxruntime as ort

    from rlx.frontend.onnx import from_onnx

    size = 480_000
    envelope = np.abs(np.sin(np.arange(size) / 9000))
    x = (np.random.default_rng(0).standard_normal((1, size)) * 0.1 * envelope).astype(np.float32)
    feed = {"waveforms": x, "waveforms_lens": np.array([size], np.int64)}
    program = rlx.compile(from_onnx(ZOO / "whisper80-0.12.0" / "model.onnx"), threads=threads)
    thunks = program.stats["host_thunks"]
    outputs = {"features": np.empty((1, 80, 3000), np.float32), "features_lens": np.empty(1, np.int64)}
    functions: dict[str, Callable[[], Any]] = {"rlx": program.bind(feed, outputs)}
    functions["rlx"]()
    for name, folder in (("ORT STFT", "whisper80-0.12.0"), ("ORT conv", "whisper80-conv-0.12.0")):
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        path = str(ZOO / folder / "model.onnx")
        session = ort.InferenceSession(path, options, ["CPUExecutionProvider"])
        error = np.abs(session.run(None, feed)[0] - outputs["features"]).max()
        print(f"whisper80 largest difference to {name}: {error:.1e}")
        functions[name] = lambda session=session: session.run(None, feed)
    found = interleaved(functions, seconds)
    ours = found["rlx"][0]
    for name, (median, best) in found.items():
        ratio = f"{median / ours:6.1f}x" if name != "rlx" else f"host thunks: {len(thunks)}"
        print(f"whisper80 30 s  {name:9s} {median * 1e3:9.3f} ms (best {best * 1e3:.3f})  {ratio}")
    for node, us in program.profile(feed, 30):
        print(f"    {us:8.1f} us  {program.describe(node)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=0.5)
    args = parser.parse_args()
    for kind, rows, n, dtype in CASES:
        if args.only in f"{kind} {rows} {n} {dtype}":
            transform(kind, rows, n, dtype, args.threads, args.seconds)
    if args.only in "whisper80":
        whisper(args.threads, args.seconds)


if __name__ == "__main__":
    main()
