"""Random programs under random budgets: they fit and compute what the reference does, or are refused."""

from __future__ import annotations

import numpy as np
import pytest
from random_programs import ROWS, random_program

from rlx.backend.reference.interpreter import evaluate
from rlx.backend.reference.lir import LirInterpreter
from rlx.compile import plan
from rlx.plan.certificate import OverBudgetError

PER_TEST = 25  # graphs


def check(seed: int) -> bool:
    """Whether the budget changed anything."""
    rng = np.random.default_rng(seed)
    g, feed = random_program(seed, size=int(rng.integers(8, 24)), symbolic=bool(seed % 2))
    free = plan(g, assume={"n": ROWS})
    budget = int(free.arena_size * rng.uniform(0.3, 1.0))
    try:
        lir = plan(g, assume={"n": ROWS}, budget=budget)
        lir.specialize(lir.planner.binding)
    except OverBudgetError as refusal:
        assert budget < refusal.least <= free.arena_size
        lir = plan(g, assume={"n": ROWS}, budget=refusal.least)
        budget = refusal.least
    assert lir.arena_size <= budget
    lir.plan.check()
    run = LirInterpreter(lir, poison=True)
    got = run.run(feed)
    for name, value in evaluate(g, feed).items():
        np.testing.assert_allclose(got[name], value, rtol=2e-4, atol=2e-4, err_msg=f"seed {seed}: {name}")
    return lir.plan.schedule != free.plan.schedule


@pytest.mark.parametrize("start", range(0, 100, PER_TEST))
def test_budgeted_programs_compute_what_the_reference_does(start: int) -> None:
    changed = [check(seed) for seed in range(start, start + PER_TEST)]
    assert any(changed)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1_000, 3_000, 250))
def test_many_more(start: int) -> None:
    for seed in range(start, start + 250):
        check(seed)
