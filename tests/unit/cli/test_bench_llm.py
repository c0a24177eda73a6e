"""bench/llm.py and bench/make_gguf.py: files that RLX reads, and rows of a small run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf")

import make_gguf
import rlx
from rlx_bench.harness import Measured, Row
from rlx_bench.llm import llama_cpp, measure
from rlx_bench.llm.report import BEGIN, END, Results, as_markdown, table, write_page

BENCH = Path(__file__).parents[3] / "bench"


@pytest.mark.parametrize("format", ["Q4_0", "Q8_0", "bf16", "f32"])
def test_files_have_the_weights_they_were_made_of(format: str, tmp_path: Path) -> None:
    path = make_gguf.make("tiny", format, tmp_path / "model.gguf")
    wide = make_gguf.as_f32(path, tmp_path / "f32.gguf")
    tokens = list(range(40))
    found, same = (rlx.llm.load(p, context=64).logits(tokens) for p in (path, wide))
    exact = rlx.llm.load(make_gguf.make("tiny", "f32", tmp_path / "exact.gguf"), context=64).logits(tokens)
    np.testing.assert_allclose(found, same, rtol=1e-4, atol=1e-4)
    apart = np.abs(found - exact).max() / np.abs(exact).max()
    most = {"Q4_0": 0.5, "Q8_0": 0.05, "bf16": 0.05, "f32": 1e-6}[format]
    assert (apart > 0) == (format != "f32") and apart < most


def test_the_command_measures_rlx_alone(tmp_path: Path) -> None:
    page, results = tmp_path / "page.md", tmp_path / "results.json"
    command = [sys.executable, str(BENCH / "llm.py"), "--small", "--json"]
    command += ["--page", str(page), "--results", str(results)]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    names = [f"tiny:f32, {what}" for what in ("prefill 8", "prefill 24", "decode", "load", "memory")]
    assert [row["workload"] for row in told["rows"]] == names
    for row in told["rows"]:
        (own,) = row["engines"]
        assert own["engine"] == "rlx" and not own["error"] and all(time > 0 for time in own["times"])
    assert (
        page.read_text().count("| tiny:f32, ") == len(names)
        and "bench/llm.py --small --json`" in page.read_text()
    )
    assert [r.workload for r in Results.read(results).rows] == names


def test_a_peer_that_is_missing_is_shown_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> str:
        raise llama_cpp.PeerError("there is no such library")

    broken = measure.PEERS["llama.cpp"]
    monkeypatch.setitem(measure.PEERS, "llama.cpp", type(broken)(broken.load, "", missing, {}))
    path = make_gguf.make("tiny", "f32", tmp_path / "model.gguf")
    plan = measure.Plan(prompts=(4,), decode=2, after=4, rounds=1)
    rows = list(measure.measure("tiny", path, 1, ["rlx", "llama.cpp"], plan, lambda line: None))
    assert {m.error for r in rows for m in r.engines} == {"", "there is no such library"}
    assert {row[3] for row in table(rows)[1]} == {"fails"}
    assert "- tiny, llama.cpp: there is no such library" in as_markdown(Results(rows, {}, []))


def test_rows_of_later_runs_replace_earlier_ones() -> None:
    results = Results([], {}, [])
    for seconds in (1.0, 0.5):
        results.add([Row("m, decode", 1, 0.0, 0.0, [Measured("rlx", [seconds])])], {}, "`run`")
    results.add([Row("m, decode", 2, 0.0, 0.0, [Measured("rlx", [0.25])])], {"m": {"rlx": 12.5}}, "`other`")
    assert [row[2] for row in table(results.rows)[1]] == ["2 ±0%", "4 ±0%"]
    assert len(results.commands) == 2 and "| m | 12.5000 |" in as_markdown(results)


def test_a_page_without_marks_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("kept")
    with pytest.raises(ValueError, match="has no lines"):
        write_page(page, "section")
    assert page.read_text() == "kept"
    page.write_text(f"a\n{BEGIN}\n{END}\nb\n")
    write_page(page, "one")
    write_page(page, "two")
    assert page.read_text() == f"a\n{BEGIN}\ntwo\n{END}\nb\n"


def test_servers_are_measured(tmp_path: Path, require: Callable[[str], None]) -> None:
    require("serve")
    from tiny_chat import write_chat_model  # needs tokenizers

    write_chat_model(tmp_path, max_position_embeddings=1024)
    command = [sys.executable, str(BENCH / "serve.py"), str(tmp_path), "--engine", "rlx", "-t", "1", "--json"]
    command += ["--streams", "3", "--tokens", "8", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (found,) = json.loads(done.stdout)["tokens a second"].values()
    whats = ["1 stream", "3 streams", "prompt of 128"]
    whats += ["1 stream, engine", "3 streams, engine", "prompt of 128, engine"]
    whats += ["prompt of 128, alone", "prompt of 128, alone, all logits", "1 stream, alone"]
    assert list(found["1"]) == whats and all(value > 0 for row in found["1"].values() for value in row["rlx"])
    assert "3 of 3 streams have the text that they have alone" in done.stderr
