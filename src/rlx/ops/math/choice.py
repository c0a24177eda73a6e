"""Drawing one of many: tokens from logits, perhaps only of the most likely ones."""

from __future__ import annotations

import numpy as np

from rlx.errors import OpAttributeError, ShapeError, TypeMismatchError
from rlx.ir.assume import require_at_least
from rlx.ir.attr import Attr, integer, optional, real
from rlx.ir.dim import known_le
from rlx.ir.dtype import F32, I64, U32
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Level, Op, Sample, declare, get_op
from rlx.ir.operand import Operand, Tensor, of_one
from rlx.ir.types import TensorType
from rlx.ops.array.gather import take_along_axis
from rlx.ops.array.shape import reshape
from rlx.ops.math.cumulative import cumsum
from rlx.ops.math.elementwise import cast, less, log, shift_right, where
from rlx.ops.math.random import random_bits
from rlx.ops.math.reduce import argmax
from rlx.ops.nn.blocks import softmax
from rlx.ops.rules import is_real_float, need_dtype, op_call


@declare
class _sample_tokens(Op):
    """One index along the last axis, drawn with probability softmax(logits / temperature).

    Of the `top_k` most likely ones, then of the fewest that together have at least the probability `top_p`.
    Drawn by adding Gumbel noise, -log(-log u), and taking the largest; temperature 0 takes the likeliest.
    """

    name = "sample_tokens"
    level = Level.HIR
    arity = 2
    selects = True
    attrs = {
        "temperature": Attr(real, 1.0),
        "top_k": Attr(optional(integer), None),
        "top_p": Attr(optional(real), None),
    }

    def infer(
        self,
        key: TensorType,
        logits: TensorType,
        *,
        temperature: float,
        top_k: int | None,
        top_p: float | None,
    ) -> TensorType:
        if key.dtype is not U32 or key.shape != (2,):
            raise TypeMismatchError(
                f"sample_tokens: a key is u32[2], got {key}; make one with rlx.ops.random_key(seed)"
            )
        need_dtype(self.name, logits, is_real_float)
        if logits.rank == 0:
            raise ShapeError(f"sample_tokens: logits {logits} have no axis to choose from")
        require_at_least(logits.shape[-1], 1, f"sample_tokens: logits {logits} have nothing to choose from")
        if not temperature >= 0:
            raise OpAttributeError(f"sample_tokens: temperature {temperature} must be 0 or more")
        if top_k is not None and (top_k < 1 or known_le(top_k, logits.shape[-1]) is False):
            raise OpAttributeError(f"sample_tokens: top_k is {top_k}; it must be 1 to {logits.shape[-1]}")
        if top_p is not None and not 0 < top_p <= 1:
            raise OpAttributeError(f"sample_tokens: top_p is {top_p}; it must be above 0 and at most 1")
        return TensorType(I64, logits.shape[:-1])

    def ref(
        self,
        key: np.ndarray,
        logits: np.ndarray,
        *,
        temperature: float,
        top_k: int | None,
        top_p: float | None,
    ) -> np.ndarray:
        x = logits.astype(np.float32)
        if temperature == 0:
            return np.asarray(np.argmax(x, -1))
        x = x * np.float32(1 / temperature)
        order = np.broadcast_to(np.arange(x.shape[-1]), x.shape)
        if top_k is not None or top_p is not None:
            order = np.argsort(-x, -1, kind="stable")[..., :top_k]
            x = np.take_along_axis(x, order, -1)
        if top_p is not None:
            p = np.exp(x - x[..., :1])
            before = np.cumsum(p, -1) - p
            x = np.where(before < np.float32(top_p) * p.sum(-1, keepdims=True), x, -np.inf)
        bits = np.asarray(get_op("random_bits").ref(key, shape=x.shape, dtype=U32, stream=0))
        u = ((bits >> np.uint32(8)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-24)
        best = np.argmax(x - np.log(-np.log(u)), -1)
        return np.asarray(np.take_along_axis(order, best[..., None], -1)[..., 0])

    def expand(
        self, key: Node, logits: Node, *, temperature: float, top_k: int | None, top_p: float | None
    ) -> Node:
        x = cast(logits, dtype=F32)
        made: Node
        if temperature == 0:
            made = argmax(x, axis=x.rank - 1)
            return made
        x = x * (1 / temperature)
        order = None
        if top_k is not None:
            x, order = op_call("top_k", x, keep=top_k)
        elif top_p is not None:
            x, order = op_call("sort", x, descending=True)
        if top_p is not None:
            p = softmax(x, axis=-1)
            x = where(less(cumsum(p, axis=-1, exclusive=True), top_p), x, -np.inf)
        u = (cast(shift_right(random_bits(key, x.shape), 8), dtype=F32) + 0.5) * 2.0**-24
        made = argmax(x - log(-log(u)), axis=x.rank - 1)
        if order is not None:
            at = reshape(made, (*made.shape, 1))
            made = reshape(take_along_axis(order, at, -1), made.shape)
        return made

    def samples(self) -> list[Sample]:
        key = Arg("u32[2]", 0, 2**32 - 1)

        def one(logits: str, **attrs: object) -> Sample:
            return Sample((key, Arg(logits, distinct=True)), attrs, grad=False)

        return [
            one("f32[17]"),
            one("f32[3,9]", temperature=0.5),
            one("f32[3,9]", temperature=0.0),
            one("f32[3,9]", top_k=4),
            one("f32[3,9]", top_p=0.6),
            one("f32[2,2,33]", top_k=5, top_p=0.8, temperature=1.7),
            one("f32[4,1]", top_k=1),
            one("f32[0,5]", top_p=0.5),
            one("f32[n,m]", top_p=0.9),
            one("bf16[3,9]", top_k=3),
        ]


@of_one
def sample_tokens(
    key: Operand,
    logits: Operand,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Tensor:
    """Indices along the last axis of logits, drawn by softmax(logits / temperature).

    `top_k` keeps the k most likely, then `top_p` the fewest that together have at least that probability; a
    temperature of 0 takes the most likely one.

    >>> from rlx.ops.math.random import random_key
    >>> sample_tokens(random_key(0), np.array([[0.0, 9.0, 1.0]]), top_k=1)
    array([1])
    """
    return _sample_tokens(key, logits, temperature=temperature, top_k=top_k, top_p=top_p)


__all__ = ["sample_tokens"]
