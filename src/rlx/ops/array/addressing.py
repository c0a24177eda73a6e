"""Three ways in which an integer tensor picks places of another, shared by the gathers and the scatters.

An addressing says which points there are (`space`, the shape of what is gathered or scattered) and where each
of them is in the data: as scalar expressions for kernels (`places`), as arrays for the reference
(`numpy_places`).
Negative indices count from the end; an index out of range is an error when the program runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np

from rlx.errors import KernelError, ShapeError
from rlx.ir.assume import require_at_least, require_equal
from rlx.ir.attr import Attr, integer
from rlx.ir.dim import Dim
from rlx.ir.dtype import I64
from rlx.ir.graph import Node
from rlx.ir.operand import Operand, Tensor, of_one
from rlx.ir.types import Shape, TensorType
from rlx.kernel.scalar import Scalar, axes, const, convert, load, select, size
from rlx.ops.rules import is_integer, need_dtype

Case: TypeAlias = tuple[str, Any, dict[str, Any]]


class OutOfRangeError(KernelError, IndexError):
    """An index read from data is outside the axis it indexes."""


def from_end(index: Scalar, extent: Dim) -> Scalar:
    """The index itself, or counted from the end where it is negative."""
    at = convert(index, I64)
    return select(at < 0, at + size(extent), at)


def checked(name: str, index: np.ndarray, extent: int) -> np.ndarray:
    """The reference of `from_end`, refusing what a kernel reports as out of range."""
    index = index.astype(np.int64)
    bad = (index < -extent) | (index >= extent)
    if bad.any():
        first = int(index[bad][0])
        raise OutOfRangeError(f"{name}: index {first} is out of range for an axis of size {extent}")
    return np.where(index < 0, index + extent, index)


class Addressing:
    """The part in which gather and scatter of one family agree; attributes arrive as keywords.

    space(name, data type, indices type) -> the points, or a refusal that names the op
    places(data type, indices type) -> index expressions into data at a point; operand 1 holds the indices
    numpy_places(name, data shape, indices) -> index arrays into data that broadcast to the space
    samples() -> (data type, indices, attributes) for generated tests
    """

    attrs: ClassVar[Mapping[str, Attr]]
    space: Callable[..., Shape]
    places: Callable[..., list[Scalar]]
    numpy_places: Callable[..., tuple[np.ndarray, ...]]
    samples: Callable[[], list[Case]]


def grid(shape: Sequence[int], keep: Sequence[int], rank: int) -> list[np.ndarray]:
    """Open arrays of positions: shape[i] of them along axis keep[i] of a space of `rank` axes."""
    out = []
    for n, at in zip(shape, keep, strict=True):
        out.append(np.arange(n).reshape([n if j == at else 1 for j in range(rank)]))
    return out


class AlongAxis(Addressing):
    """Slices of data along one axis, as numpy.take; the first `batch_dims` axes belong to both tensors."""

    attrs = {"axis": Attr(integer), "batch_dims": Attr(integer, 0)}

    def space(self, name: str, data: TensorType, indices: TensorType, *, axis: int, batch_dims: int) -> Shape:
        need_dtype(name, indices, is_integer)
        if not 0 <= axis < data.rank:
            raise ShapeError(f"{name}: axis {axis} is out of range for {data}")
        if not 0 <= batch_dims <= min(axis, indices.rank):
            raise ShapeError(f"{name}: {batch_dims} batch axes do not fit {data}, {indices} and axis {axis}")
        _same_batch(name, data, indices, batch_dims)
        return (*data.shape[:axis], *indices.shape[batch_dims:], *data.shape[axis + 1 :])

    def places(self, data: TensorType, indices: TensorType, *, axis: int, batch_dims: int) -> list[Scalar]:
        picked = indices.rank - batch_dims
        at = axes(data.rank - 1 + picked)
        index = load(1, (*at[:batch_dims], *at[axis : axis + picked]), indices.dtype)
        return [*at[:axis], from_end(index, data.shape[axis]), *at[axis + picked :]]

    def numpy_places(
        self, name: str, shape: Sequence[int], indices: np.ndarray, *, axis: int, batch_dims: int
    ) -> tuple[np.ndarray, ...]:
        picked = indices.ndim - batch_dims
        rank = len(shape) - 1 + picked
        spread = [*indices.shape[:batch_dims], *(1,) * (axis - batch_dims), *indices.shape[batch_dims:]]
        index = checked(name, indices, shape[axis]).reshape((*spread, *(1,) * (len(shape) - 1 - axis)))
        before = grid(shape[:axis], range(axis), rank)
        after = grid(shape[axis + 1 :], range(axis + picked, rank), rank)
        return (*before, index, *after)

    def samples(self) -> list[Case]:
        return [
            ("f32[4,3]", np.array([[0, 3], [-1, 0]]), {"axis": 0}),
            ("f32[2,5,3]", np.array([4, -5, 1, 1], np.int32), {"axis": 1}),
            ("f32[3]", np.array(-2), {"axis": 0}),
            ("f32[2,3,4]", np.array([[0, 2], [1, 1]]), {"axis": 1, "batch_dims": 1}),
            ("f32[2,3,4]", np.array([2, 0]), {"axis": 2, "batch_dims": 1}),
            ("f32[4,0]", np.array([1, 2]), {"axis": 0}),
            ("f32[33,2]", np.zeros((0, 2), np.int64), {"axis": 0}),
            ("f32[m,n]", "i64[k,n]", {"axis": 0}),
            ("i32[7]", np.array([6, 0, 2], np.uint8), {"axis": 0}),
        ]


class ByTuples(Addressing):
    """ONNX GatherND: the last axis of indices holds one index for each of the axes after `batch_dims`."""

    attrs = {"batch_dims": Attr(integer, 0)}

    def space(self, name: str, data: TensorType, indices: TensorType, *, batch_dims: int) -> Shape:
        need_dtype(name, indices, is_integer)
        depth = indices.shape[-1] if indices.rank else None
        if not isinstance(depth, int):
            raise ShapeError(f"{name}: the last axis of indices {indices} holds tuples; it must be a number")
        if not 0 <= batch_dims < indices.rank or batch_dims + depth > data.rank:
            raise ShapeError(f"{name}: tuples of {depth} after {batch_dims} batch axes do not fit {data}")
        _same_batch(name, data, indices, batch_dims)
        return (*indices.shape[:-1], *data.shape[batch_dims + depth :])

    def places(self, data: TensorType, indices: TensorType, *, batch_dims: int) -> list[Scalar]:
        depth, outer = indices.shape[-1], indices.rank - 1
        assert isinstance(depth, int)
        rest = data.rank - batch_dims - depth
        at = axes(outer + rest)
        picked = [load(1, (*at[:outer], const(j)), indices.dtype) for j in range(depth)]
        ends = data.shape[batch_dims : batch_dims + depth]
        return [*at[:batch_dims], *(from_end(i, d) for i, d in zip(picked, ends, strict=True)), *at[outer:]]

    def numpy_places(
        self, name: str, shape: Sequence[int], indices: np.ndarray, *, batch_dims: int
    ) -> tuple[np.ndarray, ...]:
        depth, outer = indices.shape[-1], indices.ndim - 1
        tail = shape[batch_dims + depth :]
        rank = outer + len(tail)
        wide = (*indices.shape[:-1], *(1,) * len(tail))
        picked = [checked(name, indices[..., j], shape[batch_dims + j]).reshape(wide) for j in range(depth)]
        before = grid(shape[:batch_dims], range(batch_dims), rank)
        return (*before, *picked, *grid(tail, range(outer, rank), rank))

    def samples(self) -> list[Case]:
        return [
            ("f32[3,4]", np.array([[0, 1], [2, -1], [0, 0]]), {}),
            ("f32[3,4]", np.array([[2], [-3]], np.int32), {}),
            ("f32[2,3,4]", np.array([[[1], [0]], [[2], [1]]]), {"batch_dims": 1}),
            ("f32[2,3,4]", np.array([[0, 1], [1, -1]]), {"batch_dims": 1}),
            ("f32[3,3]", np.array([1, 2]), {}),
            ("f32[5]", np.zeros((0, 1), np.int64), {}),
            ("f32[2,3]", np.zeros((2, 0), np.int64), {"batch_dims": 1}),
            ("f32[3]", np.zeros((2, 0), np.int64), {}),
            ("f32[m,n]", "i64[n,1]", {}),
        ]


class ByElements(Addressing):
    """ONNX GatherElements: one place per index, which replaces the index's own position along `axis`."""

    attrs = {"axis": Attr(integer)}

    def space(self, name: str, data: TensorType, indices: TensorType, *, axis: int) -> Shape:
        need_dtype(name, indices, is_integer)
        if data.rank != indices.rank:
            raise ShapeError(f"{name}: {data} and indices {indices} must have the same rank")
        if not 0 <= axis < data.rank:
            raise ShapeError(f"{name}: axis {axis} is out of range for {data}")
        for i, (have, want) in enumerate(zip(data.shape, indices.shape, strict=True)):
            if i != axis:
                require_at_least(have, want, f"{name}: indices {indices} reach beyond axis {i} of {data}")
        return indices.shape

    def places(self, data: TensorType, indices: TensorType, *, axis: int) -> list[Scalar]:
        at = axes(data.rank)
        return [*at[:axis], from_end(load(1, at, indices.dtype), data.shape[axis]), *at[axis + 1 :]]

    def numpy_places(
        self, name: str, shape: Sequence[int], indices: np.ndarray, *, axis: int
    ) -> tuple[np.ndarray, ...]:
        at: list[np.ndarray] = grid(indices.shape, range(indices.ndim), indices.ndim)
        at[axis] = checked(name, indices, shape[axis])
        return tuple(at)

    def samples(self) -> list[Case]:
        return [
            ("f32[3,4]", np.array([[0, 3, -1], [2, 1, 0]]), {"axis": 1}),
            ("f32[3,2]", np.array([[0, 2], [-1, 1], [2, 0], [1, 1]], np.int32), {"axis": 0}),
            ("f32[5]", np.array([4]), {"axis": 0}),
            ("f32[3,4]", np.zeros((0, 2), np.int64), {"axis": 1}),
            ("f32[m,n]", "i64[m,k]", {"axis": 1}),
        ]


def _same_batch(name: str, data: TensorType, indices: TensorType, batch_dims: int) -> None:
    for a, b in zip(data.shape[:batch_dims], indices.shape[:batch_dims], strict=True):
        require_equal(a, b, f"{name}: {data} and {indices} differ within their first {batch_dims} axes")


@of_one
def as_indices(x: Operand) -> Tensor:
    """Indices given as nodes, arrays or plain Python numbers (an empty list has no dtype)."""
    if isinstance(x, Node):
        return x
    array = np.asarray(x)
    return array.astype(np.int64) if array.size == 0 and array.dtype.kind == "f" else array


__all__ = ["Addressing", "AlongAxis", "ByElements", "ByTuples", "OutOfRangeError", "as_indices"]
