"""ONNX models with random weights, written node by node."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.records import dataclass
from rlx.zoo.onnx_writer import OnnxWriter
from rlx_bench.workloads.base import normal, rng


class _Convnet(OnnxWriter):
    def __init__(self) -> None:
        super().__init__()
        self.random = rng()

    def conv(self, x: str, channels: tuple[int, int], kernel: int, stride: int = 1, gain: float = 1.4) -> str:
        inputs, outputs = channels
        scale = gain / np.sqrt(inputs * kernel * kernel)
        w = self.constant(normal(self.random, outputs, inputs, kernel, kernel, scale=scale), np.float32)
        b = self.constant(normal(self.random, outputs, scale=0.1), np.float32)
        pads = [kernel // 2] * 4
        return self.op("Conv", x, w, b, kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=pads)

    def relu(self, x: str) -> str:
        return self.op("Relu", x)


def resnet50_model(batch: int) -> Any:
    """v1.5: the 3x3 convolution of a block carries its stride. Batch norms are folded, as exporters do."""
    net = _Convnet()
    x = net.relu(net.conv("x", (3, 64), 7, 2))
    x, width = net.op("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4), 64
    for stage, depth in enumerate((3, 4, 6, 3)):
        inside, outside = 64 << stage, 256 << stage
        for block in range(depth):
            stride = 2 if stage and not block else 1
            shortcut = net.conv(x, (width, outside), 1, stride, gain=1.0) if block == 0 else x
            y = net.relu(net.conv(x, (width, inside), 1))
            y = net.relu(net.conv(y, (inside, inside), 3, stride))
            x = net.relu(net.op("Add", net.conv(y, (inside, outside), 1, gain=0.5), shortcut))
            width = outside
    flat = net.op("Flatten", net.op("GlobalAveragePool", x))
    w = net.constant(normal(net.random, width, 1000, scale=width**-0.5), np.float32)
    net.op("Gemm", flat, w, net.constant(normal(net.random, 1000), np.float32), outputs=["y"])
    f32 = np.float32
    return net.model("resnet50", {"x": (f32, (batch, 3, 224, 224))}, {"y": (f32, (batch, 1000))})


class _Decoder(OnnxWriter):
    hidden, heads = 768, 12

    def __init__(self) -> None:
        super().__init__()
        self.random = rng()

    def linear(self, x: str, inputs: int, outputs: int) -> str:
        w = self.constant(normal(self.random, inputs, outputs, scale=0.02), np.float32)
        return self.op("Add", self.op("MatMul", x, w), self.constant(np.zeros(outputs), np.float32))

    def norm(self, x: str) -> str:
        scale = self.constant(np.ones(self.hidden), np.float32)
        shift = self.constant(np.zeros(self.hidden), np.float32)
        return self.op("LayerNormalization", x, scale, shift, axis=-1, epsilon=1e-5)

    def gelu(self, x: str) -> str:
        """GPT-2's, by tanh."""

        def number(value: float) -> str:
            return self.constant(value, np.float32)

        cube = self.op("Mul", self.op("Mul", self.op("Mul", x, x), x), number(0.044715))
        inner = self.op("Mul", self.op("Add", x, cube), number(float(np.sqrt(2 / np.pi))))
        tanh = self.op("Add", self.op("Tanh", inner), number(1.0))
        return self.op("Mul", self.op("Mul", x, number(0.5)), tanh)

    def attend(self, x: str, layer: int, seq: int, past: int) -> str:
        depth = self.hidden // self.heads
        split = self.constant([0, 0, self.heads, depth])
        sizes = self.constant([self.hidden] * 3)
        parts = [f"{kind}_{layer}" for kind in "qkv"]
        self.op("Split", self.linear(x, self.hidden, 3 * self.hidden), sizes, outputs=parts, axis=-1)
        q, k, v = (self.op("Transpose", self.op("Reshape", p, split), perm=[0, 2, 1, 3]) for p in parts)
        kept = [f"present_{kind}_{layer}" for kind in "kv"]
        for value, kind, name in ((k, "k", kept[0]), (v, "v", kept[1])):
            if past:
                self.op("Concat", f"past_{kind}_{layer}", value, outputs=[name], axis=2)
            else:
                self.op("Identity", value, outputs=[name])
        scores = self.op("MatMul", q, self.op("Transpose", kept[0], perm=[0, 1, 3, 2]))
        scores = self.op("Mul", scores, self.constant(depth**-0.5, np.float32))
        if seq > 1:
            hidden = np.triu(np.full((seq, seq + past), -1e9, np.float32), past + 1)
            scores = self.op("Add", scores, self.weight("future", hidden))
        context = self.op("MatMul", self.op("Softmax", scores, axis=-1), kept[1])
        joined = self.op(
            "Reshape", self.op("Transpose", context, perm=[0, 2, 1, 3]), self.constant([0, 0, self.hidden])
        )
        return self.linear(joined, self.hidden, self.hidden)


def gpt2_model(seq: int, past: int, layers: int = 12, vocabulary: int = 50257) -> Any:
    """GPT-2 small: tied embeddings, keys and values in and out."""
    net = _Decoder()
    words = net.weight("words", normal(net.random, vocabulary, net.hidden, scale=0.02))
    places = net.weight("places", normal(net.random, 1024, net.hidden, scale=0.02))
    x = net.op("Add", net.op("Gather", words, "ids"), net.op("Gather", places, "position"))
    for layer in range(layers):
        x = net.op("Add", x, net.attend(net.norm(x), layer, seq, past))
        inner = net.gelu(net.linear(net.norm(x), net.hidden, 4 * net.hidden))
        x = net.op("Add", x, net.linear(inner, 4 * net.hidden, net.hidden))
    if seq > 1:  # what generation needs of a prompt
        x = net.op("Slice", x, net.constant([seq - 1]), net.constant([seq]), net.constant([1]))
    net.op("MatMul", net.norm(x), net.op("Transpose", words, perm=[1, 0]), outputs=["logits"])
    cache = (np.float32, (1, net.heads, past, 64))
    grown = (np.float32, (1, net.heads, past + seq, 64))
    inputs: dict[str, Any] = {"ids": (np.int64, (1, seq)), "position": (np.int64, (1, seq))}
    outputs: dict[str, Any] = {"logits": (np.float32, (1, 1, vocabulary))}
    for layer in range(layers):
        inputs |= {f"past_{kind}_{layer}": cache for kind in "kv" if past}
        outputs |= {f"present_{kind}_{layer}": grown for kind in "kv"}
    return net.model("gpt2", inputs, outputs)


@dataclass
class _Lstm:
    """Weights in ONNX's order of gates (i o f c)."""

    w: np.ndarray
    r: np.ndarray
    b: np.ndarray
    sizes: tuple[int, int, int]

    def model(self) -> Any:
        steps, batch, _ = self.sizes
        hidden = self.r.shape[1]
        net = OnnxWriter()
        bias = np.concatenate([self.b, np.zeros_like(self.b)])[None]
        weights = net.weight("w", self.w[None]), net.weight("r", self.r[None]), net.weight("b", bias)
        net.op("LSTM", "x", *weights, outputs=["y"], hidden_size=hidden)
        f32 = np.float32
        return net.model("lstm", {"x": (f32, self.sizes)}, {"y": (f32, (steps, 1, batch, hidden))})


def lstm_model(steps: int, batch: int, inputs: int, hidden: int) -> _Lstm:
    """One layer with random weights."""
    generator, scale = rng(), hidden**-0.5
    w, r = (
        normal(generator, 4 * hidden, inputs, scale=scale),
        normal(generator, 4 * hidden, hidden, scale=scale),
    )
    return _Lstm(w, r, normal(generator, 4 * hidden, scale=0.1), (steps, batch, inputs))
