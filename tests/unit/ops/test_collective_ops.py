"""Collectives as ops: their meaning on several ranks, gradients across ranks, order, batching."""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.errors import ShapeError
from rlx.ir.graph import Graph
from rlx.ir.mesh import Mesh, Partial, Shard, ShardingError
from rlx.ir.text.write import graph_text
from rlx.reference.interpreter import evaluate
from rlx.reference.ranks import evaluate_ranks
from rlx.transform.expand import expand_graph
from rlx.transform.grad import vjp_graph
from rlx.transform.vmap import batch_graph

WAYS = {
    "all_reduce": (ops.all_reduce, {}),
    "all_reduce mean": (ops.all_reduce, {"kind": "mean"}),
    "all_reduce max": (ops.all_reduce, {"kind": "max"}),
    "all_reduce prod": (ops.all_reduce, {"kind": "prod"}),
    "all_gather": (ops.all_gather, {"dim": 0}),
    "all_gather 1": (ops.all_gather, {"dim": 1}),
    "reduce_scatter": (ops.reduce_scatter, {"dim": 0}),
    "reduce_scatter 1": (ops.reduce_scatter, {"dim": 1, "kind": "mean"}),
    "reduce_scatter min": (ops.reduce_scatter, {"dim": 1, "kind": "min"}),
    "all_to_all": (ops.all_to_all, {"split": 0, "concat": 1}),
    "all_to_all same": (ops.all_to_all, {"split": 1, "concat": 1}),
    "broadcast": (ops.broadcast, {"root": 1}),
}


def build(name: str, ranks: int) -> Graph:
    g = Graph(name)
    make, attrs = WAYS[name]
    g.output("y", make(g.input("x", (6, 12), "f64"), axis="r", ranks=ranks, **attrs))
    return g


def operands(ranks: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(ranks)
    return [{"x": rng.standard_normal((6, 12))} for _ in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", WAYS)
def test_expansion_means_the_same_on_all_ranks(name: str, ranks: int) -> None:
    g, mesh = build(name, ranks), Mesh({"r": ranks})
    whole = evaluate_ranks(g, mesh, operands(ranks))
    parts = evaluate_ranks(expand_graph(g), mesh, operands(ranks))
    for a, b in zip(whole, parts, strict=True):
        np.testing.assert_allclose(a["y"], b["y"], rtol=1e-15)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", WAYS)
def test_gradients_are_those_of_the_sum_of_all_losses(name: str, ranks: int) -> None:
    g, mesh, given = build(name, ranks), Mesh({"r": ranks}), operands(ranks)
    rng = np.random.default_rng(5)
    outs = evaluate_ranks(g, mesh, given)
    weights = [rng.standard_normal(o["y"].shape) for o in outs]
    back = evaluate_ranks(
        vjp_graph(g, ["x"]), mesh, [{**x, "ct_y": w} for x, w in zip(given, weights, strict=True)]
    )

    def loss(values: list[dict[str, np.ndarray]]) -> float:
        return sum(
            float((o["y"] * w).sum()) for o, w in zip(evaluate_ranks(g, mesh, values), weights, strict=True)
        )

    step = 1e-6
    for rank in range(ranks):
        direction = rng.standard_normal((6, 12))
        up, down = ([dict(x) for x in given] for _ in range(2))
        up[rank]["x"] = given[rank]["x"] + step * direction
        down[rank]["x"] = given[rank]["x"] - step * direction
        want = (loss(up) - loss(down)) / (2 * step)
        got = float((back[rank]["grad_x"] * direction).sum())
        assert abs(got - want) <= 1e-6 * (1 + abs(want))


@pytest.mark.parametrize("name", WAYS)
def test_batching_is_a_loop_on_all_ranks(name: str) -> None:
    g, mesh, rng = build(name, 2), Mesh({"r": 2}), np.random.default_rng(3)
    stacked = [{"x": rng.standard_normal((3, 6, 12))} for _ in range(2)]
    got = evaluate_ranks(batch_graph(g, {"x": 0}, 3), mesh, stacked)
    for b in range(3):
        want = evaluate_ranks(g, mesh, [{"x": s["x"][b]} for s in stacked])
        for rank in range(2):
            np.testing.assert_allclose(got[rank]["y"][b], want[rank]["y"], rtol=1e-14)


def test_groups_of_two_axes() -> None:
    g = Graph()
    x = g.input("x", (2,), "f32")
    g.output("rows", ops.all_reduce(x, axis="a", ranks=2))
    g.output("columns", ops.all_gather(x, axis="b", ranks=3))
    mesh = Mesh({"a": 2, "b": 3})
    out = evaluate_ranks(g, mesh, [{"x": np.full(2, r, np.float32)} for r in range(6)])
    assert out[4]["rows"].tolist() == [5, 5]  # ranks 1 and 4
    assert out[4]["columns"].tolist() == [3, 3, 4, 4, 5, 5]


def test_half_precision_is_summed_in_f32_in_rank_order() -> None:
    g = Graph()
    g.output("y", ops.all_reduce(g.input("x", (1,), "f16"), axis="r", ranks=3))
    values = [np.array([v], np.float16) for v in (2048, 1, 1)]
    out = evaluate_ranks(g, Mesh({"r": 3}), [{"x": v} for v in values])
    assert out[0]["y"][0] == np.float16(2050)


def test_collectives_are_not_merged_and_not_dropped() -> None:
    g = Graph()
    x = g.input("x", (4,), "f32")
    first = ops.all_reduce(x, axis="r", ranks=2)
    second = ops.all_reduce(x, axis="r", ranks=2)
    ops.all_reduce(x, axis="r", ranks=2, kind="max")  # nobody reads it, but other ranks come to it
    g.output("y", first + second)
    optimised = rlx.optimize(rlx.lower(g))
    assert [n.attrs["kind"] for n in optimised.nodes if n.op.family == "collective"] == ["sum", "sum", "max"]


def test_a_group_of_one_needs_nobody() -> None:
    g = Graph()
    g.output(
        "y", ops.all_gather(ops.all_reduce(g.input("x", (4,), "f32"), axis="r", ranks=1), axis="r", ranks=1)
    )
    x = np.arange(4, dtype=np.float32)
    assert np.array_equal(rlx.compile(g)(x), x)


def test_text_parses_back() -> None:
    g = build("reduce_scatter 1", 2)
    again = rlx.ir.text.read.parse_graph(graph_text(g))
    assert graph_text(again) == graph_text(g)
    assert np.array_equal(*(evaluate(h, operands(2)[0])["y"] for h in (g, again)))


def test_refusals() -> None:
    g = Graph()
    x = g.input("x", (5, 2), "f32")
    with pytest.raises(ShapeError, match=r"axis 0 of .5,2. does not divide by 2 ranks"):
        ops.reduce_scatter(x, axis="r", ranks=2)
    with pytest.raises(ShapeError, match="no rank 2 among the 2"):
        ops.broadcast(x, axis="r", ranks=2, root=2)
    with pytest.raises(ShardingError, match="no axis 'q'; it has: r"):
        Mesh({"r": 2}).groups("q")
    with pytest.raises(ShardingError, match=r"Partial.'mean'. is unknown"):
        Partial("mean")
    with pytest.raises(ShardingError, match="axis 'r' of 0 ranks"):
        Mesh({"r": 0})
    assert str(Shard(1)) == "Shard(1)"
