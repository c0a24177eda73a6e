"""Numbers in few bits: quantise, dequantise, dynamic and simulated quantisation.

A real number x stands for the stored q by x = (q - zero point) * scale. One scale and zero point hold for the
whole tensor, for an index along `axis`, or for a `block` of indices along it. Integers round to the nearest,
halves to even, and saturate; f8 and f4 formats round as `cast` does and have no zero point but 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.errors import DTypeError, OpAttributeError, ShapeError, TypeMismatchError
from rlx.ir.assume import require_equal, require_shape
from rlx.ir.attr import Attr, boolean, dtype_kind, integer, optional
from rlx.ir.dim import Dim, ceildiv
from rlx.ir.dtype import F32, F64, I32, U8, DType, dtype
from rlx.ir.dtype import convert as convert_array
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Level, MultiOp, Op, Sample, declare, get_op
from rlx.ir.operand import DTypeLike, Operand, Tensor, of_many, of_one
from rlx.ir.types import TensorType, TupleType
from rlx.ops.array.shape import broadcast_to, reshape, slice_axis
from rlx.ops.math.elementwise import cast, equal, logical_and, maximum, minimum, round, where
from rlx.ops.math.reduce import reduce_max, reduce_min, reduce_sum
from rlx.ops.nn.blocks import given
from rlx.ops.rules import is_real_float, need_dtype, normal_axis, op_call, rank_of, unbroadcast


def is_quantized(d: DType) -> bool:
    """Dtypes that hold quantised numbers: integers of at most 16 bits; f8 and f4, but not powers of two."""
    return (d.is_int and d.bits <= 16) or (d.is_float and d.bits <= 8 and d.name != "f8e8m0")


def is_scale(d: DType) -> bool:
    """Dtypes of scales: floating point, powers of two (f8e8m0) included."""
    return d.is_float and (not d.storage_only or d.name == "f8e8m0")


def check_parameters(
    name: str,
    x: TensorType,
    scale: TensorType,
    zero: Sequence[TensorType],
    axis: int | None,
    block: int | None,
) -> None:
    """Shapes of scale and zero point: one number, one per index along axis, or one per block along it."""
    if not is_scale(scale.dtype):
        raise DTypeError(f"{name}: its scale is {scale}; it must be of a floating-point dtype")
    if len(zero) > 1:
        raise TypeMismatchError(
            f"{name}: takes x, scale and perhaps a zero point, got {2 + len(zero)} operands"
        )
    for z in zero:
        require_shape(z.shape, scale.shape, f"{name}: zero point {z} and scale {scale} have different shapes")
    if axis is None:
        if scale.rank or block is not None:
            raise ShapeError(
                f"{name}: scale {scale} is not one number; give axis=, the axis of {x} that it belongs to"
            )
        return
    if not 0 <= axis < x.rank:
        raise ShapeError(f"{name}: axis {axis} is out of range for {x}")
    if block is None:
        told = f"{name}: scale {scale} is not [{x.shape[axis]}], axis {axis} of {x}"
        if scale.rank != 1:
            raise ShapeError(told)
        require_equal(scale.shape[0], x.shape[axis], told)
        return
    if block < 1:
        raise OpAttributeError(f"{name}: block is {block}; it must be 1 or more")
    want = tuple(ceildiv(d, block) if i == axis else d for i, d in enumerate(x.shape))
    text = ",".join(map(str, want))
    told = f"{name}: scale {scale} is not [{text}], blocks of {block} along axis {axis} of {x}"
    require_shape(scale.shape, want, told)


def spread_array(p: np.ndarray, shape: Sequence[int], axis: int | None, block: int | None) -> np.ndarray:
    """Scale or zero point in a shape that broadcasts against x."""
    if axis is None:
        return p
    if block is None:
        return p.reshape([-1 if i == axis else 1 for i in range(len(shape))])
    return np.take(p, np.arange(shape[axis]) // block, axis)


def spread(p: Node, x: Node, axis: int | None, block: int | None) -> Node:
    """The same on nodes; blocks become index arithmetic of the kernel that reads them."""
    made: Node = p
    if axis is not None and block is None:
        made = reshape(p, tuple(d if i == axis else 1 for i, d in enumerate(x.shape)))
    elif axis is not None and block is not None:
        before, count, after = p.shape[:axis], p.shape[axis], p.shape[axis + 1 :]
        one = reshape(p, (*before, count, 1, *after))
        many = broadcast_to(one, (*before, count, block, *after))
        made = reshape(many, (*before, count * block, *after))
        if made.shape[axis] != x.shape[axis]:
            made = slice_axis(made, axis, 0, x.shape[axis])
    return made


def compute_dtype(*kinds: DType) -> DType:
    """What quantisation computes in: f64 if an operand has it, else f32."""
    return F64 if F64 in kinds else F32


def to(x: Node, kind: DType, saturate: bool | None = None) -> Node:
    """Cast unless the dtype is right already."""
    made: Node = x if x.dtype is kind else cast(x, dtype=kind, saturate=saturate)
    return made


_PLACE = {"axis": Attr(optional(integer), None), "block": Attr(optional(integer), None)}


@declare
class _quantize(Op):
    """round(x / scale) + zero point, saturated to the dtype; for f8 and f4, x / scale rounded to it."""

    name = "quantize"
    level = Level.HIR
    attrs = {"dtype": Attr(dtype_kind), **_PLACE, "saturate": Attr(boolean, True)}

    def infer(
        self,
        x: TensorType,
        scale: TensorType,
        *zero: TensorType,
        dtype: DType,
        axis: int | None,
        block: int | None,
        saturate: bool,
    ) -> TensorType:
        if x.dtype is not I32:
            need_dtype(self.name, x, is_real_float)
        if not is_quantized(dtype):
            raise DTypeError(
                f"quantize: cannot quantise to {dtype}; use an integer of at most 16 bits, f8 or f4"
            )
        check_parameters(self.name, x, scale, zero, axis, block)
        for z in zero:
            if z.dtype is not dtype:
                raise DTypeError(f"quantize: zero point {z} is not of the result's dtype {dtype}")
        return x.with_dtype(dtype)

    def ref(
        self,
        x: np.ndarray,
        scale: np.ndarray,
        *zero: np.ndarray,
        dtype: DType,
        axis: int | None,
        block: int | None,
        saturate: bool,
    ) -> np.ndarray:
        wide = np.float64 if np.float64 in (x.dtype, scale.dtype) else np.float32
        ratio = x.astype(wide) / spread_array(scale, x.shape, axis, block).astype(wide)
        if dtype.is_float:
            return convert_array(ratio, dtype, saturate=saturate)
        level = np.rint(ratio)
        if zero:
            level = level + spread_array(zero[0], x.shape, axis, block).astype(wide)
        level = np.where(np.isnan(level), 0, np.clip(level, dtype.min_value, dtype.max_value))
        return level.astype(np.int32).astype(dtype.np)

    def expand(
        self,
        x: Node,
        scale: Node,
        *zero: Node,
        dtype: DType,
        axis: int | None,
        block: int | None,
        saturate: bool,
    ) -> Node:
        wide = compute_dtype(x.dtype, scale.dtype)
        ratio = to(x, wide) / spread(to(scale, wide), x, axis, block)
        if dtype.is_float:
            return to(ratio, dtype, saturate)
        level = round(ratio)
        for z in zero:
            level = level + spread(to(z, wide), x, axis, block)
        return to(level, dtype)

    def samples(self) -> list[Sample]:
        def one(
            x: str, scale: str, kind: str, zero: str = "", special: bool = False, **attrs: object
        ) -> Sample:
            args = [Arg(x, -4, 4, special=special), Arg(scale, 0.02, 0.3)]
            args += [Arg(zero, -3, 3)] if zero else []
            return Sample(tuple(args), {"dtype": kind, **attrs}, grad=False)

        return [
            one("f32[3,5]", "f32[]", "i8"),
            one("f32[3,5]", "f32[]", "u8", "u8[]"),
            one("f32[2,3,4]", "f32[3]", "i8", "i8[3]", axis=1),
            one("f32[2,7]", "f32[2,3]", "u4", "u4[2,3]", axis=1, block=3),
            one("f32[6,2]", "f32[2,2]", "i4", axis=0, block=3),
            one("f32[17]", "f32[]", "i16", "i16[]"),
            one("f32[33]", "f32[]", "u16"),
            one("f32[9]", "f32[]", "i2"),
            one("f32[24]", "f32[]", "i8", "i8[]", special=True),
            one("f32[24]", "f32[]", "f8e4m3fn", special=True),
            one("f32[24]", "f32[]", "f8e5m2", saturate=False),
            one("f32[5]", "f32[5]", "f4e2m1", axis=0),
            one("f16[8]", "f16[]", "i8"),
            one("bf16[8]", "f32[]", "u8"),
            one("i32[8]", "f32[]", "i8"),
            one("f32[0,3]", "f32[3]", "u8", axis=1),
            one("f32[]", "f32[]", "u8"),
            one("f32[n,4]", "f32[n]", "i8", axis=0),
            one("f32[m,4]", "f32[ceildiv(m,2),4]", "i8", axis=0, block=2),
        ]


def _at(name: str, x: Operand, scale: Operand, axis: int | None, block: int | None) -> int | None:
    """Axis of the parameters; one number for the whole tensor has none."""
    if axis is None or (block is None and rank_of(scale) == 0):
        return None
    return normal_axis(name, axis, rank_of(x))


@of_one
def quantize(
    x: Operand,
    scale: Operand,
    zero_point: Operand | None = None,
    dtype: DTypeLike | None = None,
    axis: int | None = None,
    block: int | None = None,
    saturate: bool = True,
) -> Tensor:
    """round(x / scale) + zero_point in few bits (ONNX QuantizeLinear); dtype is that of zero_point, else u8.

    scale and zero_point are numbers, or vectors along `axis`, or have one entry per `block` indices along it.

    >>> quantize(np.array([-1.0, 0.0, 0.26]), np.array(0.1), dtype="i8")
    array([-10,   0,   3], dtype=int8)
    """
    kind = dtype if dtype is not None else U8 if zero_point is None else _dtype_of(zero_point)
    where_ = {"axis": _at("quantize", x, scale, axis, block), "block": block}
    return _quantize(x, scale, *given(zero_point), dtype=kind, saturate=saturate, **where_)


def _dtype_of(x: Operand) -> DType:
    return x.dtype if isinstance(x, Node) else dtype(np.asarray(x).dtype)


@declare
class _dequantize(Op):
    """(x - zero point) * scale, in the dtype of the scale or in `dtype`."""

    name = "dequantize"
    level = Level.HIR
    attrs = {**_PLACE, "dtype": Attr(optional(dtype_kind), None)}

    def infer(
        self,
        x: TensorType,
        scale: TensorType,
        *zero: TensorType,
        axis: int | None,
        block: int | None,
        dtype: DType | None,
    ) -> TensorType:
        if not is_quantized(x.dtype) and x.dtype is not I32:
            raise DTypeError(f"dequantize: {x} is not quantised; it must have an integer, f8 or f4 dtype")
        check_parameters(self.name, x, scale, zero, axis, block)
        for z in zero:
            if z.dtype is not x.dtype:
                raise DTypeError(f"dequantize: zero point {z} is not of the dtype of x {x}")
        out = x.with_dtype(scale.dtype if dtype is None else dtype)
        need_dtype(self.name, out, is_real_float)
        return out

    def ref(
        self,
        x: np.ndarray,
        scale: np.ndarray,
        *zero: np.ndarray,
        axis: int | None,
        block: int | None,
        dtype: DType | None,
    ) -> np.ndarray:
        wide = np.float64 if scale.dtype == np.float64 else np.float32
        exact = np.float32 if dtype_is_float(x) else np.int64
        level = x.astype(exact)
        for z in zero:
            level = level - spread_array(z, x.shape, axis, block).astype(exact)
        out = level.astype(wide) * spread_array(scale, x.shape, axis, block).astype(wide)
        return convert_array(out, scale.dtype if dtype is None else dtype)

    def expand(
        self, x: Node, scale: Node, *zero: Node, axis: int | None, block: int | None, dtype: DType | None
    ) -> Node:
        wide = compute_dtype(scale.dtype)
        exact = F32 if x.dtype.is_float else I32
        level = to(x, exact)
        for z in zero:
            level = level - spread(to(z, exact), x, axis, block)
        out = to(level, wide) * spread(to(scale, wide), x, axis, block)
        return to(out, scale.dtype if dtype is None else dtype)

    def samples(self) -> list[Sample]:
        def one(x: str, scale: str, zero: str = "", grad: bool = True, **attrs: object) -> Sample:
            args = [Arg(x, -7, 7), Arg(scale, 0.02, 0.3)]
            return Sample((*args, Arg(zero, -3, 3)) if zero else tuple(args), attrs, grad=grad)

        return [
            one("i8[3,5]", "f32[]"),
            one("u8[3,5]", "f32[]", "u8[]"),
            one("i8[2,3,4]", "f32[3]", "i8[3]", axis=1),
            one("u4[2,7]", "f32[2,3]", "u4[2,3]", axis=1, block=3),
            one("i4[6,2]", "f32[2,2]", axis=0, block=3),
            one("i16[17]", "f32[]", "i16[]"),
            one("i32[33]", "f32[]"),
            one("f8e4m3fn[9]", "f32[]", grad=False),
            one("f4e2m1[4,2]", "f8e8m0[2,2]", axis=0, block=2, dtype="f32", grad=False),
            one("i8[8]", "f16[]", grad=False),
            one("u8[8]", "f32[]", dtype="bf16", grad=False),
            one("u8[0,3]", "f32[3]", axis=1, grad=False),
            one("i8[n,4]", "f32[n]", axis=0, grad=False),
            one("i2[m,4]", "f32[ceildiv(m,2),4]", axis=0, block=2, grad=False),
        ]


def dtype_is_float(x: np.ndarray) -> bool:
    """Whether an array is of one of the small float formats."""
    return dtype(x.dtype).is_float


@of_one
def dequantize(
    x: Operand,
    scale: Operand,
    zero_point: Operand | None = None,
    axis: int | None = None,
    block: int | None = None,
    dtype: DTypeLike | None = None,
) -> Tensor:
    """(x - zero_point) * scale (ONNX DequantizeLinear), in the dtype of the scale unless `dtype` is given.

    >>> dequantize(np.array([0, 128, 255], np.uint8), np.float32(0.5), np.uint8(128))
    array([-64. ,   0. ,  63.5], dtype=float32)
    """
    where_ = {"axis": _at("dequantize", x, scale, axis, block), "block": block}
    return _dequantize(x, scale, *given(zero_point), dtype=dtype, **where_)


@declare
class _dynamic_quantize(MultiOp):
    """x in 8 bits with a scale and zero point that just hold its smallest and largest value, and 0."""

    name = "dynamic_quantize"
    level = Level.HIR
    arity = 1
    attrs = {"dtype": Attr(dtype_kind, U8)}

    def infer(self, x: TensorType, *, dtype: DType) -> TupleType:
        need_dtype(self.name, x, is_real_float)
        if dtype.name not in ("u8", "i8"):
            raise DTypeError(f"dynamic_quantize: cannot quantise to {dtype}; use u8 or i8")
        return TupleType((x.with_dtype(dtype), TensorType(x.dtype, ()), TensorType(dtype, ())))

    def ref(self, x: np.ndarray, *, dtype: DType) -> tuple[np.ndarray, ...]:
        wide = np.float64 if x.dtype == np.float64 else np.float32
        values: Any = x.astype(wide)
        low, high = wide(np.min(values, initial=0)), wide(np.max(values, initial=0))
        least = wide(dtype.min_value)
        scale = wide(1 if low == high else high - low) / wide(255)
        zero = np.clip(np.rint(least - low / scale), dtype.min_value, dtype.max_value)
        y = np.clip(np.rint(values / scale) + zero, dtype.min_value, dtype.max_value)
        ints = [np.where(np.isnan(a), 0, a).astype(np.int32).astype(dtype.np) for a in (y, zero)]
        return ints[0], convert_array(scale, x.dtype), ints[1]

    def expand(self, x: Node, *, dtype: DType) -> tuple[Node, ...]:
        values = to(x, compute_dtype(x.dtype))
        every = tuple(range(x.rank))
        low = minimum(reduce_min(values, axes=every), 0.0)
        high = maximum(reduce_max(values, axes=every), 0.0)
        scale = where(equal(low, high), 1.0, high - low) / 255.0
        zero = round(float(dtype.min_value) - low / scale)
        clipped = minimum(maximum(zero, float(dtype.min_value)), float(dtype.max_value))
        y = round(values / scale) + clipped
        return to(y, dtype), to(scale, x.dtype), to(clipped, dtype)

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg("f32[3,5]"),), grad=False),
            Sample((Arg("f32[3,5]"),), {"dtype": "i8"}, grad=False),
            Sample((Arg("f32[17]", 0.5, 2.0),), grad=False),
            Sample((Arg("f32[33]", -2.0, -0.5),), {"dtype": "i8"}, grad=False),
            Sample((np.zeros(4, np.float32),), grad=False),
            Sample((Arg("f32[]"),), grad=False),
            Sample((Arg("f32[0]"),), grad=False),
            Sample((Arg("f32[n,3]"),), grad=False),
            Sample((Arg("f16[8]"),), grad=False),
        ]


@of_many
def dynamic_quantize(x: Operand, dtype: DTypeLike = "u8") -> Tensor:
    """x in 8 bits, the scale and the zero point (ONNX DynamicQuantizeLinear).

    >>> dynamic_quantize(np.array([-1.0, 0.0, 1.55], np.float32))
    (array([  0, 100, 255], dtype=uint8), array(0.01, dtype=float32), array(100, dtype=uint8))
    """
    return _dynamic_quantize(x, dtype=dtype)


@declare
class _fake_quantize(Op):
    """Quantise and dequantise at once, so that training sees the error; NaN stays NaN.

    Its gradient is straight through: rounding counts as the identity, saturation as a constant; the scale's
    gradient is the learned-step-size one.
    """

    name = "fake_quantize"
    level = Level.HIR
    attrs = {"dtype": Attr(dtype_kind), **_PLACE}

    def infer(
        self,
        x: TensorType,
        scale: TensorType,
        *zero: TensorType,
        dtype: DType,
        axis: int | None,
        block: int | None,
    ) -> TensorType:
        get_op("quantize").infer(x, scale, *zero, dtype=dtype, axis=axis, block=block, saturate=True)
        need_dtype(self.name, x, is_real_float)
        if not dtype.is_int or scale.dtype is not x.dtype:
            raise DTypeError(
                f"fake_quantize: {x}, scale {scale}, to {dtype}; give scale the dtype of x, and an integer"
            )
        return x

    def ref(
        self,
        x: np.ndarray,
        scale: np.ndarray,
        *zero: np.ndarray,
        dtype: DType,
        axis: int | None,
        block: int | None,
    ) -> np.ndarray:
        wide = np.float64 if x.dtype == np.float64 else np.float32
        steps = spread_array(scale, x.shape, axis, block).astype(wide)
        offset = spread_array(zero[0], x.shape, axis, block).astype(wide) if zero else wide(0)
        values: Tensor = x.astype(wide)
        level = np.clip(np.rint(values / steps) + offset, dtype.min_value, dtype.max_value)
        return convert_array((level - offset) * steps, x.dtype)

    def expand(
        self, x: Node, scale: Node, *zero: Node, dtype: DType, axis: int | None, block: int | None
    ) -> Node:
        wide = compute_dtype(x.dtype)
        steps = spread(to(scale, wide), x, axis, block)
        level = round(to(x, wide) / steps)
        low, high = _ends(x, *zero, dtype=dtype, axis=axis, block=block)
        return to(minimum(maximum(level, low), high) * steps, x.dtype)

    def vjp(
        self,
        g: Node,
        y: Node,
        x: Node,
        scale: Node,
        *zero: Node,
        dtype: DType,
        axis: int | None,
        block: int | None,
    ) -> list[Node | None]:
        wide = compute_dtype(x.dtype)
        steps = spread(to(scale, wide), x, axis, block)
        ratio = to(x, wide) / steps
        low, high = _ends(x, *zero, dtype=dtype, axis=axis, block=block)
        level = round(ratio)
        inside = logical_and(level >= low, level <= high)
        kept = minimum(maximum(level, low), high)
        dx = where(inside, to(g, wide), 0.0)
        ds = to(g, wide) * (kept - where(inside, ratio, 0.0))
        return [to(dx, x.dtype), to(gather_sum(ds, scale, axis, block), scale.dtype), *(None for _ in zero)]

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg("f32[3,5]"), Arg("f32[]", 0.01, 0.1)), {"dtype": "i8"}, grad=False),
            Sample(
                (Arg("f32[3,5]"), Arg("f32[]", 0.01, 0.1), Arg("u8[]", 0, 9)), {"dtype": "u8"}, grad=False
            ),
            Sample((Arg("f32[2,3]"), Arg("f32[3]", 0.1, 0.3)), {"dtype": "i4", "axis": 1}, grad=False),
            Sample(
                (Arg("f32[7]"), Arg("f32[3]", 0.1, 0.3)), {"dtype": "i4", "axis": 0, "block": 3}, grad=False
            ),
            Sample((Arg("f16[8]"), Arg("f16[]", 0.1, 0.3)), {"dtype": "i8"}, grad=False),
            Sample((Arg("f32[n,0]"), Arg("f32[]", 0.1, 0.3)), {"dtype": "i8"}, grad=False),
        ]


def _ends(x: Node, *zero: Node, dtype: DType, axis: int | None, block: int | None) -> tuple[Tensor, Tensor]:
    """Least and greatest number of steps from 0 that a dtype can hold."""
    low: Tensor = float(dtype.min_value)
    high: Tensor = float(dtype.max_value)
    for z in zero:
        offset = spread(to(z, compute_dtype(x.dtype)), x, axis, block)
        low, high = low - offset, high - offset
    return low, high


def gather_sum(g: Node, like: Node, axis: int | None, block: int | None) -> Node:
    """Sum gradients of a spread scale back to its own shape."""
    if axis is None or block is None:
        at = (
            like
            if axis is None
            else reshape(like, tuple(like.shape[0] if i == axis else 1 for i in range(g.rank)))
        )
        made: Node = reshape(unbroadcast(g, at), like.shape)
        return made
    missing: Dim = like.shape[axis] * block - g.shape[axis]
    padding = tuple((0, missing if i == axis else 0) for i in range(g.rank))
    whole = op_call("pad", g, padding=padding, interior=(0,) * g.rank, value=0)
    split = reshape(whole, (*g.shape[:axis], like.shape[axis], block, *g.shape[axis + 1 :]))
    summed: Node = reduce_sum(split, axes=(axis + 1,), keepdims=False)
    return summed


@of_one
def fake_quantize(
    x: Operand,
    scale: Operand,
    zero_point: Operand | None = None,
    dtype: DTypeLike | None = None,
    axis: int | None = None,
    block: int | None = None,
) -> Tensor:
    """dequantize(quantize(x)) with a straight-through gradient, for training with quantisation in mind.

    >>> fake_quantize(np.array([0.24, 0.26, 99.0]), np.array(0.1), dtype="i8")
    array([ 0.2,  0.3, 12.7])
    """
    kind = dtype if dtype is not None else U8 if zero_point is None else _dtype_of(zero_point)
    where_ = {"axis": _at("fake_quantize", x, scale, axis, block), "block": block}
    return _fake_quantize(x, scale, *given(zero_point), dtype=kind, **where_)


__all__ = ["dequantize", "dynamic_quantize", "fake_quantize", "quantize"]
