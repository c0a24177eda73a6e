"""Language models of every architecture against the package transformers, from folders that it saves.

It needs torch and transformers, which no extra of RLX brings. Without them these tests are skipped, unless
RLX_REQUIRE names transformers. `pytest -m slow -s tests/conformance/test_transformers.py` prints every error.
The default tests compare with NumPy in f64 (`tests/models/tiny_decoders.py`), which is checked here, too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_decoders as tiny
import tiny_encoders

import rlx

TOKENS = [3, 17, 41, 5, 90, 17, 2, 66, 8, 31, 4, 71, 12, 55, 30, 9, 77, 60, 21, 44]
LIMIT = 1e-4
_TRAINED = {"sliding_window_pattern": 6, "rope_local_base_freq": 10000.0, "num_hidden_layers": 6}
GGUF = {  # as GGUF files can say it: see test_decoder.py
    **{
        name: c
        for name, c in tiny.CONFIGS.items()
        if name not in ("gemma3", "qwen3moe_mixed", "gpt_oss_clamped")
    },
    "gemma3": {**tiny.CONFIGS["gemma3"], **_TRAINED, "rope_theta": 40000.0},
}

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _needs_transformers(require: Callable[[str], None]) -> None:
    require("transformers")


def given(config: dict[str, Any]) -> Any:
    """The config as the package has it; it wants eager attention, which knows soft caps."""
    import transformers

    values = {k: v for k, v in config.items() if k != "model_type"}
    made = transformers.AutoConfig.for_model(config["model_type"], **values)
    made._attn_implementation = made._experts_implementation = "eager"
    return made


def fused(state: dict[str, Any]) -> dict[str, Any]:
    """Experts as the package keeps them: all of a layer in one tensor, gates and what they multiply too."""
    import torch

    found = {name: value for name, value in state.items() if ".experts." not in name}
    for name in [name for name in state if ".experts.0.gate_proj" in name]:
        at = name.removesuffix("0.gate_proj.weight")
        count = sum(1 for other in state if other.startswith(at) and other.endswith("gate_proj.weight"))
        own = [
            [state[f"{at}{e}.{part}_proj.weight"] for part in ("gate", "up", "down")] for e in range(count)
        ]
        found[f"{at}gate_up_proj"] = torch.stack([torch.cat(parts[:2]) for parts in own])
        found[f"{at}down_proj"] = torch.stack([parts[2] for parts in own])
    return found


def model_of(config: dict[str, Any], weights: tiny.Weights) -> Any:
    """A model of the package in f64 with these weights."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_config(given(config)).double().eval()
    prefix = "transformer." if config["model_type"] == "gpt2" else ""
    state = {f"{prefix}{key}": torch.from_numpy(value).double() for key, value in weights.items()}
    if config.get("num_experts"):
        state = fused(state)
    missing, unknown = model.load_state_dict(state, strict=False)
    assert not unknown and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model


def logits_of(model: Any) -> np.ndarray:
    import torch

    with torch.no_grad():
        found: np.ndarray = model(torch.tensor([TOKENS])).logits[0].numpy()
    return found


def compare(what: str, got: np.ndarray, want: np.ndarray) -> None:
    error = float(np.abs(got - want).max())
    print(f"\n{what}: largest error {error:.2e}, of numbers up to {np.abs(want).max():.2f}")
    assert got.shape == want.shape and error < LIMIT


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_the_reference(name: str) -> None:
    config = tiny.CONFIGS[name]
    weights = tiny.random_weights(config)
    want = logits_of(model_of(config, weights))
    assert np.abs(tiny.logits(config, weights, TOKENS) - want).max() < 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_saved_folders(name: str, tmp_path: Path) -> None:
    """The folder that the package writes, config and weights, is all that RLX gets."""
    config = tiny.CONFIGS[name]
    model = model_of(config, tiny.random_weights(config))
    want = logits_of(model)
    model.float().save_pretrained(tmp_path)
    compare(f"{name}, folder", rlx.llm.load(tmp_path).logits(TOKENS), want)


@pytest.mark.parametrize("name", GGUF)
def test_gguf_files(name: str, tmp_path: Path) -> None:
    config = GGUF[name]
    weights = tiny.random_weights(config)
    tiny.write_gguf(tmp_path / "m.gguf", config, weights)
    compare(
        f"{name}, GGUF",
        rlx.llm.load(tmp_path / "m.gguf").logits(TOKENS),
        logits_of(model_of(config, weights)),
    )


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """gpt-oss as it is published, against the package with the same numbers."""
    config = tiny.CONFIGS["gpt_oss"]
    stored, rounded = tiny.in_blocks(tiny.random_weights(config))
    want = logits_of(model_of(config, rounded))
    compare(
        "gpt_oss, MXFP4 folder",
        rlx.llm.load(tiny.write_folder(tmp_path, config, stored)).logits(TOKENS),
        want,
    )
    tiny.write_gguf(tmp_path / "m.gguf", config, tiny.random_weights(config), "MXFP4")
    compare("gpt_oss, MXFP4 GGUF", rlx.llm.load(tmp_path / "m.gguf").logits(TOKENS), want)


@pytest.mark.parametrize("name", tiny_encoders.CONFIGS)
def test_encoders(name: str, tmp_path: Path) -> None:
    """Texts of several lengths in one batch, which the package pads and masks."""
    import torch
    import transformers

    config = tiny_encoders.CONFIGS[name]
    weights = tiny_encoders.random_weights(config)
    model = transformers.AutoModel.from_config(given(config), add_pooling_layer=False).double().eval()
    missing, unknown = model.load_state_dict(
        {key: torch.from_numpy(value).double() for key, value in weights.items()}, strict=False
    )
    assert not unknown and not missing
    texts = [TOKENS[:n] for n in (1, 7, 20, 12)]
    ids, mask = np.full((4, 20), config["pad_token_id"]), np.zeros((4, 20), np.int64)
    for row, (seen, tokens) in enumerate(zip(mask, texts, strict=True)):
        ids[row, : len(tokens)], seen[: len(tokens)] = tokens, 1
    with torch.no_grad():
        hidden = model(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask))
    want = hidden.last_hidden_state.numpy()
    model.float().save_pretrained(tmp_path)
    places = [tmp_path]
    if name != "roberta":  # GGUF files of RoBERTa have positions cut off, which is up to converters
        tiny_encoders.write_gguf(tmp_path / "m.gguf", config, weights)
        places.append(tmp_path / "m.gguf")
    for place in places:
        loaded = rlx.llm.load(place)
        for tokens, padded in zip(texts, want, strict=True):
            got = loaded.state.every(tokens, "hidden")
            compare(f"{name}, {place.suffix or 'folder'}, {len(tokens)} tokens", got, padded[: len(tokens)])


def test_yarn_as_other_models_have_it(tmp_path: Path) -> None:
    """Limits rounded to whole pairs, as is usual; gpt-oss does not."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 2.0}
    config = {**tiny.CONFIGS["qwen2"], "rope_scaling": scaling}
    model = model_of(config, tiny.random_weights(config))
    want = logits_of(model)
    model.float().save_pretrained(tmp_path)
    compare("qwen2 with yarn, folder", rlx.llm.load(tmp_path).logits(TOKENS), want)
