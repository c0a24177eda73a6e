"""What is measured. A workload gives the same computation to every engine that can take it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlx.errors import ConfigError
from rlx.ir.graph import Graph


@dataclass
class Workload:
    """One row: inputs, and the computation as a graph, an ONNX model, NumPy or torch code (None: cannot)."""

    name: str
    feed: dict[str, np.ndarray]
    graph: Callable[[], Graph]
    onnx: Callable[[], Any] | None = None
    numpy: Callable[[dict[str, np.ndarray]], list[np.ndarray]] | None = None
    torch: Callable[[dict[str, Any]], Any] | None = None
    flops: float = 0.0
    bytes: float = 0.0
    tolerance: float = 1e-4
    note: str = ""
    tags: tuple[str, ...] = field(default=())


def _onnx_graph(
    name: str, nodes: list[Any], inputs: dict[str, Any], outputs: list[str], weights: dict[str, Any]
) -> Any:
    from onnx import TensorProto, helper, numpy_helper

    kinds = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.int64): TensorProto.INT64}
    graph = helper.make_graph(
        nodes,
        name,
        [helper.make_tensor_value_info(k, kinds[a.dtype], a.shape) for k, a in inputs.items()],
        [helper.make_tensor_value_info(k, TensorProto.FLOAT, None) for k in outputs],
        [numpy_helper.from_array(v, k) for k, v in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def gemm(m: int, k: int, n: int) -> Workload:
    """x @ w + b with constant w."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)
    b = rng.standard_normal(n, np.float32)

    def graph() -> Graph:
        g = Graph("gemm")
        rows = g.input("x", (m, k), "f32")
        g.output("y", rows @ g.param("w", (k, n), "f32", value=w) + g.param("b", (n,), "f32", value=b))
        return g

    def onnx() -> Any:
        from onnx import helper

        nodes = [helper.make_node("MatMul", ["x", "w"], ["t"]), helper.make_node("Add", ["t", "b"], ["y"])]
        return _onnx_graph("gemm", nodes, {"x": x}, ["y"], {"w": w, "b": b})

    def torch_run(feed: dict[str, Any]) -> Any:
        import torch

        layer = _cached(lambda: (torch.from_numpy(w.T.copy()), torch.from_numpy(b)), "gemm", (m, k, n))
        return torch.nn.functional.linear(feed["x"], *layer)

    return Workload(
        f"gemm {m}x{k}x{n}",
        {"x": x},
        graph,
        onnx,
        lambda f: [f["x"] @ w + b],
        torch_run,
        flops=2.0 * m * k * n,
        tolerance=1e-3 * np.sqrt(k),
        tags=("gemm",),
    )


_CACHE: dict[Any, Any] = {}


def _cached(make: Callable[[], Any], *key: Any) -> Any:
    if key not in _CACHE:
        _CACHE[key] = make()
    return _CACHE[key]


def _elementwise(name: str, rows: int, columns: int, build: Callable[[Any, Any], Any], kind: str) -> Workload:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, columns), np.float32)
    scale, shift = rng.standard_normal(columns, np.float32), rng.standard_normal(columns, np.float32)

    def graph() -> Graph:
        g = Graph(kind)
        g.output("y", build(g.input("x", (rows, columns), "f32"), (g.constant(scale), g.constant(shift))))
        return g

    def onnx() -> Any:
        from onnx import helper

        if kind == "softmax":
            nodes = [helper.make_node("Softmax", ["x"], ["y"], axis=-1)]
        elif kind == "layernorm":
            nodes = [helper.make_node("LayerNormalization", ["x", "s", "b"], ["y"], axis=-1, epsilon=1e-5)]
        else:
            nodes = [
                helper.make_node("Mul", ["x", "s"], ["a"]),
                helper.make_node("Add", ["a", "b"], ["c"]),
                helper.make_node("Sigmoid", ["c"], ["d"]),
                helper.make_node("Mul", ["c", "d"], ["y"]),
            ]
        used = {"softmax": {}}.get(kind, {"s": scale, "b": shift})
        return _onnx_graph(kind, nodes, {"x": x}, ["y"], used)

    def torch_run(feed: dict[str, Any]) -> Any:
        import torch

        s, b = _cached(lambda: (torch.from_numpy(scale), torch.from_numpy(shift)), kind, columns)
        if kind == "softmax":
            return torch.softmax(feed["x"], -1)
        if kind == "layernorm":
            return torch.nn.functional.layer_norm(feed["x"], (columns,), s, b)
        return torch.nn.functional.silu(feed["x"] * s + b)

    def plain(feed: dict[str, np.ndarray]) -> list[np.ndarray]:
        v = feed["x"]
        if kind == "softmax":
            e = np.exp(v - v.max(-1, keepdims=True))
            return [e / e.sum(-1, keepdims=True)]
        if kind == "layernorm":
            centred = v - v.mean(-1, keepdims=True)
            return [centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + 1e-5) * scale + shift]
        c = v * scale + shift
        return [c / (1 + np.exp(-c))]

    return Workload(
        f"{name} {rows}x{columns}",
        {"x": x},
        graph,
        onnx,
        plain,
        torch_run,
        bytes=8.0 * rows * columns,
        tags=("elementwise",),
    )


def softmax(rows: int, columns: int) -> Workload:
    from rlx import ops

    return _elementwise("softmax", rows, columns, lambda x, _: ops.softmax(x, axis=-1), "softmax")


def layernorm(rows: int, columns: int) -> Workload:
    from rlx import ops

    return _elementwise("layernorm", rows, columns, lambda x, w: ops.layer_norm(x, *w), "layernorm")


def chain(rows: int, columns: int) -> Workload:
    from rlx import ops

    return _elementwise("silu(x*s+b)", rows, columns, lambda x, w: ops.silu(x * w[0] + w[1]), "chain")


def minilm(batch: int, seq: int) -> Workload:
    """The real encoder with its trained weights."""
    from rlx import zoo

    folder = zoo.fetch("minilm").parent
    rng = np.random.default_rng(0)
    feed = {
        "input_ids": rng.integers(1000, 30000, (batch, seq)),
        "attention_mask": np.ones((batch, seq), np.int64),
    }

    def graph() -> Graph:
        from rlx.zoo.minilm import load_graph

        return load_graph(folder)

    def onnx() -> Any:
        from safetensors.numpy import load_file

        from rlx.zoo.minilm_onnx import build_onnx

        config = json.loads((folder / "config.json").read_text())
        return build_onnx(config, load_file(folder / "model.safetensors"))

    per_token = 6 * (4 * 384 * 384 + 2 * 384 * 1536) * 2 + 6 * 4 * seq * 384
    return Workload(
        f"MiniLM b{batch} s{seq}",
        feed,
        graph,
        onnx,
        flops=float(per_token * batch * seq),
        tolerance=2e-4,
        tags=("minilm",),
    )


MAKERS: dict[str, Callable[..., Workload]] = {
    "gemm": gemm,
    "softmax": softmax,
    "layernorm": layernorm,
    "chain": chain,
    "minilm": minilm,
}

SUITES: dict[str, tuple[str, ...]] = {
    "quick": ("minilm:1,16", "minilm:1,128", "gemm:128,384,1536", "softmax:1024,1024", "layernorm:1024,1024"),
    "gemm": (
        "gemm:1,384,1536",
        "gemm:8,384,1536",
        "gemm:16,384,1536",
        "gemm:128,384,384",
        "gemm:128,384,1536",
        "gemm:127,383,1001",
        "gemm:512,768,3072",
        "gemm:1,4096,4096",
        "gemm:3,77,13",
        "gemm:1024,1024,1024",
        "gemm:2048,2048,2048",
    ),
    "elementwise": ("chain:4096,4096", "softmax:4096,4096", "layernorm:4096,4096"),
    "minilm": ("minilm:1,16", "minilm:1,128", "minilm:32,128"),
}


def make(spec: str) -> Workload:
    """A workload from its text, for example "gemm:128,384,1536".

    >>> make("gemm:2,3,4").name
    'gemm 2x3x4'
    """
    name, _, args = spec.partition(":")
    if name not in MAKERS:
        raise ConfigError(f"no workload is called {name!r}; known: {', '.join(MAKERS)}")
    try:
        return MAKERS[name](*(int(a) for a in args.split(",") if a))
    except (TypeError, ValueError):
        raise ConfigError(f"workload {spec!r} has wrong sizes; write for example gemm:128,384,1536") from None
