"""Comparisons and logic, element by element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlx import ops
from rlx.frontend.onnx.call import Call
from rlx.frontend.onnx.ops.math import old_broadcast
from rlx.frontend.onnx.registry import onnx_op
from rlx.frontend.onnx.sizes.broadcast import aligned
from rlx.frontend.onnx.value import Outputs, Strings
from rlx.ir.graph import Node

COMPARE: dict[str, Callable[[Any, Any], Any]] = {
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
def not_(n: Call) -> Outputs:
    return ops.logical_not(n[0])


@onnx_op("IsNaN")
def is_nan(n: Call) -> Outputs:
    return ops.is_nan(n[0])


@onnx_op("IsInf")
def is_inf(n: Call) -> Outputs:
    x = n[0]
    up, down = n.flag("detect_positive", 1), n.flag("detect_negative", 1)
    found: Node = ops.is_inf(x)
    if up and down:
        return found
    sign = ops.greater(x, 0.0) if up else ops.less(x, 0.0)
    if not up and not down:
        sign = ops.logical_and(sign, ops.logical_not(sign))
    return ops.logical_and(found, sign)


@onnx_op("Where")
def where(n: Call) -> Outputs:
    if isinstance(n.value(1), Strings):
        import numpy as np

        n.on_host("text exists on the host only")
        return Strings(np.where(n.array(0), n.strings(1), n.strings(2)))
    return ops.where(*aligned(n, n[0], n[1], n[2]))
