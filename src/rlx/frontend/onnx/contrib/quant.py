"""Quantised ops of ONNX Runtime's own domain (com.microsoft), and pools whose channels come last."""

from __future__ import annotations

import numpy as np

from rlx import ops
from rlx.frontend.onnx.call import Call
from rlx.frontend.onnx.contrib.attention import attend
from rlx.frontend.onnx.contrib.basic import MS
from rlx.frontend.onnx.ops.pool import pool_options
from rlx.frontend.onnx.ops.quant import as_number, dequantize, quantize
from rlx.frontend.onnx.ops.recurrent import lstm_options
from rlx.frontend.onnx.registry import onnx_op
from rlx.frontend.onnx.value import Outputs
from rlx.ir.dtype import DType
from rlx.ir.graph import Node
from rlx.ops.rules import normal_axis

onnx_op("QuantizeLinear", domain=MS)(quantize)
onnx_op("DequantizeLinear", domain=MS)(dequantize)


def real(n: Call, i: int) -> Node:
    """Operands i, i + 1, i + 2 (levels, scale, zero point) as f32."""
    zero = n.get(i + 2)
    return ops.dequantize(n[i], as_number(n[i + 1]), None if zero is None else as_number(zero))


def levels(n: Call, y: Node, i: int, kind: DType) -> Node:
    """y quantised by operands i (scale) and i + 1 (zero point)."""
    zero = n.get(i + 1)
    return ops.quantize(y, as_number(n[i]), None if zero is None else as_number(zero), kind)


@onnx_op("QLinearAdd", "QLinearMul", domain=MS)
def qlinear_binary(n: Call) -> Outputs:
    function = ops.add if n.proto.op_type == "QLinearAdd" else ops.mul
    return levels(n, function(real(n, 0), real(n, 3)), 6, n[0].dtype)


@onnx_op("QLinearSigmoid", "QLinearLeakyRelu", domain=MS)
def qlinear_unary(n: Call) -> Outputs:
    x = real(n, 0)
    y = (
        ops.sigmoid(x)
        if n.proto.op_type == "QLinearSigmoid"
        else ops.leaky_relu(x, alpha=n.attr("alpha", 0.01))
    )
    return levels(n, y, 3, n[0].dtype)


@onnx_op("QLinearSoftmax", domain=MS)
def qlinear_softmax(n: Call) -> Outputs:
    opset = int(n.attr("opset", 13))
    x, axis = real(n, 0), int(n.attr("axis", -1))
    if opset < 13:
        flat = ops.flatten(x, normal_axis("QLinearSoftmax", axis, x.rank))
        y = ops.reshape(ops.softmax(flat, 1), x.shape)
    else:
        y = ops.softmax(x, axis)
    return levels(n, y, 3, n[0].dtype)


@onnx_op("QLinearGlobalAveragePool", domain=MS)
def qlinear_global_average_pool(n: Call) -> Outputs:
    last = n.flag("channels_last")
    x = real(n, 0)
    axes = tuple(range(1, x.rank - 1)) if last else tuple(range(2, x.rank))
    return levels(n, ops.mean(x, axes, keepdims=True), 3, n[0].dtype)


@onnx_op("QLinearAveragePool", domain=MS)
def qlinear_average_pool(n: Call) -> Outputs:
    last = n.flag("channels_last")
    x = channels_second(real(n, 0)) if last else real(n, 0)
    y = ops.avg_pool(x, **pool_options(n), count_include_pad=n.flag("count_include_pad"))
    return levels(n, channels_last(y) if last else y, 3, n[0].dtype)


def channels_second(x: Node) -> Node:
    """[batch, ..., channels] as [batch, channels, ...]."""
    return ops.transpose(x, (0, x.rank - 1, *range(1, x.rank - 1)))


def channels_last(x: Node) -> Node:
    """[batch, channels, ...] as [batch, ..., channels]."""
    return ops.transpose(x, (0, *range(2, x.rank), 1))


@onnx_op("NhwcMaxPool", domain=MS)
def nhwc_max_pool(n: Call) -> Outputs:
    return channels_last(ops.max_pool(channels_second(n[0]), **pool_options(n)))


@onnx_op("QLinearConcat", domain=MS)
def qlinear_concat(n: Call) -> Outputs:
    parts = [real(n, i) for i in range(2, len(n), 3)]
    return levels(n, ops.concat(parts, int(n.attr("axis"))), 0, n[2].dtype)


@onnx_op("QGemm", domain=MS)
def qgemm(n: Call) -> Outputs:
    columns = 0 if n.flag("transB") else 1
    scale, zero = as_number(n[4]), as_number(n[5])
    a, b = real(n, 0), ops.dequantize(n[3], scale, zero, axis=columns if scale.rank else None)
    a = ops.transpose(a) if n.flag("transA") else a
    b = ops.transpose(b) if n.flag("transB") else b
    y = ops.matmul(a, b) * n.attr("alpha", 1.0)
    if n.get(6) is not None:
        y = y + ops.cast(n[6], "f32") * (as_number(n[1]) * as_number(n[4]))
    return y if n.get(7) is None else levels(n, y, 7, n[0].dtype)


@onnx_op("DynamicQuantizeMatMul", domain=MS)
def dynamic_quantize_matmul(n: Call) -> Outputs:
    levels_, scale, zero = ops.dynamic_quantize(n[0])
    weight_zero = n.get(3)
    total = ops.matmul_integer(levels_, n[1], zero, None if weight_zero is None else as_number(weight_zero))
    y = ops.cast(total, "f32") * (scale * as_number(n[2]))
    return y if n.get(4) is None else y + n[4]


@onnx_op("MatMulIntegerToFloat", domain=MS)
def matmul_integer_to_float(n: Call) -> Outputs:
    zeros = [None if z is None else as_number(z) for z in (n.get(4), n.get(5))]
    total = ops.matmul_integer(n[0], n[1], *zeros)
    y = ops.cast(total, "f32") * (as_number(n[2]) * as_number(n[3]))
    return y if n.get(6) is None else y + n[6]


@onnx_op("QAttention", domain=MS)
def qattention(n: Call) -> Outputs:
    zeros = [None if z is None else as_number(z) for z in (n.get(6), n.get(7))]
    total = ops.cast(ops.matmul_integer(n[0], n[1], *zeros), "f32")
    projected = total * (as_number(n[3]) * as_number(n[4])) + n[2]
    return attend(n, projected, [n[1].shape[1] // 3] * 3, n.get(5), n.get(8))


@onnx_op("DynamicQuantizeLSTM", domain=MS, ignored=("output_sequence",))
def dynamic_quantize_lstm(n: Call) -> Outputs:
    """The input and, at every step, the state are rounded to bytes, as the op says: bytes are multiplied."""
    w, r = (ops.transpose(n[i], (0, 2, 1)) for i in (1, 2))
    scales = [per_gate(n, i, w) for i in (8, 10)]
    zeros = [None if n.get(i) is None else per_gate(n, i, w) for i in (9, 11)]
    more = {"bias": n.get(3), "w_zero_point": zeros[0], "r_zero_point": zeros[1], **lstm_options(n)}
    return tuple(ops.dynamic_quantize_lstm(n[0], w, r, scales[0], scales[1], **more))


def per_gate(n: Call, i: int, weight: Node) -> Node:
    """Operand i, which has a number for each direction or for each of its gates, as [directions, gates]."""
    known, shape = n.known(i), weight.shape[:2]
    spread: Node = ops.broadcast_to(ops.reshape(n[i], (shape[0], -1)), shape)
    if known is None or not spread.tensor.is_static:
        return spread
    # The op looks whether zero points are constants.
    return n.constant(np.broadcast_to(known.reshape(known.shape[0], -1), [int(d) for d in shape]))
