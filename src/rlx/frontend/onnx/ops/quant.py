"""Quantised tensors: QuantizeLinear and its relatives."""

from __future__ import annotations

from rlx import ops
from rlx.frontend.onnx.call import Call
from rlx.frontend.onnx.ops.conv import conv_options
from rlx.frontend.onnx.registry import onnx_op
from rlx.frontend.onnx.value import Outputs
from rlx.ir.attr import AttrValue
from rlx.ir.graph import Node


def placement(n: Call, x: Node, scale: Node, default_axis: int = 1) -> dict[str, AttrValue]:
    """axis and block of a scale, as our ops take them."""
    axis = int(n.attr("axis", default_axis))
    block = int(n.attr("block_size", 0))
    return {} if scale.rank == 0 else {"axis": axis, "block": block or None}


def as_number(x: Node, block: int = 0) -> Node:
    """Some exporters write one number as a vector of one."""
    return ops.reshape(x, ()) if x.rank == 1 and x.shape[0] == 1 and not block else x


@onnx_op("QuantizeLinear", since=10)
def quantize(n: Call) -> Outputs:
    x, block = n[0], int(n.attr("block_size", 0))
    scale = as_number(n[1], block)
    zero = None if n.get(2) is None else as_number(n[2], block)
    target = int(n.attr("output_dtype", 0))
    kind = n.dtype("output_dtype") if target else None
    saturate = n.flag("saturate", 1)
    wide = int(n.attr("precision", 0))
    if wide:
        kind_of_work = n.dtype("precision")
        x, scale = ops.cast(x, kind_of_work), ops.cast(scale, kind_of_work)
    return ops.quantize(x, scale, zero, kind, saturate=saturate, **placement(n, x, scale))


@onnx_op("DequantizeLinear", since=10)
def dequantize(n: Call) -> Outputs:
    x, block = n[0], int(n.attr("block_size", 0))
    scale = as_number(n[1], block)
    zero = None if n.get(2) is None else as_number(n[2], block)
    target = int(n.attr("output_dtype", 0))
    kind = n.dtype("output_dtype") if target else None
    return ops.dequantize(x, scale, zero, dtype=kind, **placement(n, x, scale))


@onnx_op("DynamicQuantizeLinear", since=11)
def dynamic_quantize(n: Call) -> Outputs:
    return tuple(ops.dynamic_quantize(n[0]))


@onnx_op("MatMulInteger", since=10)
def matmul_integer(n: Call) -> Outputs:
    zeros = [None if z is None else as_number(z) for z in (n.get(2), n.get(3))]
    return ops.matmul_integer(n[0], n[1], *zeros)


@onnx_op("QLinearMatMul", since=10)
def qlinear_matmul(n: Call) -> Outputs:
    parts = [n[i] if i in (0, 3) else as_number(n[i]) for i in range(8)]
    for i in (1, 4, 6):
        parts[i] = ops.cast(parts[i], "f32")
    return ops.qlinear_matmul(*parts)


@onnx_op("ConvInteger", since=10)
def conv_integer(n: Call) -> Outputs:
    zx, zw = (None if z is None else as_number(z) for z in (n.get(2), n.get(3)))
    return ops.conv_integer(n[0], n[1], zx, zw, **conv_options(n, n[1]))


@onnx_op("QLinearConv", since=10)
def qlinear_conv(n: Call) -> Outputs:
    x, sx, zx, w, sw, zw, sy, zy = (n[i] if i in (0, 3) else as_number(n[i]) for i in range(8))
    return ops.qlinear_conv(x, sx, zx, w, sw, zw, sy, zy, n.get(8), **conv_options(n, n[3]))
