"""Deformable convolution (ONNX DeformConv): every window element reads at its own offset."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.errors import ShapeError
from rlx.ir.assume import require_equal, require_shape
from rlx.ir.attr import Attr, AttrValue, integer
from rlx.ir.dim import Dim
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Level, Op, Sample, declare
from rlx.ir.operand import Operand, Tensor, of_one
from rlx.ir.types import Shape, TensorType
from rlx.ops.array.shape import reshape, slice_axis, transpose
from rlx.ops.array.window import GEOMETRY, Padding, PaddingLike, per_axis, resolve_padding, window_counts
from rlx.ops.math.contract import dot_general
from rlx.ops.nn.conv import add_bias
from rlx.ops.nn.sampling import extent_of, interpolate, positions, taps_at, zero_outside
from rlx.ops.rules import expand_in_f32, in_f32, is_real_float, need_dtype, same_dtype, shape_of


def _product(shape: Sequence[Dim]) -> Dim:
    total: Dim = 1
    for d in shape:
        total = total * d
    return total


@declare
class _deform_conv(Op):
    """x [N, C, axes], w [O, C/groups, window], offset [N, offset_groups * window * n, counts], maybe a mask.

    Element k of window o is read at o * stride + k * dilation - low + offset, between elements and 0 outside,
    and multiplied by the mask [N, offset_groups * window, counts].
    """

    name = "deform_conv"
    level = Level.HIR
    heavy = True
    attrs = {**GEOMETRY, "groups": Attr(integer, 1), "offset_groups": Attr(integer, 1)}

    def infer(
        self,
        x: TensorType,
        w: TensorType,
        offset: TensorType,
        *mask: TensorType,
        groups: int,
        offset_groups: int,
        **how: AttrValue,
    ) -> TensorType:
        types = (x, w, offset, *mask)
        for t in types:
            need_dtype(self.name, t, is_real_float)
        same_dtype(self.name, types)
        n = x.rank - 2
        if (
            n < 1
            or w.rank != x.rank
            or offset.rank != x.rank
            or len(mask) > 1
            or min(groups, offset_groups) < 1
        ):
            raise ShapeError(
                f"deform_conv: x {x}, w {w} and offset {offset} must have the same rank, as [N, C, axes]"
            )
        require_equal(
            x.shape[1], w.shape[1] * groups, f"deform_conv: w {w} in {groups} groups does not fit x {x}"
        )
        if x.shape[1] % offset_groups != 0 or w.shape[0] % groups != 0:
            raise ShapeError(f"deform_conv: the channels of x {x} and w {w} do not divide into their groups")
        counts = window_counts(self.name, x.shape[2:], w.shape[2:], **how)
        taps = offset_groups * _product(w.shape[2:])
        for what, t, rows in (("offset", offset, taps * n), *(("mask", m, taps) for m in mask)):
            want = (x.shape[0], rows, *counts)
            require_shape(
                t.shape, want, f"deform_conv: {what} {t} is not {x.dtype}[{','.join(map(str, want))}]"
            )
        return x.with_shape((x.shape[0], w.shape[0], *counts))

    def ref(self, *arrays: np.ndarray, **how: object) -> np.ndarray:
        return np.asarray(_deform_ref(*arrays, **how))

    def expand(self, *operands: Node, **how: object) -> Node:
        made: Node = _deform_expand(*operands, **how)
        return made

    def samples(self) -> list[Sample]:
        def one(x: str, w: str, offset: str, *mask: str, grad: bool = True, **more: object) -> Sample:
            n = x.count(",") - 1
            attrs = {"strides": (1,) * n, "padding": ((0, 0),) * n, "dilations": (1,) * n, **more}
            args = [
                Arg(x),
                Arg(w),
                Arg(offset, -1.27, 1.19, distinct=True),
                *(Arg(m, 0.2, 1.0) for m in mask),
            ]
            return Sample(tuple(args), attrs, grad=grad)

        pads, steps = ((1, 0), (0, 1)), (2, 1)
        return [
            one("f32[1,1,3,4]", "f32[1,1,2,2]", "f32[1,8,2,3]"),
            one("f32[2,2,4,3]", "f32[4,1,2,2]", "f32[2,16,2,3]", "f32[2,8,2,3]",
                groups=2, offset_groups=2, padding=pads, strides=steps),
            one("f32[1,2,6]", "f32[2,2,2]", "f32[1,2,4]", dilations=(2,)),
            one("f32[0,1,3,3]", "f32[1,1,2,2]", "f32[0,8,2,2]", grad=False),
            one("f32[n,2,6]", "f32[2,2,2]", "f32[n,2,5]", grad=False),
            one("bf16[1,1,3,3]", "bf16[1,1,2,2]", "bf16[1,8,2,2]", grad=False),
        ]  # fmt: skip


@expand_in_f32
def _deform_expand(
    x: Node,
    w: Node,
    offset: Node,
    *mask: Node,
    strides: Sequence[int],
    padding: Padding,
    dilations: Sequence[int],
    groups: int,
    offset_groups: int,
) -> Node:
    n, batch, window, counts = x.rank - 2, x.shape[0], w.shape[2:], offset.shape[2:]
    taps, points = _product(window), _product(counts)
    images, each = batch * offset_groups, x.shape[1] // offset_groups
    moved = reshape(offset, (images, taps, n, *counts))
    rows = []
    for i, d in enumerate(x.shape[2:]):
        k = reshape(positions(window[i], x.dtype), (window[i], *(1,) * (n - 1 - i), *(1,) * n))
        o = reshape(positions(counts[i], x.dtype), (counts[i], *(1,) * (n - 1 - i)))
        at = o * float(strides[i]) + k * float(dilations[i]) - extent_of(padding[i][0], x.dtype)
        own = reshape(slice_axis(moved, 2, i, 1), (images, *window, *counts))
        c = reshape(own + at, (images, taps * points))
        rows.append([zero_outside(t, d) for t in taps_at(c, "linear")])
    read = interpolate(reshape(x, (images, each, *x.shape[2:])), rows)
    if mask:
        read = read * reshape(mask[0], (images, 1, taps * points))
    per_in, per_out = w.shape[1], w.shape[0] // groups
    columns = reshape(read, (batch, groups, per_in, taps, points))
    kernel = reshape(w, (groups, per_out, per_in, taps))
    out = dot_general(columns, kernel, ((2, 3), (2, 3)), ((1,), (0,)))  # [groups, batch, points, per_out]
    out = transpose(out, (1, 0, 3, 2))
    made: Node = reshape(out, (batch, w.shape[0], *counts))
    return made


def _ref_sample(image: np.ndarray, c: Sequence[float]) -> np.ndarray:
    """[C, axes] at one point, blended; 0 outside, and where the point is NaN or infinite."""
    total = np.zeros(image.shape[0])
    if not all(map(math.isfinite, c)):
        return total
    low = [math.floor(v) for v in c]
    for corner in itertools.product((0, 1), repeat=len(c)):
        at = [a + b for a, b in zip(low, corner, strict=True)]
        weight = math.prod(1 - abs(v - a) for v, a in zip(c, at, strict=True))
        if all(0 <= a < d for a, d in zip(at, image.shape[1:], strict=True)):
            index: Any = (slice(None), *at)
            total += weight * image[index]
    return total


@in_f32
def _deform_ref(
    x: np.ndarray, w: np.ndarray, offset: np.ndarray, *mask: np.ndarray,
    strides: Sequence[int], padding: Padding, dilations: Sequence[int], groups: int, offset_groups: int,
) -> np.ndarray:  # fmt: skip
    n, window, counts = x.ndim - 2, w.shape[2:], offset.shape[2:]
    moved = offset.reshape((x.shape[0], offset_groups, *window, n, *counts))
    each, per_in, per_out = x.shape[1] // offset_groups, w.shape[1], w.shape[0] // groups
    out = np.zeros((x.shape[0], w.shape[0], *counts))
    for b, o in itertools.product(range(x.shape[0]), np.ndindex(*counts)):
        column = np.zeros((x.shape[1], *window))
        for g, k in itertools.product(range(offset_groups), np.ndindex(*window)):
            c = [
                o[i] * strides[i] + k[i] * dilations[i] - padding[i][0] + float(moved[(b, g, *k, i, *o)])
                for i in range(n)
            ]
            scale = (
                mask[0].reshape((x.shape[0], offset_groups, *window, *counts))[(b, g, *k, *o)]
                if mask
                else 1.0
            )
            part = slice(g * each, (g + 1) * each)
            column[(part, *k)] = _ref_sample(x[b, part].astype(np.float64), c) * scale
        for g in range(groups):
            kernel = w[g * per_out : (g + 1) * per_out].reshape(per_out, -1)
            out[(b, slice(g * per_out, (g + 1) * per_out), *o)] = (
                kernel @ column[g * per_in : (g + 1) * per_in].ravel()
            )
    return out.astype(x.dtype)


@of_one
def deform_conv(
    x: Operand,
    w: Operand,
    offset: Operand,
    mask: Operand | None = None,
    bias: Operand | None = None,
    strides: int | Sequence[int] = 1,
    padding: PaddingLike = None,
    dilations: int | Sequence[int] = 1,
    groups: int = 1,
    offset_groups: int = 1,
) -> Tensor:
    """Convolution whose window elements read at offsets [N, offset_groups * window * n, counts] of their own.

    >>> x, w = np.arange(4.0).reshape(1, 1, 4), np.ones((1, 1, 1))
    >>> deform_conv(x, w, np.full((1, 1, 4), 0.5))
    array([[[0.5, 1.5, 2.5, 1.5]]])
    """
    window: Shape = tuple(shape_of(w)[2:])
    n = len(window)
    steps, spacing = (
        per_axis("deform_conv", "strides", strides, n),
        per_axis("deform_conv", "dilations", dilations, n),
    )
    pads = resolve_padding("deform_conv", padding, tuple(shape_of(x)[2:]), window, steps, spacing)
    operands = (x, w, offset) if mask is None else (x, w, offset, mask)
    how = {
        "strides": steps,
        "padding": pads,
        "dilations": spacing,
        "groups": groups,
        "offset_groups": offset_groups,
    }
    return add_bias(_deform_conv(*operands, **how), bias)
