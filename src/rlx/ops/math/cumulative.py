"""Running sums, products, maxima and minima along an axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from rlx.ir.attr import Attr, boolean, integer
from rlx.ir.dim import Dim
from rlx.ir.dtype import I64
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Op, Sample, declare
from rlx.ir.operand import DTypeLike, Operand, Tensor, of_one
from rlx.ir.types import TensorType
from rlx.kernel.form import Cumulate, Form
from rlx.kernel.scalar import axes, load
from rlx.ops.array.gather import add_at
from rlx.ops.array.shape import broadcast_to, reshape
from rlx.ops.math.elementwise import cast, equal, logical_and, where
from rlx.ops.math.reduce import summable
from rlx.ops.rules import (
    Accepts,
    check_axes,
    in_f32,
    is_number,
    is_real,
    need_dtype,
    normal_axis,
    op_call,
    shape_of,
)


class Cumulation(Op):
    """Base: element i combines elements 0..i along an axis (from the end when `reverse`)."""

    arity = 1
    combine: ClassVar[str]
    accepts: Accepts

    def infer(self, x: TensorType, *, axis: int, **flags: bool) -> TensorType:
        need_dtype(self.name, x, type(self).accepts)
        check_axes(self.name, (axis,), x.rank)
        return x

    def batch(self, flags: Sequence[bool], x: Node, *, axis: int, **how: bool) -> Node:
        made: Node = self(x, axis=axis + 1, **how)
        return made

    def lower(self, x: TensorType, *, axis: int, **how: bool) -> Form:
        return Cumulate(x.shape, axis, self.combine, load(0, axes(x.rank), x.dtype), x.dtype, **how)

    def cost(self, x: TensorType, *, axis: int, **how: bool) -> Dim:
        return x.numel

    def samples(self) -> list[Sample]:
        flags = [key for key in self.attrs if key != "axis"]
        ways: list[dict[str, bool]] = [{}, *({key: True} for key in flags)]
        if len(flags) > 1:
            ways.append(dict.fromkeys(flags, True))
        out = [Sample((Arg("f32[3,5]", distinct=True),), {"axis": 1, **how}) for how in ways]
        out += [Sample((Arg("f32[4,2,3]", distinct=True),), {"axis": 0, **how}) for how in ways]
        return [
            *out,
            Sample((Arg("f32[1]"),), {"axis": 0}),
            Sample((Arg("f32[2,0]"),), {"axis": 1}, grad=False),
            Sample((Arg("f32[0,3]"),), {"axis": 1}, grad=False),
            Sample((Arg("f32[33]", distinct=True),), {"axis": 0}),
            Sample((Arg("f32[2,12]", special=True),), {"axis": 1}, grad=False),
            Sample((Arg("i32[7]", -3, 3),), {"axis": 0}, grad=False),
            Sample((Arg("f16[2,9]", -1, 1),), {"axis": 1}, grad=False),
            Sample((Arg("f32[n,m]"),), {"axis": 0}, grad=False),
        ]


def _shifted(total: np.ndarray, axis: int, first: object) -> np.ndarray:
    """Exclusive from inclusive: each element takes its predecessor's value, the first one the identity."""
    out = np.full_like(total, first)
    ahead, behind = [slice(None)] * total.ndim, [slice(None)] * total.ndim
    ahead[axis], behind[axis] = slice(1, None), slice(None, -1)
    out[tuple(ahead)] = total[tuple(behind)]
    return out


class _Running(Cumulation):
    """Sums and products, with ONNX's exclusive and reverse."""

    attrs = {"axis": Attr(integer), "exclusive": Attr(boolean, False), "reverse": Attr(boolean, False)}
    accepts = staticmethod(is_number)

    def ref(self, x: np.ndarray, *, axis: int, exclusive: bool, reverse: bool) -> np.ndarray:
        run, first = (np.cumsum, 0) if self.combine == "sum" else (np.cumprod, 1)

        def along(x: np.ndarray) -> np.ndarray:
            x = np.flip(x, axis) if reverse else x
            total = run(x, axis=axis, dtype=x.dtype)
            total = _shifted(total, axis, first) if exclusive else total
            return np.flip(total, axis) if reverse else total

        return np.asarray(in_f32(along)(x))


@declare
class _cumsum(_Running):
    """Running sum; half precision accumulates in f32."""

    name = "cumsum"
    combine = "sum"

    def vjp(self, g: Node, y: Node, x: Node, *, axis: int, exclusive: bool, reverse: bool) -> list[Node]:
        made: Node = _cumsum(g, axis=axis, exclusive=exclusive, reverse=not reverse)
        return [made]


@declare
class _cumprod(_Running):
    """Running product; half precision accumulates in f32."""

    name = "cumprod"
    combine = "prod"

    def vjp(self, g: Node, y: Node, x: Node, *, axis: int, exclusive: bool, reverse: bool) -> list[Node]:
        """The sum over later elements of g * y / x; where x is the first 0, of g * y without that factor.

        After the first 0 every product that holds x is 0, and so is its gradient.
        """

        def later(value: Node) -> Node:
            made: Node = _cumsum(value, axis=axis, exclusive=exclusive, reverse=not reverse)
            return made

        zero, one = (broadcast_to(g.graph.constant(np.full((), v, x.dtype.np)), x.shape) for v in (0, 1))
        is_zero = equal(x, zero)
        zeros_before = _cumsum(cast(is_zero, dtype=I64), axis=axis, exclusive=True, reverse=reverse)
        first_zero = logical_and(is_zero, equal(zeros_before, 0))
        without = _cumprod(where(first_zero, one, x), axis=axis, exclusive=exclusive, reverse=reverse)
        others = where(is_zero, zero, later(g * y) / where(is_zero, one, x))
        return [where(first_zero, later(g * without), others)]

    def samples(self) -> list[Sample]:
        zeros = np.array([[2, 0, 3, -1], [0, 1, 0, 2], [0, 0, 1, 1], [1, 2, 3, 0]], np.float32)
        ways = [{}, {"exclusive": True}, {"reverse": True}, {"exclusive": True, "reverse": True}]
        return [*super().samples(), *(Sample((zeros,), {"axis": 1, **how}) for how in ways)]


class _Extreme(Cumulation):
    """Running maxima and minima; NaN wins from where it is on."""

    attrs = {"axis": Attr(integer), "reverse": Attr(boolean, False)}
    accepts = staticmethod(is_real)

    def ref(self, x: np.ndarray, *, axis: int, reverse: bool) -> np.ndarray:
        run = np.maximum.accumulate if self.combine == "max" else np.minimum.accumulate

        def along(x: np.ndarray) -> np.ndarray:
            return np.flip(run(np.flip(x, axis), axis=axis), axis) if reverse else run(x, axis=axis)

        return np.asarray(in_f32(along)(x))

    def vjp(self, g: Node, y: Node, x: Node, *, axis: int, reverse: bool) -> list[Node]:
        """All of an element's gradient goes to the nearest place that holds its value."""
        place = op_call("iota", shape=x.shape, axis=axis)
        holds = equal(x, y)
        if reverse:
            end = op_call("dim_value", dim=x.shape[axis] - 1, dtype=I64)
            source = _cummin(where(holds, place, end), axis=axis, reverse=True)
        else:
            source = _cummax(where(holds, place, 0), axis=axis)
        return [add_at("scatter_elements", x, source, g, axis=axis)]


@declare
class _cummax(_Extreme):
    """Running maximum."""

    name = "cummax"
    combine = "max"


@declare
class _cummin(_Extreme):
    """Running minimum."""

    name = "cummin"
    combine = "min"


def _along(name: str, x: Operand, axis: int | None, **how: bool) -> Tensor:
    if axis is None:
        x, axis = reshape(x, (-1,)), 0
    return op_call(name, x, axis=normal_axis(name, axis, len(shape_of(x))), **how)


@of_one
def cumsum(
    x: Operand,
    axis: int | None = None,
    exclusive: bool = False,
    reverse: bool = False,
    dtype: DTypeLike | None = None,
) -> Tensor:
    """Running sum along an axis (of the flattened x by default), as numpy.cumsum.

    `exclusive` leaves out the element itself, `reverse` runs from the end. Integers and `dtype` as in `sum`.

    >>> cumsum(np.array([1, 2, 3])), cumsum(np.array([1, 2, 3]), exclusive=True, reverse=True)
    (array([1, 3, 6]), array([5, 3, 0]))
    """
    return _along("cumsum", summable(x, dtype), axis, exclusive=exclusive, reverse=reverse)


@of_one
def cumprod(
    x: Operand,
    axis: int | None = None,
    exclusive: bool = False,
    reverse: bool = False,
    dtype: DTypeLike | None = None,
) -> Tensor:
    """Running product along an axis (of the flattened x by default), as numpy.cumprod.

    Flags, integers and `dtype` as in `cumsum`.

    >>> cumprod(np.array([2, 3, 4]))
    array([ 2,  6, 24])
    """
    return _along("cumprod", summable(x, dtype), axis, exclusive=exclusive, reverse=reverse)


@of_one
def cummax(x: Operand, axis: int | None = None, reverse: bool = False) -> Tensor:
    """Running maximum along an axis (of the flattened x by default), as numpy.maximum.accumulate.

    >>> cummax(np.array([1, 3, 2]))
    array([1, 3, 3])
    """
    return _along("cummax", x, axis, reverse=reverse)


@of_one
def cummin(x: Operand, axis: int | None = None, reverse: bool = False) -> Tensor:
    """Running minimum along an axis (of the flattened x by default), as numpy.minimum.accumulate.

    >>> cummin(np.array([3, 1, 2]), reverse=True)
    array([1, 1, 2])
    """
    return _along("cummin", x, axis, reverse=reverse)


__all__ = ["cummax", "cummin", "cumprod", "cumsum"]
