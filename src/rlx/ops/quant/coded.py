"""Matmuls of rows that are rounded to 8 bits with weights of 4, 6 or 8 bits: products of integers.

`coded_matmul` is `x @ dequantize_groups(...)` for who gives up some precision of x for speed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rlx.errors import DTypeError, ShapeError
from rlx.ir.assume import require_equal
from rlx.ir.attr import Attr, boolean, positive
from rlx.ir.dim import Dim
from rlx.ir.dtype import F32
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Op, Sample, declare
from rlx.ir.operand import Operand, Tensor, of_one
from rlx.ir.types import TensorType
from rlx.kernel.form import CodedContract, Contract, Form
from rlx.kernel.rounded import round_groups
from rlx.ops.array.shape import reshape
from rlx.ops.quant.groups import check_codes
from rlx.ops.rules import lift_all


@declare
class _coded_matmul(Op):
    """x @ ((codes - zero) * scale), where each group of a row of x is rounded to i8 with a scale of its own.

    Codes are [k, n], scales and zeros [ceil(k / group), n]; with leading axes, x has the same. The scale of a
    group of x is its largest size over 127, and numbers are rounded half to even; sizes below 2**-100 count
    as 0, and a row with an infinity or NaN gives NaN. Products of a group are summed in integers, exactly.
    Its sum, less the zero times the sum of the row's codes, is multiplied by the scale of x, then by that of
    the weights; groups are added in ascending order. Each of these steps is rounded to f32: bits are the same
    on every machine, and a row's do not depend on other rows.

    With minimums, codes are unsigned, and weights are codes * scale - minimum: the sum of a group times the
    scale of the weights, less the minimum times the sum of the row's codes, is multiplied by the scale of x.
    """

    name = "coded_matmul"
    heavy = True
    attrs = {"bits": Attr(positive), "group": Attr(positive), "minimums": Attr(boolean, False)}
    not_differentiable = "it rounds x, and is made of weights after gradients are"

    def infer(
        self, x: TensorType, codes: TensorType, *factors: TensorType, bits: int, group: int, minimums: bool
    ) -> TensorType:
        if bits not in (4, 6, 8):
            raise ShapeError(f"{self.name}: codes have 4, 6 or 8 bits, not {bits}")
        k, n = check_codes(self.name, codes, factors, group, minimums)
        if x.dtype is not F32 or x.rank < 1:
            raise DTypeError(f"{self.name}: x {x} is not a matrix of f32; cast it")
        told = f"{self.name}: x {x} and codes {codes} do not fit"
        require_equal(x.shape[-1], k, told)
        if codes.rank > 2:
            if x.rank != codes.rank:
                raise ShapeError(told)
            for found, wanted in zip(x.shape[:-2], codes.shape[:-2], strict=True):
                require_equal(found, wanted, told)
        return x.with_shape((*x.shape[:-1], n))

    def ref(
        self, x: np.ndarray, codes: np.ndarray, *factors: np.ndarray, bits: int, group: int, minimums: bool
    ) -> np.ndarray:
        *lead, k, n = codes.shape
        rows, scales = round_groups(x.astype(np.float32), group)
        groups = rows.shape[-2]
        padded = np.zeros((*lead, groups * group, n), np.int64)
        padded[..., :k, :] = codes
        weights, *zeros = (f.astype(np.float32) for f in factors)
        total = np.zeros((*x.shape[:-1], n), np.float32)
        for g in range(groups):
            row = rows[..., g, :].astype(np.int64)
            found = np.matmul(row, padded[..., g * group : (g + 1) * group, :]).astype(np.float32)
            sums = row.sum(-1, keepdims=True).astype(np.float32)
            if minimums:
                found = found * _line(weights, g) - _line(zeros[0], g) * sums
                total = total + found * scales[..., g, None]
                continue
            if zeros:
                found = found - _line(zeros[0], g) * sums
            total = total + found * scales[..., g, None] * _line(weights, g)
        return total

    def batch(self, flags: Sequence[bool], *operands: Node, **attrs: object) -> Node:
        if not any(flags[1:]) and operands[1].rank == 2:
            made: Node = self(*operands, **attrs)
            return made
        x, *weights = lift_all(flags, operands)
        if x.rank == weights[0].rank:
            made = self(x, *weights, **attrs)
            return made
        rows = math.prod(x.shape[1:-1])  # more rows of the same matrix
        made = self(reshape(x, (x.shape[0], rows, x.shape[-1])), *weights, **attrs)
        made = reshape(made, (*x.shape[:-1], made.shape[-1]))
        return made

    def lower(
        self, x: TensorType, codes: TensorType, *factors: TensorType, bits: int, group: int, minimums: bool
    ) -> Form:
        lead = codes.rank - 2
        batch = tuple((i, i) for i in range(lead))
        product = Contract(x.shape, codes.shape, batch, ((x.rank - 1, lead),), F32, F32)
        return CodedContract(product, bits, group, minimums)

    def cost(
        self, x: TensorType, codes: TensorType, *factors: TensorType, bits: int, group: int, minimums: bool
    ) -> Dim:
        return 2 * x.numel * codes.shape[-1]

    def samples(self) -> list[Sample]:
        def one(
            x: str, codes: str, *factors: str, bits: int = 4, group: int = 8, special: bool = False
        ) -> Sample:
            unsigned = codes.startswith("u8")
            low = 0 if unsigned else -(1 << (bits - 1))
            weights = [Arg(codes, low, low + (1 << bits) - 1), Arg(factors[0], 0.1, 1)]
            weights += [Arg(zero, -2, 2) for zero in factors[1:]]
            attrs = {"bits": bits, "group": group, "minimums": unsigned}
            return Sample((Arg(x, special=special), *weights), attrs, grad=False)

        tiny = np.array([[1e-35, -1e-36] * 8, [0.0] * 16, [2.5, -3.5, 127, 0.5] * 4], np.float32)
        flat = np.ones((16, 2), np.int8)
        return [
            one("f32[3,17]", "i8[17,5]", "f32[3,5]"),
            one("f32[3,17]", "i8[17,5]", "f32[3,5]", "f32[3,5]"),
            one("f32[2,64]", "i8[64,33]", "f16[2,33]", group=32),
            one("f32[40,64]", "i8[64,33]", "f16[2,33]", "f32[2,33]", group=32),
            one("f32[1,48]", "i8[48,7]", "f32[3,7]", bits=8, group=16),
            one("f32[n,40]", "i8[40,9]", "f32[1,9]", "f16[1,9]", bits=8, group=40),
            one("f32[3,37]", "i8[37,33]", "f16[3,33]", bits=6, group=16),
            one("f32[n,37]", "i8[37,5]", "f32[2,5]", "f32[2,5]", bits=6, group=32),
            one("f32[2,20]", "i8[20,4]", "f32[3,4]", bits=6),
            one("f32[5,40]", "u8[40,9]", "f32[3,9]", "f32[3,9]", group=16),
            one("f32[n,48]", "u8[48,33]", "f16[3,33]", "f16[3,33]", bits=8, group=16),
            one("f32[2,3,16]", "i8[16,4]", "f32[2,4]"),
            one("f32[16]", "i8[16,4]", "f32[2,4]"),
            one("f32[2,3,16]", "i8[2,16,4]", "f32[2,2,4]"),
            one("f32[0,16]", "i8[16,4]", "f32[2,4]"),
            one("f32[3,0]", "i8[0,4]", "f32[0,4]"),
            one("f32[3,16]", "i8[16,2]", "f32[2,2]", special=True),
            Sample((tiny, flat, np.ones((2, 2), np.float32)), {"bits": 8, "group": 8}, grad=False),
        ]


def _line(factors: np.ndarray, g: int) -> np.ndarray:
    """The factors of a group, for every row."""
    return factors[..., g : g + 1, :] if factors.ndim > 2 else factors[g]


@of_one
def coded_matmul(
    x: Operand,
    codes: Operand,
    scales: Operand,
    zeros: Operand | None = None,
    *,
    bits: int = 4,
    group: int = 32,
    minimums: bool = False,
) -> Tensor:
    """x @ ((codes - zeros) * scales), with x rounded to 8 bits: products are those of integers.

    Operands beside x, and attributes, are those of `dequantize_groups`. Each group of a row of x has a scale
    of its own.

    >>> x = np.array([[1.0, 0.5], [200, -50]], np.float32)
    >>> coded_matmul(x, np.array([[1], [2]], np.int8), np.array([[0.5]], np.float32), group=2).tolist()
    [[1.003937005996704], [49.60629653930664]]
    """
    factors = (scales,) if zeros is None else (scales, zeros)
    return _coded_matmul(x, codes, *factors, bits=bits, group=group, minimums=minimums)
