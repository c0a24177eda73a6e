"""Rows one element longer than whole vectors, stored narrower than computed: nothing behind is written."""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from machines import executable
from rlx import ops
from rlx.ir.graph import Graph

TARGETS = [t.name for t in executable("host", "x86-64-v4", "x86-64-v3", "x86-64")]
BEHIND = 64


@pytest.mark.parametrize("target", sorted(set(TARGETS)))
@pytest.mark.parametrize("computed", ["f32", "f64", "i64"])
def test_the_last_element_alone_is_stored(computed: str, target: str) -> None:
    """LLVM stored 4 bytes where the only lane of a tail was cut to 1 or 2."""
    g = Graph("tails")
    for columns in (9, 17, 33):
        x = g.input(f"x{columns}", (2, columns), computed)
        rows = x - ops.max(x, axis=1, keepdims=True)
        for stored in ("bf16", "f16", "i8", "i16", "i32"):
            for way, value in (("map", x), ("row", rows)):
                g.output(f"{way} {stored} {columns}", ops.cast(value, stored))
    program = rlx.compile(g, target=target, threads=1)
    rng = np.random.default_rng(0)
    feed = {n.attrs["name"]: rng.integers(0, 50, n.tensor.bind({})).astype(n.dtype.np) for n in g.inputs}
    memory: dict[str, np.ndarray] = {}
    bound: dict[str, np.ndarray] = {}
    for name, node in g.outputs.items():
        shape = node.tensor.bind({})
        nbytes = int(np.prod(shape)) * node.dtype.np.itemsize
        memory[name] = np.full(nbytes + BEHIND, 0xA5, np.uint8)
        bound[name] = memory[name][:nbytes].view(node.dtype.np).reshape(shape)
    program.bind(feed, bound)()
    plain = program.run(feed)
    for name, out in bound.items():
        assert (memory[name][-BEHIND:] == 0xA5).all(), name
        assert out.tobytes() == plain[name].tobytes(), name
