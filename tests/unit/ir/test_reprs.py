"""What a prompt shows of graphs, programs, jitted functions, streams and sessions."""

from __future__ import annotations

import re

import numpy as np
import pytest

import rlx
from rlx import ops


def test_graphs() -> None:
    g = rlx.Graph("net")
    x = g.input("x", ("n", 4), "f32")
    assert repr(g) == "<graph 'net'(x: f32[n,4]) -> (), 1 node>"
    g.output("y", ops.exp(x))
    assert repr(g) == "<graph 'net'(x: f32[n,4]) -> (y: f32[n,4]), 2 nodes>"
    for i in range(4):
        g.input(f"x{i}", (), "i64")
    text = "<graph 'net'(x: f32[n,4], x0: i64[], x1: i64[], x2: i64[], ...) -> (y: f32[n,4]), 6 nodes>"
    assert repr(g) == text


def test_programs() -> None:
    g = rlx.Graph("net")
    g.output("y", ops.exp(g.input("x", ("n", 4), "f32")))
    program = rlx.compile(g, threads=1, target="x86-64")
    assert repr(program) == "<program 'net'(x: f32[n,4]) -> (y: f32[n,4]), 1 kernel, x86-64, 1 thread>"
    halve = rlx.register_op("halve_repr", ref=lambda x: x / 2)
    try:
        h = rlx.Graph("host")
        h.output("y", halve(h.input("x", (4,), "f32")))
        told = repr(rlx.compile(h, threads=2, target="x86-64"))
    finally:
        from rlx.ops.control.custom import unregister_op

        unregister_op("halve_repr")
    assert told.endswith(", 0 kernels, 1 host thunk, x86-64, 2 threads>")


def test_jitted_functions() -> None:
    def double(x: rlx.Node, scale: float = 2.0) -> rlx.Node:
        return x * scale

    f = rlx.jit(double)
    line = double.__code__.co_firstlineno
    assert repr(f) == f"<jit of double (test_reprs.py:{line}), arguments (x, scale), 0 programs>"
    f(np.ones(3))
    assert repr(f).endswith("arguments (x, scale), 1 program>")
    assert f"jit of double (test_reprs.py:{line})" in repr(rlx.vmap(double))
    assert "jit of double" in repr(rlx.value_and_grad(double))


def test_streams() -> None:
    g = rlx.Graph("sums")
    total = g.state("total", (), "f32") + g.input("x", (), "f32")
    g.set_state("total", total)
    g.output("y", total * 1.0)
    stream = rlx.compile(g).stream()
    assert repr(stream) == "<stream of 'sums': states total; not started>"
    stream.step({"x": np.float32(1)})
    assert repr(stream) == "<stream of 'sums': states total; running>"


@pytest.mark.parametrize("options", [{}, {"threads": 1, "precision": "bf16"}])
def test_sessions(options: dict[str, object]) -> None:
    told = repr(rlx.Session(**options))  # type: ignore[arg-type]
    assert re.fullmatch("<session device='cpu'(, threads=1, precision='bf16')?>", told)
    assert ("bf16" in told) == bool(options)
