"""rlx.llm.load and rlx chat, with a small random model in a folder of its own."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_decoders as tiny
from tiny_chat import write_chat_model

import rlx
from rlx.cli.main import main
from rlx.errors import BudgetError, ConfigError, FormatError, InputError, ModelImportError, UnsupportedError
from rlx.llm import LanguageModel
from rlx.llm.memory import memory_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(folder: Path) -> LanguageModel:
    return rlx.llm.load(folder)


def test_streams_and_texts_are_the_same(model: LanguageModel) -> None:
    text = model.generate("Hello", max_tokens=12)
    assert "".join(model.stream("Hello", max_tokens=12)) == text
    assert model.generate(model.tokens("Hello"), max_tokens=12) == text
    made = list(model.stream_tokens(model.tokens("Hello"), 12))
    assert (model.tokenizer.decode(made) == text and 0 < len(made) <= 12 == model.generated) or len(made) < 12


def test_the_caches_do_not_change_what_is_said(model: LanguageModel, folder: Path) -> None:
    first = model.generate("One way", max_tokens=10)
    model.generate("One other way to say it", max_tokens=3)
    assert model.generate("One way", max_tokens=10) == first
    assert rlx.llm.load(folder).generate("One way", max_tokens=10) == first, "from the store"


def test_seeds_and_stop_words(model: LanguageModel) -> None:
    def said(seed: int) -> str:
        return model.generate("abc", max_tokens=20, temperature=1.5, seed=seed)

    assert said(1) == said(1)
    assert len({said(seed) for seed in range(6)}) > 1
    whole = model.generate("abc", max_tokens=20, temperature=1.5, seed=1)
    stop = whole[4:7]
    cut = model.generate("abc", max_tokens=20, temperature=1.5, seed=1, stop=[stop])
    assert cut == whole[: whole.index(stop)]


def test_long_prompts_come_in_parts(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [int(t) for t in np.random.default_rng(0).integers(2, 95, 50)]
    whole = model.logits(tokens)
    last = model.state.logits(tokens).copy()
    monkeypatch.setattr("rlx.llm.model.AT_ONCE", 7)
    assert np.abs(model.logits(tokens) - whole).max() < 1e-5
    model.state.tokens.clear()
    assert np.abs(model.state.logits(tokens) - last).max() < 1e-5


def test_a_limit_of_memory(model: LanguageModel, folder: Path) -> None:
    needs = memory_of(model.source)
    whole = needs["weights"] + needs["kv"] + needs["activations"]
    want = model.generate("One way", max_tokens=10)
    for limit, streams in ((whole, False), (whole - needs["weights"] // 3, True)):
        small = rlx.llm.load(folder, memory_limit=limit)
        assert ("weight_budget" in small.program.lir.options) == streams
        assert small.generate("One way", max_tokens=10) == want
    with pytest.raises(BudgetError, match="keys and values of 64 tokens take"):
        rlx.llm.load(folder, memory_limit="1KiB")


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_answers_by_a_schema(model: LanguageModel, temperature: float) -> None:
    for seed in range(3 if temperature else 1):
        text = model.generate("A person", schema=SCHEMA, temperature=temperature, seed=seed)
        found = json.loads(text)
        assert found.keys() == {"name", "age"} and len(found["name"]) <= 6 and found["age"] <= 99


def test_schemas_that_cannot_be_used(model: LanguageModel) -> None:
    with pytest.raises(ConfigError, match="the JSON schema cannot be used with this model: Invalid type"):
        model.generate("A", schema={"type": "strange"})
    with pytest.raises(ConfigError, match="the JSON schema is not JSON"):
        model.generate("A", schema={"type": b"object"})


def test_refusals(model: LanguageModel, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the prompt has 64 tokens, the context has room for 64"):
        model.generate("a" * 64)
    with pytest.raises(InputError, match="the prompt has no tokens"):
        model.generate("")
    with pytest.raises(ConfigError, match=r"context is 65; .* takes between 1 and 64 tokens"):
        rlx.llm.load(folder, context=65)
    with pytest.raises(FormatError, match="cannot read"):
        rlx.llm.load(tmp_path / "missing.gguf")
    (tmp_path / "other.bin").write_bytes(b"PK\x03\x04")
    with pytest.raises(ModelImportError, match="is not a language model: give a GGUF file"):
        rlx.llm.load(tmp_path / "other.bin")
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    tiny.write_folder(tmp_path, {"model_type": "mamba"}, {})
    with pytest.raises(UnsupportedError, match="architecture 'mamba' is not supported; RLX runs llama"):
        rlx.llm.load(tmp_path)


def changed(folder: Path, tmp_path: Path, **values: Any) -> Path:
    config = {**json.loads((folder / "config.json").read_text()), **values}
    weights = tiny.random_weights({**tiny.CONFIGS["llama"], "num_hidden_layers": 1})
    return tiny.write_folder(tmp_path, {k: v for k, v in config.items() if v is not None}, weights)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_size": 128}, "tensor 'token_embd.weight' has the shape \\[96, 64\\], not \\[any, 128\\]"),
        ({"num_hidden_layers": 2}, "has no tensor 'blk.1.attn_norm.weight'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers = '3'"),
        ({"num_attention_heads": 3}, "3 heads for 2 of keys"),
        ({"head_dim": 15}, "do not fit heads of 15 features"),
        ({"rms_norm_eps": None}, "rms_norm_eps = None"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "scaled by 'dynamic' are not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": -1.0}}, "scaled by yarn have the factor -1.0"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'factor'"),
        ({"hidden_act": "relu6"}, "activation 'relu6' is not supported"),
        ({"sliding_window": "4"}, "sliding_window = '4'"),
    ],
)
def test_configs_that_do_not_fit(values: dict[str, Any], message: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises((FormatError, UnsupportedError), match=message):
        rlx.llm.load(changed(folder, tmp_path, **values))


# -- the command


def test_chat_prints_the_answer_only(
    folder: Path,
    model: LanguageModel,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = ["--model", str(folder), "--max-tokens", "9"]
    want = model.chat("Say it", max_tokens=9) + "\n"
    assert main(["chat", "Say", "it", *options]) == 0
    assert capfd.readouterr() == (want, "")
    for given in ("Say it", "Say it\n"):
        monkeypatch.setattr("sys.stdin", io.StringIO(given))
        assert main(["chat", *options]) == 0
        assert capfd.readouterr().out == want
    system = model.chat(
        [{"role": "system", "content": "Be odd."}, {"role": "user", "content": "Say it"}], max_tokens=9
    )
    assert main(["chat", "Say it", "--system", "Be odd.", *options]) == 0
    assert capfd.readouterr().out == system + "\n"
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    assert main(["chat", "x", "--json-schema", str(tmp_path / "schema.json"), *options[:2]]) == 0
    assert json.loads(capfd.readouterr().out).keys() == {"name", "age"}


def test_chat_refuses(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["chat", "a", "--model", str(folder), "--top-p", "2"]) == 1
    assert capfd.readouterr().err == "rlx: top_p is 2.0; it must be between 0 and 1\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("  \n"))
    assert main(["chat", "--model", str(folder)]) == 2
    assert "the prompt is empty" in capfd.readouterr().err


@pytest.mark.parametrize("draft", [False, True])
def test_an_answer_that_is_stopped_harms_no_other(
    draft: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C may come in the middle of a step, when part of the keys and values is written."""
    model = rlx.llm.load(folder, draft=folder if draft else None)
    want, execute, calls = model.chat("ab", max_tokens=9), type(model.program).execute, 0

    def interrupted(*given: Any) -> object:
        nonlocal calls
        calls += 1
        found = execute(*given)
        if calls == 3:
            raise KeyboardInterrupt
        return found

    with monkeypatch.context() as patch:
        patch.setattr(type(model.program), "execute", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.chat("cd", max_tokens=9)
    assert model.chat("ab", max_tokens=9) == want


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_conversation(
    folder: Path, model: LanguageModel, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["/help", "/odd", "ab", "", "cd", "/system X", "ab", "x" * 70, "/reset", "ab", "/quit"]
    monkeypatch.setattr("sys.stdin", Terminal("\n".join(lines) + "\n"))
    read = iter(lines)
    monkeypatch.setattr("click.termui.visible_prompt_func", lambda _: next(read))
    assert main(["chat", "--model", str(folder), "--max-tokens", "4"]) == 0
    told = capfd.readouterr()
    user, system = {"role": "user"}, {"role": "system", "content": "X"}
    first = model.chat("ab", max_tokens=4)
    talk = [{**user, "content": "ab"}, {"role": "assistant", "content": first}, {**user, "content": "cd"}]
    second = model.chat(talk, max_tokens=4)
    third = model.chat([system, {**user, "content": "ab"}], max_tokens=4)
    assert told.out.split("\n")[:-1] == [first, second, third, third]
    assert "/system TEXT" in told.err and "unknown command /odd" in told.err
    assert "tokens/s" in told.err and "the context has room for 64" in told.err


def test_explain_tells_the_memory_before_anything_is_loaded(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlx.llm.tensors.Entry.array", pytest.fail)
    assert main(["explain", str(folder), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["kv_per_1000_tokens"] == 1000 * 2 * 1 * 2 * 16 * 4
    assert found["kv"] == 64 * 2 * 1 * 2 * 16 * 4 and found["context"] == 64
    weights = sum(
        np.prod(s) * 4 for s in tiny.shapes({**tiny.CONFIGS["llama"], "num_hidden_layers": 1}).values()
    )
    assert found["file"] == weights <= found["weights"] < 1.6 * weights
    assert main(["explain", str(folder)]) == 0
    assert "for each 1,000 tokens" in capfd.readouterr().out
