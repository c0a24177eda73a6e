"""The pipeline: named stages that are verified, dumped and overridden; derived weights; gates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.api.compile import plan
from rlx.api.lowering import lower, optimize
from rlx.cost import default_gate
from rlx.errors import ConfigError, ParseError, VerifyError
from rlx.ir.graph import Graph
from rlx.ir.op import Level
from rlx.ir.verify import verify
from rlx.reference.interpreter import evaluate
from rlx.reference.lir import run_lir
from rlx.rewrite.basic import materialize_outputs, remove_dead, split_derived
from rlx.rewrite.pipeline import Stage, Trace, run_stages


def model() -> Graph:
    g = rlx.Graph("model")
    x = g.input("x", ("n", 16), "f32")
    rng = np.random.default_rng(0)
    w = g.param("w", (16, 16), "f32", rng.standard_normal((16, 16), np.float32))
    g.output("y", ops.gelu(x @ w) * 1.0)
    return g


FEED = {"x": np.random.default_rng(1).standard_normal((3, 16), np.float32)}


def test_levels_are_graphs_that_a_user_can_hold() -> None:
    g = model()
    mir = verify(lower(g), Level.MIR)
    best = verify(optimize(mir), Level.MIR)
    assert len(best) < len(mir)
    assert lower(best) is best  # nothing to expand, nothing dead
    np.testing.assert_array_equal(evaluate(mir, FEED)["y"], evaluate(best, FEED)["y"])


def test_stages_are_dumped_as_text(tmp_path: Path) -> None:
    lir = plan(model(), checks=True, dump=tmp_path)
    names = [f.stem.partition("-")[2] for f in sorted(tmp_path.glob("*.txt"))]
    assert names == [name for name, _ in lir.trace.stages]
    assert names[0] == "input" and names[-1] == "fuse"
    assert "region" in (tmp_path / f"{len(names) - 1:02}-fuse.txt").read_text()


def test_a_stage_can_be_overridden_from_a_file(tmp_path: Path) -> None:
    plan(model(), dump=tmp_path)
    (file,) = tmp_path.glob("*-simplify.txt")
    text = file.read_text()
    changed = tmp_path / "mine.txt"
    changed.write_text(text.replace("erf(", "tanh("))
    assert "erf(" in text
    lir = plan(model(), override={"simplify": changed})
    got, want = run_lir(lir, FEED)["y"], run_lir(plan(model()), FEED)["y"]
    assert got.shape == want.shape and not np.allclose(got, want, atol=1e-3)
    again = run_lir(plan(model(), override={"simplify": file}), FEED)["y"]
    np.testing.assert_array_equal(again, want)


def test_an_override_is_verified(tmp_path: Path) -> None:
    broken = tmp_path / "broken.txt"
    broken.write_text('graph "x" {')
    with pytest.raises(ParseError, match=r"broken\.txt"):
        plan(model(), override={"simplify": broken})
    with pytest.raises(
        ConfigError, match="no stage 'simplfy' to override; stages are: input, join blocks, expand, integer"
    ):
        plan(model(), override={"simplfy": broken})
    with pytest.raises(ConfigError, match="cannot read"):
        plan(model(), override={"simplify": tmp_path / "absent.txt"})


def test_checks_name_the_stage_that_broke_the_graph() -> None:
    def wrong(g: Graph) -> Graph:
        out = remove_dead(g)
        out.nodes[-1].type = out.nodes[0].type.with_shape((7,))  # type: ignore[union-attr]
        return out

    g = lower(model())
    run_stages(g, [Stage("bad", wrong)], Trace())
    with pytest.raises(VerifyError, match="after stage 'bad': "):
        run_stages(lower(model()), [Stage("bad", wrong)], Trace(checks=True))


def test_what_depends_on_weights_only_is_derived_once() -> None:
    g = rlx.Graph()
    w = g.param("w", (4,), "f32", np.arange(4, dtype=np.float32))
    g.output("y", g.input("x", (3, 4), "f32") * ops.broadcast_to(ops.exp(w), (3, 4)))
    main, derived = split_derived(lower(g))
    assert derived is not None and list(derived.outputs) == ["derived:0"]
    assert derived.outputs["derived:0"].shape == (4,)  # a broadcast stays a view: its copy would cost
    assert list(main.params) == ["derived:0"]
    verify(main, Level.MIR)
    verify(derived, Level.MIR)


def test_an_output_made_of_weights_only_is_still_computed() -> None:
    g = rlx.Graph()
    g.output("y", g.param("w", (4,), "f32", np.ones(4, np.float32)) * 2.0)
    np.testing.assert_array_equal(run_lir(plan(g, checks=True), {})["y"], 2 * np.ones(4))


def test_outputs_have_storage_of_their_own() -> None:
    def f(g: Graph) -> list[Any]:
        x = g.input("x", (2, 3), "f32")
        e = ops.exp(x)
        return [x, e, e, ops.transpose(e), ops.reshape(ops.transpose(e), (6,))]

    g = rlx.Graph()
    for i, node in enumerate(f(g)):
        g.output(f"y{i}", node)
    copied = [n.op.name for n in materialize_outputs(g).outputs.values()]
    assert copied == ["copy", "exp", "copy", "copy", "reshape"]  # the last must move elements anyway
    x = {"x": np.arange(6, dtype=np.float32).reshape(2, 3)}
    want, got = evaluate(g, x), rlx.compile(g).run(x)
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-6)


def test_a_gate_is_a_gate_or_calibrated() -> None:
    with pytest.raises(ConfigError, match="unknown gate 'fast'"):
        plan(model(), gate="fast")
    gate = plan(model(), gate="calibrated").gate
    assert gate["memory_bw"] > 0 and 1 <= gate["dispatch_ns"] < 1_000_000
    assert gate["min_gain_ns"] == default_gate("cpu").min_gain_ns
