"""Blocks of networks: linear, softmax, embedding, swiglu, dropout.

All are HIR: they expand to primitives, from which gradient and batching follow. Norms are in `norm`,
attention and rotary positions in `attention`, losses in `loss`.
"""

from __future__ import annotations

import numpy as np

from rlx.errors import OpAttributeError, ShapeError, TypeMismatchError
from rlx.ir.assume import require_equal
from rlx.ir.attr import Attr, boolean, integer, real
from rlx.ir.dim import Dim
from rlx.ir.dtype import F32, I64
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Level, Op, Sample, declare
from rlx.ir.operand import Operand, Tensor, of_one, of_two
from rlx.ir.types import TensorType
from rlx.ops.array.addressing import OutOfRangeError, as_indices
from rlx.ops.array.gather import gather
from rlx.ops.math.contract import dot_general
from rlx.ops.math.elementwise import cast, exp, log, maximum, where
from rlx.ops.math.reduce import reduce_max, reduce_sum
from rlx.ops.math.stats import dim_value
from rlx.ops.rules import (
    broadcast_shapes,
    check_axes,
    expand_in_f32,
    in_f32,
    is_boolean,
    is_computable,
    is_half,
    is_integer,
    is_number,
    is_real_float,
    need_dtype,
    normal_axis,
    op_call,
    rank_of,
    require_stretch,
    same_dtype,
    widen,
)


def given(*operands: Operand | None) -> list[Operand]:
    """Optional trailing operands: those that are not None."""
    return [x for x in operands if x is not None]


# -- linear


@declare
class _linear(Op):
    """x @ w + bias over the last axis of x; w is [in, out], or [out, in] when `transposed`."""

    name = "linear"
    level = Level.HIR
    heavy = True
    attrs = {"transposed": Attr(boolean, False)}

    def infer(self, x: TensorType, w: TensorType, *bias: TensorType, transposed: bool) -> TensorType:
        if len(bias) > 1:
            raise TypeMismatchError(f"linear: takes x, w and perhaps a bias, got {2 + len(bias)} operands")
        for t in (x, w, *bias):
            need_dtype(self.name, t, is_number)
        d = same_dtype(self.name, (x, w, *bias))
        if x.rank == 0 or w.rank != 2:
            raise ShapeError(f"linear: x {x} needs an axis and w {w} needs two")
        inside, outside = w.shape[1 - (not transposed)], w.shape[0 if transposed else 1]
        require_equal(
            x.shape[-1], inside, lambda: f"linear: x {x} has {x.shape[-1]} features, w {w} takes {inside}"
        )
        if bias:
            stretched = broadcast_shapes(self.name, [bias[0].shape, (outside,)])
            if len(stretched) != 1 or stretched[0] != outside:
                raise ShapeError(f"linear: bias {bias[0]} is not [{outside}], the features that w {w} gives")
        return TensorType(d, (*x.shape[:-1], outside))

    def ref(self, x: np.ndarray, w: np.ndarray, *bias: np.ndarray, transposed: bool) -> np.ndarray:
        def meaning(x: np.ndarray, w: np.ndarray, *bias: np.ndarray) -> np.ndarray:
            y = np.matmul(x, w.T if transposed else w)
            return np.asarray(y + bias[0] if bias else y)

        return np.asarray(in_f32(meaning)(x, w, *bias))

    def expand(self, x: Node, w: Node, *bias: Node, transposed: bool) -> Node:
        wide = F32 if is_half(x.dtype) and bias else None  # the bias joins before the one rounding
        y = dot_general(x, w, ((x.rank - 1,), (1 if transposed else 0,)), out_dtype=wide)
        if bias:
            y = y + widen(bias[0])
        made: Node = y if wide is None else cast(y, dtype=x.dtype)
        return made

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg("f32[2,3]"), Arg("f32[3,4]"), Arg("f32[4]"))),
            Sample((Arg("f32[2,5,3]"), Arg("f32[4,3]"), Arg("f32[4]")), {"transposed": True}),
            Sample((Arg("f32[3]"), Arg("f32[3,4]"))),
            Sample((Arg("f32[2,3]"), Arg("f32[17,3]"), Arg("f32[1]")), {"transposed": True}),
            Sample((Arg("f32[0,3]"), Arg("f32[3,2]"), Arg("f32[2]")), grad=False),
            Sample((Arg("f32[2,0]"), Arg("f32[0,2]"), Arg("f32[2]")), grad=False),
            Sample((Arg("f32[1,n,7]"), Arg("f32[7,33]"), Arg("f32[33]")), grad=False),
            Sample((Arg("bf16[2,3]"), Arg("bf16[3,4]"), Arg("bf16[4]")), grad=False),
            Sample((Arg("f16[2,3]"), Arg("f16[3,4]")), grad=False),
            Sample((Arg("i32[2,3]", -9, 9), Arg("i32[3,4]", -9, 9), Arg("i32[4]", -9, 9)), grad=False),
        ]


@of_two
def linear(x: Operand, w: Operand, bias: Operand | None = None, transposed: bool = False) -> Tensor:
    """x @ w + bias, with w as [in, out]; `transposed` says that w is [out, in].

    >>> linear(np.ones((2, 3)), np.ones((3, 4)), np.ones(4)).tolist()[0]
    [4.0, 4.0, 4.0, 4.0]
    """
    return _linear(x, w, *given(bias), transposed=transposed)


# -- softmax


class _Softmax(Op):
    level = Level.HIR
    arity = 1
    attrs = {"axis": Attr(integer)}

    def infer(self, x: TensorType, *, axis: int, **attrs: object) -> TensorType:
        need_dtype(self.name, x, is_real_float)
        check_axes(self.name, (axis,), x.rank)
        return x

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg("f32[3,5]"),), {"axis": 1}),
            Sample((Arg("f32[4,3,2]", -40, 40),), {"axis": 1}, grad=False),
            Sample((Arg("f32[4,3,2]"),), {"axis": 0}),
            Sample((Arg("f32[1]"),), {"axis": 0}),
            Sample((Arg("f32[2,33]"),), {"axis": 1}),
            Sample((Arg("f32[2,0]"),), {"axis": 1}, grad=False),
            Sample((Arg("f32[0,2]"),), {"axis": 1}, grad=False),
            Sample((Arg("f32[n,m]"),), {"axis": 1}, grad=False),
            Sample((Arg("f32[9,7]", special=True),), {"axis": 1}, grad=False),
            Sample((Arg("f16[3,17]"),), {"axis": 1}, grad=False),
            Sample((Arg("bf16[3,17]"),), {"axis": 0}, grad=False),
        ]


def _softmax_ref(x: np.ndarray, *, axis: int, masked: bool) -> np.ndarray:
    with np.errstate(all="ignore"):
        e = np.exp(x - np.max(x, axis=axis, keepdims=True, initial=-np.inf))
        y = e / np.sum(e, axis=axis, keepdims=True)
    return np.where(np.all(x == -np.inf, axis=axis, keepdims=True), 0, y).astype(x.dtype) if masked else y


def _softmax_expand(x: Node, *, axis: int, masked: bool) -> Node:
    top = reduce_max(x, axes=(axis,), keepdims=True)
    if not masked:
        e = exp(x - top)
        return e / reduce_sum(e, axes=(axis,), keepdims=True)
    e = exp(x - maximum(top, float(np.finfo(x.dtype.np).min)))
    # the largest term of a row is exp(0), so a total under 1 means that all terms are 0
    return e / maximum(reduce_sum(e, axes=(axis,), keepdims=True), 1.0)


def softmax_beside(x: Node, sink: Node) -> Node:
    """The softmax along the last axis with one more term, which has its share and no place in the result.

    Rows of -inf give zeros, whatever the sink is: it never lets the maximum be -inf.
    """
    least = maximum(sink, float(np.finfo(x.dtype.np).min))
    top = maximum(reduce_max(x, axes=(x.rank - 1,), keepdims=True), least)
    e = exp(x - top)
    made: Node = e / (reduce_sum(e, axes=(x.rank - 1,), keepdims=True) + exp(least - top))
    return made


@declare
class _softmax(_Softmax):
    """exp(x) over its sum along an axis. With `masked`, a row of only -inf gives zeros in place of NaN."""

    name = "softmax"
    attrs = {**_Softmax.attrs, "masked": Attr(boolean, False)}
    ref = staticmethod(in_f32(_softmax_ref))
    expand = staticmethod(expand_in_f32(_softmax_expand))

    def vjp(self, g: Node, y: Node, x: Node, *, axis: int, masked: bool) -> list[Node]:
        return [y * (g - reduce_sum(g * y, axes=(axis,), keepdims=True))]

    def samples(self) -> list[Sample]:
        rows = np.array([[-np.inf, -np.inf], [1, -np.inf], [0.5, -0.5]], np.float32)
        return [
            *super().samples(),
            Sample((Arg("f32[3,5]"),), {"axis": 1, "masked": True}),
            Sample((rows,), {"axis": 1, "masked": True}, grad=False),
            Sample((rows.T.astype(np.float16),), {"axis": 0, "masked": True}, grad=False),
            Sample((Arg("f32[9,7]", special=True),), {"axis": 1, "masked": True}, grad=False),
        ]


@of_one
def softmax(x: Operand, axis: int = -1, masked: bool = False) -> Tensor:
    """exp(x) over its sum along an axis; with `masked`, rows of only -inf become zeros.

    >>> softmax(np.array([0.0, 0.0]))
    array([0.5, 0.5])
    """
    return _softmax(x, axis=normal_axis("softmax", axis, rank_of(x)), masked=masked)


def _log_softmax_ref(x: np.ndarray, *, axis: int) -> np.ndarray:
    apart = x - np.max(x, axis=axis, keepdims=True, initial=-np.inf)
    return np.asarray(apart - np.log(np.exp(apart).sum(axis, keepdims=True)))


def _log_softmax_expand(x: Node, *, axis: int) -> Node:
    apart = x - reduce_max(x, axes=(axis,), keepdims=True)
    made: Node = apart - log(reduce_sum(exp(apart), axes=(axis,), keepdims=True))
    return made


@declare
class _log_softmax(_Softmax):
    """Logarithm of softmax along an axis, without underflow."""

    name = "log_softmax"
    ref = staticmethod(in_f32(_log_softmax_ref))
    expand = staticmethod(expand_in_f32(_log_softmax_expand))

    def vjp(self, g: Node, y: Node, x: Node, *, axis: int) -> list[Node]:
        return [g - exp(y) * reduce_sum(g, axes=(axis,), keepdims=True)]


@of_one
def log_softmax(x: Operand, axis: int = -1) -> Tensor:
    """Logarithm of softmax along an axis.

    >>> log_softmax(np.array([1000.0, 0.0])).tolist()
    [0.0, -1000.0]
    """
    return _log_softmax(x, axis=normal_axis("log_softmax", axis, rank_of(x)))


# -- embedding


def refuse_negative(ids: Node, extent: Dim) -> Node:
    """Ids for a gather, which counts negative ones from the end: those are sent out of range instead."""
    if not ids.dtype.is_signed:
        return ids
    if ids.dtype is not I64:  # `extent` must be one of its values
        ids = cast(ids, dtype=I64)
    made: Node = where(ids < 0, extent if isinstance(extent, int) else dim_value(extent), ids)
    return made


@declare
class _embedding(Op):
    """Rows of a table at ids; an id that is negative or too large is an error when the program runs."""

    name = "embedding"
    level = Level.HIR
    arity = 2

    def infer(self, table: TensorType, ids: TensorType) -> TensorType:
        need_dtype(self.name, table, is_computable)
        need_dtype(self.name, ids, is_integer)
        if table.rank != 2:
            raise ShapeError(f"embedding: table {table} needs two axes, rows and features")
        return table.with_shape((*ids.shape, table.shape[1]))

    def ref(self, table: np.ndarray, ids: np.ndarray) -> np.ndarray:
        bad = (ids < 0) | (ids >= len(table))
        if bad.any():
            raise OutOfRangeError(
                f"embedding: id {int(ids[bad][0])} is out of range for a table of {len(table)} rows"
            )
        return np.asarray(table[ids])

    def expand(self, table: Node, ids: Node) -> Node:
        made: Node = gather(table, refuse_negative(ids, table.shape[0]), axis=0)
        return made

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg("f32[5,3]"), np.array([[0, 4], [2, 2]]))),
            Sample((Arg("f32[5,3]"), np.array([1, 0, 4], np.int32))),
            Sample((Arg("f32[33,1]"), np.array(32, np.uint8))),
            Sample((Arg("f32[200,2]"), np.array([100, 127], np.int8)), grad=False),
            Sample((Arg("f32[5,3]"), np.zeros((0, 2), np.int64)), grad=False),
            Sample((Arg("f32[n,2]"), Arg("i64[m,k]", 0, 2)), grad=False),
            Sample((Arg("bf16[5,7]"), np.array([3, 3])), grad=False),
        ]


def embedding(table: Operand, ids: Operand) -> Tensor:
    """Rows of a table [rows, features] at integer ids of any shape.

    >>> embedding(np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([1, 0, 1])).tolist()
    [[3.0, 4.0], [1.0, 2.0], [3.0, 4.0]]
    """
    return _embedding(table, as_indices(ids))


# -- swiglu and dropout


@declare
class _swiglu(Op):
    """silu(gate) * up, for two operands, or for the two halves of one operand's last axis."""

    name = "swiglu"
    level = Level.HIR

    def infer(self, gate: TensorType, *up: TensorType) -> TensorType:
        for t in (gate, *up):
            need_dtype(self.name, t, is_real_float)
        if up:
            shape = broadcast_shapes(self.name, [gate.shape, *(t.shape for t in up)])
            return TensorType(same_dtype(self.name, (gate, *up)), shape)
        if gate.rank == 0 or not isinstance(gate.shape[-1], int) or gate.shape[-1] % 2:
            raise ShapeError(
                f"swiglu: the last axis of {gate} cannot be split into two halves; "
                "give gate and up as two operands"
            )
        return gate.with_shape((*gate.shape[:-1], gate.shape[-1] // 2))

    def ref(self, gate: np.ndarray, *up: np.ndarray) -> np.ndarray:
        def meaning(gate: np.ndarray, *up: np.ndarray) -> np.ndarray:
            a, b = (gate, up[0]) if up else np.split(gate, 2, axis=-1)
            return np.asarray(a / (1 + np.exp(-a)) * b)

        return np.asarray(in_f32(meaning)(gate, *up))

    def expand(self, gate: Node, *up: Node) -> Node:
        if not up:
            half = gate.shape[-1] // 2
            low = [0] * (gate.rank - 1)
            sizes, steps = (*gate.shape[:-1], half), (1,) * gate.rank
            up = (op_call("slice", gate, starts=(*low, half), sizes=sizes, steps=steps),)
            gate = op_call("slice", gate, starts=(*low, 0), sizes=sizes, steps=steps)
        made: Node = expand_in_f32(lambda a, b: op_call("silu", a) * b)(gate, up[0])
        return made

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg("f32[2,6]"),)),
            Sample((Arg("f32[3,17]"), Arg("f32[3,17]"))),
            Sample((Arg("f32[2]"),)),
            Sample((Arg("f32[0,4]"),), grad=False),
            Sample((Arg("f32[n,8]"),), grad=False),
            Sample((Arg("f16[3,8]"),), grad=False),
            Sample((Arg("f32[24]", special=True), Arg("f32[24]")), grad=False),
        ]


def swiglu(gate: Operand, up: Operand | None = None) -> Tensor:
    """silu(gate) * up; without `up`, gate holds both as the halves of its last axis.

    >>> swiglu(np.array([0.0, 3.0]))
    array([0.])
    """
    return _swiglu(gate, *given(up))


@declare
class _dropout(Op):
    """Nothing without a mask (inference); with one, x / (1 - rate) where it is true and 0 elsewhere."""

    name = "dropout"
    level = Level.HIR
    attrs = {"rate": Attr(real, 0.5)}

    def infer(self, x: TensorType, *mask: TensorType, rate: float) -> TensorType:
        need_dtype(self.name, x, is_real_float)
        if not 0 <= rate < 1:
            raise OpAttributeError(f"dropout: rate {rate} is not in [0, 1)")
        for m in mask:
            need_dtype(self.name, m, is_boolean)
            require_stretch(m.shape, x.shape, f"dropout: mask {m} does not broadcast to x {x}")
        return x

    def ref(self, x: np.ndarray, *mask: np.ndarray, rate: float) -> np.ndarray:
        return in_f32(lambda x: np.where(mask[0], x / (1 - rate), 0).astype(x.dtype))(x) if mask else x

    def expand(self, x: Node, *mask: Node, rate: float) -> Node:
        made: Node = where(mask[0], x * (1 / (1 - rate)), 0.0) if mask else x
        return made

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg("f32[3,5]"),)),
            Sample((Arg("f32[3,5]"), Arg("bool[3,5]")), {"rate": 0.25}),
            Sample((Arg("f32[3,5]"), Arg("bool[5]"))),
            Sample((Arg("f32[0]"), Arg("bool[0]")), grad=False),
            Sample((Arg("f32[n]"), Arg("bool[n]")), {"rate": 0.0}, grad=False),
            Sample((Arg("f16[8]"), Arg("bool[8]")), grad=False),
        ]


@of_one
def dropout(x: Operand, rate: float = 0.5, mask: Operand | None = None) -> Tensor:
    """x in inference (no mask); in training, kept elements (where the mask is true) grow by 1 / (1 - rate).

    >>> dropout(np.array([1.0, 2.0]), 0.5, np.array([True, False]))
    array([2., 0.])
    """
    return _dropout(x, *given(mask), rate=rate)


__all__ = ["dropout", "embedding", "linear", "log_softmax", "softmax", "swiglu"]
