"""Rounding to bytes and back, natively, against the reference: ties, ends of the range, zero points, NaN."""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from conv_harness import compiled
from gemm_harness import every_target
from rlx import ops
from rlx.ir.graph import Graph
from rlx.reference.interpreter import evaluate
from rlx.target.cpu import Target

KINDS = {"u8": np.uint8, "i8": np.int8}


def values() -> np.ndarray:
    rng = np.random.default_rng(5)
    near = np.arange(-600, 600, dtype=np.float32) / 2  # all levels and all ties
    beside = np.concatenate([np.nextafter(near, np.float32(end)) for end in (-np.inf, np.inf)])
    wild = rng.integers(0, 2**32, 3000, dtype=np.uint32).view(np.float32)
    edges = np.array([np.nan, np.inf, -np.inf, 2.0**31, -(2.0**31), 1e-45, -0.0], np.float32)
    return np.concatenate([near, beside, wild, edges])


@every_target
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("zero", [0, 3, 120])
def test_levels(kind: str, zero: int, target: Target) -> None:
    g = Graph("levels")
    x = values()
    scale, point = g.constant(np.float32(1)), g.constant(np.asarray(zero, KINDS[kind]))
    code = ops.quantize(g.input("x", x.shape, "f32"), scale, point)
    g.output("code", code)
    g.output("real", ops.dequantize(code, scale, point) + 0.25)
    with np.errstate(all="ignore"):
        want = evaluate(g, {"x": x})
    got = compiled(g, target).run({"x": x})
    np.testing.assert_array_equal(got["code"], want["code"])
    np.testing.assert_array_equal(got["real"], want["real"])


def test_bits_do_not_depend_on_threads() -> None:
    g = Graph("levels")
    x = values()
    code = ops.quantize(g.input("x", x.shape, "f32"), g.constant(np.float32(0.3)), g.constant(np.uint8(7)))
    g.output("y", code)
    first, second = (rlx.compile(g, threads=n).run({"x": x})["y"] for n in (1, 2))
    np.testing.assert_array_equal(first, second)
