"""Attention over pages: the bits of a token depend on its own query and sequence alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlx
from gemm_harness import Guarded
from machines import executable, on_targets
from rlx import ops
from rlx.errors import DTypeError, KernelError, ShapeError, TypeMismatchError
from rlx.reference.interpreter import evaluate
from rlx.runtime.program import CompiledProgram

PAGE, WIDTH = 64, 4
SHAPES = {  # heads, heads of keys, depth, depth of values
    "one head each": (3, 3, 64, 64),
    "groups of 2": (4, 2, 40, 24),
    "groups of 3": (9, 3, 64, 64),
    "groups of 7": (7, 1, 16, 16),
    "groups of 8": (16, 2, 33, 31),
    "groups of 11": (11, 1, 8, 8),
}
Feed = dict[str, np.ndarray]


def graph(shape: tuple[int, int, int, int], coded: bool = False, **attrs: Any) -> rlx.Graph:
    heads, kv_heads, depth, value_depth = shape
    g, stored = rlx.Graph("paged"), "i8" if coded else "f32"
    q = g.input("q", ("tokens", heads, depth), "f32")
    k = g.input("k", ("pages", kv_heads, depth, PAGE), stored)
    v = g.input("v", ("pages", kv_heads, PAGE, value_depth), stored)
    table = g.input("table", ("slots", "width"), "i64")
    slots, lengths = (g.input(name, ("tokens",), "i64") for name in ("slots", "lengths"))
    if coded:
        for name, inner in (("k_scales", (1, PAGE)), ("v_scales", (PAGE, 1))):
            attrs[name] = g.input(name, ("pages", kv_heads, *inner), "f32")
    g.output("y", ops.paged_attention(q, k, v, table, slots, lengths, **attrs))
    return g


def random_batch(shape: tuple[int, int, int, int], seed: int, tokens: int = 40, slots: int = 5) -> Feed:
    """Parts of prompts, and single tokens, of some sequences."""
    heads, kv_heads, depth, value_depth = shape
    rng = np.random.default_rng(seed)
    pages = slots * WIDTH + 3

    def normal(*sizes: int) -> np.ndarray:
        return rng.standard_normal(sizes).astype(np.float32)

    own, lengths = [], []
    while len(own) < tokens:
        slot, count = int(rng.integers(slots)), min(int(rng.choice([1, 1, 9, 20])), tokens - len(own))
        start = int(rng.integers(0, PAGE * WIDTH - count + 1))
        own += [slot] * count
        lengths += range(start + 1, start + 1 + count)
    return {
        "q": normal(tokens, heads, depth),
        "k": normal(pages, kv_heads, depth, PAGE),
        "v": normal(pages, kv_heads, PAGE, value_depth),
        "table": rng.permutation(pages)[: slots * WIDTH].reshape(slots, WIDTH),
        "slots": np.array(own),
        "lengths": np.array(lengths),
    }


def as_codes(feed: Feed) -> Feed:
    """The same with keys and values of 8 bits."""
    rng = np.random.default_rng(6)
    scales = {"k_scales": feed["k"][:, :, :1], "v_scales": feed["v"][..., :1]}
    drawn = {name: rng.uniform(0.005, 0.02, like.shape).astype(np.float32) for name, like in scales.items()}
    codes = {name: rng.integers(-127, 128, feed[name].shape).astype(np.int8) for name in ("k", "v")}
    return {**feed, **codes, **drawn}


def rows_of(feed: Feed, which: np.ndarray | slice) -> Feed:
    """Some tokens of a batch."""
    return {**feed, **{name: feed[name][which] for name in ("q", "slots", "lengths")}}


def bits(program: CompiledProgram, feed: Feed) -> np.ndarray:
    return program.run(feed)["y"].view(np.uint32)


@on_targets(executable())
@pytest.mark.parametrize("attrs", [{}, {"window": 70}, {"softcap": 1.5, "scale": 0.3}], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_a_token_is_computed_as_if_it_were_alone(name: str, attrs: dict[str, Any], target: Any) -> None:
    shape = SHAPES[name]
    g = graph(shape, **attrs)
    programs = [rlx.compile(g, target=target.name, threads=n) for n in (1, 2)]
    assert not programs[0].stats["host_thunks"]
    feed = random_batch(shape, len(name))
    want = evaluate(g, feed)["y"]
    found = bits(programs[0], feed)
    np.testing.assert_allclose(found.view(np.float32), want, rtol=2e-5, atol=2e-6)
    np.testing.assert_array_equal(bits(programs[1], feed), found, "threads")
    order = np.random.default_rng(1).permutation(len(found))
    np.testing.assert_array_equal(bits(programs[1], rows_of(feed, order)), found[order], "order")
    for i in order[:8]:
        np.testing.assert_array_equal(bits(programs[1], rows_of(feed, slice(i, i + 1))), found[i : i + 1])
    np.testing.assert_array_equal(bits(programs[0], _other_pages(feed)), found, "pages and slots")


def _other_pages(feed: Feed) -> Feed:
    """The same sequences in other pages and slots; what no token sees is NaN, or a page that is not there."""
    rng = np.random.default_rng(2)
    pages, slots = rng.permutation(len(feed["k"])), rng.permutation(len(feed["table"]))
    back, table = np.argsort(pages), np.empty_like(feed["table"])
    names = ("k_scales", "v_scales") if "k_scales" in feed else ("k", "v")  # codes have no NaN
    moved = {name: feed[name][pages] for name in ("k", "v", *names)}
    k, v = (moved[name] for name in names)
    table[slots] = back[feed["table"]]
    most = np.zeros(len(slots), int)
    np.maximum.at(most, feed["slots"], feed["lengths"])
    for slot, length in enumerate(most):
        for i, page in enumerate(table[slots[slot]]):
            unseen = np.arange(PAGE) + i * PAGE >= length
            k[page, :, :, unseen], v[page, :, unseen] = np.nan, np.nan
        table[slots[slot], -(-length // PAGE) :] = 1 << 40
    unused = np.setdiff1d(np.arange(len(pages)), back[feed["table"]])
    k[unused], v[unused] = np.nan, np.nan
    return {**feed, **moved, "table": table, "slots": slots[feed["slots"]]}


@on_targets(executable())
@pytest.mark.parametrize("attrs", [{}, {"window": 70, "softcap": 1.5}], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_codes_with_scales(name: str, attrs: dict[str, Any], target: Any) -> None:
    shape = SHAPES[name]
    g = graph(shape, coded=True, **attrs)
    programs = [rlx.compile(g, target=target.name, threads=n) for n in (1, 2)]
    assert not programs[0].stats["host_thunks"]
    feed = as_codes(random_batch(shape, len(name)))
    found = bits(programs[0], feed)
    np.testing.assert_allclose(found.view(np.float32), evaluate(g, feed)["y"], rtol=2e-5, atol=2e-6)
    numbers = {x: feed[x] * feed[f"{x}_scales"] for x in "kv"}
    same = {x: feed[x] for x in ("q", "table", "slots", "lengths")}
    plain = evaluate(graph(shape, **attrs), {**same, **numbers})["y"]
    np.testing.assert_allclose(found.view(np.float32), plain, rtol=2e-5, atol=2e-6)
    order = np.random.default_rng(1).permutation(len(found))
    np.testing.assert_array_equal(bits(programs[1], rows_of(feed, order)), found[order], "order, threads")
    for i in order[:8]:
        np.testing.assert_array_equal(bits(programs[1], rows_of(feed, slice(i, i + 1))), found[i : i + 1])
    np.testing.assert_array_equal(bits(programs[0], _other_pages(feed)), found, "pages and slots")


def test_codes_without_what_they_need_are_refused() -> None:
    feed = as_codes(random_batch(SHAPES["groups of 3"], 3))
    k_scales, v_scales = feed.pop("k_scales"), feed.pop("v_scales")
    operands = tuple(feed.values())
    with pytest.raises(TypeMismatchError, match="takes 8 or 9 operands, got 6"):
        ops.paged_attention(*operands)
    with pytest.raises(DTypeError, match=r"scales of values .* are not f32"):
        ops.paged_attention(*operands, k_scales=k_scales, v_scales=v_scales.astype(np.float64))
    with pytest.raises(ShapeError, match=r"scales of keys .* must be f32\[23,3,1,64\]"):
        ops.paged_attention(*operands, k_scales=v_scales, v_scales=v_scales)
    with pytest.raises(TypeMismatchError):
        ops.paged_attention(
            *(x.astype(np.float32) if x.dtype == np.int8 else x for x in operands),
            k_scales=k_scales,
            v_scales=v_scales,
        )


@on_targets(executable("x86-64-v4", "x86-64-v3"))
def test_keys_behind_those_that_are_seen_are_not_read(target: Any) -> None:
    """Reading them would end the process: of a page of 2048 keys, the second half cannot be read."""
    guard, seen = Guarded(), 1000
    half = guard.array((1024,), np.float32, at_end=True)
    half[:] = np.random.default_rng(3).standard_normal(1024)
    keys = np.lib.stride_tricks.as_strided(half, (1, 1, 1, 2048), (8192, 8192, 8192, 4), writeable=False)
    values = np.arange(2048, dtype=np.float32).reshape(1, 1, 2048, 1)
    g, one = rlx.Graph("half"), np.zeros((1, 1), np.int64)
    q, k, v = (
        g.input(name, shape, "f32")
        for name, shape in (("q", (1, 1, 1)), ("k", keys.shape), ("v", values.shape))
    )
    table, slots, lengths = (
        g.input(name, shape, "i64") for name, shape in (("t", (1, 1)), ("s", (1,)), ("n", (1,)))
    )
    g.output("y", ops.paged_attention(q, k, v, table, slots, lengths))
    feed = {
        "q": np.ones((1, 1, 1), np.float32),
        "k": keys,
        "v": values,
        "t": one,
        "s": one[0],
        "n": one[0] + seen,
    }
    found = rlx.compile(g, target=target.name).run(feed)["y"]
    weights = np.exp(half[:seen].astype(np.float64))
    np.testing.assert_allclose(found.ravel(), weights @ np.arange(seen) / weights.sum(), rtol=1e-5)


@on_targets(executable("x86-64-v4", "x86-64-v3", "x86-64"))
def test_operands_with_strides(target: Any) -> None:
    shape = SHAPES["groups of 3"]
    g = rlx.Graph("strided")
    feed = random_batch(shape, 3)
    given = {name: g.input(name, value.T.shape, "i64" if value.dtype == np.int64 else "f32")
             for name, value in feed.items()}  # fmt: skip
    g.output("y", ops.paged_attention(*(ops.transpose(x) for x in given.values())))
    program = rlx.compile(g, target=target.name)
    assert not program.stats["host_thunks"]
    found = program.run({name: np.ascontiguousarray(value.T) for name, value in feed.items()})["y"]
    np.testing.assert_array_equal(found, rlx.compile(graph(shape), target=target.name).run(feed)["y"])


@pytest.mark.parametrize("name", ["table", "slots", "lengths"])
@pytest.mark.parametrize("value", [-1, 1 << 40, -(1 << 62), "one more"])
def test_what_is_out_of_range_is_refused_and_not_read(name: str, value: int | str) -> None:
    shape = SHAPES["groups of 3"]
    feed = random_batch(shape, 4)
    most = {"table": len(feed["k"]), "slots": len(feed["table"]), "lengths": PAGE * WIDTH + 1}[name]
    feed[name] = feed[name].copy()
    feed["lengths"][0] = PAGE * WIDTH
    place = (feed["slots"][0], 2) if name == "table" else 0
    feed[name][place] = most if value == "one more" else value
    program = rlx.compile(graph(shape))
    with pytest.raises(KernelError, match="out of range"):
        program.run(feed)
    with pytest.raises(KernelError, match="out of range"):
        evaluate(graph(shape), feed)


@pytest.mark.parametrize("place", [-1, 12, 1 << 40])
def test_rows_out_of_range_are_not_written(place: int) -> None:
    g = rlx.Graph("written")
    pages, rows = g.input("pages", (3, 1, 4, 2), "f32"), g.input("rows", ("n", 1, 2), "f32")
    g.output("y", ops.write_pages(pages, rows, g.input("places", ("n",), "i64"), axis=2))
    feed = {"pages": np.zeros((3, 1, 4, 2), np.float32), "rows": np.ones((2, 1, 2), np.float32)}
    with pytest.raises(KernelError, match="out of range"):
        rlx.compile(g).run({**feed, "places": np.array([1, place])})


def test_rows_are_written_in_place() -> None:
    g = rlx.Graph("in place")
    rows, places = g.input("rows", ("n", 2, 3), "f32"), g.input("places", ("n",), "i64")
    for name, axis, shape in (("k", 3, ("pages", 2, 3, 4)), ("v", 2, ("pages", 2, 4, 3))):
        written = ops.write_pages(g.state(name, shape, "f32"), rows, places, axis=axis)
        g.set_state(name, written)
        g.output(name, ops.sum(written, axis=(1, 2, 3)))
    program = rlx.compile(g)
    assert "copy" not in str(program.explain())
    stream = program.stream(sizes={"pages": 1000})
    stream.step({"rows": np.ones((2, 2, 3), np.float32), "places": np.array([5, 3999])})
    for name in ("k", "v"):
        found = stream.state(name).read()
        assert found.sum() == 12 and found[1].sum() == 6 and found[999].sum() == 6
