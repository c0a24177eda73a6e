"""Sum and squared distances in one pass: every row length, accuracy, what is not finite, when it is used."""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from gemm_harness import every_target
from rlx import ops
from rlx.codegen.cpu.rows import moments, row_nest
from rlx.ir.graph import Graph, Node
from rlx.target.cpu import Target

EPS = 1e-5


def centred(x: np.ndarray) -> np.ndarray:
    """Mean 0 and variance 1, in f64."""
    away = x.astype(np.float64) - x.mean(-1, keepdims=True, dtype=np.float64)
    return away / np.sqrt((away * away).mean(-1, keepdims=True) + EPS)


@pytest.fixture
def reductions(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, ...]]]:
    """The statistics of the passes of every row kernel that is written from now on."""
    seen: list[list[tuple[int, ...]]] = []
    choose = row_nest.RowNest.choose_reductions

    def noted(self: row_nest.RowNest) -> list[tuple[int, ...]]:
        seen.append(choose(self))
        return seen[-1]

    monkeypatch.setattr(row_nest.RowNest, "choose_reductions", noted)
    return seen


@every_target
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_every_row_length(
    target: Target,
    dtype: str,
    reductions: list[list[tuple[int, ...]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(moments, "is_long_row", lambda size: isinstance(size, int))
    rng, close = np.random.default_rng(3), 3e-6 if dtype == "f32" else 1e-13
    for columns in (2, 3, 16, 17, 63, 65, 100, 128, 1001):
        g = Graph("norm")
        g.output("y", ops.layer_norm(g.input("x", ("n", columns), dtype), eps=EPS))
        program = rlx.compile(g, target=target.name, threads=2, cache=False)
        assert reductions.pop() == [(0, 1)]
        x = (rng.standard_normal((5, columns)) * 3 + 1).astype(np.float32 if dtype == "f32" else np.float64)
        np.testing.assert_allclose(program(x), centred(x), rtol=0, atol=close)


@pytest.mark.parametrize("columns", [640, 1000])
def test_accuracy_away_from_zero(columns: int) -> None:
    """As good as two passes in f32: what the elements lose by their own rounding decides."""
    g = Graph("norm")
    g.output("y", ops.layer_norm(g.input("x", (40, columns), "f32"), eps=EPS))
    program = rlx.compile(g, cache=False)
    rng = np.random.default_rng(4)
    far = (rng.standard_normal((40, columns)) + 1000).astype(np.float32)
    np.testing.assert_allclose(program(far), centred(far), rtol=0, atol=3e-4)
    spiked = np.where(rng.random((40, columns)) < 0.01, 1e6, far - 1000).astype(np.float32)
    np.testing.assert_allclose(program(spiked), centred(spiked), rtol=0, atol=1e-5)


def test_rows_that_are_not_finite() -> None:
    g = Graph("norm")
    g.output("y", ops.layer_norm(g.input("x", (4, 592), "f32")))
    x = np.ones((4, 592), np.float32)
    x[0, 580], x[1, 3], x[2, :] = np.nan, np.inf, -np.inf
    y = rlx.compile(g, cache=False)(x)
    assert np.isnan(y[:3]).all()
    np.testing.assert_array_equal(y[3], 0.0)


def test_short_rows_take_two_passes(reductions: list[list[tuple[int, ...]]]) -> None:
    g = Graph("norm")
    g.output("y", ops.layer_norm(g.input("x", (4, 384), "f32")))
    rlx.compile(g, cache=False)
    assert reductions == [[(0,), (1,)]]


def _mean_and_squares(x: Node) -> tuple[Node, Node]:
    mean = ops.mean(x, axis=-1, keepdims=True)
    return mean, ops.sum((x - mean) * (x - mean), axis=-1, keepdims=True)


def test_a_mean_that_is_stored_is_summed(reductions: list[list[tuple[int, ...]]]) -> None:
    """The sum of a row with an infinite element is infinite, which the one pass would not find."""
    g = Graph("mean")
    x = g.input("x", (3, 512), "f32")
    mean, squares = _mean_and_squares(x)
    g.output("mean", mean)
    g.output("squares", squares)
    data = np.ones((3, 512), np.float32)
    data[1, 5] = np.inf
    found = rlx.compile(g, cache=False).run({"x": data})
    assert (0, 1) not in [numbers for passes in reductions for numbers in passes]
    np.testing.assert_array_equal(found["mean"][:, 0], [1.0, np.inf, 1.0])


def test_distances_from_something_else_are_summed(reductions: list[list[tuple[int, ...]]]) -> None:
    g = Graph("other")
    x = g.input("x", (3, 512), "f32")
    half = ops.sum(x, axis=-1, keepdims=True) / 256.0
    g.output("y", ops.sum((x - half) * (x - half), axis=-1, keepdims=True) + half)
    data = np.random.default_rng(5).standard_normal((3, 512)).astype(np.float32)
    found = rlx.compile(g, cache=False)(data)
    assert (0, 1) not in [numbers for passes in reductions for numbers in passes]
    middle = data.sum(-1, keepdims=True) / 256
    np.testing.assert_allclose(found, ((data - middle) ** 2).sum(-1, keepdims=True) + middle, rtol=1e-5)
