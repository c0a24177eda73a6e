"""Normalisations."""

from __future__ import annotations

import numpy as np

from rlx import ops
from rlx.errors import ModelImportError
from rlx.frontend.onnx.call import Call
from rlx.frontend.onnx.registry import onnx_op
from rlx.frontend.onnx.value import Outputs
from rlx.ir.dtype import DType
from rlx.ir.graph import Node
from rlx.ops.rules import normal_axis


@onnx_op("BatchNormalization", ignored=("consumed_inputs", "spatial", "is_test", "momentum"))
def batch_norm(n: Call) -> Outputs:
    return ops.batch_norm(n[0], n[1], n[2], n[3], n[4], eps=n.attr("epsilon", 1e-5))


@onnx_op("BatchNormalization", since=14)
def batch_norm_training(n: Call) -> Outputs:
    training, momentum = n.flag("training_mode"), n.attr("momentum", 0.9)
    x, kind = n[0], n[0].dtype
    scale, bias, old_mean, old_var = (ops.cast(n[i], kind) for i in range(1, 5))
    eps = n.attr("epsilon", 1e-5)
    out = ops.batch_norm(x, scale, bias, old_mean, old_var, eps=eps, training=training, momentum=momentum)
    if not training:
        return out
    y, mean, var = out
    return y, ops.cast(mean, n[3].dtype), ops.cast(var, n[4].dtype)


@onnx_op("InstanceNormalization", ignored=("consumed_inputs",))
def instance_norm(n: Call) -> Outputs:
    return ops.instance_norm(n[0], n[1], n[2], eps=n.attr("epsilon", 1e-5))


@onnx_op("LRN")
def lrn(n: Call) -> Outputs:
    return ops.lrn(
        n[0], int(n.attr("size")), n.attr("alpha", 1e-4), n.attr("beta", 0.75), n.attr("bias", 1.0)
    )


def wide_dtype(n: Call, x: Node) -> DType:
    """The dtype that statistics are computed in: `stash_type`, f32 by default."""
    wide = n.dtype("stash_type", 1)
    return wide if wide.bits > x.dtype.bits else x.dtype


@onnx_op("LayerNormalization", since=17)
def layer_norm(n: Call) -> Outputs:
    x = n[0]
    axis = normal_axis("LayerNormalization", int(n.attr("axis", -1)), x.rank)
    eps = n.attr("epsilon", 1e-5)
    wide = wide_dtype(n, x)
    if not n.wants(1) and not n.wants(2):
        return ops.layer_norm(x, n[1], n.get(2), axis, eps)
    axes = tuple(range(axis, x.rank))
    y = ops.cast(x, wide)
    mean = ops.mean(y, axes, keepdims=True)
    centred = y - mean
    inverse = ops.rsqrt(ops.mean(centred * centred, axes, keepdims=True) + eps)
    out = ops.cast(centred * inverse, x.dtype) * n[1]
    return (out if n.get(2) is None else out + n[2]), mean, inverse


@onnx_op("RMSNormalization", since=23)
def rms_norm(n: Call) -> Outputs:
    x, scale = n[0], n[1]
    axis = normal_axis("RMSNormalization", int(n.attr("axis", -1)), x.rank)
    wide_dtype(n, x)
    eps = n.attr("epsilon", 1e-5)
    if scale.shape == x.shape[axis:] and scale.dtype is x.dtype:
        return ops.rms_norm(x, scale, axis, eps)
    y = ops.cast(x, "f32")
    mean = ops.mean(y * y, tuple(range(axis, x.rank)), keepdims=True)
    return ops.cast(ops.cast(y * ops.rsqrt(mean + eps), x.dtype) * scale, scale.dtype)


@onnx_op("GroupNormalization", since=18)
def group_norm_scaled_by_group(n: Call) -> Outputs:
    """Until opset 20 there was one scale for each group; spread it over the group's channels."""
    x, groups = n[0], int(n.attr("num_groups"))
    channels = x.shape[1]

    def spread(v: Node) -> Node:
        return ops.reshape(
            ops.broadcast_to(ops.reshape(v, (groups, 1)), (groups, channels // groups)), (channels,)
        )

    return ops.group_norm(x, spread(n[1]), spread(n[2]), groups, n.attr("epsilon", 1e-5))


@onnx_op("GroupNormalization", since=21)
def group_norm(n: Call) -> Outputs:
    wide_dtype(n, n[0])
    return ops.group_norm(n[0], n[1], n[2], int(n.attr("num_groups")), n.attr("epsilon", 1e-5))


@onnx_op("MeanVarianceNormalization")
def mean_variance_norm(n: Call) -> Outputs:
    x, axes = n[0], tuple(n.attr("axes", [0, 2, 3]))
    centred = x - ops.mean(x, axes, keepdims=True)
    deviation = ops.sqrt(ops.mean(centred * centred, axes, keepdims=True))
    return centred / (deviation + 1e-9)


@onnx_op("LpNormalization")
def lp_norm(n: Call) -> Outputs:
    x, axis, p = n[0], int(n.attr("axis", -1)), int(n.attr("p", 2))
    if p not in (1, 2):
        raise ModelImportError(f"p is {p}; RLX knows 1 and 2")
    norm = (ops.norm_l1 if p == 1 else ops.norm_l2)(x, axis, keepdims=True)
    none = ops.equal(norm, n.constant(np.zeros((), x.dtype.np)))
    return ops.where(none, n.constant(0, x.dtype), x / ops.where(none, n.constant(1, x.dtype), norm))
