"""Variance of too few elements: NaN or infinity, as in NumPy, for every ddof and however sizes are known."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import rlx
from gemm_harness import every_f32_target
from rlx import ops
from rlx.ir.graph import Graph
from rlx.target.cpu import Target

CASES = [(n, ddof) for n in (0, 1, 2, 3, 40) for ddof in (0, 1, 2, 2.5, 3, 41)]


def numpy_says(name: str, x: np.ndarray, ddof: float) -> np.ndarray:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return np.asarray(getattr(np, name)(x, axis=1, ddof=ddof))


def rows(n: int, dtype: type = np.float32) -> np.ndarray:
    """Random rows, and one whose elements are all equal."""
    x = np.random.default_rng(n).standard_normal((3, n)).astype(dtype)
    x[1] = 2.0
    return x


@pytest.mark.parametrize("name", ["var", "std"])
@pytest.mark.parametrize(("n", "ddof"), CASES)
def test_eager_as_numpy(name: str, n: int, ddof: float) -> None:
    for dtype in (np.float16, np.float32, np.float64):
        x = rows(n, dtype)
        got, want = getattr(ops, name)(x, axis=1, ddof=ddof), numpy_says(name, x, ddof)
        np.testing.assert_allclose(got, want, rtol=2e-3 if dtype is np.float16 else 1e-6)


@every_f32_target
@pytest.mark.parametrize("name", ["var", "std"])
def test_native_as_numpy(name: str, target: Target) -> None:
    for ddof in (0, 1, 2.5, 41):
        open_sizes = Graph("open")
        open_sizes.output("y", getattr(ops, name)(open_sizes.input("x", ("n", "m"), "f32"), 1, ddof=ddof))
        symbolic = rlx.compile(open_sizes, target=target.name, cache=False)
        for n in (0, 1, 2, 3, 40):
            fixed = Graph("fixed")
            fixed.output("y", getattr(ops, name)(fixed.input("x", (3, n), "f32"), 1, ddof=ddof))
            want = numpy_says(name, rows(n), ddof)
            for program in (symbolic, rlx.compile(fixed, target=target.name, cache=False)):
                np.testing.assert_allclose(program(rows(n)), want, rtol=1e-5, err_msg=f"{n} {ddof}")


def test_gradients_where_there_is_one() -> None:
    x = np.array([1.0, 2.0, 4.0])
    got = rlx.grad(lambda x: ops.var(x, ddof=1))(x)
    np.testing.assert_allclose(got, x - x.mean())
    assert rlx.grad(lambda x: ops.sum(ops.var(x, 1, ddof=1)))(np.zeros((2, 0))).shape == (2, 0)
    assert not np.isfinite(rlx.grad(lambda x: ops.var(x, ddof=5))(x)).any()
