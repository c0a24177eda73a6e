"""Activation functions and softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from rlx import ops
from rlx.frontend.onnx.call import Call
from rlx.frontend.onnx.ops.random import dropout_mask
from rlx.frontend.onnx.registry import onnx_op
from rlx.frontend.onnx.value import Outputs
from rlx.ir.graph import Node
from rlx.ops.rules import normal_axis

PLAIN: dict[str, Callable[[Node], Node]] = {
    "Relu": ops.relu,
    "Sigmoid": ops.sigmoid,
    "Tanh": ops.tanh,
    "HardSwish": ops.hard_swish,
    "Mish": ops.mish,
    "Softplus": ops.softplus,
    "Softsign": ops.softsign,
}


@onnx_op(*PLAIN, ignored=("consumed_inputs",))
def plain(n: Call) -> Outputs:
    return PLAIN[n.proto.op_type](n[0])


@onnx_op("LeakyRelu", ignored=("consumed_inputs",))
def leaky_relu(x: Node, *, alpha: float = 0.01) -> Node:
    return ops.leaky_relu(x, alpha=alpha)


@onnx_op("Elu", ignored=("consumed_inputs",))
def elu(x: Node, *, alpha: float = 1.0) -> Node:
    return ops.elu(x, alpha=alpha)


@onnx_op("Celu")
def celu(x: Node, *, alpha: float = 1.0) -> Node:
    return ops.celu(x, alpha=alpha)


@onnx_op("HardSigmoid", ignored=("consumed_inputs",))
def hard_sigmoid(x: Node, *, alpha: float = 0.2, beta: float = 0.5) -> Node:
    return ops.hard_sigmoid(x, alpha=alpha, beta=beta)


@onnx_op("Swish")
def swish(x: Node, *, alpha: float = 1.0) -> Node:
    return ops.swish(x, alpha=alpha)


@onnx_op("ThresholdedRelu")
def thresholded_relu(x: Node, *, alpha: float = 1.0) -> Node:
    return ops.thresholded_relu(x, alpha=alpha)


@onnx_op("Shrink")
def shrink(x: Node, *, lambd: float = 0.5, bias: float = 0.0) -> Node:
    wide = x if x.dtype.is_float else ops.cast(x, "f32")  # it is defined for integers, too
    return ops.cast(ops.shrink(wide, lambd=lambd, bias=bias), x.dtype)


@onnx_op("Selu", ignored=("consumed_inputs",))
def selu_first(x: Node, *, alpha: float = 1.6732, gamma: float = 1.0507) -> Node:
    return ops.selu(x, alpha=alpha, gamma=gamma)


@onnx_op("Selu", since=6)
def selu(n: Call) -> Outputs:
    given = {name: n.attr(name) for name in ("alpha", "gamma") if n.has(name)}
    return ops.selu(n[0], **given)


@onnx_op("Gelu", since=20)
def gelu(x: Node, *, approximate: Literal["none", "tanh"] = "none") -> Node:
    return ops.gelu(x, approximate=approximate)


@onnx_op("PRelu", ignored=("consumed_inputs",))
def prelu_by_channel(x: Node, slope: Node) -> Node:
    if slope.rank == 1 and x.rank > 1:
        slope = ops.reshape(slope, (slope.shape[0], *(1,) * (x.rank - 2)))
    return ops.prelu(x, slope)


@onnx_op("PRelu", since=7)
def prelu(x: Node, slope: Node) -> Node:
    return ops.prelu(x, slope)


def hardmax(x: Node, axis: int) -> Node:
    """1 at the first maximum along an axis, 0 elsewhere."""
    at = ops.argmax(x, axis=axis)
    return ops.one_hot(at, x.shape[axis], axis=axis, dtype=x.dtype)


SOFTMAX: dict[str, Callable[[Node, int], Node]] = {
    "Softmax": ops.softmax,
    "LogSoftmax": ops.log_softmax,
    "Hardmax": hardmax,
}


@onnx_op(*SOFTMAX)
def softmax_of_matrix(n: Call) -> Outputs:
    """Before opset 13: over all axes from `axis` on, taken together."""
    x = n[0]
    axis = int(n.attr("axis", 1))
    axis += x.rank if axis < 0 else 0
    flat = ops.flatten(x, axis)
    return ops.reshape(SOFTMAX[n.proto.op_type](flat, 1), x.shape)


@onnx_op(*SOFTMAX, since=13)
def softmax(n: Call) -> Outputs:
    axis = normal_axis(n.proto.op_type, int(n.attr("axis", -1)), n[0].rank)
    return SOFTMAX[n.proto.op_type](n[0], axis)


@onnx_op("Dropout", ignored=("consumed_inputs", "is_test", "seed", "ratio"))
def dropout_at_inference(n: Call) -> Outputs:
    """Inference: nothing is dropped."""
    return with_mask(n, n[0])


@onnx_op("Dropout", since=12, ignored=("seed",))
def dropout(n: Call) -> Outputs:
    training = n.get(2)
    if training is not None and bool(n.array(2)):
        ratio = float(n.array(1)) if n.get(1) is not None else 0.5
        if ratio != 0.0:
            keep = dropout_mask(n, n[0], ratio)
            scaled = n[0] * (1.0 / (1.0 - ratio) if ratio < 1.0 else 0.0)
            return ops.where(keep, scaled, n.constant(0, n[0].dtype)), keep
    return with_mask(n, n[0])


def with_mask(n: Call, x: Node) -> Outputs:
    """x itself and, if requested, a mask that keeps everything."""
    return (x, ops.full(x.shape, True, "bool")) if n.wants(1) else x
