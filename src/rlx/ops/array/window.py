"""Windows that slide over the last axes: their geometry, the window view, its adjoint and window reductions.

Convolutions, pools, frames of a signal and overlap-add all read the same positions: element k of window o
is at o * stride + k * dilation - low along its axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, TypedDict, Unpack

import numpy as np

from rlx.errors import ShapeError
from rlx.ir.assume import require_at_least, require_equal
from rlx.ir.attr import Attr, AttrValue, dim_pairs, dims, ints, number, one_of
from rlx.ir.dim import Dim, ceildiv, dim_max, known_le, parse_dim
from rlx.ir.dtype import DType, dtype
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Op, Sample, declare
from rlx.ir.operand import Operand, Tensor, of_one
from rlx.ir.types import Shape, TensorType
from rlx.kernel.form import Form, Map, Reduce
from rlx.kernel.scalar import TRUE, Scalar, axes, const, in_range, load_or, size
from rlx.ops.array.shape import broadcast_to, reshape
from rlx.ops.math.elementwise import cast, equal
from rlx.ops.math.reduce import spread
from rlx.ops.math.reduce import sum as sum_axes
from rlx.ops.rules import in_f32, is_computable, is_number, is_real, need_dtype, shape_of

Padding: TypeAlias = Sequence[tuple[Dim, Dim]]
"""Padding as (low, high) pairs, one for each axis."""

PaddingLike: TypeAlias = str | int | Sequence[int | Sequence[Dim]] | None
"""What becomes padding: a number, numbers, pairs, or "valid", "same", "same_lower"."""


class Geometry(TypedDict):
    """How windows slide over the last axes."""

    strides: tuple[int, ...]
    padding: tuple[tuple[Dim, Dim], ...]
    dilations: tuple[int, ...]


GEOMETRY = {"strides": Attr(ints), "padding": Attr(dim_pairs), "dilations": Attr(ints)}


def extent(window: Dim, dilation: int) -> Dim:
    """How far a window reaches: from its first to its last element.

    >>> extent(3, 2)
    5
    """
    return (window - 1) * dilation + 1


def is_padded(padding: Padding) -> bool:
    """Whether there is padding along any axis; a symbolic amount counts.

    >>> is_padded(((0, 0), (0, 0)))
    False
    """
    return any(tuple(p) != (0, 0) for p in padding)


def check_geometry(
    name: str, rank: int, strides: Sequence[int], padding: Padding, dilations: Sequence[int]
) -> None:
    """One stride, dilation and (low, high) pair for each window axis."""
    for what, values in (("strides", strides), ("dilations", dilations)):
        if len(values) != rank or any(v < 1 for v in values):
            raise ShapeError(
                f"{name}: {what} {tuple(values)} must be {rank} positive numbers, one for each axis"
            )
    if len(padding) != rank or any(len(p) != 2 for p in padding):
        raise ShapeError(
            f"{name}: padding {tuple(padding)} must be {rank} (low, high) pairs, one for each axis"
        )


def need_elements(name: str, window: Dim) -> None:
    """Refuse a window that is known to be empty."""
    if known_le(window, 0) is True:
        raise ShapeError(f"{name}: a window of size {window} is empty")


def window_counts(
    name: str, shape: Shape, window: Shape, strides: Sequence[int], padding: Padding, dilations: Sequence[int]
) -> Shape:
    """How many windows fit along each axis."""
    check_geometry(name, len(window), strides, padding, dilations)
    out = []
    for d, k, stride, (low, high), dilation in zip(shape, window, strides, padding, dilations, strict=True):
        need_elements(name, k)
        padded, reach = d + low + high, extent(k, dilation)
        told = (
            f"{name}: a window that reaches over {reach} elements does not fit an axis of "
            f"{d} padded by ({low}, {high}); pad more or take a smaller window"
        )
        require_at_least(padded, reach - stride, told)  # else the count would be negative
        out.append((padded - reach) // stride + 1)
    return tuple(out)


def per_axis(
    name: str, what: str, value: int | Sequence[int] | None, rank: int, default: int = 1
) -> tuple[int, ...]:
    """One number for each window axis; a single number holds for all of them."""
    if value is None:
        return (default,) * rank
    if isinstance(value, (int, np.integer)):
        return (int(value),) * rank
    if len(value) != rank:
        raise ShapeError(f"{name}: {what} {tuple(value)} does not name {rank} axes")
    return tuple(int(v) for v in value)


def resolve_padding(
    name: str,
    padding: PaddingLike,
    shape: Shape,
    window: Shape,
    strides: Sequence[int],
    dilations: Sequence[int],
) -> tuple[tuple[Dim, Dim], ...]:
    """Padding as (low, high) pairs. It may be a number, pairs, or "valid", "same", "same_lower".

    "same" pads so that there are ceil(size / stride) windows; an odd element goes to the high side
    ("same_lower": to the low side).
    """
    rank = len(window)
    if padding is None or padding == "valid":
        return ((0, 0),) * rank
    if padding in ("same", "same_lower"):
        out: list[tuple[Dim, Dim]] = []
        for d, k, s, dilation in zip(shape, window, strides, dilations, strict=True):
            total = dim_max((ceildiv(d, s) - 1) * s + extent(k, dilation) - d, 0)
            small = total // 2
            out.append((small, total - small) if padding == "same" else (total - small, small))
        return tuple(out)
    if isinstance(padding, str):
        raise ShapeError(
            f"{name}: unknown padding {padding!r}; use 'valid', 'same', 'same_lower' or (low, high) pairs"
        )
    if isinstance(padding, (int, np.integer)):
        return ((int(padding), int(padding)),) * rank
    pairs = tuple((p, p) if isinstance(p, (int, np.integer)) else tuple(p) for p in padding)
    if len(pairs) != rank or any(len(p) != 2 for p in pairs):
        raise ShapeError(f"{name}: padding {padding!r} must be {rank} (low, high) pairs, one for each axis")
    return tuple((p[0], p[1]) for p in pairs)


def window_view(
    x: np.ndarray,
    window: Sequence[int],
    strides: Sequence[int],
    padding: Padding,
    dilations: Sequence[int],
    fill: float | np.ndarray,
) -> np.ndarray:
    """The windows of an array, as [lead, counts, window]; a read-only view of the padded array."""
    lead = x.ndim - len(window)
    reach = [(k - 1) * d + 1 for k, d in zip(window, dilations, strict=True)]
    pads = [(int(lo), int(hi)) for lo, hi in padding]
    padded = [d + lo + hi for d, (lo, hi) in zip(x.shape[lead:], pads, strict=True)]
    if any(not 0 < r <= d for r, d in zip(reach, padded, strict=True)):  # none fits, or all are empty
        counts = [(d - r) // s + 1 for d, r, s in zip(padded, reach, strides, strict=True)]
        return np.zeros((*x.shape[:lead], *counts, *window), x.dtype)
    grown = [(0, 0)] * lead + [(max(lo, 0), max(hi, 0)) for lo, hi in pads]
    x = np.pad(x, grown, constant_values=fill)  # first: more may be cut off than x has
    box = [slice(max(-lo, 0), d - max(-hi, 0)) for d, (lo, hi) in zip(x.shape[lead:], pads, strict=True)]
    x = np.asarray(x[tuple([slice(None)] * lead + box)])
    view = np.lib.stride_tricks.sliding_window_view(x, reach, tuple(range(lead, x.ndim)))
    steps = [slice(None, None, s) for s in (*(1,) * lead, *strides, *dilations)]
    return np.asarray(view[tuple(steps)])


def position(o: Scalar, k: Scalar, stride: int, low: Dim, dilation: int) -> Scalar:
    """Where element k of window o is along its axis."""
    return o * stride + k * dilation - size(low)


def window_load(
    x: TensorType,
    lead: int,
    at: Sequence[Scalar],
    taps: Sequence[Scalar],
    fill: float,
    **geometry: Unpack[Geometry],
) -> Scalar:
    """Operand 0 at element `taps` of window `at[lead:]`; `fill` in the padding."""
    index: list[Scalar] = list(at[:lead])
    guard = TRUE
    strides, padding, dilations = geometry["strides"], geometry["padding"], geometry["dilations"]
    rows = zip(at[lead:], taps, strides, padding, dilations, strict=True)
    for i, (o, k, stride, (low, high), dilation) in enumerate(rows):
        where = position(o, k, stride, low, dilation)
        if known_le(low, 0) is not True or known_le(high, 0) is not True:
            guard = guard & in_range(where, x.shape[lead + i])
        index.append(where)
    return load_or(0, index, guard, const(fill, x.dtype))


@declare
class _windows(Op):
    """All windows over the last axes: [lead, axes] -> [lead, counts, window]; padding reads `fill`."""

    name = "windows"
    arity = 1
    attrs = {"window": Attr(dims), **GEOMETRY, "fill": Attr(number, 0)}

    def infer(self, x: TensorType, *, window: Shape, fill: float, **geometry: Unpack[Geometry]) -> TensorType:
        need_dtype(self.name, x, is_computable)
        lead = x.rank - len(window)
        if lead < 0:
            raise ShapeError(f"windows: {x} has fewer axes than the window {window}")
        counts = window_counts(self.name, x.shape[lead:], window, **geometry)
        return x.with_shape((*x.shape[:lead], *counts, *window))

    def ref(
        self, x: np.ndarray, *, window: Sequence[int], fill: float, **geometry: Unpack[Geometry]
    ) -> np.ndarray:
        return window_view(x, window, **geometry, fill=np.asarray(fill).astype(x.dtype))

    def vjp(
        self, g: Node, y: Node, x: Node, *, window: Shape, fill: float, **geometry: Unpack[Geometry]
    ) -> list[Node]:
        return [_fold_windows(g, size=x.shape[x.rank - len(window) :], **geometry)]

    def batch(self, flags: Sequence[bool], x: Node, **attrs: object) -> Node:
        made: Node = _windows(x, **attrs)
        return made

    def lower(self, x: TensorType, *, window: Shape, fill: float, **geometry: Unpack[Geometry]) -> Form:
        out = self.infer(x, window=window, fill=fill, **geometry)
        at = axes(out.rank)
        return Map(
            out.shape, window_load(x, x.rank - len(window), at[: x.rank], at[x.rank :], fill, **geometry)
        )

    def cost(self, x: TensorType, **attrs: object) -> Dim:
        return 0

    def samples(self) -> list[Sample]:
        def one(
            type_: str,
            window: tuple[int, ...],
            strides: Sequence[int],
            padding: Padding,
            dilations: Sequence[int],
            **more: AttrValue,
        ) -> Sample:
            attrs = {"window": window, "strides": strides, "padding": padding, "dilations": dilations}
            attrs |= {k: more.pop(k) for k in ("fill",) if k in more}
            return Sample((Arg(type_),), attrs, **more)

        return [
            one("f32[7]", (3,), (1,), ((0, 0),), (1,)),
            one("f32[2,9]", (3,), (2,), ((1, 2),), (2,), fill=1.5),
            one("f32[2,5,6]", (2, 3), (2, 1), ((0, 1), (2, 0)), (1, 2)),
            one("f32[6]", (2,), (1,), ((-1, 2),), (1,)),
            one("f32[1]", (1,), (3,), ((0, 0),), (1,)),
            one("f32[0,5]", (2,), (2,), ((0, 0),), (1,), grad=False),
            one("f32[2]", (3,), (1,), ((0, 0),), (1,), grad=False),
            one("f32[n,m]", (2,), (2,), ((1, 0),), (1,), grad=False),
            one("i32[5]", (2,), (1,), ((1, 0),), (1,), fill=-7, grad=False),
        ]


@declare
class _fold_windows(Op):
    """The adjoint of `windows`: adds every window element to where it came from (overlap-add)."""

    name = "fold_windows"
    arity = 1
    attrs = {"size": Attr(dims), **GEOMETRY}

    def infer(self, x: TensorType, *, size: Shape, **geometry: Unpack[Geometry]) -> TensorType:
        need_dtype(self.name, x, is_number)
        n = len(size)
        lead = x.rank - 2 * n
        if lead < 0:
            raise ShapeError(f"fold_windows: {x} does not hold windows over {n} axes")
        window = x.shape[lead + n :]
        counts = window_counts(self.name, size, window, **geometry)
        for have, want in zip(x.shape[lead : lead + n], counts, strict=True):
            what = f"fold_windows: {x} holds {have} windows, but {want} fit an axis of the size to fold to"
            require_equal(have, want, what)
        return x.with_shape((*x.shape[:lead], *size))

    def ref(self, x: np.ndarray, **attrs: object) -> np.ndarray:
        return np.asarray(_fold_ref(x, **attrs))

    def vjp(self, g: Node, y: Node, x: Node, *, size: Shape, **geometry: Unpack[Geometry]) -> list[Node]:
        made: Node = _windows(g, window=x.shape[x.rank - len(size) :], **geometry)
        return [made]

    def batch(self, flags: Sequence[bool], x: Node, **attrs: object) -> Node:
        made: Node = _fold_windows(x, **attrs)
        return made

    def lower(
        self,
        x: TensorType,
        *,
        size: Shape,
        strides: Sequence[int],
        padding: Padding,
        dilations: Sequence[int],
    ) -> Form:
        n = len(size)
        lead = x.rank - 2 * n
        space = (*x.shape[:lead], *size, *x.shape[lead + n :])
        at = axes(len(space))
        guard, index = TRUE, list(at[:lead])
        for i in range(n):
            from_start = _shifted(at[lead + i], padding[i][0]) - at[lead + n + i] * dilations[i]
            if strides[i] != 1:
                guard = guard & (from_start % strides[i] <= 0)
            o = from_start // strides[i]
            guard = guard & in_range(o, x.shape[lead + i])
            index.append(o)
        body = load_or(0, [*index, *at[lead + n :]], guard, const(0, x.dtype))
        return Reduce(space, tuple(range(lead + n, len(space))), "sum", body, x.dtype)

    def cost(self, x: TensorType, *, size: Shape, **geometry: Unpack[Geometry]) -> Dim:
        total: Dim = x.numel
        return total

    def samples(self) -> list[Sample]:
        def one(
            type_: str,
            size: Any,
            strides: Sequence[int],
            padding: Padding,
            dilations: Sequence[int],
            **more: AttrValue,
        ) -> Sample:
            attrs = {"size": size, "strides": strides, "padding": padding, "dilations": dilations}
            return Sample((Arg(type_),), attrs, **more)

        return [
            one("f32[5,3]", (7,), (1,), ((0, 0),), (1,)),
            one("f32[2,4,3]", (9,), (2,), ((1, 2),), (2,)),
            one("f32[2,3,4,2,3]", (5, 6), (2, 1), ((0, 1), (2, 0)), (1, 2)),
            one("f32[3,2]", (9,), (3,), ((0, 0),), (1,)),
            one("f32[6,2]", (6,), (1,), ((-1, 2),), (1,)),
            one("f32[0,5,3]", (7,), (1,), ((0, 0),), (1,), grad=False),
            one("f32[n,m,4]", (parse_dim("2*m+2"),), (2,), ((0, 0),), (1,), grad=False),
            one("bf16[40,2]", (41,), (1,), ((0, 0),), (1,), grad=False),
        ]


def _shifted(i: Scalar, low: Dim) -> Scalar:
    return i + size(low)


@in_f32
def _fold_ref(
    x: np.ndarray,
    *,
    size: Sequence[int],
    strides: Sequence[int],
    padding: Padding,
    dilations: Sequence[int],
) -> np.ndarray:
    n = len(size)
    lows = [int(low) for low, _ in padding]
    lead = x.ndim - 2 * n
    counts, window = x.shape[lead : lead + n], x.shape[lead + n :]
    # accumulate in a frame that is wide enough for every window, then cut out the axis itself
    reach = [
        (c - 1) * s + (k - 1) * d + 1 for c, s, k, d in zip(counts, strides, window, dilations, strict=True)
    ]
    wide = [max(r, lo + d) + max(-lo, 0) for r, lo, d in zip(reach, lows, size, strict=True)]
    out = np.zeros((*x.shape[:lead], *wide), x.dtype)
    shift = [max(-lo, 0) for lo in lows]
    for tap in np.ndindex(*window):
        box = tuple(
            slice(b + t * d, b + t * d + (c - 1) * s + 1, s) if c > 0 else slice(0, 0)
            for b, t, d, c, s in zip(shift, tap, dilations, counts, strides, strict=True)
        )
        out[(Ellipsis, *box)] += x[(Ellipsis, *tap)]
    cut = [slice(b + lo, b + lo + d) for b, lo, d in zip(shift, lows, size, strict=True)]
    return np.asarray(out[tuple([slice(None)] * lead + cut)])


def identity_of(combine: str, d: DType) -> int | float:
    """The value that changes nothing under a combination: what padding holds."""
    if combine == "sum":
        return 0
    if d.is_int:
        return int(d.min_value if combine == "max" else d.max_value)
    return -np.inf if combine == "max" else np.inf


@declare
class _window_reduce(Op):
    """Sum, maximum or minimum over each window of the last axes; padding takes no part."""

    name = "window_reduce"
    family = "pool"
    arity = 1
    attrs = {"combine": Attr(one_of("sum", "max", "min")), "window": Attr(dims), **GEOMETRY}

    def infer(
        self, x: TensorType, *, combine: str, window: Shape, **geometry: Unpack[Geometry]
    ) -> TensorType:
        need_dtype(self.name, x, is_number if combine == "sum" else is_real)
        lead = x.rank - len(window)
        if lead < 0:
            raise ShapeError(f"window_reduce: {x} has fewer axes than the window {window}")
        return x.with_shape((*x.shape[:lead], *window_counts(self.name, x.shape[lead:], window, **geometry)))

    def ref(self, x: np.ndarray, **attrs: object) -> np.ndarray:
        return np.asarray(_window_reduce_ref(x, **attrs))

    def vjp(
        self, g: Node, y: Node, x: Node, *, combine: str, window: Shape, **geometry: Unpack[Geometry]
    ) -> list[Node]:
        n = len(window)
        taps = tuple(range(x.rank, x.rank + n))
        fill = identity_of(combine, x.dtype)
        if combine == "sum":
            shape = (*g.shape, *window)
            each: Node = _spread_over(g, shape)
        else:
            seen = _windows(x, window=window, fill=fill, **geometry)
            hit = cast(equal(seen, spread(y, seen, taps)), dtype=x.dtype)  # ties share the gradient
            each = spread(g / sum_axes(hit, axis=taps), seen, taps) * hit
        made: Node = _fold_windows(each, size=x.shape[x.rank - n :], **geometry)
        return [made]

    def batch(self, flags: Sequence[bool], x: Node, **attrs: object) -> Node:
        made: Node = _window_reduce(x, **attrs)
        return made

    def lower(self, x: TensorType, *, combine: str, window: Shape, **geometry: Unpack[Geometry]) -> Form:
        out = self.infer(x, combine=combine, window=window, **geometry)
        space = (*out.shape, *window)
        at = axes(len(space))
        fill = identity_of(combine, x.dtype)
        body = window_load(x, x.rank - len(window), at[: x.rank], at[x.rank :], fill, **geometry)
        return Reduce(space, tuple(range(x.rank, len(space))), combine, body, x.dtype)

    def cost(self, x: TensorType, *, combine: str, window: Shape, **geometry: Unpack[Geometry]) -> Dim:
        total = self.infer(x, combine=combine, window=window, **geometry).numel
        for k in window:
            total = total * k
        return total

    def samples(self) -> list[Sample]:
        def one(
            arg: Arg,
            combine: str,
            window: Any,
            strides: Sequence[int],
            padding: Padding,
            dilations: Sequence[int],
            **more: AttrValue,
        ) -> Sample:
            attrs = {"combine": combine, "window": window, "strides": strides, "padding": padding}
            attrs["dilations"] = dilations
            return Sample((arg,), attrs, **more)

        out = []
        for combine in ("sum", "max", "min"):
            out += [
                one(Arg("f32[2,9]", distinct=True), combine, (3,), (2,), ((1, 2),), (2,)),
                one(Arg("f32[1,2,5,6]", distinct=True), combine, (2, 3), (2, 1), ((0, 1), (2, 0)), (1, 1)),
                one(Arg("f32[n,m]"), combine, (2,), (2,), ((1, 0),), (1,), grad=False),
                one(Arg("i32[5]", -5, 5), combine, (2,), (1,), ((1, 0),), (1,), grad=False),
            ]
        out += [
            one(Arg("f32[3,17]", special=True), "max", (3,), (1,), ((1, 1),), (1,), grad=False),
            one(Arg("f32[0,5]"), "sum", (2,), (2,), ((0, 0),), (1,), grad=False),
            one(Arg("bf16[2,40]"), "sum", (33,), (1,), ((0, 0),), (1,), grad=False),
            one(Arg("f32[1]"), "max", (1,), (1,), ((0, 0),), (1,)),
        ]
        return out


def _spread_over(g: Node, shape: Shape) -> Node:
    """g repeated along new trailing axes."""
    made: Node = broadcast_to(reshape(g, (*g.shape, *(1,) * (len(shape) - g.rank))), shape)
    return made


@in_f32
def _window_reduce_ref(
    x: np.ndarray, *, combine: str, window: Sequence[int], **geometry: Unpack[Geometry]
) -> np.ndarray:
    fill = identity_of(combine, dtype(x.dtype))
    view = window_view(x, window, **geometry, fill=fill)
    taps = tuple(range(x.ndim, view.ndim))
    if combine == "sum":
        return np.asarray(np.sum(view, axis=taps, dtype=x.dtype))
    return np.asarray((np.max if combine == "max" else np.min)(view, axis=taps))


def _geometry(
    name: str,
    x: Operand,
    window: Shape,
    strides: int | Sequence[int],
    padding: PaddingLike,
    dilations: int | Sequence[int],
) -> Geometry:
    """Keyword geometry in canonical form."""
    steps = per_axis(name, "strides", strides, len(window))
    spacing = per_axis(name, "dilations", dilations, len(window))
    shape = tuple(shape_of(x))
    if len(shape) < len(window):
        raise ShapeError(f"{name}: an operand of rank {len(shape)} has too few axes for the window {window}")
    pads = resolve_padding(name, padding, shape[len(shape) - len(window) :], window, steps, spacing)
    return {"strides": steps, "padding": pads, "dilations": spacing}


@of_one
def windows(
    x: Operand,
    window: Sequence[Dim],
    strides: int | Sequence[int] = 1,
    padding: PaddingLike = None,
    dilations: int | Sequence[int] = 1,
    fill: float = 0,
) -> Tensor:
    """All windows over the last axes: [lead, axes] -> [lead, counts, window].

    >>> windows(np.arange(5), (3,), strides=2)
    array([[0, 1, 2],
           [2, 3, 4]])
    """
    shape = tuple(window)
    return _windows(x, window=shape, fill=fill, **_geometry("windows", x, shape, strides, padding, dilations))


@of_one
def fold_windows(
    x: Operand,
    size: Sequence[Dim],
    strides: int | Sequence[int] = 1,
    padding: PaddingLike = None,
    dilations: int | Sequence[int] = 1,
) -> Tensor:
    """Add windows [lead, counts, window] back to where `windows` took them from: the adjoint, overlap-add.

    >>> fold_windows(np.ones((2, 3)), (5,), strides=2)
    array([1., 1., 2., 1., 1.])
    """
    n = len(size)
    steps = per_axis("fold_windows", "strides", strides, n)
    spacing = per_axis("fold_windows", "dilations", dilations, n)
    window = tuple(shape_of(x))[len(shape_of(x)) - n :]
    pads = resolve_padding("fold_windows", padding, tuple(size), window, steps, spacing)
    return _fold_windows(x, size=tuple(size), strides=steps, padding=pads, dilations=spacing)


@of_one
def window_reduce(
    x: Operand,
    combine: str,
    window: Sequence[Dim],
    strides: int | Sequence[int] = 1,
    padding: PaddingLike = None,
    dilations: int | Sequence[int] = 1,
) -> Tensor:
    """Sum ("sum"), maximum ("max") or minimum ("min") over each window of the last axes.

    >>> window_reduce(np.array([1.0, 5.0, 2.0, 3.0]), "max", (2,))
    array([5., 5., 3.])
    """
    shape = tuple(window)
    geometry = _geometry("window_reduce", x, shape, strides, padding, dilations)
    return _window_reduce(x, combine=combine, window=shape, **geometry)
