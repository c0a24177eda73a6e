"""Whole convolutional networks with random weights against ONNX Runtime: medians, spread, ratio.

    python bench/convnets.py [resnet50|mobilenet_v2|resnext50] [--threads 1] [--batch 1] [--layers]

Engines take turns in one process (`--engine rlx` or `--engine ort` runs one alone, which is fairer with more
than one thread: waiting pools spin). Batch norms are folded into the convolutions. Both engines get the same
weights, and their outputs must agree.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import rlx
from rlx.ops import clip, conv, matmul, max_pool, mean, relu


class Weights:
    """Random arrays, the same for every builder that asks in the same order."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)

    def draw(self, *shape: int, gain: float = 1.0) -> np.ndarray:
        return (self.rng.standard_normal(shape) * gain).astype(np.float32)


class RlxBuilder:
    """The network as a graph; sizes may be symbols."""

    def __init__(self, batch: Any, image: Any) -> None:
        self.graph, self.weights, self.count = rlx.Graph("network"), Weights(), 0
        self.input = self.graph.input("x", (batch, 3, image, image), "f32")

    def param(self, value: np.ndarray) -> Any:
        name, self.count = f"p{self.count}", self.count + 1
        made = self.graph.param(name, value.shape, "f32")
        self.graph.set_param(name, value)
        return made

    def conv(self, x: Any, out: int, size: int, stride: int = 1, groups: int = 1, gain: float = 2.0) -> Any:
        per_in = int(x.shape[1]) // groups
        w = self.weights.draw(out, per_in, size, size, gain=np.sqrt(gain / (per_in * size * size)))
        b = self.weights.draw(out, gain=0.1)
        return conv(x, self.param(w), self.param(b), strides=stride, padding=size // 2, groups=groups)

    def relu(self, x: Any) -> Any:
        return relu(x)

    def relu6(self, x: Any) -> Any:
        return clip(x, 0.0, 6.0)

    def add(self, x: Any, y: Any) -> Any:
        return x + y

    def max_pool(self, x: Any) -> Any:
        return max_pool(x, (3, 3), strides=2, padding=1)

    def classify(self, x: Any, classes: int = 1000) -> None:
        x = mean(x, axis=(2, 3))
        w = self.weights.draw(int(x.shape[1]), classes, gain=1 / np.sqrt(int(x.shape[1])))
        self.graph.output("y", matmul(x, self.param(w)) + self.param(self.weights.draw(classes, gain=0.1)))

    def program(self, threads: int) -> tuple[Callable[[np.ndarray], Any], Any]:
        program = rlx.compile(self.graph, threads=threads)
        return program, program


class OnnxBuilder:
    """The same network for ONNX Runtime; a value is (name, channels)."""

    def __init__(self, batch: int, image: int) -> None:
        self.shape, self.weights = [batch, 3, image, image], Weights()
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self.input = ("x", 3)

    def node(self, op: str, inputs: list[str], channels: int, **attrs: Any) -> tuple[str, int]:
        from onnx import helper

        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], **attrs))
        return name, channels

    def param(self, value: np.ndarray) -> str:
        from onnx import numpy_helper

        name = f"p{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(value, name))
        return name

    def conv(self, x: Any, out: int, size: int, stride: int = 1, groups: int = 1, gain: float = 2.0) -> Any:
        per_in = x[1] // groups
        w = self.weights.draw(out, per_in, size, size, gain=np.sqrt(gain / (per_in * size * size)))
        inputs = [x[0], self.param(w), self.param(self.weights.draw(out, gain=0.1))]
        return self.node("Conv", inputs, out, strides=[stride] * 2, pads=[size // 2] * 4, group=groups)

    def relu(self, x: Any) -> Any:
        return self.node("Relu", [x[0]], x[1])

    def relu6(self, x: Any) -> Any:
        limits = [self.param(np.array(v, np.float32)) for v in (0, 6)]
        return self.node("Clip", [x[0], *limits], x[1])

    def add(self, x: Any, y: Any) -> Any:
        return self.node("Add", [x[0], y[0]], x[1])

    def max_pool(self, x: Any) -> Any:
        return self.node("MaxPool", [x[0]], x[1], kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)

    def classify(self, x: Any, classes: int = 1000) -> None:
        from onnx import helper

        flat = self.node("Flatten", [self.node("GlobalAveragePool", [x[0]], x[1])[0]], x[1])
        w = self.param(self.weights.draw(x[1], classes, gain=1 / np.sqrt(x[1])))
        b = self.param(self.weights.draw(classes, gain=0.1))
        self.nodes.append(helper.make_node("Gemm", [flat[0], w, b], ["y"]))

    def program(self, threads: int) -> tuple[Callable[[np.ndarray], Any], Any]:
        import onnx
        import onnxruntime
        from onnx import helper

        graph = helper.make_graph(
            self.nodes,
            "network",
            [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, self.shape)],
            [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
            self.initializers,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
        return lambda x: session.run(None, {"x": x})[0], session


def bottlenecks(net: Any, groups: int, width: int) -> None:
    """ResNet-50 (v1.5: the 3x3 convolution of a block carries its stride) and its grouped relative."""
    x = net.max_pool(net.relu(net.conv(net.input, 64, 7, 2)))
    for stage, depth in enumerate((3, 4, 6, 3)):
        inside, outside = width << stage, 256 << stage
        for block in range(depth):
            stride = 2 if stage and not block else 1
            shortcut = net.conv(x, outside, 1, stride, gain=1.0) if block == 0 else x
            y = net.relu(net.conv(x, inside, 1))
            y = net.relu(net.conv(y, inside, 3, stride, groups))
            x = net.relu(net.add(net.conv(y, outside, 1, gain=0.5), shortcut))
    net.classify(x)


def mobilenet_v2(net: Any) -> None:
    """Inverted residuals with depthwise convolutions."""
    x, channels = net.relu6(net.conv(net.input, 32, 3, 2)), 32
    for expand, out, repeat, stride in (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ):
        for i in range(repeat):
            y = net.relu6(net.conv(x, channels * expand, 1)) if expand > 1 else x
            y = net.relu6(net.conv(y, channels * expand, 3, stride if i == 0 else 1, channels * expand))
            y = net.conv(y, out, 1, gain=1.0)
            x = net.add(x, y) if channels == out and i else y
            channels = out
    net.classify(net.relu6(net.conv(x, 1280, 1)))


NETWORKS: dict[str, Callable[[Any], None]] = {
    "resnet50": lambda net: bottlenecks(net, 1, 64),
    "resnext50": lambda net: bottlenecks(net, 32, 128),
    "mobilenet_v2": mobilenet_v2,
}


def report(name: str, times: list[float]) -> None:
    ms = np.array(times) * 1e3
    low, middle, high = np.percentile(ms, [10, 50, 90])
    spread = f"10..90 % {low:7.2f} .. {high:7.2f}"
    print(f"{name:4s} best {ms.min():7.2f} ms   median {middle:7.2f}   {spread}   n {len(ms)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network", choices=sorted(NETWORKS), nargs="?", default="resnet50")
    parser.add_argument("--engine", choices=("rlx", "ort", "both"), default="both")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--image", type=int, default=224)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--layers", action="store_true", help="time of every kernel of ours")
    args = parser.parse_args()
    x = np.random.default_rng(1).standard_normal((args.batch, 3, args.image, args.image)).astype(np.float32)
    engines: dict[str, Callable[[np.ndarray], Any]] = {}
    made: dict[str, Any] = {}
    for name, builder in (("rlx", RlxBuilder), ("ort", OnnxBuilder)):
        if args.engine in (name, "both"):
            net = builder(args.batch, args.image)
            NETWORKS[args.network](net)
            start = time.perf_counter()
            engines[name], made[name] = net.program(args.threads)
            print(f"{name} ready after {time.perf_counter() - start:.2f} s")
    if "rlx" in made:
        print(made["rlx"].stats)
    if len(engines) == 2:
        got, want = (np.asarray(run(x)) for run in engines.values())
        print(f"largest difference {abs(got - want).max():.2e} of {abs(want).max():.2e}")
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3 * float(abs(want).max()))
    times: dict[str, list[float]] = {name: [] for name in engines}
    end = time.perf_counter() + args.seconds
    while time.perf_counter() < end:
        for name, run in engines.items():
            run(x)
            for _ in range(3):
                begin = time.perf_counter()
                run(x)
                times[name].append(time.perf_counter() - begin)
    for name, taken in times.items():
        report(name, taken)
    if len(times) == 2:
        median, best = (f(times["ort"]) / f(times["rlx"]) for f in (np.median, min))
        print(f"ratio of medians {median:.3f}, of bests {best:.3f}")
    if args.layers:
        rows = made["rlx"].profile({"x": x})
        for node, micros in rows:
            print(f"{micros:9.1f} us  {made['rlx'].describe(node)} -> {node.type}")
        print(f"{sum(t for _, t in rows) / 1e3:.2f} ms in {len(rows)} kernels")


if __name__ == "__main__":
    main()
