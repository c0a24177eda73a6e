"""Pooling."""

from __future__ import annotations

from rlx import ops
from rlx.frontend.onnx.call import Call
from rlx.frontend.onnx.ops.conv import padding_of
from rlx.frontend.onnx.registry import onnx_op
from rlx.frontend.onnx.value import Outputs
from rlx.ir.attr import AttrValue
from rlx.ir.graph import Node


def pool_options(n: Call) -> dict[str, AttrValue]:
    window = n.attr("kernel_shape")
    return {
        "window": window,
        "strides": n.attr("strides", None),
        "padding": padding_of(n, len(window)),
        "dilations": n.attr("dilations", None),
        "ceil_mode": n.flag("ceil_mode"),
    }


@onnx_op("MaxPool")
def max_pool(n: Call) -> Outputs:
    column_major = n.flag("storage_order")
    options = pool_options(n)
    if n.wants(1):
        return tuple(ops.max_pool(n[0], **options, indices=True, column_major=column_major))
    return ops.max_pool(n[0], **options)


@onnx_op("AveragePool")
def average_pool(n: Call) -> Outputs:
    return ops.avg_pool(n[0], **pool_options(n), count_include_pad=n.flag("count_include_pad"))


@onnx_op("LpPool")
def lp_pool(n: Call) -> Outputs:
    return ops.lp_pool(n[0], p=float(n.attr("p", 2)), **pool_options(n))


@onnx_op("GlobalAveragePool")
def global_average_pool(x: Node) -> Node:
    return ops.global_avg_pool(x)


@onnx_op("GlobalMaxPool")
def global_max_pool(x: Node) -> Node:
    return ops.global_max_pool(x)


@onnx_op("GlobalLpPool")
def global_lp_pool(x: Node, *, p: float = 2) -> Node:
    return ops.global_lp_pool(x, p)


@onnx_op("MaxUnpool")
def max_unpool(n: Call) -> Outputs:
    x, indices = n[0], n[1]
    window = n.attr("kernel_shape")
    rank = len(window)
    strides, pads = n.attr("strides", [1] * rank), n.attr("pads", [0] * 2 * rank)
    small = [
        (d - 1) * s - lo - hi + k
        for d, s, lo, hi, k in zip(x.shape[2:], strides, pads[:rank], pads[rank:], window, strict=True)
    ]
    natural = (*x.shape[:2], *small)
    if n.value(2) is None:
        return ops.max_unpool(x, indices, natural)
    # positions count in the natural shape, which is then in the corner of the requested one
    target = n.dims(2)
    return ops.pad(
        ops.max_unpool(x, indices, natural), [(0, t - d) for t, d in zip(target, natural, strict=True)]
    )
