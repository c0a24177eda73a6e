"""Comparisons and logic, element by element."""

from __future__ import annotations

from collections.abc import Callable

from rlx import ops
from rlx.frontend.onnx.call import Call
from rlx.frontend.onnx.ops.math import old_broadcast
from rlx.frontend.onnx.registry import onnx_op
from rlx.frontend.onnx.sizes.broadcast import aligned
from rlx.frontend.onnx.value import Outputs, Strings
from rlx.ir.graph import Node

COMPARE: dict[str, Callable[[Node, Node], Node]] = {
    "Equal": ops.equal,
    "Less": ops.less,
    "LessOrEqual": ops.less_equal,
    "Greater": ops.greater,
    "GreaterOrEqual": ops.greater_equal,
    "And": ops.logical_and,
    "Or": ops.logical_or,
    "Xor": ops.logical_xor,
}


@onnx_op(*COMPARE)
def compare_with_attributes(n: Call) -> Outputs:
    return COMPARE[n.proto.op_type](n[0], old_broadcast(n, n[0], n[1]))


@onnx_op(*COMPARE, since=7)
def compare(n: Call) -> Outputs:
    if n.proto.op_type == "Equal" and isinstance(n.value(0), Strings):
        n.on_host("text exists on the host only")
        return n.constant(n.strings(0) == n.strings(1))
    return COMPARE[n.proto.op_type](*aligned(n, n[0], n[1]))


@onnx_op("Not")
def not_(x: Node) -> Node:
    return ops.logical_not(x)


@onnx_op("IsNaN")
def is_nan(x: Node) -> Node:
    return ops.is_nan(x)


@onnx_op("IsInf")
def is_inf(x: Node, *, detect_positive: bool = True, detect_negative: bool = True) -> Node:
    found = ops.is_inf(x)
    if detect_positive and detect_negative:
        return found
    sign = ops.greater(x, 0.0) if detect_positive else ops.less(x, 0.0)
    if not detect_positive and not detect_negative:
        sign = ops.logical_and(sign, ops.logical_not(sign))
    return ops.logical_and(found, sign)


@onnx_op("Where")
def where(n: Call) -> Outputs:
    if isinstance(n.value(1), Strings):
        import numpy as np

        n.on_host("text exists on the host only")
        return Strings(np.where(n.array(0), n.strings(1), n.strings(2)))
    return ops.where(*aligned(n, n[0], n[1], n[2]))
