"""Placements spread through graphs: rules over forms, the collectives that are inserted, refusals."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from random_programs import random_program

import rlx
from rlx import ops
from rlx.errors import UnsupportedError
from rlx.ir.graph import Graph, Node
from rlx.ir.mesh import Mesh, Partial, Replicate, Shard, ShardingError
from rlx.reference.interpreter import evaluate
from rlx.reference.ranks import evaluate_ranks
from rlx.rewrite.sharding.propagate import Sharded, shard
from rlx.transform.grad import gradient_graph
from sharded_runs import assert_parts, feeds, random_shardings

TP = Mesh({"tp": 2})


def mir(graph: Graph) -> Graph:
    return rlx.optimize(rlx.lower(graph))


def run(done: Sharded, whole: Graph, given: list[dict[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
    values = []
    for rank in range(done.mesh.size):
        done.fill(whole, rank)
        values.append(dict(done.graph.param_values))
    return evaluate_ranks(done.graph, done.mesh, given, values)


def one(make: Callable[..., Node], *shapes: tuple[int, ...], **placements: object) -> tuple[Sharded, Graph]:
    """An op over inputs a, b, ... whose placements along tp are given; its result is the output y."""
    g = Graph()
    g.output("y", make(*(g.input("abc"[i], s, "f32") for i, s in enumerate(shapes))))
    graph = mir(g)
    return shard(graph, TP, {name: {"tp": p} for name, p in placements.items()}), graph


RULES: dict[str, tuple[Callable[..., Node], tuple[tuple[int, ...], ...], dict[str, object], list[str]]] = {
    "elementwise": (lambda a, b: a * b, ((4, 6), (6,)), {"a": Shard(1), "y": Shard(1)}, []),
    "rows": (lambda a, b: a * b, ((4, 6), (6,)), {"a": Shard(0), "y": Shard(0)}, []),
    "gathered": (lambda a: ops.tanh(a), ((4, 6),), {"a": Shard(1)}, ["all_gather"]),
    "sum": (lambda a: ops.sum(a, axis=1), ((4, 6),), {"a": Shard(1)}, ["all_reduce sum"]),
    "max": (lambda a: ops.max(a, axis=1), ((4, 6),), {"a": Shard(1)}, ["all_reduce max"]),
    "kept": (lambda a: ops.sum(a, axis=1), ((4, 6),), {"a": Shard(0), "y": Shard(0)}, []),
    "scattered": (
        lambda a: ops.sum(a, axis=1),
        ((4, 6),),
        {"a": Shard(1), "y": Shard(0)},
        ["reduce_scatter sum"],
    ),
    "partial": (lambda a: ops.sum(a, axis=1), ((4, 6),), {"a": Shard(1), "y": Partial()}, []),
    "columns": (lambda a, b: a @ b, ((4, 6), (6, 8)), {"b": Shard(1), "y": Shard(1)}, []),
    "contracted": (lambda a, b: a @ b, ((4, 6), (6, 8)), {"a": Shard(1), "b": Shard(0)}, ["all_reduce sum"]),
    "sliced": (lambda a, b: a @ b, ((4, 6), (6, 8)), {"b": Shard(0)}, ["all_reduce sum"]),
    "transpose": (lambda a: ops.transpose(a, (1, 0)), ((4, 6),), {"a": Shard(0), "y": Shard(1)}, []),
    "split axes": (lambda a: a.reshape(4, 2, 3), ((4, 6),), {"a": Shard(1), "y": Shard(1)}, []),
    "joined axes": (lambda a: a.reshape(8, 6), ((2, 4, 6),), {"a": Shard(0), "y": Shard(0)}, []),
    "inner axis": (lambda a: a.reshape(8, 6), ((2, 4, 6),), {"a": Shard(1)}, ["all_gather"]),
    "turned": (lambda a: ops.tanh(a), ((4, 6),), {"a": Shard(1), "y": Shard(0)}, ["all_to_all"]),
    "repeat": (lambda a: ops.broadcast_to(a, (3, 4, 6)), ((4, 6),), {"a": Shard(1), "y": Shard(2)}, []),
    "slice": (lambda a: a[1:3], ((4, 6),), {"a": Shard(1), "y": Shard(1)}, []),
    "slice across": (lambda a: a[1:3], ((4, 6),), {"a": Shard(0)}, ["all_gather"]),
    "concat": (lambda a, b: ops.concat([a, b], 0), ((4, 6), (2, 6)), {"a": Shard(1), "y": Shard(1)}, []),
    "running sum": (lambda a: ops.cumsum(a, 0), ((4, 6),), {"a": Shard(1), "y": Shard(1)}, []),
    "softmax": (lambda a: ops.softmax(a, axis=1), ((4, 6),), {"a": Shard(0), "y": Shard(0)}, []),
    "linear": (
        lambda a: ops.sum(a, axis=0) * 3.0 + ops.sum(a * a, axis=0),
        ((4, 6),),
        {"a": Shard(0)},
        ["all_reduce sum"],
    ),
    "positions": (lambda a: ops.flip(a, 1), ((4, 6),), {"a": Shard(0), "y": Shard(0)}, []),
    "convolution": (lambda a, b: ops.conv(a, b), ((2, 4, 5), (6, 4, 3)), {"b": Shard(0), "y": Shard(1)}, []),
    "channels": (lambda a, b: ops.conv(a, b), ((2, 4, 5), (6, 4, 3)), {"b": Shard(1)}, ["all_reduce sum"]),
    "partial input": (lambda a: ops.tanh(a * 2.0), ((4, 6),), {"a": Partial()}, ["all_reduce sum"]),
    "partial product": (
        lambda a, b: ops.sum(a @ b, axis=0),
        ((4, 6), (6, 8)),
        {"a": Partial(), "y": Shard(0)},
        ["reduce_scatter sum"],
    ),
    "no native form": (lambda a: ops.sort(a, axis=0), ((4, 6),), {"a": Shard(0)}, ["all_gather"]),
}


@pytest.mark.parametrize("name", RULES)
def test_rules(name: str) -> None:
    make, shapes, placements, inserted = RULES[name]
    done, whole = one(make, *shapes, **placements)
    assert [i.what for i in done.inserted] == inserted
    rng = np.random.default_rng(1)
    inputs = {"abc"[i]: rng.standard_normal(s).astype(np.float32) for i, s in enumerate(shapes)}
    shardings = {k: {"tp": p} for k, p in placements.items()}
    got = run(done, whole, feeds(inputs, shardings, TP))
    want = evaluate(whole, inputs)
    if isinstance(placements.get("y"), Partial):
        got = [{"y": got[0]["y"] + got[1]["y"]}] * 2
        shardings = {}
    assert_parts(got, want, shardings, TP, 1e-5)


def test_attention_is_cut_by_heads() -> None:
    g = Graph()
    x = g.input("x", ("batch", "seq", 16), "f32")
    rng = np.random.default_rng(0)

    def project(name: str) -> Node:
        w = g.param(name, (16, 16), "f32", rng.standard_normal((16, 16)).astype(np.float32) / 4)
        return ops.transpose(ops.reshape(x @ w, (*x.shape[:2], 4, 4)), (0, 2, 1, 3))

    mixed = ops.attention(project("q"), project("k"), project("v"))
    joined = ops.reshape(ops.transpose(mixed, (0, 2, 1, 3)), x.shape)
    g.output("y", joined @ g.param("o", (16, 16), "f32", np.eye(16, dtype=np.float32)))
    whole = mir(g)
    done = shard(whole, TP, {**{n: {"tp": Shard(1)} for n in "qkv"}, "o": {"tp": Shard(0)}})
    assert [i.what for i in done.inserted] == ["all_reduce sum"]
    assert str(done.graph.params["q"].type) == "f32[16,8]"
    value = rng.standard_normal((2, 3, 16)).astype(np.float32)
    assert_parts(run(done, whole, [{"x": value}] * 2), evaluate(g, {"x": value}), {}, TP, 1e-5)


def test_a_symbol_that_is_cut_counts_one_ranks_part() -> None:
    g = Graph()
    x = g.input("x", ("batch", 4), "f32")
    g.output("y", ops.mean(x, axis=0))
    whole = mir(g)
    done = shard(whole, TP, {"x": {"tp": Shard(0)}})
    assert str(done.graph.inputs[0].type) == "f32[batch,4]"
    value = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
    got = run(done, whole, [{"x": value[:3]}, {"x": value[3:]}])
    assert_parts(got, {"y": value.mean(0)}, {}, TP, 1e-6)


def test_data_parallel_gradients_are_reduced_once() -> None:
    def loss(w: Node, x: Node, y: Node) -> Node:
        return ops.mean((ops.tanh(x @ w) - y) ** 2.0)

    g = Graph()
    w, x, y = g.param("w", (4, 3), "f32"), g.input("x", ("n", 4), "f32"), g.input("y", ("n", 3), "f32")
    g.output("loss", loss(w, x, y))
    whole = mir(gradient_graph(g, "loss", ["w"]))
    done = shard(whole, Mesh({"dp": 2}), {"x": {"dp": Shard(0)}, "y": {"dp": Shard(0)}})
    assert sorted(i.what for i in done.inserted) == ["all_reduce sum", "all_reduce sum"]


@pytest.mark.parametrize(
    ("placements", "inserted"),
    [
        ({"ids": Shard(0), "g": Shard(0)}, ["all_reduce sum"]),
        ({"ids": Shard(0), "g": Shard(0), "y": Shard(1)}, ["reduce_scatter sum"]),
        ({"g": Shard(1), "y": Shard(1)}, []),
        ({"g": Shard(1), "base": Shard(1), "y": Shard(1)}, []),
    ],
    ids=["rows", "rows to columns", "columns", "columns of all"],
)
def test_gradients_of_embeddings(placements: dict[str, Shard], inserted: list[str]) -> None:
    g = Graph()
    ids, rows = g.input("ids", (6,), "i64"), g.input("g", (6, 4), "f32")
    if "base" in placements:
        table = g.input("base", (5, 4), "f32")
    else:
        table = ops.broadcast_to(g.constant(np.zeros((), np.float32)), (5, 4))
    g.output("y", ops.scatter(table, ids, rows, axis=0, reduction="add"))
    whole, shardings = mir(g), {k: {"tp": p} for k, p in placements.items()}
    done = shard(whole, TP, shardings)
    assert [i.what for i in done.inserted] == inserted
    rng = np.random.default_rng(0)
    inputs = {"ids": np.array([0, 3, 3, 1, 4, 3]), "g": rng.standard_normal((6, 4)).astype(np.float32)}
    if "base" in placements:
        inputs["base"] = rng.standard_normal((5, 4)).astype(np.float32)
    got = run(done, whole, feeds(inputs, shardings, TP))
    assert_parts(got, evaluate(g, inputs), shardings, TP, 1e-5)


def test_a_table_that_is_not_zero_is_added_once() -> None:
    g = Graph()
    ids, rows, table = (
        g.input("ids", (6,), "i64"),
        g.input("g", (6, 4), "f32"),
        g.input("base", (5, 4), "f32"),
    )
    g.output("y", ops.scatter(table, ids, rows, axis=0, reduction="add"))
    whole = mir(g)
    shardings = {"ids": {"tp": Shard(0)}, "g": {"tp": Shard(0)}}
    inputs = {
        "ids": np.array([0, 3, 3, 1, 4, 3]),
        "g": np.ones((6, 4), np.float32),
        "base": np.ones((5, 4), np.float32),
    }
    got = run(shard(whole, TP, shardings), whole, feeds(inputs, shardings, TP))
    assert_parts(got, evaluate(g, inputs), {}, TP, 1e-6)


def test_two_axes() -> None:
    g = Graph()
    rng = np.random.default_rng(0)
    x = g.input("x", (8, 6), "f32")
    hidden = ops.gelu(x @ g.param("up", (6, 12), "f32", rng.standard_normal((6, 12)).astype(np.float32)))
    g.output("y", hidden @ g.param("down", (12, 6), "f32", rng.standard_normal((12, 6)).astype(np.float32)))
    whole, mesh = mir(g), Mesh({"dp": 2, "tp": 3})
    shardings = {
        "x": {"dp": Shard(0)},
        "y": {"dp": Shard(0)},
        "up": {"tp": Shard(1)},
        "down": {"tp": Shard(0)},
    }
    done = shard(whole, mesh, shardings)
    assert [(i.what, i.axis) for i in done.inserted] == [("all_reduce sum", "tp")]
    inputs = {"x": rng.standard_normal((8, 6)).astype(np.float32)}
    assert_parts(run(done, whole, feeds(inputs, shardings, mesh)), evaluate(g, inputs), shardings, mesh, 1e-5)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("axes", [{"a": 2}, {"a": 2, "b": 2}], ids=["one axis", "two axes"])
def test_random_programs_with_random_shardings(seed: int, axes: dict[str, int]) -> None:
    graph, inputs = random_program(seed)
    whole, mesh = mir(graph), Mesh(axes)
    shardings = random_shardings(whole, mesh, np.random.default_rng(seed))
    got = run(shard(whole, mesh, shardings), whole, feeds(inputs, shardings, mesh))
    assert_parts(got, evaluate(graph, inputs), shardings, mesh, 2e-4)


def refused(shardings: dict[str, object], words: str, mesh: Mesh = TP) -> None:
    g = Graph()
    x, w = g.input("x", (5, 4), "f32"), g.param("w", (4, 2), "f32")
    g.output("y", x @ w)
    with pytest.raises(ShardingError, match=words):
        shard(mir(g), mesh, shardings)  # type: ignore[arg-type]


def test_refusals_name_the_value_and_the_axis() -> None:
    refused({"z": {"tp": Shard(0)}}, "shardings name 'z', which is not an input, param, state or output")
    refused({"x": {"dp": Shard(0)}}, "the mesh has no axis 'dp'; it has: tp")
    refused({"x": {"tp": Shard(2)}}, r"'x' is f32\[5,4\] and has no axis 2 to shard")
    refused(
        {"x": {"tp": Shard(0)}}, r"axis 0 of 'x' \(f32\[5,4\]\) does not divide by the 2 ranks of axis 'tp'"
    )
    refused({"w": {"tp": Partial()}}, "'w' cannot be Partial.'sum'.; a param or state is Shard")
    refused({"w": {"tp": "Shard(0)"}}, "the placement of 'w' is 'Shard.0.'; use Shard.dim., Replicate")
    refused({"w": Shard(0)}, "the sharding of 'w' must map axes of the mesh to placements")
    refused({"y": {"tp": Shard(0)}}, "axis 0 of output 'y'")
    refused({"y": {"tp": Partial()}}, "output 'y' cannot be Partial.'sum'.: it is computed as Replicate")
    assert Replicate() == Replicate()


def test_a_collective_in_a_body_is_refused() -> None:
    g = Graph()
    x = g.input("x", (3, 4), "f32")
    last, _ = ops.scan(
        lambda c, row: (c + ops.all_reduce(row, axis="tp", ranks=2), row),
        g.constant(np.zeros(4, np.float32)),
        x,
    )
    g.output("y", last)
    with pytest.raises(ShardingError, match="all_reduce is in the body of a loop or branch"):
        shard(mir(g), TP)
    with pytest.raises(UnsupportedError, match="is a collective of the 2 ranks of axis 'tp'"):
        rlx.compile(g)


def test_a_collective_over_another_number_of_ranks_is_refused() -> None:
    g = Graph()
    g.output("y", ops.all_reduce(g.input("x", (4,), "f32"), axis="tp", ranks=3))
    with pytest.raises(ShardingError, match="all_reduce is over 3 ranks"):
        shard(mir(g), TP)
