"""The sizes of caches choose blocks and prefetches, never bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from op_cases import ALL_CASES, Case

from emission import first_cases
from rlx import Graph, ops
from rlx.api.compile import plan
from rlx.codegen.cpu.build import build_kernels
from rlx.runtime.native_code import native_code
from rlx.runtime.program import CompiledProgram
from rlx.target.cpu import Target, resolve

HOST = resolve("host")
SMALL = replace(HOST, l1_bytes=4 << 10, l2_bytes=32 << 10, l3_bytes=128 << 10)
LARGE = replace(HOST, l1_bytes=256 << 10, l2_bytes=8 << 20, l3_bytes=512 << 20)


def text(graph: Graph, target: Target) -> tuple[str, ...]:
    lir = plan(graph, target=HOST.name)
    return build_kernels(lir, target).texts


def run(graph: Graph, feed: dict[str, np.ndarray], target: Target) -> dict[str, bytes]:
    lir = plan(graph, target=HOST.name)
    kernels, code = native_code(lir, target, cache=False)
    out = CompiledProgram(lir, kernels, code, 2).run(feed)
    return {name: value.tobytes() for name, value in out.items()}


def check(graph: Graph, feed: dict[str, np.ndarray]) -> bool:
    """Whether code depends on caches; its results must not."""
    texts = [text(graph, target) for target in (HOST, SMALL, LARGE)]
    if texts.count(texts[0]) == len(texts):
        return False
    usual, small, large = (run(graph, feed, target) for target in (HOST, SMALL, LARGE))
    assert usual == small == large
    return True


@pytest.mark.parametrize("case", first_cases().values(), ids=lambda case: case.op.name)
def test_one_sample_of_each_op(case: Case) -> None:
    check(case.graph()[0], case.feed())


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.id)
def test_every_sample(case: Case) -> None:
    check(case.graph()[0], case.feed())


def products(x: Any) -> Any:
    return ops.matmul(ops.matmul(x, x), x)


def spectrum(x: Any) -> Any:
    return ops.real(ops.fft(ops.cast(x, "c64")))


LARGER: dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {
    "product": (products, (300, 300)),
    "convolution": (lambda x: ops.conv(x, x[:1, :, :3, :3], padding=1), (2, 16, 40, 40)),
    "rows": (lambda x: ops.layer_norm(ops.softmax(x), x[0], x[1]), (64, 3000)),
    "map": (lambda x: ops.silu(x * x[0]), (300, 1000)),
    "columns": (lambda x: ops.sum(ops.tanh(x), axis=0), (300, 1000)),
    **{f"fft of {n}": (spectrum, (20, n)) for n in (64, 1000, 4096, 6561)},
}


@pytest.mark.parametrize("name", LARGER)
def test_larger_kernels(name: str) -> None:
    function, shape = LARGER[name]
    graph = Graph()
    x = graph.input("x", shape, "f32")
    with graph.building():
        graph.output("y", function(x))
    value = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    depends = check(graph, {"x": value})
    assert depends or name not in ("product", "rows", "map"), "the test is about code that looks at caches"
