"""Reading at computed places: gather (slices along an axis), gather_nd (tuples), gather_elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from rlx.ir.dim import Dim
from rlx.ir.dtype import dtype
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Op, Sample, declare
from rlx.ir.operand import Operand, Tensor, of_two
from rlx.ir.types import TensorType
from rlx.kernel.form import Form, Map
from rlx.kernel.scalar import load_checked
from rlx.ops.array.addressing import Addressing, AlongAxis, ByElements, ByTuples, as_indices
from rlx.ops.array.shape import broadcast_to, reshape, transpose
from rlx.ops.rules import lift_all, normal_axis, op_call, shape_of, widen


def add_at(name: str, like: Node, indices: Node, g: Node, **attrs: object) -> Node:
    """Zeros like `like` with g added at places by the scatter `name`; half precision is summed in f32."""
    wide = widen(g)
    zeros = broadcast_to(g.graph.constant(np.zeros((), wide.dtype.np)), like.shape)
    summed: Node = op_call(name, zeros, indices, wide, reduction="add", **attrs)
    if wide is not g:
        summed = op_call("cast", summed, dtype=g.dtype)
    return summed


class Gathering(Op):
    """Base of the gathers: one element of data for each point of the addressing's space."""

    arity = 2
    moves = (0,)
    address: ClassVar[Addressing]
    opposite: ClassVar[str]  # the scatter with the same addressing

    def infer(self, data: TensorType, indices: TensorType, **attrs: object) -> TensorType:
        return data.with_shape(self.address.space(self.name, data, indices, **attrs))

    def ref(self, data: np.ndarray, indices: np.ndarray, **attrs: object) -> np.ndarray:
        places = self.address.numpy_places(self.name, data.shape, indices, **attrs)
        types = (TensorType(dtype(a.dtype), a.shape) for a in (data, indices))
        return np.broadcast_to(data[places], self.address.space(self.name, *types, **attrs))  # type: ignore[arg-type]

    def vjp(self, g: Node, y: Node, data: Node, indices: Node, **attrs: object) -> list[Node | None]:
        return [add_at(self.opposite, data, indices, g, **attrs), None]

    def lower(self, data: TensorType, indices: TensorType, **attrs: object) -> Form:
        out = self.infer(data, indices, **attrs)
        return Map(out.shape, load_checked(0, self.address.places(data, indices, **attrs), data.dtype))

    def cost(self, data: TensorType, indices: TensorType, **attrs: object) -> Dim:
        return self.infer(data, indices, **attrs).numel

    def samples(self) -> list[Sample]:
        out = []
        for data, indices, attrs in self.address.samples():
            at = Arg(indices, -3, 2) if isinstance(indices, str) else indices
            out.append(Sample((Arg(data), at), attrs, grad=not isinstance(indices, str)))
        return out


@declare
class _gather(Gathering):
    """Slices of data along an axis, as numpy.take; the first `batch_dims` axes belong to both operands.

    The result has data's axes before `axis`, those of indices after the batch axes, then the rest of data's.
    """

    name = "gather"
    address = AlongAxis()
    attrs = address.attrs
    opposite = "scatter"

    def batch(self, flags: Sequence[bool], data: Node, indices: Node, *, axis: int, batch_dims: int) -> Node:
        made: Node
        if not flags[1] and batch_dims == 0:  # the batch axis of data is one more axis that is kept whole
            made = _gather(data, indices, axis=axis + 1)
            return made
        if not flags[0] and batch_dims == 0:  # the batch axis of indices is one more axis of places
            made = _gather(data, indices, axis=axis)
            made = transpose(made, (axis, *(i for i in range(made.rank) if i != axis)))
            return made
        made = _gather(*lift_all(flags, (data, indices)), axis=axis + 1, batch_dims=batch_dims + 1)
        return made


@declare
class _gather_nd(Gathering):
    """Elements or slices of data at index tuples, as ONNX GatherND."""

    name = "gather_nd"
    address = ByTuples()
    attrs = address.attrs
    opposite = "scatter_nd"

    def batch(self, flags: Sequence[bool], data: Node, indices: Node, *, batch_dims: int) -> Node:
        made: Node
        if not flags[0] and batch_dims == 0:  # the batch axis of indices is one more axis of places
            made = _gather_nd(data, indices)
        else:
            made = _gather_nd(*lift_all(flags, (data, indices)), batch_dims=batch_dims + 1)
        return made


@declare
class _gather_elements(Gathering):
    """One element of data per index, along an axis, as ONNX GatherElements."""

    name = "gather_elements"
    address = ByElements()
    attrs = address.attrs
    opposite = "scatter_elements"

    def batch(self, flags: Sequence[bool], data: Node, indices: Node, *, axis: int) -> Node:
        made: Node = _gather_elements(*lift_all(flags, (data, indices)), axis=axis + 1)
        return made


@of_two
def gather(x: Operand, indices: Operand, axis: int = 0, batch_dims: int = 0) -> Tensor:
    """Slices of x at indices along an axis, as numpy.take; indices may have any shape.

    Negative indices count from the end; an index out of range is an error. The first `batch_dims` axes of x
    and indices go together: each batch is gathered with its own indices.

    >>> gather(np.array([10, 20, 30]), [[0, -1], [1, 1]])
    array([[10, 30],
           [20, 20]])
    """
    axis = normal_axis("gather", axis, len(shape_of(x)))
    return _gather(x, as_indices(indices), axis=axis, batch_dims=batch_dims)


@of_two
def take(x: Operand, indices: Operand, axis: int | None = None) -> Tensor:
    """numpy.take: `gather` under its NumPy name; without an axis, of the flattened x.

    >>> take(np.array([[1, 2], [3, 4]]), [3, 0])
    array([4, 1])
    """
    return gather(reshape(x, (-1,)), indices) if axis is None else gather(x, indices, axis)


@of_two
def gather_nd(x: Operand, indices: Operand, batch_dims: int = 0) -> Tensor:
    """Elements (or slices) of x at the index tuples along the last axis of indices, as ONNX GatherND.

    >>> gather_nd(np.array([[1, 2], [3, 4]]), [[0, 1], [1, 0]])
    array([2, 3])
    """
    return _gather_nd(x, as_indices(indices), batch_dims=batch_dims)


@of_two
def gather_elements(x: Operand, indices: Operand, axis: int = 0) -> Tensor:
    """out[i, j] = x[indices[i, j], j] for axis 0, and so on, as ONNX GatherElements.

    >>> gather_elements(np.array([[1, 2], [3, 4]]), [[1, 0]], axis=0)
    array([[3, 2]])
    """
    axis = normal_axis("gather_elements", axis, len(shape_of(x)))
    return _gather_elements(x, as_indices(indices), axis=axis)


@of_two
def take_along_axis(x: Operand, indices: Operand, axis: int) -> Tensor:
    """gather_elements with NumPy's broadcasting: axes of size 1 of either stretch, except `axis`.

    >>> take_along_axis(np.array([[3, 1], [4, 2]]), [[1]], axis=1)
    array([[1],
           [2]])
    """
    axis = normal_axis("take_along_axis", axis, len(shape_of(x)))
    indices = as_indices(indices)
    have, want = shape_of(x), shape_of(indices)
    if len(have) == len(want):
        pairs = list(enumerate(zip(have, want, strict=True)))
        if any(i != axis and a == 1 != b for i, (a, b) in pairs):
            x = broadcast_to(x, tuple(b if i != axis and a == 1 else a for i, (a, b) in pairs))
        if any(i != axis and b == 1 != a for i, (a, b) in pairs):
            indices = broadcast_to(indices, tuple(a if i != axis and b == 1 else b for i, (a, b) in pairs))
    return gather_elements(x, indices, axis)


__all__ = ["gather", "gather_elements", "gather_nd", "take", "take_along_axis"]
