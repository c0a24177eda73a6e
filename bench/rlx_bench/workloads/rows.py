"""Rows that memory bounds: an elementwise chain, softmax, layernorm; and attention by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from rlx.zoo.onnx_writer import OnnxWriter
from rlx_bench.workloads.base import Arrays, Run, Workload, normal, rng

PEERS = ("numpy", "torch", "jax", "onnxruntime", "openvino")


def _model(writer: OnnxWriter, rows: int, columns: int) -> Any:
    shape = (np.float32, (rows, columns))
    return writer.model("rows", {"x": shape}, {"y": shape})


def _workload(
    name: str,
    rows: int,
    columns: int,
    write: Callable[[OnnxWriter, np.ndarray, np.ndarray], object],
    plain: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], None],
    torch_ways: Callable[[Any, Any, Any], list[Run]],
) -> Workload:
    generator = rng()
    feed = {"x": normal(generator, rows, columns)}
    scale, shift = normal(generator, columns), normal(generator, columns)

    def onnx() -> Any:
        writer = OnnxWriter()
        write(writer, scale, shift)
        return _model(writer, rows, columns)

    def numpy_ways(arrays: Arrays) -> list[Run]:
        out = np.zeros((rows, columns), np.float32)

        def run() -> list[np.ndarray]:
            plain(arrays["x"], scale, shift, out)
            return [out]

        return [run]

    def torch_code(tensors: dict[str, Any]) -> list[Run]:
        import torch

        return torch_ways(tensors["x"], torch.from_numpy(scale), torch.from_numpy(shift))

    return Workload(
        f"{name} {rows}x{columns}",
        feed,
        PEERS,
        onnx,
        numpy=numpy_ways,
        torch=torch_code,
        bytes=8.0 * rows * columns,
    )


def chain(rows: int, columns: int) -> Workload:
    """silu(x * s + b)."""

    def write(w: OnnxWriter, scale: np.ndarray, shift: np.ndarray) -> None:
        shifted = w.op("Add", w.op("Mul", "x", w.weight("s", scale)), w.weight("b", shift))
        w.op("Mul", shifted, w.op("Sigmoid", shifted), outputs=["y"])

    def plain(x: np.ndarray, scale: np.ndarray, shift: np.ndarray, out: np.ndarray) -> None:
        np.multiply(x, scale, out=out)
        np.add(out, shift, out=out)
        np.divide(out, 1 + np.exp(-out), out=out)

    def torch_ways(x: Any, scale: Any, shift: Any) -> list[Run]:
        import torch

        out = torch.empty_like(x)

        def reused() -> list[Any]:
            torch.addcmul(shift, x, scale, out=out)
            return [torch.nn.functional.silu(out, inplace=True)]

        return [reused]

    return _workload("silu(x*s+b)", rows, columns, write, plain, torch_ways)


def softmax(rows: int, columns: int) -> Workload:
    """Over the last axis."""

    def plain(x: np.ndarray, scale: np.ndarray, shift: np.ndarray, out: np.ndarray) -> None:
        np.subtract(x, x.max(-1, keepdims=True), out=out)
        np.exp(out, out=out)
        np.divide(out, out.sum(-1, keepdims=True), out=out)

    def torch_ways(x: Any, scale: Any, shift: Any) -> list[Run]:
        import torch

        out = torch.empty_like(x)
        return [lambda: [torch.softmax(x, -1, out=out)]]

    return _workload(
        "softmax",
        rows,
        columns,
        lambda w, *_: w.op("Softmax", "x", outputs=["y"], axis=-1),
        plain,
        torch_ways,
    )


def softmax_by_run(rows: int, columns: int) -> Workload:
    """The same through `run`, whose results are new arrays."""
    w = softmax(rows, columns)
    return replace(w, name=f"{w.name} by run", by_run=True, peers=("onnxruntime", "openvino"))


def layernorm(rows: int, columns: int) -> Workload:
    """Over the last axis, with scale and shift."""

    def write(w: OnnxWriter, scale: np.ndarray, shift: np.ndarray) -> None:
        weights = w.weight("s", scale), w.weight("b", shift)
        w.op("LayerNormalization", "x", *weights, outputs=["y"], axis=-1, epsilon=1e-5)

    def plain(x: np.ndarray, scale: np.ndarray, shift: np.ndarray, out: np.ndarray) -> None:
        np.subtract(x, x.mean(-1, keepdims=True), out=out)
        deviation = np.sqrt(np.einsum("ij,ij->i", out, out)[:, None] / x.shape[-1] + 1e-5)
        np.divide(out, deviation, out=out)
        np.multiply(out, scale, out=out)
        np.add(out, shift, out=out)

    def torch_ways(x: Any, scale: Any, shift: Any) -> list[Run]:
        import torch

        out, mean, rstd = torch.empty_like(x), torch.empty(len(x), 1), torch.empty(len(x), 1)

        def reused() -> list[Any]:
            into = {"out0": out, "out1": mean, "out2": rstd}
            torch.ops.aten.native_layer_norm.out(x, [x.shape[-1]], scale, shift, 1e-5, **into)
            return [out]

        return [reused]

    return _workload("layernorm", rows, columns, write, plain, torch_ways)


def attention(heads: int, length: int, depth: int, causal: int = 0) -> Workload:
    """softmax(q k^T / sqrt(d)) v over [1, heads, length, depth]."""
    generator = rng()
    shape = (1, heads, length, depth)
    feed = {name: normal(generator, *shape) for name in "qkv"}
    future = np.triu(np.full((length, length), -np.inf, np.float32), 1)

    def onnx() -> Any:
        w = OnnxWriter()
        scores = w.op("MatMul", "q", w.op("Transpose", "k", perm=[0, 1, 3, 2]))
        scores = w.op("Mul", scores, w.constant(depth**-0.5, np.float32))
        scores = w.op("Add", scores, w.weight("future", future)) if causal else scores
        w.op("MatMul", w.op("Softmax", scores, axis=-1), "v", outputs=["y"])
        value = (np.float32, shape)
        return w.model("attention", dict.fromkeys("qkv", value), {"y": value})

    def torch_ways(t: dict[str, Any]) -> list[Run]:
        import torch

        attend = torch.nn.functional.scaled_dot_product_attention
        return [lambda: [attend(t["q"], t["k"], t["v"], is_causal=bool(causal))]]

    return Workload(
        f"attention {heads}x{length}x{depth}" + (" causal" if causal else ""),
        feed,
        ("torch", "onnxruntime", "openvino"),
        onnx,
        torch=torch_ways,
        flops=4.0 * heads * length * length * depth / (2 if causal else 1),
    )
