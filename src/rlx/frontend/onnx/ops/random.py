"""Random numbers: from the seed of a node or, without one, from its name, so that models repeat."""

from __future__ import annotations

import zlib

import numpy as np

from rlx import ops
from rlx.frontend.onnx.call import Call
from rlx.frontend.onnx.registry import onnx_op
from rlx.frontend.onnx.value import Outputs
from rlx.ir.dim import Dim
from rlx.ir.dtype import DType
from rlx.ir.graph import Node


def key_of(n: Call) -> Node:
    """The key that a node draws with."""
    if n.has("seed"):
        bits = int(np.float32(n.attr("seed")).view(np.uint32))
    else:
        bits = zlib.crc32("\n".join(n.outputs).encode())
    return n.constant(np.array([bits, 0], np.uint32))


def draw(n: Call, shape: tuple[Dim, ...], kind: DType) -> Node:
    """Uniform or normal numbers, as the op's name and attributes say."""
    if n.proto.op_type.startswith("RandomUniform"):
        return ops.uniform(key_of(n), shape, n.attr("low", 0.0), n.attr("high", 1.0), kind)
    return ops.normal(key_of(n), shape, n.attr("mean", 0.0), n.attr("scale", 1.0), kind)


@onnx_op("RandomUniform", "RandomNormal")
def random(n: Call) -> Outputs:
    return draw(n, tuple(n.attr("shape")), n.dtype("dtype", 1))


@onnx_op("RandomUniformLike", "RandomNormalLike")
def random_like(n: Call) -> Outputs:
    return draw(n, n[0].shape, n.dtype("dtype", n[0].dtype))


@onnx_op("Bernoulli", since=15)
def bernoulli(n: Call) -> Outputs:
    return ops.cast(ops.bernoulli(key_of(n), n[0]), n.dtype("dtype", n[0].dtype))


@onnx_op("Multinomial")
def multinomial(n: Call) -> Outputs:
    """Indices drawn by the largest of log-probabilities with Gumbel noise."""
    x, count, kind = n[0], int(n.attr("sample_size", 1)), n.dtype("dtype", 6)
    noise = ops.uniform(key_of(n), (x.shape[0], count, x.shape[1]), dtype="f32")
    gumbel = -ops.log(-ops.log(ops.maximum(noise, 1e-20)))
    scores = ops.expand_dims(ops.cast(x, "f32"), 1) + gumbel
    return ops.cast(ops.argmax(scores, axis=2), kind)


def dropout_mask(n: Call, x: Node, ratio: float) -> Node:
    """Which elements a dropout in training keeps."""
    return ops.dropout_mask(key_of(n), x.shape, ratio)
