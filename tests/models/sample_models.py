"""Small models in the shape of real ones, for tests of fusion and planning."""

from __future__ import annotations

from typing import Any

import numpy as np

import rlx
from rlx import ops
from rlx.ir.graph import Graph, Node
from rlx.zoo import minilm


class RandomWeights(dict[str, np.ndarray]):
    """Weights of a BERT of any size, made when they are asked for."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.hidden, self.rng = hidden, np.random.default_rng(0)

    def __missing__(self, name: str) -> np.ndarray:
        h = self.hidden
        inner = "intermediate" in name
        if "position_embeddings" in name:
            shape: tuple[int, ...] = (128, h)
        elif "_embeddings" in name:
            shape = (100, h)
        elif name.endswith("bias") or "LayerNorm" in name:
            shape = (4 * h,) if inner else (h,)
        elif inner:
            shape = (4 * h, h)
        else:
            shape = (h, 4 * h) if name.endswith("output.dense.weight") and "attention" not in name else (h, h)
        value = self.rng.standard_normal(shape, np.float32) / 8
        return self.setdefault(name, value)


def bert(layers: int = 2, hidden: int = 64, heads: int = 4) -> Graph:
    """MiniLM's architecture with random weights."""
    config = {
        "num_attention_heads": heads,
        "hidden_size": hidden,
        "layer_norm_eps": 1e-12,
        "num_hidden_layers": layers,
    }
    return minilm.build(config, RandomWeights(hidden))


def bert_inputs(batch: int = 2, seq: int = 12) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    mask = np.ones((batch, seq), np.int64)
    mask[-1, seq // 2 :] = 0
    return {"input_ids": rng.integers(0, 100, (batch, seq)), "attention_mask": mask}


def exported_attention(style: str) -> Graph:
    """One attention layer as exporters write it: from primitives, with transposes and reshapes around."""
    g = rlx.Graph(style)
    heads, width, seq = 4, 16, "s"
    hidden = heads * width
    x = g.input("x", (2, seq, hidden), "f32")
    s = x.shape[1]
    rng = np.random.default_rng(2)

    def weight(name: str) -> Node:
        return g.param(name, (hidden, hidden), "f32", rng.standard_normal((hidden, hidden), np.float32) / 8)

    def split(t: Node) -> Any:
        if style == "sequence first":
            return ops.transpose(ops.reshape(t, (s, 2 * heads, width)), (1, 0, 2))
        return ops.transpose(ops.reshape(t, (2, s, heads, width)), (0, 2, 1, 3))

    if style == "sequence first":
        x = ops.transpose(x, (1, 0, 2)) * 1.5
    q, k, v = (split(x @ weight(n)) for n in "qkv")
    context = ops.softmax(_scores(g, style, q, k), axis=-1) @ v
    if style == "sequence first":
        joined = ops.reshape(ops.transpose(context, (1, 0, 2)), (s, 2, hidden))
    else:
        joined = ops.reshape(ops.transpose(context, (0, 2, 1, 3)), (2, s, hidden))
    g.output("y", joined @ weight("o"))
    return g


def _scores(g: Graph, style: str, q: Any, k: Any) -> Any:
    s, width = q.shape[-2:]
    if style == "sequence first":
        return q @ ops.transpose(k, (0, 2, 1)) * width**-0.5
    turned = ops.transpose(k, (0, 1, 3, 2))
    if style == "plain":
        return (q @ turned) * width**-0.5
    if style == "scale before":
        return (q * width**-0.5) @ turned
    if style == "additive mask":
        mask = g.input("mask", (2, 1, 1, "s"), "f32")
        return q @ turned / float(width**0.5) + mask
    if style == "hidden by where":
        mask = g.input("mask", (2, 1, 1, "s"), "bool")
        return ops.where(mask, q @ turned * width**-0.5, -float("inf"))
    if style == "causal":
        with g.building():
            seen = ops.iota((1, s), axis=1) <= ops.iota((s, 1), axis=0)
        return ops.where(seen, q @ turned * width**-0.5, -float("inf"))
    raise ValueError(style)


EXPORTED = ("plain", "scale before", "additive mask", "hidden by where", "causal", "sequence first")


def exported_inputs(style: str, seq: int = 9) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    feed: dict[str, np.ndarray] = {"x": rng.standard_normal((2, seq, 64), np.float32)}
    seen = np.ones((2, 1, 1, seq), bool)
    seen[1, ..., seq // 2 :] = False
    if style == "additive mask":
        feed["mask"] = np.where(seen, 0, -1e4).astype(np.float32)
    if style == "hidden by where":
        feed["mask"] = seen
    return feed
