"""The page that `rlx explain` prints, and the report of `rlx diff` on plans, as texts to review."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from sample_models import bert

import rlx
from rlx import ops
from rlx.compile import plan
from rlx.cost import IoFusionGate
from rlx.ir.graph import Graph
from rlx.ir.lir import LirModule
from rlx.plan.diff import diff_plans
from rlx.plan.explain import explain

Golden = Callable[[str, str], None]
TARGET = "x86-64-v3"


def small() -> Graph:
    g = rlx.Graph("small")
    x = g.input("x", ("n", 64), "f32")
    w = g.param("w", (64, 64), "f32", np.random.default_rng(0).standard_normal((64, 64), np.float32))
    hidden = ops.gelu(x @ w)
    g.output("y", ops.softmax(hidden + x, axis=-1))
    g.output("total", ops.sum(ops.cumsum(hidden, axis=0)))
    return g


def test_the_page_of_a_small_program(golden: Golden) -> None:
    golden("explain/small", explain(plan(small(), target=TARGET)))


def test_the_page_of_an_encoder(golden: Golden) -> None:
    golden("explain/encoder", explain(plan(bert(1), target=TARGET)))


def test_a_page_says_what_the_host_runs() -> None:
    lir = plan(small(), target=TARGET)
    first = lir.plan.schedule[0]
    assert "runs on the host: no kernel for it" in explain(lir, {first: "no kernel for it"})


def test_a_program_from_text_has_a_page_without_stages() -> None:
    blobs: dict[str, np.ndarray] = {}
    again = LirModule.from_text(plan(small(), target=TARGET).to_text(blobs), blobs)
    page = explain(again)
    assert "Kernels in order" in page and "Stages" not in page


def test_lines_of_a_page_fit_a_terminal() -> None:
    page = explain(plan(bert(1), target=TARGET))
    ours = [line for line in page.splitlines() if "|" not in line and "@" not in line]
    assert max(map(len, ours)) <= 110


def test_the_same_plan_has_no_differences() -> None:
    assert diff_plans(plan(small(), target=TARGET), plan(small(), target=TARGET)) == ""


def test_differences_of_two_plans(golden: Golden) -> None:
    dear = IoFusionGate(200, 2_000, 25, 25, True, 80_000, 10_000_000)
    golden("explain/diff", diff_plans(plan(small(), target=TARGET), plan(small(), target=TARGET, gate=dear)))


def test_the_program_answers_too() -> None:
    program = rlx.compile(small())
    page = program.explain()
    assert page.startswith("small for ")
    a, b = program.lir.decisions.kept()[0].region[:2]
    assert "are one kernel" in program.why_not(a, b)
