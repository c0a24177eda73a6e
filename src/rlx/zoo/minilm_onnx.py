"""The MiniLM encoder as an ONNX model, for other engines and for the importer's tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.zoo.onnx_writer import OnnxWriter

if TYPE_CHECKING:
    from onnx import ModelProto


class _Encoder(OnnxWriter):
    """Blocks of a transformer encoder over named weights."""

    def __init__(self, weights: Mapping[str, np.ndarray]) -> None:
        super().__init__()
        self.weights = weights

    def named(self, name: str, transpose: bool = False) -> str:
        value = self.weights[name]
        return self.weight(name + (".T" if transpose else ""), value.T if transpose else value)

    def linear(self, x: str, name: str) -> str:
        y = self.op("MatMul", x, self.named(f"{name}.weight", transpose=True))
        return self.op("Add", y, self.named(f"{name}.bias"))

    def norm(self, x: str, name: str, eps: float) -> str:
        scale, bias = self.named(f"{name}.weight"), self.named(f"{name}.bias")
        return self.op("LayerNormalization", x, scale, bias, axis=-1, epsilon=eps)


def build_onnx(config: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> ModelProto:
    """A ModelProto with the inputs, outputs and dynamic dims of `rlx.zoo.minilm.build`."""
    from onnx import TensorProto

    b = _Encoder(weights)
    heads, hidden, eps = config["num_attention_heads"], config["hidden_size"], config["layer_norm_eps"]
    depth = hidden // heads
    words = b.op("Gather", b.named("embeddings.word_embeddings.weight"), "input_ids", axis=0)
    length = b.op("Shape", "input_ids", start=1, end=2)
    places = b.op(
        "Slice", b.named("embeddings.position_embeddings.weight"), b.constant([0]), length, b.constant([0])
    )
    kind = b.constant(weights["embeddings.token_type_embeddings.weight"][0], np.float32)
    x = b.norm(b.op("Add", b.op("Add", words, places), kind), "embeddings.LayerNorm", eps)
    seen = b.op("Cast", "attention_mask", to=TensorProto.FLOAT)
    hidden_by = b.op("Mul", b.op("Sub", b.constant(1.0, np.float32), seen), b.constant(-3.0e38, np.float32))
    mask = b.op("Unsqueeze", hidden_by, b.constant([1, 2]))
    split, joined = b.constant([0, 0, heads, depth]), b.constant([0, 0, hidden])

    def by_heads(t: str, perm: list[int]) -> str:
        return b.op("Transpose", b.op("Reshape", t, split), perm=perm)

    for i in range(config["num_hidden_layers"]):
        name = f"encoder.layer.{i}"
        q, k, v = (b.linear(x, f"{name}.attention.self.{part}") for part in ("query", "key", "value"))
        scores = b.op("MatMul", by_heads(q, [0, 2, 1, 3]), by_heads(k, [0, 2, 3, 1]))
        scores = b.op("Add", b.op("Div", scores, b.constant(np.sqrt(depth), np.float32)), mask)
        context = b.op("MatMul", b.op("Softmax", scores, axis=-1), by_heads(v, [0, 2, 1, 3]))
        context = b.op("Reshape", b.op("Transpose", context, perm=[0, 2, 1, 3]), joined)
        attended = b.op("Add", b.linear(context, f"{name}.attention.output.dense"), x)
        x = b.norm(attended, f"{name}.attention.output.LayerNorm", eps)
        inner = b.linear(x, f"{name}.intermediate.dense")
        half = b.op("Mul", inner, b.constant(0.5, np.float32))
        erf = b.op("Erf", b.op("Div", inner, b.constant(np.sqrt(2.0), np.float32)))
        inner = b.op("Mul", half, b.op("Add", erf, b.constant(1.0, np.float32)))
        x = b.norm(b.op("Add", b.linear(inner, f"{name}.output.dense"), x), f"{name}.output.LayerNorm", eps)
    weight = b.op("Unsqueeze", seen, b.constant([2]))
    total = b.op("ReduceSum", b.op("Mul", x, weight), b.constant([1]), keepdims=0)
    count = b.op("Max", b.op("ReduceSum", weight, b.constant([1]), keepdims=0), b.constant(1e-9, np.float32))
    mean = b.op("Div", total, count)
    square = b.op("ReduceSum", b.op("Mul", mean, mean), b.constant([-1]), keepdims=1)
    norm = b.op("Max", b.op("Sqrt", square), b.constant(1e-12, np.float32))
    b.op("Identity", x, outputs=["last_hidden_state"])
    b.op("Div", mean, norm, outputs=["sentence_embedding"])
    return b.model(
        "minilm",
        dict.fromkeys(("input_ids", "attention_mask"), (np.int64, ("batch", "seq"))),
        {
            "last_hidden_state": (np.float32, ("batch", "seq", hidden)),
            "sentence_embedding": (np.float32, ("batch", hidden)),
        },
    )
