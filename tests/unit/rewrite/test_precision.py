"""precision="bf16": which values are stored narrow and why, and what becomes of the results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlx
from machines import on_targets
from rlx import ops
from rlx.api.compile import plan
from rlx.ir.graph import Graph, Node
from rlx.reference.interpreter import evaluate as reference
from rlx.target.cpu import runs_here, targets

PAIRS = "x86-64-v4-bf16-vnni"
HERE = [t.name for t in targets() if runs_here(t)]
every_target = on_targets(HERE)


def block(
    width: int = 48,
    heads: int = 3,
    groups: int = 1,
    one_product: bool = False,
    causal: bool = False,
    keeps: bool = False,
) -> Graph:
    """Pre-norm attention and feed-forward; `groups` query heads share keys and values, which it may give."""
    rng = np.random.default_rng(1)
    g = Graph("block")
    x = g.input("x", ("batch", "seq", width), "f32")
    batch, seq, _ = x.shape
    depth = width // heads

    def weight(name: str, *shape: int) -> Node:
        value = rng.standard_normal(shape) / np.sqrt(shape[0])
        return g.param(name, shape, "f32", value=value.astype(np.float32))

    def linear(h: Node, name: str, columns: int) -> Node:
        made: Node = h @ weight(name, h.shape[-1], columns) + weight(name + ".bias", columns)
        return made

    def split(t: Node, count: int) -> Node:
        made: Node = ops.transpose(ops.reshape(t, (batch, seq, count, depth)), (0, 2, 1, 3))
        return made

    h = ops.layer_norm(x, weight("n1", width), weight("n1.bias", width))
    counts = (heads, heads // groups, heads // groups)
    if one_product:
        whole, parts, at = linear(h, "qkv", depth * sum(counts)), [], 0
        for count in counts:
            parts.append(split(ops.slice_axis(whole, 2, at, count * depth), count))
            at += count * depth
    else:
        parts = [split(linear(h, n, c * depth), c) for n, c in zip("qkv", counts, strict=True)]
    for name, part in zip(("keys", "values"), parts[1:], strict=True):
        if keeps:
            g.output(name, part)
    context = ops.attention(*parts, causal=causal)
    context = ops.reshape(ops.transpose(context, (0, 2, 1, 3)), (batch, seq, width))
    x = x + linear(context, "o", width)
    h = ops.layer_norm(x, weight("n2", width), weight("n2.bias", width))
    g.output("y", x + linear(ops.gelu(linear(h, "up", 2 * width)), "down", width))
    return g


def square(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((32, 32)).astype(np.float32)


def stored(graph: Graph, target: str, **options: Any) -> tuple[list[str], list[str]]:
    """Types of what kernels store, in order, and the decisions about storage."""
    lir = plan(graph, target=target, precision="bf16", assume={"batch": 8, "seq": 128}, **options)
    kernels = [str(lir.mir.nodes[i].type) for i in lir.plan.schedule]
    return kernels, [str(d) for d in lir.trace.decisions if d.rule == "store bf16"]


@pytest.mark.parametrize("one_product", [False, True])
def test_between_products_values_are_stored_narrow(one_product: bool) -> None:
    kernels, decisions = stored(block(one_product=one_product), PAIRS)
    assert kernels == [
        "bf16[batch,seq,48]",  # norm
        "bf16[batch,seq,144]",  # queries, keys and values
        "bf16[batch,seq,48]",  # attention
        "f32[batch,seq,48]",  # the residual stream
        "bf16[batch,seq,48]",
        "bf16[batch,seq,96]",
        "f32[batch,seq,48]",
    ]
    assert all(d.startswith("keep store bf16") for d in decisions)
    assert len(decisions) == (5 if one_product else 7)


def test_a_value_that_is_also_read_in_f32_is_rounded_beside() -> None:
    """After the norm, as BERT has it: its result goes to the next product and to the sum after that."""
    g = Graph("after")
    x = g.input("x", ("n", 32), "f32")
    w = [g.param(f"w{i}", (32, 32), "f32", value=square(i)) for i in range(2)]
    ones = g.param("scale", (32,), "f32", value=np.ones(32, np.float32))
    h = ops.layer_norm(x @ w[0], ones, ones)
    g.output("y", h + h @ w[1])
    kernels, decisions = stored(g, PAIRS)
    assert "(f32[n,32], bf16[n,32])" in kernels
    assert any("refuse store bf16" in d and "(add) too: rounded beside" in d for d in decisions)


def test_where_products_of_bf16_are_not_faster_attention_stays_wide() -> None:
    kernels, decisions = stored(block(), "x86-64-v3")
    assert "f32[batch,seq,144]" in kernels
    assert len(decisions) == 4  # what products with weights read


def attended(lir: Any) -> list[str]:
    return [str(d) for d in lir.trace.decisions if d.rule == "attend in bf16"]


@pytest.mark.parametrize(("queries", "keys", "pays"), [("s", "s", True), (1, 500, False), ("s", "t", False)])
def test_operands_from_outside_are_rounded_if_that_pays(queries: Any, keys: Any, pays: bool) -> None:
    g = Graph("inputs")
    q, k, v = (
        g.input(n, (2, 4, size, 64), "f32") for n, size in zip("qkv", (queries, keys, keys), strict=True)
    )
    g.output("y", ops.attention(q, k, v))
    lir = plan(g, target=PAIRS, precision="bf16")
    told = attended(lir)
    assert len(lir.plan.schedule) == (4 if pays else 1)
    assert (
        told == []
        if pays
        else "refuse attend in bf16" in told[0] and "queries and keys and values apart" in told[0]
    )


def test_keys_that_are_results_are_rounded_beside() -> None:
    """A prompt whose keys and values are kept for the tokens after it."""
    kernels, decisions = stored(block(one_product=True, keeps=True), PAIRS)
    assert "f32[batch,seq,144]" in kernels
    assert sum(k.startswith("bf16[") for k in kernels) == 7  # three of them queries, keys and values
    assert any("it is an output too: rounded beside" in d for d in decisions)


def test_keys_that_are_kept_for_later_stay_as_they_are() -> None:
    """A cache is f32 by its declaration; attention that reads it is f32 too."""
    g = Graph("decode")
    x = g.input("x", (1, 1, 32), "f32")
    past = g.size("past", maximum=15)
    w = g.param("w", (32, 32), "f32", value=square(0))
    heads = ops.transpose(ops.reshape(x @ w, (1, 1, 2, 16)), (0, 2, 1, 3))
    caches = []
    for name in ("k", "v"):
        cache = g.state(name, (1, 2, 16, 16), "f32", np.zeros((1, 2, 16, 16), np.float32))
        updated, seen = ops.append(cache, heads, past, axis=2)
        g.set_state(name, updated)
        caches.append(seen)
    g.output("y", ops.attention(heads, *caches))
    lir = plan(g, target=PAIRS, precision="bf16")
    (told,) = attended(lir)
    assert "refuse attend in bf16" in told and "its keys are kept from run to run as f32" in told


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.reshape(-1).astype(np.float64), b.reshape(-1).astype(np.float64)
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@every_target
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"one_product": True, "causal": True},
        {"width": 64, "heads": 4, "groups": 2},
        {"width": 35, "heads": 5},  # heads of 7 features: an odd number of pairs
        {"one_product": True, "keeps": True},
    ],
    ids=str,
)
def test_results_are_near_those_of_f32(target: str, options: dict[str, Any]) -> None:
    g = block(**options)
    program = rlx.compile(g, target=target, precision="bf16", threads=2)
    assert not program.stats["host_thunks"]
    for batch, seq in ((1, 1), (1, 3), (2, 17), (1, 133)):
        rng = np.random.default_rng(seq)
        feed = {"x": rng.standard_normal((batch, seq, options.get("width", 48))).astype(np.float32)}
        got, want = program.run(feed)["y"], reference(g, feed)["y"]
        assert cosine(got, want) > 0.9995
        assert np.abs(got - want).max() < 0.05 * np.abs(want).max()


def test_the_same_bits_for_any_number_of_threads() -> None:
    g = block(causal=True)
    feed = {"x": np.random.default_rng(0).standard_normal((2, 70, 48)).astype(np.float32)}
    first, *others = (rlx.compile(g, precision="bf16", threads=t).run(feed)["y"].tobytes() for t in (1, 2, 3))
    assert all(other == first for other in others)


@every_target
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_shows_where_it_does_in_f32(target: str, bad: float) -> None:
    """Causal: all tokens from the bad one on see it; a weight of 0 hides nothing that is not finite."""
    g = block(causal=True)
    feed = {"x": np.random.default_rng(0).standard_normal((1, 40, 48)).astype(np.float32)}
    feed["x"][0, 21, 5] = bad
    got, want = (rlx.compile(g, target=target, precision=p).run(feed)["y"] for p in ("bf16", "f32"))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    assert np.isnan(got[0, 21:]).all()
