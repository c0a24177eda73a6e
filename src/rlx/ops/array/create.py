"""Tensors from a shape alone: iota and what is built on it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rlx.errors import OpAttributeError, ShapeError
from rlx.ir.attr import Attr, AttrValue, dims, dtype_kind, integer, optional
from rlx.ir.build import graph_of
from rlx.ir.dim import Dim, Expr, ceildiv, dim_max
from rlx.ir.dtype import F32, F64, I64, DType
from rlx.ir.dtype import dtype as as_dtype
from rlx.ir.graph import Node
from rlx.ir.op import Op, Sample, declare
from rlx.ir.operand import DTypeLike, Operand, Sizes, Tensor, of_one
from rlx.ir.types import Shape, TensorType
from rlx.kernel.form import Form, Map
from rlx.kernel.scalar import axes, convert
from rlx.ops.array.shape import broadcast_to, flat_index
from rlx.ops.math.elementwise import cast as _cast
from rlx.ops.math.elementwise import equal, where
from rlx.ops.rules import is_number, need_dtype, normal_axis, op_call


@declare
class _iota(Op):
    """The position along an axis, or (axis None) in row-major order, as a tensor."""

    name = "iota"
    arity = 0
    not_differentiable = "positions depend on no value"
    attrs = {"shape": Attr(dims), "axis": Attr(optional(integer), None), "dtype": Attr(dtype_kind, I64)}

    def infer(self, *, shape: Shape, axis: int | None, dtype: DType) -> TensorType:
        out = TensorType(dtype, shape)
        need_dtype(self.name, out, is_number)
        if axis is not None and not 0 <= axis < len(shape):
            raise ShapeError(f"iota: axis {axis} is out of range for {out}")
        return out

    def ref(self, *, shape: Sequence[int], axis: int | None, dtype: DType) -> np.ndarray:
        if axis is None:
            return np.arange(int(np.prod(shape, dtype=np.int64))).reshape(shape).astype(dtype.np)
        along = np.arange(shape[axis]).reshape([-1 if i == axis else 1 for i in range(len(shape))])
        return np.broadcast_to(along, tuple(shape)).astype(dtype.np)

    def batch(self, flags: Sequence[bool], *, shape: Shape, axis: int | None, dtype: DType) -> Node:
        made: Node = _iota(shape=shape, axis=axis, dtype=dtype)
        return made

    def lower(self, *, shape: Shape, axis: int | None, dtype: DType) -> Form:
        at = axes(len(shape))
        return Map(shape, convert(flat_index(at, shape) if axis is None else at[axis], dtype))

    def cost(self, *, shape: Shape, axis: int | None, dtype: DType) -> Dim:
        return 0

    def samples(self) -> list[Sample]:
        return [
            Sample((), {"shape": (5,), "axis": 0}),
            Sample((), {"shape": (2, 3), "axis": 1, "dtype": "f32"}),
            Sample((), {"shape": (2, 3), "axis": 0, "dtype": "i32"}),
            Sample((), {"shape": (2, 3, 2)}),
            Sample((), {"shape": ()}),
            Sample((), {"shape": (0, 3), "axis": 1}),
            Sample((), {"shape": (17,), "axis": 0, "dtype": "bf16"}),
        ]


def iota(shape: Sizes, axis: int | None = None, dtype: DTypeLike = "i64") -> Tensor:
    """Positions along an axis, or in row-major order without one; sizes may be symbolic.

    Like all functions without operands it adds to the graph being built (`with g.building():`,
    or a traced function); outside of one it gives a NumPy array.

    >>> iota((2, 3), axis=1)
    array([[0, 1, 2],
           [0, 1, 2]])
    """
    shape = as_shape(shape)
    return _iota(
        shape=shape, axis=None if axis is None else normal_axis("iota", axis, len(shape)), dtype=dtype
    )


def as_shape(shape: Sizes) -> tuple[AttrValue, ...]:
    """A shape given as one size or as a sequence of them."""
    return tuple(shape) if isinstance(shape, (tuple, list, np.ndarray)) else (shape,)


def full(shape: Sizes, value: Operand, dtype: DTypeLike | None = None) -> Tensor:
    """One value everywhere; without a dtype a Python float is f32, an int i64.

    >>> full((2, 2), 7, "i32")
    array([[7, 7],
           [7, 7]], dtype=int32)
    """
    if dtype is None:
        own = value if isinstance(value, Node) else np.asarray(value)
        dtype = type(value) if isinstance(value, (bool, int, float, complex)) else own.dtype
    kind = as_dtype(dtype)
    scalar = _cast(value, dtype=kind) if isinstance(value, Node) else np.asarray(value).astype(kind.np)
    return broadcast_to(scalar, as_shape(shape))


def zeros(shape: Sizes, dtype: DTypeLike = "f32") -> Tensor:
    """Zeros of a shape.

    >>> zeros(3)
    array([0., 0., 0.], dtype=float32)
    """
    return full(shape, 0, dtype)


def ones(shape: Sizes, dtype: DTypeLike = "f32") -> Tensor:
    """Ones of a shape.

    >>> ones((1, 2), "i8")
    array([[1, 1]], dtype=int8)
    """
    return full(shape, 1, dtype)


@of_one
def full_like(x: Operand, value: object, dtype: DTypeLike | None = None) -> Tensor:
    """One value in the shape (and, unless given, the dtype) of x.

    >>> full_like(np.array([1, 2]), 9)
    array([9, 9])
    """
    x = x if isinstance(x, Node) else np.asarray(x)
    kind = as_dtype(x.dtype if dtype is None else dtype)
    scalar = np.asarray(value).astype(kind.np)
    graph = graph_of((x,))
    return broadcast_to(scalar if graph is None else graph.constant(scalar), x.shape)


@of_one
def zeros_like(x: Operand, dtype: DTypeLike | None = None) -> Tensor:
    """Zeros in the shape and dtype of x.

    >>> zeros_like(np.array([1.5, 2.5]))
    array([0., 0.])
    """
    return full_like(x, 0, dtype)


@of_one
def ones_like(x: Operand, dtype: DTypeLike | None = None) -> Tensor:
    """Ones in the shape and dtype of x.

    >>> ones_like(np.array([1.5, 2.5]))
    array([1., 1.])
    """
    return full_like(x, 1, dtype)


def arange(
    start: Dim | float, stop: Dim | float | None = None, step: Dim | float = 1, dtype: DTypeLike | None = None
) -> Tensor:
    """start, start + step, ... before stop, as numpy.arange; whole numbers are i64, others f32.

    start and stop may be symbolic sizes.

    >>> arange(2, 10, 3), arange(0.0, 1.0, 0.25)
    (array([2, 5, 8]), array([0.  , 0.25, 0.5 , 0.75], dtype=float32))
    """
    first, end = (0, start) if stop is None else (start, stop)
    if isinstance(step, Expr) or step == 0:
        raise OpAttributeError(f"arange: the step must be a number that is not 0, got {step}")
    sizes = [v for v in (first, end, step) if isinstance(v, (int, np.integer, Expr))]
    if len(sizes) < 3:
        count = max(math.ceil((float(end) - float(first)) / step), 0)
        counted = _iota(shape=(count,), axis=0, dtype=F64) * step + first
        return _cast(counted, dtype=as_dtype(F32 if dtype is None else dtype))
    low, high = sizes[:2]
    distance = high - low if step > 0 else low - high
    place = _iota(shape=(dim_max(ceildiv(distance, abs(int(step))), 0),), axis=0)
    offset = op_call("dim_value", dim=low, dtype=I64) if isinstance(low, Expr) else np.int64(low)
    return _cast(place * np.int64(step) + offset, dtype=as_dtype(I64 if dtype is None else dtype))


def linspace(
    start: float, stop: float, num: Dim = 50, endpoint: bool = True, dtype: DTypeLike = "f32"
) -> Tensor:
    """`num` evenly spaced numbers from start to stop, as numpy.linspace; num may be a symbolic size.

    >>> linspace(0, 1, 5)
    array([0.  , 0.25, 0.5 , 0.75, 1.  ], dtype=float32)
    """
    place = _iota(shape=(num,), axis=0, dtype=F64)
    steps = dim_max(num - 1 if endpoint else num, 1)
    last = op_call("dim_value", dim=steps, dtype=F64)
    spaced = place * ((stop - start) / last) + float(start)
    return _cast(where(equal(place, last), float(stop), spaced) if endpoint else spaced, dtype=dtype)


def eye(n: Dim, m: Dim | None = None, k: int = 0, dtype: DTypeLike = "f32") -> Tensor:
    """Ones on the k-th diagonal, zeros elsewhere, as numpy.eye.

    >>> eye(2, 3, 1, "i32")
    array([[0, 1, 0],
           [0, 0, 1]], dtype=int32)
    """
    shape = (n, n if m is None else m)
    return _cast(equal(_iota(shape=shape, axis=0) + np.int64(k), _iota(shape=shape, axis=1)), dtype=dtype)


__all__ = [
    "arange", "eye", "full", "full_like", "iota", "linspace", "ones", "ones_like", "zeros", "zeros_like",
]  # fmt: skip
