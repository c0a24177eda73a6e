"""Convolutions of quantised tensors: 8-bit factors, sums in i32, one rescaling at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import numpy as np

from rlx.errors import DTypeError, ShapeError, TypeMismatchError
from rlx.ir.assume import require_equal
from rlx.ir.attr import Attr, AttrValue, integer, strings
from rlx.ir.dim import Dim
from rlx.ir.dtype import I32
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Level, Op, Sample, declare, get_op
from rlx.ir.operand import Operand, Tensor, of_one, of_two
from rlx.ir.types import TensorType, tensor_types
from rlx.ops.array.create import ones
from rlx.ops.array.shape import broadcast_to, reshape
from rlx.ops.array.window import (
    GEOMETRY,
    Geometry,
    PaddingLike,
    is_padded,
    per_axis,
    resolve_padding,
    window_view,
)
from rlx.ops.math.reduce import reduce_sum
from rlx.ops.math.stats import dim_value
from rlx.ops.nn.blocks import given
from rlx.ops.nn.conv import add_bias, conv
from rlx.ops.quant.qlinear import (
    SIDES,
    check_bytes,
    check_scale,
    check_zeros,
    is_byte,
    known,
    requantize,
    requantize_ref,
    shifted,
    signed_factor,
    take_off,
    unsigned_factor,
)
from rlx.ops.quant.quantize import to
from rlx.ops.rules import need_dtype, shape_of
from rlx.records import dataclass


@of_one
def per_channel(p: Operand, axes: int) -> Tensor:
    """A parameter of a kernel: one number for each output channel."""
    return reshape(p, (shape_of(p)[0], *(1,) * axes)) if len(shape_of(p)) == 1 else p


@dataclass(frozen=True, eq=False)
class Windows:
    """What the zero points of a convolution multiply, laid out like its result.

    Padding is the zero point of x if that is a known number: then all windows are alike, and the sums
    of w are one number per channel. Else padding is 0, and each window counts the elements inside x.
    """

    x: Node
    w: Node
    groups: int
    geometry: Mapping[str, AttrValue]
    fill: int | None

    def conv(self, x: Node, w: Node) -> Node:
        made: Node = conv(x, w, groups=self.groups, out_dtype=I32, fill=self.fill or 0, **self.geometry)
        return made

    @property
    def flat(self) -> Node:
        """Which elements of windows are inside x."""
        made: Node = ones((1, *self.x.shape[1:]), self.x.dtype)
        return made

    def columns(self) -> Node:
        if self.fill is None:
            return self.conv(self.flat, self.w)
        total = reduce_sum(to(self.w, I32), axes=tuple(range(1, self.w.rank)), keepdims=False)
        made: Node = per_channel(total, self.w.rank - 2)
        return made

    def rows(self) -> Node:
        return self.of_group(self.conv(self.x, ones((self.groups, *self.w.shape[1:]), self.w.dtype)))

    def depth(self) -> Any:
        if self.fill is None:
            return self.of_group(self.conv(self.flat, ones((self.groups, *self.w.shape[1:]), self.w.dtype)))
        count: Dim = 1
        for d in self.w.shape[1:]:
            count = count * d
        return dim_value(count, "i32")

    def of_group(self, sums: Node) -> Node:
        """One number for all channels of a group."""
        if self.groups == 1:
            return sums
        n, _, *counts = sums.shape
        per_out = self.w.shape[0] // self.groups
        many = broadcast_to(reshape(sums, (n, self.groups, 1, *counts)), (n, self.groups, per_out, *counts))
        made: Node = reshape(many, (n, self.w.shape[0], *counts))
        return made


def convolution(
    x: Node, w: Node, zeros: Mapping[str, Node | None], groups: int, geometry: Mapping[str, AttrValue]
) -> Node:
    """conv(x - zx, w - zw) in i32; padding adds nothing."""
    x, left = unsigned_factor(x, zeros.get("left"))
    w, right = signed_factor(w, zeros.get("right"))
    fill = None
    if left is None or not is_padded(geometry["padding"]):
        fill = 0
    elif (value := known(left)) is not None and value.size == 1:
        fill = int(value.reshape(()))
    parts = Windows(x, w, groups, geometry, fill)
    return take_off(parts.conv(x, w), left, None if right is None else per_channel(right, w.rank - 2), parts)


def convolution_ref(
    x: np.ndarray,
    w: np.ndarray,
    zeros: Mapping[str, np.ndarray],
    groups: int,
    geometry: Mapping[str, AttrValue],
) -> np.ndarray:
    zw = zeros.get("right")
    kernel = shifted(w, zw if zw is None or zw.ndim == 0 else zw.reshape(-1, *(1,) * (w.ndim - 1)))
    view = window_view(shifted(x, zeros.get("left")), w.shape[2:], **geometry, fill=0)
    n, per_in, per_out = w.ndim - 2, w.shape[1], w.shape[0] // groups
    taps = [*range(2 + n, 2 + 2 * n)]
    parts = [
        np.tensordot(
            view[:, g * per_in : (g + 1) * per_in],
            kernel[g * per_out : (g + 1) * per_out],
            ([1, *taps], [1, *range(2, 2 + n)]),
        )
        for g in range(groups)
    ]
    return np.asarray(np.moveaxis(np.concatenate(parts, -1), -1, 1), np.int32)


def _conv_type(
    name: str, x: TensorType, w: TensorType, groups: int, geometry: Mapping[str, AttrValue]
) -> TensorType:
    check_bytes(name, x, w)
    (out,) = tensor_types(get_op("conv").infer(x, w, groups=groups, out_dtype=I32, **geometry))
    return out


def _check_kernel_parameter(name: str, what: str, t: TensorType, w: TensorType) -> None:
    told = f"{name}: {what} {t} must be a number or one for each of the {w.shape[0]} output channels"
    if t.rank > 1:
        raise ShapeError(told)
    if t.rank:
        require_equal(t.shape[0], w.shape[0], told)


@declare
class _conv_integer(Op):
    """conv(x - zx, w - zw) of bytes, summed in i32; zx is a number, zw a number or one per output channel."""

    name = "conv_integer"
    level = Level.HIR
    heavy = True
    sees_constants = True
    attrs = {**GEOMETRY, "groups": Attr(integer, 1), "zeros": Attr(strings, ())}

    def infer(
        self,
        x: TensorType,
        w: TensorType,
        *types: TensorType,
        zeros: Sequence[str],
        groups: int,
        **geometry: Unpack[Geometry],
    ) -> TensorType:
        out = _conv_type(self.name, x, w, groups, geometry)
        check_zeros(self.name, zeros, types, (x, w))
        for side, t in zip(zeros, types, strict=True):
            if side == "left" and t.rank:
                raise ShapeError(f"{self.name}: the zero point {t} of x must be a number")
            _check_kernel_parameter(self.name, "zero point", t, w)
        return out

    def ref(
        self,
        x: np.ndarray,
        w: np.ndarray,
        *points: np.ndarray,
        zeros: Sequence[str],
        groups: int,
        **geometry: Unpack[Geometry],
    ) -> np.ndarray:
        return convolution_ref(x, w, dict(zip(zeros, points, strict=True)), groups, geometry)

    def expand(
        self, x: Node, w: Node, *points: Node, zeros: Sequence[str], groups: int, **geometry: Unpack[Geometry]
    ) -> Node:
        return convolution(x, w, dict(zip(zeros, points, strict=True)), groups, geometry)

    def samples(self) -> list[Sample]:
        def one(x: str, w: str, groups: int = 1, pads: Any = (1, 0), stride: int = 1, **zeros: str) -> Sample:
            args = [Arg(t, -100, 100) for t in (x, w, *zeros.values())]
            n = x.count(",") - 1
            shape = {"strides": (stride,) * n, "padding": (pads,) * n, "dilations": (1,) * n}
            return Sample(tuple(args), {**shape, "groups": groups, "zeros": tuple(zeros)}, grad=False)

        return [
            one("u8[1,2,5]", "i8[3,2,3]"),
            one("u8[2,2,5]", "i8[3,2,3]", left="u8[]"),
            one("u8[1,2,4,5]", "u8[3,2,3,2]", left="u8[]", right="u8[]"),
            one("i8[2,4,7]", "i8[6,2,3]", groups=2, stride=2, left="i8[]", right="i8[6]"),
            one("u8[1,1,3]", "i8[1,1,1]", pads=(0, 0), right="i8[1]"),
            one("u8[0,2,5]", "i8[3,2,3]", left="u8[]"),
            one("u8[n,2,m]", "i8[3,2,3]", left="u8[]", right="i8[3]"),
        ]


@declare
class _qlinear_conv(Op):
    """Quantised convolution: x, w and the result have scales and zero points; a bias is i32, in units of the
    product of the scales of x and w."""

    name = "qlinear_conv"
    level = Level.HIR
    heavy = True
    sees_constants = True
    attrs = {**GEOMETRY, "groups": Attr(integer, 1)}

    def infer(self, *types: TensorType, groups: int, **geometry: Unpack[Geometry]) -> TensorType:
        if len(types) not in (8, 9):
            raise TypeMismatchError(
                f"{self.name}: takes x, w, y with scales and zero points, perhaps a bias; got {len(types)}"
            )
        x, sx, zx, w, sw, zw, sy, zy, *bias = types
        out = _conv_type(self.name, x, w, groups, geometry)
        for what, t in (("the left", sx), ("the right", sw), ("the result's", sy)):
            check_scale(self.name, what, t)
        check_zeros(self.name, SIDES, (zx, zw), (x, w))
        need_dtype(self.name, zy, is_byte)
        if any(t.rank for t in (sx, zx, sy, zy)):
            raise ShapeError(f"{self.name}: scales and zero points of x and of the result must be numbers")
        for what, t in (("scale", sw), ("zero point", zw), *(("bias", t) for t in bias)):
            _check_kernel_parameter(self.name, what, t, w)
        for t in bias:
            if t.dtype is not I32 or t.rank != 1:
                raise DTypeError(f"{self.name}: the bias {t} must be i32, one for each output channel")
        return out.with_dtype(zy.dtype)

    def ref(self, *arrays: np.ndarray, groups: int, **geometry: Unpack[Geometry]) -> np.ndarray:
        x, sx, zx, w, sw, zw, sy, zy, *bias = arrays
        total = convolution_ref(x, w, {"left": zx, "right": zw}, groups, geometry)
        channels = (-1, *(1,) * (w.ndim - 2))
        for b in bias:
            total = total + b.reshape(channels)
        return requantize_ref(total, sx * (sw.reshape(channels) if sw.ndim else sw) / sy, zy)

    def expand(self, *operands: Node, groups: int, **geometry: Unpack[Geometry]) -> Node:
        x, sx, zx, w, sw, zw, sy, zy, *bias = operands
        total = convolution(x, w, {"left": zx, "right": zw}, groups, geometry)
        for b in bias:
            total = add_bias(total, b)
        return requantize(total, sx * per_channel(sw, w.rank - 2) / sy, zy)

    def samples(self) -> list[Sample]:
        def one(x: str, w: str, each: str = "[]", bias: str = "", out: str = "u8", groups: int = 1) -> Sample:
            left, right = x.split("[")[0], w.split("[")[0]
            args = [
                Arg(x, -100, 100), Arg("f32[]", 0.01, 0.05), Arg(f"{left}[]", -9, 9),
                Arg(w, -100, 100), Arg("f32" + each, 0.01, 0.05), Arg(right + each, -9, 9),
                Arg("f32[]", 0.2, 0.5), Arg(f"{out}[]", -9, 9),
            ]  # fmt: skip
            args += [Arg(bias, -500, 500)] if bias else []
            n = x.count(",") - 1
            shape = {"strides": (1,) * n, "padding": ((1, 1),) * n, "dilations": (1,) * n}
            return Sample(tuple(args), {**shape, "groups": groups}, grad=False)

        return [
            one("u8[1,2,5]", "i8[3,2,3]"),
            one("u8[2,2,4,4]", "i8[3,2,3,3]", "[3]", "i32[3]"),
            one("i8[1,4,7]", "i8[6,2,3]", "[6]", "i32[6]", "i8", groups=2),
            one("u8[0,2,5]", "u8[3,2,3]"),
            one("u8[n,2,5]", "i8[3,2,3]", "[3]"),
        ]


def _conv_attrs(
    name: str,
    x: Operand,
    w: Operand,
    strides: int | Sequence[int],
    padding: PaddingLike,
    dilations: int | Sequence[int],
    groups: int,
) -> dict[str, AttrValue]:
    n = max(len(shape_of(w)) - 2, 0)
    steps, spacing = per_axis(name, "strides", strides, n), per_axis(name, "dilations", dilations, n)
    pads = resolve_padding(name, padding, tuple(shape_of(x)[2:]), tuple(shape_of(w)[2:]), steps, spacing)
    return {"strides": steps, "padding": pads, "dilations": spacing, "groups": groups}


@of_two
def conv_integer(
    x: Operand,
    w: Operand,
    x_zero_point: Operand | None = None,
    w_zero_point: Operand | None = None,
    strides: int | Sequence[int] = 1,
    padding: PaddingLike = None,
    dilations: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """conv(x - x_zero_point, w - w_zero_point) of i8 or u8 tensors, in i32 (ONNX ConvInteger).

    >>> conv_integer(np.array([[[1, 2, 3]]], np.uint8), np.array([[[1, 1]]], np.int8), np.uint8(1))
    array([[[1, 3]]], dtype=int32)
    """
    points = {"left": x_zero_point, "right": w_zero_point}
    zeros = tuple(side for side, p in points.items() if p is not None)
    attrs = _conv_attrs("conv_integer", x, w, strides, padding, dilations, groups)
    return _conv_integer(x, w, *given(*points.values()), zeros=zeros, **attrs)


@of_one
def qlinear_conv(
    x: Operand,
    x_scale: Operand,
    x_zero_point: Operand,
    w: Operand,
    w_scale: Operand,
    w_zero_point: Operand,
    y_scale: Operand,
    y_zero_point: Operand,
    bias: Operand | None = None,
    strides: int | Sequence[int] = 1,
    padding: PaddingLike = None,
    dilations: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """Convolution of quantised tensors, quantised (ONNX QLinearConv); padding as for `conv`.

    >>> one, zero = np.float32(1.0), np.uint8(0)
    >>> x, w = np.array([[[1, 2, 3]]], np.uint8), np.array([[[1, 1]]], np.uint8)
    >>> qlinear_conv(x, one, zero, w, one, zero, one, zero)
    array([[[3, 5]]], dtype=uint8)
    """
    attrs = _conv_attrs("qlinear_conv", x, w, strides, padding, dilations, groups)
    operands = (x, x_scale, x_zero_point, w, w_scale, w_zero_point, y_scale, y_zero_point, *given(bias))
    return _qlinear_conv(*operands, **attrs)


__all__ = ["conv_integer", "qlinear_conv"]
