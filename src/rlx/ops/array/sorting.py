"""Sorting along an axis: sort, argsort, top_k, and searchsorted in sorted values.

All sorts are stable: equal values keep their order. NaN is larger than every number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.errors import ShapeError
from rlx.ir.assume import require_at_least
from rlx.ir.attr import Attr, boolean, dim, one_of
from rlx.ir.dim import Dim
from rlx.ir.dtype import I64
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Level, MultiOp, Op, Sample, declare
from rlx.ir.operand import Operand, Tensor, of_one, of_two
from rlx.ir.types import TensorType, TupleType
from rlx.kernel.form import Form, Sort
from rlx.ops.array.gather import add_at
from rlx.ops.array.shape import reshape, transpose
from rlx.ops.math.elementwise import cast, is_nan, less, less_equal, logical_and, logical_not, logical_or
from rlx.ops.math.reduce import reduce_sum
from rlx.ops.rules import is_real, need_dtype, normal_axis, op_call, same_dtype, shape_of


def stable_order(x: np.ndarray, descending: bool) -> np.ndarray:
    """Positions that sort the last axis, equal values in order, NaN last (first when descending)."""
    key = x.astype(np.float32) if x.dtype.itemsize == 2 and x.dtype.kind not in "iu" else x
    if not descending:
        return np.asarray(np.argsort(key, axis=-1, kind="stable"), np.int64)
    backward = np.argsort(np.flip(key, -1), axis=-1, kind="stable")
    return np.asarray(np.flip(x.shape[-1] - 1 - backward, -1), np.int64)


class Sorting(MultiOp):
    """Base: the first `keep` of the sorted last axis, and where they were."""

    arity = 1

    def infer(self, x: TensorType, *, descending: bool, keep: Dim | None = None) -> TupleType:
        need_dtype(self.name, x, is_real)
        if x.rank == 0:
            raise ShapeError(f"{self.name}: {x} has no axis to sort")
        n = x.shape[-1] if keep is None else keep
        require_at_least(n, 0, f"{self.name}: k is {n}; it must not be negative")
        require_at_least(x.shape[-1], n, f"{self.name}: k is {n}, more than the sorted axis of {x} holds")
        shape = (*x.shape[:-1], n)
        return TupleType((x.with_shape(shape), TensorType(I64, shape)))

    def ref(
        self, x: np.ndarray, *, descending: bool, keep: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        order = stable_order(x, descending)[..., :keep]
        return np.take_along_axis(x, order, -1), order

    def vjp(
        self, g: tuple[Node | None, ...], y: tuple[Node, ...], x: Node, **attrs: object
    ) -> list[Node | None]:
        if g[0] is None:
            return [None]
        return [add_at("scatter_elements", x, y[1], g[0], axis=x.rank - 1)]

    def batch(self, flags: Sequence[bool], x: Node, **attrs: object) -> tuple[Node, ...]:
        return self(x, **attrs)

    def lower(self, x: TensorType, *, descending: bool, keep: Dim | None = None) -> Form:
        return Sort(x.shape, x.shape[-1] if keep is None else keep, descending, x.dtype)

    def cost(self, x: TensorType, *, descending: bool, keep: Dim | None = None) -> Dim:
        return x.numel * 16  # comparisons per element of a row of a few thousand

    def samples(self) -> list[Sample]:
        ties = np.array([[2, 1, 2, 1, 0], [0, 0, 0, 0, 0], [3, -1, 3, 5, 5]], np.int32)
        keeps: list[dict[str, object]] = (
            [{}] if "keep" not in self.attrs else [{"keep": k} for k in (2, 0, 1)]
        )
        out = []
        for down in (False, True):
            for more in keeps:
                how = {"descending": down, **more}
                out.append(Sample((Arg("f32[3,5]", distinct=True),), how))
                out.append(Sample((ties,), how, grad=False))
            first = {"descending": down, **keeps[0]}
            out += [
                Sample((Arg("f32[17]", distinct=True),), first),
                Sample((Arg("f32[2,9]", special=True),), first, grad=False),
                Sample((Arg("f32[0,4]"),), first, grad=False),
                Sample((Arg("u8[6]", 0, 9),), first, grad=False),
                Sample((Arg("bf16[2,5]"),), first, grad=False),
                Sample((Arg("f32[n,m]"),), first, grad=False),
            ]
        return out


@declare
class _sort(Sorting):
    """The last axis in order, and the positions that the values had."""

    name = "sort"
    attrs = {"descending": Attr(boolean, False)}


@declare
class _top_k(Sorting):
    """The first `keep` of the last axis in order (the largest when `descending`), and their positions."""

    name = "top_k"
    selects = True
    attrs = {"keep": Attr(dim), "descending": Attr(boolean, True)}


def _along(op_name: str, x: Operand, axis: int, **attrs: object) -> tuple[Tensor, Tensor]:
    """Both results of a sort along any axis."""
    rank = len(shape_of(x))
    axis = normal_axis(op_name, axis, rank)
    if axis == rank - 1:
        values, order = op_call(op_name, x, **attrs)
        return values, order
    swap = list(range(rank))
    swap[axis], swap[-1] = swap[-1], swap[axis]
    values, order = op_call(op_name, transpose(x, swap), **attrs)
    return transpose(values, swap), transpose(order, swap)


@of_one
def sort(x: Operand, axis: int | None = -1, descending: bool = False) -> Tensor:
    """Values in order along an axis (of the flattened x for None), as numpy.sort; NaN counts as the largest.

    >>> sort(np.array([3, 1, 2])), sort(np.array([3, 1, 2]), descending=True)
    (array([1, 2, 3]), array([3, 2, 1]))
    """
    if axis is None:
        x, axis = reshape(x, (-1,)), 0
    return _along("sort", x, axis, descending=descending)[0]


@of_one
def argsort(x: Operand, axis: int | None = -1, descending: bool = False) -> Tensor:
    """Positions that sort x along an axis, as a stable numpy.argsort.

    >>> argsort(np.array([3, 1, 2, 1]))
    array([1, 3, 2, 0])
    """
    if axis is None:
        x, axis = reshape(x, (-1,)), 0
    return _along("sort", x, axis, descending=descending)[1]


def top_k(x: Operand, k: Operand, axis: int = -1, largest: bool = True) -> tuple[Tensor, Tensor]:
    """The k largest (or smallest) values along an axis in order, and their positions, as ONNX TopK.

    Of equal values the one with the lower position comes first.

    >>> top_k(np.array([1, 4, 2, 4]), 2)
    (array([4, 4]), array([1, 3]))
    """
    return _along("top_k", x, axis, keep=k, descending=largest)


@declare
class _searchsorted(Op):
    """Where values would go into sorted 1-D data: how many elements of it are less (or not greater)."""

    name = "searchsorted"
    level = Level.HIR
    arity = 2
    attrs = {"side": Attr(one_of("left", "right"), "left")}
    not_differentiable = "its value is an index"

    def infer(self, data: TensorType, values: TensorType, *, side: str) -> TensorType:
        need_dtype(self.name, data, is_real)
        same_dtype(self.name, (data, values))
        if data.rank != 1:
            raise ShapeError(f"searchsorted: the sorted data is {data}; it must have one axis")
        return TensorType(I64, values.shape)

    def ref(self, data: np.ndarray, values: np.ndarray, *, side: Any) -> np.ndarray:
        return np.asarray(np.searchsorted(np.sort(data), values, side=side))

    def expand(self, data: Node, values: Node, *, side: str) -> Node:
        wide = reshape(values, (*values.shape, 1))
        before = less(data, wide) if side == "left" else less_equal(data, wide)
        if data.dtype.is_float:  # NaN is larger than every number and equal to itself
            beyond = is_nan(wide) if side == "right" else logical_and(is_nan(wide), logical_not(is_nan(data)))
            before = logical_or(before, beyond)
        made: Node = reduce_sum(cast(before, dtype=I64), axes=(values.rank,))
        return made

    def samples(self) -> list[Sample]:
        ends = np.array([-1, 0, 0, 2.5, np.inf, np.nan, np.nan], np.float32)
        asked = np.array([[0, 3, np.nan], [-np.inf, 2.5, np.inf]], np.float32)
        return [
            sample
            for side in ("left", "right")
            for sample in (
                Sample((ends, asked), {"side": side}),
                Sample((np.array([1, 3, 3, 9], np.int32), Arg("i32[5]", 0, 10)), {"side": side}),
                Sample((np.zeros(0, np.float32), Arg("f32[2]")), {"side": side}),
            )
        ]


@of_two
def searchsorted(data: Operand, values: Operand, side: str = "left") -> Tensor:
    """Positions that keep sorted 1-D data sorted, as numpy.searchsorted.

    It compares each value with all of data, which vectorises; it does not bisect.

    >>> searchsorted(np.array([1, 3, 3, 5]), np.array([3, 4]), side="right")
    array([3, 3])
    """
    return _searchsorted(data, values, side=side)


__all__ = ["argsort", "searchsorted", "sort", "top_k"]
