"""Tensors made from nothing but their shape: iota and what is built on it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlx.errors import ShapeError
from rlx.ir.attr import Attr, dims, dtype_kind, integer, optional
from rlx.ir.dim import Dim
from rlx.ir.dtype import I64, DType
from rlx.ir.form import Form, Map
from rlx.ir.graph import Node
from rlx.ir.op import Op, Sample, declare
from rlx.ir.scalar import axes, convert
from rlx.ir.types import Shape, TensorType
from rlx.ops.rules import is_number, need_dtype
from rlx.ops.shape import flat_index


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


__all__: list[str] = []
