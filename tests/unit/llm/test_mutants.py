"""Damaged models, from the file to the graph: every failure is an error of RLX, never a crash."""

from __future__ import annotations

import json
import resource
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny_decoders as tiny

from rlx.errors import RlxError
from rlx.llm.decoder import build
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
        build(source.config, source.tensors, min(source.config.context, 8), values=False)
        tokenizer = source.tokenizer
        tokens = tokenizer.encode("<|im_start|>Hello wörld 12", control=True)
        tokenizer.decode(tokens)
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
    from tokenizers import Tokenizer, models  # heavy

    config = {**tiny.CONFIGS["llama"], "num_hidden_layers": 1}
    tiny.write_folder(tmp_path, config, tiny.random_weights(config))
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


@pytest.mark.slow
def test_many_gguf_files(gguf_file: Path) -> None:
    check(gguf_file, gguf_file, 5000, 3500)


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_many_folders(file: str, folder: Path) -> None:
    check(folder, folder / file, 1250, FILES[file])
