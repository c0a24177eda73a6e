"""Products of quantised tensors: 8-bit factors, sums in i32, one rescaling at the end.

Zero points do not touch the factors: sum (a - za)(b - zb) is the product of the raw bytes with sums over rows
and columns taken off, and those of a weight are known when the program is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from rlx.errors import DTypeError, ShapeError, TypeMismatchError
from rlx.ir.attr import Attr, strings
from rlx.ir.dim import Dim
from rlx.ir.dtype import F32, I8, I32, U8, DType, dtype
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Arg, Level, Op, Role, Sample, declare, get_op
from rlx.ir.operand import Operand, Tensor, of_one, of_two
from rlx.ir.types import TensorType, tensor_types
from rlx.ops.array.shape import broadcast_to, reshape, transpose
from rlx.ops.math.bitcast import bitcast
from rlx.ops.math.contract import Axes, dot_general
from rlx.ops.math.elementwise import bitwise_xor, round
from rlx.ops.math.reduce import reduce_sum
from rlx.ops.math.stats import dim_value
from rlx.ops.nn.blocks import given
from rlx.ops.quant.quantize import to
from rlx.ops.rules import broadcast_shapes, need_dtype, require_stretch, shape_of
from rlx.records import dataclass

SIDES = ("left", "right")  # operands that have a zero point


def is_byte(d: DType) -> bool:
    return d.is_int and d.bits == 8


def check_bytes(name: str, *types: TensorType) -> None:
    """Factors are i8 or u8."""
    for t in types:
        if not is_byte(t.dtype):
            raise DTypeError(f"{name}: operand {t} is not of i8 or u8; quantise it first")


def check_zero(name: str, what: str, zero: TensorType, of: TensorType) -> None:
    if zero.dtype is not of.dtype:
        raise DTypeError(f"{name}: {what} zero point {zero} is not of the dtype of its operand {of}")


def check_scale(name: str, what: str, scale: TensorType) -> None:
    if scale.dtype is not F32:
        raise DTypeError(f"{name}: {what} scale {scale} must be f32")


@of_one
def as_rows(p: Operand) -> Tensor:
    """A parameter of the left factor: one number for each row."""
    return reshape(p, (shape_of(p)[0], 1)) if len(shape_of(p)) == 1 else p


# -- the i32 sums, on nodes


def known(p: Node | None) -> np.ndarray | None:
    """The value of a constant."""
    return None if p is None or p.op.role is not Role.CONSTANT else np.asarray(p.attrs["value"].array)


def shift_point(p: Node | None, by: int, graph: Graph) -> Node | None:
    """A zero point less `by`, in i32; None where it is known to be 0."""
    value = np.zeros((), np.int32) if p is None else known(p)
    if value is None:
        assert p is not None
        point: Node = to(p, I32)
        return point - by if by else point
    moved = value.astype(np.int32) - by
    return graph.constant(np.asarray(moved, np.int32)) if moved.any() else None


def signed_factor(b: Node, zero: Node | None) -> tuple[Node, Node | None]:
    """A right factor in i8: processors multiply unsigned bytes with signed ones."""
    if b.dtype is U8:
        return bitcast(bitwise_xor(b, 128), "i8"), shift_point(zero, 128, b.graph)
    return b, shift_point(zero, 0, b.graph)


def unsigned_factor(a: Node, zero: Node | None) -> tuple[Node, Node | None]:
    """A left factor in u8."""
    if a.dtype is I8:
        return bitcast(bitwise_xor(a, -128), "u8"), shift_point(zero, -128, a.graph)
    return a, shift_point(zero, 0, a.graph)


def take_off(out: Node, left: Node | None, right: Node | None, parts: Parts) -> Node:
    """sum (a - left)(b - right) from out = sum a b, all laid out like `out`."""
    if left is not None:
        out = out - left * parts.columns()
    if right is not None:
        rows = parts.rows()
        if left is not None:
            rows = rows - left * parts.depth()
        out = out - rows * right
    return out


class Parts(Protocol):
    """What zero points multiply: sums of b, sums of a, and the number of products of a sum."""

    def columns(self) -> Node: ...

    def rows(self) -> Node: ...

    def depth(self) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Meeting:
    """Two factors whose axes meet; parameters of either, laid out like their product."""

    a: Node
    b: Node
    at: Axes

    def beside(self, p: Node, left: bool) -> Node:
        """A parameter of a factor, which has one number or broadcasts to it with 1 along summed axes."""
        factor = self.a if left else self.b
        if p.tensor.numel == 1:
            made: Node = reshape(p, ())
            return made
        batch, summed = (
            (self.at.lhs_batch, self.at.lhs_contract) if left else (self.at.rhs_batch, self.at.rhs_contract)
        )
        lefts, rights = self.at.left(self.a.rank), self.at.right(self.b.rank)
        own = lefts if left else rights
        whole = reshape(p, (*(1,) * (factor.rank - p.rank), *p.shape))
        moved = transpose(whole, (*batch, *own, *summed))
        shape = moved.shape[: len(batch) + len(own)]
        gap = (1,) * len(rights if left else lefts)
        if left:
            made = reshape(moved, (*shape, *gap))
        else:
            made = reshape(moved, (*shape[: len(batch)], *gap, *shape[len(batch) :]))
        return made

    def columns(self) -> Node:
        total = reduce_sum(to(self.b, I32), axes=self.at.rhs_contract, keepdims=True)
        return self.beside(total, left=False)

    def rows(self) -> Node:
        total = reduce_sum(to(self.a, I32), axes=self.at.lhs_contract, keepdims=True)
        return self.beside(total, left=True)

    def depth(self) -> Tensor:
        count: Dim = 1
        for i in self.at.lhs_contract:
            count = count * self.a.shape[i]
        return dim_value(count, "i32")


def contraction(a: Node, b: Node, at: Axes, left: Node | None, right: Node | None) -> Node:
    """sum (a - left)(b - right) of bytes over the axes that meet, in i32.

    Zero points broadcast to their factors, with 1 along summed axes.
    """
    b, right = signed_factor(b, right)
    left = shift_point(left, 0, a.graph)
    meeting = Meeting(a, b, at)
    out: Node = dot_general(a, b, (at.lhs_contract, at.rhs_contract), (at.lhs_batch, at.rhs_batch), I32)
    left = None if left is None else meeting.beside(left, left=True)
    right = None if right is None else meeting.beside(right, left=False)
    return take_off(out, left, right, meeting)


def product(a: Node, b: Node, zeros: Mapping[str, Node]) -> Node:
    """(a - za) @ (b - zb) in i32, by the rules of matmul."""
    left, right = zeros.get("left"), zeros.get("right")
    n = b.rank - 2
    if n:
        lead = broadcast_shapes("matmul", [a.shape[:-2], b.shape[:-2]])
        n = len(lead)
        a, b = (x if x.shape[:-2] == lead else broadcast_to(x, (*lead, *x.shape[-2:])) for x in (a, b))
    both = tuple(range(n))
    at = Axes((a.rank - 1,), (n,), both, both)
    return contraction(a, b, at, None if left is None else as_rows(left), right)


def requantize(total: Node, scale: Node, zero: Node) -> Node:
    """Round total * scale to the dtype of the zero point."""
    return to(round(to(total, F32) * scale) + to(zero, F32), zero.dtype)


# -- the same on arrays


def shifted(x: np.ndarray, zero: Any) -> np.ndarray:
    """x less its zero point, exact."""
    return x.astype(np.int64) - (0 if zero is None else zero.astype(np.int64))


def rows_of(p: np.ndarray) -> np.ndarray:
    return p.reshape(-1, 1) if p.ndim == 1 else p


def product_ref(a: np.ndarray, b: np.ndarray, zeros: Mapping[str, np.ndarray]) -> np.ndarray:
    za = zeros.get("left")
    out = np.matmul(shifted(a, None if za is None else rows_of(za)), shifted(b, zeros.get("right")))
    return np.asarray(out, np.int32)


def requantize_ref(total: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
    level = np.rint(total.astype(np.float32) * scale) + zero.astype(np.float32)
    limits = dtype(zero.dtype)
    return np.asarray(np.clip(level, limits.min_value, limits.max_value), zero.dtype)


# -- matrix matmuls


def _product_type(name: str, a: TensorType, b: TensorType) -> TensorType:
    check_bytes(name, a, b)
    if a.rank < 2 or b.rank < 2:
        raise ShapeError(f"{name}: {a} @ {b}: both need two axes or more; reshape a vector to a matrix")
    (out,) = tensor_types(get_op("matmul").infer(a.with_dtype(I32), b.with_dtype(I32)))
    return out


def check_zeros(
    name: str, zeros: Sequence[str], types: Sequence[TensorType], factors: Sequence[TensorType]
) -> None:
    if list(zeros) != [s for s in SIDES if s in zeros] or len(zeros) != len(types):
        raise TypeMismatchError(f"{name}: zero points {tuple(zeros)} must be some of {SIDES}, in this order")
    for side, t in zip(zeros, types, strict=True):
        check_zero(name, f"the {side}", t, factors[SIDES.index(side)])


def check_fits(name: str, side: str, t: TensorType, out: TensorType) -> None:
    """A parameter of a factor broadcasts to the result; a vector runs along rows or along columns."""
    shape = (t.shape[0], 1) if side == "left" and t.rank == 1 else t.shape
    require_stretch(shape, out.shape, f"{name}: {t} of the {side} factor does not fit the result {out}")


@declare
class _matmul_integer(Op):
    """(a - za) @ (b - zb) of bytes, summed in i32; za is a number or one per row, zb one per column."""

    name = "matmul_integer"
    level = Level.HIR
    heavy = True
    sees_constants = True
    attrs = {"zeros": Attr(strings, ())}

    def infer(self, a: TensorType, b: TensorType, *types: TensorType, zeros: Sequence[str]) -> TensorType:
        out = _product_type(self.name, a, b)
        check_zeros(self.name, zeros, types, (a, b))
        for side, t in zip(zeros, types, strict=True):
            check_fits(self.name, side, t, out)
        return out

    def ref(self, a: np.ndarray, b: np.ndarray, *points: np.ndarray, zeros: Sequence[str]) -> np.ndarray:
        return product_ref(a, b, dict(zip(zeros, points, strict=True)))

    def expand(self, a: Node, b: Node, *points: Node, zeros: Sequence[str]) -> Node:
        return product(a, b, dict(zip(zeros, points, strict=True)))

    def samples(self) -> list[Sample]:
        def one(a: str, b: str, **zeros: str) -> Sample:
            args = [Arg(t, -100, 200 if t.startswith("u") else 100) for t in (a, b, *zeros.values())]
            return Sample(tuple(args), {"zeros": tuple(zeros)}, grad=False)

        return [
            one("u8[2,5]", "i8[5,3]"),
            one("i8[2,5]", "i8[5,3]", left="i8[]"),
            one("u8[2,5]", "u8[5,3]", left="u8[]", right="u8[]"),
            one("u8[2,5]", "i8[5,3]", left="u8[2]", right="i8[3]"),
            one("i8[4,2,17]", "u8[17,3]", right="u8[3]"),
            one("u8[2,1,3,4]", "i8[5,4,2]", left="u8[2,1,3,1]", right="i8[5,1,2]"),
            one("u8[0,3]", "i8[3,2]", left="u8[]"),
            one("u8[1,0]", "i8[0,2]", left="u8[]", right="i8[]"),
            one("u8[n,m]", "i8[m,2]", left="u8[]", right="i8[]"),
        ]


@of_two
def matmul_integer(
    a: Operand, b: Operand, a_zero_point: Operand | None = None, b_zero_point: Operand | None = None
) -> Tensor:
    """(a - a_zero_point) @ (b - b_zero_point) of i8 or u8 tensors, in i32 (ONNX MatMulInteger).

    >>> matmul_integer(np.array([[130, 129]], np.uint8), np.array([[1], [-1]], np.int8), np.uint8(128))
    array([[1]], dtype=int32)
    """
    points = {"left": a_zero_point, "right": b_zero_point}
    zeros = tuple(side for side, p in points.items() if p is not None)
    return _matmul_integer(a, b, *given(*points.values()), zeros=zeros)


@declare
class _qlinear_matmul(Op):
    """Quantised a @ b: each operand has a scale and a zero point, and so has the result."""

    name = "qlinear_matmul"
    level = Level.HIR
    arity = 8
    heavy = True
    sees_constants = True

    def infer(self, *types: TensorType) -> TensorType:
        a, sa, za, b, sb, zb, sy, zy = types
        out = _product_type(self.name, a, b)
        for what, t in (("the left", sa), ("the right", sb), ("the result's", sy)):
            check_scale(self.name, what, t)
        for side, t in (("left", sa), ("left", za), ("right", sb), ("right", zb)):
            check_fits(self.name, side, t, out)
        check_zeros(self.name, SIDES, (za, zb), (a, b))
        need_dtype(self.name, zy, is_byte)
        if sy.rank or zy.rank:
            raise ShapeError(f"{self.name}: the result's scale {sy} and zero point {zy} must be numbers")
        return out.with_dtype(zy.dtype)

    def ref(self, *arrays: np.ndarray) -> np.ndarray:
        a, sa, za, b, sb, zb, sy, zy = arrays
        return requantize_ref(product_ref(a, b, {"left": za, "right": zb}), rows_of(sa) * sb / sy, zy)

    def expand(self, *operands: Node) -> Node:
        a, sa, za, b, sb, zb, sy, zy = operands
        return requantize(product(a, b, {"left": za, "right": zb}), as_rows(sa) * sb / sy, zy)

    def samples(self) -> list[Sample]:
        def one(a: str, b: str, rows: str = "[]", columns: str = "[]", out: str = "i8") -> Sample:
            left, right = a.split("[")[0], b.split("[")[0]
            return Sample(
                (
                    Arg(a, -100, 100), Arg("f32" + rows, 0.01, 0.05), Arg(left + rows, -9, 9),
                    Arg(b, -100, 100), Arg("f32" + columns, 0.01, 0.05), Arg(right + columns, -9, 9),
                    Arg("f32[]", 0.2, 0.5), Arg(f"{out}[]", -9, 9),
                ),
                grad=False,
            )  # fmt: skip

        return [
            one("u8[2,5]", "i8[5,3]"),
            one("u8[2,5]", "u8[5,3]", out="u8"),
            one("i8[2,5]", "i8[5,3]", "[2]", "[3]"),
            one("i8[2,4,17]", "i8[17,3]", "[]", "[3]", "u8"),
            one("u8[0,3]", "i8[3,2]"),
            one("u8[n,3]", "i8[3,2]"),
        ]


@of_one
def qlinear_matmul(
    a: Operand,
    a_scale: Operand,
    a_zero_point: Operand,
    b: Operand,
    b_scale: Operand,
    b_zero_point: Operand,
    y_scale: Operand,
    y_zero_point: Operand,
) -> Tensor:
    """a @ b of quantised tensors, quantised (ONNX QLinearMatMul); the result has the dtype of y_zero_point.

    >>> one, zero = np.float32(1.0), np.int8(0)
    >>> ab = np.array([[2]], np.int8), np.array([[3]], np.int8)
    >>> qlinear_matmul(ab[0], one, zero, ab[1], one, zero, np.float32(2.0), zero)
    array([[3]], dtype=int8)
    """
    return _qlinear_matmul(a, a_scale, a_zero_point, b, b_scale, b_zero_point, y_scale, y_zero_point)


__all__ = ["matmul_integer", "qlinear_matmul"]
