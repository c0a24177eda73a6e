"""Decoders of every architecture against NumPy in f64, from folders and from GGUF files."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tiny_decoders as tiny

import rlx
from rlx.llm import config as configs
from rlx.llm.decoder import build
from rlx.llm.gguf import open_gguf
from rlx.llm.hf import HfFolder
from rlx.llm.names import renamed
from rlx.runtime.program import CompiledProgram

TOKENS = [3, 17, 41, 5, 90, 17, 2, 66, 8, 31, 4, 71]


def of_folder(path: Path) -> CompiledProgram:
    folder = HfFolder(path)
    config = configs.from_hf(str(path), folder.config)
    tensors = renamed(folder.tensors)
    program = rlx.compile(build(config, tensors, 32))
    assert tensors.asked == set(folder_names(folder)), "every weight is used"
    return program


def folder_names(folder: HfFolder) -> list[str]:
    return list(renamed(folder.tensors))


def of_gguf(path: Path) -> CompiledProgram:
    file = open_gguf(path)
    program = rlx.compile(build(configs.from_gguf(file), file.tensors, 32))
    assert file.tensors.asked == set(file.tensors), "every weight is used"
    return program


def in_parts(program: CompiledProgram, *sizes: int) -> np.ndarray:
    """Logits of all tokens, which come in parts of these sizes."""
    stream, past, found = program.stream(), 0, []
    for size in sizes:
        tokens = np.array(TOKENS[past : past + size])
        out = stream.step({"past": past, "tokens": tokens, "wanted": np.arange(size)})
        found.append(out["logits"])
        past += size
    return np.concatenate(found)


def check(program: CompiledProgram, want: np.ndarray) -> None:
    for sizes in ((len(TOKENS),), (5, 1, 1, len(TOKENS) - 7)):
        got = in_parts(program, *sizes)
        assert np.abs(got - want).max() < 1e-4 * max(np.abs(want).max(), 1)


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_folders(name: str, tmp_path: Path) -> None:
    config = tiny.CONFIGS[name]
    weights = tiny.random_weights(config)
    program = of_folder(tiny.write_folder(tmp_path, config, weights))
    check(program, tiny.logits(config, weights, TOKENS))


def test_a_folder_with_experts_in_blocks(tmp_path: Path) -> None:
    """As gpt-oss is published: codes of four bits in one tensor, exponents in another."""
    config = tiny.CONFIGS["gpt_oss"]
    stored, rounded = tiny.in_blocks(tiny.random_weights(config))
    program = of_folder(tiny.write_folder(tmp_path, config, stored))
    assert not program.stats["host_thunks"]
    check(program, tiny.logits(config, rounded, TOKENS))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_folders_in_half_precision(dtype: type, tmp_path: Path) -> None:
    config = tiny.CONFIGS["llama"]
    weights = tiny.random_weights(config)
    program = of_folder(tiny.write_folder(tmp_path, config, weights, dtype))
    rounded = {name: value.astype(dtype).astype(np.float32) for name, value in weights.items()}
    check(program, tiny.logits(config, rounded, TOKENS))


# Gemma 3 has its own pattern of layers and base of local angles, which files do not state; neither do they
# say that shares are those of all experts, or where gates are clamped.
GGUF = [name for name in tiny.CONFIGS if name not in ("gemma3", "qwen3moe_mixed", "gpt_oss_clamped")]
SAMPLE = {("llama", "Q4_0"), ("qwen3", "F32"), ("qwen2", "Q4_1"), ("gpt2", "Q8_0")}
SAMPLE |= {("gpt_oss", "F32"), ("gpt_oss", "MXFP4")}
SAMPLE |= {("qwen3moe", "F32"), ("qwen3moe", "Q4_0"), ("qwen3moe", "Q5_1")}


def gguf_cases() -> list[object]:
    cases = [(name, kind) for name in GGUF for kind in ("F32", "Q4_0", "Q4_1", "Q5_1", "Q8_0", "BF16")]
    cases.append(("gpt_oss", "MXFP4"))
    return [
        pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.slow, id="-".join(case))
        for case in cases
    ]


@pytest.mark.parametrize(("name", "kind"), gguf_cases())
def test_gguf_files(name: str, kind: str, tmp_path: Path) -> None:
    config = tiny.CONFIGS[name]
    rounded = tiny.write_gguf(tmp_path / "m.gguf", config, tiny.random_weights(config), kind)
    check(of_gguf(tmp_path / "m.gguf"), tiny.logits(config, rounded, TOKENS))


def test_gemma3_as_its_gguf_files_are(tmp_path: Path) -> None:
    config = {**tiny.CONFIGS["gemma3"], "sliding_window_pattern": 6, "rope_local_base_freq": 10000.0}
    config |= {"num_hidden_layers": 6, "rope_theta": 40000.0}
    rounded = tiny.write_gguf(tmp_path / "m.gguf", config, tiny.random_weights(config))
    check(of_gguf(tmp_path / "m.gguf"), tiny.logits(config, rounded, TOKENS))


def test_rotary_positions_as_newer_configs_have_them() -> None:
    """Newer files keep these values in one place, for Gemma 3 by type of layer."""

    def newer(name: str, **values: object) -> dict[str, object]:
        old = ("rope_theta", "rope_scaling", "rope_local_base_freq", "sliding_window_pattern")
        return {**{k: v for k, v in tiny.CONFIGS[name].items() if k not in old}, **values}

    plain = {"rope_theta": 10000.0, "rope_type": "default"}
    scaled = {**tiny.CONFIGS["llama3"]["rope_scaling"], "rope_theta": 10000.0}
    both = {"full_attention": plain, "sliding_attention": {**plain, "rope_theta": 500.0}}
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    for name, config in (
        ("llama", newer("llama", rope_parameters=plain)),
        ("llama3", newer("llama3", rope_parameters=scaled)),
        ("gemma3", newer("gemma3", rope_parameters=both, layer_types=types)),
    ):
        assert configs.from_hf("x", config) == configs.from_hf("x", tiny.CONFIGS[name])


def test_factors_of_short_contexts(tmp_path: Path) -> None:
    """Phi-3 with long contexts has two lists of factors; what those of short ones serve is offered."""
    short = [1.0, 1.5, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0]
    given = {**tiny.CONFIGS["phi3"], "original_max_position_embeddings": 16}
    given["rope_scaling"] = {"type": "longrope", "short_factor": short, "long_factor": [9.0] * 8}
    config = configs.from_hf("x", given)
    assert config.context == 16 and config.rope is not None and config.rope.factors == tuple(short)
    assert config.rope.magnitude == pytest.approx(np.sqrt(1 + np.log(4) / np.log(16)))
