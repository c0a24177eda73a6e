"""explain(measure=True): both sides of decisions are built and timed, the share of right signs is told."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.api.compile import plan
from rlx.api.measure import Measured, measure_decisions, report
from rlx.cost import Decision
from rlx.cost.profile import GraphIoProfile
from rlx.errors import RlxError
from rlx.ir.graph import Graph
from rlx.plan.lir import LirModule


def mixed() -> Graph:
    """Candidates of both kinds: chains to join, and a dear vector that is better stored."""
    g = rlx.Graph("mixed")
    x, v = g.input("x", (2048, 64), "f32"), g.input("v", (64,), "f32")
    w = g.param("w", (64, 64), "f32", np.eye(64, dtype=np.float32))
    g.output("y", ops.softmax(ops.gelu(x @ w + v), axis=-1))
    g.output("z", x + ops.exp(ops.tan(v)))
    return g


def test_kept_and_refused_decisions_are_measured() -> None:
    program = rlx.compile(mixed(), threads=1)
    measured = measure_decisions(program.lir, count=6, threads=1)
    verdicts = {m.decision.verdict for m in measured}
    assert verdicts == {True, False}
    assert all(m.apart_ns > 0 and m.joined_ns > 0 for m in measured)
    stakes = [abs(m.decision.net_ps) for m in measured]
    assert stakes == sorted(stakes, reverse=True)
    assert all(m.decision.net_ps < 0 for m in measured if not m.decision.verdict)


def test_half_of_a_few_are_refusals() -> None:
    measured = measure_decisions(rlx.compile(mixed(), threads=1).lir, count=2, threads=1)
    assert [m.decision.verdict for m in measured].count(False) == 1


def test_the_page_ends_with_the_share() -> None:
    page = rlx.compile(mixed(), threads=1).explain(measure=True)
    assert "Decisions measured: predicted gain, and what joining really gains" in page
    assert re.search(r"\d+ of \d+ signs predicted right \(\d+ %\)", page)


def test_a_report_counts_signs() -> None:
    def one(verdict: bool, apart: float, joined: float, gain: int | None = None) -> Measured:
        zero = GraphIoProfile()
        net = 1_000 if verdict else -1_000
        return Measured(Decision((1, 2), zero, zero, net, 0, verdict, ""), apart, joined, gain)

    text = report([one(True, 20, 10), one(True, 10, 20), one(False, 10, 20)])
    assert text.count("right  ") == 2 and text.count("WRONG") == 1
    assert text.endswith("2 of 3 signs predicted right (67 %)")
    text = report([one(True, 20, 10), one(True, 1000, 1015), one(False, 1015, 1000)])
    assert text.count("even ") == 2 and "WRONG" not in text
    assert text.endswith("1 of 1 signs predicted right (100 %); 2 within 2%, too close to call")
    assert report([]).endswith("0 of 0 signs predicted right (0 %)")
    text = report([one(False, 20, 10, gain=5), one(True, 20, 10, gain=-5), one(True, 1000, 1015, gain=5)])
    assert "1 of 2 signs are those of the times that `explain` predicts" in text


def test_a_plan_from_text_has_nothing_to_measure() -> None:
    lir = LirModule.from_text(plan(mixed()).to_text())
    with pytest.raises(RlxError, match="compile it to measure"):
        measure_decisions(lir)


def test_a_program_from_a_file_is_measured(tmp_path: Path) -> None:
    rlx.compile(mixed(), threads=1).save(tmp_path / "mixed.rlx")
    assert "signs predicted right" in rlx.load(tmp_path / "mixed.rlx", threads=1).explain(measure=True)


@pytest.mark.slow
@pytest.mark.parametrize("id", ["minilm", "ppocr-det"])
def test_nine_signs_of_ten_are_right_on_real_models(id: str) -> None:
    """Timings: run it on a machine that has nothing else to do."""
    from rlx import zoo
    from rlx.api.session import read_graph
    from rlx.zoo.minilm import load_graph

    path = zoo.fetch(id)
    graph = load_graph(path.parent) if id == "minilm" else read_graph(path)
    sizes = (1, 128) if id == "minilm" else (1, 640, 640)
    program = rlx.compile(graph, assume=dict(zip(graph.symbols(), sizes, strict=True)))
    measured = measure_decisions(program.lir, threads=program.threads)
    print(report(measured))
    decided = [m for m in measured if not m.close]
    assert len(decided) >= 6 and sum(m.right for m in decided) >= 0.9 * len(decided)
