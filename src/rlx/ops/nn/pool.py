"""Pools over the axes after batch and channels (NC... layout), with ONNX's rules; global pools; unpooling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np

from rlx.errors import ShapeError
from rlx.ir.assume import require_shape
from rlx.ir.attr import Attr, AttrValue, boolean, dims, real
from rlx.ir.dim import Dim, ceildiv, dim_min
from rlx.ir.dtype import I64, dtype
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Level, Op, Sample, declare
from rlx.ir.operand import Operand, Tensor, of_one
from rlx.ir.types import Shape, TensorType, TupleType
from rlx.ops.array.scatter import scatter_elements
from rlx.ops.array.shape import broadcast_to, reshape
from rlx.ops.array.window import (
    GEOMETRY,
    Geometry,
    Padding,
    PaddingLike,
    check_geometry,
    extent,
    identity_of,
    per_axis,
    resolve_padding,
    window_counts,
    window_reduce,
    window_view,
)
from rlx.ops.array.window_index import window_argmax, window_count
from rlx.ops.math.elementwise import abs, pow, sqrt
from rlx.ops.math.reduce import max as max_over
from rlx.ops.math.reduce import sum as sum_over
from rlx.ops.math.stats import mean
from rlx.ops.rules import (
    Accepts,
    expand_in_f32,
    in_f32,
    is_number,
    is_real,
    is_real_float,
    need_dtype,
    shape_of,
)


def rounded_up(
    name: str, shape: Shape, window: Shape, strides: Sequence[int], padding: Padding, dilations: Sequence[int]
) -> tuple[tuple[Dim, Dim], ...]:
    """Padding with room for a last, partial window, if that starts inside the axis or its low padding."""
    check_geometry(name, len(window), strides, padding, dilations)
    out: list[tuple[Dim, Dim]] = []
    for d, k, s, (low, high), dilation in zip(shape, window, strides, padding, dilations, strict=True):
        reach = extent(k, dilation)
        count = dim_min(ceildiv(d + low + high - reach, s) + 1, ceildiv(d + low, s))
        out.append((low, (count - 1) * s + reach - d - low))
    return tuple(out)


def _read_padding(shape: Shape, window: Shape, ceil_mode: bool, **geometry: Unpack[Geometry]) -> Geometry:
    """The geometry that windows are read with: with `ceil_mode`, partial windows at the end have room."""
    if ceil_mode:
        lead = len(shape) - len(window)
        geometry["padding"] = rounded_up("pool", shape[lead:], window, **geometry)
    return geometry


class _Pool(Op):
    """Base of pools: x [N, C, axes] -> [N, C, counts]."""

    level = Level.HIR
    arity = 1
    attrs = {"window": Attr(dims), **GEOMETRY, "ceil_mode": Attr(boolean, False)}
    accepts: Accepts = staticmethod(is_real_float)

    def infer(self, x: TensorType, *, window: Shape, ceil_mode: bool, **attrs: AttrValue) -> Any:
        need_dtype(self.name, x, type(self).accepts)
        if x.rank != len(window) + 2:
            raise ShapeError(f"{self.name}: x {x} is not [batch, channels, axes] for the window {window}")
        geometry = _read_padding(x.shape, window, ceil_mode, **{k: attrs[k] for k in GEOMETRY})
        return x.with_shape((*x.shape[:2], *window_counts(self.name, x.shape[2:], window, **geometry)))

    def samples(self) -> list[Sample]:
        low, grad = self.domain()
        out = []

        def one(
            shape: str,
            window: int | Sequence[int],
            strides: Sequence[int],
            padding: Padding,
            dilations: Sequence[int],
            *,
            smooth: bool = True,
            **more: object,
        ) -> None:
            attrs = {"window": window, "strides": strides, "padding": padding, "dilations": dilations, **more}
            arg = Arg(shape, low, 2.0, distinct=True)
            out.append(Sample((arg,), attrs, grad=grad and smooth))

        one("f32[2,3,7]", (3,), (1,), ((0, 0),), (1,))
        one("f32[1,2,9]", (3,), (2,), ((1, 1),), (2,))
        one("f32[1,2,5,6]", (2, 3), (2, 1), ((0, 1), (2, 0)), (1, 1))
        one("f32[1,1,5,6]", (2, 3), (2, 2), ((1, 0), (1, 1)), (1, 1), ceil_mode=True)
        one("f32[1,1,3,4,3]", (2, 2, 1), (1, 2, 2), ((0, 0), (0, 0), (0, 0)), (1, 1, 1))
        one("f32[1,1,1]", (1,), (1,), ((0, 0),), (1,))
        one("f32[0,2,5]", (2,), (2,), ((0, 0),), (1,), smooth=False)
        one("f32[1,2,0]", (1,), (2,), ((0, 0),), (2,), smooth=False, ceil_mode=True)
        one("f32[n,2,m]", (2,), (2,), ((0, 1),), (1,), smooth=False)
        one("f32[n,2,m]", (2,), (3,), ((0, 1),), (1,), smooth=False, ceil_mode=True)
        one("bf16[1,2,33]", (17,), (1,), ((0, 0),), (1,), smooth=False)
        for more in self.variants():
            one("f32[1,2,5,4]", (3, 2), (2, 1), ((1, 1), (1, 0)), (1, 1), **more)
            one("f32[1,1,6]", (4,), (3,), ((1, 1),), (1,), ceil_mode=True, **more)
        return out

    def domain(self) -> tuple[float, bool]:
        """Least value of a sample, and whether samples are smooth."""
        return -2.0, True

    def variants(self) -> list[dict[str, AttrValue]]:
        """Values of further attributes to try."""
        return []


def _max_ref(
    x: np.ndarray, *, window: Sequence[int], ceil_mode: bool, **geometry: Unpack[Geometry]
) -> np.ndarray:
    geometry = _read_padding(x.shape, tuple(window), ceil_mode, **geometry)
    view = window_view(x, window, **geometry, fill=identity_of("max", dtype(x.dtype)))
    return np.asarray(np.max(view, axis=tuple(range(x.ndim, view.ndim))))


@declare
class _max_pool(_Pool):
    """Largest element of each window; padding never wins."""

    name = "max_pool"
    accepts = staticmethod(is_real)

    def ref(self, x: np.ndarray, **attrs: AttrValue) -> np.ndarray:
        return _max_ref(x, **attrs)

    def expand(self, x: Node, *, window: Shape, ceil_mode: bool, **geometry: Unpack[Geometry]) -> Node:
        made: Node = window_reduce(x, "max", window, **_read_padding(x.shape, window, ceil_mode, **geometry))
        return made


@declare
class _max_pool_indices(_Pool):
    """Largest element of each window and its row-major position in x (`column_major`: axes by columns)."""

    name = "max_pool_indices"
    accepts = staticmethod(is_real)
    attrs = {**_Pool.attrs, "column_major": Attr(boolean, False)}

    def infer(self, x: TensorType, **attrs: AttrValue) -> TupleType:
        values = super().infer(x, **attrs)
        return TupleType((values, values.with_dtype(I64)))

    def ref(self, x: np.ndarray, *, column_major: bool, **attrs: AttrValue) -> tuple[np.ndarray, np.ndarray]:
        spatial = x.shape[2:]
        plane: np.ndarray = np.arange(int(np.prod(spatial, dtype=np.int64)))
        plane = plane.reshape(spatial[::-1]).T if column_major else plane.reshape(spatial)
        geometry = _read_padding(
            x.shape, attrs["window"], attrs["ceil_mode"], **{k: attrs[k] for k in GEOMETRY}
        )
        n, last = len(spatial), np.iinfo(np.int64).max
        taps = tuple(range(-n, 0))
        seen = window_view(x, attrs["window"], **geometry, fill=identity_of("max", dtype(x.dtype)))
        best = np.max(seen, axis=taps)
        hit = (seen == best.reshape((*best.shape, *(1,) * n))) | (seen != seen)
        first = np.min(
            np.where(hit, window_view(plane, attrs["window"], **geometry, fill=last), last), axis=taps
        )
        offset = np.arange(x.shape[0] * x.shape[1]).reshape((*x.shape[:2], *(1,) * n)) * plane.size
        return best, first + offset

    def expand(
        self, x: Node, *, window: Shape, ceil_mode: bool, column_major: bool, **geometry: Unpack[Geometry]
    ) -> tuple[Node, Node]:
        geometry = _read_padding(x.shape, window, ceil_mode, **geometry)
        best = window_reduce(x, "max", window, **geometry)
        where = window_argmax(x, best, window=window, span=x.rank, column_major=column_major, **geometry)
        return best, where

    def variants(self) -> list[dict[str, AttrValue]]:
        return [{"column_major": True}]


@declare
class _avg_pool(_Pool):
    """Mean of each window, over its elements in x or, with `count_include_pad`, in the padding as well."""

    name = "avg_pool"
    attrs = {**_Pool.attrs, "count_include_pad": Attr(boolean, False)}

    def ref(self, x: np.ndarray, **attrs: object) -> np.ndarray:
        return np.asarray(_avg_ref(x, **attrs))

    def expand(self, x: Node, **attrs: object) -> Node:
        made: Node = _avg_expand(x, **attrs)
        return made

    def variants(self) -> list[dict[str, AttrValue]]:
        return [{"count_include_pad": True}]


@in_f32
def _avg_ref(
    x: np.ndarray,
    *,
    window: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    **geometry: Unpack[Geometry],
) -> np.ndarray:
    n = len(window)
    pads = geometry["padding"]
    geometry = _read_padding(x.shape, tuple(window), ceil_mode, **geometry)
    total = window_view(x, window, **geometry, fill=0).sum(axis=tuple(range(x.ndim, x.ndim + n)))
    sizes = [max(d + lo + hi, 0) for d, (lo, hi) in zip(x.shape[2:], geometry["padding"], strict=True)]
    ones = np.zeros(sizes, x.dtype)
    box = [
        slice(0, lo + d + hi) if count_include_pad else slice(lo, lo + d)
        for d, (lo, hi) in zip(x.shape[2:], pads, strict=True)
    ]
    ones[tuple(box)] = 1
    count = window_view(ones, window, geometry["strides"], ((0, 0),) * n, geometry["dilations"], 0)
    return np.asarray(total / count.sum(axis=tuple(range(n, 2 * n))))


@expand_in_f32
def _avg_expand(
    x: Node, *, window: Shape, ceil_mode: bool, count_include_pad: bool, **geometry: Unpack[Geometry]
) -> Node:
    pads = geometry["padding"]
    geometry = _read_padding(x.shape, window, ceil_mode, **geometry)
    total: Node = window_reduce(x, "sum", window, **geometry)
    whole: Dim = 1
    for k in window:
        whole = whole * k
    counted = pads if count_include_pad else ((0, 0),) * len(window)
    if isinstance(whole, int) and counted == geometry["padding"]:
        made: Node = total / float(whole)
        return made
    made = total / window_count(size=x.shape[2:], window=window, counted=counted, dtype=x.dtype, **geometry)
    return made


@declare
class _lp_pool(_Pool):
    """(sum of |x|**p) ** (1/p) of each window."""

    name = "lp_pool"
    attrs = {**_Pool.attrs, "p": Attr(real, 2.0)}

    def ref(self, x: np.ndarray, **attrs: object) -> np.ndarray:
        return np.asarray(_lp_ref(x, **attrs))

    def expand(self, x: Node, **attrs: object) -> Node:
        made: Node = _lp_expand(x, **attrs)
        return made

    def domain(self) -> tuple[float, bool]:
        return 0.2, True  # the root of 0 has no slope

    def variants(self) -> list[dict[str, AttrValue]]:
        return [{"p": 1.0}, {"p": 3.0}]


@in_f32
def _lp_ref(
    x: np.ndarray, *, window: Sequence[int], ceil_mode: bool, p: float, **geometry: Unpack[Geometry]
) -> np.ndarray:
    geometry = _read_padding(x.shape, tuple(window), ceil_mode, **geometry)
    view = window_view(np.abs(x), window, **geometry, fill=0)
    total = np.sum(view**p, axis=tuple(range(x.ndim, view.ndim)))
    return np.asarray(total ** (1 / p), x.dtype)


def _power_sum(x: Tensor, p: float) -> Tensor:
    return x * x if p == 2 else abs(x) if p == 1 else pow(abs(x), p)


def _root(x: Node, p: float) -> Node:
    made: Node = sqrt(x) if p == 2 else x if p == 1 else pow(x, 1.0 / p)
    return made


@expand_in_f32
def _lp_expand(x: Node, *, window: Shape, ceil_mode: bool, p: float, **geometry: Unpack[Geometry]) -> Node:
    geometry = _read_padding(x.shape, window, ceil_mode, **geometry)
    return _root(window_reduce(_power_sum(x, p), "sum", window, **geometry), p)


def _call(
    op: type[Op],
    x: Operand,
    window: int | Sequence[int],
    strides: int | Sequence[int],
    padding: PaddingLike,
    dilations: int | Sequence[int],
    **more: object,
) -> Tensor:
    n = len(shape_of(x)) - 2
    if n < 1:
        raise ShapeError(f"{op.name}: x of rank {len(shape_of(x))} is not [batch, channels, axes]")
    shape: Shape = per_axis(op.name, "window", window, n)
    steps, spacing = per_axis(op.name, "strides", strides, n), per_axis(op.name, "dilations", dilations, n)
    pads = resolve_padding(op.name, padding, tuple(shape_of(x)[2:]), shape, steps, spacing)
    return op(x, window=shape, strides=steps, padding=pads, dilations=spacing, **more)


def max_pool(
    x: Operand,
    window: int | Sequence[int],
    strides: int | Sequence[int] = 1,
    padding: PaddingLike = None,
    dilations: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    indices: bool = False,
    column_major: bool = False,
) -> Tensor:
    """Largest element of each window of x [N, C, axes]; with `indices` also their row-major positions in x.

    padding: (low, high) pairs, a number, or "valid", "same", "same_lower". `ceil_mode` keeps a partial last
    window.

    >>> max_pool(np.array([[[1.0, 3.0, 2.0, 5.0]]]), 2, strides=2)
    array([[[3., 5.]]])
    """
    if indices:
        more = {"ceil_mode": ceil_mode, "column_major": column_major}
        return _call(_max_pool_indices, x, window, strides, padding, dilations, **more)
    return _call(_max_pool, x, window, strides, padding, dilations, ceil_mode=ceil_mode)


@of_one
def avg_pool(
    x: Operand,
    window: int | Sequence[int],
    strides: int | Sequence[int] = 1,
    padding: PaddingLike = None,
    dilations: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    count_include_pad: bool = False,
) -> Tensor:
    """Mean of each window of x [N, C, axes]; padding counts only with `count_include_pad`.

    >>> avg_pool(np.array([[[1.0, 3.0, 2.0, 6.0]]]), 2, strides=2)
    array([[[2., 4.]]])
    """
    more = {"ceil_mode": ceil_mode, "count_include_pad": count_include_pad}
    return _call(_avg_pool, x, window, strides, padding, dilations, **more)


@of_one
def lp_pool(
    x: Operand,
    window: int | Sequence[int],
    p: float = 2,
    strides: int | Sequence[int] = 1,
    padding: PaddingLike = None,
    dilations: int | Sequence[int] = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """The p-norm of each window of x [N, C, axes].

    >>> lp_pool(np.array([[[3.0, 4.0]]]), 2)
    array([[[5.]]])
    """
    return _call(_lp_pool, x, window, strides, padding, dilations, ceil_mode=ceil_mode, p=p)


def _spatial(x: Operand) -> tuple[int, ...]:
    return tuple(range(2, len(shape_of(x))))


@of_one
def global_avg_pool(x: Operand) -> Tensor:
    """Mean over all axes after batch and channels, which stay with size 1.

    >>> global_avg_pool(np.array([[[1.0, 3.0]]]))
    array([[[2.]]])
    """
    return mean(x, axis=_spatial(x), keepdims=True)


@of_one
def global_max_pool(x: Operand) -> Tensor:
    """Largest element over all axes after batch and channels, which stay with size 1.

    >>> global_max_pool(np.array([[[1.0, 3.0]]]))
    array([[[3.]]])
    """
    return max_over(x, axis=_spatial(x), keepdims=True)


@of_one
def global_lp_pool(x: Operand, p: float = 2) -> Tensor:
    """The p-norm over all axes after batch and channels, which stay with size 1.

    >>> global_lp_pool(np.array([[[3.0, 4.0]]]))
    array([[[5.]]])
    """
    return _root(sum_over(_power_sum(x, float(p)), axis=_spatial(x), keepdims=True), float(p))


@declare
class _max_unpool(Op):
    """Zeros of a shape with each element of x at its row-major position, as `max_pool` with indices gives."""

    name = "max_unpool"
    level = Level.HIR
    arity = 2
    attrs = {"shape": Attr(dims)}

    def infer(self, x: TensorType, indices: TensorType, *, shape: Shape) -> TensorType:
        need_dtype(self.name, x, is_number)
        if indices.dtype is not I64:
            raise ShapeError(f"max_unpool: indices {indices} are not i64; cast them")
        require_shape(x.shape, indices.shape, f"max_unpool: x {x} and indices {indices} differ in shape")
        return x.with_shape(shape)

    def ref(self, x: np.ndarray, indices: np.ndarray, *, shape: Sequence[int]) -> np.ndarray:
        out = np.zeros(tuple(shape), x.dtype)
        out.reshape(-1)[indices.reshape(-1)] = x.reshape(-1)
        return out

    def expand(self, x: Node, indices: Node, *, shape: Shape) -> Node:
        total = TensorType(x.dtype, shape).numel
        zero = x.graph.constant(np.zeros((), x.dtype.np))
        flat = broadcast_to(zero, (total,))
        many = (x.tensor.numel,)
        written = scatter_elements(flat, reshape(indices, many), reshape(x, many))
        made: Node = reshape(written, shape)
        return made

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg("f32[1,2,2]"), np.array([[[1, 2], [4, 7]]])), {"shape": (1, 2, 4)}),
            Sample((Arg("f32[1,1,2,1]"), np.array([[[[5], [0]]]])), {"shape": (1, 1, 2, 3)}),
            Sample((Arg("f32[0,1,2]"), np.zeros((0, 1, 2), np.int64)), {"shape": (0, 1, 4)}, grad=False),
            Sample((Arg("f32[1,1,n]"), Arg("i64[1,1,n]", 0, 2)), {"shape": (1, 1, "n")}, grad=False),
        ]


@of_one
def max_unpool(x: Operand, indices: Operand, shape: Sequence[Dim]) -> Tensor:
    """Undo max_pool: zeros of `shape` with each element of x at its row-major position in it.

    >>> max_unpool(np.array([[[3.0, 5.0]]]), np.array([[[1, 3]]]), (1, 1, 4))
    array([[[0., 3., 0., 5.]]])
    """
    return _max_unpool(x, indices, shape=tuple(shape))
