"""Reductions of columns that fit one vector, as means of blocked images: several are summed side by side."""

from __future__ import annotations

import re

import numpy as np
import pytest

import rlx
from gemm_harness import F32_TARGETS, code_of
from rlx import ops
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.target.cpu import Target, resolve

STATISTICS = {
    "sum": lambda x: ops.sum(x, axis=1),
    "max": lambda x: ops.max(x, axis=1),
    "argmax": lambda x: ops.argmax(x, axis=1),
    "variance": lambda x: ops.var(x, axis=1),
}


def reduction(kind: str, rows: int | str, pixels: int | str, columns: int) -> Graph:
    g = Graph("columns")
    x: Node = g.input("x", (rows, pixels, columns), "f32")
    g.output("y", STATISTICS[kind](x))
    return g


@pytest.mark.parametrize("target", F32_TARGETS, ids=lambda t: t.name)
@pytest.mark.parametrize("kind", STATISTICS)
@pytest.mark.parametrize("symbolic", [False, True], ids=["known", "symbolic"])
def test_bits_are_those_of_more_columns(symbolic: bool, kind: str, target: Target) -> None:
    """Every column adds for itself, whatever is beside it."""
    rng = np.random.default_rng(4)
    wide = rng.standard_normal((7, 700, 33)).astype(np.float32)
    results = []
    for columns, threads in ((33, 1), (8, 1), (5, 2)):
        g = reduction(kind, "n" if symbolic else 7, "p" if symbolic else 700, columns)
        program = rlx.compile(g, target=target.name, threads=threads, cache=False)
        results.append(program.run({"x": np.ascontiguousarray(wide[:, :, :columns])})["y"])
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0][:, : result.shape[1]])


def test_four_chains_and_no_mask() -> None:
    """Eight channels of a block are one vector; four blocks are summed at once, the rest one by one."""
    code = code_of(reduction("sum", 18, 200, 8), resolve("x86-64-v3"))
    assert "masked" not in code
    assert len(re.findall(r"fadd [^\n]*<8 x float>", code)) == 4 + 1
