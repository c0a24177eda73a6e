"""Weights of 4, 6 or 8 bits in groups along k: each group of a column has a scale and perhaps a zero point
or a minimum.

`dequantize_groups` says what they mean. Where a contraction reads constant ones, a pass stores codes and
factors in the bytes of one storage (`rlx.kernel.panels.QuantLayout`), which the matmul reads. Factors that
are such matrices themselves, of codes of 8 bits, stay codes, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlx.errors import DTypeError, ShapeError
from rlx.ir.assume import require_equal
from rlx.ir.attr import Attr, boolean, positive
from rlx.ir.dim import Dim, ceildiv
from rlx.ir.dtype import F32, I8, U8
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Op, Sample, declare
from rlx.ir.operand import Operand, Tensor, of_one
from rlx.ir.types import TensorType
from rlx.kernel.form import Form, Map
from rlx.kernel.scalar import axes, call, convert, load
from rlx.ops.rules import lift_all


def check_codes(
    name: str, codes: TensorType, factors: Sequence[TensorType], group: int, minimums: bool
) -> tuple[Dim, Dim]:
    """k and n of codes [..., k, n] with factors [..., ceil(k / group), n]."""
    if len(factors) not in (1, 2) or len(factors) < 1 + minimums:
        second = "minimums" if minimums else "perhaps zero points"
        raise ShapeError(f"{name}: takes codes, scales and {second}")
    kind = U8 if minimums else I8
    if codes.dtype is not kind or codes.rank < 2:
        raise DTypeError(f"{name}: codes {codes} are not a matrix of {kind}")
    if group < 1:
        raise ShapeError(f"{name}: a group has at least one element, not {group}")
    *lead, k, n = codes.shape
    for t in factors:
        if not t.dtype.is_float or t.rank != codes.rank:
            raise DTypeError(f"{name}: {t} must be a float matrix of factors for each of {codes}")
        for found, wanted in zip(t.shape, (*lead, ceildiv(k, group), n), strict=True):
            require_equal(found, wanted, f"{name}: {t} has not one row for each group of {codes}")
    return k, n


@declare
class _dequantize_groups(Op):
    """f32 matrix (codes - zero) * scale, one scale (and zero) for each group of rows in a column.

    With minimums, codes are unsigned, and numbers are codes * scale - minimum.
    """

    name = "dequantize_groups"
    attrs = {"bits": Attr(positive), "group": Attr(positive), "minimums": Attr(boolean, False)}
    not_differentiable = "it is made of weights after gradients are"
    decodes = True

    def infer(
        self, codes: TensorType, *factors: TensorType, bits: int, group: int, minimums: bool
    ) -> TensorType:
        check_codes(self.name, codes, factors, group, minimums)
        return TensorType(F32, codes.shape)

    def ref(
        self, codes: np.ndarray, *factors: np.ndarray, bits: int, group: int, minimums: bool
    ) -> np.ndarray:
        k = codes.shape[-2]
        scale, *zero = (np.repeat(f, group, axis=-2)[..., :k, :].astype(np.float32) for f in factors)
        levels = codes.astype(np.float32)
        if minimums:
            return np.asarray(levels * scale - zero[0], np.float32)
        return np.asarray((levels - zero[0] if zero else levels) * scale, np.float32)

    def batch(self, flags: Sequence[bool], *operands: Node, **attrs: object) -> Node:
        made: Node = self(*lift_all(flags, operands), **attrs)
        return made

    def lower(self, codes: TensorType, *factors: TensorType, bits: int, group: int, minimums: bool) -> Form:
        *lead, k, n = axes(codes.rank)
        level = convert(load(0, (*lead, k, n), codes.dtype), F32)
        place = (*lead, k // group, n)
        scale, *second = (convert(load(1 + i, place, f.dtype), F32) for i, f in enumerate(factors))
        if minimums:
            return Map(codes.shape, call("sub", call("mul", level, scale), *second))
        return Map(codes.shape, call("mul", call("sub", level, *second) if second else level, scale))

    def cost(self, codes: TensorType, *factors: TensorType, bits: int, group: int, minimums: bool) -> Dim:
        return 2 * codes.numel

    def samples(self) -> list[Sample]:
        codes, scale, zero = Arg("i8[9,3]", -8, 7), Arg("f32[3,3]", 0.1, 1), Arg("f16[3,3]", -2, 2)
        attrs, unsigned, least = {"bits": 4, "group": 4}, Arg("u8[9,3]", 0, 15), Arg("f32[3,3]", -2, 2)
        return [
            Sample((codes, scale), attrs, grad=False),
            Sample((codes, scale, zero), attrs, grad=False),
            Sample((unsigned, scale, least), attrs | {"minimums": True}, grad=False),
        ]


@of_one
def dequantize_groups(
    codes: Operand,
    scales: Operand,
    zeros: Operand | None = None,
    *,
    bits: int = 4,
    group: int = 32,
    minimums: bool = False,
) -> Tensor:
    """(codes - zeros) * scales of a matrix [k, n] whose scales and zeros are [ceil(k / group), n].

    Codes of `bits` bits come as i8, centred at zero. With `minimums` they come as u8, from 0 on, and numbers
    are codes * scales - zeros. Factors may be what this function gives: codes with factors of their own.

    >>> dequantize_groups(np.array([[1], [2]], np.int8), np.array([[0.5]], np.float32), group=2).tolist()
    [[0.5], [1.0]]
    >>> codes, scale, least = np.array([[0], [15]], np.uint8), np.float32([[0.5]]), np.float32([[3]])
    >>> dequantize_groups(codes, scale, least, group=2, minimums=True).tolist()
    [[-3.0], [4.5]]
    """
    factors = (scales,) if zeros is None else (scales, zeros)
    return _dequantize_groups(codes, *factors, bits=bits, group=group, minimums=minimums)
