"""What tiles of direct convolutions do besides their sums."""

from __future__ import annotations

import re

import pytest

from gemm_harness import code_of
from rlx.ir.graph import Graph
from rlx.ops import conv
from rlx.target.cpu import resolve


def products(size: int) -> Graph:
    """A convolution of one pixel at a time, of blocked images."""
    g = Graph("products")
    blocked = conv(g.input("x", (1, 16, size, size), "f32"), g.param("first", (192, 16, 1, 1), "f32"))
    g.output("y", conv(blocked, g.param("w", (64, 192, 1, 1), "f32")))
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
