"""Sizes found while a program runs: nonzero as a native kernel, and what reads its result."""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from rlx import ops


def compiled(build, shape, kind: str, threads: int = 1):
    g = rlx.Graph("found")
    x = g.input("x", shape, kind)
    with g.building():
        for i, y in enumerate(build(x)):
            g.output(f"y{i}", y)
    program = rlx.compile(g, threads=threads, cache=False)
    assert program.stats["host_thunks"] == []
    return program


def check(program, x: np.ndarray) -> None:
    got = program(x)
    got = got if isinstance(got, tuple) else (got,)
    for g, w in zip(got, np.nonzero(x), strict=True):
        np.testing.assert_array_equal(g, w)


@pytest.mark.parametrize("kind", ["f32", "f64", "f16", "bf16", "i8", "u8", "i32", "i64", "bool"])
def test_every_dtype(kind: str) -> None:
    program = compiled(ops.nonzero, ("n",), kind)
    for n in (0, 1, 15, 16, 17, 100):
        x = np.random.default_rng(n).integers(0, 3, n).astype(program.inputs[0].dtype.np)
        check(program, x)


@pytest.mark.parametrize("shape", [(5, 7), (3, 0), (2, 3, 40), (1, 1)])
@pytest.mark.parametrize("density", [0.0, 0.05, 0.5, 1.0])
def test_every_rank(shape: tuple[int, ...], density: float) -> None:
    x = (np.random.default_rng(1).random(shape) < density).astype(np.float32)
    check(compiled(ops.nonzero, shape, "f32", threads=2), x)


def test_nan_is_not_zero_but_minus_zero_is() -> None:
    check(compiled(ops.nonzero, (4,), "f32"), np.array([np.nan, -0.0, 0.0, np.inf], np.float32))


def test_a_transposed_operand() -> None:
    x = (np.random.default_rng(1).random((6, 9)) < 0.4).astype(np.float32)
    program = compiled(lambda x: ops.nonzero(ops.transpose(x)), (6, 9), "f32")
    for got, want in zip(program(x), np.nonzero(x.T), strict=True):
        np.testing.assert_array_equal(got, want)


def test_what_follows_has_the_size_that_was_found() -> None:
    program = compiled(lambda x: [ops.exp(ops.compress(ops.greater(x, 0.5), x)) * 2.0], ("n",), "f32")
    for n in (0, 3, 50, 50, 51):
        x = np.random.default_rng(n).random(n).astype(np.float32)
        np.testing.assert_allclose(program(x), np.exp(x[x > 0.5]) * 2, rtol=1e-6)


def test_two_sizes_in_a_row() -> None:
    def twice(x):
        kept = ops.compress(ops.greater(x, 0.2), x)
        return [ops.compress(ops.less(kept, 0.7), kept)]

    x = np.random.default_rng(5).random(200).astype(np.float32)
    np.testing.assert_array_equal(compiled(twice, (200,), "f32")(x), x[(x > 0.2) & (x < 0.7)])


def test_a_scalar() -> None:
    program = compiled(lambda x: [ops.argwhere(x)], (), "i32")
    assert program(np.array(3, np.int32)).shape == (1, 0) and program(np.array(0, np.int32)).shape == (0, 0)
