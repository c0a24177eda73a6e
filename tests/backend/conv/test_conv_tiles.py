"""What tiles of direct convolutions do besides their sums."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import rlx
from gemm_harness import F32_TARGETS, code_of
from rlx.ir.graph import Graph
from rlx.ops import conv
from rlx.target.cpu import Target, resolve


def products(size: Any, outputs: int = 64, first: Any = None, second: Any = None) -> Graph:
    """A convolution of one pixel at a time, of blocked images."""
    g = Graph("products")
    image = g.input("x", (1, 16, size, size), "f32")
    blocked = conv(image, g.param("first", (192, 16, 1, 1), "f32", first))
    g.output("y", conv(blocked, g.param("w", (outputs, 192, 1, 1), "f32", second)))
    return g


@pytest.mark.parametrize("target", ["x86-64-v4", "x86-64-v3", "aarch64"])
def test_the_last_tiles_of_a_panel_prefetch_the_next_one(target: str) -> None:
    """Every step of a tile prefetches one line, `ahead` bytes from its weights: in the next panel."""
    machine = resolve(target)
    code = code_of(products(7), machine)
    sums = re.findall(r"(?ms)^define [^\n]*@sums\.float\.\d+x2\.1x1x1.*?^}", code)
    assert sums and all(text.count("call void @llvm.prefetch") == 1 for text in sums)
    panel = 192 * 2 * machine.lanes("f32") * 4
    assert re.search(rf"add i64 {panel}, %", code)


def test_web_engines_do_not_prefetch() -> None:
    assert "llvm.prefetch" not in code_of(products(7), resolve("wasm32"))


@pytest.mark.parametrize(("target", "heights"), [("x86-64-v3", {5, 6, 10, 11, 12}), ("x86-64-v4", {12, 13})])
def test_a_panel_of_one_vector_has_sums_that_hide_the_latency(target: str, heights: set[int]) -> None:
    """With 16 registers a tile has 6 pixels: of one vector each, two multiply-adds per cycle would wait for
    their sums. So two tiles are one."""
    machine = resolve(target)
    code = code_of(products(7, outputs=3 * machine.lanes("f32")), machine)
    found = re.findall(r"(?m)^define [^\n]*@sums\.float\.(\d+)x1\.1x1x1", code)
    assert {int(height) for height in found} == heights


@pytest.mark.parametrize("target", F32_TARGETS, ids=lambda t: t.name)
@pytest.mark.parametrize("case", [(5, 24), (7, 40), (11, 13), ("s", 24)], ids=str)
def test_bits_are_those_of_a_full_panel(case: tuple[Any, int], target: Target) -> None:
    """The same channels in the last panel and in one that is full, whatever the threads."""
    size, outputs = case
    rng = np.random.default_rng(3)
    weights = rng.standard_normal((48, 192, 1, 1)).astype(np.float32)
    first = rng.standard_normal((192, 16, 1, 1)).astype(np.float32)
    side = 9 if size == "s" else size
    x = rng.standard_normal((1, 16, side, side)).astype(np.float32)
    results = []
    for count, threads in ((48, 1), (outputs, 1), (outputs, 2)):
        program = rlx.compile(
            products(size, count, first, weights[:count]), target=target.name, threads=threads, cache=False
        )
        results.append(program.run({"x": x})["y"][:, :outputs].view(np.int32))
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[1], results[2])
