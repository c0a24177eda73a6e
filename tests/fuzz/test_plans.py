"""Random programs, pins and sizes: the planned program computes what the reference does, poison and all."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from random_programs import COLUMNS, ROWS, random_program

import rlx
from rlx.api.compile import plan
from rlx.cost.io import IoModel
from rlx.ir.op import Role
from rlx.plan.lir import LirModule
from rlx.reference.interpreter import evaluate
from rlx.reference.lir import LirInterpreter

PER_TEST = 50  # graphs


@dataclass
class Variety:
    """What a run of many graphs has tried."""

    together: int = 0  # pairs pinned into one kernel that fusion could join
    apart: int = 0
    bindings: set[int] = field(default_factory=set)
    assumed: set[int] = field(default_factory=set)


def random_pins(lir: LirModule, rng: np.random.Generator) -> dict[tuple[int, int], bool]:
    """A few pairs of ops of which one reads the other, through views too, together or apart."""
    assert lir.unfused is not None
    io = IoModel(lir.unfused, lir.plan.binding)
    pairs = []
    for node in lir.unfused.nodes:
        if node.op.role is Role.COMPUTE and not io.is_view(node):
            roots = [io.root(o) for o in node.operands]
            pairs += [(r.id, node.id) for r in roots if r.op.role is Role.COMPUTE]
    count = min(int(rng.integers(1, 6)), len(pairs))
    chosen = rng.choice(len(pairs), count, replace=False) if pairs else ()
    return {pairs[int(i)]: bool(rng.integers(0, 2)) for i in chosen}


def random_feed(rows: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {
        "x": rng.standard_normal((rows, COLUMNS), np.float32),
        "y": rng.standard_normal((rows, COLUMNS), np.float32),
        "ids": rng.integers(0, 11, rows),
    }


def check(seed: int, variety: Variety) -> None:
    """One graph: symbolic two times out of three, pinned every second time, run at one or two sizes."""
    rng = np.random.default_rng(seed)
    symbolic = seed % 3 != 0
    g, feed = random_program(seed, size=int(rng.integers(4, 20)), symbolic=symbolic)
    rows = int(rng.integers(1, 40)) if symbolic else ROWS
    variety.assumed.add(rows)
    lir = plan(g, assume={"n": rows})
    if seed % 2 == 0:
        pins = random_pins(lir, rng)
        lir = plan(g, assume={"n": rows}, pins=pins, checks=seed % 10 == 0)
        variety.together += sum(d.pinned and d.verdict for d in lir.decisions)
        variety.apart += sum(d.pinned and not d.verdict for d in lir.decisions)
    lir.plan.check()
    sizes = [int(n) for n in rng.integers(0, 14, 2)] if symbolic else [ROWS]
    for n in sizes:
        variety.bindings.add(n)
        inputs = random_feed(n, rng) if symbolic else feed
        run = LirInterpreter(lir, poison=True)
        got = run.run(inputs)
        run.plan.check()
        want = evaluate(g, inputs)
        for name, value in want.items():
            np.testing.assert_allclose(
                got[name], value, rtol=2e-4, atol=2e-4, err_msg=f"seed {seed}, {n} rows: {name}"
            )


@pytest.mark.parametrize("start", range(0, 500, PER_TEST))
def test_planned_programs_compute_what_the_reference_does(start: int) -> None:
    variety = Variety()
    for seed in range(start, start + PER_TEST):
        check(seed, variety)
    # Pins that were there only in name, or sizes that never change, would prove nothing.
    assert variety.together >= 5 and variety.apart >= 5
    assert len(variety.bindings) >= 10 and 0 in variety.bindings and len(variety.assumed) >= 10


@pytest.mark.parametrize("start", range(0, 20, 5))
def test_native_programs_do_too(start: int) -> None:
    """Poisoned as well, and with pins."""
    for seed in range(start + 10_000, start + 10_005):
        rng = np.random.default_rng(seed)
        g, feed = random_program(seed, symbolic=bool(seed % 2))
        pins = random_pins(plan(g), rng) if seed % 3 else None
        got, want = rlx.compile(g, debug="poison", pins=pins).run(feed), evaluate(g, feed)
        for name, value in want.items():
            np.testing.assert_allclose(got[name], value, rtol=2e-4, atol=2e-4, err_msg=f"seed {seed}")


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1_000, 10_000, 500))
def test_many_more(start: int) -> None:
    variety = Variety()
    for seed in range(start, start + 500):
        check(seed, variety)


def test_a_kernel_whose_readers_compute_its_results_themselves_is_gone() -> None:
    """In a graph of a thousand nodes it happens that the last reader goes, because others took its work."""
    g, _ = random_program(1, size=360, symbolic=True)
    lir = plan(g)
    lir.plan.check()
    assert all(n.bodies[0].outputs for n in lir.mir.nodes if n.op.role is Role.REGION)
