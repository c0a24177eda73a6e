"""Parallel products are joined only where what follows them can follow one of them all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlx
from rlx import Graph, ops
from rlx.reference.interpreter import evaluate

RNG = np.random.default_rng(4)


def weight(g: Graph, name: str, *shape: int) -> Any:
    made = g.param(name, shape, "f32")
    g.set_param(name, RNG.standard_normal(shape, dtype=np.float32))
    return made


@pytest.mark.parametrize("steps", [5, "n"])
def test_two_products_of_one_value_each_read_by_a_scan(steps: int | str) -> None:
    """Both directions of a recurrent layer, as exporters write it: a scan has several results, no shape."""
    g = Graph()
    x = g.input("x", (steps, 6), "f32")
    for name in ("forth", "back"):
        rows = x @ weight(g, f"w_{name}", 6, 8)
        start = g.constant(np.zeros(8, np.float32))
        last, every = ops.scan(
            lambda carry, row: (ops.tanh(carry + row), carry * 2.0), start, rows, reverse=name == "back"
        )
        g.output(f"{name}_last", last)
        g.output(f"{name}_every", every)
    feed = {"x": RNG.standard_normal((5, 6), dtype=np.float32)}
    want = evaluate(g, feed)
    for name, got in rlx.compile(g, cache=False, checks=True).run(feed).items():
        np.testing.assert_allclose(got, want[name], rtol=2e-5, atol=2e-6)
