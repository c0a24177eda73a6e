"""Rotary pairs of GGUF files are read as halves: the same logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_decoders as tiny

import rlx
from rlx.llm import config as configs
from rlx.llm.decoder import build
from rlx.llm.gguf import open_gguf
from rlx.llm.source import open_source
from rlx.llm.unwoven import unwoven

TOKENS = np.random.default_rng(0).integers(2, 95, 20)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"])
def test_halves_give_the_logits_of_pairs(kind: str, tmp_path: Path) -> None:
    path, config = tmp_path / "model.gguf", tiny.CONFIGS["llama"]
    weights = tiny.write_gguf(path, config, tiny.random_weights(config), kind)
    file = open_gguf(path)
    pairs, source = configs.from_gguf(file), open_source(path)
    assert pairs.rope is not None and pairs.rope.interleaved
    assert source.config.rope is not None and not source.config.rope.interleaved
    feed = {"past": 0, "tokens": TOKENS, "wanted": np.arange(20)}
    wanted = tiny.logits(config, weights, TOKENS.tolist())
    for about, tensors in ((pairs, file.tensors), (source.config, source.tensors)):
        found = rlx.compile(build(about, tensors, 64)).stream().step(feed)["logits"]
        assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max()


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_other_models_stay_as_they_are(name: str, tmp_path: Path) -> None:
    path, config = tmp_path / "model.gguf", tiny.CONFIGS[name]
    tiny.write_gguf(path, config, tiny.random_weights(config))
    file = open_gguf(path)
    about = configs.from_gguf(file)
    assert unwoven(about, file.tensors) == (about, file.tensors)
