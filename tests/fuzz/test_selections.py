"""Random programs whose sizes data decide, on inputs of symbolic sizes: plan, oracle, native code agree."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.api.compile import plan
from rlx.ir.dim import evaluate as value_of
from rlx.ir.graph import Graph, Node
from rlx.ir.symbols import found_by_data
from rlx.reference.interpreter import evaluate
from rlx.reference.lir import LirInterpreter

PER_TEST = 12  # graphs
LIMIT = 0.0123  # no sum of softmax and shifts comes near it, whatever its rounding
Step = Callable[[list[Node], np.random.Generator], Node]


def one(values: list[Node], rng: np.random.Generator, rank: int | None = None) -> Node:
    fitting = [v for v in values if rank is None or v.rank == rank]
    return fitting[int(rng.integers(len(fitting)))]


def of_elements(values: list[Node], rng: np.random.Generator) -> Node:
    x = one(values, rng)
    return ops.compress(ops.reshape(x, (x.tensor.numel,)) > LIMIT, x)


def of_rows(values: list[Node], rng: np.random.Generator) -> Node:
    x = one(values, rng, 2)
    return ops.compress(ops.sum(x, axis=1) > LIMIT, x, axis=0)


def of_columns(values: list[Node], rng: np.random.Generator) -> Node:
    x = one(values, rng, 2)
    return ops.compress(ops.sum(x, axis=0) > LIMIT, x, axis=1)


def positions(values: list[Node], rng: np.random.Generator) -> Node:
    return ops.cast(ops.argwhere(one(values, rng) > 0.3), "f32") - 1.0


def distinct(values: list[Node], rng: np.random.Generator) -> Node:
    return ops.unique(ops.round(one(values, rng) * 2.0))


def before_and_after(values: list[Node], rng: np.random.Generator) -> Node:
    """One value of both kinds of sizes."""
    x, y = one(values, rng, 1), one(values, rng, 1)
    return ops.concat([x, ops.cumsum(y, 0)], axis=0)


def every_second(values: list[Node], rng: np.random.Generator) -> Node:
    x = one(values, rng, 1)
    return ops.slice_axis(x, 0, 0, (x.shape[0] + 1) // 2) * 0.5


STEPS: list[Step] = [
    of_elements,
    of_rows,
    of_columns,
    positions,
    distinct,
    before_and_after,
    every_second,
    lambda values, rng: ops.tanh(one(values, rng)) * 1.5,
    lambda values, rng: ops.softmax(one(values, rng, 2), axis=-1) - 0.1,
    lambda values, rng: ops.cumsum(one(values, rng), 0),
    lambda values, rng: ops.transpose(one(values, rng, 2)),
    lambda values, rng: ops.reshape(one(values, rng, 2), (-1,)),
    lambda values, rng: ops.pad(one(values, rng, 1), ((1, 2),)),
]


def random_selection(seed: int) -> Graph:
    """A graph of some steps on x [n, m] and v [k]; what nobody reads are its outputs."""
    rng = np.random.default_rng(seed)
    g = rlx.Graph(f"selection{seed}")
    values = [g.input("x", ("n", "m"), "f32"), g.input("v", ("k",), "f32")]
    with g.building():
        for _ in range(int(rng.integers(3, 9))):
            values.append(STEPS[int(rng.integers(len(STEPS)))](values, rng))
        read = {o.id for n in g.nodes for o in n.operands}
        for v in values[2:]:
            if v.id not in read:
                g.output(f"y{v.id}", v * 2.0)
    return g


def check(seed: int) -> int:
    """How many sizes a graph finds in its data."""
    g = random_selection(seed)
    lir = plan(g)
    lir.plan.check()
    found = found_by_data(lir.mir)
    assert all(most is not None for most in found.values()), found
    native = [rlx.compile(g, threads=t, cache=False) for t in (1, 2)]
    oracle = LirInterpreter(lir, poison=True)
    rng = np.random.default_rng(seed)
    for _ in range(3):
        sizes = {s: int(rng.integers(0, 12)) for s in ("n", "m", "k")}
        placed = lir.specialize(sizes)  # data have not been seen, and nothing about them is asked
        placed.plan.check()
        assert {s: placed.plan.binding[s] for s in found} == {s: value_of(m, sizes) for s, m in found.items()}
        assert placed.code_key == lir.code_key
        feed = {
            "x": rng.standard_normal((sizes["n"], sizes["m"]), np.float32),
            "v": rng.standard_normal(sizes["k"], np.float32) + np.float32(rng.integers(-2, 3)),
        }
        want = evaluate(g, feed)
        results = [oracle.run(feed), *(p.run(feed) for p in native)]
        oracle.plan.check()
        assert oracle.plan.arena_size == placed.arena_size
        assert native[0].memory(sizes)["activation"] == placed.arena_size
        for got in results:
            for name, value in want.items():
                np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-5, err_msg=f"{seed} {name}")
    return len(found)


@pytest.mark.parametrize("batch", range(2))
def test_selections_over_symbolic_sizes(batch: int) -> None:
    counts = [check(batch * PER_TEST + i) for i in range(PER_TEST)]
    assert max(counts) >= 3 and sum(counts) > PER_TEST


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(2, 34))
def test_many_selections_over_symbolic_sizes(batch: int) -> None:
    for i in range(PER_TEST):
        check(batch * PER_TEST + i)
