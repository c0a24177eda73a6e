"""The LSTM that multiplies bytes: ONNX Runtime's DynamicQuantizeLSTM.

Weights are levels with a scale for each gate. What is multiplied by them is quantised when it is known: all
of x before the first step, the hidden state of all sequences at every step. Sums of levels are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rlx.errors import DTypeError, TypeMismatchError
from rlx.ir.dim import Dim
from rlx.ir.dtype import F32, U8, DType
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Sample, declare, get_op
from rlx.ir.operand import Operand, Tensor, of_many
from rlx.ir.types import Shape, TensorType
from rlx.ops.array.shape import broadcast_to, reshape
from rlx.ops.math.contract import Axes
from rlx.ops.nn.recurrent import LstmCell, layer
from rlx.ops.nn.recurrent_base import EXTRAS, Arithmetic
from rlx.ops.quant.qlinear import check_bytes, contraction, shifted, signed_factor
from rlx.ops.quant.quantize import dynamic_quantize, to
from rlx.records import dataclass

SCALES = ("w_scale", "r_scale")
ZEROS = ("w_zero_point", "r_zero_point")


@dataclass(frozen=True, eq=False)
class Coded:
    """Levels [gates, k] of weights, with a scale and perhaps a zero point for each gate."""

    levels: Tensor
    scale: Tensor
    zero: Tensor


class ByteArithmetic(Arithmetic):
    """Products are those of levels; the rest is that of an LSTM."""

    def product(self, h: Tensor, r: Coded) -> Tensor:
        if not self.on_nodes:
            levels, scale, zero = get_op("dynamic_quantize").ref(h, dtype=U8)
            right = None if r.zero is None else r.zero[:, None]
            sums = shifted(levels, zero) @ shifted(r.levels, right).T
            return sums.astype(np.int32).astype(np.float32) * (scale * r.scale)
        levels, scale, zero = dynamic_quantize(h)
        right = None if r.zero is None else reshape(r.zero, (r.zero.shape[0], 1))
        sums = contraction(levels, r.levels, Axes((h.rank - 1,), (1,), (), ()), zero, right)
        return to(sums, F32) * (scale * r.scale)


@declare
class _dynamic_quantize_lstm(LstmCell):
    """An LSTM of bytes: w and r are levels, (w - w_zero_point) * w_scale are weights, and so for r.

    x as a whole and the state h at every step are rounded to u8 as by `dynamic_quantize`; products with
    levels are exact sums of integers, which are scaled afterwards. All else is f32.
    """

    name = "dynamic_quantize_lstm"
    sees_constants = True
    further = (*SCALES, *ZEROS, *EXTRAS)
    arithmetic = ByteArithmetic

    def number_type(self, given: Mapping[str, TensorType]) -> DType:
        missing = [name for name in SCALES if name not in given]
        if missing:
            raise TypeMismatchError(f"{self.name}: {missing[0]} is missing")
        check_bytes(self.name, given["w"], given["r"])
        for weight, zero in zip(("w", "r"), ZEROS, strict=True):
            if zero in given and given[zero].dtype is not given[weight].dtype:
                raise DTypeError(
                    f"{self.name}: {zero} {given[zero]} is not of the dtype of {weight} {given[weight]}"
                )
        kind = super().number_type({k: t for k, t in given.items() if k not in ("w", "r", *ZEROS)})
        if kind is not F32:
            raise DTypeError(f"{self.name}: x {given['x']} must be f32; cast it first")
        return kind

    def shapes(self, sides: int, x: Shape, hidden: Dim) -> dict[str, Shape]:
        plain = super().shapes(sides, x, hidden)
        return plain | dict.fromkeys((*SCALES, *ZEROS), plain["w"][:2])

    def matrix(self, name: str, given: Mapping[str, Tensor], part: Callable[[Tensor], Tensor]) -> Coded:
        zero = given.get(f"{name}_zero_point")
        return Coded(part(given[name]), part(given[f"{name}_scale"]), None if zero is None else part(zero))

    def prepared(self, given: Mapping[str, Node]) -> dict[str, Node | None]:
        """Signed levels, and zero points as numbers, none where all are 0: a loop does not see constants."""
        out: dict[str, Node | None] = {}
        for name, zero in zip(("w", "r"), ZEROS, strict=True):
            weight = given[name]
            out[name], point = signed_factor(weight, given.get(zero))
            out[zero] = None if point is None else broadcast_to(point, weight.shape[:2])
        return out

    def samples(self) -> list[Sample]:
        def coded(kind: str, sides: int, *zeros: tuple[int, int], width: int = 16) -> list[Arg]:
            """w, r, their scales, and zero points within bounds."""
            low, high = (-128, 127) if kind == "i8" else (0, 255)
            weights = [Arg(f"{kind}[{sides},{width},{k}]", low, high) for k in (3, width // 4)]
            scales = [Arg(f"f32[{sides},{width}]", 0.002, 0.01)] * 2
            return [*weights, *scales, *(Arg(f"{kind}[{sides},{width}]", *ends) for ends in zeros)]

        every = ("f32[2,32]", "f32[2,2,4]", "f32[2,2,4]", "f32[2,12]")
        return [
            self.one("f32[3,2,3]", *coded("i8", 1), grad=False, extras=SCALES),
            self.one(
                "f32[3,2,3]",
                *coded("i8", 1, (-9, 9)),
                "f32[1,32]",
                direction="reverse",
                grad=False,
                extras=(*SCALES, "w_zero_point", "bias"),
            ),
            self.one(
                "f32[3,2,3]",
                *coded("u8", 2, (120, 136), (120, 136)),
                *every,
                direction="bidirectional",
                grad=False,
                extras=self.further,
                lens=[3, 2],
            ),
            self.one("f32[2,1,3]", *coded("u8", 1), clip=0.3, input_forget=True, grad=False, extras=SCALES),
            self.one("f32[3,1,3]", *coded("i8", 1, width=68), grad=False, extras=SCALES),
            self.one("f32[0,2,3]", *coded("i8", 1), grad=False, extras=SCALES),
            self.one("f32[n,m,3]", *coded("i8", 1), grad=False, extras=SCALES),
        ]


@of_many
def dynamic_quantize_lstm(
    x: Operand,
    w: Operand,
    r: Operand,
    w_scale: Operand,
    r_scale: Operand,
    w_zero_point: Operand | None = None,
    r_zero_point: Operand | None = None,
    bias: Operand | None = None,
    lens: Operand | None = None,
    initial_h: Operand | None = None,
    initial_c: Operand | None = None,
    peephole: Operand | None = None,
    direction: str = "forward",
    activations: Sequence[str] | None = None,
    alpha: Sequence[float] = (),
    beta: Sequence[float] = (),
    clip: float | None = None,
    input_forget: bool = False,
    batch_first: bool = False,
) -> Tensor:
    """An LSTM whose weights are bytes (DynamicQuantizeLSTM of ONNX Runtime); results as for `lstm`.

    w and r are i8 or u8, [directions, gates, k] as in `lstm`; scales and zero points are [directions, gates].
    x as a whole, and at every step the hidden state of all sequences, are rounded to u8 as by
    `dynamic_quantize`, and levels are multiplied as integers. For the more exact result without
    these roundings, call `lstm` with `dequantize`d weights.

    >>> w, r = np.ones((1, 16, 3), np.int8), np.ones((1, 16, 4), np.int8)
    >>> scales = np.full((2, 1, 16), 0.01, np.float32)
    >>> y, h, c = dynamic_quantize_lstm(np.ones((2, 1, 3), np.float32), w, r, *scales)
    >>> y.shape, h.shape, c.shape
    ((2, 1, 1, 4), (1, 1, 4), (1, 1, 4))
    """
    given = {
        "w_scale": w_scale, "r_scale": r_scale, "w_zero_point": w_zero_point, "r_zero_point": r_zero_point,
        "bias": bias, "lens": lens, "initial_h": initial_h, "initial_c": initial_c, "peephole": peephole,
    }  # fmt: skip
    more = {"direction": direction, "activations": activations, "alpha": alpha, "beta": beta, "clip": clip}
    return layer(_dynamic_quantize_lstm, x, w, r, given, batch_first, input_forget=input_forget, **more)


__all__ = ["dynamic_quantize_lstm"]
