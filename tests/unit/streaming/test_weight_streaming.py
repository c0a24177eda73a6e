"""Weights that exceed their budget are streamed: same results in every way to run a program."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_programs import random_program
from streaming_models import BUDGET, LAYERS, WEIGHT, WIDTH, layers, sample

import rlx
from rlx import ops
from rlx.errors import (
    BudgetError,
    ConfigError,
    RlxError,
    UnsupportedError,
)
from rlx.runtime.store.artifact import ArtifactWarning

# -- results


def test_a_file_runs_within_its_budget(streamed: Any, layers_result: np.ndarray) -> None:
    for _ in range(3):
        np.testing.assert_array_equal(streamed(sample()), layers_result)
    facts = streamed.stats["streaming"]
    assert facts["resident_bytes"] + facts["ring_bytes"] <= BUDGET
    assert facts["bytes"] == 3 * facts["bytes_per_run"] and facts["fetches"] == 3 * facts["fetches_per_run"]
    sizes = streamed.memory({"n": 3})
    assert sizes["weight"] + sizes["ring"] <= BUDGET and sizes["ring"] > 0


def test_compile_leaves_no_file_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers_result: np.ndarray
) -> None:
    monkeypatch.setenv("RLX_CACHE", str(tmp_path))
    program = rlx.compile(layers(), weight_budget="900KiB")
    np.testing.assert_array_equal(program(sample()), layers_result)
    assert list((tmp_path / "streamed").iterdir()) == []
    assert program.memory({"n": 3})["ring"] > 0


def test_compile_can_keep_the_file(tmp_path: Path, layers_result: np.ndarray) -> None:
    path = tmp_path / "kept.rlx"
    program = rlx.compile(layers(), weight_budget=BUDGET, weight_file=path)
    np.testing.assert_array_equal(program(sample()), layers_result)
    again = rlx.load(path)
    assert again.stats["streaming"]["ring_bytes"] > 0, "a file keeps the budget that it was compiled with"
    np.testing.assert_array_equal(again(sample()), layers_result)
    whole = rlx.load(path, weight_budget="1GiB")
    assert whole.memory({"n": 1})["ring"] == 0
    np.testing.assert_array_equal(whole(sample()), layers_result)
    whole.set_param("w0", np.ones((WIDTH, WIDTH), np.float32))  # nothing is streamed
    changed = whole(sample())
    assert not np.array_equal(changed, layers_result)
    whole.save(tmp_path / "changed.rlx")
    np.testing.assert_array_equal(rlx.load(tmp_path / "changed.rlx")(sample()), changed)


def test_a_budget_for_all_weights_needs_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers_result: np.ndarray
) -> None:
    monkeypatch.setenv("RLX_CACHE", str(tmp_path))
    program = rlx.compile(layers(), weight_budget="1GiB")
    np.testing.assert_array_equal(program(sample()), layers_result)
    assert program.stats["streaming"] is None and not (tmp_path / "streamed").exists()


def test_a_file_of_somebody_else_is_checked_and_streamed(
    layers_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers_result: np.ndarray
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "other"))
    monkeypatch.setenv("RLX_CACHE", str(tmp_path / "cache"))  # what this key signs nobody else can use
    with pytest.warns(ArtifactWarning, match="not signed by this user"):
        program = rlx.load(layers_file, weight_budget=BUDGET)
    np.testing.assert_array_equal(program(sample()), layers_result)
    assert program.memory({"n": 3})["ring"] > 0


def test_sizes_that_data_decide_keep_the_ring() -> None:
    g = rlx.Graph("picked")
    rng = np.random.default_rng(0)
    x = g.input("x", (6, WIDTH), "f32")
    for i in range(4):
        w = g.param(f"w{i}", (WIDTH, WIDTH), "f32", rng.normal(0, 0.1, (WIDTH, WIDTH)).astype(np.float32))
        x = ops.tanh(x @ w)
        if i == 1:
            x = ops.gather(x, ops.nonzero(ops.sum(x, axis=1) > 0.0)[0])
    g.output("y", x)
    program = rlx.compile(g, weight_budget=2 * WEIGHT)
    np.testing.assert_array_equal(program(sample(6)), rlx.compile(g)(sample(6)))


@pytest.mark.parametrize("seed", range(12))
def test_any_program_streams(seed: int) -> None:
    g, inputs = random_program(seed)
    whole = rlx.compile(g)
    try:
        least = 64
        program = rlx.compile(g, weight_budget=least)
    except BudgetError as e:
        least = int(str(e).split("works is ")[1].split()[0])
        program = rlx.compile(g, weight_budget=least)
    sizes = program.memory(program.lir.planner.binding)
    assert sizes["weight"] + sizes["ring"] <= max(least, 64)
    for name, value in whole.run(inputs).items():
        np.testing.assert_array_equal(program.run(inputs)[name], value)


def test_a_file_without_budget_is_resident(layers_file: Path, layers_result: np.ndarray) -> None:
    program = rlx.load(layers_file)
    assert program.stats["streaming"] is None
    np.testing.assert_array_equal(program(sample()), layers_result)


def test_a_streamed_program_is_saved_whole(streamed: Any, tmp_path: Path, layers_result: np.ndarray) -> None:
    streamed.save(tmp_path / "copy.rlx")
    np.testing.assert_array_equal(rlx.load(tmp_path / "copy.rlx")(sample()), layers_result)


def test_other_sizes_share_the_ring(streamed: Any) -> None:
    whole = rlx.compile(layers())
    for rows in (1, 2, 5, 1):
        np.testing.assert_array_equal(streamed(sample(rows)), whole(sample(rows)))


def test_threads_take_turns(streamed: Any, layers_result: np.ndarray) -> None:
    found: list[np.ndarray] = []
    workers = [threading.Thread(target=lambda: found.append(streamed(sample()))) for _ in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert len(found) == 4
    for y in found:
        np.testing.assert_array_equal(y, layers_result)


def test_bound_buffers_and_traces_stream_too(streamed: Any, layers_result: np.ndarray) -> None:
    x, y = sample(), np.zeros_like(layers_result)
    run = streamed.bind({"x": x}, {"y": y})
    for _ in range(2):
        y[:] = 0
        run()
        np.testing.assert_array_equal(y, layers_result)
    (traced,) = streamed.trace({"x": x})
    assert len({span.node.id for span in traced.spans}) == LAYERS


def test_a_weight_that_is_read_twice_is_fetched_twice(tmp_path: Path) -> None:
    g = rlx.Graph("twice")
    rng = np.random.default_rng(0)
    x = g.input("x", (3, WIDTH), "f32")
    ws = [g.param(f"w{i}", (WIDTH, WIDTH), "f32") for i in range(4)]
    for i in range(4):
        g.set_param(f"w{i}", rng.normal(0, 0.1, (WIDTH, WIDTH)).astype(np.float32))
    for w in (*ws, *ws):
        x = ops.tanh(x @ w)
    g.output("y", x)
    program = rlx.compile(g, weight_budget=2 * WEIGHT)
    assert program.stats["streaming"]["fetches_per_run"] == 8
    np.testing.assert_array_equal(program(sample()), rlx.compile(g)(sample()))


def test_streams_skip_phases_and_their_weights() -> None:
    """A once input that is prepared by a product, a state, two layers, and a product after the last step."""
    g = rlx.Graph("steps")
    rng = np.random.default_rng(0)
    ws = [
        g.param(f"w{i}", (WIDTH, WIDTH), "f32", rng.normal(0, 0.1, (WIDTH, WIDTH)).astype(np.float32))
        for i in range(5)
    ]
    context = ops.tanh(g.input("context", (2, WIDTH), "f32", once=True) @ ws[0] @ ws[1])
    h = g.state("h", (2, WIDTH), "f32")
    new = ops.tanh(ops.tanh((h + context + g.input("x", (2, WIDTH), "f32")) @ ws[2]) @ ws[3] @ ws[4])
    g.set_state("h", new)
    g.output("best", ops.argmax(ops.cumsum(new, axis=1), axis=1))
    g.output("y", new * 2.0)
    steps = [sample(2) * (i + 1) for i in range(4)]
    found = []
    for budget in (None, 2 * WEIGHT):
        program = rlx.compile(g, weight_budget=budget)
        stream = program.stream({"context": sample(2)})
        outs = [stream.step({"x": x}, epilogue=i % 2 == 1) for i, x in enumerate(steps)]
        found.append(outs)
    facts = program.stats["streaming"]
    assert facts["fetches"] < 4 * facts["fetches_per_run"], "the prologue's weights are read once"
    for a, b in zip(*found, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])


@pytest.mark.parametrize("debug", ["nan", "poison"])
def test_debug_modes_stream(layers_file: Path, layers_result: np.ndarray, debug: str) -> None:
    np.testing.assert_array_equal(
        rlx.load(layers_file, weight_budget=BUDGET, debug=debug)(sample()), layers_result
    )


def test_an_onnx_like_load_streams_from_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers_result: np.ndarray
) -> None:
    onnx = pytest.importorskip("onnx")
    monkeypatch.setenv("RLX_CACHE", str(tmp_path / "cache"))
    helper, g = onnx.helper, layers()
    nodes, last = [], "x"
    for i in range(LAYERS):
        nodes += [
            helper.make_node("MatMul", [last, f"w{i}"], [f"p{i}"]),
            helper.make_node("Add", [f"p{i}", f"b{i}"], [f"s{i}"]),
            helper.make_node("Tanh", [f"s{i}"], [f"t{i}"]),
        ]
        last = f"t{i}"
    kind = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "layers",
        [helper.make_tensor_value_info("x", kind, ["n", WIDTH])],
        [helper.make_tensor_value_info(last, kind, ["n", WIDTH])],
        [onnx.numpy_helper.from_array(v, k) for k, v in g.param_values.items()],
    )
    path = tmp_path / "layers.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]), path)
    for _ in range(2):  # compiled, then found
        program = rlx.load(path, weight_budget=BUDGET)
        np.testing.assert_array_equal(program(sample()), layers_result)
        assert program.memory({"n": 3})["ring"] > 0
    assert program.stats["streaming"]["file"].startswith(str(tmp_path / "cache" / "programs"))


def test_the_command_line_streams(layers_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("click")
    from rlx.cli.main import main

    command = ["run", str(layers_file), "--bind", "n=3", "--weight-budget", "900KiB"]
    assert main([*command, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["stats"]["streaming"]
    assert facts["resident_bytes"] + facts["ring_bytes"] <= 900 << 10
    assert main(command) == 0
    assert "read in every run through a ring buffer of" in capsys.readouterr().out
    assert main([*command[:-1], "1KiB"]) != 0
    assert "the smallest budget that works is" in capsys.readouterr().err


# -- refusals


def test_a_budget_that_cannot_work_names_the_least_that_does(layers_file: Path) -> None:
    with pytest.raises(BudgetError, match=r"smallest budget that works is (\d+) bytes") as e:
        rlx.load(layers_file, weight_budget="1KiB")
    least = int(str(e.value).split("works is ")[1].split()[0])
    with pytest.raises(BudgetError):
        rlx.load(layers_file, weight_budget=least - 1)
    assert rlx.load(layers_file, weight_budget=least)(sample()).shape == (3, WIDTH)


@pytest.mark.parametrize("given", ["much", "-1", "5 parsecs", True, "nan"])
def test_budgets_that_are_no_bytes_are_refused(layers_file: Path, given: Any) -> None:
    with pytest.raises(ConfigError, match=r"weight_budget .* is not a number of bytes"):
        rlx.load(layers_file, weight_budget=given)


def test_params_without_a_value_are_named() -> None:
    g = rlx.Graph("empty")
    g.output("y", g.input("x", (2, WIDTH), "f32") @ g.param("w", (WIDTH, WIDTH), "f32"))
    with pytest.raises(RlxError, match="has no value"):
        rlx.compile(g, weight_budget=WEIGHT)(np.ones((2, WIDTH), np.float32))


def test_streamed_params_cannot_be_set(streamed: Any, layers_result: np.ndarray) -> None:
    with pytest.raises(UnsupportedError, match=r"'w0' cannot be set.*without weight_budget"):
        streamed.set_param("w0", np.zeros((WIDTH, WIDTH), np.float32))
    np.testing.assert_array_equal(streamed(sample()), layers_result)


def test_a_weight_file_needs_a_budget(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give weight_budget= too"):
        rlx.compile(layers(), weight_file=tmp_path / "w.rlx")
