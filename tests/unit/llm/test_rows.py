"""The bits of a token do not depend on how many are computed with it, whatever the weights are stored as."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tiny_decoders as tiny

import rlx
from machines import executable, on_targets
from rlx.llm import config as configs
from rlx.llm.decoder import build_paged
from rlx.llm.gguf import open_gguf
from rlx.llm.hf import HfFolder
from rlx.llm.names import renamed
from rlx.runtime.program import CompiledProgram

COUNT = 37
TOKENS = np.random.default_rng(0).integers(2, 95, COUNT)
PARTS = ([COUNT], [2] * 18 + [1], [3] * 12 + [1], [5] * 7 + [2], [16, 16, 5])
FOLDERS = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


def program_of(
    kind: str, config: dict[str, Any], folder: Path, target: str, activations: str = "f32", kv: str = "f32"
) -> CompiledProgram:
    weights = tiny.random_weights(config)
    if kind in FOLDERS:
        opened = HfFolder(tiny.write_folder(folder, config, weights, FOLDERS[kind]))
        about, tensors = configs.from_hf(str(folder), opened.config), renamed(opened.tensors)
    else:
        tiny.write_gguf(folder / "model.gguf", config, weights, kind)
        file = open_gguf(folder / "model.gguf")
        about, tensors = configs.from_gguf(file), file.tensors
    about = replace(about, activations=activations, kv=kv)
    return rlx.compile(build_paged(about, tensors, 64, 64, 50), target=target, threads=1)


def in_parts(program: CompiledProgram, parts: list[int]) -> list[np.ndarray]:
    """Logits and features of all tokens, as bits."""
    stream, first, found = program.stream(sizes={"pages": 1}), 0, []
    for n in parts:
        at, zeros = np.arange(first, first + n), np.zeros(n, np.int64)
        feed = {"tokens": TOKENS[at], "at": at, "slots": zeros, "places": at, "table": zeros[:1, None]}
        sizes = {"new": n, "answers": n, "features": n}
        out = stream.step({**feed, **sizes, "wanted": np.arange(n), "pooled": np.arange(n)})
        found.append([out[name].view(np.uint32) for name in ("logits", "hidden")])
        first += n
    return [np.concatenate(both) for both in zip(*found, strict=True)]


def check(program: CompiledProgram) -> None:
    assert not program.stats["host_thunks"]
    want = in_parts(program, [1] * COUNT)
    for sizes in PARTS:
        for got, alone in zip(in_parts(program, sizes), want, strict=True):
            np.testing.assert_array_equal(got, alone, f"parts {sizes}")


@on_targets(executable("x86-64-v4", "x86-64-v3", "x86-64"))
@pytest.mark.parametrize("kind", [*FOLDERS, "Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_weights(kind: str, tmp_path: Path, target: Any) -> None:
    config = {**tiny.CONFIGS["llama"], "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    check(program_of(kind, config, tmp_path, target.name))


@on_targets(executable())
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_rounded_keys_and_values(name: str, tmp_path: Path, target: Any) -> None:
    program = program_of("f32", tiny.CONFIGS[name], tmp_path, target.name, kv="i8")
    check(program)
    lossless = in_parts(program_of("f32", tiny.CONFIGS[name], tmp_path, target.name), [COUNT])[0]
    rounded, wanted = in_parts(program, [COUNT])[0].view(np.float32), lossless.view(np.float32)
    assert 0 < np.abs(rounded - wanted).max() / np.abs(wanted).max() < 0.05


@on_targets(executable())
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_rounded_activations(kind: str, tmp_path: Path, target: Any) -> None:
    config = {**tiny.CONFIGS["llama"], "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    program = program_of(kind, config, tmp_path, target.name, activations="i8")
    check(program)
    lossless = in_parts(program_of(kind, config, tmp_path, target.name), [COUNT])[0].view(np.float32)
    rounded = in_parts(program, [COUNT])[0].view(np.float32)
    apart = np.abs(rounded - lossless).max() / np.abs(lossless).max()
    assert 1e-4 < apart < 0.05, "it rounds, and not more than that"


@on_targets(executable("x86-64-v4", "x86-64-v3", "x86-64"))
@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_architectures(name: str, tmp_path: Path, target: Any) -> None:
    program = program_of("f32", tiny.CONFIGS[name], tmp_path, target.name)
    check(program)
    want = tiny.logits(tiny.CONFIGS[name], tiny.random_weights(tiny.CONFIGS[name]), TOKENS.tolist())
    got = in_parts(program, [COUNT])[0].view(np.float32)
    assert np.abs(got - want).max() < 1e-4 * max(np.abs(want).max(), 1)
