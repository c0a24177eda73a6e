"""The computation that language models are compared with is that of the package transformers.

It needs torch, which no extra of RLX brings: install torch and transformers to run it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny_decoders as tiny

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOKENS = [3, 17, 41, 5, 90, 17, 2, 66, 8, 31, 4, 71]


def given(config: dict[str, Any]) -> Any:
    """The config as the package has it; it wants eager attention, which knows soft caps."""
    values = {k: v for k, v in config.items() if k != "model_type"}
    made = transformers.AutoConfig.for_model(config["model_type"], **values)
    made._attn_implementation = "eager"
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_logits_are_those_of_transformers(name: str) -> None:
    config = tiny.CONFIGS[name]
    weights = tiny.random_weights(config)
    model = transformers.AutoModelForCausalLM.from_config(given(config)).double().eval()
    prefix = "transformer." if name == "gpt2" else ""
    state = {f"{prefix}{key}": torch.from_numpy(value).double() for key, value in weights.items()}
    missing, unknown = model.load_state_dict(state, strict=False)
    assert not unknown and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    with torch.no_grad():
        want = model(torch.tensor([TOKENS])).logits[0].numpy()
    got = tiny.logits(config, weights, TOKENS)
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()
