"""The page that `rlx explain` prints, and the report of `rlx diff` on plans, as texts to review."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sample_models import bert

import rlx
from rlx import ops
from rlx.api.compile import plan
from rlx.api.session import read_graph
from rlx.cost import IoFusionGate
from rlx.ir.graph import Graph
from rlx.ir.lir import LirModule
from rlx.plan.diff import diff_plans
from rlx.plan.explain import explain
from rlx.zoo.minilm import load_graph

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
    """Two layers are one block of lines."""
    golden("explain/encoder", explain(plan(bert(2), target=TARGET)))


def convnet() -> Graph:
    """A network with names of its own for places, as an imported model has."""
    g = rlx.Graph("convnet")
    x = g.input("image", ("batch", 3, "height", "width"), "f32")
    rng = np.random.default_rng(0)
    channels = 3
    for i, (out, stride) in enumerate(((16, 2), (16, 1), (32, 2))):
        w = g.param(
            f"w{i}", (out, channels, 3, 3), "f32", rng.standard_normal((out, channels, 3, 3), np.float32)
        )
        with rlx.errors.provenance((f"Conv.{i}", f"Relu.{i}")):
            x = ops.relu(ops.conv(x, w, strides=stride, padding=1))
        channels = out
    with rlx.errors.provenance(("Pool",)):
        g.output("y", ops.mean(x, axis=(2, 3)))
    return g


def test_the_page_of_a_convolutional_network(golden: Golden) -> None:
    sizes = {"height": 64, "width": 48}
    golden("explain/convnet", explain(plan(convnet(), target=TARGET, assume=sizes)))


@pytest.mark.parametrize("id", ["minilm", "ppocr-det"])
def test_pages_of_real_models_are_whole_and_fit_a_terminal(id: str, zoo_path: Callable[..., Path]) -> None:
    path = zoo_path(id)
    graph = load_graph(path.parent) if id == "minilm" else read_graph(path)
    lir = plan(graph, target=TARGET, assume=dict(zip(graph.symbols(), (1, 128, 128), strict=False)))
    page = explain(lir)
    for heading in ("Stages", "Kernels in order", "Memory", "Largest values", "Fusion", "Refused"):
        assert f"\n{heading}" in page
    lines = page.splitlines()
    assert max(len(line) for line in lines if "@" not in line and not line.startswith("  out")) <= 110
    assert page.count(" steps ") >= 10 and "alive at each step" in page
    if id == "minilm":
        assert "6 times, " in page and len(lines) < 90  # its layers are told once


def test_a_page_says_what_the_host_runs() -> None:
    lir = plan(small(), target=TARGET)
    first = lir.plan.schedule[0]
    assert "runs on the host: no kernel for it" in explain(lir, {first: "no kernel for it"})


def test_a_program_from_text_has_the_same_page() -> None:
    blobs: dict[str, np.ndarray] = {}
    lir = plan(bert(1), target=TARGET)
    assert explain(LirModule.from_text(lir.to_text(blobs), blobs)) == explain(lir)


def test_a_program_from_a_file_has_the_same_page(tmp_path: Path) -> None:
    program = rlx.compile(small())
    program.save(tmp_path / "small.rlx")
    assert rlx.load(tmp_path / "small.rlx").explain() == program.explain()


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
