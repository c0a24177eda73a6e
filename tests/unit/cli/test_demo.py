"""rlx demo: built-in and typed sentences, with ONNX Runtime beside it and without."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def _kept() -> dict[str, Any]:
    return {}


@pytest.fixture
def run(
    require: Callable[[str], None],
    zoo_path: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    _kept: dict[str, Any],
) -> Callable[..., Any]:
    """Runs the command; the encoder is compiled once for all tests."""
    require("demo")
    zoo_path("minilm")
    from click.testing import CliRunner

    from rlx.cli import demo

    def encoder(say: Any, make: Any = demo.Encoder) -> Any:
        return _kept.setdefault("encoder", _kept.get("encoder") or make(say))

    monkeypatch.setattr(demo, "Encoder", encoder)

    def call(*args: str, text: str = "") -> Any:
        done = CliRunner().invoke(demo.demo, args, input=text, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout) if "--json" in args else done.stdout

    return call


def without(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == package else find(name, *a)
    )


def test_built_in_sentences(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    without("onnxruntime", monkeypatch)
    page = run()
    assert "A cat is sleeping on the sofa in the sun." in page and "not installed" in page


def test_typed_sentences(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    without("onnx", monkeypatch)
    text = "My dog loves the beach.\nTaxes are due in April.\n\na pet at the sea\nmoney for the state\n"
    found = run("--type", "--json", text=text)
    best = {query: hits[0]["sentence"] for query, hits in found["answers"].items()}
    assert best == {
        "a pet at the sea": "My dog loves the beach.",
        "money for the state": "Taxes are due in April.",
    }
    assert found["host_thunks"] == 0 and "onnxruntime" not in found


def test_only_queries_typed(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    without("onnx", monkeypatch)
    found = run("-t", "--json", text="\nbread\n")
    assert found["answers"]["bread"][0]["sentence"].startswith("She baked")


def test_beside_onnxruntime(run: Callable[..., Any]) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    found = run("--json", "-s", "A cat sleeps.", "-s", "Stocks fell.", "-q", "a pet")
    peer = found["onnxruntime"]
    assert peer["largest_difference"] < 1e-5 and peer["ms_per_sentence"] > 0
    assert found["answers"]["a pet"][0]["sentence"] == "A cat sleeps."
