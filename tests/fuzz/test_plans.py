"""Random programs, pins and sizes: the planned program computes what the reference does, poison and all."""

from __future__ import annotations

import numpy as np
import pytest
from random_programs import COLUMNS, ROWS, random_program

import rlx
from rlx.backend.reference.interpreter import evaluate
from rlx.backend.reference.lir import LirInterpreter
from rlx.compile import plan
from rlx.ir.lir import LirModule
from rlx.ir.op import Role

PER_TEST = 50  # graphs


def random_pins(lir: LirModule, rng: np.random.Generator) -> dict[tuple[int, int], bool]:
    """Some pairs of neighbouring nodes, together or apart."""
    assert lir.unfused is not None
    nodes = [n for n in lir.unfused.nodes if n.op.role is Role.COMPUTE and n.operands]
    pins: dict[tuple[int, int], bool] = {}
    for _ in range(int(rng.integers(0, 4))):
        node = nodes[int(rng.integers(0, len(nodes)))]
        other = node.operands[int(rng.integers(0, len(node.operands)))]
        pins[(node.id, other.id)] = bool(rng.integers(0, 2))
    return pins


def check(seed: int) -> None:
    rng = np.random.default_rng(seed)
    symbolic = bool(seed % 2)
    g, feed = random_program(seed, size=int(rng.integers(4, 20)), symbolic=symbolic)
    if symbolic:
        rows = int(rng.integers(1, 12))
        feed = {
            "x": rng.standard_normal((rows, COLUMNS), np.float32),
            "y": rng.standard_normal((rows, COLUMNS), np.float32),
            "ids": rng.integers(0, 11, rows),
        }
    lir = plan(g, assume={"n": ROWS})
    if seed % 3 == 0:
        lir = plan(g, pins=random_pins(lir, rng), checks=seed % 10 == 0)
    lir.plan.check()
    run = LirInterpreter(lir, poison=True)
    got = run.run(feed)
    run.plan.check()
    want = evaluate(g, feed)
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=2e-4, atol=2e-4, err_msg=f"seed {seed}: {name}")


@pytest.mark.parametrize("start", range(0, 500, PER_TEST))
def test_planned_programs_compute_what_the_reference_does(start: int) -> None:
    for seed in range(start, start + PER_TEST):
        check(seed)


@pytest.mark.parametrize("start", range(0, 20, 5))
def test_native_programs_do_too(start: int) -> None:
    for seed in range(start + 10_000, start + 10_005):
        g, feed = random_program(seed, symbolic=bool(seed % 2))
        got, want = rlx.compile(g).run(feed), evaluate(g, feed)
        for name, value in want.items():
            np.testing.assert_allclose(got[name], value, rtol=2e-4, atol=2e-4, err_msg=f"seed {seed}")


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1_000, 10_000, 500))
def test_many_more(start: int) -> None:
    for seed in range(start, start + 500):
        check(seed)
