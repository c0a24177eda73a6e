"""Times of other engines seen before, by kind of machine: one much slower now points at our harness."""

from __future__ import annotations

from rlx_bench.harness import Row
from rlx_bench.machine import kind

SLACK = 1.10

# By kind of machine (rlx_bench.machine.kind): the best median of an engine that was ever seen there.
MILLISECONDS: dict[str, dict[tuple[str, str, int], float]] = {
    "zen4-x86-64-v4-bf16-vnni": {
        ("MiniLM b1 s16", "openvino", 1): 4.87,
        ("MiniLM b1 s16", "openvino", 2): 2.6,
        ("MiniLM b1 s16", "onnxruntime", 1): 5.88,
        ("MiniLM b1 s16", "jax", 1): 9.2,
        ("MiniLM b1 s128", "openvino", 1): 29.3,
        ("MiniLM b1 s128", "openvino", 2): 19.0,
        ("MiniLM b1 s128", "onnxruntime", 1): 35.5,
        ("MiniLM b1 s128", "jax", 1): 35.2,
        ("MiniLM b32 s128", "openvino", 1): 962,
        ("MiniLM b32 s128", "openvino", 2): 517,
        ("MiniLM b32 s128", "onnxruntime", 1): 1181,
        ("MiniLM b32 s128", "jax", 1): 1236,
        ("softmax 4096x4096", "torch", 1): 11.3,
        ("ResNet-50 b1", "openvino", 1): 80,
        ("ResNet-50 b1", "openvino", 2): 44,
        ("ResNet-50 b1", "onnxruntime", 1): 83,
        ("ResNet-50 b1", "onnxruntime", 2): 43,
        ("GPT-2 prefill 128", "openvino", 1): 235,
        ("GPT-2 prefill 128", "openvino", 2): 135,
        ("GPT-2 prefill 128", "onnxruntime", 1): 249,
        ("GPT-2 prefill 128", "onnxruntime", 2): 167,
        ("GPT-2 decode after 128", "onnxruntime", 1): 29.5,
        ("GPT-2 decode after 128", "onnxruntime", 2): 21.2,
        ("GPT-2 decode after 128", "openvino", 1): 28.9,
        ("GPT-2 decode after 128", "openvino", 2): 23.5,
        ("train step MLP b128", "jax", 1): 5.3,
        ("train step MLP b128", "jax", 2): 2.9,
        ("train step MLP b128", "torch", 1): 5.8,
        ("train step MLP b128", "torch", 2): 3.4,
    },
    "zen5-x86-64-v4-bf16-vnni": {
        ("MiniLM b1 s16", "onnxruntime", 1): 2.84,
        ("MiniLM b1 s16", "onnxruntime", 2): 1.74,
        ("MiniLM b1 s16", "openvino", 1): 2.16,
        ("MiniLM b1 s16", "openvino", 2): 1.41,
        ("MiniLM b1 s128", "onnxruntime", 1): 13.45,
        ("MiniLM b1 s128", "onnxruntime", 2): 9.38,
        ("MiniLM b1 s128", "openvino", 1): 12.12,
        ("MiniLM b1 s128", "openvino", 2): 7.47,
        ("MiniLM b32 s128", "onnxruntime", 1): 456.62,
        ("MiniLM b32 s128", "onnxruntime", 2): 235.14,
        ("MiniLM b32 s128", "openvino", 1): 384.46,
        ("MiniLM b32 s128", "openvino", 2): 207.9,
        ("ResNet-50 b1", "onnxruntime", 1): 32.58,
        ("ResNet-50 b1", "onnxruntime", 2): 18.09,
        ("ResNet-50 b1", "openvino", 1): 30.93,
        ("ResNet-50 b1", "openvino", 2): 17.22,
        ("GPT-2 prefill 128", "onnxruntime", 1): 104.75,
        ("GPT-2 prefill 128", "onnxruntime", 2): 62.7,
        ("GPT-2 prefill 128", "openvino", 1): 95.98,
        ("GPT-2 prefill 128", "openvino", 2): 52.94,
        ("GPT-2 decode after 128", "onnxruntime", 1): 15.26,
        ("GPT-2 decode after 128", "onnxruntime", 2): 7.53,
        ("GPT-2 decode after 128", "openvino", 1): 14.2,
        ("GPT-2 decode after 128", "openvino", 2): 8.31,
    },
}

# Multiply-adds per second on one and two threads of that machine: others of its kind have other clocks.
FLOPS: dict[str, dict[int, float]] = {"zen5-x86-64-v4-bf16-vnni": {1: 289e9, 2: 572e9}}


def slow_peers(rows: list[Row], machine: str | None = None) -> list[str]:
    """One line for every peer that is over 10 % slower here than it has been seen on this kind of machine.

    A machine of the kind that multiplies slower may take that much longer.
    """
    machine = machine or kind()
    seen, flops = MILLISECONDS.get(machine, {}), FLOPS.get(machine, {})
    lines = []
    for row in rows:
        then = flops.get(row.threads, 0.0)
        slower = max(then / row.peaks.get("flops", then), 1.0) if then else 1.0
        for m in row.engines:
            before = seen.get((row.workload, m.engine, row.threads))
            if before and m.times and m.median * 1e3 > before * slower * SLACK:
                lines.append(
                    f"{row.workload}, {m.engine}, threads {row.threads}: {m.median * 1e3:.1f} ms here, "
                    f"{before:g} ms before; the machine is loaded or the harness holds this engine back"
                )
    return lines
