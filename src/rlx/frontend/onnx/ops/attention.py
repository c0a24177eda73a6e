"""Attention and rotary positions."""

from __future__ import annotations

from rlx import ops
from rlx.errors import ShapeError
from rlx.frontend.onnx.call import Call
from rlx.frontend.onnx.registry import onnx_op
from rlx.frontend.onnx.value import Outputs
from rlx.ir.graph import Node


def split_heads(x: Node, heads: int) -> Node:
    """[batch, seq, heads * dim] -> [batch, heads, seq, dim]."""
    batch, seq, width = x.shape
    return ops.transpose(ops.reshape(x, (batch, seq, heads, width // heads)), (0, 2, 1, 3))


def join_heads(x: Node) -> Node:
    """[batch, heads, seq, dim] -> [batch, seq, heads * dim]."""
    batch, heads, seq, dim = x.shape
    return ops.reshape(ops.transpose(x, (0, 2, 1, 3)), (batch, seq, heads * dim))


def wide_mask(mask: Node | None) -> Node | None:
    """A mask with the four axes of the scores."""
    return None if mask is None else ops.reshape(mask, (*(1,) * (4 - mask.rank), *mask.shape))


@onnx_op("Attention", since=23)
def attention(n: Call) -> Outputs:
    """The common case as one op; outputs of scores, ragged caches and the like by ONNX's definition."""
    ordinary = len(n) <= 6 and not n.wants(3) and not n.has("softmax_precision") and n.value(3) is None
    ordinary = ordinary and not n.has("left_window_size") and not n.has("right_window_size")
    if not ordinary or (n.flag("is_causal") and n.value(4) is not None):
        return n.expand()
    q, k, v = n[0], n[1], n[2]
    flat = q.rank == 3
    if flat:
        q = split_heads(q, int(n.attr("q_num_heads")))
        k, v = (split_heads(x, int(n.attr("kv_num_heads"))) for x in (k, v))
    else:
        n.attr("q_num_heads", 0), n.attr("kv_num_heads", 0)
    if q.dtype is not k.dtype or q.dtype is not v.dtype:
        return n.expand()
    past_k, past_v = n.get(4), n.get(5)
    if past_k is not None and past_v is not None:
        k, v = ops.concat([past_k, k], axis=2), ops.concat([past_v, v], axis=2)
    scale = n.attr("scale", None)
    y = ops.attention(
        q,
        k,
        v,
        causal=n.flag("is_causal"),
        scale=None if not scale else float(scale),
        softcap=n.attr("softcap", 0.0),
    )
    n.attr("qk_matmul_output_mode", 0)
    return (join_heads(y) if flat else y), k, v


@onnx_op("RotaryEmbedding", since=23)
def rotary_embedding(n: Call) -> Outputs:
    x, cos, sin = n[0], n[1], n[2]
    flat = x.rank == 3
    heads, size = int(n.attr("num_heads", 0)), int(n.attr("rotary_embedding_dim", 0))
    interleaved = n.flag("interleaved")
    if flat:
        if not heads:
            raise ShapeError(f"its input {x.tensor} has three axes, so num_heads must be given")
        x = split_heads(x, heads)
    if n.get(3) is not None:
        cos, sin = ops.gather(cos, n[3]), ops.gather(sin, n[3])
    width = size or x.shape[-1]
    cos, sin = (ops.expand_dims(t, 1) for t in (cos, sin))
    half = width // 2
    cos, sin = (ops.slice_axis(t, -1, 0, half) for t in (cos, sin))
    y = ops.rope(x, cos, sin, interleaved=interleaved)
    return join_heads(y) if flat else y
