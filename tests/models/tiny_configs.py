"""Random language models of every architecture: configs, and shapes of weights as folders have them."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray
Weights = dict[str, Array]

_SIZES = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GEMMA = {
    "head_dim": 24,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 24,
    "sliding_window": 5,
    "tie_word_embeddings": True,
}
_GPT_OSS = {
    "model_type": "gpt_oss",
    "intermediate_size": 32,
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 5,
    "rope_theta": 150000.0,
    "swiglu_limit": 7.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 4.0,
        "beta_slow": 0.5,
        "original_max_position_embeddings": 32,
        "truncate": False,
    },
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_SIZES, "model_type": "llama"},
    "smollm": {
        **_SIZES,
        "model_type": "llama",
        "hidden_size": 96,
        "num_attention_heads": 6,
        "tie_word_embeddings": True,
    },
    "llama3": {
        **_SIZES,
        "model_type": "llama",
        "tie_word_embeddings": True,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "mistral": {**_SIZES, "model_type": "mistral", "sliding_window": 6, "head_dim": 16},
    "qwen2": {**_SIZES, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {**_SIZES, "model_type": "qwen3", "head_dim": 32},
    "qwen3moe": {**_SIZES, **_EXPERTS, "model_type": "qwen3_moe", "head_dim": 32, "norm_topk_prob": True},
    "qwen3moe_mixed": {  # the first layer is dense, and shares are those of all experts
        **_SIZES,
        **_EXPERTS,
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "norm_topk_prob": False,
        "mlp_only_layers": [0],
    },
    "gemma2": {
        **_SIZES,
        **_GEMMA,
        "model_type": "gemma2",
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": {
        **_SIZES,
        **_GEMMA,
        "model_type": "gemma3_text",
        "rope_local_base_freq": 500.0,
        "sliding_window_pattern": 2,
    },
    "gpt_oss": {**_SIZES, **_GPT_OSS},
    "gpt_oss_clamped": {**_SIZES, **_GPT_OSS, "swiglu_limit": 0.4, "swiglu_alpha": 2.5},
    "phi3": {**_SIZES, "model_type": "phi3", "sliding_window": 7, "pad_token_id": 0},
    "gpt2": {
        "model_type": "gpt2",
        "n_layer": 3,
        "n_embd": 64,
        "n_head": 4,
        "n_positions": 64,
        "vocab_size": 96,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
    },
}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of weights, as Hugging Face's files have them."""
    if config["model_type"] == "gpt2":
        return _gpt2_shapes(config)
    width, hidden = config["hidden_size"], config["intermediate_size"]
    heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
    depth = config.get("head_dim", width // heads)
    kind = config["model_type"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], width)}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        norms = ["input_layernorm", "post_attention_layernorm"]
        if kind.startswith("gemma"):
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        found |= {f"{at}.{norm}.weight": (width,) for norm in norms}
        if kind == "phi3":
            found[f"{at}.self_attn.qkv_proj.weight"] = ((heads + 2 * keys) * depth, width)
            found[f"{at}.mlp.gate_up_proj.weight"] = (2 * hidden, width)
        else:
            for name, count in (("q", heads), ("k", keys), ("v", keys)):
                found[f"{at}.self_attn.{name}_proj.weight"] = (count * depth, width)
                if kind in ("qwen2", "gpt_oss"):
                    found[f"{at}.self_attn.{name}_proj.bias"] = (count * depth,)
            if not has_experts(config, i) and kind != "gpt_oss":
                found |= {f"{at}.mlp.{name}_proj.weight": (hidden, width) for name in ("gate", "up")}
        if kind in ("qwen3", "qwen3_moe", "gemma3_text"):
            found |= {f"{at}.self_attn.{name}_norm.weight": (depth,) for name in "qk"}
        found[f"{at}.self_attn.o_proj.weight"] = (width, heads * depth)
        if kind == "gpt_oss":
            found |= {f"{at}.self_attn.o_proj.bias": (width,), f"{at}.self_attn.sinks": (heads,)}
            found |= _gpt_oss_expert_shapes(config, f"{at}.mlp")
        elif has_experts(config, i):
            found |= _expert_shapes(config, f"{at}.mlp")
        else:
            found[f"{at}.mlp.down_proj.weight"] = (width, hidden)
    found["model.norm.weight"] = (width,)
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (config["vocab_size"], width)
    return found


def has_experts(config: dict[str, Any], layer: int) -> bool:
    return "num_experts" in config and layer not in config.get("mlp_only_layers", ())


def _expert_shapes(config: dict[str, Any], at: str) -> dict[str, tuple[int, ...]]:
    width, hidden, count = config["hidden_size"], config["moe_intermediate_size"], config["num_experts"]
    found = {f"{at}.gate.weight": (count, width)}
    for e in range(count):
        found |= {f"{at}.experts.{e}.{name}_proj.weight": (hidden, width) for name in ("gate", "up")}
        found[f"{at}.experts.{e}.down_proj.weight"] = (width, hidden)
    return found


def _gpt_oss_expert_shapes(config: dict[str, Any], at: str) -> dict[str, tuple[int, ...]]:
    width, hidden, count = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    return {
        f"{at}.router.weight": (count, width),
        f"{at}.router.bias": (count,),
        f"{at}.experts.gate_up_proj": (count, width, 2 * hidden),
        f"{at}.experts.gate_up_proj_bias": (count, 2 * hidden),
        f"{at}.experts.down_proj": (count, hidden, width),
        f"{at}.experts.down_proj_bias": (count, width),
    }


def _gpt2_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width = config["n_embd"]
    found: dict[str, tuple[int, ...]] = {
        "wte.weight": (config["vocab_size"], width),
        "wpe.weight": (config["n_positions"], width),
    }
    for i in range(config["n_layer"]):
        for name, rows, columns in (
            ("attn.c_attn", width, 3 * width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", width, 4 * width),
            ("mlp.c_proj", 4 * width, width),
        ):
            found[f"h.{i}.{name}.weight"], found[f"h.{i}.{name}.bias"] = (rows, columns), (columns,)
        for name in ("ln_1", "ln_2"):
            found[f"h.{i}.{name}.weight"] = found[f"h.{i}.{name}.bias"] = (width,)
    found["ln_f.weight"] = found["ln_f.bias"] = (width,)
    return found


def random_weights(config: dict[str, Any], seed: int = 0) -> Weights:
    rng = np.random.default_rng(seed)
    return {
        name: (rng.standard_normal(shape) * (0.3 if len(shape) == 1 else 0.15)).astype(np.float32)
        + np.float32(("norm" in name and not config["model_type"].startswith("gemma")) or ".ln_" in name)
        for name, shape in shapes(config).items()
    }
