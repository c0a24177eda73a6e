"""Single convolutions against ONNX Runtime, interleaved: medians, ratio, share of the FMA peak.

python bench/conv.py [--threads 1] [--only resnet] [--seconds 1.0]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import rlx
from rlx.ops import conv, relu


@dataclass(frozen=True)
class Case:
    """One convolution with bias and relu."""

    name: str
    x: tuple[int, ...]
    w: tuple[int, ...]
    strides: int = 1
    padding: int = 0
    dilations: int = 1
    groups: int = 1

    @property
    def flops(self) -> int:
        out = 1
        for d, k in zip(self.x[2:], self.w[2:], strict=True):
            out *= (d + 2 * self.padding - (k - 1) * self.dilations - 1) // self.strides + 1
        return 2 * self.x[0] * out * int(np.prod(self.w))


CASES = [
    Case("resnet stem 7x7s2", (1, 3, 224, 224), (64, 3, 7, 7), 2, 3),
    Case("resnet 64 1x1 @56", (1, 64, 56, 56), (256, 64, 1, 1)),
    Case("resnet 64 3x3 @56", (1, 64, 56, 56), (64, 64, 3, 3), 1, 1),
    Case("resnet 128 3x3 @28", (1, 128, 28, 28), (128, 128, 3, 3), 1, 1),
    Case("resnet 128 3x3s2 @56", (1, 128, 56, 56), (128, 128, 3, 3), 2, 1),
    Case("resnet 256 3x3 @14", (1, 256, 14, 14), (256, 256, 3, 3), 1, 1),
    Case("resnet 512 3x3 @7", (1, 512, 7, 7), (512, 512, 3, 3), 1, 1),
    Case("resnet 1024-512 1x1s2 @14", (1, 1024, 14, 14), (2048, 1024, 1, 1), 2),
    Case("mobile depthwise 96 3x3 @56", (1, 96, 56, 56), (96, 1, 3, 3), 1, 1, 1, 96),
    Case("mobile depthwise 96 3x3s2 @112", (1, 96, 112, 112), (96, 1, 3, 3), 2, 1, 1, 96),
    Case("resnext 128 3x3 32 groups @56", (1, 128, 56, 56), (128, 4, 3, 3), 1, 1, 1, 32),
    Case("dilated 64 3x3 d2 @56", (1, 64, 56, 56), (64, 64, 3, 3), 1, 2, 2),
    Case("odd 37-61 5x5 @33", (1, 37, 33, 33), (61, 37, 5, 5), 1, 2),
    Case("batch8 64 3x3 @28", (8, 64, 28, 28), (64, 64, 3, 3), 1, 1),
    Case("whisper 80-384 3 @3000", (1, 80, 3000), (384, 80, 3), 1, 1),
    Case("whisper 384 3s2 @3000", (1, 384, 3000), (384, 384, 3), 2, 1),
    Case("3d 16-32 3x3x3 @16x32x32", (1, 16, 16, 32, 32), (32, 16, 3, 3, 3), 1, 1),
]


@dataclass
class Engine:
    """A convolution bound to fixed buffers."""

    run: Callable[[], Any]
    output: Callable[[], np.ndarray]


def ours(case: Case, x: np.ndarray, w: np.ndarray, b: np.ndarray, threads: int) -> Engine:
    graph = rlx.Graph(case.name)
    image = graph.input("x", case.x, "f32")
    weights, bias = graph.param("w", case.w, "f32"), graph.param("b", b.shape, "f32")
    graph.set_param("w", w)
    graph.set_param("b", b)
    y = conv(
        image,
        weights,
        bias,
        strides=case.strides,
        padding=case.padding,
        dilations=case.dilations,
        groups=case.groups,
    )
    graph.output("y", relu(y))
    program = rlx.compile(graph, threads=threads)
    if program.stats["host_thunks"]:
        raise SystemExit(f"{case.name}: {program.stats['host_thunks']}")
    out = np.zeros(y.shape, np.float32)
    return Engine(program.bind({"x": x}, {"y": out}), lambda: out)


def runtime_of_onnx(case: Case, x: np.ndarray, w: np.ndarray, b: np.ndarray, threads: int) -> Engine:
    import onnx
    import onnxruntime
    from onnx import helper, numpy_helper

    n = len(case.w) - 2
    attrs = {
        "strides": [case.strides] * n,
        "pads": [case.padding] * (2 * n),
        "dilations": [case.dilations] * n,
        "group": case.groups,
    }
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], **attrs),
        helper.make_node("Relu", ["c"], ["y"]),
    ]
    inputs = [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, case.x)]
    outputs = [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)]
    weights = [numpy_helper.from_array(w, "w"), numpy_helper.from_array(b, "b")]
    model = helper.make_model(
        helper.make_graph(nodes, "conv", inputs, outputs, weights),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    out = session.run(None, {"x": x})[0]
    binding = session.io_binding()
    binding.bind_cpu_input("x", x)
    binding.bind_output("y", "cpu", 0, np.float32, out.shape, out.ctypes.data)
    return Engine(lambda: session.run_with_iobinding(binding), lambda: out)


def interleave(engines: dict[str, Engine], seconds: float) -> dict[str, float]:
    """Median time of each engine, measured in turns."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 6:
        for name, engine in engines.items():
            engine.run()
            for _ in range(3):
                start = time.perf_counter()
                engine.run()
                times[name].append(time.perf_counter() - start)
    return {name: float(np.median(t)) for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--peak", type=float, default=117.6, help="GFLOP/s of one core, for the share column")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    ratios = []
    print(f"{'case':34s} {'rlx us':>9s} {'ort us':>9s} {'ratio':>6s} {'GFLOP/s':>8s} {'peak':>6s}")
    for case in CASES:
        if args.only not in case.name:
            continue
        x = rng.standard_normal(case.x).astype(np.float32)
        w = (rng.standard_normal(case.w) / np.sqrt(np.prod(case.w[1:]))).astype(np.float32)
        b = rng.standard_normal(case.w[0]).astype(np.float32)
        engines = {
            "rlx": ours(case, x, w, b, args.threads),
            "ort": runtime_of_onnx(case, x, w, b, args.threads),
        }
        t = interleave(engines, args.seconds)
        got, want = (engine.output() for engine in engines.values())
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)
        rate = case.flops / t["rlx"] / 1e9
        ratios.append(t["ort"] / t["rlx"])
        share = rate / (args.peak * args.threads)
        micros = f"{t['rlx'] * 1e6:9.1f} {t['ort'] * 1e6:9.1f}"
        print(f"{case.name:34s} {micros} {ratios[-1]:6.2f} {rate:8.1f} {share:6.1%}", flush=True)
    print(f"geometric mean of ratios {float(np.exp(np.mean(np.log(ratios)))):.3f}, worst {min(ratios):.2f}")


if __name__ == "__main__":
    main()
