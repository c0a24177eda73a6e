"""Prepared files: a language model as one `.rlx` file."""

from __future__ import annotations

import json
import os
import shutil
import struct
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_decoders as tiny
import tiny_encoders as encoders
from tiny_chat import write_chat_model, write_tokenizer

import rlx
from rlx.cli.main import main
from rlx.errors import BudgetError, ConfigError, FormatError, ModelImportError, RlxError
from rlx.fuzz.containers import put_together, taken_apart
from rlx.ir.text.container import PROGRAM
from rlx.llm import Engine, Request
from rlx.llm.config import Config, from_hf
from rlx.llm.memory import memory_of
from rlx.llm.prepared.file import PreparedFile
from rlx.llm.prepared.settings import record
from rlx.llm.source import open_source
from rlx.runtime.store.artifact import Artifact, ArtifactWarning
from rlx.runtime.store.programs import ProgramStore, wait_until_stored

MODEL = {**tiny.CONFIGS["llama"], "max_position_embeddings": 128}
SHARED = "about/settings"


def tokenizer(writer: Any) -> None:
    words = ["<|im_start|>", "<|im_end|>", *map(chr, range(33, 125)), "\u0120", "He"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(words)
    writer.add_token_types([3, 3, *[1] * (len(words) - 2)])
    writer.add_token_merges(["H e"])
    writer.add_eos_token_id(1)
    writer.add_chat_template("{% for m in messages %}{{ '<|im_start|>' + m.content }}{% endfor %}")


def write_model(folder: Path, kind: str) -> Path:
    """A model as a GGUF file of some format, or as a folder."""
    if kind == "folder":
        return write_chat_model(folder, **MODEL)
    path = folder / "model.gguf"
    wide = {**tiny.CONFIGS["qwen2"], "num_hidden_layers": 1, "max_position_embeddings": 128}
    tiny.write_gguf(path, wide, tiny.random_weights(wide), kind, tokenizer)
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("prepared"), "Q4_1")


@pytest.fixture(scope="module")
def file(source: Path) -> Path:
    """A prepared file, whose model is still there."""
    path = source.parent / "model.rlx"
    rlx.llm.load(source).save(path)
    return path


def answered(engine: Engine) -> str:
    with engine:
        return engine.submit(Request(tuple(range(2, 30)), max_tokens=12)).text


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be compiled, and no program comes from the cache."""

    def compiled(*_: object) -> None:
        raise AssertionError("a program was compiled")

    monkeypatch.setattr("rlx.api.session._compile", compiled)
    monkeypatch.setattr(ProgramStore, "find", lambda *_: None)


@pytest.mark.parametrize("activations", ["f32", "i8"])
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "F16", "folder"])
def test_all_of_a_model_is_in_its_file(
    kind: str, activations: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Bits of both programs, text and templates, from another folder and without the model's own file."""
    (tmp_path / "source").mkdir()
    given = write_model(tmp_path / "source", kind)
    model = rlx.llm.load(given, activations=activations)
    tokens = model.tokens("Hello 12")
    want = model.logits(tokens), answered(Engine(model)), model.prompt("Hi"), model.embed(tokens)
    model.save(tmp_path / "model.rlx")
    wait_until_stored()
    del model
    shutil.rmtree(tmp_path / "source")
    (tmp_path / "other").mkdir()
    moved = tmp_path / "other" / "name.rlx"
    (tmp_path / "model.rlx").rename(moved)
    request.getfixturevalue("no_compiler")
    again = rlx.llm.load(moved)
    assert again.tokens("Hello 12") == tokens and again.prompt("Hi") == want[2]
    np.testing.assert_array_equal(again.logits(tokens), want[0])
    np.testing.assert_array_equal(again.embed(tokens), want[3])
    assert answered(Engine(moved)) == answered(Engine(again)) == want[1]
    assert (again.config.activations, again.positions) == (activations, 128)


def test_weights_are_stored_once(source: Path, file: Path) -> None:
    """Programs of a conversation and of an engine refer to the same arrays, and to no others."""
    opened = Artifact(file)
    (engine,) = opened.inner.values()
    numbers = [{number for _, number in one.header["variants"][0]["weights"]} for one in (opened, engine)]
    params = set(opened.header["params"].values())
    assert numbers[0] == numbers[1] and numbers[0] | params == set(range(opened.container.array_count))
    assert opened.facts["program"]["decoder"] == 128 and engine.facts["program"]["most"] == 256 + 16


def test_another_user_compiles_from_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = rlx.llm.load(file)
    want = model.logits("Hello"), answered(Engine(file))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("RLX_CACHE", str(tmp_path / "cache"))
    with pytest.warns(ArtifactWarning, match="is not signed by this user: its code was not run"):
        other = rlx.llm.load(file)
    np.testing.assert_array_equal(other.logits("Hello"), want[0])
    with pytest.warns(ArtifactWarning):
        assert answered(Engine(file)) == want[1]
    wait_until_stored()
    assert main(["trust", str(file)]) == 0
    monkeypatch.setattr("rlx.api.session._compile", None)
    monkeypatch.setattr(ProgramStore, "find", lambda *_: None)
    np.testing.assert_array_equal(rlx.llm.load(file).logits("Hello"), want[0])
    assert answered(Engine(file)) == want[1]


def test_programs_that_the_file_does_not_have(source: Path, file: Path) -> None:
    """Other slots, drafts and limits of memory: values of params come from the file."""
    assert answered(Engine(file, slots=3)) == answered(Engine(source, slots=3))
    drafted = rlx.llm.load(file, draft="lookup")
    assert drafted.generate("HeHe", max_tokens=9) == rlx.llm.load(source, draft="lookup").generate(
        "HeHe", max_tokens=9
    )
    whole = rlx.llm.load(file)
    needs = memory_of(whole.source)
    limit = needs["weights"] * 2 // 3 + needs["kv"] + needs["activations"]
    small = rlx.llm.load(file, memory_limit=limit)
    assert "weight_budget" in small.program.lir.options
    np.testing.assert_array_equal(small.logits("Hello"), whole.logits("Hello"))
    with pytest.raises(BudgetError, match="prepare a file with a smaller context, or give a larger limit"):
        rlx.llm.load(file, memory_limit="1KiB")
    with pytest.raises(ConfigError, match="was loaded with a limit of memory; load it without, to save it"):
        small.save(file.with_name("small.rlx"))


def test_a_model_from_a_prepared_file_is_saved_again(file: Path, tmp_path: Path) -> None:
    model = rlx.llm.load(file)
    model.save(tmp_path / "again.rlx")
    again = rlx.llm.load(tmp_path / "again.rlx")
    np.testing.assert_array_equal(again.logits("Hello"), model.logits("Hello"))
    assert again.prompt("Hi") == model.prompt("Hi") and again.source.tensors.mark == model.source.tensors.mark


def test_generations_continue_with_the_prepared_model(source: Path, file: Path, tmp_path: Path) -> None:
    with Engine(source) as first, Engine(file) as second:
        assert first._mark == second._mark
    with Engine(file) as first, Engine(source, activations="i8") as second:
        assert first._mark != second._mark


def test_encoders(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    config = {**encoders.CONFIGS["bert"], "num_hidden_layers": 1}
    encoders.write_folder(tmp_path, config, encoders.random_weights(config))
    encoders.write_modules(tmp_path, "max_tokens")
    write_tokenizer(tmp_path)
    model = rlx.llm.load(tmp_path)
    tokens = [3, 4, 5, 6]
    want = model.embed(tokens)
    model.save(tmp_path / "e.rlx")
    request.getfixturevalue("no_compiler")
    again = rlx.llm.load(tmp_path / "e.rlx")
    np.testing.assert_array_equal(again.embed(tokens), want)
    with Engine(tmp_path / "e.rlx") as engine:
        np.testing.assert_array_equal(engine.embed(tokens), want)
    assert again.source.pooling == model.source.pooling and again.source.pooling.mode == "max"


# -- what is fixed, and the commands


def test_what_was_prepared_stays(file: Path) -> None:
    for given, told in (
        ({"activations": "i8"}, "was prepared with activations f32, not i8; leave activations out"),
        ({"kv": "i8"}, "was prepared with kv f32, not i8"),
        (
            {"context": 32},
            "was prepared with context 128, not 32; leave context out, or prepare another",
        ),
        ({"precision": "bf16"}, "is compiled already; precision cannot be changed, compile it again"),
    ):
        with pytest.raises(ConfigError, match=told):
            rlx.llm.load(file, **given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="precision cannot be changed"):
        Engine(file, slots=2, precision="bf16")
    same = rlx.llm.load(file, activations="f32", kv="f32", context=128, threads=1)
    assert same.positions == 128


def test_commands(source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "small.rlx"
    arguments = [
        "compile",
        str(source),
        "-o",
        str(path),
        "--activations",
        "i8",
        "--kv",
        "i8",
        "--context",
        "40",
    ]
    assert main([*arguments, "--json"]) == 0
    about = json.loads(capfd.readouterr().out)
    assert about["bytes"] == path.stat().st_size and not about["stats"]["host_thunks"]
    model = rlx.llm.load(path)
    c = model.config
    assert (c.activations, c.kv, model.positions) == ("i8", "i8", 40)
    wanted = rlx.llm.load(source, activations="i8", kv="i8", context=40)
    np.testing.assert_array_equal(model.logits("Hello"), wanted.logits("Hello"))
    assert main(["chat", "--model", str(path), "--max-tokens", "5", "Hello"]) == 0
    assert capfd.readouterr().out.rstrip("\n") == wanted.chat("Hello", max_tokens=5).rstrip("\n")
    assert main(["explain", str(path), "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert main(["explain", str(source), "--activations", "i8", "--kv", "i8", "--json"]) == 0
    of_source = json.loads(capfd.readouterr().out)
    assert (told["activation_dtype"], told["kv_dtype"], told["context"]) == ("i8", "i8", 40)
    for same in ("weights", "kv_per_1000_tokens", "layers"):
        assert told[same] == of_source[same]
    assert main(["trust", "--verify", str(path)]) == 0
    assert "is trusted" in capfd.readouterr().out


def test_commands_refuse(source: Path, file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--model", str(file), "--activations", "i8", "Hello"]) == 1
    assert "prepare another file: rlx compile MODEL --activations i8 -o FILE" in capfd.readouterr().err
    assert main(["compile", "zoo:magika", "-o", str(tmp_path / "m.rlx"), "--kv", "i8"]) == 2
    assert "--kv is for language models, which zoo:magika is not" in capfd.readouterr().err
    graph = rlx.Graph("double")
    graph.output("y", graph.input("x", ("n",), "f32") * 2.0)
    rlx.compile(graph).save(tmp_path / "double.rlx")
    with pytest.raises(ModelImportError, match="is a compiled program, but no language model; run it with"):
        rlx.llm.load(tmp_path / "double.rlx")
    with pytest.raises(FormatError, match="a model is saved to a path"):
        rlx.llm.load(file).save(3)  # type: ignore[arg-type]


def test_a_plan_and_other_targets(source: Path, tmp_path: Path) -> None:
    assert main(["compile", str(source), "-o", str(tmp_path / "m.plan")]) == 0
    assert (tmp_path / "m.plan").read_text().startswith("rlx plan ")
    assert main(["compile", str(source), "-o", str(tmp_path / "m.rlx"), "--target", "aarch64"]) == 0
    opened = Artifact(tmp_path / "m.rlx")
    assert [one.targets for one in (opened, *opened.inner.values())] == [["aarch64"]] * 2
    model = rlx.llm.load(tmp_path / "m.rlx")
    assert "has code for aarch64, not for this machine and version" in model.program.notes[0]
    np.testing.assert_array_equal(model.logits("Hello"), rlx.llm.load(source).logits("Hello"))
    assert not opened.header["params"].keys() & opened.header["packed_params"].keys()
    assert opened.header["packed_params"]


# -- files of others


def with_settings(file: Path, path: Path, change: Any) -> Path:
    """A copy with other settings and right checksums."""
    header, parts, arrays = taken_apart(file, PROGRAM)
    settings = json.loads(parts[SHARED])
    change(settings)
    path.write_bytes(put_together(PROGRAM, header, {**parts, SHARED: json.dumps(settings).encode()}, arrays))
    return path


BAD = {
    "config": (lambda s: s["config"].update(layers=-1), "layers is -1"),
    "layers": (lambda s: s["config"].update(layers=2), "has no tensor 'blk.1.attn_norm.weight'"),
    "type": (lambda s: s["config"].update(width="64"), "'64' is not of type int"),
    "bool": (lambda s: s["config"].update(layers=True), "True is not of type int"),
    "field": (lambda s: s["config"].update(more=1), "does not have the fields of Config"),
    "missing": (lambda s: s["config"].pop("rope"), "does not have the fields of Config"),
    "rope": (lambda s: s["config"].update(rope={"base": 1}), "does not have the fields of Rope"),
    "kind": (lambda s: s["config"].update(architecture="mamba"), "its architecture is 'mamba'"),
    "activation": (lambda s: s["config"].update(activation="relu"), "its activation is 'relu'"),
    "kv": (lambda s: s["config"].update(kv="i4"), "its kv is 'i4'"),
    "epsilon": (lambda s: s["config"].update(eps=float("nan")), "its epsilon is nan"),
    "positions": (lambda s: s.update(positions=0), "0 of 128 tokens"),
    "pooling": (lambda s: s["pooling"].update(mode="all"), "pooling by 'all'"),
    "format": (lambda s: s["tensors"][0].__setitem__(2, "Q9"), "of 'Q9'"),
    "shape": (lambda s: s["tensors"][0].__setitem__(1, [1 << 40, 1 << 40]), "has the shape"),
    "row": (lambda s: s["tensors"][0].__setitem__(1, [2, 31]), "has the shape"),
    "tensor": (lambda s: s["tensors"].pop(0), "has no tensor|no value"),
    "other": (lambda s: s["tensors"].append(["x"]), "not a valid prepared model"),
    "width": (lambda s: s["config"].update(width=32), "has the shape"),
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.filterwarnings("ignore::rlx.runtime.store.artifact.ArtifactWarning")
def test_settings_that_lie(what: str, file: Path, tmp_path: Path) -> None:
    change, message = BAD[what]
    bad = with_settings(file, tmp_path / "bad.rlx", change)
    with pytest.raises(FormatError, match=message):
        rlx.llm.load(bad)


def test_settings_are_signed(file: Path, tmp_path: Path) -> None:
    """Code for a context of 128 tokens does not run with settings that say less, or more."""
    bad = with_settings(file, tmp_path / "bad.rlx", lambda s: s.update(mark="0" * 64))
    with pytest.warns(ArtifactWarning, match="is not signed by this user"):
        model = rlx.llm.load(bad)
    np.testing.assert_array_equal(model.logits("Hello"), rlx.llm.load(file).logits("Hello"))


def test_a_program_beside_the_first_says_nothing_of_arrays(file: Path, tmp_path: Path) -> None:
    """Its signature must not be checked with another digest of arrays than the file has."""
    header, parts, arrays = taken_apart(file, PROGRAM)
    for key, value in (("array_sha256", "0" * 64), ("params", {}), ("arrays", [])):
        inner = {name: {**about, key: value} for name, about in header["inner"].items()}
        (tmp_path / "bad.rlx").write_bytes(put_together(PROGRAM, {**header, "inner": inner}, parts, arrays))
        with pytest.raises(FormatError, match="no sound inner"):
            Engine(tmp_path / "bad.rlx")


def test_changed_weights(file: Path, tmp_path: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-20000] ^= 1
    bad = tmp_path / "bad.rlx"
    bad.write_bytes(content)
    for opened in (rlx.llm.load, Engine):
        with pytest.raises(FormatError, match="its weights do not match their checksum"):
            opened(bad)


def test_texts_that_unpack_to_more_than_a_file_holds(file: Path, tmp_path: Path) -> None:
    header, parts, arrays = taken_apart(file, PROGRAM)
    bomb = {**parts, "0.plan.deflated": zlib.compress(bytes(1 << 26))}
    bomb.pop("0.plan", None)
    (tmp_path / "bad.rlx").write_bytes(put_together(PROGRAM, header, bomb, arrays))
    with pytest.raises(FormatError, match=r"'0\.plan' is not text that was compressed"):
        Artifact(tmp_path / "bad.rlx").text("0.plan")


def mutants(content: bytes, count: int) -> Any:
    rng = np.random.default_rng(5)
    for _ in range(count):
        data = bytearray(content)
        at = int(rng.integers(len(data)))
        match rng.integers(4):
            case 0:
                data[at] ^= 1 << int(rng.integers(8))
            case 1:
                data[at : at + 8] = struct.pack("<Q", 2**64 - 1)
            case 2:
                del data[at:]
            case _:
                del data[at : at + 4096]
        yield bytes(data)


@pytest.mark.filterwarnings("ignore::rlx.runtime.store.artifact.ArtifactWarning")
def test_damaged_files(file: Path, tmp_path: Path) -> None:
    """Any byte changed, or the end cut off: a FormatError, or the same bits, if nobody reads that byte."""
    want, refused = rlx.llm.load(file).logits("Hello"), 0
    bad = tmp_path / "bad.rlx"
    for data in mutants(file.read_bytes(), 60):
        bad.unlink(missing_ok=True)
        bad.write_bytes(data)
        try:
            found = rlx.llm.load(bad).logits("Hello")
        except FormatError as error:
            assert "bad.rlx" in str(error)
            refused += 1
        else:
            np.testing.assert_array_equal(found, want)
    assert refused > 40


@pytest.mark.filterwarnings("ignore::rlx.runtime.store.artifact.ArtifactWarning")
def test_parts_with_right_checksums(file: Path, tmp_path: Path) -> None:
    """Whoever makes a file can make its checksums right: parts are mutated, then put together."""
    header, parts, arrays = taken_apart(file, PROGRAM)
    rng, bad, refused = np.random.default_rng(6), tmp_path / "bad.rlx", 0
    own = [name for name in parts if name.startswith("about/")]
    for number in range(60):
        name = own[number % len(own)]
        content = next(iter(mutants(parts[name], 1))) if number < len(own) else _changed(parts[name], rng)
        bad.unlink(missing_ok=True)
        bad.write_bytes(put_together(PROGRAM, header, {**parts, name: content}, arrays))
        try:
            source = open_source(bad)
            assert source.tokenizer.decode(source.tokenizer.encode("Hello", control=True)) is not None
            source.template(messages=[{"role": "user", "content": "hi"}])
        except RlxError as error:
            assert len(str(error)) > 20
            refused += 1
    assert refused > 20


def _changed(content: bytes, rng: np.random.Generator) -> bytes:
    data = bytearray(content)
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(len(data)))
        data[at : at + int(rng.integers(1, 5))] = rng.bytes(int(rng.integers(0, 5)))
    return bytes(data)


def test_all_fields_come_back() -> None:
    """Every config of the tests' models, through JSON; what an earlier version did not write is as usual."""
    for name, config in tiny.CONFIGS.items():
        found = from_hf("config.json", config)
        given = json.loads(json.dumps(asdict(found)))
        assert record(Config, given) == found, name
        given.pop("gate_slope")
        assert record(Config, given).gate_slope == 1.0


def test_a_file_of_another_kind_is_not_taken_for_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "onnx.rlx").write_bytes(b"\x08\x08\x12\x07pytorch")
    assert main(["explain", str(tmp_path / "onnx.rlx")]) == 1
    assert "rlx files begin with the bytes RLXPROG" in capfd.readouterr().err
    (tmp_path / "x.rlx").write_bytes(b"RLXPROG\0" + os.urandom(100))
    with pytest.raises(FormatError, match=r"x\.rlx"):
        PreparedFile(tmp_path / "x.rlx")
