"""The MiniLM encoder as an ONNX model, for other engines and for the importer's tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


class _Builder:
    def __init__(self, weights: Mapping[str, np.ndarray]) -> None:
        self.weights = weights
        self.nodes: list[Any] = []
        self.values: dict[str, np.ndarray] = {}
        self.count = 0

    def op(self, kind: str, *inputs: str, **attrs: Any) -> str:
        from onnx import helper

        self.count += 1
        out = f"{kind.lower()}_{self.count}"
        self.nodes.append(helper.make_node(kind, list(inputs), [out], name=out, **attrs))
        return out

    def weight(self, name: str, transpose: bool = False) -> str:
        key = name + (".T" if transpose else "")
        self.values[key] = np.ascontiguousarray(self.weights[name].T if transpose else self.weights[name])
        return key

    def constant(self, value: Any, dtype: type = np.int64) -> str:
        self.count += 1
        name = f"const_{self.count}"
        self.values[name] = np.asarray(value, dtype)
        return name

    def linear(self, x: str, name: str) -> str:
        y = self.op("MatMul", x, self.weight(f"{name}.weight", transpose=True))
        return self.op("Add", y, self.weight(f"{name}.bias"))

    def norm(self, x: str, name: str, eps: float) -> str:
        scale, bias = self.weight(f"{name}.weight"), self.weight(f"{name}.bias")
        return self.op("LayerNormalization", x, scale, bias, axis=-1, epsilon=eps)


def build_onnx(config: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> Any:
    """A ModelProto with the inputs, outputs and dynamic dims of `rlx.zoo.minilm.build`."""
    from onnx import TensorProto, helper, numpy_helper

    b = _Builder(weights)
    heads, hidden, eps = config["num_attention_heads"], config["hidden_size"], config["layer_norm_eps"]
    depth = hidden // heads
    words = b.op("Gather", b.weight("embeddings.word_embeddings.weight"), "input_ids", axis=0)
    length = b.op("Shape", "input_ids", start=1, end=2)
    places = b.op(
        "Slice", b.weight("embeddings.position_embeddings.weight"), b.constant([0]), length, b.constant([0])
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
    b.nodes.append(helper.make_node("Identity", [x], ["last_hidden_state"]))
    b.nodes.append(helper.make_node("Div", [mean, norm], ["sentence_embedding"]))
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        b.nodes,
        "minilm",
        [info(n, TensorProto.INT64, ["batch", "seq"]) for n in ("input_ids", "attention_mask")],
        [
            info("last_hidden_state", TensorProto.FLOAT, ["batch", "seq", hidden]),
            info("sentence_embedding", TensorProto.FLOAT, ["batch", hidden]),
        ],
        [numpy_helper.from_array(value, name) for name, value in b.values.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
