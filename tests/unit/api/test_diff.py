"""Structural equality and diffs of graphs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from sample_graphs import GRAPHS, hello, nested

import rlx
from rlx.ir.dim import Constraint, sym
from rlx.ir.graph import Graph
from rlx.ir.text.diff import graph_diff, structurally_equal
from rlx.ir.text.read import parse_graph
from rlx.ir.text.write import graph_text


def net(layers: int = 4, twist: int = -1, how: str = "") -> Graph:
    """Layers without params: nothing but their place tells them apart."""
    g = Graph(f"net {how}")
    x = g.input("x", ("n", 8), "f32")
    for i in range(layers):
        half = x * 2.0
        y = rlx.ops.sin(half) if i == twist and how == "change" else rlx.ops.tanh(half)
        if i == twist and how == "insert":
            y = rlx.ops.exp(y)
        x = x + y
    g.output("y", x)
    return g


def changed_lines(diff: str) -> list[str]:
    return [line for line in diff.splitlines()[2:] if line[0] in "+-"]


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_equals_its_copy(name: str) -> None:
    g = GRAPHS[name]()
    blobs: dict[str, np.ndarray] = {}
    again = parse_graph(
        graph_text(g, locations=False, blobs=blobs).replace('graph "', 'graph "other '), blobs
    )
    assert structurally_equal(g, again)
    assert graph_diff(g, again) == ""


def test_graphs_are_told_apart() -> None:
    graphs = [build() for build in GRAPHS.values()] + [
        net(3),
        net(4),
        net(4, 1, "insert"),
        net(4, 2, "insert"),
    ]
    for i, a in enumerate(graphs):
        for j, b in enumerate(graphs):
            assert structurally_equal(a, b) is (i == j)
            assert (graph_diff(a, b) == "") is (i == j)


def vary(change: Callable[[Graph], object]) -> Graph:
    g = hello()
    change(g)
    return g


def test_what_counts_and_what_does_not() -> None:
    assert structurally_equal(hello(), vary(lambda g: setattr(g, "name", "else")))
    assert structurally_equal(hello(), vary(lambda g: rlx.ops.exp(g.inputs[0]))), "nothing reads it"
    assert structurally_equal(hello(), vary(lambda g: g.param_values.clear()))
    assert not structurally_equal(hello(), vary(lambda g: g.output("z", g.nodes[3])))
    assert not structurally_equal(hello(), vary(lambda g: g.input("z", (1,), "f32")))
    assert not structurally_equal(hello(), vary(lambda g: g.assume(Constraint("eq", sym("seq"), 4))))


def test_one_shared_node_is_not_two_equal_nodes() -> None:
    def build(shared: bool) -> Graph:
        g = Graph()
        x = g.input("x", (2,), "f32")
        first = rlx.ops.exp(x)
        g.output("y", first * (first if shared else rlx.ops.exp(x)))
        return g

    assert not structurally_equal(build(True), build(False))


def test_bodies_count() -> None:
    a, b = nested(), nested()
    assert structurally_equal(a, b)
    body = b.nodes[1].bodies[0]
    body.outputs = dict(reversed(body.outputs.items()))
    assert not structurally_equal(a, b)
    assert changed_lines(graph_diff(a, b))


def test_a_constant_counts_by_its_bits() -> None:
    def build(value: float) -> Graph:
        g = Graph()
        g.output("y", g.input("x", (2,), "f32") * value)
        return g

    assert structurally_equal(build(float("nan")), build(float("nan")))
    assert not structurally_equal(build(0.0), build(-0.0))


def test_an_inserted_node_changes_two_lines() -> None:
    diff = changed_lines(graph_diff(net(50), net(50, 20, "insert")))
    assert diff == [
        "-  %84 = add(%80, %83) : f32[n,8]",
        "+  %201 = exp(%83) : f32[n,8]",
        "+  %84 = add(%80, %201) : f32[n,8]",
    ]


def test_a_changed_node_changes_one_line() -> None:
    diff = changed_lines(graph_diff(net(50), net(50, 20, "change")))
    assert diff == ["-  %83 = tanh(%82) : f32[n,8]", "+  %83 = sin(%82) : f32[n,8]"]


def test_several_changes_in_equal_layers_keep_to_their_place() -> None:
    g, h = net(12), net(12, 3, "insert")
    both = Graph()
    x = both.input("x", ("n", 8), "f32")
    for i in range(12):
        y = rlx.ops.tanh(x * 2.0)
        x = x + (rlx.ops.exp(y) if i in (3, 7) else y)
    both.output("y", x)
    assert len(changed_lines(graph_diff(g, both))) == 6
    assert len(changed_lines(graph_diff(h, both))) == 3


def test_a_removed_node_changes_its_readers() -> None:
    diff = changed_lines(graph_diff(net(50, 20, "insert"), net(50)))
    assert len(diff) == 3 and sum(line[0] == "-" for line in diff) == 2


def test_a_diff_is_as_reviewed(golden: Callable[[str, str], None]) -> None:
    golden("graph/diff", graph_diff(net(6), net(6, 3, "insert")))


def test_many_equal_nodes_are_matched_in_time() -> None:
    """A chain where every node looks like every other."""

    def chain(n: int) -> Graph:
        g = Graph()
        x = g.input("x", (2,), "f32")
        for _ in range(n):
            x = x + x
        g.output("y", x)
        return g

    assert len(changed_lines(graph_diff(chain(3000), chain(3001)))) == 3
