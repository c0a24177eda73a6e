"""Reads through reshapes: quotient and remainder of an index become it where elements lie together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.backend.cpu.collapse import collapse
from rlx.backend.reference.interpreter import evaluate
from rlx.compile import plan
from rlx.ir.compose import body_of, compose
from rlx.ir.form import dense_strides
from rlx.ir.graph import Graph
from rlx.ir.kernel import Nest

CASES: list[tuple[tuple[Any, ...], tuple[int, ...], tuple[Any, ...], int]] = [
    ((1, 32, 6), (1, 32, 6), (1, 8, 24), 1),
    (("n", 32, 6), (3, 32, 6), ("n", 8, 24), 1),
    (("n", 4, 6, 5), (2, 4, 6, 5), ("n", 24, 5), 1),
    (("n", 24, 5), (2, 24, 5), ("n", 2, 3, 4, 5), 2),
    (("n", 6, 4, 5), (2, 6, 4, 5), ("n", 3, 40), 1),
    (("n", 6, 4), (2, 6, 4), ("n", 8, 3), 1),
]


def graph(shape: tuple[Any, ...], new: tuple[Any, ...], axis: int) -> Graph:
    g = Graph("reshaped")
    x = g.input("x", shape, "f32")
    y = ops.reshape(x * 2.0, (x.shape[0], *new[1:]))
    g.output("y", y - ops.sum(y, axis=(axis,), keepdims=True))
    return g


@pytest.mark.parametrize(("shape", "sizes", "new", "axis"), CASES)
def test_values(shape: Any, sizes: Any, new: Any, axis: int) -> None:
    g = graph(shape, new, axis)
    feed = {"x": np.random.default_rng(0).standard_normal(sizes).astype(np.float32)}
    for threads in (1, 2):
        got = rlx.compile(g, threads=threads).run(feed)["y"]
        np.testing.assert_allclose(got, evaluate(g, feed)["y"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("shape", "sizes", "new", "axis"), CASES)
def test_all_loads_are_flat(shape: Any, sizes: Any, new: Any, axis: int) -> None:
    """No index is divided any more: every load is at an offset with a fixed step along each axis."""
    lir = plan(graph(shape, new, axis))
    for id in lir.plan.schedule:
        node = lir.mir.nodes[id]
        nest = compose(body_of(node))
        if isinstance(nest, Nest):
            flat = collapse(nest, [dense_strides(o.shape) for o in node.operands])
            prims = {e.prim for s in (*flat.stats, *flat.stores) for e in s.body.walk()}
            assert not prims & {"load", "floor_div", "mod"}
