"""Matmuls with repeated matrices, as grouped heads are written: each matrix is read where it is."""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.fuzz.bounds import assert_by_table
from rlx.reference.interpreter import evaluate

GROUPS, MEMBERS, DEPTH = 2, 3, 16
HEADS = GROUPS * MEMBERS


def expanded(x: rlx.Node) -> rlx.Node:
    batch, groups, length, depth = x.shape
    wide = ops.broadcast_to(ops.expand_dims(x, 2), (batch, groups, MEMBERS, length, depth))
    return ops.reshape(wide, (batch, HEADS, length, depth))


def tiled(x: rlx.Node) -> rlx.Node:
    batch, _, length, depth = x.shape
    return ops.reshape(ops.tile(ops.expand_dims(x, 2), (1, 1, MEMBERS, 1, 1)), (batch, HEADS, length, depth))


def grouped(repeat=expanded, mask: str = "", length="s") -> rlx.Graph:
    g = rlx.Graph("grouped")
    q = g.input("q", (1, HEADS, length, DEPTH), "f32")
    k, v = (g.input(n, (1, GROUPS, length, DEPTH), "f32") for n in "kv")
    shape = {
        "": None,
        "rows": (length, length),
        "heads": (1, HEADS, length, length),
        "kept": (length, length),
    }
    seen = None if not mask else g.input("mask", shape[mask], "bool" if mask == "kept" else "f32")
    with g.building():
        scores = ops.matmul(q, ops.transpose(repeat(k), (0, 1, 3, 2))) * 0.25
        if seen is not None:
            scores = ops.where(seen, scores, -np.inf) if mask == "kept" else scores + seen
        g.output("y", ops.matmul(ops.softmax(scores), repeat(v)))
    return g


def feed(g: rlx.Graph, length: int = 0) -> dict[str, np.ndarray]:
    rng, made = np.random.default_rng(length), {}
    for node in g.inputs:
        shape = tuple(d if isinstance(d, int) else length for d in node.shape)
        x = rng.standard_normal(shape).astype(np.float32)
        made[node.attrs["name"]] = (
            np.tril(np.ones(shape, bool)) if node.dtype.is_bool else x.astype(node.dtype.np)
        )
    return made


@pytest.mark.parametrize("mask", ["", "rows", "heads", "kept"])
@pytest.mark.parametrize("repeat", [expanded, tiled], ids=["expand", "tile"])
def test_grouped_heads_are_one_kernel(repeat, mask: str) -> None:
    """Nothing is repeated, and the result is that of attention with fewer heads of keys."""
    g = grouped(repeat, mask)
    program = rlx.compile(g)
    assert program.stats["kernels"] == 1 and [d.rule for d in program.decisions if d.verdict] == ["attention"]
    for length in (1, 5, 40):
        given = feed(g, length)
        assert_by_table(g, given, program.run(given), evaluate(g, given))


def test_the_bits_are_those_of_attention_with_groups() -> None:
    g, own = grouped(length=20), rlx.Graph("own")
    q = own.input("q", (1, HEADS, 20, DEPTH), "f32")
    k, v = (own.input(n, (1, GROUPS, 20, DEPTH), "f32") for n in "kv")
    own.output("y", ops.attention(q, k, v, scale=0.25))
    given = feed(g, 20)
    assert rlx.compile(g).run(given)["y"].tobytes() == rlx.compile(own).run(given)["y"].tobytes()


def test_a_matmul_by_itself() -> None:
    g = rlx.Graph("product")
    a, b = g.input("a", (HEADS, 5, 7), "f32"), g.input("b", (GROUPS, 7, 4), "f32")
    with g.building():
        wide = ops.broadcast_to(ops.expand_dims(b, 1), (GROUPS, MEMBERS, 7, 4))
        g.output("y", ops.matmul(a, ops.reshape(wide, (HEADS, 7, 4))))
    small = rlx.optimize(rlx.lower(g))
    assert "broadcast_to" not in {n.op.name for n in small.nodes if n.id in small.live()}
    given = feed(g)
    np.testing.assert_array_equal(evaluate(small, given)["y"], evaluate(g, given)["y"])
    assert_by_table(g, given, rlx.compile(g).run(given), evaluate(g, given))


def test_other_repeats_stay() -> None:
    """Copies of the whole next to each other, and repeats of another axis."""
    g = rlx.Graph("product")
    a, b = g.input("a", (HEADS, 5, 8), "f32"), g.input("b", (GROUPS, 8, 4), "f32")
    c = g.input("c", (HEADS, 4, 4), "f32")
    with g.building():
        g.output("y", ops.matmul(a, ops.tile(b, (MEMBERS, 1, 1))))
        wide = ops.reshape(ops.broadcast_to(ops.expand_dims(c, 2), (HEADS, 4, 2, 4)), (HEADS, 8, 4))
        g.output("z", ops.matmul(a, wide))
    given = feed(g)
    small = rlx.optimize(rlx.lower(g))
    assert [n.op.name for n in small.nodes if n.id in small.live()].count("broadcast_to") == 2
    assert_by_table(g, given, rlx.compile(g).run(given), evaluate(g, given))
