"""Index arithmetic of windows: where the largest element of each window is, how many elements one holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np

from rlx.errors import ShapeError
from rlx.ir.assume import require_shape
from rlx.ir.attr import Attr, boolean, dims, dtype_kind, integer
from rlx.ir.dim import Dim
from rlx.ir.dtype import I64, DType, dtype
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Op, Sample, declare
from rlx.ir.types import Shape, TensorType
from rlx.kernel.form import Form, Map, Reduce
from rlx.kernel.scalar import Scalar, axes, call, const, convert, load, select, size
from rlx.ops.array.window import (
    GEOMETRY,
    Geometry,
    Padding,
    check_geometry,
    identity_of,
    position,
    window_counts,
    window_load,
    window_view,
)
from rlx.ops.rules import is_number, is_real, lift_all, need_dtype


@declare
class window_argmax(Op):
    """Where in x the largest element of each window is, given those elements: the first one of equals.

    The position is row-major over the last `span` axes of x; with `column_major` the window axes count by
    columns.
    """

    name = "window_argmax"
    arity = 2
    attrs = {"window": Attr(dims), **GEOMETRY, "span": Attr(integer), "column_major": Attr(boolean, False)}
    not_differentiable = "its value is an index"

    def infer(
        self,
        x: TensorType,
        best: TensorType,
        *,
        window: Shape,
        span: int,
        column_major: bool,
        **geometry: Unpack[Geometry],
    ) -> TensorType:
        need_dtype(self.name, x, is_real)
        lead = x.rank - len(window)
        if not len(window) <= span <= x.rank:
            raise ShapeError(
                f"window_argmax: span {span} is not in {len(window)} (of the window) to {x.rank} (of {x})"
            )
        counts = window_counts(self.name, x.shape[lead:], window, **geometry)
        shape = (*x.shape[:lead], *counts)
        return TensorType(
            I64, require_shape(shape, best.shape, f"window_argmax: {best} are not the maxima of {x}")
        )

    def _position(self, x: Shape, index: Sequence[object], window: int, span: int, column_major: bool) -> Any:
        """Linear position of an index over the last `span` axes."""
        lead = len(x) - window
        order = [*range(len(x) - span, lead)]
        order += [*reversed(range(lead, len(x)))] if column_major else [*range(lead, len(x))]
        at: Any = None
        for i in order:
            step = x[i] if isinstance(index[i], np.ndarray) else size(x[i])
            at = index[i] if at is None else at * step + index[i]
        return at

    def ref(
        self,
        x: np.ndarray,
        best: np.ndarray,
        *,
        window: Sequence[int],
        span: int,
        column_major: bool,
        **geometry: Unpack[Geometry],
    ) -> np.ndarray:
        n = len(window)
        grid = np.meshgrid(*(np.arange(d) for d in x.shape), indexing="ij")
        where = self._position(x.shape, grid, n, span, column_major)
        last = np.iinfo(np.int64).max
        seen = window_view(x, window, **geometry, fill=identity_of("max", dtype(x.dtype)))
        from_ = window_view(where, window, **geometry, fill=last)
        taps = tuple(range(x.ndim, x.ndim + n))
        hit = (seen == best.reshape((*best.shape, *(1,) * n))) | (seen != seen)
        return np.asarray(np.min(np.where(hit, from_, last), axis=taps, initial=last))

    def batch(self, flags: Sequence[bool], *operands: Node, **attrs: object) -> Node:
        made: Node = window_argmax(*lift_all(flags, operands), **attrs)
        return made

    def lower(
        self,
        x: TensorType,
        best: TensorType,
        *,
        window: Shape,
        span: int,
        column_major: bool,
        **geometry: Unpack[Geometry],
    ) -> Form:
        n = len(window)
        lead = x.rank - n
        space = (*best.shape, *window)
        at = axes(len(space))
        last = const(int(I64.max_value), I64)
        seen = window_load(x, lead, at[: x.rank], at[x.rank :], identity_of("max", x.dtype), **geometry)
        index: list[Scalar] = list(at[:lead])
        strides, padding, dilations = geometry["strides"], geometry["padding"], geometry["dilations"]
        rows = zip(at[lead : x.rank], at[x.rank :], strides, padding, dilations, strict=True)
        index += [position(o, k, s, low, d) for o, k, s, (low, _), d in rows]
        hit = call("equal", seen, load(1, at[: x.rank], x.dtype))
        if x.dtype.is_float:
            hit = call("logical_or", hit, call("is_nan", seen))
        if seen.prim == "load_or":
            hit = call("logical_and", seen.args[0], hit)
        body = select(hit, self._position(x.shape, index, n, span, column_major), last)
        return Reduce(space, tuple(range(x.rank, len(space))), "min", body, I64)

    def cost(self, x: TensorType, best: TensorType, *, window: Shape, **attrs: object) -> Dim:
        total: Dim = 2 * best.numel
        for k in window:
            total = total * k
        return total

    def samples(self) -> list[Sample]:
        x = np.array([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]], np.float32)
        best = np.array([[4, 4, 5, 9, 9], [6, 5, 8, 9, 9]], np.float32)
        common = {"strides": (1,), "padding": ((0, 0),), "dilations": (1,)}
        padded = {"strides": (2,), "padding": ((1, 0),), "dilations": (1,)}
        square = {"window": (1, 2), "strides": (1, 2), "padding": ((0, 0), (0, 1)), "dilations": (1, 1)}
        pairs = np.array([[3, 4, 9, 2], [6, 5, 9, 7]], np.float32)
        return [
            Sample((x, best), {"window": (3,), **common, "span": 1}),
            Sample((x, best), {"window": (3,), **common, "span": 2}),
            Sample((x, np.array([[3, 4, 9], [6, 5, 9]], np.float32)), {"window": (3,), **padded, "span": 2}),
            Sample(
                (x, np.array([[3, 4, 5, 2], [6, 5, 8, 7]], np.float32)),
                {**square, "span": 2, "column_major": True},
            ),
            Sample((np.array([np.nan, 1, 2]), np.array([np.nan, 2])), {"window": (2,), **common, "span": 1}),
            Sample((pairs[:0], pairs[:0, :3]), {"window": (2,), **common, "span": 2}),
            Sample((Arg("i32[n,m]"), Arg("i32[n,m-1]")), {"window": (2,), **common, "span": 1}),
        ]


@declare
class window_count(Op):
    """How many elements of each window are inside [-low, size + high) along all axes, as a number dtype.

    `counted` is the padding that counts; the geometry says where windows are.
    """

    name = "window_count"
    arity = 0
    attrs = {
        "size": Attr(dims),
        "window": Attr(dims),
        **GEOMETRY,
        "counted": GEOMETRY["padding"],
        "dtype": Attr(dtype_kind),
    }
    not_differentiable = "it depends on no value"

    def infer(
        self, *, size: Shape, window: Shape, counted: Padding, dtype: DType, **geometry: Unpack[Geometry]
    ) -> TensorType:
        need_dtype(self.name, TensorType(dtype, ()), is_number)
        check_geometry(self.name, len(window), geometry["strides"], counted, geometry["dilations"])
        return TensorType(dtype, window_counts(self.name, size, window, **geometry))

    def ref(
        self,
        *,
        size: Sequence[int],
        window: Sequence[int],
        counted: Padding,
        dtype: DType,
        **geometry: Unpack[Geometry],
    ) -> np.ndarray:
        inside = np.ones(
            [d + max(lo, 0) + max(hi, 0) for d, (lo, hi) in zip(size, counted, strict=True)], np.int64
        )
        rest = [
            (lo - max(a, 0), hi - max(b, 0))
            for (lo, hi), (a, b) in zip(geometry["padding"], counted, strict=True)
        ]
        view = window_view(inside, window, geometry["strides"], rest, geometry["dilations"], fill=0)
        return np.asarray(view.sum(axis=tuple(range(len(size), view.ndim)))).astype(dtype.np)

    def batch(self, flags: Sequence[bool], **attrs: object) -> Node:
        made: Node = window_count(**attrs)
        return made

    def lower(
        self, *, size: Shape, window: Shape, counted: Padding, dtype: DType, **geometry: Unpack[Geometry]
    ) -> Form:
        counts = window_counts(self.name, size, window, **geometry)
        total = const(1)
        strides, padding, dilations = geometry["strides"], geometry["padding"], geometry["dilations"]
        rows = zip(axes(len(counts)), size, window, counted, strides, padding, dilations, strict=True)
        for o, d, k, (low, high), stride, (start, _), dilation in rows:
            first = position(o, const(0), stride, start, dilation)
            total = total * (
                _taps_below(d + high, first, dilation, k) - _taps_below(-low, first, dilation, k)
            )
        return Map(counts, convert(total, dtype))

    def cost(
        self, *, size: Shape, window: Shape, counted: Padding, dtype: DType, **geometry: Unpack[Geometry]
    ) -> Dim:
        total: Dim = 1
        for d in window_counts(self.name, size, window, **geometry):
            total = total * d
        return total

    def samples(self) -> list[Sample]:
        def one(
            sizes: object,
            window: Any,
            strides: Sequence[int],
            padding: Padding,
            dilations: Sequence[int],
            counted: Any,
        ) -> Sample:
            attrs = {
                "size": sizes,
                "window": window,
                "strides": strides,
                "padding": padding,
                "dilations": dilations,
            }
            return Sample((), {**attrs, "counted": counted, "dtype": "f32"})

        return [
            one((5,), (3,), (1,), ((1, 1),), (1,), ((0, 0),)),
            one((5,), (3,), (2,), ((2, 3),), (2,), ((1, 1),)),
            one((4, 5), (2, 3), (1, 2), ((1, 1), (2, 2)), (1, 1), ((1, 0), (0, 0))),
            one((1,), (1,), (1,), ((0, 0),), (1,), ((0, 0),)),
        ]


def _taps_below(bound: Dim, first: Scalar, dilation: int, window: Dim) -> Scalar:
    """How many of the positions first, first + dilation, ... of a window are less than a bound."""
    many = (size(bound) - first + (dilation - 1)) // dilation
    return call("minimum", call("maximum", many, const(0)), size(window))
