"""Normalisations."""

from __future__ import annotations

import numpy as np

from rlx import ops
from rlx.errors import ModelImportError
from rlx.frontend.onnx.call import Call
from rlx.frontend.onnx.registry import onnx_op
from rlx.frontend.onnx.value import Outputs
from rlx.ir.dtype import F32, DType
from rlx.ir.graph import Node
from rlx.ops.rules import normal_axis


@onnx_op("BatchNormalization", ignored=("consumed_inputs", "spatial", "is_test", "momentum"))
def batch_norm(x: Node, scale: Node, bias: Node, mean: Node, var: Node, *, epsilon: float = 1e-5) -> Outputs:
    return ops.batch_norm(x, scale, bias, mean, var, eps=epsilon)


@onnx_op("BatchNormalization", since=14)
def batch_norm_training(
    x: Node, *others: Node, epsilon: float = 1e-5, momentum: float = 0.9, training_mode: bool = False
) -> Outputs:
    scale, bias, old_mean, old_var = (ops.cast(v, x.dtype) for v in others)
    out = ops.batch_norm(
        x, scale, bias, old_mean, old_var, eps=epsilon, training=training_mode, momentum=momentum
    )
    if not training_mode:
        return out
    y, mean, var = out
    return y, ops.cast(mean, others[2].dtype), ops.cast(var, others[3].dtype)


@onnx_op("InstanceNormalization", ignored=("consumed_inputs",))
def instance_norm(x: Node, scale: Node, bias: Node, *, epsilon: float = 1e-5) -> Node:
    return ops.instance_norm(x, scale, bias, eps=epsilon)


@onnx_op("LRN")
def lrn(x: Node, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0) -> Node:
    return ops.lrn(x, size, alpha, beta, bias)


@onnx_op("LayerNormalization", since=17)
def layer_norm(
    n: Call,
    x: Node,
    scale: Node,
    bias: Node | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: DType = F32,
) -> Outputs:
    axis = normal_axis("LayerNormalization", axis, x.rank)
    if not n.wants(1) and not n.wants(2):
        return ops.layer_norm(x, scale, bias, axis, epsilon)
    axes = tuple(range(axis, x.rank))
    y = ops.cast(x, stash_type if stash_type.bits > x.dtype.bits else x.dtype)
    mean = ops.mean(y, axes, keepdims=True)
    centred = y - mean
    inverse = ops.rsqrt(ops.mean(centred * centred, axes, keepdims=True) + epsilon)
    out = ops.cast(centred * inverse, x.dtype) * scale
    return (out if bias is None else out + bias), mean, inverse


@onnx_op("RMSNormalization", since=23)
def rms_norm(x: Node, scale: Node, *, axis: int = -1, epsilon: float = 1e-5, stash_type: DType = F32) -> Node:
    axis = normal_axis("RMSNormalization", axis, x.rank)
    if scale.shape == x.shape[axis:] and scale.dtype is x.dtype:
        return ops.rms_norm(x, scale, axis, epsilon)
    y = ops.cast(x, "f32")
    mean = ops.mean(y * y, tuple(range(axis, x.rank)), keepdims=True)
    return ops.cast(ops.cast(y * ops.rsqrt(mean + epsilon), x.dtype) * scale, scale.dtype)


@onnx_op("GroupNormalization", since=18)
def group_norm_scaled_by_group(
    x: Node, scale: Node, bias: Node, *, num_groups: int, epsilon: float = 1e-5
) -> Node:
    """Until opset 20 there was one scale for each group; spread it over the group's channels."""
    channels = x.shape[1]

    def spread(v: Node) -> Node:
        rows = ops.broadcast_to(ops.reshape(v, (num_groups, 1)), (num_groups, channels // num_groups))
        return ops.reshape(rows, (channels,))

    return ops.group_norm(x, spread(scale), spread(bias), num_groups, epsilon)


@onnx_op("GroupNormalization", since=21)
def group_norm(
    x: Node, scale: Node, bias: Node, *, num_groups: int, epsilon: float = 1e-5, stash_type: DType = F32
) -> Node:
    return ops.group_norm(x, scale, bias, num_groups, epsilon)


@onnx_op("MeanVarianceNormalization")
def mean_variance_norm(x: Node, *, axes: list[int] = [0, 2, 3]) -> Node:  # noqa: B006
    centred = x - ops.mean(x, axes, keepdims=True)
    deviation = ops.sqrt(ops.mean(centred * centred, axes, keepdims=True))
    return centred / (deviation + 1e-9)


@onnx_op("LpNormalization")
def lp_norm(n: Call, x: Node, *, axis: int = -1, p: int = 2) -> Node:
    if p not in (1, 2):
        raise ModelImportError(f"p is {p}; RLX knows 1 and 2")
    norm = (ops.norm_l1 if p == 1 else ops.norm_l2)(x, axis, keepdims=True)
    none = ops.equal(norm, n.constant(np.zeros((), x.dtype.np)))
    return ops.where(none, n.constant(0, x.dtype), x / ops.where(none, n.constant(1, x.dtype), norm))
