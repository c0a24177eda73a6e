"""Damaged models, from the file to the graph: every failure is an error of RLX, never a crash."""

from __future__ import annotations

import json
import resource
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_decoders as tiny
import tiny_encoders

from rlx.errors import RlxError
from rlx.llm.decoder import build
from rlx.llm.encoders.graph import build_encoder
from rlx.llm.source import open_source

CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + m['content'] | trim }}{% endfor %}"
NUMBERS = (0, 1, 2**31, 2**32 - 1, 2**64 - 1)


def mutants(content: bytes, count: int, head: int, seed: int = 1) -> Iterator[bytes]:
    """Copies with a few changes each; most of them in the first `head` bytes, which say where all else is."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        data = bytearray(content)
        for _ in range(int(rng.integers(1, 4))):
            end = head if rng.random() < 0.9 else len(data)
            at = int(rng.integers(max(min(end, len(data)), 1)))
            choice = rng.integers(5)
            if choice <= 1:
                data[at : at + 1] = bytes([rng.integers(256)])
            elif choice == 2:
                data[at : at + 8] = struct.pack("<Q", NUMBERS[rng.integers(len(NUMBERS))])
            elif choice == 3:
                del data[at : at + int(rng.integers(1, 9))]
            else:
                data = data[:at]
        yield bytes(data)


def use(path: Path) -> None:
    """Everything that is done with a model, short of computing with it."""
    with np.errstate(all="ignore"):
        source = open_source(path)
        positions = min(source.positions(None), 8)
        if source.config.is_encoder:
            build_encoder(source.config, source.tensors, positions, 64, 1024, values=False)
        else:
            build(source.config, source.tensors, positions, values=False)
        tokenizer = source.tokenizer
        tokens = tokenizer.encode("<|im_start|>Hello wörld 12", control=True)
        tokenizer.decode(tokens)
        if source.config.is_encoder:
            source.pooling(np.ones((3, 4), np.float32))
        else:
            source.template(messages=[{"role": "user", "content": " hi "}])
        for name in source.tensors:
            source.tensors[name].array()


@contextmanager
def little_memory() -> Iterator[None]:
    """Not even a GiB more of address space: a size that a file only claims must not be allocated."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 30), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def check(model: Path, file: Path, count: int, head: int) -> None:
    """Use a model with mutants of one of its files."""
    use(model)
    with little_memory():
        check_mutants(model, file, count, head)


def check_mutants(model: Path, file: Path, count: int, head: int) -> None:
    content, works = file.read_bytes(), 0
    for data in mutants(content, count, head):
        file.unlink()  # a map of the file before keeps its bytes
        file.write_bytes(data)
        try:
            use(model)
            works += 1
        except RlxError as error:
            assert len(str(error)) > 20
    assert works < count


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    config = {**tiny.CONFIGS["qwen2"], "num_hidden_layers": 1}
    tiny.write_gguf(path, config, tiny.random_weights(config), "Q4_1", tokenizer)
    return path


def tokenizer(writer: gguf.GGUFWriter) -> None:
    words = ["<|im_start|>", "<|im_end|>", *map(chr, range(33, 125)), "\u0120", "He"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(words)
    writer.add_token_types([3, 3, *[1] * (len(words) - 2)])
    writer.add_token_merges(["H e"])
    writer.add_eos_token_id(1)
    writer.add_chat_template(CHATML)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {**tiny.CONFIGS["llama"], "num_hidden_layers": 1}
    return write_folder(tmp_path, config, tiny.random_weights(config))


def write_folder(tmp_path: Path, config: dict[str, Any], weights: tiny.Weights) -> Path:
    from tokenizers import Tokenizer, models  # heavy

    tiny.write_folder(tmp_path, config, weights)
    words = ["<|im_start|>", "<|im_end|>", *map(chr, range(32, 126))]
    Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [])).save(str(tmp_path / "tokenizer.json"))
    about = {"eos_token": "<|im_end|>", "chat_template": CHATML}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    return tmp_path


def test_gguf(gguf_file: Path) -> None:
    check(gguf_file, gguf_file, 150, 3500)


FILES = {"config.json": 700, "model.safetensors": 1500, "tokenizer.json": 2000, "tokenizer_config.json": 200}


@pytest.mark.parametrize("file", FILES)
def test_folders(file: str, folder: Path) -> None:
    check(folder, folder / file, 60, FILES[file])


# -- gpt-oss: experts in blocks, sinks, scaled positions


GPT_OSS = {**tiny.CONFIGS["gpt_oss"], "num_hidden_layers": 1}


@pytest.fixture
def experts(tmp_path: Path) -> Path:
    return write_folder(tmp_path, GPT_OSS, tiny.in_blocks(tiny.random_weights(GPT_OSS))[0])


@pytest.fixture
def experts_file(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    tiny.write_gguf(path, GPT_OSS, tiny.random_weights(GPT_OSS), "MXFP4", tokenizer)
    return path


EXPERT_FILES = {"config.json": 900, "model.safetensors": 2200}


@pytest.mark.parametrize("file", EXPERT_FILES)
def test_experts_in_folders(file: str, experts: Path) -> None:
    check(experts, experts / file, 60, EXPERT_FILES[file])


def test_experts_in_gguf_files(experts_file: Path) -> None:
    check(experts_file, experts_file, 60, 3500)


def test_blocks_that_do_not_fit(tmp_path: Path) -> None:
    """Shapes and types of codes and exponents, one by one; what is missing is named."""
    stored, _ = tiny.in_blocks(tiny.random_weights(GPT_OSS))
    at = "model.layers.0.mlp.experts.gate_up_proj"
    codes, powers = stored[f"{at}_blocks"], stored[f"{at}_scales"]
    for name, value, message in (
        (f"{at}_blocks", codes[..., :8], r"MXFP4 has bytes \[experts, rows, groups, 16\]"),
        (f"{at}_blocks", codes[0], "MXFP4 has bytes"),
        (f"{at}_blocks", codes.astype(np.float32), "MXFP4 has bytes"),
        (f"{at}_scales", powers[:, :-1], "MXFP4 has bytes"),
        (f"{at}_scales", powers.astype(np.float32), "MXFP4 has bytes"),
        (f"{at}_scales", None, "blocks of experts without their tensor 'gate_up_proj_scales'"),
        (f"{at}_bias", powers, "is of U8; RLX reads F32, F16, BF16"),
        (f"{at}_bias", np.ones(7, np.float32), "has the shape .7., not 2 axes"),
        (f"{at}_blocks", codes[:, :-2], "MXFP4 has bytes"),
        (f"{at.replace('gate_up', 'down')}_blocks", None, "no tensor 'blk.0.ffn_down_exps.weight'"),
        (
            "model.layers.0.self_attn.sinks",
            np.ones(5, np.float32),
            r"'blk.0.attn_sinks.weight' has the shape \[5\]",
        ),
        ("model.layers.0.mlp.router.weight", powers, "is of U8"),
    ):
        given = {**stored, name: value}
        folder = write_folder(tmp_path / "model", GPT_OSS, {n: w for n, w in given.items() if w is not None})
        with pytest.raises(RlxError, match=message):
            use(folder)


# -- encoders


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    config = {**tiny_encoders.CONFIGS["roberta"], "num_hidden_layers": 1}
    tiny_encoders.write_folder(tmp_path, config, tiny_encoders.random_weights(config))
    tiny_encoders.write_modules(tmp_path, "mean_tokens", "models.Normalize")
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 64, "do_lower_case": false}')
    return tmp_path


@pytest.fixture
def encoder_file(tmp_path: Path) -> Path:
    config = {**tiny_encoders.CONFIGS["bert"], "num_hidden_layers": 1}
    tiny_encoders.write_gguf(tmp_path / "model.gguf", config, tiny_encoders.random_weights(config))
    return tmp_path / "model.gguf"


ENCODER_FILES = {
    "config.json": 300, "model.safetensors": 2000, "tokenizer.json": 2000, "modules.json": 400,
    "1_Pooling/config.json": 60, "sentence_bert_config.json": 50,
}  # fmt: skip


@pytest.mark.parametrize("file", ENCODER_FILES)
def test_encoders(file: str, encoder: Path) -> None:
    check(encoder, encoder / file, 60, ENCODER_FILES[file])


def test_encoders_in_gguf_files(encoder_file: Path) -> None:
    check(encoder_file, encoder_file, 60, 3000)


@pytest.mark.slow
def test_many_gguf_files(gguf_file: Path) -> None:
    check(gguf_file, gguf_file, 5000, 3500)


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_many_folders(file: str, folder: Path) -> None:
    check(folder, folder / file, 1250, FILES[file])


@pytest.mark.slow
@pytest.mark.parametrize("file", EXPERT_FILES)
def test_many_experts_in_folders(file: str, experts: Path) -> None:
    check(experts, experts / file, 1250, EXPERT_FILES[file])


@pytest.mark.slow
def test_many_experts_in_gguf_files(experts_file: Path) -> None:
    check(experts_file, experts_file, 2500, 3500)


@pytest.mark.slow
def test_many_encoders_in_gguf_files(encoder_file: Path) -> None:
    check(encoder_file, encoder_file, 2500, 3000)


@pytest.mark.slow
@pytest.mark.parametrize("file", ENCODER_FILES)
def test_many_encoders(file: str, encoder: Path) -> None:
    check(encoder, encoder / file, 1250, ENCODER_FILES[file])
