"""What `explain` says about the ranks of a sharded program, as a text to review."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import rlx
from machines import to_execute
from rlx import ops
from rlx.dist import Mesh, Shard, run_threads
from rlx.ir.graph import Graph, Node


def block() -> Graph:
    """Attention and a feed-forward layer with residuals."""
    g = Graph("block")
    x = g.input("x", ("batch", "seq", 32), "f32")

    def weight(name: str, rows: int, columns: int) -> Node:
        return g.param(name, (rows, columns), "f32", np.ones((rows, columns), np.float32))

    def heads(name: str) -> Node:
        split = ops.reshape(x @ weight(name, 32, 32), (*x.shape[:2], 4, 8))
        return ops.transpose(split, (0, 2, 1, 3))

    mixed = ops.attention(heads("query"), heads("key"), heads("value"))
    joined = ops.reshape(ops.transpose(mixed, (0, 2, 1, 3)), x.shape)
    x = x + joined @ weight("join", 32, 32)
    g.output("y", x + ops.gelu(x @ weight("up", 32, 64)) @ weight("down", 64, 32))
    return g


def test_the_ranks_of_a_block(golden: Callable[[str, str], None]) -> None:
    columns = {name: {"tp": Shard(1)} for name in ("query", "key", "value", "up")}
    rows = {name: {"tp": Shard(0)} for name in ("join", "down")}

    def work(transport: Any) -> str:
        program = rlx.compile(
            block(),
            target=to_execute("x86-64-v3"),
            threads=1,
            mesh=Mesh({"tp": 2}),
            shardings={**columns, **rows},
            transport=transport,
        )
        page: str = program.explain()
        return page

    first, second = run_threads(2, work)
    assert first == second
    golden("explain/ranks", first[first.index("Ranks: ") :])
