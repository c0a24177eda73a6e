"""Layers of networks as ONNX nodes: values carry their shapes, weights are random with a fixed seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.records import dataclass
from rlx.zoo.onnx_writer import OnnxWriter
from rlx_bench.workloads.base import Arrays

ML = "ai.onnx.ml"
CONTRIB = "com.microsoft"
FUTURE = float(np.finfo(np.float32).min)
"""What exporters add to scores that may not be seen."""


@dataclass(frozen=True)
class Value:
    """A tensor of the model."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Made:
    """A model, what it is fed with, and the flops of its products (two for a multiply-add)."""

    model: Any
    feed: Arrays
    flops: float


def repeated(size: int | Sequence[int], rank: int) -> tuple[int, ...]:
    """A size for every axis."""
    return (size,) * rank if isinstance(size, int) else tuple(size)


class Layers:
    """Writes a network layer by layer.

    >>> net = Layers("two")
    >>> y = net.relu(net.linear(net.input("x", np.ones((3, 4), np.float32)), 5))
    >>> made = net.made(y=y)
    >>> y.shape, [node.op_type for node in made.model.graph.node], made.flops
    ((3, 5), ['MatMul', 'Add', 'Relu', 'Identity'], 120.0)
    """

    def __init__(self, name: str, seed: int = 0) -> None:
        self.name, self.flops = name, 0.0
        self.feed: Arrays = {}
        self._writer = OnnxWriter()
        self._random = np.random.default_rng(seed)
        self._domains: dict[str, int] = {}

    # -- values

    def input(self, name: str, array: np.ndarray) -> Value:
        self.feed[name] = np.ascontiguousarray(array)
        return Value(name, array.shape)

    def noise(self, name: str, *shape: int) -> Value:
        """An input of normal random numbers."""
        return self.input(name, self._random.standard_normal(shape, np.float32))

    def tokens(self, name: str, length: int, vocabulary: int) -> Value:
        """An input of random tokens, one sequence."""
        return self.input(name, self._random.integers(0, vocabulary, (1, length)))

    def constant(self, array: np.ndarray) -> Value:
        return Value(self._writer.constant(array, array.dtype), array.shape)

    def number(self, value: float) -> Value:
        return self.constant(np.asarray(value, np.float32))

    def integers(self, *values: int) -> Value:
        return self.constant(np.array(values, np.int64))

    def weight(self, *shape: int, scale: float = 1.0, around: float = 0.0) -> Value:
        """A random weight."""
        values = self._random.standard_normal(shape, np.float32)
        values *= np.float32(scale)
        return self.constant(values + np.float32(around) if around else values)

    def uniform(self, low: float, high: float, *shape: int) -> np.ndarray:
        return self._random.uniform(low, high, shape).astype(np.float32)

    def whole(self, low: int, high: int, *shape: int, dtype: type[Any] = np.int64) -> np.ndarray:
        """Random integers from low up to high, without it."""
        return self._random.integers(low, high, shape).astype(dtype)

    # -- ops

    def op(self, kind: str, *operands: Value | None, shape: Sequence[int], **attrs: Any) -> Value:
        """One node whose result has a given shape; an operand that is left out is None."""
        names = [v.name if v is not None else "" for v in operands]
        if "domain" in attrs:
            self._domains[attrs["domain"]] = 3 if attrs["domain"] == ML else 1
        return Value(self._writer.op(kind, *names, **attrs), tuple(shape))

    def map(self, kind: str, *operands: Value, **attrs: Any) -> Value:
        """An elementwise node."""
        return self.op(kind, *operands, shape=np.broadcast_shapes(*(v.shape for v in operands)), **attrs)

    def add(self, a: Value, b: Value) -> Value:
        return self.map("Add", a, b)

    def mul(self, a: Value, b: Value) -> Value:
        return self.map("Mul", a, b)

    def relu(self, x: Value) -> Value:
        return self.map("Relu", x)

    def sigmoid(self, x: Value) -> Value:
        return self.map("Sigmoid", x)

    def silu(self, x: Value) -> Value:
        return self.mul(x, self.sigmoid(x))

    def hard_swish(self, x: Value) -> Value:
        return self.map("HardSwish", x)

    def gelu(self, x: Value) -> Value:
        """As torch exports it, by erf."""
        inner = self.map("Erf", self.map("Div", x, self.number(np.sqrt(2))))
        return self.mul(self.mul(x, self.add(inner, self.number(1.0))), self.number(0.5))

    def softmax(self, x: Value, axis: int = -1) -> Value:
        return self.map("Softmax", x, axis=axis)

    def reshape(self, x: Value, *shape: int) -> Value:
        assert np.prod(shape) == np.prod(x.shape), f"{x} does not fit {shape}"
        return self.op("Reshape", x, self.integers(*shape), shape=shape)

    def transpose(self, x: Value, *axes: int) -> Value:
        return self.op("Transpose", x, shape=[x.shape[a] for a in axes], perm=list(axes))

    def concat(self, axis: int, *parts: Value) -> Value:
        shape = list(parts[0].shape)
        shape[axis] = sum(p.shape[axis] for p in parts)
        return self.op("Concat", *parts, shape=shape, axis=axis)

    def slice(self, x: Value, axis: int, start: int, end: int) -> Value:
        shape = list(x.shape)
        shape[axis] = end - start
        return self.op("Slice", x, self.integers(start), self.integers(end), self.integers(axis), shape=shape)

    def mean(self, x: Value, *axes: int) -> Value:
        """Keeps the axes."""
        shape = [1 if a in axes else n for a, n in enumerate(x.shape)]
        return self.op("ReduceMean", x, shape=shape, axes=list(axes), keepdims=1)

    def embed(self, tokens: Value, count: int, width: int, scale: float = 1.0) -> Value:
        """Rows of a table of weights."""
        table = self.weight(count, width, scale=scale)
        return self.op("Gather", table, tokens, shape=(*tokens.shape, width))

    # -- products

    def matmul(self, a: Value, b: Value) -> Value:
        shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
        self.count(shape, a.shape[-1])
        return self.op("MatMul", a, b, shape=shape)

    def count(self, results: Sequence[int], summed: int) -> None:
        """Count the flops of sums of products."""
        self.flops += 2.0 * float(np.prod(results)) * summed

    def linear(self, x: Value, width: int, bias: bool = True) -> Value:
        y = self.matmul(x, self.weight(x.shape[-1], width, scale=x.shape[-1] ** -0.5))
        return self.add(y, self.weight(width, scale=0.1)) if bias else y

    def conv(
        self,
        x: Value,
        channels: int,
        kernel: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        groups: int = 1,
        pad: int | Sequence[int] | None = None,
        gain: float = 1.4,
    ) -> Value:
        """A convolution with bias over all axes behind the channels; batch norms are folded into it."""
        rank = len(x.shape) - 2
        sizes, strides = repeated(kernel, rank), repeated(stride, rank)
        pads = tuple(k // 2 for k in sizes) if pad is None else repeated(pad, rank)
        summed = x.shape[1] // groups * int(np.prod(sizes))
        weight = self.weight(channels, x.shape[1] // groups, *sizes, scale=gain * summed**-0.5)
        spatial = [
            (n + 2 * p - k) // s + 1 for n, p, k, s in zip(x.shape[2:], pads, sizes, strides, strict=True)
        ]
        shape = (x.shape[0], channels, *spatial)
        self.count(shape, summed)
        return self.op(
            "Conv",
            x,
            weight,
            self.weight(channels, scale=0.1),
            shape=shape,
            kernel_shape=sizes,
            strides=strides,
            pads=(*pads, *pads),
            group=groups,
        )

    def max_pool(
        self, x: Value, kernel: int | Sequence[int], stride: int | Sequence[int], pad: int | Sequence[int] = 0
    ) -> Value:
        rank = len(x.shape) - 2
        sizes, strides, pads = (repeated(n, rank) for n in (kernel, stride, pad))
        spatial = [
            (n + 2 * p - k) // s + 1 for n, p, k, s in zip(x.shape[2:], pads, sizes, strides, strict=True)
        ]
        shape = (*x.shape[:2], *spatial)
        return self.op("MaxPool", x, shape=shape, kernel_shape=sizes, strides=strides, pads=(*pads, *pads))

    def pooled(self, x: Value) -> Value:
        """The mean of every channel."""
        return self.op("GlobalAveragePool", x, shape=(*x.shape[:2], *[1] * (len(x.shape) - 2)))

    def flat(self, x: Value) -> Value:
        return self.op("Flatten", x, shape=(x.shape[0], int(np.prod(x.shape[1:]))))

    # -- norms

    def norm(self, x: Value, epsilon: float = 1e-5) -> Value:
        scale, shift = self.weight(x.shape[-1], scale=0.1, around=1.0), self.weight(x.shape[-1], scale=0.1)
        return self.op("LayerNormalization", x, scale, shift, shape=x.shape, axis=-1, epsilon=epsilon)

    def rms_norm(self, x: Value) -> Value:
        """As exporters write it, in single ops."""
        square = self.mean(self.map("Pow", x, self.number(2.0)), len(x.shape) - 1)
        root = self.map("Sqrt", self.add(square, self.number(1e-6)))
        unit = self.mul(x, self.map("Div", self.number(1.0), root))
        return self.mul(self.weight(x.shape[-1], scale=0.1, around=1.0), unit)

    def channel_norm(self, x: Value, epsilon: float = 1e-6) -> Value:
        """A layer norm over the channels of images, which are not the last axis."""
        away = self.map("Sub", x, self.mean(x, 1))
        spread = self.mean(self.map("Pow", away, self.number(2.0)), 1)
        unit = self.map("Div", away, self.map("Sqrt", self.add(spread, self.number(epsilon))))
        ones = (x.shape[1], 1, 1)
        return self.add(
            self.mul(unit, self.weight(*ones, scale=0.1, around=1.0)), self.weight(*ones, scale=0.1)
        )

    def group_norm(self, x: Value, groups: int) -> Value:
        """As torch exports it: an instance norm of reshaped channels, then scale and shift."""
        parts = self.reshape(x, x.shape[0], groups, int(np.prod(x.shape[1:])) // groups)
        one, zero = (self.constant(np.full(groups, n, np.float32)) for n in (1.0, 0.0))
        unit = self.op("InstanceNormalization", parts, one, zero, shape=parts.shape, epsilon=1e-5)
        ones = (x.shape[1], *[1] * (len(x.shape) - 2))
        back = self.reshape(unit, *x.shape)
        return self.add(
            self.mul(back, self.weight(*ones, scale=0.1, around=1.0)), self.weight(*ones, scale=0.1)
        )

    # -- attention

    def heads(self, x: Value, heads: int) -> Value:
        """[1, length, width] as [1, heads, length, depth]."""
        batch, length, width = x.shape
        return self.transpose(self.reshape(x, batch, length, heads, width // heads), 0, 2, 1, 3)

    def joined(self, x: Value) -> Value:
        """[1, heads, length, depth] as [1, length, width]."""
        batch, heads, length, depth = x.shape
        return self.reshape(self.transpose(x, 0, 2, 1, 3), batch, length, heads * depth)

    def attend(self, q: Value, k: Value, v: Value, mask: Value | None = None, scaled: bool = True) -> Value:
        """softmax(q k^T) v of [1, heads, length, depth]."""
        scores = self.matmul(q, self.transpose(k, 0, 1, 3, 2))
        if scaled:
            scores = self.mul(scores, self.number(q.shape[-1] ** -0.5))
        if mask is not None:
            scores = self.add(scores, mask)
        return self.matmul(self.softmax(scores), v)

    def attention(
        self,
        x: Value,
        heads: int,
        memory: Value | None = None,
        mask: Value | None = None,
        bias: bool = True,
        scaled: bool = True,
    ) -> Value:
        """Multi-head attention to itself or to `memory`, with a product on either side."""
        width, read = x.shape[-1], memory or x
        q, k, v = (self.heads(self.linear(of, width, bias), heads) for of in (x, read, read))
        return self.linear(self.joined(self.attend(q, k, v, mask, scaled)), width, bias)

    # -- the end

    def made(self, **outputs: Value) -> Made:
        """The model, with these outputs."""
        from onnx import TensorProto, helper

        for name, value in outputs.items():
            self._writer.op("Identity", value.name, outputs=[name])
        inputs = {name: (a.dtype, a.shape) for name, a in self.feed.items()}
        results = {name: (np.float32, value.shape) for name, value in outputs.items()}
        model = self._writer.model(self.name, inputs, results)
        for domain, version in self._domains.items():
            model.opset_import.append(helper.make_opsetid(domain, version))
        assert all(o.type.tensor_type.elem_type == TensorProto.FLOAT for o in model.graph.output)
        return Made(model, self.feed, self.flops)
