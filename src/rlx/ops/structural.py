"""Ops that hold a graph together: inputs, params, constants, states and results of multi-output ops."""

from __future__ import annotations

from rlx.errors import TypeMismatchError
from rlx.ir.attr import Attr, Blob, blob, boolean, integer, string
from rlx.ir.dtype import dtype
from rlx.ir.op import MultiOp, Op, Role, Sample, declare
from rlx.ir.types import TensorType, TupleType


def tensor_type(value: object) -> TensorType:
    """Attribute kind: a tensor type."""
    if not isinstance(value, TensorType):
        raise ValueError(f"needs a tensor type, got {value!r}")
    if any(isinstance(d, int) and d < 0 for d in value.shape):
        raise ValueError(f"needs sizes of at least 0, got {value}")
    return value


class _Leaf(Op):
    arity = 0

    def infer(self, *, name: str, type: TensorType, once: bool = False) -> TensorType:
        return type

    def samples(self) -> list[Sample]:
        return []


@declare
class input(_Leaf):
    """A named input of a graph; `once` inputs are read in the prologue of a stream."""

    name = "input"
    role = Role.INPUT
    attrs = {"name": Attr(string), "type": Attr(tensor_type), "once": Attr(boolean, False)}


@declare
class param(_Leaf):
    """A named parameter: shape and dtype are part of the program, the value is not."""

    name = "param"
    role = Role.PARAM
    attrs = {"name": Attr(string), "type": Attr(tensor_type)}


@declare
class state(_Leaf):
    """The value of a state when a run begins."""

    name = "state"
    role = Role.STATE
    attrs = {"name": Attr(string), "type": Attr(tensor_type)}


@declare
class constant(Op):
    """An array that is part of the program."""

    name = "constant"
    role = Role.CONSTANT
    arity = 0
    attrs = {"value": Attr(blob)}

    def infer(self, *, value: Blob) -> TensorType:
        return TensorType(dtype(value.array.dtype), value.array.shape)

    def samples(self) -> list[Sample]:
        return []


@declare
class result(Op):
    """Output `index` of an op with several results."""

    name = "result"
    role = Role.RESULT
    arity = 1
    attrs = {"index": Attr(integer)}

    def infer(self, source: TupleType, *, index: int) -> TensorType:
        if not isinstance(source, TupleType) or not 0 <= index < len(source.items):
            raise TypeMismatchError(f"result: {source} has no item {index}")
        return source.items[index]

    def samples(self) -> list[Sample]:
        return []


@declare
class tuple_(MultiOp):
    """Several values as one, so that an expansion can stand for an op with several results."""

    name = "tuple"
    role = Role.TUPLE

    def infer(self, *types: TensorType) -> TupleType:
        return TupleType(types)

    def samples(self) -> list[Sample]:
        return []
