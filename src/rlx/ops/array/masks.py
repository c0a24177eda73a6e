"""Masks by position: one_hot, triangles and diagonals."""

from __future__ import annotations

import numpy as np

from rlx.errors import ShapeError
from rlx.ir.attr import Attr, boolean, dim, dtype_kind, integer
from rlx.ir.dim import Dim, dim_max, dim_min
from rlx.ir.dtype import F32, I64, DType
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Level, Op, Sample, declare
from rlx.ir.operand import DTypeLike, Operand, Tensor, of_one
from rlx.ir.types import TensorType
from rlx.ops.array.addressing import as_indices
from rlx.ops.array.create import iota, zeros_like
from rlx.ops.array.gather import gather_elements
from rlx.ops.array.shape import reshape, slice_axis, transpose
from rlx.ops.math.elementwise import cast, equal, less_equal, where
from rlx.ops.rules import is_computable, is_integer, need_dtype, normal_axis, op_call, shape_of


@declare
class _one_hot(Op):
    """A new axis of size `depth` that is 1 at the index and 0 elsewhere; negative indices count from the end.

    As in ONNX an index outside -depth .. depth - 1 is allowed: its whole row is 0.
    """

    name = "one_hot"
    level = Level.HIR
    arity = 1
    attrs = {"depth": Attr(dim), "axis": Attr(integer), "dtype": Attr(dtype_kind, F32)}
    not_differentiable = "its operand is an index"

    def infer(self, indices: TensorType, *, depth: Dim, axis: int, dtype: DType) -> TensorType:
        need_dtype(self.name, indices, is_integer)
        if not 0 <= axis <= indices.rank:
            raise ShapeError(f"one_hot: the new axis {axis} is out of range for {indices}")
        return TensorType(dtype, (*indices.shape[:axis], depth, *indices.shape[axis:]))

    def ref(self, indices: np.ndarray, *, depth: int, axis: int, dtype: DType) -> np.ndarray:
        out = np.zeros((*indices.shape, depth), dtype.np)
        for place, i in np.ndenumerate(indices):
            if -depth <= int(i) < depth:
                out[(*place, int(i))] = 1
        return np.moveaxis(out, -1, axis)

    def expand(self, indices: Node, *, depth: Dim, axis: int, dtype: DType) -> Node:
        index = cast(indices, dtype=I64)
        index = where(index < 0, index + op_call("dim_value", dim=depth, dtype=I64), index)
        wide = reshape(index, (*indices.shape[:axis], 1, *indices.shape[axis:]))
        places = iota((depth, *(1,) * (indices.rank - axis)), axis=0)
        made: Node = cast(equal(wide, places), dtype=dtype)
        return made

    def samples(self) -> list[Sample]:
        return [
            Sample((np.array([0, 2, -1, 5, -4]),), {"depth": 3, "axis": 1}),
            Sample((np.array([[1, 0], [3, 2]], np.int32),), {"depth": 4, "axis": 0}),
            Sample((np.array([[1, 0]], np.uint8),), {"depth": 2, "axis": 1, "dtype": "i32"}),
            Sample((np.array(1),), {"depth": 3, "axis": 0, "dtype": "bool"}),
            Sample((np.zeros((0, 2), np.int64),), {"depth": 3, "axis": 2}),
            Sample((np.array([1]),), {"depth": 0, "axis": 1}),
            Sample((Arg("i64[n]", 0, 4),), {"depth": "n", "axis": 1}),
        ]


@of_one
def one_hot(
    indices: Operand,
    depth: Dim,
    axis: int = -1,
    on_value: float = 1,
    off_value: float = 0,
    dtype: DTypeLike = "f32",
) -> Tensor:
    """A new axis of size `depth`: `on_value` at the index, `off_value` elsewhere, as ONNX OneHot.

    Negative indices count from the end; an index out of range gives a row of `off_value`.

    >>> one_hot([0, 2], 3)
    array([[1., 0., 0.],
           [0., 0., 1.]], dtype=float32)
    """
    indices = as_indices(indices)
    axis = normal_axis("one_hot", axis, len(shape_of(indices)) + 1)
    if (on_value, off_value) == (1, 0):
        return _one_hot(indices, depth=depth, axis=axis, dtype=dtype)
    on, off = (np.asarray(v).astype(dtype_kind(dtype).np) for v in (on_value, off_value))
    return where(_one_hot(indices, depth=depth, axis=axis, dtype="bool"), on, off)


@declare
class _trilu(Op):
    """The upper (or lower) triangle of the last two axes from the k-th diagonal on; zeros elsewhere."""

    name = "trilu"
    level = Level.HIR
    arity = 1
    attrs = {"k": Attr(integer, 0), "upper": Attr(boolean, True)}

    def infer(self, x: TensorType, *, k: int, upper: bool) -> TensorType:
        need_dtype(self.name, x, is_computable)
        if x.rank < 2:
            raise ShapeError(f"trilu: {x} needs at least two axes")
        return x

    def ref(self, x: np.ndarray, *, k: int, upper: bool) -> np.ndarray:
        return np.triu(x, k) if upper else np.tril(x, k)

    def expand(self, x: Node, *, k: int, upper: bool) -> Node:
        rows, columns = iota((x.shape[-2], 1), 0) + np.int64(k), iota((1, x.shape[-1]), 1)
        kept = less_equal(rows, columns) if upper else less_equal(columns, rows)
        made: Node = where(kept, x, zeros_like(x))
        return made

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg("f32[3,4]"),), {}),
            Sample((Arg("f32[4,3]"),), {"upper": False}),
            Sample((Arg("f32[2,3,3]"),), {"k": 1}),
            Sample((Arg("f32[2,3,3]"),), {"k": -1, "upper": False}),
            Sample((Arg("f32[2,2]"),), {"k": 5}),
            Sample((Arg("f32[0,3]"),), {"k": 1}),
            Sample((Arg("bool[3,3]"),), {"upper": False}, grad=False),
            Sample((Arg("f32[4,5]", special=True),), {}, grad=False),
            Sample((Arg("i32[n,m]"),), {"k": -1}, grad=False),
        ]


@of_one
def triu(x: Operand, k: int = 0) -> Tensor:
    """Upper triangle of the last two axes from the k-th diagonal on, zeros below, as numpy.triu.

    >>> triu(np.ones((2, 3), np.int32), 1)
    array([[0, 1, 1],
           [0, 0, 1]], dtype=int32)
    """
    return _trilu(x, k=k, upper=True)


@of_one
def tril(x: Operand, k: int = 0) -> Tensor:
    """Lower triangle of the last two axes up to the k-th diagonal, zeros above, as numpy.tril.

    >>> tril(np.ones((2, 3), np.int32))
    array([[1, 0, 0],
           [1, 1, 0]], dtype=int32)
    """
    return _trilu(x, k=k, upper=False)


@declare
class _diagonal(Op):
    """The k-th diagonal of the last two axes."""

    name = "diagonal"
    level = Level.HIR
    arity = 1
    attrs = {"k": Attr(integer, 0)}

    def _length(self, x: TensorType | Node, k: int) -> Dim:
        n, m = x.shape[-2:]
        return dim_max(dim_min(n - max(-k, 0), m - max(k, 0)), 0)

    def infer(self, x: TensorType, *, k: int) -> TensorType:
        if x.rank < 2:
            raise ShapeError(f"diagonal: {x} needs at least two axes")
        return x.with_shape((*x.shape[:-2], self._length(x, k)))

    def ref(self, x: np.ndarray, *, k: int) -> np.ndarray:
        return np.diagonal(x, k, -2, -1)

    def expand(self, x: Node, *, k: int) -> Node:
        count = self._length(x, k)
        rows = slice_axis(x, -2, dim_min(max(-k, 0), x.shape[-2]), count)
        shape = (*x.shape[:-2], count, 1)
        column = iota(shape, axis=x.rank - 2) + np.int64(max(k, 0))
        made: Node = reshape(gather_elements(rows, column, -1), shape[:-1])
        return made

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg("f32[3,4]"),), {}),
            Sample((Arg("f32[2,4,3]"),), {"k": 1}),
            Sample((Arg("f32[2,4,3]"),), {"k": -2}),
            Sample((Arg("f32[2,2]"),), {"k": 7}),
            Sample((Arg("f32[0,3]"),), {}),
            Sample((Arg("f32[n,m]"),), {"k": 1}, grad=False),
        ]


@declare
class _diagonal_matrix(Op):
    """Square matrices with the last axis of x on their k-th diagonal and zeros elsewhere."""

    name = "diagonal_matrix"
    level = Level.HIR
    arity = 1
    attrs = {"k": Attr(integer, 0)}

    def infer(self, x: TensorType, *, k: int) -> TensorType:
        need_dtype(self.name, x, is_computable)
        if x.rank < 1:
            raise ShapeError(f"diagonal_matrix: {x} has no axis to put on a diagonal")
        n = x.shape[-1] + abs(k)
        return x.with_shape((*x.shape[:-1], n, n))

    def ref(self, x: np.ndarray, *, k: int) -> np.ndarray:
        n = x.shape[-1] + abs(k)
        out = np.zeros((*x.shape[:-1], n, n), x.dtype)
        i = np.arange(x.shape[-1])
        out[..., i + max(-k, 0), i + max(k, 0)] = x
        return out

    def expand(self, x: Node, *, k: int) -> Node:
        n = x.shape[-1] + abs(k)
        none = ((0, 0),) * (x.rank - 1)
        column = op_call("pad", x, padding=(*none, (max(-k, 0), max(k, 0))))
        column = reshape(column, (*x.shape[:-1], n, 1))
        on_diagonal = equal(iota((n, 1), 0) + np.int64(k), iota((1, n), 1))
        made: Node = where(on_diagonal, column, zeros_like(column))
        return made

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg("f32[3]"),), {}),
            Sample((Arg("f32[2,3]"),), {"k": 2}),
            Sample((Arg("f32[2,3]"),), {"k": -1}),
            Sample((Arg("f32[0]"),), {"k": 1}),
            Sample((Arg("f32[3]", special=True),), {}, grad=False),
            Sample((Arg("i32[n]"),), {}, grad=False),
        ]


@of_one
def diagonal(x: Operand, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Tensor:
    """The diagonal of two axes, as the last axis of the result, as numpy.diagonal.

    >>> diagonal(np.array([[1, 2], [3, 4]]))
    array([1, 4])
    """
    rank = len(shape_of(x))
    first, second = normal_axis("diagonal", axis1, rank), normal_axis("diagonal", axis2, rank)
    if first == second:
        raise ShapeError(f"diagonal: axis1 and axis2 are both axis {first}")
    rest = [i for i in range(rank) if i not in (first, second)]
    order = (*rest, first, second)
    return _diagonal(x if order == tuple(range(rank)) else transpose(x, order), k=offset)


@of_one
def diag(x: Operand, k: int = 0) -> Tensor:
    """The k-th diagonal of a matrix, or the matrix with that diagonal, as numpy.diag.

    >>> diag(np.array([1, 2]), 1)
    array([[0, 1, 0],
           [0, 0, 2],
           [0, 0, 0]])
    """
    rank = len(shape_of(x))
    if rank not in (1, 2):
        raise ShapeError(f"diag: takes one or two axes, got {rank}; see diagonal for more")
    return _diagonal_matrix(x, k=k) if rank == 1 else _diagonal(x, k=k)


__all__ = ["diag", "diagonal", "one_hot", "tril", "triu"]
