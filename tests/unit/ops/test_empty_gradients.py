"""Gradients over empty batches and empty slices: shapes are right, sums over nothing are 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx
from rlx import Graph, ops
from rlx.reference.interpreter import evaluate

RNG = np.random.default_rng(2)
ROWS, IMAGE = (0, 5), (0, 3, 6, 6)
CASES: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "mean": (lambda x: ops.mean(x * x), [ROWS]),
    "largest": (lambda x: ops.sum(ops.max(x, axis=1)), [ROWS]),
    "product along the batch": (lambda x: ops.sum(ops.prod(x, axis=0)), [ROWS]),
    "running product": (lambda x: ops.sum(ops.cumprod(x, 0)), [ROWS]),
    "softmax": (lambda x: ops.sum(ops.softmax(x) ** 2), [ROWS]),
    "layer norm": (lambda x, w, b: ops.mean(ops.layer_norm(x, w, b) ** 2), [ROWS, (5,), (5,)]),
    "linear": (lambda x, w, b: ops.mean(ops.linear(x, w, b) ** 2), [ROWS, (5, 4), (4,)]),
    "attention": (lambda q, k, v: ops.sum(ops.attention(q, k, v) ** 2), [(0, 2, 4, 8)] * 3),
    "convolution": (lambda x, w: ops.mean(ops.conv(x, w, padding=1) ** 2), [IMAGE, (4, 3, 3, 3)]),
    "strided": (lambda x, w: ops.mean(ops.conv(x, w, strides=2) ** 2), [IMAGE, (4, 3, 3, 3)]),
    "dilated": (lambda x, w: ops.mean(ops.conv(x, w, dilations=2) ** 2), [IMAGE, (4, 3, 3, 3)]),
    "transposed": (
        lambda x, w: ops.mean(ops.conv_transpose(x, w, strides=3, dilations=2) ** 2),
        [IMAGE, (3, 4, 3, 3)],
    ),
    "pool": (lambda x: ops.sum(ops.max_pool(x, 2) ** 2), [IMAGE]),
    "every second row": (lambda x: ops.sum(x[::2] ** 2), [ROWS]),
    "every third, every second": (lambda x: ops.sum(x[::3, ::2] ** 2), [ROWS]),
    "backwards": (lambda x: ops.sum(x[::-2] ** 2), [ROWS]),
    "nothing of some rows": (lambda x: ops.sum(x[:0:2] ** 2) + ops.sum(x), [(4, 5)]),
    "nothing in the middle": (lambda x: ops.sum(x[3:3:2] ** 2) + ops.sum(x), [(4, 5)]),
    "concatenated": (lambda x, y: ops.sum(ops.concat([x, y], 0) ** 2), [ROWS, (2, 5)]),
    "summed axis of nothing": (lambda x, y: ops.sum((x @ y) ** 2), [(2, 0), (0, 3)]),
    "scan": (
        lambda x: ops.sum(ops.scan(lambda c, r: (c * 0.5 + r, c), np.zeros(5, np.float32), x)[0]),
        [ROWS],
    ),
}


@pytest.mark.parametrize("symbolic", [False, True], ids=["known", "symbolic"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_over_nothing(name: str, symbolic: bool) -> None:
    f, shapes = CASES[name]
    g = Graph(name)
    inputs = []
    for i, shape in enumerate(shapes):
        typed = tuple("n" if symbolic and d == 0 else d for d in shape)
        inputs.append(g.input(f"x{i}", typed, "f32"))
    with g.building():
        for i in range(len(shapes)):
            g.output(f"g{i}", rlx.grad(f, argnums=i)(*inputs))
    feed = {f"x{i}": RNG.standard_normal(shape, dtype=np.float32) for i, shape in enumerate(shapes)}
    want = evaluate(g, feed)
    got = rlx.compile(g, cache=False, checks=True).run(feed)
    for i, shape in enumerate(shapes):
        assert got[f"g{i}"].shape == want[f"g{i}"].shape == shape
        np.testing.assert_allclose(got[f"g{i}"], want[f"g{i}"], rtol=2e-5, atol=2e-6)
