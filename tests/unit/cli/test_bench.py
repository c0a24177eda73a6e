"""The benchmark harness: workloads agree between engines, rows are reported, slow peers are noticed."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

pytest.importorskip("onnx")

from rlx.cli.main import main
from rlx.errors import ConfigError
from rlx_bench import harness, known, report, starts
from rlx_bench.engines import ENGINES, TORCH_COMPILE
from rlx_bench.harness import Measured, Row
from rlx_bench.workloads import MAKERS, SUITES, make
from rlx_bench.workloads.products import SWEEP
from rlx_bench.yardsticks import peak, stream

SMALL = (
    "gemm:3,20,13",
    "gemm:128,384,384",
    "int8:9,64,48",
    "int8-conv:16,9",
    "int8-conv:5,4,1",
    "int8-bottlenecks:2,64,7",
    "nbits:4,1,64,32",
    "nbits:8,1,64,32",
    "chain:5,33",
    "softmax:5,33",
    "layernorm:5,33",
    "attention:2,24,16",
    "attention:2,24,16,1",
    "lstm:5,2,16,16",
)


@pytest.mark.parametrize("spec", SMALL)
def test_engines_agree(spec: str) -> None:
    """RLX equals ONNX Runtime and NumPy on every kind of workload."""
    workload = make(spec)
    ours = [np.asarray(v, np.float64) for v in ENGINES["rlx"].prepare(workload, 1)()]
    for name in ("onnxruntime", "numpy"):
        engine = ENGINES[name]
        if engine.installed and engine.can(workload):
            for a, b in zip(ours, engine.prepare(workload, 1)(), strict=True):
                np.testing.assert_allclose(a, b, rtol=0, atol=workload.tolerance * np.abs(a).max())


def test_training_steps_lower_the_loss() -> None:
    for spec in ("train-mlp:16", "train-transformer:2,8,16,2"):
        workload = make(spec)
        assert workload.rlx is not None
        before, *weights = workload.rlx(1)()
        workload.feed |= dict(zip(list(workload.feed)[2:], weights, strict=True))
        assert workload.rlx(1)()[0] < before


def test_the_sweep_has_sixty_shapes() -> None:
    assert len(set(SWEEP)) == len(SWEEP) == 60


def test_every_suite_names_workloads() -> None:
    for specs in SUITES.values():
        assert all(spec.partition(":")[0] in MAKERS for spec in specs)


def test_unknown_workloads_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown workload 'gem'"):
        make("gem:1,2,3")
    with pytest.raises(ConfigError, match="unknown workload 'gem'"):  # before the first is measured
        next(harness.measure(["gemm:8,32,48", "gem:1,2,3"], say=lambda line: pytest.fail(line)))
    with pytest.raises(ConfigError, match="unknown engine 'torhc'"):
        next(harness.measure(["gemm:8,32,48"], engines=["torhc"], say=lambda line: pytest.fail(line)))
    with pytest.raises(ConfigError, match="wrong sizes"):
        make("gemm:1,2")


def test_a_row_is_measured_in_processes_of_its_own() -> None:
    (row,) = harness.measure(["gemm:8,32,48"], [1], ["rlx", "numpy"], 1)
    assert [m.engine for m in row.engines] == ["rlx", "numpy"]
    assert all(len(m.times) == harness.SAMPLES and not m.error for m in row.engines)
    assert [len(m.rates) for m in row.engines] == [harness.SAMPLES, 0]  # the yardstick goes along with RLX
    share = row.share()
    assert row.ratio() and share and share > 0  # how much is a matter of who else used the machine


def test_an_engine_that_fails_is_named_and_the_others_go_on() -> None:
    with harness.Workers(1) as workers:
        with pytest.raises(harness.EngineError, match="engine numpy: ConfigError: unknown workload"):
            workers.get("numpy").ask("make", spec="gem:1,2")
        assert workers.get("numpy").ask("make", spec="gemm:4,8,16")["ready"] > 0


def example() -> list[Row]:
    engines = [Measured("rlx", [1e-3] * 3), Measured("openvino", [9e-3] * 3)]
    return [Row("MiniLM b1 s16", 1, 1e9, 0.0, engines, rate=2e12), Row("other", 1, 0.0, 0.0, engines)]


def test_reports(tmp_path: Path) -> None:
    rows = example()
    head, cells = report.table(rows)
    assert head == ["workload", "threads", "rlx", "openvino", "rlx vs best", "of machine"]
    assert cells[0] == ["MiniLM b1 s16", "1", "1.00 ms ±0%", "9.00 ms ±0%", "9.00x", "50%"]
    assert "geometric mean 9.00x the best peer over 2 rows" in report.summary(rows)
    again = replace(rows[0], threads=2, rate=2.1e12)  # no more than one thread got
    assert "MiniLM b1 s16 on 2 threads: the machine gave 1.1 times" in report.summary([*rows, again])
    assert "measure again" not in report.summary([*rows, replace(again, rate=3.9e12)])
    assert json.loads(json.dumps(report.as_json(rows)))[0]["ratio"] == pytest.approx(9)
    assert "| MiniLM b1 s16 | 1 |" in report.as_markdown(rows, "rlx bench minilm")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_keeps_the_rows_that_are_done(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = []

    def measure(*_: object) -> Iterator[Row]:
        try:
            yield example()[0]
            signal.raise_signal(number)
            yield example()[1]
        finally:
            ended.append(True)

    monkeypatch.setattr(harness, "measure", measure)
    page = tmp_path / "page.md"
    before = signal.getsignal(number)
    assert main(["bench", "gemm:8,32,48", "gemm:9,32,48", "-t", "1", "--page", str(page)]) == 128 + number
    assert ended and signal.getsignal(number) is before
    out, err = capsys.readouterr()
    assert "MiniLM b1 s16, threads 1: rlx 1.00 ms" in err and "Interrupted: 1 of 2 rows" in err
    assert "MiniLM b1 s16" in out and "other" not in out
    assert "| MiniLM b1 s16 | 1 |" in page.read_text() and "Interrupted: 1 of 2 rows" in page.read_text()


def test_workers_end_with_what_interrupts_them() -> None:
    rows = harness.measure(["gemm:8,32,48", "gemm:9,32,48"], [1], ["numpy"], 1)
    assert next(rows).workload == "gemm 8x32x48"
    frame = rows.gi_frame
    process = frame.f_locals["workers"].get("numpy").process
    assert process.poll() is None
    rows.close()
    assert process.poll() is not None


def test_starts_are_a_section_of_the_page() -> None:
    begun = starts.Start("rlx", cold=[1.4], warm=[0.1], new_length=[0.004], peak=[2.0**27])
    assert "| rlx | 1400.0 ms | 100.0 ms | 4.0 ms | 128 MiB |" in starts.as_markdown([begun])


def test_settings_are_told() -> None:
    """How peers are run, and what a search among their settings has taken."""
    rows = example()
    rows[0].engines[1].chosen = "pinned"
    assert report.settings(rows)[2].endswith("(faster: pinned in 2 rows)")  # both rows share the engine
    assert report.as_json(rows)[0]["engines"]["openvino"]["chosen"] == "pinned"
    assert "; rlx: buffers bound once; openvino: latency hint" in report.as_markdown(rows, "x")
    assert all(engine.settings for engine in ENGINES.values())


@pytest.mark.slow
def test_torch_compile_is_a_peer_where_torch_is_and_if_asked(require: Callable[[str], None]) -> None:
    require("torch")
    workload = make("gemm:8,32,48")
    compiled = ENGINES[TORCH_COMPILE]
    ours, theirs = ENGINES["rlx"].prepare(workload, 1)(), compiled.prepare(workload, 1)()
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, np.asarray(b), rtol=0, atol=workload.tolerance * np.abs(a).max())
    assert not compiled.can(make("train-mlp:16"))


def test_a_chart_names_engines_and_workloads() -> None:
    drawn = ElementTree.fromstring(report.chart(example()))
    words = [element.text for element in drawn.iter() if element.text]
    assert {"rlx", "openvino", "Time per run: shorter bars are faster"} <= set(words)
    for row in example():
        assert any(row.workload in word for word in words)


def test_a_peer_slower_than_before_is_named() -> None:
    assert len(known.slow_peers(example())) == 1


def test_yardsticks_do_what_they_count() -> None:
    from rlx.target.cpu import resolve

    target = resolve("host")
    assert peak(target, 1, turns=1000).amount > 0
    for way in stream(target, 2, 1 << 20, writes=True):
        way.run()
        assert way.amount == 2 << 20
