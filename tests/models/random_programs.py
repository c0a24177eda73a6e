"""Random programs for fusion and planning: every form, views of all kinds, values with several readers."""

from __future__ import annotations

import numpy as np

from rlx import ops
from rlx.ir.graph import Graph, Node

ROWS, COLUMNS = 6, 8


def random_program(seed: int, size: int = 14, symbolic: bool = False) -> tuple[Graph, dict[str, np.ndarray]]:
    """A graph of about `size` ops over [rows, columns] values, and inputs for it."""
    rng = np.random.default_rng(seed)
    rows = "n" if symbolic else ROWS
    g = Graph(f"random{seed}")
    x = g.input("x", (rows, COLUMNS), "f32")
    y = g.input("y", (rows, COLUMNS), "f32")
    ids = g.input("ids", (rows,), "i64")
    w = g.param("w", (COLUMNS, COLUMNS), "f32", rng.standard_normal((COLUMNS, COLUMNS), np.float32) / 3)
    b = g.param("b", (COLUMNS,), "f32", rng.standard_normal(COLUMNS, np.float32))
    table = g.param("table", (11, COLUMNS), "f32", rng.standard_normal((11, COLUMNS), np.float32))
    values: list[Node] = [x, y]
    n = x.shape[0]

    def pick() -> Node:
        return values[-1 - int(rng.integers(0, min(len(values), 5)))]

    for _ in range(size):
        a, c = pick(), pick()
        made = _step(int(rng.integers(0, 22)), a, c, (n, ids, w, b, table), rng)
        values.append(made)
    count = int(rng.integers(1, 4))
    for i, node in enumerate(dict.fromkeys([values[-1], *(pick() for _ in range(count))])):
        g.output(f"o{i}", node)
    feed = {
        "x": rng.standard_normal((ROWS, COLUMNS), np.float32),
        "y": rng.standard_normal((ROWS, COLUMNS), np.float32),
        "ids": rng.integers(0, 11, ROWS),
    }
    return g, feed


def _step(kind: int, a: Node, c: Node, around: tuple, rng: np.random.Generator) -> Node:  # type: ignore[type-arg]
    """One op, or a few, from [rows, columns] to [rows, columns]."""
    n, ids, w, b, table = around
    if kind == 0:
        return a + c
    if kind == 1:
        return a * ops.sigmoid(c)
    if kind == 2:
        return ops.tanh(a) - 0.5
    if kind == 3:
        return ops.softmax(a, axis=int(rng.integers(0, 2)))
    if kind == 4:
        return a - ops.mean(a, axis=-1, keepdims=True)
    if kind == 5:
        return ops.layer_norm(a, b, b)
    if kind == 6:
        return a @ w
    if kind == 7:
        return ops.gelu(a @ w + b)
    if kind == 8:
        return c + a @ w
    if kind == 9:
        return ops.transpose(ops.transpose(a) * 0.5) + c
    if kind == 10:
        half = COLUMNS // 2
        return ops.concat([ops.slice_axis(a, 1, half, half), ops.slice_axis(c, 1, 0, half)], 1)
    if kind == 11:
        return ops.flip(a, 1) + c
    if kind == 12:
        return a + ops.take(table, ids, axis=0)
    if kind == 13:
        return ops.reshape(ops.reshape(a, (n, 2, COLUMNS // 2)) * 2.0, (n, COLUMNS))
    if kind == 14:
        turned = ops.transpose(ops.reshape(a @ w, (n, 2, COLUMNS // 2)), (0, 2, 1))
        return ops.reshape(turned, (n, COLUMNS))
    if kind == 15:
        return ops.where(a > 0.0, a, c * 0.1)
    if kind == 16:
        return a + ops.sum(c, axis=0)
    if kind == 17:
        return ops.maximum(a, ops.max(c, axis=1, keepdims=True) * 0.5)
    if kind == 18:
        return ops.slice_axis(ops.pad(a, padding=((0, 0), (1, 1))), 1, int(rng.integers(0, 3)), COLUMNS)
    if kind == 19:
        scores = ops.softmax(ops.matmul(a, ops.transpose(c)) * 0.3, axis=-1)
        return scores @ a
    if kind == 20:
        return ops.cumsum(a, axis=1) * 0.2
    return a / (abs(c) + 1.0)
