"""Random programs of nested branches, loops and scans over weights: native, as planned and by reference."""

from __future__ import annotations

import random

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.api.compile import plan
from rlx.ir.graph import Graph, Node
from rlx.reference.interpreter import evaluate
from rlx.reference.lir import run_lir

WIDTH = 8


class Writer:
    """Writes expressions whose values all have the shape of the program's inputs.

    Conditions are no ties that rounding would break, and values that are carried stay small.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.graph = g = Graph("random")
        rows = self.random.choice(["n", 3])
        self.inputs = [g.input(name, (rows, WIDTH), "f32") for name in "xy"]
        self.trips = g.input("trips", (), "i64")
        generator = np.random.default_rng(seed)
        self.weights = [g.param(f"w{i}", (WIDTH, WIDTH), "f32") for i in range(2)]
        for w in self.weights:
            g.set_param(w.attrs["name"], generator.standard_normal((WIDTH, WIDTH)).astype(np.float32) * 0.4)
        out = self.value(self.inputs, 4)
        g.output("out", out)
        g.output("total", ops.sum(out) + self.trips.astype("f32"))

    def value(self, known: list[Node], depth: int) -> Node:
        """An expression over known values."""
        kinds = (
            [self.plain]
            if depth <= 0
            else [self.plain, self.product, self.branch, self.loop, self.scan, self.norm]
        )
        return self.random.choice(kinds)(known, depth - 1)

    def plain(self, known: list[Node], depth: int) -> Node:
        x, y = self.random.choice(known), self.random.choice(known)
        made: Node = self.random.choice([ops.tanh(x + y), x * 0.5 - y, ops.maximum(x, y) * 0.7])
        return made

    def product(self, known: list[Node], depth: int) -> Node:
        made: Node = ops.tanh(self.value(known, depth) @ self.random.choice(self.weights))
        return made

    def norm(self, known: list[Node], depth: int) -> Node:
        x = self.value(known, depth)
        made: Node = x - ops.mean(x, axis=(-1,), keepdims=True)
        return made

    def branch(self, known: list[Node], depth: int) -> Node:
        condition = ops.sum(self.value(known, depth - 1)) > self.random.choice([-1.3, 0.37, 1.1])
        made: Node = ops.cond(
            condition,
            lambda a: self.value([a, *known], depth),
            lambda a: self.value([*known, a], depth),
            self.random.choice(known),
        )
        return made

    def loop(self, known: list[Node], depth: int) -> Node:
        def step(i: Node, carry: tuple[Node, Node]) -> tuple[Node, tuple[Node, Node], None]:
            x, count = carry
            return (
                ops.sum(x) < 2.9,
                (ops.tanh(self.value([x, *known], depth)) + count.astype("f32"), count + 1),
                None,
            )

        (made, _), _ = ops.loop(step, (self.random.choice(known), np.array(0)), trips=self.trips)
        return made

    def scan(self, known: list[Node], depth: int) -> Node:
        def step(carry: Node, row: Node) -> tuple[Node, Node]:
            new = ops.tanh(self.value([carry, *known], depth)) + row
            return new, ops.sum(new, axis=(0,))

        start, rows = self.random.choice(known), self.random.choice(known)
        made, every = ops.scan(step, start, rows, reverse=self.random.random() < 0.5)
        whole: Node = made + ops.mean(every)
        return whole


def check(seed: int) -> None:
    graph = Writer(seed).graph
    one, two, spoilt = (
        rlx.compile(graph, **how) for how in ({"threads": 1}, {"threads": 2}, {"debug": "poison"})
    )
    assert not one.stats["host_thunks"]
    lir = plan(graph)
    lir.plan.check()
    generator = np.random.default_rng(seed)
    for rows in (1, 5) if lir.dynamic_symbols() else (3,):
        for trips in (0, 3):
            feed = {name: generator.standard_normal((rows, WIDTH)).astype(np.float32) for name in "xy"}
            feed["trips"] = np.array(trips)
            want, got = evaluate(graph, feed), one.run(feed)
            planned = run_lir(lir, feed, poison=True)
            for name, value in want.items():
                np.testing.assert_allclose(got[name], value, rtol=1e-3, atol=1e-4)
                np.testing.assert_allclose(planned[name], value, rtol=1e-3, atol=1e-4)
                for other in (two, spoilt):
                    assert got[name].tobytes() == other.run(feed)[name].tobytes()


@pytest.mark.parametrize("seed", range(16))
def test_random_control_flow(seed: int) -> None:
    check(seed)


@pytest.mark.slow
def test_much_random_control_flow() -> None:
    for seed in range(100, 400):
        check(seed)
