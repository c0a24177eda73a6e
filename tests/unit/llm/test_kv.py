"""Keys and values of 8 bits: `kv="i8"`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tiny_decoders as tiny
import tiny_encoders as encoders
from tiny_chat import write_chat_model

import rlx
from rlx.cli.main import main
from rlx.errors import ConfigError
from rlx.llm import Engine, Request
from rlx.llm.decoder import build_paged
from rlx.llm.source import open_source
from rlx.reference.interpreter import evaluate

MODEL = {**tiny.CONFIGS["llama"], "max_position_embeddings": 256}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("kv"), **MODEL)


def test_states_are_those_of_the_reference(folder: Path) -> None:
    """Codes and scales of the first layer; features differ in their last bits, and rounding may tip there."""
    source = open_source(folder).rounded(kv="i8")
    graph = build_paged(source.config, source.tensors, 64, 64, 20)
    at = np.arange(20)
    feed = {"tokens": at + 2, "at": at, "slots": at * 0, "places": at, "table": np.zeros((1, 1), np.int64)}
    feed |= {"wanted": at, "pooled": at}
    empty = {
        s.name: np.zeros((1, *(int(n) for n in s.input.shape[1:])), s.input.dtype.np) for s in graph.states
    }
    sizes = {name: np.zeros((20, 0), np.int8) for name in ("new", "answers", "features")}
    wanted = evaluate(graph, {**feed, **sizes}, states=empty)
    stream = rlx.compile(graph).stream(sizes={"pages": 1})
    found = stream.step({**feed, "new": 20, "answers": 20, "features": 20})
    np.testing.assert_allclose(found["logits"], wanted["logits"], rtol=0.02, atol=0.02)
    for name, axis in (("k0", 2), ("v0", 3)):
        codes, scales = stream.state(name).read(), stream.state(f"{name}.scales").read()
        assert codes.dtype == np.int8 and scales.shape[axis] == 1
        seen = (..., slice(0, 20)) if axis == 2 else (..., slice(0, 20), slice(None))
        assert np.all(np.abs(codes[seen].astype(int)).max(axis) == 127), "each row uses all of its range"
        assert np.all(scales[seen] > 0)


@pytest.mark.parametrize("text", [[5] * 40, list(range(2, 90))])
def test_a_model_alone_has_the_bits_of_an_engine(folder: Path, text: list[int]) -> None:
    model = rlx.llm.load(folder, kv="i8")
    assert "i8 keys and values" in repr(model) and model.drafted == (0, 0)
    with Engine(model, threads=1) as engine:
        assert engine.config.kv == "i8"
        answer = engine.submit(Request(tuple(text), max_tokens=30)).text
        marked = engine._mark
    assert model.generate(text, max_tokens=30) == answer
    drafted = rlx.llm.load(folder, kv="i8", draft="lookup")
    assert drafted.generate(text, max_tokens=30) == answer
    np.testing.assert_array_equal(model.logits(text), drafted.logits(text))
    plain = rlx.llm.load(folder).logits(text)
    assert 0 < np.abs(model.logits(text) - plain).max() < 0.05 * np.abs(plain).max()
    with Engine(folder, kv="f32") as engine:
        assert engine._mark != marked, "a generation of one does not continue in the other"


def test_more_fits_in_the_same_memory(folder: Path) -> None:
    """16 features of 4 bytes become 16 of one with a scale of 4."""
    pages = {}
    for kv in ("f32", "i8"):
        with Engine(folder, kv=kv, kv_memory="100KiB") as engine:
            pages[kv] = engine.stats()["pages"]
    assert pages == {"f32": 2, "i8": 6}


def test_explain_and_limits(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    needs = {}
    for kv in ("f32", "i8"):
        assert main(["explain", str(folder), "--kv", kv, "--json"]) == 0
        needs[kv] = json.loads(capfd.readouterr().out)
        assert needs[kv]["kv_dtype"] == kv
    rows, tokens = 2 * 3 * 2, 256
    assert needs["i8"]["kv_per_1000_tokens"] == 1000 * rows * (16 + 4)
    assert needs["i8"]["kv"] == tokens * rows * (16 + 4)
    assert needs["f32"]["kv"] == tokens * rows * 16 * 4
    limit = needs["i8"]["weights"] + needs["i8"]["kv"] + needs["i8"]["activations"]
    program = rlx.llm.load(folder, kv="i8", memory_limit=limit).program
    assert program.lir.options.get("weight_budget") is None, "all of it fits"


def test_refusals(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="kv is 'i4'; use 'f32' or 'i8'"):
        rlx.llm.load(folder, kv="i4")
    assert main(["chat", "x", "-m", str(folder), "--kv", "f8"]) != 0
    assert "'f32', 'i8'" in capfd.readouterr().err


def test_an_encoder_has_none(tmp_path: Path) -> None:
    config = encoders.CONFIGS["bert"]
    encoder = encoders.write_folder(tmp_path, config, encoders.random_weights(config))
    with pytest.raises(ConfigError, match="is an encoder, which keeps no keys and values"):
        open_source(encoder).rounded(kv="i8")
