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


def coded(g: Graph, name: str, columns: int, group: int, zeros: bool) -> Any:
    """A matrix [64, columns] of 4-bit codes in groups of rows."""
    codes = RNG.integers(-8, 8, (64, columns)).astype(np.int8)
    scales = RNG.random((64 // group, columns), np.float32)
    parts = [g.param(name, codes.shape, "i8", value=codes)]
    parts.append(g.param(f"{name}.scales", scales.shape, "f32", value=scales))
    if zeros:
        parts.append(g.param(f"{name}.zeros", scales.shape, "f32", value=scales * 3))
    return ops.dequantize_groups(*parts, bits=4, group=group)


def test_weights_of_four_bits_join_as_codes() -> None:
    g = Graph()
    x = g.input("x", ("n", 64), "f32")
    matrices = {
        "a": (48, 32, True),
        "b": (16, 32, True),
        "c": (16, 32, False),
        "d": (24, 16, True),
        "e": (40, 32, False),
    }
    for name, coding in matrices.items():
        g.output(name, ops.sum(ops.reshape(x @ coded(g, name, *coding), (-1, 2, coding[0] // 2)), axis=1))
    program = rlx.compile(g, cache=False, checks=True)
    plain = sum(64 * columns * 4 for columns, _, _ in matrices.values())
    assert program.memory({"n": 1})["weight"] < 0.5 * plain, "no weight became f32"
    matmuls = [node for node in program.lir.unfused.nodes if node.op.heavy]
    assert len(matmuls) == 3, "those that are coded alike are one matmul"
    feed = {"x": RNG.standard_normal((5, 64), dtype=np.float32)}
    want = evaluate(g, feed)
    for name, got in program.run(feed).items():
        assert np.abs(got - want[name]).max() < 1e-5 * np.abs(want[name]).max()
