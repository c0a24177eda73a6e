"""Recurrent layers with ONNX's meaning: rnn, gru, lstm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlx.errors import OpAttributeError
from rlx.ir.attr import Attr, boolean
from rlx.ir.op import Sample, declare
from rlx.ir.operand import Operand, Tensor, of_many
from rlx.ops.array.shape import concat, slice_axis, transpose
from rlx.ops.nn.recurrent_base import ACTIVATIONS, DIRECTIONS, EXTRAS, Arithmetic, Recurrent


@declare
class _rnn(Recurrent):
    """h = f(x W + h R + bias)."""

    name = "rnn"
    gates = 1
    defaults = ("tanh",)

    def cell(
        self,
        do: Arithmetic,
        x: Tensor,
        state: Sequence[Tensor],
        r: Tensor,
        inner: Tensor,
        peephole: Tensor,
        **attrs: object,
    ) -> list[Tensor]:
        return [do.gate(0, x + do.product(state[0], r))]

    def samples(self) -> list[Sample]:
        w, r, both = "f32[1,4,3]", "f32[1,4,4]", ("f32[2,4,3]", "f32[2,4,4]")
        out = [
            self.one("f32[3,2,3]", w, r),
            self.one(
                "f32[3,2,3]",
                w,
                r,
                "f32[1,8]",
                "f32[1,2,4]",
                extras=("bias", "initial_h"),
                direction="reverse",
            ),
            self.one("f32[3,2,3]", *both, direction="bidirectional", extras=("lens",), lens=[3, 1]),
            self.one("f32[0,2,3]", w, r, grad=False),
            self.one("f32[n,m,3]", w, r, grad=False),
            self.one("f16[3,1,3]", "f16[1,4,3]", "f16[1,4,4]", grad=False),
            self.one("f32[2,1,3]", w, r, clip=0.5, grad=False),
        ]
        return out + [self.one("f32[2,1,3]", w, r, activations=[name]) for name in ACTIVATIONS]


@declare
class _gru(Recurrent):
    """Gates z, r (update, reset) and the candidate n, in this order in the weights; h = (1 - z) n + z h.

    n = g(x W + (r h) R + biases), or n = g(x W + r (h R + bias of R) + bias of W) with `linear_before_reset`.
    """

    name = "gru"
    gates = 3
    defaults = ("sigmoid", "tanh")
    attrs = {**Recurrent.attrs, "linear_before_reset": Attr(boolean, False)}

    def split_bias(self, wb: Tensor, rb: Tensor, *, on_nodes: bool, **attrs: object) -> tuple[Tensor, Tensor]:
        if not attrs["linear_before_reset"]:
            return wb + rb, None
        hidden = rb.shape[0] // 3
        if on_nodes:
            inner = slice_axis(rb, 0, 2 * hidden, hidden)
            return wb + concat([slice_axis(rb, 0, 0, 2 * hidden), inner * 0.0]), inner
        return wb + np.concatenate([rb[: 2 * hidden], rb[2 * hidden :] * 0]), rb[2 * hidden :]

    def cell(
        self,
        do: Arithmetic,
        x: Tensor,
        state: Sequence[Tensor],
        r: Tensor,
        inner: Tensor,
        peephole: Tensor,
        **attrs: object,
    ) -> list[Tensor]:
        (h,) = state
        hidden = h.shape[-1]
        xz, xr, xn = do.gates(x, 3)
        if attrs["linear_before_reset"]:
            hz, hr, hn = do.gates(do.product(h, r), 3)
            hn = hn if inner is None else hn + inner
            z, reset = do.gate(0, xz + hz), do.gate(0, xr + hr)
            new = do.gate(1, xn + reset * hn)
        else:
            hz, hr = do.gates(do.product(h, do.rows(r, 0, 2 * hidden)), 2)
            z, reset = do.gate(0, xz + hz), do.gate(0, xr + hr)
            new = do.gate(1, xn + do.product(reset * h, do.rows(r, 2 * hidden, hidden)))
        return [new - z * new + z * h]

    def samples(self) -> list[Sample]:
        w, r, both = "f32[1,12,3]", "f32[1,12,4]", ("f32[2,12,3]", "f32[2,12,4]")
        full = ("f32[1,24]", "f32[1,2,4]")
        return [
            self.one("f32[3,2,3]", w, r),
            self.one("f32[3,2,3]", w, r, *full, extras=("bias", "initial_h")),
            self.one("f32[3,2,3]", w, r, *full, extras=("bias", "initial_h"), linear_before_reset=True),
            self.one("f32[3,2,3]", w, r, linear_before_reset=True, direction="reverse"),
            self.one("f32[3,2,3]", *both, direction="bidirectional", extras=("lens",), lens=[1, 3]),
            self.one("f32[2,1,3]", w, r, activations=["HardSigmoid", "Softsign"], alpha=[0.3], beta=[0.4]),
            self.one("f32[2,1,3]", w, r, clip=0.4, grad=False),
            self.one("f32[0,2,3]", w, r, grad=False),
            self.one("f32[n,m,3]", w, r, grad=False),
            self.one("bf16[2,1,3]", "bf16[1,12,3]", "bf16[1,12,4]", grad=False),
        ]


class LstmCell(Recurrent):
    """Gates i, o, f, c (input, output, forget, candidate), so ordered in weights; C = f C + i c, h = o h(C).

    Peepholes (of i, o, f) add C times a weight to the gates: the old C to i and f, the new C to o. With
    `input_forget` the forget gate is 1 - i.
    """

    gates = 4
    states = 2
    further: tuple[str, ...] = EXTRAS
    defaults = ("sigmoid", "tanh", "tanh")
    attrs = {**Recurrent.attrs, "input_forget": Attr(boolean, False)}

    def cell(
        self,
        do: Arithmetic,
        x: Tensor,
        state: Sequence[Tensor],
        r: Tensor,
        inner: Tensor,
        peephole: Tensor,
        **attrs: object,
    ) -> list[Tensor]:
        h, c = state
        i, o, f, new = do.gates(x + do.product(h, r), 4)
        pi, po, pf = (None, None, None) if peephole is None else do.gates(peephole, 3)
        i = do.gate(0, i if pi is None else i + pi * c)
        f = 1.0 - i if attrs["input_forget"] else do.gate(0, f if pf is None else f + pf * c)
        c = f * c + i * do.gate(1, new)
        o = do.gate(0, o if po is None else o + po * c)
        return [o * do.activate(2, c), c]


@declare
class _lstm(LstmCell):
    __doc__ = LstmCell.__doc__
    name = "lstm"

    def samples(self) -> list[Sample]:
        w, r, both = "f32[1,16,3]", "f32[1,16,4]", ("f32[2,16,3]", "f32[2,16,4]")
        first = ("f32[1,2,4]", "f32[1,2,4]")
        every = ("f32[2,32]", "f32[2,2,4]", "f32[2,2,4]", "f32[2,12]")
        return [
            self.one("f32[3,2,3]", w, r),
            self.one("f32[3,2,3]", w, r, "f32[1,32]", *first, extras=("bias", "initial_h", "initial_c")),
            self.one("f32[3,2,3]", w, r, "f32[1,12]", extras=("peephole",), direction="reverse"),
            self.one("f32[3,2,3]", *both, *every, direction="bidirectional", extras=EXTRAS, lens=[3, 2]),
            self.one("f32[3,2,3]", w, r, input_forget=True),
            self.one(
                "f32[2,1,3]", w, r, activations=["HardSigmoid", "ScaledTanh", "Elu"], alpha=[0.3, 1.5, 0.7]
            ),
            self.one("f32[2,1,3]", w, r, clip=0.3, grad=False),
            self.one("f32[1,1,17]", "f32[1,4,17]", "f32[1,4,1]"),
            self.one("f32[0,2,3]", w, r, grad=False),
            self.one("f32[n,m,3]", w, r, grad=False),
            self.one("f16[2,1,3]", "f16[1,16,3]", "f16[1,16,4]", grad=False),
        ]


# -- what users call


def layer(
    op: Any, x: Operand, w: Operand, r: Operand, given: Mapping[str, Any], batch_first: bool, **attrs: object
) -> Any:
    """Call a layer; `given` are its optional operands by name, None where absent."""
    used = {name: value for name, value in given.items() if value is not None}
    if batch_first:
        x = transpose(x, (1, 0, 2))
        used = {k: transpose(v, (1, 0, 2)) if k.startswith("initial") else v for k, v in used.items()}
    if attrs["direction"] not in DIRECTIONS:
        raise OpAttributeError(
            f"{op.name}: unknown direction {attrs['direction']!r}; use {', '.join(DIRECTIONS)}"
        )
    attrs = op.normal(len(DIRECTIONS[attrs["direction"]]), attrs)
    y, *ends = op(x, w, r, *used.values(), extras=tuple(used), **attrs)
    if batch_first:
        y = transpose(y, (2, 0, 1, 3))
        ends = [transpose(e, (1, 0, 2)) for e in ends]
    return (y, *ends)


@of_many
def rnn(
    x: Operand,
    w: Operand,
    r: Operand,
    bias: Operand | None = None,
    lens: Operand | None = None,
    initial_h: Operand | None = None,
    direction: str = "forward",
    activations: Sequence[str] | None = None,
    alpha: Sequence[float] = (),
    beta: Sequence[float] = (),
    clip: float | None = None,
    batch_first: bool = False,
) -> Tensor:
    """ONNX's RNN: all h [steps, directions, batch, hidden] and the last ones [directions, batch, hidden].

    x [steps, batch, inputs], w [directions, hidden, inputs], r [directions, hidden, hidden], bias
    [directions, 2 * hidden], lens [batch] (steps after the end of a sequence give 0). `batch_first` is
    ONNX's layout=1.

    >>> y, last = rnn(np.ones((2, 1, 3)), np.zeros((1, 4, 3)), np.zeros((1, 4, 4)))
    >>> y.shape, last.shape
    ((2, 1, 1, 4), (1, 1, 4))
    """
    given = {"bias": bias, "lens": lens, "initial_h": initial_h}
    more = {"direction": direction, "activations": activations, "alpha": alpha, "beta": beta, "clip": clip}
    return layer(_rnn, x, w, r, given, batch_first, **more)


@of_many
def gru(
    x: Operand,
    w: Operand,
    r: Operand,
    bias: Operand | None = None,
    lens: Operand | None = None,
    initial_h: Operand | None = None,
    direction: str = "forward",
    activations: Sequence[str] | None = None,
    alpha: Sequence[float] = (),
    beta: Sequence[float] = (),
    clip: float | None = None,
    linear_before_reset: bool = False,
    batch_first: bool = False,
) -> Tensor:
    """ONNX's GRU, operands and results as for `rnn`, with three gates (z, r, h) in w, r and bias.

    >>> y, last = gru(np.ones((2, 1, 3)), np.zeros((1, 12, 3)), np.zeros((1, 12, 4)))
    >>> y.shape, last.shape
    ((2, 1, 1, 4), (1, 1, 4))
    """
    given = {"bias": bias, "lens": lens, "initial_h": initial_h}
    more = {"direction": direction, "activations": activations, "alpha": alpha, "beta": beta, "clip": clip}
    return layer(_gru, x, w, r, given, batch_first, linear_before_reset=linear_before_reset, **more)


@of_many
def lstm(
    x: Operand,
    w: Operand,
    r: Operand,
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
    """ONNX's LSTM, operands as for `rnn`, with four gates (i, o, f, c); returns all h, the last h and c.

    >>> y, h, c = lstm(np.ones((2, 1, 3)), np.zeros((1, 16, 3)), np.zeros((1, 16, 4)))
    >>> y.shape, h.shape, c.shape
    ((2, 1, 1, 4), (1, 1, 4), (1, 1, 4))
    """
    given = {
        "bias": bias, "lens": lens, "initial_h": initial_h, "initial_c": initial_c, "peephole": peephole,
    }  # fmt: skip
    more = {"direction": direction, "activations": activations, "alpha": alpha, "beta": beta, "clip": clip}
    return layer(_lstm, x, w, r, given, batch_first, input_forget=input_forget, **more)


__all__ = ["gru", "lstm", "rnn"]
