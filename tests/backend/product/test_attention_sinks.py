"""Attention with sinks: one kernel that gives what one more key of value 0 would give, on every target."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlx
from machines import executable, on_targets
from rlx import ops
from rlx.errors import DTypeError, ShapeError
from rlx.reference.interpreter import evaluate

CASES: dict[str, dict[str, Any]] = {
    "rows": {"queries": 2, "keys": 70},
    "blocks": {"queries": 37, "keys": 70},
    "odd heads": {"queries": 9, "keys": 33, "depth": 24},
    "causal": {"queries": 37, "keys": 70, "causal": True, "offset": 33},
    "a window": {"queries": 37, "keys": 37, "causal": True, "window": (4, -1)},
    "an added mask": {"queries": 9, "keys": 40, "mask": "f32"},
    "a mask": {"queries": 3, "keys": 40, "mask": "bool"},
}


def program(target: Any, *, queries: int, keys: int, depth: int = 64, mask: str = "", **attrs: Any) -> Any:
    g, rng, feed = rlx.Graph("sinks"), np.random.default_rng(0), {}

    def given(name: str, shape: tuple[int, ...]) -> Any:
        feed[name] = rng.standard_normal(shape).astype(np.float32)
        return g.input(name, shape, "f32")

    q, k, v = (
        given("q", (2, 4, queries, depth)),
        given("k", (2, 2, keys, depth)),
        given("v", (2, 2, keys, depth)),
    )
    if mask:
        value = rng.standard_normal((queries, keys)).astype(np.float32)
        feed["mask"] = value > 0 if mask == "bool" else value
        attrs["mask"] = g.input("mask", value.shape, mask)
    feed["sinks"] = np.array([-1e30, -1, 3, 200], np.float32)
    g.output("y", ops.attention(q, k, v, sinks=g.input("sinks", (4,), "f32"), **attrs))
    return rlx.compile(g, target=target.name, threads=2), feed, evaluate(g, feed)["y"]


@on_targets(executable())
@pytest.mark.parametrize("case", CASES)
def test_kernels(case: str, target: Any) -> None:
    made, feed, want = program(target, **CASES[case])
    assert not made.stats["host_thunks"] and made.stats["kernels"] == 2, "the limit of sinks, and attention"
    got = made.run(feed)["y"]
    assert np.abs(got - want).max() < 2e-6
    assert not got[:, 3].any(), "a sink far above all scores leaves nothing"


@pytest.mark.parametrize("added", ["mask", "sinks"])
def test_f64_takes_masks_and_sinks_of_f32(added: str) -> None:
    rng, g = np.random.default_rng(0), rlx.Graph("wide")
    q = g.input("q", (1, 2, 3, 4), "f64")
    value = rng.standard_normal((3, 3) if added == "mask" else 2).astype(np.float32)
    g.output("y", ops.attention(q, q, q, **{added: g.input("x", value.shape, "f32")}))
    feed = {"q": rng.standard_normal(q.shape), "x": value}
    got, want = rlx.compile(g).run(feed)["y"], evaluate(g, feed)["y"]
    assert got.dtype == np.float64 and np.abs(got - want).max() < 1e-14


def test_a_sink_is_a_key_of_value_zero() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 1, n, 4)) for n in (3, 5, 5))
    k[0, 0, 0] = 0  # its score is 0
    v[0, 0, 0] = 0
    want = ops.attention(q, k, v)
    np.testing.assert_allclose(ops.attention(q, k[:, :, 1:], v[:, :, 1:], sinks=[0.0]), want, atol=1e-12)


def test_gradients_of_sinks() -> None:
    """Less of the values where a sink grows."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, n, 4)) for n in (3, 5, 5))
    sinks = np.array([0.3, -1.0])

    def total(s: Any) -> Any:
        return ops.sum(ops.attention(q, k, v, sinks=s) * v[:, :, :3])

    found, step = rlx.grad(total)(sinks), 1e-6
    for i in range(2):
        there = [float(total(sinks + sign * step * np.eye(2)[i])) for sign in (1, -1)]
        assert found[i] == pytest.approx((there[0] - there[1]) / (2 * step), rel=1e-5)


def test_refusals() -> None:
    q = np.ones((1, 2, 3, 4), np.float32)
    with pytest.raises(ShapeError, match=r"sinks f32\[3\] need one number for each head of q"):
        ops.attention(q, q, q, sinks=np.ones(3, np.float32))
    with pytest.raises(DTypeError, match=r"sinks i64\[2\] are not of the dtype of q"):
        ops.attention(q, q, q, sinks=np.ones(2, np.int64))
    pages, places = np.ones((1, 2, 4, 4), np.float32), np.zeros(3, np.int64)
    with pytest.raises(ShapeError, match=r"sinks f32\[3\] are neither \[heads\] nor \[tokens, heads\] of q"):
        ops.paged_attention(
            q[0].swapaxes(0, 1), pages, pages, [[0]], places, places, sinks=np.ones(3, np.float32)
        )
