"""Convolution over any number of axes, in NC... layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Unpack

import numpy as np

from rlx.errors import ShapeError, UnsupportedError
from rlx.ir.assume import require_equal
from rlx.ir.attr import Attr, AttrValue, dtype_kind, integer, optional
from rlx.ir.dim import Dim
from rlx.ir.dims.choice import need_numbers
from rlx.ir.dtype import DType, dtype
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Op, Sample, declare
from rlx.ir.operand import DTypeLike, Operand, Tensor, of_one, of_two
from rlx.ir.types import Shape, TensorType
from rlx.kernel.form import Conv, Form
from rlx.ops.array.shape import broadcast_to, reshape, transpose
from rlx.ops.array.window import (
    GEOMETRY,
    Geometry,
    Padding,
    PaddingLike,
    per_axis,
    resolve_padding,
    window_counts,
    window_view,
    windows,
)
from rlx.ops.math.contract import accumulate_dtype, dot_general
from rlx.ops.math.elementwise import cast
from rlx.ops.math.reduce import reduce_sum
from rlx.ops.nn.conv_adjoint import transposed
from rlx.ops.rules import is_number, need_dtype, op_call, same_dtype, shape_of


def check_channels(name: str, x: TensorType, w: TensorType, groups: int) -> None:
    """Operands have batch, channels and as many further axes; there is at least one group."""
    if x.rank < 3 or w.rank != x.rank:
        raise ShapeError(
            f"{name}: x {x} and w {w} must have the same rank, 3 or more: [batch, channels, axes] and "
            "[channels, channels, axes]"
        )
    if groups < 1:
        raise ShapeError(f"{name}: groups is {groups}; it must be 1 or more")


def divided(name: str, what: str, size: Dim, groups: int) -> Dim:
    """Channels of each group."""
    part = size // groups
    require_equal(part * groups, size, lambda: f"{name}: {what} {size} do not divide into {groups} groups")
    return part


@declare
class _conv(Op):
    """Convolution (cross-correlation, as every framework means it): x [N, C, axes], w [O, C/groups, window].

    Half precision accumulates in f32. Negative padding crops. `out_dtype` widens the result. `fill` is what
    padding consists of: quantised images are padded with their zero point.
    """

    name = "conv"
    family = "conv"
    arity = 2
    heavy = True
    attrs = {
        **GEOMETRY,
        "groups": Attr(integer, 1),
        "out_dtype": Attr(optional(dtype_kind), None),
        "fill": Attr(integer, 0),
    }

    def infer(
        self,
        x: TensorType,
        w: TensorType,
        *,
        groups: int,
        out_dtype: DType | None,
        fill: int = 0,
        **geometry: Unpack[Geometry],
    ) -> TensorType:
        need_dtype(self.name, x, is_number)
        need_dtype(self.name, w, is_number)
        d = same_dtype(self.name, (x, w)) if out_dtype is None else out_dtype
        check_channels(self.name, x, w, groups)
        require_equal(
            x.shape[1],
            w.shape[1] * groups,
            lambda: (
                f"conv: x {x} has {x.shape[1]} channels, w {w} reads {w.shape[1]} in each of {groups} groups"
            ),
        )
        divided(self.name, "output channels", w.shape[0], groups)
        counts = window_counts(self.name, x.shape[2:], w.shape[2:], **geometry)
        return TensorType(d, (x.shape[0], w.shape[0], *counts))

    def ref(
        self,
        x: np.ndarray,
        w: np.ndarray,
        *,
        groups: int,
        out_dtype: DType | None,
        fill: int,
        **geometry: Unpack[Geometry],
    ) -> np.ndarray:
        out = dtype(x.dtype) if out_dtype is None else out_dtype
        wide = _accumulate(dtype(x.dtype), out).np
        view = window_view(x.astype(wide), w.shape[2:], **geometry, fill=fill)
        n = w.ndim - 2
        per_in, per_out = w.shape[1], w.shape[0] // groups
        taps = range(2 + n, 2 + 2 * n)
        parts = []
        for g in range(groups):
            part = view[:, g * per_in : (g + 1) * per_in]
            kernel = w[g * per_out : (g + 1) * per_out].astype(wide)
            parts.append(np.tensordot(part, kernel, ([1, *taps], [1, *range(2, 2 + n)])))
        return np.moveaxis(np.concatenate(parts, -1), -1, 1).astype(out.np)

    def vjp(
        self,
        g: Node,
        y: Node,
        x: Node,
        w: Node,
        *,
        strides: Sequence[int],
        padding: Padding,
        dilations: Sequence[int],
        groups: int,
        out_dtype: DType | None,
        fill: int,
    ) -> list[Node | None]:
        if fill:
            raise UnsupportedError(f"conv: no gradient where padding is {fill}; pad x before, then convolve")
        g = g if g.dtype is x.dtype else cast(g, dtype=x.dtype)
        if any(count == 0 for count in g.shape[2:]):  # no window fits
            nothing = reduce_sum(g, axes=tuple(range(g.rank)))
            return [broadcast_to(nothing, x.shape), broadcast_to(nothing, w.shape)]
        rows = list(zip(x.shape[2:], w.shape[2:], g.shape[2:], strides, padding, dilations, strict=True))
        low = tuple(p[0] for p in padding)
        dx = transposed(g, w, x.shape[2:], strides, low, dilations, groups)
        # dw: x convolved with the gradient, batch and channels changing places
        n = x.shape[0]
        per_in = w.shape[1]
        xt = reshape(x, (n, groups, per_in, *x.shape[2:]))
        xt = reshape(_swap(xt, (2, 1, 0)), (per_in, groups * n, *x.shape[2:]))
        gt = _swap(g, (1, 0))
        reach = tuple(
            (low, (k - 1) * dil + (count - 1) * s + 1 - d - low) for d, k, count, s, (low, _), dil in rows
        )
        dw = conv(xt, gt, strides=dilations, padding=reach, dilations=strides, groups=groups)
        return [dx, _swap(dw, (1, 0))]

    def batch(
        self,
        flags: Sequence[bool],
        x: Node,
        w: Node,
        *,
        groups: int,
        out_dtype: DType | None,
        fill: int,
        **geometry: Unpack[Geometry],
    ) -> Node:
        more = {**geometry, "groups": groups, "out_dtype": out_dtype, "fill": fill}
        out: Node
        if not flags[1]:  # more rows of the batch
            b, n = x.shape[:2]
            out = _conv(reshape(x, (b * n, *x.shape[2:])), w, **more)
            return _reshaped(out, (b, n, *out.shape[1:]))
        b = w.shape[0]
        per_out = w.shape[1] // groups
        if not flags[0]:  # more output channels in every group
            wide = reshape(w, (b, groups, per_out, *w.shape[2:]))
            wide = reshape(_swap(wide, (1, 0, 2)), (groups * b * per_out, *w.shape[2:]))
            out = _conv(x, wide, **more)
            out = reshape(out, (out.shape[0], groups, b, per_out, *out.shape[2:]))
            out = _swap(out, (2, 0, 1, 3))
            return _reshaped(out, (b, out.shape[1], groups * per_out, *out.shape[4:]))
        need_numbers((b,), "is a number of groups, which add in another order than a contraction")
        if isinstance(b, int) and b > 0:  # more groups
            xt = _swap(x, (1, 0, 2))
            xt = reshape(xt, (x.shape[1], b * x.shape[2], *x.shape[3:]))
            out = _conv(xt, reshape(w, (b * w.shape[1], *w.shape[2:])), **{**more, "groups": b * groups})
            return _swap(reshape(out, (out.shape[0], b, w.shape[1], *out.shape[2:])), (1, 0, 2))
        return _batch_by_contraction(x, w, groups, out_dtype, {**geometry, "fill": fill})

    def lower(
        self,
        x: TensorType,
        w: TensorType,
        *,
        groups: int,
        out_dtype: DType | None,
        fill: int,
        **geometry: Unpack[Geometry],
    ) -> Form:
        out = self.infer(x, w, groups=groups, out_dtype=out_dtype, **geometry)
        return Conv(
            x=x.shape,
            w=w.shape,
            out=out.shape,
            **geometry,
            groups=groups,
            dtype=out.dtype,
            accumulate=_accumulate(x.dtype, out.dtype),
            fill=fill,
        )

    def cost(self, x: TensorType, w: TensorType, **attrs: AttrValue) -> Dim:
        total: Dim = 2 * self.infer(x, w, **attrs).numel
        for d in w.shape[1:]:
            total = total * d
        return total

    def samples(self) -> list[Sample]:
        def one(
            x: str,
            w: str,
            strides: Sequence[int],
            padding: Padding,
            dilations: Sequence[int],
            groups: int = 1,
            **more: AttrValue,
        ) -> Sample:
            attrs = {"strides": strides, "padding": padding, "dilations": dilations, "groups": groups}
            attrs |= {k: more.pop(k) for k in ("fill", "out_dtype") if k in more}
            return Sample((Arg(x), Arg(w)), attrs, **more)

        return [
            one("f32[2,3,7]", "f32[4,3,3]", (1,), ((0, 0),), (1,)),
            one("f32[1,4,9]", "f32[6,2,3]", (2,), ((1, 2),), (2,), 2),
            one("f32[2,3,6,5]", "f32[2,3,3,2]", (2, 1), ((1, 0), (0, 2)), (1, 2)),
            one("f32[1,4,5,5]", "f32[4,1,3,3]", (1, 2), ((1, 1), (1, 1)), (1, 1), 4),
            one("f32[1,2,3,4,3]", "f32[3,2,2,1,2]", (1, 2, 1), ((0, 1), (0, 0), (1, 0)), (1, 1, 2)),
            one("f32[2,1,4]", "f32[1,1,1]", (3,), ((0, 0),), (1,)),
            one("f32[1,2,4]", "f32[2,2,1]", (1,), ((2, 3),), (1,)),
            one("f32[1,1,6]", "f32[1,1,2]", (1,), ((-1, -2),), (1,)),
            one("f32[1,2,11]", "f32[2,2,3]", (4,), ((1, 0),), (3,)),
            one("f32[1,17,5]", "f32[33,17,1]", (1,), ((0, 0),), (1,), grad=False),
            one("f32[0,2,5]", "f32[3,2,3]", (1,), ((1, 1),), (1,), grad=False),
            one("f32[n,2,m]", "f32[3,2,3]", (2,), ((1, 1),), (1,), grad=False),
            one("f32[n,4,m,k]", "f32[2,2,3,1]", (1, 1), ((1, 1), (0, 0)), (1, 1), 2, grad=False),
            one("bf16[1,8,5]", "bf16[2,8,3]", (1,), ((1, 1),), (1,), grad=False),
            one("i32[1,2,5]", "i32[2,2,3]", (1,), ((1, 1),), (1,), grad=False),
            one("i32[1,2,4,5]", "i32[2,2,3,2]", (1, 1), ((1, 1), (0, 1)), (1, 1), fill=7, grad=False),
        ]


def _accumulate(x: DType, out: DType) -> DType:
    return accumulate_dtype(out if out.bits > x.bits else x)


def _reshaped(x: Node, shape: Shape) -> Node:
    made: Node = reshape(x, shape)
    return made


def _swap(x: Node, order: Sequence[int]) -> Node:
    """Permute the leading axes."""
    made: Node = transpose(x, (*order, *range(len(order), x.rank)))
    return made


def _batch_by_contraction(
    x: Node, w: Node, groups: int, out_dtype: DType | None, geometry: Mapping[str, AttrValue]
) -> Node:
    """Both operands batched by a symbolic size, which cannot be a number of groups: windows times kernels."""
    b, n = x.shape[:2]
    axes_ = x.rank - 3
    per_in, per_out = w.shape[2], w.shape[1] // groups
    seen = windows(x, w.shape[3:], **geometry)
    counts = seen.shape[3 : 3 + axes_]
    seen = reshape(seen, (b, n, groups, per_in, *seen.shape[3:]))
    kernel = reshape(w, (b, groups, per_out, *w.shape[2:]))
    taps = range(4 + axes_, 4 + 2 * axes_)
    out = dot_general(seen, kernel, ((3, *taps), (3, *range(4, 4 + axes_))), ((0, 2), (0, 1)), out_dtype)
    # [b, groups, n, counts, per_out]
    last = out.rank - 1
    out = transpose(out, (0, 2, 1, last, *range(3, last)))
    made: Node = reshape(out, (b, n, groups * per_out, *counts))
    return made


@of_one
def add_bias(y: Operand, bias: Operand | None) -> Tensor:
    """y [N, C, axes] plus one number for each channel."""
    if bias is None:
        return y
    return op_call("add", y, reshape(bias, (shape_of(bias)[0], *(1,) * (len(shape_of(y)) - 2))))


@of_two
def conv(
    x: Operand,
    w: Operand,
    bias: Operand | None = None,
    strides: int | Sequence[int] = 1,
    padding: PaddingLike = None,
    dilations: int | Sequence[int] = 1,
    groups: int = 1,
    out_dtype: DTypeLike | None = None,
    fill: int = 0,
) -> Tensor:
    """Convolution of x [N, C, axes] with w [O, C/groups, window], over any number of axes.

    padding: ((low, high), ...) for each axis, a number, or "valid", "same", "same_lower"; of `fill`.

    >>> conv(np.ones((1, 1, 5)), np.ones((1, 1, 3)), padding=((1, 1),))
    array([[[2., 3., 3., 3., 2.]]])
    """
    n = max(len(shape_of(w)) - 2, 0)
    steps, spacing = per_axis("conv", "strides", strides, n), per_axis("conv", "dilations", dilations, n)
    if len(shape_of(x)) != len(shape_of(w)):
        raise ShapeError(
            f"conv: x has {len(shape_of(x))} axes, w has {len(shape_of(w))}; both need channels and {n} axes"
        )
    pads = resolve_padding("conv", padding, tuple(shape_of(x)[2:]), tuple(shape_of(w)[2:]), steps, spacing)
    geometry = {"strides": steps, "padding": pads, "dilations": spacing}
    y = _conv(x, w, groups=groups, out_dtype=out_dtype, fill=fill, **geometry)
    return add_bias(y, bias)
