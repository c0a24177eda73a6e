"""Loops over the same operands that differ only in how much they give are computed once."""

from __future__ import annotations

import numpy as np

import rlx
from rlx import Graph, ops
from rlx.ir.graph import Node
from rlx.reference.interpreter import evaluate
from rlx.rewrite.basic import remove_dead
from rlx.rewrite.share import share_bodies

X = np.random.default_rng(0).standard_normal((4, 3))


def loops(g: Graph) -> list[Node]:
    return [n for n in g.nodes if n.bodies]


def test_the_scan_that_saves_its_carries_stands_for_the_plain_one() -> None:
    g = Graph()
    x, w = g.input("x", (4, 3), "f64"), g.input("w", (3,), "f64")

    def loss(w: Node) -> Node:
        return ops.sum(ops.scan(lambda c, r: (ops.tanh(c * w + r), None), np.zeros(3), x)[0])

    with g.building():
        value, slope = rlx.value_and_grad(loss)(w)
    g.output("value", value)
    g.output("slope", slope)
    mir = rlx.lower(g)
    assert len(loops(mir)) == 3
    shared = remove_dead(share_bodies(rlx.optimize(mir)))
    assert len(loops(shared)) == 2
    feed = {"x": X, "w": np.array([0.5, -1.0, 2.0])}
    for a, b in zip(evaluate(shared, feed).values(), evaluate(g, feed).values(), strict=True):
        np.testing.assert_allclose(a, b)


def test_different_work_stays_apart() -> None:
    g = Graph()
    x = g.input("x", (4, 3), "f64")
    for i, scale in enumerate((1.0, 2.0)):
        g.output(f"y{i}", ops.scan(lambda c, r, k=scale: (c * k + r, None), np.zeros(3), x)[0])
    g.output("z", ops.scan(lambda c, r: (c + r, None), np.zeros(3), x, reverse=True)[0])
    assert share_bodies(g) is g


def test_branches_are_shared_too() -> None:
    g = Graph()
    p, x = g.input("p", (), "bool"), g.input("x", (4, 3), "f64")
    g.output("y", ops.cond(p, lambda v: v * 2.0, lambda v: -v, x))
    both = ops.cond(p, lambda v: (v * 2.0, v), lambda v: (-v, v), x)
    g.output("z", both[0] + both[1])
    shared = share_bodies(g)
    assert len(loops(shared)) == 1
    for flag in (True, False):
        feed = {"p": np.asarray(flag), "x": X}
        for a, b in zip(evaluate(shared, feed).values(), evaluate(g, feed).values(), strict=True):
            np.testing.assert_array_equal(a, b)
