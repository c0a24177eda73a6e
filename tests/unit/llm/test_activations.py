"""Models whose activations are rounded to 8 bits: `activations="i8"`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tiny_decoders as tiny

import rlx
from rlx.cli.main import main
from rlx.errors import ConfigError
from rlx.llm import config as configs
from rlx.llm.decoder import build
from rlx.llm.gguf import open_gguf
from rlx.llm.source import open_source
from rlx.reference.interpreter import evaluate

CONFIG = {**tiny.CONFIGS["llama"], "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
FORMATS = ["Q4_0", "Q4_1", "Q5_0", "Q8_0"]


def written(folder: Path, kind: str) -> Path:
    path = folder / "model.gguf"
    tiny.write_gguf(path, CONFIG, tiny.random_weights(CONFIG), kind)
    return path


@pytest.mark.parametrize("kind", FORMATS)
def test_logits_are_those_of_the_reference(kind: str, tmp_path: Path) -> None:
    """The same graph in NumPy; norms and attention differ in their last bits, and rounding may tip there."""
    file = open_gguf(written(tmp_path, kind))
    source = open_source(tmp_path / "model.gguf").rounded("i8")
    assert configs.from_gguf(file).activations == "f32" and source.config.activations == "i8"
    graph = build(source.config, file.tensors, 64)
    tokens = np.random.default_rng(0).integers(2, 95, 20)
    feed = {"past": 0, "tokens": tokens, "wanted": np.arange(20)}
    found = rlx.compile(graph).stream().step(feed)["logits"]
    assert {s.input.dtype.name for s in graph.states} == {"bf16"}
    empty = {s.name: np.zeros([int(d) for d in s.input.shape], s.input.dtype.np) for s in graph.states}
    wanted = evaluate(graph, {**feed, "past": np.zeros((0, 0), np.int8)}, states=empty)["logits"]
    apart = np.abs(found - wanted).max(1) / np.abs(wanted).max()
    assert apart.min() < 1e-5 and apart.max() < 0.05


def test_programs_are_stored_apart(tmp_path: Path) -> None:
    path = written(tmp_path, "Q4_0")
    tokens = list(range(2, 30))

    def logits(activations: str) -> np.ndarray:
        return rlx.llm.load(path, activations=activations).logits(tokens)

    plain, rounded = logits("f32"), logits("i8")
    assert np.any(plain != rounded)
    np.testing.assert_array_equal(logits("f32"), plain)
    np.testing.assert_array_equal(logits("i8"), rounded)
    model = rlx.llm.load(path, activations="i8")
    assert "i8 activations" in repr(model)
    with rlx.llm.Engine(model, slots=1) as engine:
        assert engine.config.activations == "i8"
        marked = engine._mark
    with rlx.llm.Engine(path, slots=1) as engine:
        assert engine._mark != marked, "a generation of one does not continue in the other"


def test_refusals_and_explain(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "Q4_0")
    with pytest.raises(ConfigError, match="activations is 'i4'; use 'f32' or 'i8'"):
        rlx.llm.load(path, activations="i4")
    assert main(["explain", str(path)]) == 0
    assert "multiplied by activations in f32" in capfd.readouterr().out
    assert main(["explain", str(path), "--activations", "i8"]) == 0
    assert "rounded to 8 bits" in capfd.readouterr().out
    assert main(["explain", str(path), "--activations", "i8", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["activation_dtype"] == "i8"
    assert main(["chat", "x", "-m", str(path), "--activations", "f8"]) != 0
    assert "'f32', 'i8'" in capfd.readouterr().err
