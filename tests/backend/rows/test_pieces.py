"""Maps whose last axis has parts: concatenation, padding and mirrored ends have code of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlx
from machines import executable, on_targets
from rlx import ops
from rlx.codegen.cpu.rows.ranges import cuts, decided_within
from rlx.ir.dtype import F32
from rlx.ir.graph import Graph
from rlx.ir.op import get_op
from rlx.kernel.scalar import axes, axis, load, select
from rlx.reference.interpreter import evaluate
from rlx.target.cpu import Target


def mirrored(x: Any) -> Any:
    return ops.concat([x[:, 40:0:-1], x, x[:, -2:-42:-1]], 1)


FUNCTIONS = {
    "concat": lambda x: ops.concat([x * 2, x[:, :33], x + 1], 1) * 3,
    "rows": lambda x: ops.concat([x * x, x[:1] * 2, ops.pad(x, ((1, 2), (0, 0)))], 0) + 1,
    "many": lambda x: ops.concat([x[:, i : i + 17] for i in range(12)], 1),
    "short": lambda x: ops.concat([x[:, :1], x, x[:, :3]], 1),
    "pad": lambda x: ops.pad(x, ((0, 0), (70, 35))) - 1,
    "mirrored": mirrored,
    "both": lambda x: ops.pad(mirrored(x), ((1, 1), (20, 0))) + ops.pad(mirrored(x), ((1, 1), (0, 20))),
}


@on_targets(executable())
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("width", [64, 129, "n"])
def test_pieces(target: Target, name: str, width: int | str) -> None:
    for dtype in ("f32", "bf16", "i8"):
        g = Graph()
        g.output("y", FUNCTIONS[name](g.input("x", (3, width), dtype)))
        x = np.arange(3 * 131).reshape(3, 131)[:, : width if isinstance(width, int) else 131] % 100
        feed = {"x": np.ascontiguousarray(ops.cast(x, dtype))}
        for threads in (1, 2):
            got = rlx.compile(g, target=target.name, threads=threads, cache=False).run(feed)["y"]
            np.testing.assert_array_equal(got, evaluate(g, feed)["y"])


@on_targets(executable())
@pytest.mark.parametrize("ends", [(128, 128), (129, 127), (40, 300)])
def test_threads_share_one_axis_of_pieces(target: Target, ends: tuple[int, int]) -> None:
    """A thread has whole vectors of the axis, from where its share begins: not every piece is in it."""
    g = Graph()
    x = g.input("x", (100961,), "f32")
    g.output("y", get_op("extend")(x, padding=(ends,), mode="reflect"))
    feed = {"x": np.arange(100961, dtype=np.float32)}
    for threads in (1, 2, 3):
        got = rlx.compile(g, target=target.name, threads=threads, cache=False).run(feed)["y"]
        np.testing.assert_array_equal(got, evaluate(g, feed)["y"])


def test_a_piece_knows_where_it_is() -> None:
    x, y = load(0, axes(2), F32), load(1, axes(2), F32)
    body = select((axis(1) >= 3) & (axis(1) < 7), x, y)
    assert cuts([body], (2, 9), 1, True) == [3, 7]
    assert [decided_within(body, (2, 9), 1, a, b).data for a, b in ((0, 3), (3, 7), (7, 9))] == [1, 0, 1]
