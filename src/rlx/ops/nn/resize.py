"""Resize with ONNX's modes: each axis is a weighted sum of a few neighbours, one axis after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from rlx.errors import ShapeError
from rlx.ir.attr import Attr, AttrValue, boolean, dims, ints, one_of, optional, real, tuple_of
from rlx.ir.dim import Dim, ceildiv, dim_max, divides, floordiv, known_eq, known_le, parse_dim
from rlx.ir.dtype import F32, F64, DType
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Level, Op, Sample, declare
from rlx.ir.operand import Operand, Tensor, of_one
from rlx.ir.types import Shape, TensorType
from rlx.ops.array.gather import gather
from rlx.ops.array.shape import broadcast_to, reshape, slice_axis
from rlx.ops.math.elementwise import (
    abs,
    cast,
    ceil,
    floor,
    logical_and,
    logical_not,
    maximum,
    minimum,
    round,
    where,
)
from rlx.ops.math.reduce import sum as sum_over
from rlx.ops.nn.sampling import Tap, clamp_index, extent_of, is_inside, positions, taps_at
from rlx.ops.rules import is_computable, is_half, is_real, is_real_float, need_dtype, normal_axes, shape_of

TRANSFORMS = (
    "half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric",
    "tf_crop_and_resize", "tf_half_pixel_for_nn",
)  # fmt: skip
NEAREST = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
MODES = ("nearest", "linear", "cubic")


@declare
class _resize(Op):
    """Resize axes to sizes. `scales` holds the factor of an axis, or None for new size / old size.

    An optional second operand is the region of tf_crop_and_resize: starts, then ends, as fractions of axes.
    """

    name = "resize"
    level = Level.HIR
    attrs = {
        "axes": Attr(ints),
        "sizes": Attr(dims),
        "scales": Attr(tuple_of(optional(real))),
        "mode": Attr(one_of(*MODES), "nearest"),
        "transform": Attr(one_of(*TRANSFORMS), "half_pixel"),
        "nearest": Attr(one_of(*NEAREST), "round_prefer_floor"),
        "cubic_a": Attr(real, -0.75),
        "antialias": Attr(boolean, False),
        "exclude_outside": Attr(boolean, False),
        "extrapolation": Attr(real, 0.0),
    }

    def infer(
        self, x: TensorType, *roi: TensorType, axes: Any, sizes: Shape, scales: Any, **how: object
    ) -> TensorType:
        need_dtype(self.name, x, is_computable if how["mode"] == "nearest" else is_real)
        if len(roi) > 1:
            raise ShapeError(f"resize: takes x and at most a region, got {len(roi) + 1} operands")
        if not len(axes) == len(sizes) == len(scales):
            raise ShapeError(
                f"resize: {len(axes)} axes have {len(sizes)} sizes and {len(scales)} scales; give one each"
            )
        if any(not 0 <= a < x.rank for a in axes) or len(set(axes)) < len(axes):
            raise ShapeError(f"resize: axes {axes} are not distinct axes of {x}, counted from 0")
        if how["transform"] == "tf_crop_and_resize" and not roi:
            raise ShapeError("resize: tf_crop_and_resize needs a region: starts and ends of each axis")
        for t in roi:
            need_dtype(self.name, t, is_real_float)
            if t.shape != (2 * len(axes),):
                raise ShapeError(
                    f"resize: the region {t} needs a start and an end for each of {len(axes)} axes"
                )
        shape = list(x.shape)
        for a, d in zip(axes, sizes, strict=True):
            if known_eq(shape[a], 0) is True and known_le(1, d) is True:
                raise ShapeError(f"resize: axis {a} of {x} has no elements, so it cannot be enlarged to {d}")
            shape[a] = d
        return x.with_shape(tuple(shape))

    def ref(
        self, x: np.ndarray, *roi: np.ndarray, axes: Any, sizes: Any, scales: Any, **how: AttrValue
    ) -> np.ndarray:
        out = (
            x
            if how["mode"] == "nearest" and not how["transform"].startswith("tf_crop")
            else x.astype(np.float64)
        )
        for i, (a, n, scale) in enumerate(zip(axes, sizes, scales, strict=True)):
            if not roi and n == x.shape[a] and scale in (None, 1.0):
                continue
            region = (float(roi[0][i]), float(roi[0][len(axes) + i])) if roi else (0.0, 1.0)
            out = _ref_axis(out, a, n, scale, region, **how)
        return _ref_round(out, x.dtype)

    def expand(self, x: Node, *roi: Node, axes: Any, sizes: Shape, scales: Any, **how: object) -> Node:
        own = x.dtype
        blends = how["mode"] != "nearest"
        y = cast(x, dtype=F32) if blends and (is_half(own) or not own.is_float) else x
        for i, (a, n, scale) in enumerate(zip(axes, sizes, scales, strict=True)):
            region = tuple(_element(roi[0], j) for j in (i, len(axes) + i)) if roi else None
            y = _axis(y, a, n, scale, region, **how)
        made: Node = _back(y, own)
        return made

    def samples(self) -> list[Sample]:
        def one(
            type_: str, axes: Any, sizes: object, scales: Any = None, roi: Any = None, **more: AttrValue
        ) -> Sample:
            grad = more.pop("grad", True)
            attrs = {"axes": axes, "sizes": sizes, "scales": scales or (None,) * len(axes), **more}
            args = (Arg(type_),) if roi is None else (Arg(type_), np.array(roi, np.float32))
            return Sample(args, attrs, grad=grad)

        out = [
            one("f32[1,2,3]", (2,), (6,)),
            one("f32[1,1,2,3]", (2, 3), (5, 4)),
            one("f32[2,4]", (1,), (4,), mode="linear"),
            one("f32[1,2,3]", (2,), (6,), (2.0,), transform="asymmetric", nearest="floor"),
            one("f32[3]", (0,), (0,), grad=False),
            one("f32[0,3]", (1,), (5,), mode="linear", grad=False),
            one("f32[n,3]", (1,), (7,), mode="linear", grad=False),
            one(
                "f32[n,m]",
                (0, 1),
                (parse_dim("2*n"), parse_dim("3*m")),
                mode="cubic",
                transform="align_corners",
                grad=False,
            ),
            one("f32[n,m]", (1,), ("n",), mode="linear", antialias=True, grad=False),
            one("i32[2,3]", (1,), (5,), mode="linear", grad=False),
            one("u8[1,5]", (1,), (3,), grad=False),
            one("bf16[1,5]", (1,), (8,), mode="cubic", grad=False),
            one("f32[4,5]", (0, 1), (3, 3), mode="linear", antialias=True),
            one("f32[7]", (0,), (3,), mode="cubic", antialias=True, exclude_outside=True),
            one("f32[5]", (0,), (8,), mode="cubic", exclude_outside=True, cubic_a=-0.5),
            one("f32[5]", (0,), (3,), (0.6,), mode="linear", transform="half_pixel_symmetric"),
            one("f32[4]", (0,), (1,), mode="linear", transform="pytorch_half_pixel"),
            one("f32[4]", (0,), (1,), mode="linear", transform="align_corners"),
            one("f32[1]", (0,), (3,), mode="linear", transform="align_corners"),
        ]
        for transform in TRANSFORMS:
            roi = (0.1, 0.8) if transform.startswith("tf_crop") else None
            for mode in MODES:
                out.append(one("f32[2,5]", (1,), (7,), mode=mode, transform=transform, roi=roi))
        for rounding in NEAREST:
            out.append(one("f32[5]", (0,), (8,), nearest=rounding))
            out.append(one("f32[5]", (0,), (10,), (2.0,), nearest=rounding, transform="asymmetric"))
        wide = {"transform": "tf_crop_and_resize", "extrapolation": 3.5}
        out += [
            one("f32[4,5]", (0, 1), (3, 6), roi=(-0.3, 0.2, 0.7, 1.4), mode="linear", **wide),
            one("f32[4,5]", (0, 1), (1, 6), roi=(0.4, 0.2, 0.7, 0.9), mode="cubic", **wide),
        ]
        return out


def _element(x: Node, i: int) -> Node:
    made: Node = cast(reshape(slice_axis(x, 0, i, 1), ()), dtype=F64)
    return made


def _back(y: Node, own: DType) -> Node:
    """To x's dtype: integers are rounded and kept in range."""
    if y.dtype is own:
        return y
    return cast(y if own.is_float else round(y), dtype=own)


def _is_repeat(d: Dim, n: Dim, scale: float | None, transform: str, nearest: str) -> bool:
    """Whether nearest upsampling just repeats every element a whole number of times."""
    if divides(d, n) is not True or (scale is not None and (scale % 1 or n // d != int(scale))):
        return False
    pixel = transform in ("half_pixel", "pytorch_half_pixel", "half_pixel_symmetric")
    return (pixel and nearest.startswith("round")) or (transform == "asymmetric" and nearest == "floor")


def _axis(y: Node, axis: int, n: Dim, scale: float | None, region: Any, **how: AttrValue) -> Node:
    """Resize one axis."""
    d = y.shape[axis]
    transform, mode = how["transform"], how["mode"]
    if region is None and known_eq(n, d) is True and scale in (None, 1.0):
        return y
    if mode == "nearest" and region is None and _is_repeat(d, n, scale, transform, how["nearest"]):
        times = n // d
        wide = reshape(y, (*y.shape[: axis + 1], 1, *y.shape[axis + 1 :]))
        wide = broadcast_to(wide, (*y.shape[: axis + 1], times, *y.shape[axis + 1 :]))
        made: Node = reshape(wide, (*y.shape[:axis], n, *y.shape[axis + 1 :]))
        return made
    c, outside = _coordinates(d, n, scale, transform, region)
    if mode == "nearest":
        out = gather(y, clamp_index(_rounded(c, how["nearest"]), d), axis=axis)
    elif how["antialias"]:
        out = _antialiased(y, axis, c, n, scale, how)
    else:
        out = _blend(y, axis, taps_at(c, mode, how["cubic_a"]), how["exclude_outside"])
    if outside is not None:
        fill = y.graph.constant(np.asarray(how["extrapolation"]).astype(y.dtype.np))
        out = where(_along(outside, axis, y.rank), fill, out)
    return out


def _along(vector: Node, axis: int, rank: int) -> Node:
    """A vector shaped to broadcast along one axis."""
    made: Node = reshape(vector, (vector.shape[0], *(1,) * (rank - 1 - axis)))
    return made


def _coordinates(
    d: Dim, n: Dim, scale: float | None, transform: str, region: Any
) -> tuple[Node, Node | None]:
    """Where each new element is among the old ones, in f64, and which of them are outside a crop."""
    x = positions(n, F64)
    old, new = extent_of(d, F64), extent_of(n, F64)
    factor = new / old if scale is None else scale
    width = new if scale is None else old * scale  # before it was rounded down to a whole size
    if transform == "asymmetric":
        return x / factor, None
    if transform == "tf_half_pixel_for_nn":
        return (x + 0.5) / factor, None
    steps = width - 1.0
    steps = (steps or 1.0) if isinstance(steps, float) else maximum(steps, 1.0)
    if transform == "align_corners":
        return x * ((old - 1.0) / steps), None
    if transform == "tf_crop_and_resize":
        start, end = region
        one = maximum(2.0 - new, 0.0) if isinstance(new, Node) else float(new == 1.0)
        # a single element is in the middle of the region
        c = (x / steps + 0.5 * one) * (end - start) * (old - 1.0) + start * (old - 1.0)
        return c, logical_not(logical_and(c >= 0.0, c <= old - 1.0))  # NaN is outside
    centred = (x + 0.5) / factor - 0.5
    if transform == "half_pixel_symmetric":
        return centred + old * 0.5 * (1.0 - new / width), None
    if transform == "pytorch_half_pixel":
        if isinstance(new, float):
            return (centred if new > 1.0 else x * 0.0), None
        return where(new > 1.0, centred, x * 0.0), None
    return centred, None


def _rounded(c: Node, nearest: str) -> Node:
    made: Node
    if nearest == "round_prefer_floor":
        made = ceil(c - 0.5)
    elif nearest == "round_prefer_ceil":
        made = floor(c + 0.5)
    else:
        made = floor(c) if nearest == "floor" else ceil(c)
    return made


def _blend(y: Node, axis: int, taps: Sequence[Tap], exclude_outside: bool) -> Node:
    """The weighted sum of a few neighbours along an axis."""
    d = y.shape[axis]
    weights: list[AttrValue] = [t.weight for t in taps]
    if exclude_outside:
        weights = [w * cast(is_inside(t.index, d), dtype=F64) for w, t in zip(weights, taps, strict=True)]
        total = weights[0]
        for w in weights[1:]:
            total = total + w
        weights = [w / total for w in weights]
    out: Any = None
    for w, t in zip(weights, taps, strict=True):
        part = gather(y, clamp_index(t.index, d), axis=axis) * _along(cast(w, dtype=y.dtype), axis, y.rank)
        if exclude_outside:
            part = where(_along(is_inside(t.index, d), axis, y.rank), part, 0.0)
        out = part if out is None else out + part
    made: Node = out
    return made


def _antialiased(y: Node, axis: int, c: Node, n: Dim, scale: float | None, how: Any) -> Node:
    """Shrinking: the kernel is stretched over all elements that a new one stands for."""
    d = y.shape[axis]
    support = 1 if how["mode"] == "linear" else 2
    half: Dim
    if scale is None:
        half = dim_max(ceildiv(d * support, n), support)
        squeeze = extent_of(n, F64) / extent_of(d, F64)
        squeeze = min(squeeze, 1.0) if isinstance(squeeze, float) else minimum(squeeze, 1.0)
    else:
        squeeze = min(scale, 1.0)
        half = math.ceil(support / squeeze)
    count = half * 2
    base = floor(c)
    offset = positions(count, F64) - (extent_of(half, F64) - 1.0)
    column = (base.shape[0], 1)
    t = abs((offset - reshape(c - base, column)) * squeeze)
    if support == 1:
        weight = maximum(1.0 - t, 0.0)
    else:
        a = how["cubic_a"]
        near = ((a + 2) * t - (a + 3)) * t * t + 1.0
        far = ((t - 5.0) * t + 8.0) * t * a - 4 * a
        weight = where(t <= 1.0, near, where(t < 2.0, far, t * 0.0))
    index = reshape(base, column) + offset
    inside = is_inside(index, d)
    if how["exclude_outside"]:
        weight = weight * cast(inside, dtype=F64)
    weight = cast(weight / sum_over(weight, axis=1, keepdims=True), dtype=y.dtype)
    read = gather(y, clamp_index(index, d), axis=axis)  # [.., n, count, ..]
    spread = (*weight.shape, *(1,) * (y.rank - 1 - axis))
    weighed = read * reshape(weight, spread)
    if how["exclude_outside"]:
        weighed = where(reshape(inside, spread), weighed, 0.0)
    made: Node = sum_over(weighed, axis=axis + 1)
    return made


# -- the reference: a matrix of weights for each axis, from the definition


def _ref_coordinate(
    o: int, d: int, n: int, scale: float | None, region: tuple[float, float], transform: str
) -> float:
    factor = n / d if scale is None else scale
    width = n if scale is None else scale * d
    if transform == "asymmetric":
        return o / factor
    if transform == "tf_half_pixel_for_nn":
        return (o + 0.5) / factor
    if transform == "align_corners":
        return 0.0 if width == 1 else o * (d - 1) / (width - 1)
    if transform == "tf_crop_and_resize":
        start, end = region
        inner = 0.5 if n == 1 else o / (width - 1)
        return inner * (end - start) * (d - 1) + start * (d - 1)
    if transform == "pytorch_half_pixel" and n == 1:
        return 0.0
    shift = d / 2 * (1 - n / width) if transform == "half_pixel_symmetric" else 0.0
    return shift + (o + 0.5) / factor - 0.5


def _ref_kernel(t: float, mode: str, a: float) -> float:
    t = math.fabs(t)
    if mode == "linear":
        return max(1 - t, 0.0)
    if t <= 1:
        return (a + 2) * t**3 - (a + 3) * t**2 + 1
    return a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a if t < 2 else 0.0


def _ref_nearest(c: float, nearest: str) -> int:
    low = math.floor(c)
    part = c - low
    up = {
        "floor": False,
        "ceil": part > 0,
        "round_prefer_floor": part > 0.5,
        "round_prefer_ceil": part >= 0.5,
    }
    return low + up[nearest]


def _ref_axis(
    x: np.ndarray,
    axis: int,
    n: int,
    scale: float | None,
    region: tuple[float, float],
    *,
    mode: str,
    transform: str,
    nearest: str,
    cubic_a: float,
    antialias: bool,
    exclude_outside: bool,
    extrapolation: float,
) -> np.ndarray:
    d = x.shape[axis]
    cs = [_ref_coordinate(o, d, n, scale, region, transform) for o in range(n)]
    beyond = np.array([not 0 <= c <= d - 1 for c in cs], bool)  # NaN is outside
    cs = [c if math.isfinite(c) else 0.0 for c in cs]
    if mode == "nearest":
        out = np.take(x, [min(max(_ref_nearest(c, nearest), 0), d - 1) for c in cs], axis)
    else:
        squeeze = min(n / d if scale is None else scale, 1.0) if antialias else 1.0
        half = math.ceil((1 if mode == "linear" else 2) / squeeze)
        parts = []
        for c in cs:
            taps = range(math.floor(c) - half + 1, math.floor(c) + half + 1)
            row = {i: _ref_kernel((i - c) * squeeze, mode, cubic_a) for i in taps}
            if exclude_outside:
                row = {i: w for i, w in row.items() if 0 <= i < d}
            total = math.fsum(row.values())
            parts.append(sum(np.take(x, min(max(i, 0), d - 1), axis) * (w / total) for i, w in row.items()))
        out = np.stack(parts, axis) if parts else np.take(x, [], axis)
    if transform == "tf_crop_and_resize":
        out = np.where(beyond.reshape([-1 if i == axis else 1 for i in range(x.ndim)]), extrapolation, out)
    return np.asarray(out)


def _ref_round(y: np.ndarray, to: np.dtype) -> np.ndarray:
    if y.dtype == to:
        return y
    if to.kind in "iu":
        return np.asarray(np.clip(np.rint(y), np.iinfo(to).min, np.iinfo(to).max).astype(to))
    return np.asarray(y.astype(to))


# -- calls


def _scaled(d: Dim, scale: float) -> Dim:
    """floor(d * scale), exactly, for the fraction that the scale stands for: the f32 nearest to 1.3 is less,
    but 20 rows become 26."""
    exact = Fraction(scale)
    simple = exact.limit_denominator(1024)
    if scale in (float(simple), float(np.float32(float(simple)))):
        exact = simple
    return floordiv(d * exact.numerator, exact.denominator)


def _kept_aspect(
    shape: Sequence[Dim], sizes: Sequence[Dim], policy: str
) -> tuple[list[Dim], list[float | None]]:
    if not all(isinstance(d, int) for d in (*shape, *sizes)):
        raise ShapeError(
            f"resize: policy {policy!r} needs numbers, got the sizes {tuple(shape)} and {tuple(sizes)}"
        )
    ratios = [int(n) / int(d) for d, n in zip(shape, sizes, strict=True)]
    scale = min(ratios) if policy == "not_larger" else max(ratios)
    return [math.floor(scale * int(d) + 0.5) for d in shape], [scale] * len(shape)


@of_one
def resize(
    x: Operand,
    size: Sequence[Dim] | None = None,
    scale: Sequence[float] | None = None,
    axes: Sequence[int] | None = None,
    mode: str = "nearest",
    transform: str = "half_pixel",
    nearest: str = "round_prefer_floor",
    cubic_a: float = -0.75,
    antialias: bool = False,
    exclude_outside: bool = False,
    extrapolation: float = 0.0,
    roi: Operand | None = None,
    policy: str = "stretch",
) -> Tensor:
    """Resize axes (all by default) to sizes or by scales, as ONNX Resize.

    mode: nearest, linear, cubic.
    transform: half_pixel, half_pixel_symmetric, pytorch_half_pixel, align_corners, asymmetric,
    tf_half_pixel_for_nn, tf_crop_and_resize (with roi: starts, then ends).
    nearest: round_prefer_floor, round_prefer_ceil, floor, ceil.
    policy: stretch, not_larger, not_smaller (keep the aspect ratio of sizes).

    >>> resize(np.array([1.0, 2.0]), (4,), mode="linear")
    array([1.  , 1.25, 1.75, 2.  ])
    """
    rank = len(shape_of(x))
    order = tuple(range(rank)) if axes is None else tuple(int(a) for a in axes)
    normal_axes("resize", order, rank)
    order = tuple(a % rank for a in order)
    old = [shape_of(x)[a] for a in order]
    if (size is None) == (scale is None):
        raise ShapeError("resize: give either size or scale")
    factors: list[float | None]
    if size is not None:
        sizes, factors = list(size), [None] * len(order)
        if len(sizes) != len(order):
            raise ShapeError(f"resize: {len(sizes)} sizes for {len(order)} axes")
        if policy != "stretch":
            sizes, factors = _kept_aspect(old, sizes, policy)
    else:
        assert scale is not None
        factors = [float(s) for s in scale]
        if len(factors) != len(order) or any(s is None or s <= 0 for s in factors):
            raise ShapeError(f"resize: scales {tuple(scale)} are not {len(order)} positive numbers")
        sizes = [_scaled(d, float(s)) for d, s in zip(old, scale, strict=True)]
    operands = (x,) if roi is None else (x, roi)
    return _resize(
        *operands,
        axes=order,
        sizes=tuple(sizes),
        scales=tuple(factors),
        mode=mode,
        transform=transform,
        nearest=nearest,
        cubic_a=cubic_a,
        antialias=antialias,
        exclude_outside=exclude_outside,
        extrapolation=extrapolation,
    )


@of_one
def upsample(x: Operand, scale: Sequence[float], mode: str = "nearest") -> Tensor:
    """Enlarge every axis by a factor, as ONNX Upsample: nearest repeats elements, linear blends them.

    >>> upsample(np.array([[1, 2]]), (2.0, 2.0))
    array([[1, 1, 2, 2],
           [1, 1, 2, 2]])
    """
    return resize(x, scale=scale, mode=mode, transform="asymmetric", nearest="floor")
