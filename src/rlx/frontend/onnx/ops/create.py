"""Tensors from attributes, shapes or ranges."""

from __future__ import annotations

import numpy as np

from rlx import ops
from rlx.errors import ModelImportError
from rlx.frontend.onnx.call import Call
from rlx.frontend.onnx.registry import onnx_op
from rlx.frontend.onnx.value import Outputs, Strings
from rlx.ir.dim import Dim, Expr, ceildiv, dim_max, known_le


@onnx_op("Constant")
def constant(n: Call) -> Outputs:
    name = n.outputs[0]
    if n.has("value_string") or n.has("value_strings"):
        text = n.attr("value_strings") if n.has("value_strings") else n.attr("value_string")
        return Strings(np.array(text, dtype=object))
    for attribute, kind in (
        ("value", None),
        ("sparse_value", None),
        ("value_float", np.float32),
        ("value_floats", np.float32),
        ("value_int", np.int64),
        ("value_ints", np.int64),
    ):
        if n.has(attribute):
            value = n.attr(attribute)
            return n.importer.constant(value if kind is None else np.asarray(value, kind), name)
    raise ModelImportError("it has no value")


@onnx_op("ConstantOfShape")
def constant_of_shape(n: Call) -> Outputs:
    value = n.attr("value", np.zeros(1, np.float32))
    if value.size != 1:
        raise ModelImportError(f"its value holds {value.size} elements; it must hold one")
    return ops.broadcast_to(n.constant(value.reshape(())), n.dims(0, fed=True))


@onnx_op("Range")
def range_(n: Call) -> Outputs:
    dtype = n[0].dtype
    if any(n.is_open(i) for i in range(3)):
        count = _count_by_data(n)
    else:
        count = _count(n)
    wide = dtype if dtype.name not in ("f16", "bf16") else "f32"
    steps = ops.iota((count,), 0, wide)
    values = ops.cast(n[0], wide) + steps * ops.cast(n[2], wide)
    return ops.cast(values, dtype)


def _count(n: Call) -> Dim:
    """How many numbers a range has whose ends are numbers or sizes."""
    start, limit, step = n.place(0), n.place(1), n.number(2)
    if step == 0 or (isinstance(step, Expr) and known_le(0, step) is not True):
        raise ModelImportError(f"its step {step} must be a number other than 0 or a size")
    if isinstance(start, float) or isinstance(limit, float) or isinstance(step, float):
        if isinstance(start, Expr) or isinstance(limit, Expr) or isinstance(step, Expr):
            raise ModelImportError(f"its range from {start} to {limit} by {step} mixes sizes with fractions")
        count: Dim = max(int(np.ceil((limit - start) / step)), 0)
    else:
        forwards = isinstance(step, Expr) or step > 0
        span = limit - start if forwards else start - limit
        count = dim_max(ceildiv(span, step if forwards else -step), 0)
        n.refuse_step(count, "its length")
    return count


def _count_by_data(n: Call) -> Dim:
    """The same where the data decide the ends; of range(n), n itself, which must not be negative then."""
    start, limit, step = (n[i] for i in range(3))
    first, by = n.known(0), n.known(2)
    if (
        start.dtype.is_int
        and first is not None
        and by is not None
        and int(first.item()) == 0
        and by.item() == 1
    ):
        return n.sizes(limit, "its limit", fed=True)[0]
    if start.dtype.is_int:
        first_, last, by_ = (ops.cast(v, "i64") for v in (start, limit, step))
        count = -ops.floor_div(first_ - last, by_)
    else:
        first_, last, by_ = (ops.cast(v, "f64") for v in (start, limit, step))
        count = ops.cast(ops.ceil((last - first_) / by_), "i64")
    return n.sizes(ops.maximum(ops.reshape(count, ()), 0), "its length", fed=True)[0]


@onnx_op("EyeLike")
def eye_like(n: Call) -> Outputs:
    x = n[0]
    if x.rank != 2:
        raise ModelImportError(f"its input must be a matrix, not {x.tensor}")
    return ops.eye(x.shape[0], x.shape[1], int(n.attr("k", 0)), n.dtype("dtype", x.dtype))
