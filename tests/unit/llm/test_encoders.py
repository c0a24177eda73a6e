"""Encoders from folders and GGUF files: features against NumPy in f64, vectors of many texts, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_encoders as tiny

import rlx
from machines import executable, on_targets
from rlx import zoo
from rlx.cli.main import main
from rlx.errors import ConfigError, FormatError, InputError, RlxError, UnsupportedError
from rlx.llm import Engine, LanguageModel, Request

TEXTS = ["hello world", "", "the", "a b c d e f g h i " * 14, "hello the ing", "d e f " * 25, "ab ba " * 9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny.CONFIGS["bert"]
    return tiny.write_folder(tmp_path_factory.mktemp("bert"), config, tiny.random_weights(config))


def check(model: LanguageModel, config: dict[str, Any], weights: dict[str, np.ndarray]) -> None:
    assert not model.program.stats["host_thunks"]
    for text in TEXTS:
        tokens = model.tokens(text)
        assert tokens[0] == 2 and tokens[-1] == 3
        want = tiny.features(config, weights, tokens)
        assert np.abs(model.state.every(tokens, "hidden") - want).max() < 1e-4
        mean = want.mean(axis=0)
        assert np.abs(model.embed(text) - mean / np.linalg.norm(mean)).max() < 1e-5


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_folders(name: str, tmp_path: Path) -> None:
    config = tiny.CONFIGS[name]
    weights = tiny.random_weights(config)
    model = rlx.llm.load(tiny.write_folder(tmp_path, config, weights))
    assert model.source.tensors.asked == set(model.source.tensors), "every weight is used"
    check(model, config, weights)


@pytest.mark.parametrize("name", ["bert", "minilm"])
def test_gguf_files(name: str, tmp_path: Path) -> None:
    config = tiny.CONFIGS[name]
    weights = tiny.random_weights(config)
    tiny.write_gguf(tmp_path / "m.gguf", config, weights)
    model = rlx.llm.load(tmp_path / "m.gguf")
    check(model, config, weights)
    other = rlx.llm.load(tiny.write_folder(tmp_path / "folder", config, weights))
    for text in (*TEXTS, "Hello, WORLD!", "h\u00e9llo", "~[MASK] [CLS]"):
        assert model.tokens(text) == other.tokens(text)


@pytest.mark.parametrize("names", ["bert.{}", "roberta.{}"])
def test_names_of_models_with_heads(names: str, tmp_path: Path) -> None:
    """Files of a model with a head, or older ones, have other names for the same weights."""
    config = tiny.CONFIGS["bert"]
    weights = tiny.random_weights(config)
    older = {"weight": "gamma", "bias": "beta"}
    renamed = {names.format(n): w for n, w in weights.items() if "LayerNorm" not in n}
    for name, value in weights.items():
        if "LayerNorm" in name:
            stem, _, kind = name.rpartition(".")
            renamed[names.format(f"{stem}.{older[kind]}")] = value
    renamed["cls.predictions.bias"] = np.zeros(3, np.float32)
    check(rlx.llm.load(tiny.write_folder(tmp_path, config, renamed)), config, weights)


@on_targets(executable())
def test_bits_of_a_text_do_not_depend_on_others(folder: Path, target: Any) -> None:
    for threads in (1, 2):
        model = rlx.llm.load(folder, target=target.name, threads=threads)
        alone = np.stack([model.embed(text) for text in TEXTS]).view(np.uint32)
        np.testing.assert_array_equal(model.embed(TEXTS).view(np.uint32), alone)
        many = TEXTS * 30  # several steps
        np.testing.assert_array_equal(model.embed(many[::-1]).view(np.uint32)[::-1][: len(TEXTS)], alone)
    with pytest.raises(InputError, match="0 tokens"):
        model.embed([])
    np.testing.assert_array_equal(model.embed(model.tokens(TEXTS[3])).view(np.uint32), alone[3])


def test_an_engine_has_the_same_bits(folder: Path) -> None:
    model = rlx.llm.load(folder)
    want = model.embed(TEXTS).view(np.uint32)
    with Engine(folder, slots=3, prefill_chunk=1) as engine:
        runs = [engine.embed(engine.tokens(text)).view(np.uint32) for text in TEXTS]
        np.testing.assert_array_equal(runs, want)
        with pytest.raises(UnsupportedError, match="is an encoder: it turns texts to vectors"):
            engine.submit(Request((2, 3)))
        assert engine.stats()["steps"] == len(TEXTS)
        with pytest.raises(InputError, match="has 151 tokens; this engine has room for 1 to 150"):
            engine.embed([5] * 151)


def test_pooling(tmp_path: Path) -> None:
    config = tiny.CONFIGS["minilm"]
    weights = tiny.random_weights(config)
    tiny.write_folder(tmp_path, config, weights)
    tokens = [2, 7, 9, 50, 3]
    features = tiny.features(config, weights, tokens)
    pooled = {
        "mean_tokens": features.mean(axis=0),
        "cls_token": features[0],
        "max_tokens": features.max(axis=0),
        "lasttoken": features[-1],
    }
    for mode, want in pooled.items():
        tiny.write_modules(tmp_path, mode)
        np.testing.assert_allclose(rlx.llm.load(tmp_path).embed(tokens), want, atol=1e-4)
    tiny.write_modules(tmp_path, {"pooling_mode": "cls"}, "models.Normalize")
    want = features[0] / np.linalg.norm(features[0])
    np.testing.assert_allclose(rlx.llm.load(tmp_path).embed(tokens), want, atol=1e-5)
    for modes, others, message in (
        (
            "mean_sqrt_len_tokens",
            (),
            r"pooling by \['mean_sqrt_len'\] is not one of mean, cls, max, lasttoken",
        ),
        ("mean_tokens", ("models.Dense",), "the module 'Dense' is not one of Pooling and Normalize"),
        ({"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}, (), "is not one of"),
        ({}, (), r"pooling by \[\] is not one of"),
    ):
        tiny.write_modules(tmp_path, modes, *others)
        with pytest.raises(UnsupportedError, match=message):
            rlx.llm.load(tmp_path)


def test_the_longest_text_is_what_the_folder_says(tmp_path: Path) -> None:
    config = tiny.CONFIGS["roberta"]
    tiny.write_folder(tmp_path, config, tiny.random_weights(config))
    assert rlx.llm.load(tmp_path).positions == 148, "two positions are those of padding"
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 12, "do_lower_case": false}')
    model = rlx.llm.load(tmp_path)
    assert model.positions == 12 and rlx.llm.load(tmp_path, context=20).positions == 20
    with pytest.raises(InputError, match="27 tokens; the context has room for 1 to 12"):
        model.embed("hello " * 25)


def test_an_encoder_writes_no_text(folder: Path) -> None:
    model = rlx.llm.load(folder)
    for work in (model.chat, model.generate, model.logits, model.perplexity):
        with pytest.raises(UnsupportedError, match="is an encoder: it turns texts to vectors"):
            work("hello")
    for options in ({"draft": folder}, {"memory_limit": "1GiB"}):
        with pytest.raises(ConfigError, match="is an encoder, which has no draft and no memory_limit"):
            rlx.llm.load(folder, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"position_embedding_type": "relative_key"},
            "position_embedding_type = 'relative_key' is not supported",
        ),
        ({"is_decoder": True}, "is_decoder = True is not supported"),
        ({"model_type": "roberta", "pad_token_id": 149}, "pad_token_id = 149"),
        ({"max_position_embeddings": 151}, "has positions for 150 tokens only"),
        ({"model_type": "distilbert"}, "'distilbert' is not supported; RLX runs llama, .*bert, roberta"),
        ({"layer_norm_eps": None}, "layer_norm_eps = None"),
    ],
)
def test_configs_that_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    weights = tiny.random_weights(tiny.CONFIGS["bert"])
    tiny.write_folder(tmp_path, tiny.CONFIGS["bert"], weights)
    (tmp_path / "config.json").write_text(json.dumps({**tiny.CONFIGS["bert"], **change}))
    with pytest.raises(RlxError, match=message):
        rlx.llm.load(tmp_path)


def test_modules_cannot_leave_their_folder(tmp_path: Path) -> None:
    config = tiny.CONFIGS["bert"]
    tiny.write_folder(tmp_path, config, tiny.random_weights(config))
    modules = [{"path": "../elsewhere", "type": "sentence_transformers.models.Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(FormatError, match="which is not a folder next to it"):
        rlx.llm.load(tmp_path)


def test_tokenizers_without_a_token_for_unknown_words(tmp_path: Path) -> None:
    config = tiny.CONFIGS["bert"]
    tiny.write_gguf(tmp_path / "m.gguf", config, tiny.random_weights(config))
    data = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "bad.gguf").write_bytes(data.replace(b"[UNK]", b"[UNX]"))
    model = rlx.llm.load(tmp_path / "bad.gguf")
    assert len(model.embed("hello")) == 64
    with pytest.raises(FormatError, match=r"tokenizer cannot read a text: .*\[UNK\]"):
        model.embed("\u4e00")


def test_explain_tells_the_memory(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(folder), "--json"]) == 0
    needs = json.loads(capsys.readouterr().out)
    assert needs["kv"] == 3 * 64 * 2 * 64 * 4, "three pages of keys and of values, for all layers"
    assert needs["weights"] == pytest.approx(needs["file"], rel=0.1)
    assert main(["explain", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "150 tokens of a text are read" in shown and "answer" not in shown


def test_minilm_is_what_the_zoo_has(zoo_path: Any) -> None:
    """The folder of a trained model against the graph that the zoo builds of it."""
    zoo_path("minilm")
    model, graph = rlx.llm.load("zoo:minilm"), rlx.load("zoo:minilm")
    texts = [
        "Paris is the capital of France.",
        "What is the capital of France?",
        "I like trains. " * 40,
        "na\u00efve",
    ]
    tokens = [model.tokens(text) for text in texts]
    assert tokens[0] == [101, 3000, 2003, 1996, 3007, 1997, 2605, 1012, 102]
    ids = np.zeros((len(texts), max(map(len, tokens))), np.int64)
    for row, own in zip(ids, tokens, strict=True):
        row[: len(own)] = own
    want = graph.run({"input_ids": ids, "attention_mask": (ids > 0).astype(np.int64)})
    got = model.embed(texts)
    np.testing.assert_allclose(got, want["sentence_embedding"], atol=2e-6)
    assert got[0] @ got[1] > 0.7 > 0.2 > got[0] @ got[2]
    assert zoo.path("minilm").name == "model.safetensors"
