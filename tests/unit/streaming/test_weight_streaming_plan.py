"""Plans with a weight budget: what stays in memory, the ring and its proof, text, and the oracle's run."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from streaming_models import layers

from rlx.api.compile import plan
from rlx.errors import BudgetError, PlanError
from rlx.ir.graph import Graph
from rlx.plan.explain import explain
from rlx.plan.lir import LirModule
from rlx.plan.memory.placer import Placer
from rlx.plan.stream import stream_weights
from rlx.reference.interpreter import evaluate
from rlx.reference.lir import LirInterpreter

TARGET = "x86-64-v3"


def streamed(graph: Graph, budget: int) -> LirModule:
    module = plan(graph, target=TARGET)
    module.planner.stream(budget)
    return replace(module, buffers=module.planner.plan())


@pytest.fixture(scope="module")
def module() -> LirModule:
    return streamed(layers(6, 256), 640 << 10)  # weights of 256 KiB each


def test_the_plan_keeps_weights_within_their_budget(module: LirModule) -> None:
    sizes = module.plan.sizes()
    assert sizes["weight"] + sizes["ring"] <= 640 << 10
    module.plan.check()
    fetched = [f.node for f in module.plan.fetches]
    assert len(fetched) == 6 and len(set(fetched)) == 6  # biases stay, all matrices go through the ring
    for a, b in pairwise(module.plan.fetches):
        assert a.first < b.first and a.at <= b.at <= b.first
    assert module.plan.fetches[1].at == 0 < module.plan.fetches[2].at  # two places: one is filled ahead


def test_a_budget_for_all_weights_streams_nothing() -> None:
    whole = streamed(layers(3), 1 << 30).plan
    assert whole.fetches == () and whole.sizes()["ring"] == 0


def test_what_stays_is_spread_over_the_program() -> None:
    module = streamed(layers(8, 256), 1600 << 10)  # six weights and the biases: four for the ring
    fetched = [f.first for f in module.plan.fetches]
    assert len(fetched) == 6 and fetched == sorted(fetched)
    kept = set(range(8)) - set(fetched)
    assert max(kept) - min(kept) > 1, "reading never stands still for long"


def test_a_budget_below_one_kernel_names_the_least_that_works() -> None:
    with pytest.raises(BudgetError, match=r"\(w\d.*\); the smallest budget that works is 263168 bytes"):
        streamed(layers(3, 256), 100_000)
    streamed(layers(3, 256), 263168).plan.check()


def test_text_brings_back_the_ring(module: LirModule) -> None:
    blobs: dict[str, np.ndarray] = {}
    again = LirModule.from_text(module.to_text(blobs), blobs)
    assert again.plan.fetches == module.plan.fetches
    assert again.to_text() == module.to_text()
    assert again.specialize({"n": 7}).plan.fetches == module.plan.fetches
    placer = Placer.from_json(module.planner.to_json(), module.mir)
    there, here = placer.plan({"n": 7}), module.specialize({"n": 7}).plan
    assert there.fetches == here.fetches and there.assignments == here.assignments
    assert module.fingerprint() != plan(layers(6, 256), target=TARGET).fingerprint()


def _changed(module: LirModule, number: int, **changes: int) -> LirModule:
    fetches = list(module.plan.fetches)
    fetches[number] = replace(fetches[number], **changes)
    return replace(module, buffers=replace(module.plan, fetches=tuple(fetches)))


def test_the_proof_finds_a_place_that_is_filled_too_early(module: LirModule) -> None:
    late = module.plan.fetches[2]
    with pytest.raises(PlanError, match=rf"%{late.node} and %\d+ overlap in the ring.*read until step 0"):
        _changed(module, 2, at=0).plan.check()


@pytest.mark.parametrize(
    ("number", "changes", "message"),
    [
        (1, {"offset": 32}, "not aligned"),
        (1, {"offset": 1 << 30}, "does not fit"),
        (0, {"at": 1}, "not in order"),
        (5, {"last": 99}, "not in order"),
        (1, {"size": 64}, "has no slot of 64 bytes"),
        (3, {"first": 4, "last": 4}, "reads %.* at step 3, but no fetch brings it"),
    ],
)
def test_the_proof_finds_a_fetch_that(
    module: LirModule, number: int, changes: dict[str, int], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        _changed(module, number, **changes).plan.check()


def test_explain_says_what_is_fetched_when(module: LirModule) -> None:
    page = explain(module)
    assert "Streamed weights: 1.5 MiB are read in every run, through a ring of 634 KiB; 6 KiB stay" in page
    third = module.plan.fetches[2]
    assert re.search(rf"256 KiB  2 to 2 +step 1 +%{third.node} at 0\n", page)
    assert "Streamed" not in explain(plan(layers(2), target=TARGET))


def test_the_oracle_reads_the_ring_as_planned(module: LirModule) -> None:
    x = np.random.default_rng(1).normal(size=(3, 256)).astype(np.float32)
    expected = evaluate(layers(6, 256), {"x": x})["y"]
    found = LirInterpreter(module, poison=True).run({"x": x})["y"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_the_oracle_shows_what_an_early_fill_would_spoil(module: LirModule) -> None:
    x = np.ones((3, 256), np.float32)
    expected = LirInterpreter(module).run({"x": x})["y"]
    spoilt = _changed(module, 2, at=0)
    oracle = LirInterpreter(spoilt)
    oracle.module.planner._plans[(3,)] = replace(
        module.specialize({"n": 3}).plan, fetches=spoilt.plan.fetches
    )
    try:
        assert not np.allclose(oracle.run({"x": x})["y"], expected)
    finally:
        module.planner._plans.clear()


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[list[int]], dict[int, int], int]:
    weights = draw(st.integers(1, 12))
    sizes = {n: draw(st.integers(1, 4000)) for n in range(weights)}
    step = st.lists(st.integers(0, weights - 1), max_size=3)
    reads = draw(st.lists(step, min_size=1, max_size=20))
    return reads, sizes, draw(st.integers(64, 30_000))


@given(programs())
def test_any_program_fits_its_budget_or_names_the_least(
    program: tuple[list[list[int]], dict[int, int], int],
) -> None:
    reads, sizes, budget = program
    try:
        found = stream_weights(reads, sizes, budget)
    except BudgetError as e:
        least = e.least  # type: ignore[attr-defined]
        assert least > budget
        found = stream_weights(reads, sizes, least)
        budget = least
    ring = found.fetches
    fetched = {f.node for f in ring}
    resident = sum(
        -(-s // 64) * 64 for n, s in sizes.items() if n not in fetched and any(n in r for r in reads)
    )
    assert resident + found.ring <= budget or not ring
    for step, read in enumerate(reads):
        for node in set(read) & fetched:
            assert sum(f.node == node and f.first <= step <= f.last for f in ring) == 1
    for i, f in enumerate(ring):
        assert 0 <= f.offset and f.offset + f.size <= found.ring and f.at <= f.first <= f.last
        for other in ring[:i]:
            apart = other.offset + other.size <= f.offset or f.offset + f.size <= other.offset
            assert apart or other.last < f.at
            assert other.at <= f.at


def test_a_weight_that_nothing_reads_takes_no_room() -> None:
    g = layers(3, 256)
    g.param("idle", (512, 512), "f32")
    g.set_param("idle", np.zeros((512, 512), np.float32))
    module = streamed(g, 600 << 10)
    assert sum(module.plan.sizes()[s] for s in ("weight", "ring")) <= 600 << 10
    again = LirModule.from_text(module.to_text())
    assert again.specialize({"n": 5}).plan.sizes() == module.specialize({"n": 5}).plan.sizes()
