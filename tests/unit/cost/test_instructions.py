"""What the gate charges for computing values again: instructions by kind, at the rates of the target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import pytest

import rlx
from rlx import ops
from rlx.api.compile import plan
from rlx.cost.decision import Decision
from rlx.cost.instructions import Evaluation
from rlx.cost.io import IoModel
from rlx.fuse.facts import Facts
from rlx.ir.graph import Node
from rlx.plan.text import module_text, parse_module
from rlx.target.cpu import resolve, targets
from rlx.target.prices import DEVICES, Again

ROWS = 256


def twice(dear: Callable[[Node], Node]) -> rlx.Graph:
    """A value that two kernels read: each may compute it again."""
    g = rlx.Graph("twice")
    value = dear(g.input("x", (ROWS, ROWS), "f32"))
    g.output("columns", ops.sum(value, axis=0))
    g.output("rows", ops.sum(value * 2.0, axis=1))
    return g


def recomputed(dear: Callable[[Node], Node], target: str) -> Decision:
    (found,) = [d for d in plan(twice(dear), target=target).decisions if d.rule == "recompute"]
    return found


@pytest.mark.parametrize("target", [t.name for t in targets()])
def test_an_operation_costs_what_it_takes_on_the_target(target: str) -> None:
    machine = resolve(target)
    found = recomputed(ops.exp, target)
    per_element = 1000 * found.compute_ps_added / ROWS**2
    again = machine.again  # of what is added: the kernel that stored the value need not keep it for a pass
    assert per_element == pytest.approx(10 * again.operation_fs - again.reload_fs, rel=0.05)
    vectors = machine.lanes("f32") * machine.prices.cores
    assert again.operation_fs == pytest.approx(1000 * machine.rates.op_ps / vectors, abs=1)


def test_wider_vectors_compute_again_what_narrow_ones_store() -> None:
    wide, narrow = recomputed(ops.sin, "x86-64-v4"), recomputed(ops.sin, "x86-64")
    assert wide.score_ps == narrow.score_ps, "the same traffic"
    assert wide.compute_ps_added < wide.score_ps < narrow.compute_ps_added
    assert wide.verdict and not narrow.verdict


def test_kinds_of_operations_differ() -> None:
    costs = [recomputed(f, "x86-64-v3").compute_ps_added for f in (ops.exp, ops.log, ops.sin)]
    assert costs == sorted(set(costs))


def work(f: Callable[[Node], Node]) -> Evaluation:
    g = rlx.Graph("one")
    g.output("y", f(g.input("x", (8, 64), "f32")))
    facts = Facts(g, IoModel(g))
    return facts.work(facts.kernels[-1])


def test_elements_that_every_lane_loads_are_counted() -> None:
    assert work(lambda x: x + 1.0) == Evaluation(1)
    every = work(lambda x: ops.take(x, [5, 3, 60, 1], axis=1))
    assert every.gathered == 1


def test_plans_record_the_constants() -> None:
    for target, device in (("x86-64-v3", "cpu"), ("x86-64-v4", "cpu")):
        made = plan(twice(ops.exp), target=target, device=device)
        assert made.again == asdict(resolve(target).again)
        text = module_text(made)
        assert f'again "operation_fs" = {made.again["operation_fs"]}' in text
        assert parse_module(text).again == made.again


def test_devices_without_named_targets_have_one_price() -> None:
    prices = DEVICES["opencl"]
    again = Again.of(prices)
    assert again.operation_fs == again.index_fs == 1000 * prices.elementwise_ps and again.gather_fs == 0
