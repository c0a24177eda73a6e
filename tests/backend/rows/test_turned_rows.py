"""Row kernels whose operand is contiguous across rows: it is copied in squares, or gathered once."""

from __future__ import annotations

import re

import numpy as np
import pytest

import rlx
from gemm_harness import F32_TARGETS, code_of
from rlx import ops
from rlx.fuzz.bounds import assert_by_table
from rlx.ir.graph import Graph
from rlx.reference.interpreter import evaluate
from rlx.target.cpu import Target, resolve

NUMPY = {"f16": np.float16, "f32": np.float32, "f64": np.float64}
NORMS = {
    "layer_norm": ops.layer_norm,
    "softmax": ops.softmax,
    "both": lambda x: ops.softmax(x * 0.5) + ops.layer_norm(x),
}


def norm(kind: str, shape: tuple[int, ...], dtype: str, turned: bool) -> Graph:
    """A norm over the channels of a planar image [n, channels, pixels], or of one with the channels last."""
    images, channels, pixels = shape
    g = Graph("norm")
    x = g.input("x", shape if turned else (images, pixels, channels), dtype)
    g.output("y", NORMS[kind](ops.transpose(x, (0, 2, 1)) if turned else x))
    return g


@pytest.mark.parametrize("target", F32_TARGETS, ids=lambda t: t.name)
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 320, 64), "f32"),
        ((2, 33, 21), "f32"),
        ((1, 1500, 17), "f32"),
        ((3, 19, 16), "f64"),
        ((1, 64, 37), "f16"),
        ((1, 9000, 33), "f32"),  # copies of 16 rows would not fit L2
    ],
)
def test_bits_are_those_of_contiguous_rows(
    shape: tuple[int, int, int], dtype: str, kind: str, target: Target
) -> None:
    x = np.random.default_rng(1).standard_normal(shape).astype(NUMPY[dtype])
    g = norm(kind, shape, dtype, turned=True)
    got = rlx.compile(g, target=target.name, threads=2, cache=False).run({"x": x})
    assert_by_table(g, {"x": x}, got, evaluate(g, {"x": x}))
    plain = rlx.compile(norm(kind, shape, dtype, turned=False), target=target.name, threads=1, cache=False)
    want = plain.run({"x": np.ascontiguousarray(x.transpose(0, 2, 1))})
    np.testing.assert_array_equal(got["y"], want["y"])


@pytest.mark.parametrize("target", ["x86-64-v4", "x86-64-v3", "aarch64"])
def test_rows_that_are_adjacent_are_not_gathered(target: str) -> None:
    code = code_of(norm("layer_norm", (1, 320, 64), "f32", turned=True), resolve(target))
    assert "gather" not in code and "shufflevector" in code


def test_what_must_be_gathered_is_gathered_once() -> None:
    """Rows of several lines of a turned matrix: the pass that stores reads what the one before has found."""
    g = Graph("lines")
    x = ops.transpose(g.input("x", (64, 40), "f32"), (1, 0))
    g.output("y", ops.layer_norm(ops.reshape(x, (4, 640))))
    gathers = re.findall(r"= call [^\n]*@llvm\.masked\.gather", code_of(g, resolve("x86-64-v4")))
    assert len(gathers) == 4  # of the first pass, four vectors at once
