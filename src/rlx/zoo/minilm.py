"""all-MiniLM-L6-v2 as an RLX graph, built from the weights of its package (which holds no ONNX file)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rlx import ops
from rlx.frontend.onnx.lazy_weights import KeptFile
from rlx.ir.dtype import F32, LazyArray, ParamValue
from rlx.ir.graph import Graph, Node
from rlx.ir.mesh import Shard


class _Builder:
    """Adds weights as params under their own names."""

    def __init__(self, graph: Graph, weights: Mapping[str, ParamValue]) -> None:
        self.graph, self.weights = graph, weights

    def param(self, name: str) -> Node:
        if name not in self.graph.params:
            value = self.weights[name]
            self.graph.param(name, value.shape, value.dtype, value=value)
        return self.graph.params[name]

    def linear(self, x: Node, name: str) -> Node:
        made: Node = ops.linear(x, self.param(f"{name}.weight"), self.param(f"{name}.bias"), transposed=True)
        return made

    def norm(self, x: Node, name: str, eps: float) -> Node:
        made: Node = ops.layer_norm(x, self.param(f"{name}.weight"), self.param(f"{name}.bias"), eps=eps)
        return made


def build(config: Mapping[str, Any], weights: Mapping[str, ParamValue]) -> Graph:
    """A BERT encoder with mean pooling: token ids and mask in, normalised sentence embeddings out.

    Batch and sequence length are symbols: one program serves every size.
    """
    g = Graph("minilm")
    w = _Builder(g, weights)
    heads, hidden, eps = config["num_attention_heads"], config["hidden_size"], config["layer_norm_eps"]
    ids = g.input("input_ids", ("batch", "seq"), "i64")
    mask = g.input("attention_mask", ("batch", "seq"), "i64")
    batch, seq = ids.shape
    words = ops.embedding(w.param("embeddings.word_embeddings.weight"), ids)
    places = ops.slice_axis(w.param("embeddings.position_embeddings.weight"), 0, 0, seq)
    kind = ops.slice_axis(w.param("embeddings.token_type_embeddings.weight"), 0, 0, 1)
    x = w.norm(words + places + kind, "embeddings.LayerNorm", eps)
    seen = ops.reshape(ops.not_equal(mask, 0), (batch, 1, 1, seq))

    def split(t: Node) -> Node:
        made: Node = ops.transpose(ops.reshape(t, (batch, seq, heads, hidden // heads)), (0, 2, 1, 3))
        return made

    for i in range(config["num_hidden_layers"]):
        name = f"encoder.layer.{i}"
        q, k, v = (split(w.linear(x, f"{name}.attention.self.{part}")) for part in ("query", "key", "value"))
        context = ops.attention(q, k, v, seen)
        context = ops.reshape(ops.transpose(context, (0, 2, 1, 3)), (batch, seq, hidden))
        x = w.norm(
            x + w.linear(context, f"{name}.attention.output.dense"), f"{name}.attention.output.LayerNorm", eps
        )
        inner = ops.gelu(w.linear(x, f"{name}.intermediate.dense"))
        x = w.norm(x + w.linear(inner, f"{name}.output.dense"), f"{name}.output.LayerNorm", eps)
    weight = ops.reshape(ops.cast(mask, "f32"), (batch, seq, 1))
    total = ops.sum(x * weight, axis=1)
    mean = total / ops.maximum(ops.sum(weight, axis=1), 1e-9)
    length = ops.sqrt(ops.sum(mean * mean, axis=-1, keepdims=True))
    g.output("last_hidden_state", x)
    g.output("sentence_embedding", mean / ops.maximum(length, 1e-12))
    return g


def tensor_parallel(graph: Graph, axis: str = "tp") -> dict[str, dict[str, Shard]]:
    """Shardings that split heads, feed-forward columns and embeddings over an axis of a mesh.

    Projections to heads and to the inner layer are cut by rows of their weights (their outputs), the two
    that lead back by columns (their inputs), so that each layer needs two sums over the ranks. Embeddings are
    cut along the hidden axis. What is left out (norms, two biases) is small and the same on every rank.
    """
    into = ("query", "key", "value", "intermediate.dense")
    out: dict[str, dict[str, Shard]] = {}
    for name in graph.params:
        layer = name.removesuffix(".weight").removesuffix(".bias")
        if layer.endswith(into):
            out[name] = {axis: Shard(0)}
        elif name.endswith((".output.dense.weight", "_embeddings.weight")):
            out[name] = {axis: Shard(1)}
    return out


def load_graph(folder: Path, lazy: bool = False) -> Graph:
    """The graph from the files of the zoo's `minilm` entry; `lazy` params are read when they are needed."""
    config = json.loads((folder / "config.json").read_text())
    weights = _weights(KeptFile(folder / "model.safetensors"))
    return build(config, weights if lazy else {name: np.asarray(w) for name, w in weights.items()})


def _weights(file: KeptFile) -> dict[str, LazyArray]:
    """The tensors of a safetensors file, all of which are f32 here."""
    start = 8 + int(file.read(0, 8).view("<u8")[0])
    described = json.loads(file.read(8, start - 8).tobytes())
    found = {}
    for name, about in described.items():
        if about.get("dtype") == "F32":
            shape, (first, stop) = tuple(about["shape"]), about["data_offsets"]
            whole = partial(_tensor, file, start + first, shape, 0, (stop - first) // 4)
            part = partial(_tensor, file, start + first, (-1,))
            found[name] = LazyArray(F32, shape, whole, part=part)
    return found


def _tensor(file: KeptFile, offset: int, shape: tuple[int, ...], first: int, stop: int) -> np.ndarray:
    return file.read(offset + 4 * first, 4 * (stop - first)).view("<f4").reshape(shape)
