"""Matrix products: f32 with constant weights, int8, and weights of 8 and 4 bits in groups."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.zoo.onnx_writer import OnnxWriter
from rlx_bench.workloads.base import Arrays, Run, Workload, normal, rng

PEERS = ("onnxruntime", "openvino")
SHORT_FLOPS = 2.4e6
"""About 20 us of one core: shorter products are repeated inside the model, so that calls do not count."""

SWEEP = (
    *[(m, 384, 1536) for m in (1, 2, 3, 4, 5, 7, 8, 11, 16, 17, 33, 64, 127, 128, 129, 256)],
    *[(m, 384, 384) for m in (1, 8, 17, 128)],
    *[(m, 1536, 384) for m in (1, 8, 17, 128)],
    *[(m, 768, 3072) for m in (1, 5, 32, 512)],
    *[(m, 3072, 768) for m in (1, 32, 128)],
    *[(m, 768, 768) for m in (1, 7, 128, 200)],
    *[(s, s, s) for s in (16, 31, 64, 100, 127, 128, 200, 256, 384, 511, 512, 768, 1024, 2048)],
    (127, 383, 1001),
    (1, 4096, 4096),
    (3, 77, 13),
    (33, 100, 17),
    (5, 1000, 7),
    (64, 2048, 10),
    (1000, 64, 64),
    (4096, 32, 32),
    (10, 10, 2000),
    (250, 9, 300),
    (49, 512, 2048),
)


def gemm(m: int, k: int, n: int) -> Workload:
    """x @ w + b with constant w and b."""
    flops = 2.0 * m * k * n
    copies = 1 if flops > SHORT_FLOPS else min(64, int(SHORT_FLOPS / flops) + 1)
    generator = rng()
    w, b = normal(generator, k, n), normal(generator, n)
    feed = {f"x{i}": normal(generator, m, k) for i in range(copies)}

    def onnx() -> Any:
        writer = OnnxWriter()
        weight, bias = writer.weight("w", w), writer.weight("b", b)
        for i in range(copies):
            writer.op("Add", writer.op("MatMul", f"x{i}", weight), bias, outputs=[f"y{i}"])
        shape = (np.float32, (m, n))
        return writer.model(
            "gemm", dict.fromkeys(feed, (np.float32, (m, k))), {f"y{i}": shape for i in range(copies)}
        )

    def plain(arrays: Arrays) -> list[Run]:
        outs = [np.empty((m, n), np.float32) for _ in arrays]

        def run() -> list[np.ndarray]:
            for x, y in zip(arrays.values(), outs, strict=True):
                np.matmul(x, w, out=y)
                np.add(y, b, out=y)
            return outs

        return [run]

    def torch_ways(tensors: dict[str, Any]) -> list[Run]:
        import torch

        weight, turned, bias = torch.from_numpy(w), torch.from_numpy(w.T.copy()), torch.from_numpy(b)
        outs = [torch.empty(m, n) for _ in tensors]

        def reused() -> list[Any]:
            for x, y in zip(tensors.values(), outs, strict=True):
                torch.addmm(bias, x, weight, out=y)
            return outs

        return [reused, lambda: [torch.nn.functional.linear(x, turned, bias) for x in tensors.values()]]

    return Workload(
        f"gemm {m}x{k}x{n}",
        feed,
        ("numpy", "torch", "onnxruntime", "openvino"),
        onnx,
        numpy=plain,
        torch=torch_ways,
        flops=flops * copies,
        copies=copies,
        tolerance=1e-5,
    )


def int8(m: int, k: int, n: int, bits: int = 7) -> Workload:
    """MatMulInteger of u8 activations and i8 weights of so many bits with per-column scales."""
    generator, half = rng(), 1 << bits - 1
    w = generator.integers(-half, half, (k, n)).astype(np.int8)
    scale = generator.uniform(0.01, 0.02, n).astype(np.float32)
    feed = {"x": generator.integers(0, 255, (m, k)).astype(np.uint8)}

    def onnx() -> Any:
        writer = OnnxWriter()
        zero = writer.constant(128, np.uint8)
        product = writer.op("MatMulInteger", "x", writer.weight("w", w), zero)
        real = writer.op("Cast", product, to=1)
        writer.op("Mul", real, writer.weight("scale", scale), outputs=["y"])
        return writer.model("int8", {"x": (np.uint8, (m, k))}, {"y": (np.float32, (m, n))})

    name = f"int8 gemm {m}x{k}x{n}" + ("" if bits == 7 else f" {bits} bits")
    return Workload(name, feed, PEERS, onnx, flops=2.0 * m * k * n, dtype="i8")


def nbits(bits: int, m: int, k: int, n: int) -> Workload:
    """MatMulNBits: weights of 4 or 8 bits in groups of 32; several copies, so that they come from memory."""
    group, generator = 32, rng()
    copies = max(1, (128 << 20) // (k * n * bits // 8)) if m * k * n > 1 << 20 else 1
    feed = {"x": normal(generator, m, k)}
    packed = [
        generator.integers(0, 256, (n, k // group, group * bits // 8)).astype(np.uint8) for _ in range(copies)
    ]
    scales = generator.uniform(0.01, 0.02, (n, k // group)).astype(np.float32)

    def onnx() -> Any:
        writer = OnnxWriter()
        scale = writer.weight("scales", scales)
        for i, codes in enumerate(packed):
            writer.op(
                "MatMulNBits",
                "x",
                writer.weight(f"w{i}", codes),
                scale,
                outputs=[f"y{i}"],
                domain="com.microsoft",
                K=k,
                N=n,
                bits=bits,
                block_size=group,
            )
        outputs = {f"y{i}": (np.float32, (m, n)) for i in range(copies)}
        return writer.model("nbits", {"x": (np.float32, (m, k))}, outputs, contrib=True)

    return Workload(
        f"int{bits} weights {m}x{k}x{n}",
        feed,
        PEERS,
        onnx,
        flops=2.0 * m * k * n * copies,
        writes=False,
        bytes=float(k * n * bits // 8 + scales.nbytes) * copies,
        copies=copies,
    )
