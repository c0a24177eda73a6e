"""Models whose weights are streamed in tests."""

from __future__ import annotations

import numpy as np

import rlx
from rlx import ops
from rlx.ir.graph import Graph

WIDTH, LAYERS = 256, 8
WEIGHT = WIDTH * WIDTH * 4  # bytes of one layer
BUDGET = 3 * WEIGHT + WEIGHT // 2


def layers(count: int = LAYERS, width: int = WIDTH) -> Graph:
    """A chain of products with biases."""
    rng = np.random.default_rng(0)
    g = rlx.Graph("layers")
    x = g.input("x", ("n", width), "f32")
    for i in range(count):
        w, b = g.param(f"w{i}", (width, width), "f32"), g.param(f"b{i}", (width,), "f32")
        x = ops.tanh(x @ w + b)
        g.set_param(f"w{i}", rng.normal(0, 0.1, (width, width)).astype(np.float32))
        g.set_param(f"b{i}", rng.normal(0, 0.1, width).astype(np.float32))
    g.output("y", x)
    return g


def sample(rows: int = 3) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(rows, WIDTH)).astype(np.float32)
