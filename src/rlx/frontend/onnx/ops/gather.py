"""Ops that pick or write elements by index, and ranking."""

from __future__ import annotations

from typing import Literal

import numpy as np

from rlx import ops
from rlx.frontend.onnx.call import Call
from rlx.frontend.onnx.registry import onnx_op
from rlx.frontend.onnx.value import Labels, Outputs, Strings
from rlx.ir.dim import Dim
from rlx.ir.graph import Node
from rlx.ops.rules import normal_axis


@onnx_op("Gather")
def gather(n: Call) -> Outputs:
    axis = int(n.attr("axis", 0))
    if isinstance(n.value(0), Strings):
        if n.strings(0).ndim == 1 and n.known(1) is None:
            return Labels(ops.cast(n[1], "i64"), n.strings(0))
        n.on_host("text exists on the host only")
        return Strings(np.take(n.strings(0), n.array(1), axis))
    return ops.gather(n[0], n[1], axis)


@onnx_op("GatherElements")
def gather_elements(x: Node, indices: Node, *, axis: int = 0) -> Node:
    return ops.gather_elements(x, indices, axis)


@onnx_op("GatherND")
def gather_nd(x: Node, indices: Node, *, batch_dims: int = 0) -> Node:
    return ops.gather_nd(x, indices, batch_dims)


Reduction = Literal["none", "add", "mul", "max", "min"]


@onnx_op("Scatter", "ScatterElements")
def scatter_elements(
    x: Node, indices: Node, updates: Node, *, axis: int = 0, reduction: Reduction = "none"
) -> Node:
    return ops.scatter_elements(x, indices, updates, axis, reduction)


@onnx_op("ScatterND")
def scatter_nd(x: Node, indices: Node, updates: Node, *, reduction: Reduction = "none") -> Node:
    return ops.scatter_nd(x, indices, updates, reduction)


@onnx_op("OneHot")
def one_hot(n: Call) -> Outputs:
    indices, values = n[0], n[2]
    depth = n.sizes(ops.cast(n[1], "i64"), "the value of its input 1")[0]
    axis = normal_axis("OneHot", int(n.attr("axis", -1)), indices.rank + 1)
    if not indices.dtype.is_int:
        indices = ops.cast(indices, "i64")
    hot = ops.one_hot(indices, depth, axis, dtype="bool")
    off, on = (ops.reshape(ops.slice_axis(values, 0, i, 1), ()) for i in (0, 1))
    return ops.where(hot, on, off)


@onnx_op("TopK", ignored=("sorted",))
def top_k(n: Call) -> Outputs:
    k: Dim = n.attr("k") if n.version < 10 else n.size(1)
    return tuple(ops.top_k(n[0], k, int(n.attr("axis", -1)), n.flag("largest", 1)))


@onnx_op("TensorScatter", since=24)
def tensor_scatter(n: Call) -> Outputs:
    """Write rows of an update into a cache along one axis, at its own place for each batch."""
    cache, update = n[0], n[1]
    axis = normal_axis("TensorScatter", int(n.attr("axis", -2)), cache.rank)
    circular = n.choice("mode", "linear", ("linear", "circular")) == "circular"
    rows = ops.iota((update.shape[axis],))
    at = ops.reshape(rows, (1, -1))
    if n.get(2) is not None:
        at = at + ops.reshape(ops.cast(n[2], "i64"), (-1, 1))
    if circular:
        at = ops.mod(at, ops.dim_value(cache.shape[axis]))
    shape: list[Dim] = [1] * cache.rank
    shape[0], shape[axis] = at.shape[0], at.shape[1]
    at = ops.broadcast_to(ops.reshape(at, shape), update.shape)
    return ops.scatter_elements(cache, at, update, axis)
