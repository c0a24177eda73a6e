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
    made._attn_implementation = made._experts_implementation = "eager"
    return made


def fused(state: dict[str, Any]) -> dict[str, Any]:
    """Experts as the package keeps them: all of a layer in one tensor, gates and what they multiply too."""
    found = {name: value for name, value in state.items() if ".experts." not in name}
    for name in [name for name in state if ".experts.0.gate_proj" in name]:
        count = sum(
            1
            for other in state
            if other.endswith("gate_proj.weight") and other.startswith(name.split("0.gate")[0])
        )
        own = [
            [state[name.replace("experts.0.gate", f"experts.{e}.{part}")] for part in ("gate", "up", "down")]
            for e in range(count)
        ]
        at = name.removesuffix("0.gate_proj.weight")
        found[f"{at}gate_up_proj"] = torch.stack([torch.cat(parts[:2]) for parts in own])
        found[f"{at}down_proj"] = torch.stack([parts[2] for parts in own])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_logits_are_those_of_transformers(name: str) -> None:
    config = tiny.CONFIGS[name]
    weights = tiny.random_weights(config)
    model = transformers.AutoModelForCausalLM.from_config(given(config)).double().eval()
    prefix = "transformer." if name == "gpt2" else ""
    state = {f"{prefix}{key}": torch.from_numpy(value).double() for key, value in weights.items()}
    if config.get("num_experts"):
        state = fused(state)
    missing, unknown = model.load_state_dict(state, strict=False)
    assert not unknown and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    with torch.no_grad():
        want = model(torch.tensor([TOKENS])).logits[0].numpy()
    got = tiny.logits(config, weights, TOKENS)
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()
