"""Convolutions of bytes, as exporters write them: real layers between DequantizeLinear and QuantizeLinear."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.zoo.onnx_writer import OnnxWriter
from rlx_bench.workloads.base import Workload, rng

QUANTUM = 1 / 255
"""Results are bytes: a sum at the half between two of them may be rounded either way."""
SCALE = 0.02
"""Of activations. Their zero point is 0, so that rounding to bytes is a relu too."""
PEERS = ("onnxruntime", "openvino")


class _QuantisedLayers:
    """Writes layers whose operands and results are bytes."""

    def __init__(self) -> None:
        self.writer = OnnxWriter()
        self.scale, self.zero = self.writer.scalar("scale", SCALE), self.writer.scalar("zero", 0, np.uint8)
        self._generator = rng()

    def real(self, value: str) -> str:
        return self.writer.op("DequantizeLinear", value, self.scale, self.zero)

    def bytes(self, value: str, *name: str) -> str:
        return self.writer.op("QuantizeLinear", value, self.scale, self.zero, outputs=name)

    def conv(self, x: str, into: int, out: int, window: int) -> str:
        """A convolution that keeps the size of the image, with a scale per channel; its result is real."""
        writer, number = self.writer, len(self.writer.nodes)
        w = self._generator.integers(-64, 64, (out, into, window, window)).astype(np.int8)
        each = self._generator.uniform(0.8, 1.2, out) / (37 * np.sqrt(into) * window)  # results like operands
        scale = writer.weight(f"scale{number}", each.astype(np.float32))
        zero = writer.weight(f"zero{number}", np.zeros(out, np.int8))
        weight = writer.op("DequantizeLinear", writer.weight(f"w{number}", w), scale, zero, axis=0)
        return writer.op("Conv", self.real(x), weight, pads=[window // 2] * 4)


def _images(channels: int, size: int) -> np.ndarray:
    return rng(1).integers(0, 256, (1, channels, size, size)).astype(np.uint8)


def int8_conv(channels: int, size: int, window: int = 3) -> Workload:
    """One convolution of a residual network's kind: as many channels out as in."""
    x = _images(channels, size)

    def onnx() -> Any:
        layers = _QuantisedLayers()
        layers.bytes(layers.conv("x", channels, channels, window), "y")
        return layers.writer.model("int8-conv", {"x": (x.dtype, x.shape)}, {"y": (x.dtype, x.shape)})

    flops = 2.0 * x.size * channels * window**2
    name = f"int8 conv {window}x{window}, {channels} channels, {size}x{size}"
    return Workload(name, {"x": x}, PEERS, onnx, flops=flops, tolerance=1.01 * QUANTUM, dtype="i8")


def int8_bottlenecks(blocks: int, channels: int, size: int) -> Workload:
    """Residual blocks of 1x1, 3x3 and 1x1 convolutions, a quarter of the channels inside, as in ResNet-50."""
    x, inner = _images(channels, size), channels // 4

    def onnx() -> Any:
        layers = _QuantisedLayers()
        value = "x"
        for block in range(blocks):
            narrow = layers.bytes(layers.conv(value, channels, inner, 1))
            narrow = layers.bytes(layers.conv(narrow, inner, inner, 3))
            wide = layers.real(layers.bytes(layers.conv(narrow, inner, channels, 1)))
            value = layers.bytes(
                layers.writer.op("Add", wide, layers.real(value)), *(["y"] if block == blocks - 1 else [])
            )
        return layers.writer.model("int8-bottlenecks", {"x": (x.dtype, x.shape)}, {"y": (x.dtype, x.shape)})

    flops = 2.0 * blocks * size**2 * (2 * channels * inner + 9 * inner**2)
    # A byte that is rounded the other way reaches the results of all blocks behind it.
    name = f"int8 bottlenecks, {blocks} of {channels} channels, {size}x{size}"
    return Workload(name, {"x": x}, PEERS, onnx, flops=flops, tolerance=4 * QUANTUM, dtype="i8")
