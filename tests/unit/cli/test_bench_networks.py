"""Networks with fixed seeds: right at small sizes, all of it native, one file for all engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx")

import onnx

from rlx.api.compile import compile
from rlx.errors import ConfigError
from rlx_bench import cold
from rlx_bench.engines import ENGINES
from rlx_bench.flops import counted_flops
from rlx_bench.oracle import difference, expected
from rlx_bench.predictions import measured, predictions
from rlx_bench.workloads import further, make
from rlx_bench.workloads.further import NETWORKS, files

BENCH = Path(__file__).parents[3] / "bench"
SAMPLE = ("llama-100m", "bilstm", "qdq-transformer")  # which the default run has
CASES = [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow, id=name) for name in NETWORKS]


@pytest.mark.parametrize("name", CASES)
def test_a_network_equals_the_reference(name: str) -> None:
    workload = further.workload(name, small=1)
    program = compile(workload.as_graph())
    assert not program.stats["host_thunks"]
    wanted = expected(workload)
    assert all(
        np.isfinite(a).all() and np.ptp(a) > 0 for a in wanted if a.size > 1
    )  # numbers that say something
    assert difference(list(program.run(workload.feed).values()), wanted) <= 1e-5
    peer = ENGINES["onnxruntime"]
    if peer.installed:
        assert difference([np.asarray(a) for a in peer.prepare(workload, 1)()], wanted) <= workload.tolerance


@pytest.mark.parametrize("name", CASES)
def test_flops_are_counted_as_rlx_counts_them(name: str) -> None:
    workload = further.workload(name, small=1)
    if name.startswith(
        ("bi", "crnn", "byte", "gpt2", "trees", "int4")
    ):  # loops, rounded figures, no products
        assert (workload.flops > 0) == (not name.startswith("trees"))
    else:
        assert counted_flops(workload) == workload.flops


def test_there_are_twenty_and_more() -> None:
    assert len(NETWORKS) >= 20
    with pytest.raises(ConfigError, match="unknown network 'vit'; use one of mobilenet-v3, "):
        files("vit")


def test_a_file_is_written_once_and_is_the_same_every_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLX_CACHE", str(tmp_path / "a"))
    first = files("bilstm", small=True)
    written = first.model.stat().st_mtime_ns
    assert files("bilstm", small=True).model.stat().st_mtime_ns == written
    monkeypatch.setenv("RLX_CACHE", str(tmp_path / "b"))
    second = files("bilstm", small=True)
    assert second.model != first.model and second.model.read_bytes() == first.model.read_bytes()
    for name, array in first.feed.items():
        np.testing.assert_array_equal(second.feed[name], array)
    onnx.checker.check_model(str(first.model), full_check=True)


def test_the_causal_mask_is_a_constant_of_the_file() -> None:
    model = onnx.load(files("llama-100m", small=True).model)
    masks = [
        onnx.numpy_helper.to_array(t)
        for t in model.graph.initializer
        if len(t.dims) == 4 and t.dims[2] == t.dims[3]
    ]
    (mask,) = masks
    np.testing.assert_array_equal(mask[0, 0] < 0, np.triu(np.ones(mask.shape[2:], bool), 1))


def test_cold_starts_are_of_fresh_processes() -> None:
    found = {c.engine: c for c in cold.measure(make("run-mlp:"), 1, ("rlx", "onnxruntime"))}
    assert found["rlx"].median > 0 and found["rlx"].peak > 1 << 20
    assert not found["rlx"].thunks and not found["rlx"].error


def test_an_engine_that_cannot_start_says_why() -> None:
    pytest.importorskip("openvino")
    (found,) = cold.measure(make("net-trees-b1:1"), 1, ("openvino",))
    assert "TreeEnsembleRegressor" in found.error and not found.seconds


def test_predictions_have_every_kernel_that_ran() -> None:
    workload = make("net-bilstm:1")
    program = compile(workload.as_graph(), threads=1)
    found = predictions(program, workload.feed, measured(program, workload.feed, 2))
    assert len(found) == len(program.lir.plan.schedule)
    assert all(p.predicted > 0 and p.measured > 0 and p.factor >= 1 for p in found)


def test_the_command_for_predictions(tmp_path: Path) -> None:
    saved, again = tmp_path / "all.json", tmp_path / "again.json"
    out = _run("predictions.py", "trees-b1", "--small", "--rounds", "1", "--save", str(saved))
    assert "trees-b1" in out and "of 1 sums within 1.25x" in out
    assert json.loads(saved.read_text())["trees-b1"][0]["measured"] > 0
    assert _run("predictions.py", "--small", "--times", str(saved), "--save", str(again)) == out
    assert json.loads(again.read_text()) == json.loads(saved.read_text())
    assert "no times of crnn in" in _run("predictions.py", "crnn", "--times", str(saved), code=2)
    assert "unknown model 'tree'; use one of" in _run("predictions.py", "tree", code=2)


@pytest.mark.slow
def test_the_command_for_networks(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    rounds = ("--rounds", "1", "--cold-rounds", "1", "-t", "1")
    out = _run("networks.py", "trees-b1", "crnn", "--small", *rounds, "--json", str(figures))
    assert "crnn small" in out and "over 2 models; 0 host thunks" in out
    told = json.loads(figures.read_text())
    assert [row["workload"] for row in told["rows"]] == ["trees-b1 small", "crnn small"]
    assert told["cold"]["crnn small"][0]["thunks"] == []


def _run(command: str, *arguments: str, code: int = 0) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, str(BENCH / command), *arguments], env=env, capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr
