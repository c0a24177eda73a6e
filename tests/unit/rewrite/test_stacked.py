"""Reductions over stacked values become elementwise ops on the values."""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.reference.interpreter import evaluate


def built(combine, stacked, keepdims=False):
    g = rlx.Graph("stacked")
    a, b = g.input("a", ("n", 3), "f32"), g.input("b", ("n", 3), "f32")
    with g.building():
        g.output("y", combine(stacked(a, b), keepdims))
    return g


def feed():
    rng = np.random.default_rng(0)
    return {k: rng.standard_normal((5, 3)).astype(np.float32) for k in "ab"}


CASES = {
    "squares": (lambda x, k: ops.sum(x * x, axis=2, keepdims=k), lambda a, b: ops.stack([a, b], 2)),
    "sum": (lambda x, k: ops.sum(x, axis=0, keepdims=k), lambda a, b: ops.stack([a, b], 0)),
    "largest": (lambda x, k: ops.max(ops.abs(x), axis=1, keepdims=k), lambda a, b: ops.stack([a, b, a], 1)),
    "slice": (
        lambda x, k: ops.sum(x[:, 1:3] * x[:, 1:3], axis=2, keepdims=k),
        lambda a, b: ops.stack([a, b], 2),
    ),
}


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_parts_are_combined(name: str, keepdims: bool) -> None:
    g = built(*CASES[name], keepdims)
    small = rlx.optimize(rlx.lower(g))
    assert not {"concat", "reduce_sum", "reduce_max"} & {
        n.op.name for n in small.nodes if n.id in small.live()
    }
    np.testing.assert_array_equal(evaluate(small, feed())["y"], evaluate(g, feed())["y"])


def test_a_sum_of_negative_zeros_is_zero() -> None:
    g = built(*CASES["sum"])
    zeros = {k: np.full((1, 3), -0.0, np.float32) for k in "ab"}
    assert not np.signbit(evaluate(rlx.optimize(rlx.lower(g)), zeros)["y"]).any()


def test_reductions_along_other_axes_stay() -> None:
    g = built(lambda x, k: ops.sum(x, axis=1), lambda a, b: ops.stack([a, b], 2))
    small = rlx.optimize(rlx.lower(g))
    assert "reduce_sum" in {n.op.name for n in small.nodes}
