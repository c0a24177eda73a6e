"""Products whose matrix is chosen for each row: the layers of mixtures of experts.

Only chosen matrices are read. `expert_matmul` takes floating-point matrices [experts, out, in]; those of 4 or
8 bits are codes with a factor for each group along `in`, in the order of memory that the kernel reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlx.errors import DTypeError, ShapeError
from rlx.ir.assume import require_equal
from rlx.ir.attr import Attr, one_of, positive
from rlx.ir.dim import Dim
from rlx.ir.dtype import BF16, F16, F32, F64, I8, I64, U8
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Op, Sample, declare
from rlx.ir.operand import Operand, Tensor, of_one
from rlx.ir.types import TensorType
from rlx.kernel.form import Form, Template
from rlx.kernel.nibbles import RUN, UNIT, unpacked
from rlx.ops.array.addressing import OutOfRangeError, as_indices
from rlx.ops.array.shape import broadcast_to, reshape, transpose
from rlx.ops.math.contract import dot_general
from rlx.ops.math.elementwise import cast, equal, where
from rlx.ops.nn.paged import batched_places, folded
from rlx.ops.rules import (
    is_integer,
    is_real_float,
    lift,
    need_dtype,
    op_call,
    shape_of,
    widen,
)

CODINGS = ("i8", "i4", "e2m1")


def _rows(name: str, x: TensorType, choice: TensorType, weights: TensorType) -> None:
    """Refuse operands that do not belong together."""
    need_dtype(name, x, is_real_float)
    need_dtype(name, choice, is_integer)
    for what, t, shape in (
        ("x", x, "tokens, chosen, in"),
        ("choice", choice, "tokens, chosen"),
        ("weights", weights, "experts, out, in"),
    ):
        if t.rank != shape.count(",") + 1:
            raise ShapeError(f"{name}: {what} {t} is not [{shape}]")
    for axis in range(2):
        told = f"{name}: choice {choice} needs one number for each row of x {x}"
        require_equal(x.shape[axis], choice.shape[axis], told)


def _multiply(x: np.ndarray, choice: np.ndarray, weights: np.ndarray) -> np.ndarray:
    bad = (choice < 0) | (choice >= len(weights))
    if bad.any():
        told = f"expert {int(choice[bad][0])} is out of range: there are {len(weights)}"
        raise OutOfRangeError(f"expert_matmul: {told}")
    out = np.zeros((*x.shape[:2], weights.shape[1]), x.dtype)
    for e in np.unique(choice):
        rows = choice == e
        out[rows] = x[rows].astype(np.float64) @ weights[e].astype(np.float64).T
    return out


def _batched(op: Op, flags: Sequence[bool], operands: Sequence[Node], **attrs: object) -> Node:
    """Batches are more tokens; where they have matrices of their own, more experts."""
    size = next(o.shape[0] for flag, o in zip(flags, operands, strict=True) if flag)
    x, choice = (o if flag else lift(o, size) for flag, o in zip(flags[:2], operands[:2], strict=True))
    weights = list(operands[2:])
    if any(flags[2:]):
        own = [o if flag else lift(o, size) for flag, o in zip(flags[2:], weights, strict=True)]
        choice = batched_places(choice, own[0].shape[1], size)
        weights = [folded(o) for o in own]
    made: Node = op(folded(x), folded(choice), *weights, **attrs)
    return reshape(made, (*x.shape[:3], made.shape[2]))


@declare
class _expert_matmul(Op):
    """y[t, c] = weights[choice[t, c]] @ x[t, c]: each row is multiplied by the matrix that it chooses.

    x is [tokens, chosen, in], weights [experts, out, in]. A choice out of range is an error when the program
    runs. Every output is one sum along `in`, in an order that depends on its length alone, so a row's bits do
    not depend on other rows; matrices that nobody chooses are not read.
    """

    name = "expert_matmul"
    arity = 3
    heavy = True
    ref = staticmethod(_multiply)

    def infer(self, x: TensorType, choice: TensorType, weights: TensorType) -> TensorType:
        _rows(self.name, x, choice, weights)
        need_dtype(self.name, weights, is_real_float)
        if (x.dtype is F64) != (weights.dtype is F64):
            raise DTypeError(f"{self.name}: x {x} and weights {weights} must both be f64, or neither")
        told = f"{self.name}: x {x} and weights {weights} differ in the sums' length"
        require_equal(x.shape[2], weights.shape[2], told)
        return x.with_shape((*x.shape[:2], weights.shape[1]))

    def vjp(self, g: Node, y: Node, x: Node, choice: Node, weights: Node) -> list[Node | None]:
        by_x: Node = _expert_matmul(g, choice, transpose(weights, (0, 2, 1)))
        rows, experts = choice.shape[0] * choice.shape[1], weights.shape[0]
        number = op_call("iota", shape=(experts, 1, 1), axis=0, dtype=I64)
        own = equal(number, reshape(cast(choice, dtype=I64), (1, rows, 1)))
        wide = reshape(widen(g), (1, rows, g.shape[2]))
        apart = where(own, broadcast_to(wide, (experts, rows, g.shape[2])), 0.0)
        by_weights = dot_general(apart, reshape(widen(x), (rows, x.shape[2])), ((1,), (0,)), ((), ()))
        return [cast(by_x, dtype=x.dtype), None, cast(by_weights, dtype=weights.dtype)]

    def batch(self, flags: Sequence[bool], *operands: Node) -> Node:
        return _batched(self, flags, operands)

    def lower(self, x: TensorType, choice: TensorType, weights: TensorType) -> Form:
        return Template(self.name)

    def cost(self, x: TensorType, choice: TensorType, weights: TensorType) -> Dim:
        return 2 * x.numel * weights.shape[1]

    def samples(self) -> list[Sample]:
        def one(x: str, w: str, choice: object, grad: bool = True) -> Sample:
            given = choice if isinstance(choice, Arg) else np.asarray(choice)
            return Sample((Arg(x), given, Arg(w)), grad=grad)

        many = np.random.default_rng(0).integers(0, 3, (11, 2))
        return [
            one("f32[2,2,5]", "f32[4,3,5]", [[1, 3], [0, 1]]),
            one("f32[1,1,33]", "f32[2,9,33]", np.array([[1]], np.int32)),
            one("f32[11,2,40]", "f32[3,13,40]", many, grad=False),
            one("f64[3,2,7]", "f64[3,5,7]", many[:3]),
            one("f32[n,2,k]", "f32[3,m,k]", Arg("i64[n,2]", 0, 2), grad=False),
            one("f32[0,2,5]", "f32[4,3,5]", np.zeros((0, 2), np.int64), grad=False),
            one("f32[2,1,0]", "f32[4,3,0]", [[1], [2]], grad=False),
            one("f32[11,2,24]", "f16[3,6,24]", many, grad=False),
            one("f32[11,2,24]", "bf16[3,6,24]", many, grad=False),
            one("f16[11,2,24]", "f16[3,6,24]", many, grad=False),
            one("bf16[3,2,24]", "bf16[3,6,24]", many[:3], grad=False),
        ]


@declare
class _coded_expert_matmul(Op):
    """`expert_matmul` by matrices of numbers (code - zero) * scale, in f32.

    Codes are i8[experts, out, in] ("i8"), or two of four bits in a byte, u8[experts, out, in / 2]: "i4" from
    -8 to 7, "e2m1" twice the numbers of MXFP4. Scales and zeros are [experts, out, in / group].
    """

    name = "coded_expert_matmul"
    heavy = True
    attrs = {"coding": Attr(one_of(*CODINGS)), "group": Attr(positive)}
    not_differentiable = "it is made of weights after gradients are"

    def infer(
        self, x: TensorType, choice: TensorType, codes: TensorType, *factors: TensorType,
        coding: str, group: int,
    ) -> TensorType:  # fmt: skip
        _rows(self.name, x, choice, codes)
        whole = coding == "i8"
        if codes.dtype is not (I8 if whole else U8) or x.dtype is F64:
            raise DTypeError(f"{self.name}: codes {codes} of {coding} and x {x} do not fit")
        size = codes.shape[2] * (1 if whole else 2)
        require_equal(x.shape[2], size, f"{self.name}: x {x} and codes {codes} differ in the sums' length")
        if not isinstance(size, int) or size % (group if whole else max(group, RUN)) or group % UNIT:
            raise ShapeError(
                f"{self.name}: {size} codes in groups of {group}; groups are multiples of {UNIT}, and whole"
            )
        if len(factors) not in (1, 2):
            raise ShapeError(f"{self.name}: takes codes, scales and perhaps zero points")
        for t in factors:
            if t.dtype not in (F32, F16, BF16) or t.rank != 3:
                told = f"{self.name}: scales and zero points {t} of codes {codes}"
                raise DTypeError(f"{told} must be f32, f16 or bf16 [experts, out, in / group]")
            for found, want in zip(t.shape, (*codes.shape[:2], size // group), strict=True):
                require_equal(found, want, f"{self.name}: {t} has not one number for each group of {codes}")
        return x.with_shape((*x.shape[:2], codes.shape[1]))

    def ref(
        self, x: np.ndarray, choice: np.ndarray, codes: np.ndarray, *factors: np.ndarray,
        coding: str, group: int,
    ) -> np.ndarray:  # fmt: skip
        scale, *zero = (np.repeat(f, group, axis=-1).astype(np.float32) for f in factors)
        levels = (codes if coding == "i8" else unpacked(codes, coding)).astype(np.float32)
        numbers = (levels - zero[0] if zero else levels) * scale
        return _multiply(x, choice, numbers)

    def batch(self, flags: Sequence[bool], *operands: Node, **attrs: object) -> Node:
        return _batched(self, flags, operands, **attrs)

    def lower(
        self, x: TensorType, choice: TensorType, codes: TensorType, *factors: TensorType,
        coding: str, group: int,
    ) -> Form:  # fmt: skip
        return Template("expert_matmul", (("coding", coding), ("group", group)))

    def cost(
        self, x: TensorType, choice: TensorType, codes: TensorType, *factors: TensorType,
        coding: str, group: int,
    ) -> Dim:  # fmt: skip
        return 4 * x.numel * codes.shape[1]

    def samples(self) -> list[Sample]:
        many = np.random.default_rng(0).integers(0, 3, (11, 2))

        def one(
            coding: str, group: int, out: int, size: int, choice: np.ndarray,
            zeros: bool = False, kind: str = "f32", x: str = "f32",
        ) -> Sample:  # fmt: skip
            codes = f"i8[3,{out},{size}]" if coding == "i8" else f"u8[3,{out},{size // 2}]"
            least, most = (-128, 127) if coding == "i8" else (0, 255)
            factors = [Arg(f"{kind}[3,{out},{size // group}]", 0.1, 1)]
            factors += [Arg(f"f32[3,{out},{size // group}]", -2, 2)] if zeros else []
            rows = Arg(f"{x}[{len(choice)},{choice.shape[1]},{size}]")
            return Sample(
                (rows, choice, Arg(codes, least, most), *factors),
                {"coding": coding, "group": group},
                grad=False,
            )

        return [
            one("i4", 32, 9, 64, many),
            one("i4", 16, 4, 32, many[:2], zeros=True),
            one("i8", 32, 6, 96, many, kind="f16"),
            one("i8", 16, 5, 48, many[:1], zeros=True),
            one("e2m1", 32, 8, 64, many, kind="bf16"),
            one("e2m1", 64, 3, 128, many[:3]),
            one("i8", 16, 7, 16, many, x="bf16"),
        ]


@of_one
def expert_matmul(
    x: Operand, choice: Operand, weights: Operand, scales: Operand | None = None,
    zeros: Operand | None = None, *, coding: str = "", group: int = 32,
) -> Tensor:  # fmt: skip
    """Rows [tokens, chosen, in], each multiplied by the matrix of `weights` [experts, out, in] it chooses.

    `choice` [tokens, chosen] has the number of an expert for each row. x may be [tokens, in]: then all rows
    of a token are the same. The result is [tokens, chosen, out]. Matrices that nobody chooses are not read,
    and a row's bits do not depend on other rows. With a `coding` ("i8", "i4" or "e2m1") the weights are codes
    of numbers (code - zero) * scale, with scales and zeros [experts, out, in / group].

    >>> weights = np.arange(6.0).reshape(3, 1, 2)
    >>> expert_matmul(np.ones((2, 2)), [[0, 2], [1, 1]], weights).tolist()
    [[[1.0], [9.0]], [[5.0], [5.0]]]
    """
    at = as_indices(choice)
    shape = shape_of(x)
    if len(shape) == 2 and len(shape_of(at)) == 2:
        x = broadcast_to(reshape(x, (shape[0], 1, shape[1])), (shape[0], shape_of(at)[1], shape[1]))
    if not coding:
        return _expert_matmul(x, at, weights)
    factors = [] if scales is None else [scales] if zeros is None else [scales, zeros]
    return _coded_expert_matmul(x, at, weights, *factors, coding=coding, group=group)


__all__ = ["expert_matmul"]
