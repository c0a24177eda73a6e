"""ResNet-50 with random weights against ONNX Runtime, interleaved: medians, spread, ratio.

    python bench/resnet50.py [--threads 1] [--batch 1] [--image 224] [--seconds 10] [--layers]

The network is the usual one (v1.5: the 3x3 convolution of a block carries its stride) with batch norms folded
into the convolutions. The same weights go to both engines, and outputs must agree.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import rlx
from rlx.ops import conv, matmul, max_pool, mean, relu, reshape

DEPTHS, WIDTHS = (3, 4, 6, 3), (64, 128, 256, 512)


@dataclass(frozen=True)
class Weights:
    """Kernels and biases in the order in which the network uses them, and the classifier."""

    convs: list[tuple[np.ndarray, np.ndarray]]
    fc: tuple[np.ndarray, np.ndarray]

    @staticmethod
    def random(seed: int = 0) -> Weights:
        rng = np.random.default_rng(seed)

        def one(o: int, i: int, k: int, gain: float = 2.0) -> tuple[np.ndarray, np.ndarray]:
            w = rng.standard_normal((o, i, k, k)) * np.sqrt(gain / (i * k * k))
            return w.astype(np.float32), (rng.standard_normal(o) * 0.1).astype(np.float32)

        convs, channels = [one(64, 3, 7)], 64
        for depth, width in zip(DEPTHS, WIDTHS, strict=True):
            for block in range(depth):
                if block == 0:
                    convs.append(one(width * 4, channels, 1, 1.0))
                convs += [one(width, channels, 1), one(width, width, 3), one(width * 4, width, 1, 0.5)]
                channels = width * 4
        fc = (rng.standard_normal((channels, 1000)) / np.sqrt(channels)).astype(np.float32)
        return Weights(convs, (fc, (rng.standard_normal(1000) * 0.1).astype(np.float32)))


def ours(weights: Weights, batch: Any, image: Any) -> rlx.Graph:
    """The network as a graph; sizes may be symbols."""
    graph = rlx.Graph("resnet50")
    following = iter(enumerate(weights.convs))

    def layer(x: Any, stride: int = 1) -> Any:
        number, (w, b) = next(following)
        params = []
        for kind, value in (("w", w), ("b", b)):
            params.append(graph.param(f"{kind}{number}", value.shape, "f32"))
            graph.set_param(f"{kind}{number}", value)
        return conv(x, *params, strides=stride, padding=w.shape[2] // 2)

    x = graph.input("x", (batch, 3, image, image), "f32")
    x = max_pool(relu(layer(x, 2)), (3, 3), strides=2, padding=1)
    for stage, depth in enumerate(DEPTHS):
        for block in range(depth):
            stride = 2 if stage and not block else 1
            shortcut = layer(x, stride) if block == 0 else x
            y = relu(layer(x))
            y = relu(layer(y, stride))
            x = relu(layer(y) + shortcut)
    x = mean(x, axis=(2, 3))
    w = graph.param("fc.w", weights.fc[0].shape, "f32")
    b = graph.param("fc.b", weights.fc[1].shape, "f32")
    graph.set_param("fc.w", weights.fc[0])
    graph.set_param("fc.b", weights.fc[1])
    graph.output("y", matmul(reshape(x, (x.shape[0], 2048)), w) + b)
    return graph


def theirs(weights: Weights, batch: int, image: int, threads: int) -> Any:
    """The same network as an ONNX Runtime session."""
    import onnx
    import onnxruntime
    from onnx import helper, numpy_helper

    nodes: list[Any] = []
    initializers: list[Any] = []
    following: Iterator[tuple[int, tuple[np.ndarray, np.ndarray]]] = iter(enumerate(weights.convs))

    def add(op: str, inputs: list[str], **attrs: Any) -> str:
        name = f"t{len(nodes)}"
        nodes.append(helper.make_node(op, inputs, [name], **attrs))
        return name

    def layer(x: str, stride: int = 1) -> str:
        number, (w, b) = next(following)
        initializers.extend(
            [numpy_helper.from_array(w, f"w{number}"), numpy_helper.from_array(b, f"b{number}")]
        )
        pad = w.shape[2] // 2
        return add("Conv", [x, f"w{number}", f"b{number}"], strides=[stride] * 2, pads=[pad] * 4)

    x = add("Relu", [layer("x", 2)])
    x = add("MaxPool", [x], kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    for stage, depth in enumerate(DEPTHS):
        for block in range(depth):
            stride = 2 if stage and not block else 1
            shortcut = layer(x, stride) if block == 0 else x
            y = add("Relu", [layer(x)])
            y = add("Relu", [layer(y, stride)])
            x = add("Relu", [add("Add", [layer(y), shortcut])])
    x = add("Flatten", [add("GlobalAveragePool", [x])])
    initializers += [
        numpy_helper.from_array(weights.fc[0], "fw"),
        numpy_helper.from_array(weights.fc[1], "fb"),
    ]
    nodes.append(helper.make_node("Gemm", [x, "fw", "fb"], ["y"]))
    model = helper.make_model(
        helper.make_graph(
            nodes,
            "resnet50",
            [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [batch, 3, image, image])],
            [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
            initializers,
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    return lambda x: session.run(None, {"x": x})[0]


def report(name: str, times: list[float]) -> float:
    ms = np.array(times) * 1e3
    low, middle, high = np.percentile(ms, [10, 50, 90])
    print(
        f"{name:6s} best {ms.min():7.2f} ms   median {middle:7.2f}   "
        f"10..90 % {low:7.2f} .. {high:7.2f}   n {len(ms)}"
    )
    return float(middle)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--image", type=int, default=224)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--layers", action="store_true", help="time of every kernel of ours")
    args = parser.parse_args()
    weights = Weights.random()
    start = time.perf_counter()
    program = rlx.compile(ours(weights, args.batch, args.image), threads=args.threads)
    print(f"compiled in {time.perf_counter() - start:.2f} s: {program.stats}")
    peer = theirs(weights, args.batch, args.image, args.threads)
    x = np.random.default_rng(1).standard_normal((args.batch, 3, args.image, args.image)).astype(np.float32)
    got, want = program(x), peer(x)
    print(f"largest difference {abs(got - want).max():.2e} of {abs(want).max():.2e}")
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3 * float(abs(want).max()))
    times: dict[str, list[float]] = {"rlx": [], "ort": []}
    end = time.perf_counter() + args.seconds
    while time.perf_counter() < end:
        for name, run in (("rlx", program), ("ort", peer)):
            run(x)
            for _ in range(3):
                begin = time.perf_counter()
                run(x)
                times[name].append(time.perf_counter() - begin)
    medians = {name: report(name, t) for name, t in times.items()}
    best = min(times["ort"]) / min(times["rlx"])
    print(f"ratio of medians {medians['ort'] / medians['rlx']:.3f}, of bests {best:.3f}")
    if args.layers:
        rows = program.profile({"x": x})
        for node, micros in rows:
            print(f"{micros:9.1f} us  {program.describe(node)} -> {node.type}")
        print(f"{sum(t for _, t in rows) / 1e3:.2f} ms in {len(rows)} kernels")


if __name__ == "__main__":
    main()
