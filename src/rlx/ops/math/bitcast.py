"""The same bits under another dtype of the same width."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rlx.errors import DTypeError
from rlx.ir.attr import Attr, dtype_kind
from rlx.ir.dim import Dim
from rlx.ir.dtype import ALL_DTYPES, DType
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Op, Sample, declare
from rlx.ir.operand import DTypeLike, Operand, Tensor, of_one
from rlx.ir.types import TensorType
from rlx.kernel.form import Form, Map
from rlx.kernel.scalar import Scalar, call, load, primitive
from rlx.ops.rules import broadcast_index


def _viewed(to: DType) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: np.asarray(x).view(to.np)


for _dtype in ALL_DTYPES:  # one scalar primitive per target, so that its result type is known from its name
    primitive(f"bitcast_{_dtype}", 1, _viewed(_dtype), lambda source, to=_dtype: to)


def bits_as(value: Scalar, to: DType) -> Scalar:
    """The bits of a scalar expression as another dtype."""
    return value if value.dtype is to else call(f"bitcast_{to}", value)


@declare
class _bitcast(Op):
    """The same bits as another dtype with elements of the same width, as ONNX BitCast."""

    name = "bitcast"
    family = "cast"
    arity = 1
    attrs = {"dtype": Attr(dtype_kind)}
    not_differentiable = "bits have no gradient"

    def infer(self, x: TensorType, *, dtype: DType) -> TensorType:
        if x.dtype.bits != dtype.bits:
            raise DTypeError(
                f"bitcast: elements of {x} have {x.dtype.bits} bits, of {dtype} {dtype.bits}; both must agree"
            )
        return x.with_dtype(dtype)

    def ref(self, x: np.ndarray, *, dtype: DType) -> np.ndarray:
        return np.ascontiguousarray(x).view(dtype.np).reshape(x.shape)

    def batch(self, flags: Sequence[bool], x: Node, *, dtype: DType) -> Node:
        made: Node = _bitcast(x, dtype=dtype)
        return made

    def lower(self, x: TensorType, *, dtype: DType) -> Form:
        return Map(x.shape, bits_as(load(0, broadcast_index(x.shape, x.shape), x.dtype), dtype))

    def cost(self, x: TensorType, *, dtype: DType) -> Dim:
        return 0

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg("f32[3,17]", special=True),), {"dtype": "i32"}),
            Sample((Arg("i32[5]", -9, 9),), {"dtype": "u32"}),
            Sample((Arg("u16[4]", 0, 9),), {"dtype": "f16"}),
            Sample((Arg("f64[n]"),), {"dtype": "u64"}),
            Sample((Arg("bool[0]"),), {"dtype": "u8"}),
            Sample((Arg("f32[]"),), {"dtype": "f32"}),
        ]


@of_one
def bitcast(x: Operand, dtype: DTypeLike) -> Tensor:
    """The bits of x as another dtype of the same width, as ndarray.view.

    >>> hex(int(bitcast(np.array(1.0, np.float32), "u32")))
    '0x3f800000'
    """
    return _bitcast(x, dtype=dtype)


__all__ = ["bitcast", "bits_as"]
