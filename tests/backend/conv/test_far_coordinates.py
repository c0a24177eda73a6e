"""Sampling at coordinates that are far outside, infinite or NaN: it ends, and stays inside the image."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import rlx
from gemm_harness import every_f32_target
from rlx import ops
from rlx.ir.graph import Graph
from rlx.target.cpu import Target

X = np.arange(1, 21, dtype=np.float32).reshape(1, 1, 4, 5)
NEAR = [-37.25, 12.5, 100.0, -1000.0]
FAR = [1e10, -1e30, 1e30]
NOWHERE = [3.4e38, np.inf, -np.inf, np.nan]
WAYS = [*itertools.product(("linear", "nearest", "cubic"), ("zeros", "border", "reflection"), (False, True))]


def grid(values: list[float]) -> np.ndarray:
    """Points far away along one axis and inside along the other, both ways round."""
    inside = np.full(len(values), 0.3)
    both = [np.stack([values, inside], -1), np.stack([inside, values], -1)]
    return np.concatenate(both)[None, None].astype(np.float32)


@every_f32_target
@pytest.mark.parametrize(("mode", "padding", "align"), WAYS)
def test_grid_sample(mode: str, padding: str, align: bool, target: Target) -> None:
    def sampled(values: list[float]) -> tuple[np.ndarray, np.ndarray]:
        points = grid(values)
        g = Graph("sample")
        x, at = g.input("x", X.shape, "f32"), g.input("at", points.shape, "f32")
        g.output("y", ops.grid_sample(x, at, mode, padding, align))
        program = rlx.compile(g, target=target.name, cache=False)
        with np.errstate(all="ignore"):
            return program.run({"x": X, "at": points})["y"], ops.grid_sample(X, points, mode, padding, align)

    both = [y.reshape(2, -1) for y in sampled([*NEAR, *FAR, *NOWHERE])]
    near, far = len(NEAR), len(NEAR) + len(FAR)
    np.testing.assert_allclose(*(y[:, :near] for y in both), rtol=2e-3)  # coordinates of 1000 in f32
    for y in (y[:, near:far] for y in both):  # where exactly, their rounding decides
        assert np.isfinite(y).all() and (np.abs(y) <= (30 if mode == "cubic" else 20)).all()
        assert padding != "zeros" or (y == 0).all()
    np.testing.assert_allclose(*(y[:, far:] for y in both), rtol=1e-5)
    lost = padding != "zeros" and mode != "nearest"
    np.testing.assert_array_equal(np.isnan(both[0][:, -1]), lost)


def test_reflection_of_one_element() -> None:
    for align in (False, True):
        y = ops.grid_sample(
            np.full((1, 1, 1), 3.0), np.array([[[7.5], [1e30]]]), "linear", "reflection", align
        )
        np.testing.assert_allclose(y, 3.0)
