"""Arithmetic, element by element."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Literal

import numpy as np

from rlx import ops
from rlx.errors import ModelImportError
from rlx.frontend.onnx.call import Call
from rlx.frontend.onnx.registry import onnx_op
from rlx.frontend.onnx.sizes.broadcast import aligned
from rlx.frontend.onnx.value import Outputs
from rlx.ir.dtype import DType
from rlx.ir.graph import Node

UNARY: dict[str, Callable[[Node], Node]] = {
    "Abs": ops.abs,
    "Acos": ops.acos,
    "Acosh": ops.acosh,
    "Asin": ops.asin,
    "Asinh": ops.asinh,
    "Atan": ops.atan,
    "Atanh": ops.atanh,
    "Ceil": ops.ceil,
    "Cos": ops.cos,
    "Cosh": ops.cosh,
    "Erf": ops.erf,
    "Exp": ops.exp,
    "Floor": ops.floor,
    "Log": ops.log,
    "Neg": ops.neg,
    "Reciprocal": ops.reciprocal,
    "Round": ops.round,
    "Sign": ops.sign,
    "Sin": ops.sin,
    "Sinh": ops.sinh,
    "Sqrt": ops.sqrt,
    "Tan": ops.tan,
    "BitwiseNot": ops.bitwise_not,
}

BINARY: dict[str, Callable[[Node, Node], Node]] = {
    "Add": ops.add,
    "Sub": ops.sub,
    "Mul": ops.mul,
    "BitwiseAnd": ops.bitwise_and,
    "BitwiseOr": ops.bitwise_or,
    "BitwiseXor": ops.bitwise_xor,
}


def divide(a: Node, b: Node) -> Node:
    """ONNX Div: integers are divided towards zero."""
    return ops.trunc_div(a, b) if a.dtype.is_int else ops.div(a, b)


def old_broadcast(n: Call, a: Node, b: Node) -> Node:
    """Before opset 7, `b` was aligned with axes of `a` by attributes."""
    if not n.attr("broadcast", 0):
        return b
    axis = int(n.attr("axis", a.rank - b.rank))
    axis += a.rank if axis < 0 else 0
    return ops.reshape(b, (*b.shape, *(1,) * (a.rank - axis - b.rank)))


@onnx_op(*UNARY, ignored=("consumed_inputs",))
def unary(n: Call) -> Outputs:
    return UNARY[n.proto.op_type](n[0])


@onnx_op("Add", "Sub", "Mul", "Div", "Pow", ignored=("consumed_inputs",))
def binary_with_attributes(n: Call) -> Outputs:
    a, b = n[0], n[1]
    b = old_broadcast(n, a, b)
    by_name = {**BINARY, "Div": divide, "Pow": power}
    return by_name[n.proto.op_type](a, b)


@onnx_op("Add", "Sub", "Mul", since=7)
@onnx_op("BitwiseAnd", "BitwiseOr", "BitwiseXor", since=18)
def binary(n: Call) -> Outputs:
    return BINARY[n.proto.op_type](*aligned(n, n[0], n[1]))


@onnx_op("Div", since=7)
def div(n: Call) -> Outputs:
    return divide(*aligned(n, n[0], n[1]))


def power(a: Node, b: Node) -> Node:
    """a ** b in the dtype of a, whatever the dtype of b."""
    if a.dtype is b.dtype:
        return ops.pow(a, b)
    if a.dtype.is_float or b.dtype.is_int:
        return ops.pow(a, ops.cast(b, a.dtype))
    return ops.cast(ops.pow(ops.cast(a, b.dtype), b), a.dtype)


@onnx_op("Pow", since=7)
def pow_(n: Call) -> Outputs:
    return power(*aligned(n, n[0], n[1]))


@onnx_op("Mod")
def mod(n: Call) -> Outputs:
    a, b = aligned(n, n[0], n[1])
    return ops.fmod(a, b) if n.flag("fmod") else ops.mod(a, b)


@onnx_op("BitShift")
def bit_shift(x: Node, y: Node, *, direction: Literal["LEFT", "RIGHT"]) -> Node:
    return (ops.shift_left if direction == "LEFT" else ops.shift_right)(x, y)


VARIADIC: dict[str, Callable[[Node, Node], Node]] = {
    "Max": ops.maximum,
    "Min": ops.minimum,
    "Sum": ops.add,
    "Mean": ops.add,
}


@onnx_op(*VARIADIC, ignored=("consumed_inputs",))
def variadic(n: Call) -> Outputs:
    total: Node = reduce(VARIADIC[n.proto.op_type], aligned(n, *n.nodes()))
    return total / float(len(n)) if n.proto.op_type == "Mean" and len(n) > 1 else total


def limit(value: float, kind: DType) -> float | None:
    """A bound as a number of the dtype; None if every value is within it."""
    return None if not np.isfinite(value) or abs(value) >= kind.max_value else float(value)


@onnx_op("Clip", ignored=("consumed_inputs",))
def clip_by_attributes(n: Call) -> Outputs:
    x = n[0]
    low, high = n.attr("min", -np.inf), n.attr("max", np.inf)
    return ops.clip(x, limit(low, x.dtype), limit(high, x.dtype))


@onnx_op("Clip", since=11)
def clip(x: Node, low: Node | None = None, high: Node | None = None) -> Node:
    return ops.clip(x, low, high)


@onnx_op("CumSum", "CumProd")
def cumulate(n: Call) -> Outputs:
    f = ops.cumsum if n.proto.op_type == "CumSum" else ops.cumprod
    how = {"exclusive": n.flag("exclusive"), "reverse": n.flag("reverse")}
    return f(n[0], n.integer(1), dtype=n[0].dtype, **how)


@onnx_op("Det")
def det(n: Call) -> Outputs:
    """By elimination, unrolled over the columns; the pivot of each is its largest element."""
    x = n[0]
    size = x.shape[-1]
    if not isinstance(size, int) or x.shape[-2] != size or size > 16:
        raise ModelImportError(f"a determinant of {x.tensor} is not supported; RLX takes up to 16 rows")
    made: Node = ops.reshape(n.constant(1, x.dtype), (1,) * (x.rank - 2))
    made = ops.broadcast_to(made, x.shape[:-2])
    rows = ops.iota((size,))
    for _ in range(size):
        column = ops.slice_axis(x, -1, 0, 1)
        pivot = ops.argmax(ops.abs(column), axis=x.rank - 2, keepdims=True)
        at = ops.gather_elements(x, ops.broadcast_to(pivot, (*x.shape[:-2], 1, x.shape[-1])), axis=x.rank - 2)
        lead = ops.slice_axis(at, -1, 0, 1)
        swapped = ops.squeeze(pivot, (-1, -2))
        scalar = ops.squeeze(lead, (-1, -2))
        made = made * ops.where(ops.equal(swapped, 0), scalar, -scalar)
        first = ops.slice_axis(x, -2, 0, 1)
        here = ops.equal(ops.reshape(rows, (x.shape[-2], 1)), pivot)
        x = ops.where(here, first, x)
        x = ops.slice_axis(x, -2, 1, x.shape[-2] - 1)
        column = ops.slice_axis(x, -1, 0, 1)
        factor = ops.where(ops.equal(lead, 0.0), 0.0, column / ops.where(ops.equal(lead, 0.0), 1.0, lead))
        x = x - factor * at
        x = ops.slice_axis(x, -1, 1, x.shape[-1] - 1)
        rows = ops.iota((x.shape[-2],))
    return made
