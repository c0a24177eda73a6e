"""Attention of ONNX Runtime's own domain (com.microsoft), as exporters of language models write it.

Keys and values of earlier tokens come in as `past` and go out, with the new ones behind them, as `present`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlx import ops
from rlx.errors import ModelImportError
from rlx.frontend.onnx.call import Call
from rlx.frontend.onnx.contrib.basic import MS
from rlx.frontend.onnx.ops.attention import join_heads, split_heads
from rlx.frontend.onnx.registry import onnx_op
from rlx.frontend.onnx.value import Outputs
from rlx.ir.dim import Constraint, Dim, dim_max, known_eq
from rlx.ir.graph import Node

SHARED = "a past that shares its buffer with present is not supported; export with separate past and present"
HIDDEN = -10000.0
"""What ONNX Runtime adds to the scores of hidden keys, unless `mask_filter_value` says otherwise."""


def refuse_inputs(n: Call, reasons: dict[int, str]) -> None:
    """Refuse inputs that are given but not supported, in words."""
    for i, why in reasons.items():
        if n.value(i) is not None:
            raise ModelImportError(why)


def scale_of(n: Call) -> float | None:
    """The factor of scores; 0 means 1 / sqrt(dim)."""
    return float(n.attr("scale", 0.0)) or None


def total_of(*parts: Node | None) -> Node | None:
    """The sum of additive masks, some of which are not there."""
    found = [p for p in parts if p is not None]
    return sum(found[1:], found[0]) if found else None


# -- masks of 1 (seen) and 0


def added_mask(n: Call, mask: Node | None, batch: Dim, keys: Dim, like: Node) -> Node | None:
    """A mask in any of ONNX Runtime's layouts, as numbers to add to the scores."""
    hidden = float(n.attr("mask_filter_value", HIDDEN))
    if mask is None:
        return None
    if mask.rank == 1:
        seen = seen_by_lengths(mask, batch, keys)
    elif mask.rank in (2, 3, 4):
        seen = ops.not_equal(mask, n.constant(0, mask.dtype))
        places = (mask.shape[0], *(1,) * (4 - mask.rank), *mask.shape[1:])
        seen = ops.reshape(seen, places) if mask.rank < 4 else seen
    else:
        raise ModelImportError(f"its mask {mask.tensor} has a layout that RLX does not know")
    return ops.where(seen, n.constant(0, like.dtype), n.constant(hidden, like.dtype))


def seen_by_lengths(mask: Node, batch: Dim, keys: Dim) -> Node:
    """[batch, 1, 1, keys] by the key where each item ends, perhaps with the one where it begins."""
    key = ops.iota((1, 1, 1, keys))

    def column(first: Dim) -> Node:
        part = ops.slice_axis(mask, 0, first, batch)
        return ops.cast(ops.reshape(part, (batch, 1, 1, 1)), "i64")

    seen = ops.less(key, column(0))
    if known_eq(mask.shape[0], batch) is True:
        return seen
    if known_eq(mask.shape[0], 2 * batch) is True:
        return ops.logical_and(seen, ops.greater_equal(key, column(batch)))
    raise ModelImportError(
        f"its mask {mask.tensor} must hold one or two numbers for each of the {batch} items of the batch; "
        "give a mask of [batch, keys] instead"
    )


# -- one matmul for queries, keys and values


@onnx_op("Attention", domain=MS)
def attention(n: Call) -> Outputs:
    w, bias = n[1], n.get(2)
    refuse_inputs(n, {6: SHARED})
    sizes = n.attr("qkv_hidden_sizes", None) or [w.shape[1] // 3] * 3
    projected = ops.matmul(n[0], w)
    return attend(n, projected if bias is None else projected + bias, sizes, n.get(3), n.get(4), n.get(5))


def attend(
    n: Call,
    projected: Node,
    sizes: Sequence[Dim],
    mask: Node | None = None,
    past: Node | None = None,
    added: Node | None = None,
) -> tuple[Node, Node | None]:
    """Attention of queries, keys and values that are adjacent in the last axis; and what is present."""
    if n.flag("past_present_share_buffer"):
        raise ModelImportError(SHARED)
    if n.flag("do_rotary"):
        raise ModelImportError("do_rotary is not supported here; export with RotaryEmbedding nodes before it")
    n.attr("rotary_embedding_dim", 0)
    heads = int(n.attr("num_heads"))
    q, k, v = (split_heads(part, heads) for part in ops.split(projected, axis=2, sizes=tuple(sizes)))
    if past is not None:
        old = [ops.squeeze(ops.slice_axis(past, 0, i, 1), 0) for i in range(2)]
        k, v = (ops.concat([o, t], axis=2) for o, t in zip(old, (k, v), strict=True))
    masks = total_of(added_mask(n, mask, q.shape[0], k.shape[2], q), added)
    causal = n.flag("unidirectional")
    offset = k.shape[2] - q.shape[2] if causal else 0
    y = join_heads(ops.attention(q, k, v, masks, causal=causal, scale=scale_of(n), offset=offset))
    return y, (ops.stack([k, v], axis=0) if n.wants(1) else None)


# -- separate queries, keys and values


@onnx_op("MultiHeadAttention", domain=MS)
def multi_head_attention(n: Call) -> Outputs:
    if n.wants(3):
        raise ModelImportError("its output of scores (qk) is not supported")
    refuse_inputs(n, {8: SHARED, 9: "the cache_indirection of beam search is not supported"})
    heads = int(n.attr("num_heads"))
    q, k, v = unpacked_heads(n, heads)
    if n.get(6) is not None and n.get(7) is not None:
        k, v = ops.concat([n[6], k], axis=2), ops.concat([n[7], v], axis=2)
    masks = total_of(added_mask(n, n.get(4), q.shape[0], k.shape[2], q), n.get(5))
    causal = n.flag("unidirectional")
    offset = k.shape[2] - q.shape[2] if causal else 0
    y = ops.attention(q, k, v, masks, causal=causal, scale=scale_of(n), offset=offset)
    return join_heads(y), k, v


def unpacked_heads(n: Call, heads: int) -> list[Node]:
    """Queries, keys and values as [batch, heads, seq, dim], from any layout of MultiHeadAttention."""
    q, k, v, bias = n[0], n.get(1), n.get(2), n.get(3)
    if q.rank == 5:  # [batch, seq, heads, 3, dim]
        parts = heads_of_packed(q, 3)
    elif k is None:
        raise ModelImportError("its keys are missing: give them, or queries of [batch, seq, heads, 3, dim]")
    elif k.rank == 5:  # [batch, seq, heads, 2, dim]
        parts = [split_heads(q, heads), *heads_of_packed(k, 2)]
    elif v is None:
        raise ModelImportError("its values are missing: give them, or keys of [batch, seq, heads, 2, dim]")
    else:  # keys and values of an encoder may come with heads in front, and have their bias already
        parts = [split_heads(q, heads), *(t if t.rank == 4 else split_heads(t, heads) for t in (k, v))]
    if bias is None:
        return parts
    widths = [t.shape[1] * t.shape[3] for t in parts]
    biased = 1 if k is not None and k.rank == 4 else 3
    for i, b in enumerate(ops.split(bias, axis=0, sizes=tuple(widths))[:biased]):
        parts[i] = parts[i] + ops.reshape(b, (1, heads, 1, -1))
    return parts


def heads_of_packed(x: Node, many: int) -> list[Node]:
    """[batch, seq, heads, many, dim] -> many of [batch, heads, seq, dim]."""
    return [ops.transpose(ops.squeeze(ops.slice_axis(x, 3, i, 1), 3), (0, 2, 1, 3)) for i in range(many)]


# -- groups of queries that share keys, with lengths that differ in a batch


@onnx_op("GroupQueryAttention", domain=MS)
def group_query_attention(n: Call) -> Outputs:
    """Item b of the batch holds seqlens_k[b] + 1 tokens, the new ones last; the rest is padding."""
    refuse_unusual(n)
    q, k, v = grouped_heads(n)
    batch, heads, new, _ = q.shape
    total = n.size(6)
    length = ops.cast(ops.reshape(n[5], (batch,)), "i64") + 1
    before = ops.maximum(length - size_value(new), 0)  # a prompt that is padded at its end begins at 0
    place = ops.reshape(before, (batch, 1)) + ops.iota((1, new), 1)  # [batch, new]
    if n.flag("do_rotary"):
        ids = place if n.get(9) is None else n[9]
        cos, sin = (ops.expand_dims(ops.gather(t, ids), 1) for t in (n[7], n[8]))
        turn = n.flag("rotary_interleaved")
        q, k = (ops.rope(t, cos, sin, interleaved=turn) for t in (q, k))
    else:
        n.attr("rotary_interleaved", 0)
    keys, values = (present(n, i, t, before, total) for i, t in ((3, k), (4, v)))
    seen = visible(n, place, length, total)
    added = n.get(10)
    if added is not None:
        seen = ops.where(seen, added, n.constant(-np.inf, added.dtype))
    k, v = (
        t if known_eq(t.shape[2], total) is True else ops.slice_axis(t, 2, 0, total) for t in (keys, values)
    )
    if n.flag("smooth_softmax") or n.get(11) is not None:
        k, v, seen = with_sink(n, k, v, seen, heads)
    y = ops.attention(q, k, v, seen, scale=scale_of(n), softcap=float(n.attr("softcap", 0.0)))
    return join_heads(y), keys, values


def size_value(size: Dim) -> int | Node:
    """A size as a number to compute with."""
    return size if isinstance(size, int) else ops.dim_value(size)


def refuse_unusual(n: Call) -> None:
    """What of GroupQueryAttention is not supported."""
    if n.wants(3) or n.attr("qk_output", 0):
        raise ModelImportError("its output of scores (output_qk) is not supported")
    if n.flag("sliding_window_cache"):
        raise ModelImportError("sliding_window_cache is not supported; export with a cache of all tokens")
    quantised = "a quantised cache of keys and values is not supported; export with a cache of floats"
    refuse_inputs(n, {12: quantised, 13: quantised})
    if {str(n.attr(f"{t}_quant_type", "NONE")) for t in "kv"} != {"NONE"} or n.attr("kv_cache_bit_width", 0):
        raise ModelImportError(quantised)


def grouped_heads(n: Call) -> list[Node]:
    """Queries, keys and values as [batch, heads, seq, dim], from three tensors or one."""
    many, few = int(n.attr("num_heads")), int(n.attr("kv_num_heads"))
    parts = [n[0]] if n.get(1) is None else [n[0], n[1], n[2]]
    if len(parts) == 1:
        width = parts[0].shape[2] // (many + 2 * few)
        parts = list(ops.split(parts[0], axis=2, sizes=(many * width, few * width, few * width)))
    out = [split_heads(t, h) for t, h in zip(parts, (many, few, few), strict=True)]
    eps = float(n.attr("qk_norm_epsilon", 1e-6))
    for i, weight in enumerate((n.get(14), n.get(15))):
        if weight is not None:
            out[i] = ops.rms_norm(out[i], weight, -1, eps)
    return out


def present(n: Call, i: int, rows: Node, before: Node, total: Dim) -> Node:
    """The cache with the new rows of each item behind the rows it had, and zeros behind them."""
    past = n.get(i)
    batch, _, new, _ = rows.shape
    if past is None:
        if known_eq(new, total) is None:
            n.graph.assume(Constraint("eq", new, total, (n.label,)))
        elif new != total:
            raise ModelImportError(f"without a past all {total} tokens must be new, but {new} are")
        return rows
    size = dim_max(past.shape[2], total)
    at = ops.iota((1, size), 1)
    start = ops.reshape(before, (batch, 1))
    end = start + size_value(new)
    turned = ops.transpose(rows, (0, 2, 1, 3))
    place = ops.minimum(ops.maximum(at - start, 0), size_value(new - 1))
    moved = ops.transpose(ops.gather(turned, place, axis=1, batch_dims=1), (0, 2, 1, 3))
    old = ops.pad(past, [(0, 0), (0, 0), (0, size - past.shape[2]), (0, 0)])

    def each(x: Node) -> Node:
        return ops.reshape(x, (batch, 1, size, 1))

    fresh = ops.where(each(ops.less(at, end)), moved, n.constant(0, rows.dtype))
    return ops.where(each(ops.less(at, start)), old, fresh)


def visible(n: Call, place: Node, length: Node, total: Dim) -> Node:
    """[batch, 1, new, total]: which keys each new token sees."""
    batch, new = place.shape
    key = ops.iota((1, 1, 1, total), 3)
    query = ops.reshape(place, (batch, 1, new, 1))
    window = int(n.attr("local_window_size", -1))
    last = query if n.flag("causal", 1) else ops.reshape(length - 1, (batch, 1, 1, 1))
    seen = ops.less_equal(key, last)
    return seen if window < 0 else ops.logical_and(seen, ops.greater(key, query - window))


def with_sink(n: Call, k: Node, v: Node, seen: Node, heads: Dim) -> tuple[Node, Node, Node]:
    """One more key of zeros, with a value of zeros, whose score is the head's sink (0 if there is none)."""
    if seen.dtype.is_bool:
        seen = ops.where(seen, n.constant(0, k.dtype), n.constant(-np.inf, k.dtype))
    sink = ops.zeros((1, heads, 1, 1), k.dtype) if n.get(11) is None else ops.reshape(n[11], (1, heads, 1, 1))
    lead = (seen.shape[0], heads, seen.shape[2])
    wide = ops.concat([ops.broadcast_to(t, (*lead, t.shape[3])) for t in (seen, sink)], axis=3)
    more = [ops.concat([t, ops.zeros((*t.shape[:2], 1, t.shape[3]), t.dtype)], axis=2) for t in (k, v)]
    return more[0], more[1], wide
