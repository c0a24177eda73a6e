"""Products that steps of a loop need not wait for are made before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.ir.graph import Graph, Node
from rlx.ir.verify import verify
from rlx.reference.interpreter import evaluate
from rlx.rewrite.hoist_products import products_ahead


def values(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


FEEDS = {"h": values(0, 2, 4), "x": values(1, 5, 2, 3), "w": values(2, 3, 4), "v": values(3, 4, 4)}


def built(body: Callable[..., tuple[Node, Node]], reverse: bool = False) -> Graph:
    """A scan along x with a carry h; the body takes carry, row, and w, v from around it."""
    g = Graph("scan")
    h, x = g.input("h", (2, 4), "f32"), g.input("x", ("n", 2, 3), "f32")
    w, v = g.input("w", (3, 4), "f32"), g.input("v", (4, 4), "f32")
    last, rows = ops.scan(lambda carry, row: body(carry, row, w, v), h, x, reverse=reverse)
    g.output("last", last)
    g.output("rows", rows)
    return g


def products_inside(graph: Graph) -> int:
    """Contractions in bodies."""
    inner = [b for n in graph.nodes for b in n.bodies]
    return sum(n.op.family == "contract" or n.op.name == "dot_general" for b in inner for n in b.nodes) + sum(
        map(products_inside, inner)
    )


def same(graph: Graph, feeds: dict[str, Any], inside: int) -> Graph:
    """The pass keeps `inside` products in bodies, and what the program computes."""
    lowered = rlx.lower(graph)
    made = products_ahead(lowered)
    verify(made)
    assert products_inside(made) == inside < products_inside(lowered)
    want = evaluate(lowered, feeds)
    got, program = evaluate(made, feeds), rlx.compile(graph, threads=1)
    run = program.run(feeds)
    assert program.stats["host_thunks"] == []
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(run[name], value, rtol=1e-4, atol=1e-5)
    return made


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("n", [5, 1, 0])
def test_rows_are_multiplied_at_once(reverse: bool, n: int) -> None:
    def step(h: Node, row: Node, w: Node, v: Node) -> tuple[Node, Node]:
        new = ops.tanh(row @ w + h @ v)
        return new, new * 2.0

    made = same(built(step, reverse), FEEDS | {"x": FEEDS["x"][:n]}, inside=1)
    (scan,) = (node for node in made.nodes if node.bodies)
    assert scan.attrs["scanned"] == 2


def test_what_is_the_same_in_every_step_is_made_once() -> None:
    """With what is made of it; a view of it is made by whoever reads it."""

    def step(h: Node, row: Node, w: Node, v: Node) -> tuple[Node, Node]:
        fixed = ops.exp(w @ v)  # [3, 4]
        return h * 0.5 + ops.sum(ops.transpose(fixed)), row + ops.sum(fixed, axis=1)

    made = same(built(step), FEEDS, inside=0)
    (scan,) = (node for node in made.nodes if node.bodies)
    assert "exp" not in {n.op.name for n in scan.bodies[0].nodes}


def test_products_of_what_steps_hand_on_stay() -> None:
    graph = rlx.lower(built(lambda h, row, w, v: (h @ v, h @ v)))
    assert products_inside(products_ahead(graph)) == products_inside(graph)


def test_rows_that_outgrow_their_matrix_stay() -> None:
    """A product of many rows reads its matrix often in every step; all steps of it would take much memory."""
    g = Graph("large")
    h, x = g.input("h", (64, 4), "f32"), g.input("x", ("n", 64, 3), "f32")
    w = g.input("w", (3, 4), "f32")
    g.output("y", ops.scan(lambda c, row: (ops.tanh(c + row @ w), None), h, x)[0])
    graph = rlx.lower(g)
    assert products_inside(products_ahead(graph)) == products_inside(graph) == 1


def test_rows_found_by_a_counter() -> None:
    """A gather at the step's number, as exporters write it, is a row."""
    g = Graph("counter")
    h, x = g.input("h", (2, 4), "f32"), g.input("x", ("n", 2, 3), "f32")
    w = g.input("w", (3, 4), "f32")

    def step(i: Node, carry: Node) -> tuple[Any, Node, Node]:
        new = ops.tanh(carry + ops.gather(x, i, 0) @ w)
        return True, new, new

    with g.building():
        last, rows = ops.loop(step, h, trips=ops.dim_value(x.shape[0], "i64"))
    g.output("last", last)
    g.output("rows", rows)
    same(g, {k: FEEDS[k] for k in ("h", "x", "w")}, inside=0)


def test_a_loop_that_data_end() -> None:
    g = Graph("until")
    h, w, v = g.input("h", (2, 4), "f32"), g.input("w", (3, 4), "f32"), g.input("v", (4, 4), "f32")
    end = g.input("end", (), "f32")

    def step(i: Node, carry: Node) -> tuple[Any, Node, None]:
        new = carry + ops.sum(w @ v) * 0.1
        return ops.less(ops.sum(new), end), new, None

    g.output("y", ops.loop(step, h, trips=100)[0])
    same(
        g,
        {"h": FEEDS["h"], "w": np.abs(FEEDS["w"]), "v": np.abs(FEEDS["v"]), "end": np.float32(50)},
        inside=0,
    )


def test_a_place_that_no_step_reads_is_not_read_before_the_loop() -> None:
    """Of a scan of no steps, an index out of range is no error."""
    g = Graph("unread")
    h, x = g.input("h", (2, 4), "f32"), g.input("x", ("n", 4), "f32")
    table, at = g.input("table", ("m", 4, 4), "f32"), g.input("at", (), "i64")
    last, _ = ops.scan(lambda c, row: (c @ ops.gather(table, at, 0) + row, None), h, x)
    g.output("y", last)
    feeds = {"h": FEEDS["h"], "x": values(5, 0, 4), "table": values(6, 2, 4, 4), "at": np.array(7)}
    np.testing.assert_array_equal(rlx.compile(g).run(feeds)["y"], FEEDS["h"])


def test_a_scan_inside_a_scan() -> None:
    def step(h: Node, row: Node, w: Node, v: Node) -> tuple[Node, Node]:
        def inner(c: Node, _: Any) -> tuple[Node, None]:
            return ops.tanh(c + row @ w), None

        new, _ = ops.scan(inner, h, length=3)
        return new, ops.sum(new)

    same(built(step), FEEDS, inside=0)
