"""Sums, means and norms of long rows and columns: their error does not grow with the length."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import rlx
from gemm_harness import every_f32_target
from rlx import ops
from rlx.ir.graph import Graph, Node
from rlx.target.cpu import Target

LENGTHS = [100, 1000, 4096, 4097, 10_000, 100_000]
EPS = float(np.finfo(np.float32).eps)


def rows(n: int, offset: float, count: int = 4) -> np.ndarray:
    return (np.random.default_rng(n).standard_normal((count, n)) + offset).astype(np.float32)


def run(target: Target, x: np.ndarray, build: Callable[[Node], Node], symbolic: bool) -> np.ndarray:
    g = Graph("rows")
    g.output("y", build(g.input("x", ("m", "n") if symbolic else x.shape, "f32")))
    return np.asarray(rlx.compile(g, target=target.name, cache=False)(x))


def centred(x: np.ndarray) -> np.ndarray:
    away = x.astype(np.float64) - x.mean(-1, keepdims=True, dtype=np.float64)
    return np.asarray(away / np.sqrt((away * away).mean(-1, keepdims=True) + 1e-5))


@every_f32_target
@pytest.mark.parametrize("offset", [0.0, 1e3, 1e6])
def test_layer_norm(offset: float, target: Target) -> None:
    """A mean is a number in f32: units of it may be lost, except where rows are long."""
    for n in LENGTHS:
        x = rows(n, offset)
        want, unit = centred(x), float(np.spacing(np.float32(offset or 1.0)))
        for symbolic in (False, True):
            got = run(target, x, ops.layer_norm, symbolic)
            close = 3e-6 if n > 4096 else 3e-6 + 4 * unit
            np.testing.assert_allclose(got, want, rtol=0, atol=close, err_msg=f"{n} {symbolic}")


@every_f32_target
def test_group_and_instance_norm(target: Target) -> None:
    x = (np.random.default_rng(3).standard_normal((2, 4, 200, 130)) + 1e6).astype(np.float32)
    one, none = np.ones(4, np.float32), np.zeros(4, np.float32)
    want = centred(x.reshape(2, 2, -1)).reshape(x.shape)
    got = run(target, x, lambda t: ops.group_norm(t, one, none, 2), False)
    np.testing.assert_allclose(got, want, rtol=0, atol=2 * float(np.spacing(np.float32(1e6))))
    want = centred(x.reshape(2, 4, -1)).reshape(x.shape)
    for shape in (x.shape, (2, 4, "h", "w")):
        g = Graph("instances")
        g.output("y", ops.instance_norm(g.input("x", shape, "f32"), one, none))
        got = rlx.compile(g, target=target.name, cache=False)(x)
        np.testing.assert_allclose(got, want, rtol=0, atol=5e-6, err_msg=f"{shape}")


@every_f32_target
@pytest.mark.parametrize("axis", [0, 1])
def test_means_squares_and_variance(axis: int, target: Target) -> None:
    for n in LENGTHS:
        x = rows(n, 1e3, 40)
        x = x if axis else np.ascontiguousarray(x.T)
        wide = x.astype(np.float64)
        for symbolic in (False, True):
            mean = run(target, x, lambda t: ops.mean(t, axis=axis), symbolic)
            np.testing.assert_allclose(mean, wide.mean(axis), rtol=4 * EPS, err_msg=f"{n} {symbolic}")
            squares = run(target, x, lambda t: ops.sum_square(t, axis=axis), symbolic)
            np.testing.assert_allclose(squares, (wide**2).sum(axis), rtol=6 * EPS, err_msg=f"{n}")
            var = run(target, x, lambda t: ops.var(t, axis=axis), symbolic)
            np.testing.assert_allclose(var, wide.var(axis), rtol=1e3 * EPS, err_msg=f"{n} {symbolic}")


@every_f32_target
def test_rms_norm(target: Target) -> None:
    for n in LENGTHS:
        x = rows(n, 1e3)
        want = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5)
        for symbolic in (False, True):
            np.testing.assert_allclose(run(target, x, ops.rms_norm, symbolic), want, rtol=6 * EPS)


@every_f32_target
def test_infinities_stay(target: Target) -> None:
    """What additions round off an infinite total is NaN, which must not reach it."""
    x = rows(9000, 0.0, 6)
    x[0, 3], x[1, 8999], x[2, 4500] = np.inf, -np.inf, np.nan
    x[3, 5], x[3, 8000] = np.inf, -np.inf
    x[4] = 3e38
    for symbolic in (False, True):
        for axis in (0, 1):
            data = x if axis else np.ascontiguousarray(x.T)
            got = run(target, data, lambda t, axis=axis: ops.sum(t, axis=axis), symbolic)
            np.testing.assert_array_equal(got[:5], [np.inf, -np.inf, np.nan, np.nan, np.inf])
        assert np.isnan(run(target, x, ops.layer_norm, symbolic)[:4]).all()
        same = run(target, np.full((2, 9000), 1e6 + 1 / 3, np.float32), ops.layer_norm, symbolic)
        np.testing.assert_array_equal(same, np.zeros_like(same))


def test_every_way_over_rows_has_the_same_bits() -> None:
    """One thread or two, few rows or so many that stores bypass the caches."""
    x = rows(5008, 100.0, 1700)  # 34 MB
    for build in (ops.layer_norm, ops.softmax, lambda t: t / (ops.sum(t, axis=-1, keepdims=True) + 1.0)):
        g = Graph("rows")
        g.output("y", build(g.input("x", ("m", 5008), "f32")))
        programs = [rlx.compile(g, threads=n, cache=False) for n in (1, 2)]
        few = programs[0](x[:3])
        for program in programs:
            np.testing.assert_array_equal(program(x)[:3], few)
