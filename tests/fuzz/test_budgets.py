"""Random programs under random budgets: they fit and compute what the reference does, or are refused."""

from __future__ import annotations

import numpy as np
import pytest
from random_programs import ROWS, random_program

import rlx
from rlx.api.compile import plan
from rlx.fuzz.bounds import assert_within
from rlx.fuzz.case import bounds
from rlx.ir.graph import Graph
from rlx.plan.lir import LirModule
from rlx.plan.memory.certificate import OverBudgetError
from rlx.reference.interpreter import evaluate
from rlx.reference.lir import LirInterpreter

PER_TEST = 15  # graphs
SIZES = {"n": ROWS}


def squeezed(g: Graph, share: float) -> tuple[LirModule, int]:
    """A program under a share of what it needs or, if that is refused, under the least budget that works."""
    free = plan(g, assume=SIZES)
    budget = int(free.arena_size * share)
    try:
        lir = plan(g, assume=SIZES, budget=budget)
        lir.specialize(lir.planner.binding)
    except OverBudgetError as refusal:
        assert budget < refusal.least <= free.arena_size
        budget = refusal.least
        lir = plan(g, assume=SIZES, budget=budget)
    assert lir.arena_size <= budget
    lir.plan.check()
    return lir, budget


def check(seed: int) -> str:
    """What the budget changed."""
    rng = np.random.default_rng(seed)
    g, feed = random_program(seed, size=int(rng.integers(8, 24)), symbolic=bool(seed % 2))
    lir, _ = squeezed(g, rng.uniform(0.3, 1.0))
    got = LirInterpreter(lir, poison=True).run(feed)
    want = evaluate(g, feed)
    for number, (name, value) in enumerate(want.items()):
        if not np.allclose(got[name], value, rtol=2e-4, atol=2e-4):
            # A comparison of what is 0 but for rounding goes either way: the table knows how far that is.
            bounded = bounds(g, feed)
            assert bounded is not None, f"seed {seed}: {name}"
            assert_within(got[name], value, bounded[number])
    if lir.plan.work:
        return "cut"
    return "again" if lir.planner.fitted["recomputed"] else "nothing"


@pytest.mark.parametrize("start", range(0, 60, PER_TEST))
def test_budgeted_programs_compute_what_the_reference_does(start: int) -> None:
    assert "cut" in {check(seed) for seed in range(start, start + PER_TEST)}


def test_native_programs_give_the_same_bits_with_a_budget() -> None:
    for seed in range(200, 210):
        g, feed = random_program(seed, symbolic=bool(seed % 2))
        _, budget = squeezed(g, 0.6)
        sizes = {s: SIZES[s] for s in g.symbols()}
        want = rlx.compile(g, assume=sizes).run(feed)
        got = rlx.compile(g, assume=sizes, budget=budget).run(feed)
        for name, value in want.items():
            np.testing.assert_array_equal(got[name], value, err_msg=f"seed {seed}: {name}")


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1_000, 3_000, 250))
def test_many_more(start: int) -> None:
    for seed in range(start, start + 250):
        check(seed)
