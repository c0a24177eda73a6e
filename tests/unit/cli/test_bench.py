"""The benchmark harness: engines agree with the reference, rows are reported, slow peers are noticed."""

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
from rlx_bench import harness, known, machine, oracle, report, starts
from rlx_bench.engines import ENGINES, TORCH_COMPILE
from rlx_bench.harness import Measured, Row
from rlx_bench.oracle import difference, expected
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
def test_engines_agree_with_the_reference(spec: str) -> None:
    workload = make(spec)
    wanted = expected(workload)
    for name in ("rlx", "onnxruntime", "openvino", "numpy"):
        engine = ENGINES[name]
        if engine.installed and engine.can(workload) and name in ("rlx", *workload.peers):
            found = [np.asarray(v) for v in engine.prepare(workload, 1)()]
            assert difference(found, wanted) <= workload.tolerance, name


def test_training_steps_lower_the_loss() -> None:
    for spec in ("train-mlp:16", "train-transformer:2,8,16,2"):
        workload = make(spec)
        before, *weights = ENGINES["rlx"].prepare(workload, 1)()
        assert difference([before, *weights], expected(workload)) <= workload.tolerance
        workload.feed |= dict(zip(list(workload.feed)[2:], weights, strict=True))
        assert ENGINES["rlx"].prepare(workload, 1)()[0] < before


def test_all_engines_read_one_file(zoo_path: Callable[..., Path]) -> None:
    """RLX has no graph of its own where there is a model; in causal attention, too."""
    zoo_path("minilm"), zoo_path("magika")
    for spec in (*SMALL, "minilm:1,16", "minilm-bf16:1,16", "zoo-minilm:", "zoo-magika:", "net-bilstm:1"):
        assert make(spec).graph is None, spec
    masks = [node.op_type for node in make("attention:2,24,16,1").onnx().graph.node]  # type: ignore[misc]
    assert masks == ["Transpose", "MatMul", "Mul", "Add", "Softmax", "MatMul"]


def test_peers_that_can_are_in_the_rows(zoo_path: Callable[..., Path]) -> None:
    zoo_path("minilm"), zoo_path("magika")
    for spec in ("softmax:5,33", "chain:5,33", "layernorm:5,33", "zoo-minilm:", "zoo-magika:", "run-mlp:"):
        assert {"onnxruntime", "openvino"} <= set(make(spec).peers), spec


def test_a_row_through_run() -> None:
    workload = make("run-mlp:")
    assert workload.by_run
    run = ENGINES["rlx"].prepare(workload, 1)
    first, second = run(), run()
    assert first[0] is not second[0]  # a new array for every call, as users get
    np.testing.assert_array_equal(first[0], second[0])


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


def test_an_engine_that_crashes_is_named_with_its_signal() -> None:
    with harness.Workers(1) as workers:
        worker = workers.get("numpy")
        worker.ask("make", spec="gemm:4,8,16")
        worker.process.kill()
        worker.process.wait()
        with pytest.raises(harness.EngineError, match=r"engine numpy ended \(SIGKILL\)"):
            worker.ask("time", samples=1, inner=1)
        assert workers.get("numpy") is not worker  # a fresh process for the next row


def test_a_row_of_two_threads_is_measured_in_blocks() -> None:
    (row,) = harness.measure(["gemm:8,32,48"], [2], ["rlx", "numpy"], 1)
    assert all(len(m.times) == harness.SAMPLES and not m.error for m in row.engines)
    assert row.peaks["flops"] > 0 and row.peaks["copy"] > 0


def test_wrong_outputs_are_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """RLX's, too: the reference decides."""
    monkeypatch.setattr(harness.Expected, "of", lambda self, spec: [np.zeros((8, 48), np.float32)])
    (row,) = harness.measure(["gemm:8,32,48"], [1], ["rlx", "numpy"], 1)
    assert all("outputs differ from the reference" in m.error for m in row.engines)
    assert row.ratio() is None
    assert report.table([row])[1][0][2:4] == ["wrong", "wrong"]


def test_without_a_reference_there_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: harness.Expected, spec: str) -> list[np.ndarray]:
        raise harness.EngineError("no reference")

    monkeypatch.setattr(harness.Expected, "of", fails)
    (row,) = harness.measure(["gemm:8,32,48"], [1], ["numpy"], 1)
    assert row.engines[0].error == "not compared, the reference fails: no reference"


def test_the_reference_is_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_CACHE", str(tmp_path))
    first = expected(make("softmax:5,33"))
    monkeypatch.setattr(oracle, "evaluate", lambda graph, feed: pytest.fail("computed again"))
    np.testing.assert_array_equal(expected(make("softmax:5,33"))[0], first[0])
    with pytest.raises(pytest.fail.Exception, match="computed again"):
        expected(make("softmax:5,34"))


def example() -> list[Row]:
    engines = [Measured("rlx", [1e-3] * 3), Measured("openvino", [9e-3] * 3)]
    return [Row("MiniLM b1 s16", 1, 1e9, 0.0, engines, rate=2e12), Row("other", 1, 0.0, 0.0, engines)]


def test_reports(tmp_path: Path) -> None:
    rows = example()
    head, cells = report.table(rows)
    assert head == ["workload", "threads", "rlx", "openvino", "rlx vs best", "of machine"]
    assert cells[0] == ["MiniLM b1 s16", "1", "1.00 ms ±0%", "9.00 ms ±0%", "9.00x", "50%"]
    assert "geometric mean 9.00x the best peer over 2 rows" in report.summary(rows)
    failed = replace(rows[1], engines=[rows[1].engines[0], Measured("openvino", error="no such op")])
    assert report.table([failed])[1][0][3] == "fails"
    assert "- other, openvino: no such op" in report.as_markdown([failed], "rlx bench other")
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
    assert report.settings(rows)[-1].endswith("(faster: pinned in 2 rows)")  # both rows share the engine
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
    """Than on the same kind of machine: figures of another say nothing."""
    assert len(known.slow_peers(example(), "zen4-x86-64-v4-bf16-vnni")) == 1
    assert not known.slow_peers(example(), "zen3-x86-64-v3")


def test_a_machine_with_a_slower_clock_may_take_longer() -> None:
    peer = Measured("openvino", [0.014] * 3)
    row = Row("MiniLM b1 s128", 1, 1e9, 0.0, [peer], peaks={"flops": 289e9})
    assert len(known.slow_peers([row], "zen5-x86-64-v4-bf16-vnni")) == 1
    row.peaks = {"flops": 250e9}
    assert not known.slow_peers([row], "zen5-x86-64-v4-bf16-vnni")


@pytest.mark.usefixtures("avx2_on_avx512")
def test_on_avx512_peers_are_limited_where_they_can_be() -> None:
    assert machine.limits("openvino") == {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    assert machine.limits("torch")["ATEN_CPU_CAPABILITY"] == "avx2"
    assert machine.beyond_limit("onnxruntime") and not machine.limits("onnxruntime")
    assert not machine.beyond_limit("rlx")
    wide = Measured("onnxruntime", [5e-4] * 3, beyond="it cannot be limited")
    row = example()[0]
    row.engines.append(wide)
    assert row.ratio() == pytest.approx(9)  # the wider peer is faster, and does not count
    head, (cells,) = report.table([row])
    assert dict(zip(head, cells, strict=True))["onnxruntime"] == "500.0 us ±0%†"
    alone = replace(row, engines=[row.engines[0], wide])
    assert report.table([alone])[1][0][-2:] == ["0.50x†", "50%"] and alone.ratio() is None
    page = report.as_markdown([row], "rlx bench minilm")
    assert "the share of the\n256-bit peak" in page and "x86-64-v3" in page


@pytest.fixture
def avx2_on_avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine seen as one with AVX2, as if it had AVX-512."""
    monkeypatch.setenv("RLX_HOST", "x86-64-v3")
    monkeypatch.setattr(machine, "machine_features", lambda: frozenset({"avx2", "avx512f"}))


def test_without_a_lesser_host_nothing_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLX_HOST", raising=False)
    assert not machine.limited() and not machine.limits("openvino")
    assert not machine.beyond_limit("onnxruntime")


def test_a_folder_has_a_page_per_kind_of_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "measure", lambda *_: (row for row in example()))
    assert main(["bench", "gemm:8,32,48", "-t", "1", "--page", str(tmp_path)]) == 0
    assert "| MiniLM b1 s16 | 1 |" in (tmp_path / f"{machine.kind()}.md").read_text(encoding="utf-8")


def test_yardsticks_do_what_they_count() -> None:
    from rlx.target.cpu import resolve

    target = resolve("host")
    assert peak(target, 1, turns=1000).amount > 0
    for way in stream(target, 2, 1 << 20, writes=True):
        way.run()
        assert way.amount == 2 << 20
