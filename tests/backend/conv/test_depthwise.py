"""Depthwise convolutions of blocked images: which taps strips sum, and that sums are what they should be."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from conv_harness import Case, compiled
from gemm_harness import F32_TARGETS, code_of
from rlx.fuzz.bounds import assert_by_table
from rlx.ir.graph import Graph
from rlx.ops import conv
from rlx.reference.interpreter import evaluate
from rlx.target.cpu import Target, resolve

CHANNELS = 21
CASES = [
    Case((1, CHANNELS, 7, 7), (CHANNELS, 1, 5, 5), {"padding": 2}),
    Case((1, CHANNELS, 14, 14), (CHANNELS, 1, 5, 5), {"padding": 2, "strides": 2}),
    Case((2, CHANNELS, 5, 29), (CHANNELS, 1, 3, 3), {"padding": 1}),
    Case((1, CHANNELS, 3, 18), (CHANNELS, 1, 3, 3), {"padding": ((0, 1), (0, 1)), "strides": 2}),
    Case((1, CHANNELS, 4, 2), (CHANNELS, 1, 5, 7), {"padding": ((2, 2), (3, 3))}),
    Case((1, CHANNELS, 6, 20), (CHANNELS, 1, 3, 3), {"padding": ((-1, 2), (4, -1)), "dilations": (1, 3)}),
    Case((1, CHANNELS, 1, 1), (CHANNELS, 1, 3, 3), {"padding": 2}),
    Case((1, CHANNELS, 40), (CHANNELS, 1, 31), {"padding": 15}),
]


def depthwise(case: Case) -> Graph:
    """The convolution of a case behind another one, whose result is blocked."""
    rng = np.random.default_rng(1)
    g, window = Graph("depthwise"), len(case.x) - 2
    first = rng.standard_normal((CHANNELS, CHANNELS, *(1,) * window)).astype(np.float32)
    blocked = conv(g.input("x", case.shape, "f32"), g.param("first", first.shape, "f32", first))
    w = g.param("w", case.w, "f32", rng.standard_normal(case.w).astype(np.float32))
    g.output("y", conv(blocked, w, groups=CHANNELS, **case.more))
    return g


def strips(case: Case, target: Target) -> dict[str, int]:
    """Multiply-adds in the code of every strip, by the end of its name."""
    found: dict[str, int] = {}
    for text in re.findall(r"(?ms)^define .*?^}", code_of(depthwise(case), target)):
        name = re.search(r"\.strip([\d._]+)", text.splitlines()[0])
        if name is not None:
            found[name[1]] = len(re.findall(r"call <\d+ x float> @llvm\.fma", text))
    return found


@pytest.mark.parametrize("target", F32_TARGETS, ids=lambda t: t.name)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_edges(case: Case, target: Target) -> None:
    """Known and unknown sizes, odd strides, windows wider than images: the definition, and the same bits."""
    feed = {"x": np.random.default_rng(2).standard_normal(case.x).astype(np.float32)}
    results: list[dict[str, Any]] = []
    for symbolic in (False, True):
        g = depthwise(Case(case.x, case.w, case.more, symbolic))
        results.append(compiled(g, target, 2, cache=False).run(feed))
        assert_by_table(g, feed, results[-1], evaluate(g, feed))
    np.testing.assert_array_equal(results[0]["y"].view(np.int32), results[1]["y"].view(np.int32))


def test_padding_is_not_summed() -> None:
    """A strip has the products of the taps that read x; a window of 5 is summed line by line."""
    found = strips(CASES[0], resolve("x86-64-v3"))
    assert found == {"4.0_2_5.1_1_5": 3 + 4 + 5 + 5, "3.1_0_4.2_0_3": 5 + 4 + 3}


def test_all_weights_stay_in_registers_where_a_strip_is_not_narrow_for_it() -> None:
    """With 32 registers the 9 weights stay, beside 8 columns; with 16 those of one line, beside 6."""
    wide = Case((1, CHANNELS, 9, 48), (CHANNELS, 1, 3, 3), {"padding": 1})
    assert strips(wide, resolve("x86-64-v4"))["8"] == 9 * 8
    assert strips(wide, resolve("x86-64-v3"))["6"] == 3 * 6


def test_pixels_are_summed_one_by_one_only_where_sizes_are_unknown() -> None:
    for case, expected in ((CASES[2], False), (Case(CASES[2].x, CASES[2].w, CASES[2].more, True), True)):
        code = code_of(depthwise(case), resolve("x86-64-v3"))
        assert (re.search(r"call void @[\w.]*\.border", code) is not None) == expected
