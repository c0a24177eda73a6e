"""Attention over keys and values in pages, and writing them there.

A page holds the keys or values of a few neighbouring positions of one sequence; a table says which pages a
sequence has. So sequences of any lengths share a pool of pages. Keys are stored with positions innermost,
[pages, heads, features, positions], values with features innermost, [pages, heads, positions, features]: both
are read in vectors. Codes of 8 bits have a scale for each position of a head, in arrays of the same axes
with one feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from rlx.errors import DTypeError, OpAttributeError, ShapeError, TypeMismatchError
from rlx.ir.assume import require_equal, require_shape
from rlx.ir.attr import Attr, integer, optional, real
from rlx.ir.dim import Dim
from rlx.ir.dtype import F32, F64, I8, I64
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Op, Sample, declare
from rlx.ir.operand import Operand, Tensor, of_one
from rlx.ir.types import Shape, TensorType
from rlx.kernel.form import Form, Scatter, Template
from rlx.kernel.scalar import axes, convert, load, size
from rlx.ops.array.addressing import OutOfRangeError, as_indices
from rlx.ops.array.gather import add_at, gather
from rlx.ops.array.scatter import scatter
from rlx.ops.array.shape import broadcast_to, reshape, transpose
from rlx.ops.math.contract import dot_general
from rlx.ops.math.elementwise import cast, equal, tanh, where
from rlx.ops.math.reduce import sum as sum_of
from rlx.ops.math.stats import dim_value
from rlx.ops.nn.attention import UNBOUNDED, usual_scale
from rlx.ops.nn.blocks import given, softmax, softmax_beside
from rlx.ops.rules import (
    in_f32,
    is_integer,
    is_real_float,
    lift_all,
    need_dtype,
    normal_axis,
    op_call,
    same_dtype,
    shape_of,
    widen,
)

M = TypeVar("M")


def _within(what: str, index: np.ndarray, extent: int) -> np.ndarray:
    """Indices of an axis; one outside of it is refused, negative ones too."""
    bad = (index < 0) | (index >= extent)
    if bad.any():
        raise OutOfRangeError(f"{what} {int(index[bad][0])} is out of range: there are {extent}")
    return index


def _zeros(like: Node, shape: Shape) -> Node:
    made: Node = broadcast_to(like.graph.constant(np.zeros((), like.dtype.np)), shape)
    return made


def _number(d: Dim) -> Dim | Node:
    return d if isinstance(d, int) else dim_value(d)


def _apart(keys: object, more: Sequence[M]) -> tuple[Sequence[M], Sequence[M]]:
    """Operands after the lengths: scales of keys and values, which codes have, and sinks."""
    count = 2 if keys == I8.np else 0
    return more[:count], more[count:]


def _decoded(pages: np.ndarray, scales: np.ndarray | None) -> np.ndarray:
    wide = pages.astype(np.float64)
    return wide if scales is None else wide * scales


def _attend(
    q: np.ndarray, k_pages: np.ndarray, v_pages: np.ndarray, table: np.ndarray, slots: np.ndarray,
    lengths: np.ndarray, *more: np.ndarray, scale: float | None, softcap: float, window: int,
) -> np.ndarray:  # fmt: skip
    scales, sinks = _apart(k_pages.dtype, more)
    k_pages, v_pages = (
        _decoded(p, f) for p, f in zip((k_pages, v_pages), scales or (None, None), strict=True)
    )
    pages, kv_heads, depth, page = k_pages.shape
    tokens, heads, _ = q.shape
    by_token = np.broadcast_to(sinks[0].astype(np.float64) if sinks else -np.inf, (tokens, heads))
    out = np.zeros((tokens, heads, v_pages.shape[3]), q.dtype)
    _within("paged_attention: slot", slots, len(table))
    _within("paged_attention: length", lengths, table.shape[1] * page + 1)
    factor = usual_scale(depth) if scale is None else scale
    for t in range(tokens):
        end = int(lengths[t])
        start = 0 if window == UNBOUNDED else max(end - 1 - window, 0)
        first = start // max(page, 1)
        own = _within("paged_attention: page", table[slots[t], first : -(-end // max(page, 1))], pages)
        if start >= end or kv_heads == 0:
            continue
        k = np.concatenate(list(k_pages[own]), axis=-1)  # [kv heads, depth, keys]
        v = np.concatenate(list(v_pages[own]), axis=-2)  # [kv heads, keys, value depth]
        seen = slice(start - first * page, end - first * page)
        queries = q[t].astype(np.float64).reshape(kv_heads, -1, depth)
        scores = np.matmul(queries, k[..., seen]) * factor
        if softcap:
            scores = np.tanh(scores / softcap) * softcap
        at_sink = by_token[t].reshape(kv_heads, -1, 1)
        top = np.maximum(scores.max(axis=-1, keepdims=True), at_sink)
        top = np.where(top == -np.inf, 0, top)
        e = np.exp(scores - top)
        total = e.sum(-1, keepdims=True) + np.exp(at_sink - top)
        out[t] = np.matmul(e / np.where(total == 0, 1, total), v[:, seen]).reshape(heads, -1)
    return out


@declare
class _paged_attention(Op):
    """softmax(q k^T * scale) v, where keys and values of each token are in pages of its slot.

    q is [tokens, heads, depth], k_pages [pages, kv heads, depth, page], v_pages [pages, kv heads, page, value
    depth]. Row `slots[t]` of the table has the pages of token t's sequence, in order; the token sees its
    first `lengths[t]` keys, and of these, with a `window`, only the last window + 1. A page, slot or length
    out of range is an error when the program runs; entries of the table that no length reaches are not read.
    A last operand, sinks [heads] or [tokens, heads], has scores that take their share of the softmax and
    give no value. Pages of i8 are codes, to be multiplied by scales: those of keys, [pages, kv heads, 1,
    page], and of values, [pages, kv heads, page, 1], follow the lengths.

    Keys are taken in ascending order whatever their pages: the bits of a token depend on its own query, keys
    and values alone, not on other tokens, on numbers of pages and slots, or on threads.
    """

    name = "paged_attention"
    heavy = True
    attrs = {
        "scale": Attr(optional(real), None),
        "softcap": Attr(real, 0.0),
        "window": Attr(integer, UNBOUNDED),
    }
    ref = staticmethod(in_f32(_attend))

    def infer(
        self, q: TensorType, k_pages: TensorType, v_pages: TensorType, table: TensorType, slots: TensorType,
        lengths: TensorType, *more: TensorType, scale: float | None, softcap: float, window: int,
    ) -> TensorType:  # fmt: skip
        scales, sinks = _apart(k_pages.dtype.np, more)
        coded = k_pages.dtype is I8
        if len(sinks) > 1 or (coded and len(scales) < 2):
            least = 8 if coded else 6
            raise TypeMismatchError(
                f"paged_attention: takes {least} or {least + 1} operands, got {6 + len(more)}"
            )
        if window < UNBOUNDED:
            raise OpAttributeError(f"paged_attention: window {window} is negative; -1 means no limit")
        if softcap < 0:
            raise OpAttributeError(f"paged_attention: softcap {softcap} is negative; 0 means none")
        for what, t, shape in (
            ("q", q, "tokens, heads, depth"),
            ("k_pages", k_pages, "pages, heads, depth, page"),
            ("v_pages", v_pages, "pages, heads, page, depth"),
            ("table", table, "slots, pages"),
            ("slots", slots, "tokens"),
            ("lengths", lengths, "tokens"),
        ):
            known = is_real_float
            if what in ("table", "slots", "lengths") or (coded and t is not q):
                known = is_integer
            need_dtype(self.name, t, known)
            if t.rank != shape.count(",") + 1:
                raise ShapeError(f"paged_attention: {what} {t} is not [{shape}]")
        same_dtype(self.name, (k_pages, v_pages) if coded else (q, k_pages, v_pages))
        for axis, other, what in ((0, 0, "pages"), (1, 1, "heads"), (3, 2, "positions of a page")):
            told = f"paged_attention: k_pages {k_pages} and v_pages {v_pages} differ in {what}"
            require_equal(k_pages.shape[axis], v_pages.shape[other], told)
        told = f"paged_attention: q {q} and k_pages {k_pages} differ in depth"
        require_equal(q.shape[2], k_pages.shape[2], told)
        for what, t in (("slots", slots), ("lengths", lengths)):
            told = f"paged_attention: {what} {t} needs one number for each token of q {q}"
            require_equal(q.shape[0], t.shape[0], told)
        for what, found, pages, axis in zip(
            ("keys", "values"), scales, (k_pages, v_pages), (2, 3), strict=False
        ):
            wanted = F64 if q.dtype is F64 else F32
            if found.dtype is not wanted:
                raise DTypeError(f"paged_attention: scales of {what} {found} are not {wanted}; cast them")
            need = tuple(1 if i == axis else n for i, n in enumerate(pages.shape))
            told = f"paged_attention: scales of {what} {found} must be {TensorType(wanted, need)} for {pages}"
            require_shape(found.shape, need, told)
        for sink in sinks:
            if sink.dtype not in (q.dtype, F32):
                raise DTypeError(f"paged_attention: sinks {sink} are not of the dtype of q {q}; cast them")
            told = f"paged_attention: sinks {sink} are neither [heads] nor [tokens, heads] of q {q}"
            require_shape(sink.shape, q.shape[:2] if sink.rank == 2 else q.shape[1:2], told)
        many, few, page = q.shape[1], k_pages.shape[1], k_pages.shape[3]
        if not isinstance(many, int) or not isinstance(few, int) or few == 0 or many % few:
            raise ShapeError(
                f"paged_attention: the heads of q {q} do not split evenly over those of k_pages {k_pages}"
            )
        if not isinstance(page, int) or page == 0:
            raise ShapeError(f"paged_attention: pages of k_pages {k_pages} need a known number of positions")
        if scale is None and not isinstance(q.shape[2], int):
            raise ShapeError(f"paged_attention: the depth of q {q} is symbolic; give scale=")
        return q.with_shape((*q.shape[:2], v_pages.shape[3]))

    def vjp(
        self, g: Node, y: Node, q: Node, k_pages: Node, v_pages: Node, table: Node, slots: Node,
        lengths: Node, *more: Node, scale: float | None, softcap: float, window: int,
    ) -> list[Node | None]:  # fmt: skip
        """By gathering the keys and values of every token."""
        scales, sinks = _apart(k_pages.dtype.np, more)
        codes = [cast(x, dtype=f.dtype) for x, f in zip((k_pages, v_pages), scales, strict=False)]
        if scales:
            k_pages, v_pages = (code * factor for code, factor in zip(codes, scales, strict=True))
        few, page, width = k_pages.shape[1], k_pages.shape[3], table.shape[1]
        tokens, heads, depth = q.shape
        keys = width * page
        group = (tokens, few, heads // few)
        ends = reshape(cast(lengths, dtype=I64), (tokens, 1))
        at = op_call("iota", shape=(1, keys), axis=1, dtype=I64)
        seen = at < ends
        if window != UNBOUNDED:
            seen = seen & (at >= ends - 1 - window)
        rows = gather(cast(table, dtype=I64), cast(slots, dtype=I64))  # [tokens, width]
        used = op_call("iota", shape=(1, width), axis=1, dtype=I64) * page < ends
        rows = where(used, rows, broadcast_to(rows.graph.constant(np.int64(0)), rows.shape))
        visible = reshape(seen, (tokens, 1, keys, 1))
        own_k = transpose(
            widen(gather(k_pages, rows)), (0, 2, 1, 4, 3)
        )  # [tokens, heads, width, page, depth]
        own_k = where(visible, reshape(own_k, (tokens, few, keys, depth)), 0.0)
        own_v = transpose(widen(gather(v_pages, rows)), (0, 2, 1, 3, 4))
        own_v = where(visible, reshape(own_v, (tokens, few, keys, v_pages.shape[3])), 0.0)
        wide_q = reshape(widen(q), (*group, depth))
        wide_g = reshape(widen(g), (*group, v_pages.shape[3]))
        factor = usual_scale(depth) if scale is None else scale
        pairs = ((0, 1), (0, 1))
        slope: Node | None = None
        scores = dot_general(wide_q, own_k, ((3,), (3,)), pairs) * factor
        if softcap:
            turned = tanh(scores * (1 / softcap))
            scores, slope = turned * softcap, 1.0 - turned * turned
        scores = where(reshape(seen, (tokens, 1, 1, keys)), scores, -np.inf)
        if sinks:
            lead = (tokens,) if sinks[0].rank == 2 else ()
            weights = softmax_beside(scores, reshape(widen(sinks[0]), (*lead, *group[1:], 1)))
        else:
            weights = softmax(scores, axis=-1, masked=True)
        by_weight = dot_general(wide_g, own_v, ((3,), (3,)), pairs)
        mean = sum_of(by_weight * weights, axis=-1, keepdims=True)
        by_score = weights * (by_weight - mean)
        by_score = (by_score if slope is None else by_score * slope) * factor
        dq = reshape(dot_general(by_score, own_k, ((3,), (2,)), pairs), q.shape)
        dk = dot_general(by_score, wide_q, ((2,), (2,)), pairs)  # [tokens, heads, keys, depth]
        dv = dot_general(weights, wide_g, ((2,), (2,)), pairs)

        def in_pages(x: Node, like: Node, order: Sequence[int]) -> Node:
            apart = reshape(x, (tokens, few, width, page, x.shape[3]))
            return add_at("scatter", like, rows, transpose(apart, order), axis=0, batch_dims=0)

        found = [dq, in_pages(dk, k_pages, (0, 2, 1, 4, 3)), in_pages(dv, v_pages, (0, 2, 1, 3, 4))]
        own = (q, k_pages, v_pages)
        by_operand = [cast(d, dtype=x.dtype) for d, x in zip(found, own, strict=True)]
        slopes: list[Node | None] = [*by_operand, None, None, None]
        if scales:  # codes are integers: what they multiply has slopes
            by_code = zip(by_operand[1:], codes, (2, 3), strict=True)
            slopes += [sum_of(d * code, axis=axis, keepdims=True) for d, code, axis in by_code]
            slopes[1:3] = None, None
        if sinks:  # its weight is what is missing of 1; a token that sees nothing has no weights at all
            share = where(
                reshape(ends > 0, (tokens, 1, 1, 1)), 1.0 - sum_of(weights, axis=-1, keepdims=True), 0.0
            )
            slope = -(share * mean)
            slope = slope if sinks[0].rank == 2 else sum_of(slope, axis=0)
            slopes.append(cast(reshape(slope, sinks[0].shape), dtype=sinks[0].dtype))
        return slopes

    def batch(self, flags: Sequence[bool], *operands: Node, **attrs: object) -> Node:
        """Batches are more tokens, pages and slots; what is out of range stays so."""
        q, k, v, table, slots, lengths, *more = lift_all(flags, operands)
        scales, sinks = _apart(k.dtype.np, more)
        batches, pages, many = q.shape[0], k.shape[1], table.shape[1]
        table = batched_places(table, pages, batches)
        slots = batched_places(slots, many, batches)
        own = [*scales]
        for sink in sinks:
            by_token = sink if sink.rank == 3 else reshape(sink, (batches, 1, sink.shape[1]))
            own.append(broadcast_to(by_token, q.shape[:3]))
        made: Node = _paged_attention(*map(folded, (q, k, v, table, slots, lengths, *own)), **attrs)
        return reshape(made, (batches, q.shape[1], *made.shape[1:]))

    def lower(
        self, q: TensorType, k_pages: TensorType, *others: TensorType,
        scale: float | None, softcap: float, window: int,
    ) -> Form:  # fmt: skip
        factor = usual_scale(q.shape[2]) if scale is None else scale
        return Template(self.name, (("scale", factor), ("softcap", softcap), ("window", window)))

    def cost(
        self, q: TensorType, k_pages: TensorType, v_pages: TensorType, table: TensorType, *others: TensorType,
        scale: float | None, softcap: float, window: int,
    ) -> Dim:  # fmt: skip
        keys = table.shape[1] * k_pages.shape[3]
        return q.shape[0] * q.shape[1] * keys * (2 * (q.shape[2] + v_pages.shape[3]) + 8)

    def samples(self) -> list[Sample]:
        two = np.array([[2, 0], [1, 3]])
        odd = np.array([[4, 0, 2], [3, 1, 0]], np.int32)

        def one(
            q: str, k: str, v: str, table: object, slots: object, lengths: object,
            *sinks: str, kind: str = "f32", grad: bool = True, **attrs: object,
        ) -> Sample:  # fmt: skip
            pages = (Arg(f"{kind}{q}"), Arg(f"{kind}{k}"), Arg(f"{kind}{v}"))
            places = [x if isinstance(x, Arg) else np.asarray(x) for x in (table, slots, lengths)]
            return Sample((*pages, *places, *map(Arg, sinks)), attrs, grad=grad)

        def coded(
            q: str, k: str, v: str, scales: tuple[str, str], *sinks: str, grad: bool = True, **attrs: object
        ) -> Sample:
            pages = (Arg(q), Arg(f"i8{k}", -127, 127), Arg(f"i8{v}", -127, 127))
            factors = (Arg(f"f32{factor}", 0.001, 0.01) for factor in scales)
            places = (two, np.array([0, 1, 0]), np.array([5, 8, 1]))
            return Sample((*pages, *places, *factors, *map(Arg, sinks)), attrs, grad=grad)

        return [
            one("[3,2,4]", "[4,2,4,4]", "[4,2,4,4]", two, [0, 1, 0], [5, 8, 1]),
            one("[3,4,3]", "[5,2,3,2]", "[5,2,2,7]", odd, [1, 0, 1], np.array([4, 6, 3], np.int32)),
            one("[4,2,4]", "[4,1,4,4]", "[4,1,4,4]", two, [0, 0, 0, 1], [4, 5, 6, 2], scale=0.3, softcap=0.7),
            one("[3,3,4]", "[4,3,4,4]", "[4,3,4,4]", two, [0, 1, 1], [8, 3, 6], window=2),
            one("[2,6,5]", "[4,2,5,4]", "[4,2,4,5]", two, [1, 1], [0, 7], window=0, grad=False),
            one("[9,8,64]", "[3,1,64,64]", "[3,1,64,64]", [[2, 1]], [0] * 9, range(60, 69), grad=False),
            one("[9,1,33]", "[3,1,33,16]", "[3,1,16,17]", [[2, 1]], [0] * 9, [3] * 9, grad=False),
            one("[8,7,8]", "[6,1,8,16]", "[6,1,16,8]", [[5, 1], [0, 4]], [0, 1] * 4, [32] * 8, grad=False),
            one("[0,2,4]", "[4,2,4,4]", "[4,2,4,4]", two, np.zeros(0, int), np.zeros(0, int), grad=False),
            one("[n,4,8]", "[m,2,8,4]", "[m,2,4,8]", Arg("i64[k,2]", 0, 2), Arg("i64[n]", 0, 2),
                Arg("i64[n]", 0, 8), grad=False),
            one("[3,4,8]", "[4,2,8,4]", "[4,2,4,8]", two, [0, 1, 0], [5, 8, 1], kind="f16", grad=False),
            one("[3,4,8]", "[4,2,8,4]", "[4,2,4,8]", two, [0, 1, 0], [5, 8, 1], kind="bf16", grad=False),
            one("[3,2,4]", "[4,2,4,4]", "[4,2,4,4]", two, [0, 1, 0], [5, 8, 1], "f32[2]"),
            one("[3,4,4]", "[4,2,4,4]", "[4,2,4,4]", two, [0, 1, 1], [8, 3, 6], "f32[3,4]",
                window=2, softcap=0.7),
            one("[3,4,8]", "[4,2,8,4]", "[4,2,4,8]", two, [0, 1, 0], [0, 8, 1], "f16[4]",
                kind="f16", grad=False),
            coded("f32[3,2,4]", "[4,2,4,4]", "[4,2,4,4]", ("[4,2,1,4]", "[4,2,4,1]")),
            coded("f32[3,6,33]", "[4,2,33,4]", "[4,2,4,17]", ("[4,2,1,4]", "[4,2,4,1]"), "f32[6]", window=2),
            coded("f32[3,2,16]", "[4,1,16,4]", "[4,1,4,32]", ("[4,1,1,4]", "[4,1,4,1]"), softcap=0.7,
                  scale=0.3),
            coded("bf16[3,2,8]", "[4,2,8,4]", "[4,2,4,8]", ("[4,2,1,4]", "[4,2,4,1]"), grad=False),
        ]  # fmt: skip


def folded(x: Node) -> Node:
    """The batch axis and the next one as one axis."""
    made: Node = reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:]))
    return made


def batched_places(places: Node, extent: Dim, batches: Dim) -> Node:
    """Places [batch, ...] along an axis in which all batches follow each other."""
    places = cast(places, dtype=I64)
    number = op_call("iota", shape=(batches, *(1,) * (places.rank - 1)), axis=0, dtype=I64)
    inside = (places >= 0) & (places < _number(extent))
    made: Node = where(inside, places + number * _number(extent), -1)
    return made


@of_one
def paged_attention(
    q: Operand, k_pages: Operand, v_pages: Operand, table: Operand, slots: Operand, lengths: Operand, *,
    k_scales: Operand | None = None, v_scales: Operand | None = None, sinks: Operand | None = None,
    scale: float | None = None, softcap: float = 0.0, window: int = UNBOUNDED,
) -> Tensor:  # fmt: skip
    """Attention of tokens [tokens, heads, depth] to keys and values in pages of their sequences.

    Keys are [pages, kv heads, depth, page], values [pages, kv heads, page, depth]. Row `slots[t]` of the
    `table` lists the pages of token t's sequence; the token sees the first `lengths[t]` keys of it, with a
    `window` only the last window + 1 of these. `scale` is 1 / sqrt(depth) unless given, `softcap` and `sinks`
    are as in `attention`. A token's bits depend on its own query and sequence alone.

    Keys and values of i8 are codes, with `k_scales` [pages, kv heads, 1, page] and `v_scales` [pages, kv
    heads, page, 1].

    >>> v = np.arange(8.0).reshape(2, 1, 4, 1)  # two pages of four positions
    >>> k, q = np.zeros((2, 1, 3, 4)), np.zeros((2, 1, 3))
    >>> paged_attention(q, k, v, [[1, 0]], [0, 0], [3, 5]).ravel()
    array([5. , 4.4])
    """
    places = (as_indices(x) for x in (table, slots, lengths))
    return _paged_attention(
        q,
        k_pages,
        v_pages,
        *places,
        *given(k_scales, v_scales, sinks),
        scale=scale,
        softcap=softcap,
        window=window,
    )


# -- writing


@declare
class _write_pages(Op):
    """Pages [pages, heads, ...] with rows [tokens, heads, features] at places, in place where pages die here.

    Position p of page i is place i * page + p. `axis` is the axis of positions, 2 or 3; the other one has the
    features. Of equal places the last row stays. A place out of range is an error when the program runs.
    """

    name = "write_pages"
    arity = 3
    family = "update"
    moves = (0, 1)
    attrs = {"axis": Attr(integer)}

    def infer(self, pages: TensorType, rows: TensorType, places: TensorType, *, axis: int) -> TensorType:
        if axis not in (2, 3):
            raise OpAttributeError(f"write_pages: axis {axis} is neither 2 nor 3")
        same_dtype(self.name, (pages, rows))
        need_dtype(self.name, places, is_integer)
        if pages.rank != 4 or not isinstance(pages.shape[axis], int) or pages.shape[axis] == 0:
            raise ShapeError(f"write_pages: {pages} has no axis {axis} of a known number of positions")
        if places.rank != 1:
            raise ShapeError(f"write_pages: places {places} is not [tokens]")
        want = (places.shape[0], pages.shape[1], pages.shape[5 - axis])
        need = f"{TensorType(rows.dtype, want)} for {pages} and {places}"
        require_shape(want, rows.shape, f"write_pages: rows {rows} must be {need}")
        return pages

    def ref(self, pages: np.ndarray, rows: np.ndarray, places: np.ndarray, *, axis: int) -> np.ndarray:
        out, page = np.array(pages), pages.shape[axis]
        _within("write_pages: place", places, len(pages) * page)
        for row, place in zip(rows, places, strict=True):
            np.moveaxis(out[place // page], axis - 1, 0)[place % page] = row
        return out

    def vjp(self, g: Node, y: Node, pages: Node, rows: Node, places: Node, *, axis: int) -> list[Node | None]:
        zero = _zeros(g, rows.shape)
        kept: Node = _write_pages(g, zero, places, axis=axis)
        count = g.shape[0] * g.shape[axis]
        apart = reshape(transpose(g, (0, axis, 1, 5 - axis)), (count, *rows.shape[1:]))
        number = op_call("iota", shape=places.shape, axis=0, dtype=I64)
        nobody = broadcast_to(g.graph.constant(np.int64(-1)), (count,))
        at = cast(places, dtype=I64)
        stays = equal(gather(scatter(nobody, at, number), at), number)  # the last row of equal places
        stays = reshape(stays, (places.shape[0], 1, 1))
        return [kept, where(stays, gather(apart, at), zero), None]

    def batch(self, flags: Sequence[bool], *operands: Node, axis: int) -> Node:
        pages, rows, places = lift_all(flags, operands)
        at = batched_places(places, pages.shape[1] * pages.shape[axis + 1], pages.shape[0])
        made: Node = _write_pages(*map(folded, (pages, rows, at)), axis=axis)
        return reshape(made, pages.shape)

    def lower(self, pages: TensorType, rows: TensorType, places: TensorType, *, axis: int) -> Form:
        token, head, feature = axes(3)
        place, page = convert(load(2, (token,), places.dtype), I64), size(pages.shape[axis])
        index = [place // page, head, feature, feature]
        index[axis] = place % page
        return Scatter(0, pages.shape, rows.shape, tuple(index), load(1, axes(3), rows.dtype), "set")

    def cost(self, pages: TensorType, rows: TensorType, places: TensorType, *, axis: int) -> Dim:
        return rows.numel

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg("f32[3,2,4,5]"), Arg("f32[4,2,4]"), np.array([7, 0, 14, 2])), {"axis": 3}),
            Sample((Arg("f32[3,2,4,5]"), Arg("f32[3,2,5]"), np.array([7, 11, 7], np.int32)), {"axis": 2}),
            Sample((Arg("f32[3,1,4,5]"), Arg("f32[0,1,5]"), np.zeros(0, np.int64)), {"axis": 2}, grad=False),
            Sample((Arg("f16[n,2,4,8]"), Arg("f16[m,2,4]"), Arg("i64[m]", 0, 15)), {"axis": 3}, grad=False),
            Sample((Arg("i32[n,2,4,8]"), Arg("i32[m,2,8]"), Arg("i64[m]", 0, 9)), {"axis": 2}, grad=False),
        ]


@of_one
def write_pages(pages: Operand, rows: Operand, places: Operand, axis: int) -> Tensor:
    """Pages with rows [tokens, heads, features] written at places.

    Position p of page i is place i * page + p. `axis` is the axis of positions: 3 for keys [pages, heads,
    features, page], 2 for values [pages, heads, page, features], as `paged_attention` takes them. On a state
    only the rows are written.

    >>> write_pages(np.zeros((2, 1, 3, 1)), np.ones((2, 1, 1)), [1, 5], axis=2).ravel()
    array([0., 1., 0., 0., 0., 1.])
    """
    at = normal_axis("write_pages", axis, len(shape_of(pages)))
    return _write_pages(pages, rows, as_indices(places), axis=at)


__all__ = ["paged_attention", "write_pages"]
