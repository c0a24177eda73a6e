"""Attention over heads, and rotary positions.

Half precision computes in f32 and rounds once. A query with nothing to attend to gives zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.errors import DTypeError, OpAttributeError, ShapeError, TypeMismatchError
from rlx.ir.assume import require_equal, require_shape
from rlx.ir.attr import Attr, boolean, dim, ints, optional, real
from rlx.ir.dim import Dim, known_le
from rlx.ir.dtype import BF16, F32, F64, I64, convert
from rlx.ir.dtype import dtype as as_dtype
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Level, Op, Sample, declare
from rlx.ir.operand import DTypeLike, Operand, Tensor, of_one
from rlx.ir.types import TensorType
from rlx.ops.array.shape import concat, reshape, slice_axis
from rlx.ops.math.contract import dot_general
from rlx.ops.math.elementwise import cast, cos, mul, sin, tanh, where
from rlx.ops.math.stats import dim_value
from rlx.ops.nn.blocks import given, softmax, softmax_beside
from rlx.ops.rules import (
    expand_in_f32,
    in_f32,
    is_half,
    is_real_float,
    need_dtype,
    op_call,
    require_stretch,
    same_dtype,
    shape_of,
    widen,
)

UNBOUNDED = -1


def usual_scale(width: Dim) -> float:
    """What scores are multiplied with; without features they are 0 anyway.

    >>> usual_scale(16), usual_scale(0)
    (0.25, 1.0)
    """
    return 1 / math.sqrt(width) if width else 1.0


def _attention_ref(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *others: np.ndarray,
    causal: bool, window: tuple[int, int], scale: float | None, softcap: float, offset: int, sinks: bool,
) -> np.ndarray:  # fmt: skip
    *mask, sink = others if sinks else (*others, np.full(q.shape[1], -np.inf))
    group = q.shape[1] // max(k.shape[1], 1)
    wide_q, wide_k, wide_v = (
        t.astype(np.float64) for t in (q, np.repeat(k, group, 1), np.repeat(v, group, 1))
    )
    scores = np.matmul(wide_q, np.swapaxes(wide_k, 2, 3)) * (
        usual_scale(q.shape[3]) if scale is None else scale
    )
    if softcap:
        scores = np.tanh(scores / softcap) * softcap
    if mask:
        scores = np.where(mask[0], scores, -np.inf) if mask[0].dtype == bool else scores + mask[0]
    ahead = np.arange(k.shape[2]) - np.arange(q.shape[2])[:, None] - offset
    left, right = window
    hidden = (ahead > 0) & causal
    if left != UNBOUNDED:
        hidden |= ahead < -left
    if right != UNBOUNDED:
        hidden |= ahead > right
    scores[..., hidden] = -np.inf
    at_sink = sink.astype(np.float64)[:, None, None]
    top = np.maximum(np.max(scores, axis=-1, keepdims=True, initial=-np.inf), at_sink)
    top = np.where(top == -np.inf, 0, top)
    e = np.exp(scores - top)
    total = e.sum(-1, keepdims=True) + np.exp(at_sink - top)
    return np.asarray(np.matmul(e / np.where(total == 0, 1, total), wide_v), q.dtype)


def _positions_allowed(
    queries: Dim, keys: Dim, causal: bool, window: tuple[int, int], offset: Dim
) -> Node | None:
    """Which keys each query may see by position alone: bool [queries, keys], or None for all of them."""
    left, right = window
    if causal:
        right = 0 if right == UNBOUNDED else min(right, 0)
    if left == right == UNBOUNDED:
        return None
    at: Node = op_call("iota", shape=(queries, 1), axis=0, dtype=I64)
    if offset != 0:
        at = at + (offset if isinstance(offset, int) else dim_value(offset))
    key: Node = op_call("iota", shape=(1, keys), axis=1, dtype=I64)
    near = None if right == UNBOUNDED else key <= (at + right if right else at)
    far = None if left == UNBOUNDED else key >= at - left
    if near is None or far is None:
        return far if near is None else near
    return near & far


@declare
class _attention(Op):
    """softmax(q k^T * scale + mask) v over [batch, heads, seq, dim].

    Heads of k and v may be fewer: each serves a group of neighbouring heads of q. A boolean mask says what
    may be seen, another one is added to the scores; both broadcast to [batch, heads, queries, keys]. Query i
    stands at key position i + offset: `causal` hides later keys, `window` = (left, right) those further away
    than that (-1: no limit). `softcap` c turns scores into c * tanh(scores / c) before masks. With `sinks`,
    the last operand [heads] has a score for each head that takes its share of the softmax and gives no value.
    """

    name = "attention"
    level = Level.HIR
    heavy = True
    attrs = {
        "causal": Attr(boolean, False),
        "window": Attr(ints, (UNBOUNDED, UNBOUNDED)),
        "scale": Attr(optional(real), None),
        "softcap": Attr(real, 0.0),
        "offset": Attr(dim, 0),
        "sinks": Attr(boolean, False),
    }
    ref = staticmethod(in_f32(_attention_ref))

    def infer(
        self, *types: TensorType,
        causal: bool, window: tuple[int, ...], scale: float | None, softcap: float, offset: Dim, sinks: bool,
    ) -> TensorType:  # fmt: skip
        own, sink = (types[:-1], types[-1]) if sinks else (types, None)
        if len(own) not in (3, 4):
            raise TypeMismatchError(f"attention: takes q, k, v and perhaps a mask, got {len(own)} operands")
        if len(window) != 2 or min(window) < UNBOUNDED:
            raise OpAttributeError(
                f"attention: window {window} is not (left, right), each at least 0 or -1 for no limit"
            )
        if softcap < 0:
            raise OpAttributeError(f"attention: softcap {softcap} is negative; 0 means none")
        q, k, v = own[:3]
        for what, t in zip("qkv", (q, k, v), strict=True):
            need_dtype(self.name, t, is_real_float)
            if t.rank != 4:
                raise ShapeError(f"attention: {what} {t} is not [batch, heads, seq, dim]")
        same_dtype(self.name, (q, k, v))
        for i, what in ((0, "batch"), (1, "heads"), (2, "seq")):
            told = f"attention: k {k} and v {v} differ in {what}"
            require_equal(k.shape[i], v.shape[i], told)
        require_equal(q.shape[0], k.shape[0], f"attention: q {q} and k {k} differ in batch")
        require_equal(q.shape[3], k.shape[3], f"attention: q {q} and k {k} differ in dim")
        _group(q, k)
        if scale is None and not isinstance(q.shape[3], int):
            raise ShapeError(f"attention: the dim of q {q} is symbolic, so its scale is unknown; give scale=")
        scores = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        if sink is not None:
            if sink.dtype not in (q.dtype, F32):
                raise DTypeError(f"attention: sinks {sink} are not of the dtype of q {q}; cast them")
            told = f"attention: sinks {sink} need one number for each head of q {q}"
            require_shape(sink.shape, (q.shape[1],), told)
        for mask in own[3:]:
            if not mask.dtype.is_bool and mask.dtype not in (q.dtype, F32):
                raise DTypeError(f"attention: mask {mask} is neither bool nor of the dtype of q {q}; cast it")
            shape = ",".join(map(str, scores))
            told = f"attention: mask {mask} does not broadcast to the scores [{shape}]"
            require_stretch(mask.shape, scores, told)
        return q.with_shape((*q.shape[:3], v.shape[3]))

    def expand(
        self, q: Node, k: Node, v: Node, *others: Node,
        causal: bool, window: tuple[int, int], scale: float | None, softcap: float, offset: Dim, sinks: bool,
    ) -> Node:  # fmt: skip
        mask, sink = (others[:-1], others[-1]) if sinks else (others, None)
        group = _group(q.tensor, k.tensor)
        batch, heads, queries, width = q.shape
        if group != 1:  # [batch, kv heads, heads of its group, queries, dim]
            q = reshape(q, (batch, k.shape[1], group, queries, width))
        wide = F32 if is_half(q.dtype) else None
        pairs = ((0, 1), (0, 1))
        scores: Node = dot_general(q, k, ((q.rank - 1,), (3,)), pairs, wide)
        factor = usual_scale(width) if scale is None else scale
        scores = scores * factor if factor != 1.0 else scores
        if softcap:
            scores = tanh(scores * (1 / softcap)) * softcap
        for m in mask:
            m = _mask_by_group(m, k.shape[1], group)
            scores = where(m, scores, -math.inf) if m.dtype.is_bool else scores + _like(m, scores)
        allowed = _positions_allowed(queries, k.shape[2], causal, window, offset)
        if allowed is not None:
            scores = where(allowed, scores, -math.inf)
        sees_itself = known_le(0, offset) is True and window == (UNBOUNDED, UNBOUNDED)
        if sink is None:
            weights = softmax(scores, axis=-1, masked=bool(mask) or not (allowed is None or sees_itself))
        else:
            own = (heads,) if group == 1 else (k.shape[1], group)
            weights = softmax_beside(scores, reshape(_like(sink, scores), (*own, 1, 1)))
        if v.dtype is BF16:  # both products are of bf16 with sums of f32, which is one kernel
            weights = cast(weights, dtype=BF16)
        else:
            v = widen(v)
        out: Node = dot_general(weights, v, ((weights.rank - 1,), (2,)), pairs, wide)
        if wide is not None:
            out = cast(out, dtype=q.dtype)
        made: Node = out if group == 1 else reshape(out, (batch, heads, queries, v.shape[3]))
        return made

    def samples(self) -> list[Sample]:
        def one(
            q: str, kv: str, *mask: Any, grad: bool = True, v: str = "", kind: str = "f32",
            sinks: str | np.ndarray | None = None, **attrs: object,
        ) -> Sample:  # fmt: skip
            made = (Arg(f"{kind}{q}"), Arg(f"{kind}{kv}"), Arg(f"{kind}{v or kv}"))
            if sinks is None:
                return Sample((*made, *(Arg(m) for m in mask)), attrs, grad=grad)
            own = Arg(sinks) if isinstance(sinks, str) else sinks
            return Sample((*made, *(Arg(m) for m in mask), own), {**attrs, "sinks": True}, grad=grad)

        return [
            one("[2,2,3,4]", "[2,2,5,4]"),
            one("[1,2,5,4]", "[1,2,5,4]", causal=True),
            one("[1,2,3,4]", "[1,2,5,4]", causal=True, offset=2),
            one("[1,2,3,4]", "[1,2,5,4]", causal=True, offset=-1),
            one("[1,1,7,2]", "[1,1,7,2]", causal=True, window=(2, -1)),
            one("[1,1,7,2]", "[1,1,7,2]", window=(1, 2), offset=1),
            one("[1,1,3,2]", "[1,1,9,2]", window=(-1, 0)),
            one("[2,4,3,2]", "[2,2,5,2]"),
            one("[1,4,3,2]", "[1,1,3,2]", causal=True),
            one("[2,2,3,4]", "[2,2,5,4]", "bool[2,1,3,5]"),
            one("[2,4,3,4]", "[2,2,5,4]", "bool[2,4,3,5]"),
            one("[2,4,3,4]", "[2,2,5,4]", "f32[4,1,5]", scale=0.3),
            one("[2,2,3,4]", "[2,2,5,4]", "f32[5]", softcap=0.7, causal=True),
            one("[1,1,2,3]", "[1,1,4,3]", v="[1,1,4,7]"),
            one("[1,1,1,1]", "[1,1,1,1]"),
            one("[1,2,0,4]", "[1,2,5,4]", grad=False),
            one("[1,2,3,4]", "[1,2,0,4]", grad=False),
            one("[0,2,3,4]", "[0,2,3,4]", grad=False),
            one("[2,0,1,4]", "[2,2,1,4]", grad=False),
            one("[1,2,n,4]", "[1,2,m,4]", "bool[1,1,n,m]", grad=False),
            one("[k,4,n,4]", "[k,2,m,4]", causal=True, grad=False, offset="m"),
            one("[1,2,n,33]", "[1,2,n,33]", causal=True, grad=False),
            one("[1,4,3,8]", "[1,2,3,8]", "f16[3,3]", kind="f16", grad=False),
            one("[1,2,3,8]", "[1,2,3,8]", kind="bf16", causal=True, grad=False),
            one("[2,2,3,4]", "[2,2,5,4]", sinks="f32[2]"),
            one("[1,4,7,2]", "[1,2,7,2]", sinks="f32[4]", causal=True, window=(2, -1)),
            one(
                "[1,2,9,32]", "[1,2,9,32]", sinks=np.array([-np.inf, 90], np.float32), causal=True, grad=False
            ),
            one("[1,2,3,4]", "[1,2,5,4]", "f32[3,5]", sinks="f32[2]", causal=True, offset=-1, softcap=0.7),
            one("[k,4,n,8]", "[k,2,m,8]", "bool[n,m]", sinks="f32[4]", grad=False),
            one("[1,2,3,4]", "[1,2,0,4]", sinks="f32[2]", grad=False),
            one("[1,2,3,8]", "[1,2,3,8]", sinks="bf16[2]", kind="bf16", causal=True, grad=False),
            one("[1,2,1,64]", "[1,2,70,64]", sinks="f32[2]", grad=False),
        ]


def _like(x: Node, scores: Node) -> Node:
    """A mask or sinks, which may be f32 next to any dtype of q, in that of the scores."""
    made: Node = x if x.dtype is scores.dtype else cast(x, dtype=scores.dtype)
    return made


def _group(q: TensorType, k: TensorType) -> int:
    """How many heads of q share one head of k."""
    many, few = q.shape[1], k.shape[1]
    if many == few:
        return 1
    if not isinstance(many, int) or not isinstance(few, int) or few == 0 or many % few:
        raise ShapeError(
            f"attention: the {many} heads of q {q} do not split evenly over the {few} heads of k {k}"
        )
    return many // few


def _mask_by_group(mask: Node, kv_heads: Dim, group: int) -> Node:
    """A mask for [batch, heads, q, k], reshaped to broadcast to [batch, kv heads, group, q, k]."""
    if group == 1 or mask.rank < 3:
        return mask
    *lead, heads, queries, keys = mask.shape
    split = (1, 1) if heads == 1 else (kv_heads, group)
    made: Node = reshape(mask, (*lead, *split, queries, keys))
    return made


@of_one
def attention(
    q: Operand, k: Operand, v: Operand, mask: Operand | None = None, *,
    causal: bool = False, window: Sequence[int] | None = None, scale: float | None = None,
    softcap: float = 0.0, offset: Operand = 0, sinks: Operand | None = None,
) -> Tensor:  # fmt: skip
    """softmax(q k^T * scale + mask) v over [batch, heads, seq, dim]; scale is 1 / sqrt(dim) unless given.

    k and v may have fewer heads (grouped queries). A boolean mask says what may be seen, another is added.
    Query i stands at key position i + offset: `causal` hides later keys, `window` = (left, right) those
    further away (-1: no limit). `sinks` [heads] are scores that join the softmax without a value: the weights
    of a query add up to less than 1. Whether an Inf or NaN of a key or value that no query may see reaches a
    result is not specified.

    >>> q = np.zeros((1, 1, 2, 4))
    >>> v = np.array([1.0, 3.0]).reshape(1, 1, 2, 1)
    >>> attention(q, q, v, causal=True).ravel()
    array([1., 2.])
    >>> attention(q, q, v, causal=True, sinks=[0.0]).ravel().round(3)  # as much as one key
    array([0.5  , 1.333])
    """
    limits = (UNBOUNDED, UNBOUNDED) if window is None else tuple(window)
    return _attention(
        q, k, v, *given(mask, sinks), causal=causal, window=limits, scale=scale, softcap=softcap,
        offset=offset, sinks=sinks is not None,
    )  # fmt: skip


# -- rotary positions


def _rope_ref(x: np.ndarray, c: np.ndarray, s: np.ndarray, *, interleaved: bool) -> np.ndarray:
    half = c.shape[-1]
    turned = np.array(x)
    first = np.arange(0, 2 * half, 2) if interleaved else np.arange(half)
    second = first + 1 if interleaved else first + half
    turned[..., first] = x[..., first] * c - x[..., second] * s
    turned[..., second] = x[..., second] * c + x[..., first] * s
    return turned


def _rope_expand(x: Node, c: Node, s: Node, *, interleaved: bool) -> Node:
    half = c.shape[-1]
    last = x.rank - 1
    step = 2 if interleaved else 1
    a = slice_axis(x, last, 0, half, step)
    b = slice_axis(x, last, 1 if interleaved else half, half, step)
    parts = [a * c - b * s, b * c + a * s]
    if interleaved:
        apart = [reshape(p, (*p.shape, 1)) for p in parts]
        parts = [reshape(concat(apart, axis=x.rank), (*x.shape[:-1], 2 * half))]
    rest = x.shape[-1] - 2 * half
    if rest != 0:
        parts.append(slice_axis(x, last, 2 * half, rest))
    made: Node = parts[0] if len(parts) == 1 else concat(parts, axis=last)
    return made


@declare
class _rope(Op):
    """Turn pairs of features by angles: cos and sin [..., seq, pairs] broadcast against x [..., seq, dim].

    Feature i pairs with i + pairs, or, interleaved, 2i with 2i + 1; features past 2 * pairs stay as they are.
    """

    name = "rope"
    level = Level.HIR
    arity = 3
    attrs = {"interleaved": Attr(boolean, False)}
    ref = staticmethod(in_f32(_rope_ref))
    expand = staticmethod(expand_in_f32(_rope_expand))

    def infer(self, x: TensorType, c: TensorType, s: TensorType, *, interleaved: bool) -> TensorType:
        for what, t in (("x", x), ("cos", c), ("sin", s)):
            need_dtype(self.name, t, is_real_float)
            if t.rank == 0:
                raise ShapeError(f"rope: {what} {t} has no axis of features")
        if same_dtype(self.name, (c, s)) not in (x.dtype, F32 if is_half(x.dtype) else x.dtype):
            raise DTypeError(f"rope: cos {c} and x {x} have different dtypes; cast one")
        width, half = x.shape[-1], c.shape[-1]
        if not isinstance(width, int) or not isinstance(half, int) or 2 * half > width:
            raise ShapeError(
                f"rope: cos {c} has {half} angles; x {x} has {width} features and needs two per angle"
            )
        want = (*x.shape[:-1], half)
        told = f"rope: cos {c} and sin {s} do not broadcast to [{','.join(map(str, want))}]"
        require_equal(s.shape[-1], half, told)
        for t in (c, s):
            require_stretch(t.shape, want, told)
        return x

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg("f32[2,3,4]"), Arg("f32[3,2]"), Arg("f32[3,2]"))),
            Sample((Arg("f32[2,3,4]"), Arg("f32[3,2]"), Arg("f32[3,2]")), {"interleaved": True}),
            Sample((Arg("f32[2,3,7]"), Arg("f32[2,3,2]"), Arg("f32[2,3,2]"))),
            Sample((Arg("f32[2,3,7]"), Arg("f32[2,1,3]"), Arg("f32[2,1,3]")), {"interleaved": True}),
            Sample((Arg("f32[2]"), Arg("f32[1]"), Arg("f32[1]"))),
            Sample((Arg("f32[0,4]"), Arg("f32[0,2]"), Arg("f32[0,2]")), grad=False),
            Sample((Arg("f32[k,n,4]"), Arg("f32[n,2]"), Arg("f32[n,2]")), grad=False),
            Sample((Arg("f32[k,n,6]"), Arg("f32[n,2]"), Arg("f32[n,2]")), {"interleaved": True}, grad=False),
            Sample((Arg("f16[3,34]"), Arg("f16[3,17]"), Arg("f16[3,17]")), grad=False),
            Sample((Arg("bf16[3,4]"), Arg("f32[3,2]"), Arg("f32[3,2]")), {"interleaved": True}, grad=False),
        ]


def rope_tables(
    positions: Operand, dim: int, base: float = 10000.0, dtype: DTypeLike = "f32"
) -> tuple[Tensor, Tensor]:
    """cos and sin [*positions, dim / 2] of positions times base ** (-2i / dim).

    >>> c, s = rope_tables(np.array([0, 1]), dim=2)
    >>> c[0].tolist(), s[0].tolist()
    ([1.0], [0.0])
    """
    if dim < 2 or dim % 2:
        raise ShapeError(f"rope_tables: dim {dim} is not an even number of features")
    kind = as_dtype(dtype)
    frequencies = convert(base ** (np.arange(0, dim, 2) / -dim), kind)
    column = reshape(cast(positions, dtype=kind), (*shape_of(positions), 1))
    angles = mul(column, frequencies)
    return cos(angles), sin(angles)


@of_one
def rope(
    x: Operand, cos: Operand | None = None, sin: Operand | None = None, *,
    positions: Operand | None = None, base: float = 10000.0, rotary_dim: int | None = None,
    interleaved: bool = False,
) -> Tensor:  # fmt: skip
    """Rotary positions on x [..., seq, dim], by given cos and sin [..., seq, pairs] or by positions.

    Without either, positions are 0, 1, ... along seq. Positions [batch, seq] serve all axes of x between.
    Only the first `rotary_dim` features (all by default, or 2 * pairs) turn.

    >>> rope(np.array([[1.0, 0.0], [1.0, 0.0]])).round(3).tolist()
    [[1.0, 0.0], [0.54, 0.841]]
    """
    if (cos is None) != (sin is None) or (cos is not None and positions is not None):
        raise TypeMismatchError("rope: give either both cos and sin, or positions, or neither")
    if cos is None or sin is None:
        shape = shape_of(x)
        if len(shape) < 2 or not isinstance(shape[-1], int):
            raise ShapeError("rope: x needs the axes seq and dim, and dim must be a number")
        if positions is None:
            positions = op_call("iota", shape=(shape[-2],), axis=0, dtype=I64)
        kind = x.dtype if isinstance(x, Node) else as_dtype(np.asarray(x).dtype)
        table = F64 if kind is F64 else F32
        cos, sin = rope_tables(positions, shape[-1] if rotary_dim is None else rotary_dim, base, table)
        *lead, seq = shape_of(positions)
        if lead:
            between = (1,) * (len(shape) - 2 - len(lead))
            cos, sin = (reshape(t, (*lead, *between, seq, shape_of(t)[-1])) for t in (cos, sin))
    return _rope(x, cos, sin, interleaved=interleaved)


__all__ = ["attention", "rope", "rope_tables"]
