"""Random language models of every architecture: as folders, as GGUF files, and computed with NumPy.

The computation is written from the papers, in f64 and without caches: the decoder is compared with it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
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
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_SIZES, "model_type": "llama"},
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
                if kind == "qwen2":
                    found[f"{at}.self_attn.{name}_proj.bias"] = (count * depth,)
            if not has_experts(config, i):
                found |= {f"{at}.mlp.{name}_proj.weight": (hidden, width) for name in ("gate", "up")}
        if kind in ("qwen3", "qwen3_moe", "gemma3_text"):
            found |= {f"{at}.self_attn.{name}_norm.weight": (depth,) for name in "qk"}
        found[f"{at}.self_attn.o_proj.weight"] = (width, heads * depth)
        if has_experts(config, i):
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


# -- computed with NumPy


def logits(config: dict[str, Any], given: Weights, tokens: list[int], dtype: Any = np.float64) -> Array:
    """Logits [tokens, vocabulary], computed in f64 or another precision."""
    w = {name: value.astype(dtype, copy=False) for name, value in given.items()}
    return _gpt2(config, w, tokens) if config["model_type"] == "gpt2" else _decoder(config, w, tokens)


def _softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def _gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def _attend(q: Array, k: Array, v: Array, scale: float, window: int = 0, cap: float = 0.0) -> Array:
    """Of [heads, tokens, depth]; keys may have fewer heads."""
    group = len(q) // len(k)
    k, v = np.repeat(k, group, 0), np.repeat(v, group, 0)
    scores = q @ k.transpose(0, 2, 1) * scale
    if cap:
        scores = np.tanh(scores / cap) * cap
    behind = np.arange(q.shape[1])[:, None] - np.arange(q.shape[1])
    hidden = (behind < 0) | ((behind >= window) if window else False)
    return _softmax(np.where(hidden, -np.inf, scores)) @ v


def _frequencies(config: dict[str, Any], depth: int, base: float) -> Array:
    plain = base ** (-np.arange(0, depth, 2) / depth)
    scaling = config.get("rope_scaling")
    if not scaling:
        return plain
    before, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    found = []
    for f in plain:
        length = 2 * math.pi / f
        if length < before / high:
            found.append(f)
        elif length > before / low:
            found.append(f / factor)
        else:
            smooth = (before / length - low) / (high - low)
            found.append((1 - smooth) * f / factor + smooth * f)
    return np.array(found)


def _turn(x: Array, frequencies: Array) -> Array:
    """Rotary positions of [heads, tokens, depth], halves paired."""
    angles = np.arange(x.shape[1])[:, None] * frequencies
    c, s = np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * c - b * s, b * c + a * s], axis=-1)


def _decoder(config: dict[str, Any], w: Weights, tokens: list[int]) -> Array:
    kind, width = config["model_type"], config["hidden_size"]
    heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
    depth, count = config.get("head_dim", width // heads), len(tokens)
    gemma = kind.startswith("gemma")
    act = _gelu if gemma else _silu

    def norm(x: Array, name: str) -> Array:
        root = np.sqrt((x * x).mean(axis=-1, keepdims=True) + config["rms_norm_eps"])
        return x / root * (w[f"{name}.weight"] + gemma)

    def linear(x: Array, name: str) -> Array:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def split(x: Array, number: int) -> Array:
        return x.reshape(count, number, depth).transpose(1, 0, 2)

    def attention(x: Array, i: int) -> Array:
        at = f"model.layers.{i}.self_attn"
        if kind == "phi3":
            q, k, v = np.split(linear(x, f"{at}.qkv_proj"), [heads * depth, (heads + keys) * depth], axis=1)
        else:
            q, k, v = (linear(x, f"{at}.{name}_proj") for name in "qkv")
        q, k, v = split(q, heads), split(k, keys), split(v, keys)
        if f"{at}.q_norm.weight" in w:
            q, k = norm(q, f"{at}.q_norm"), norm(k, f"{at}.k_norm")
        window, base = config.get("sliding_window", 0), config["rope_theta"]
        if kind == "gemma2" and i % 2:
            window = 0
        if kind == "gemma3_text":
            window = 0 if (i + 1) % config["sliding_window_pattern"] == 0 else window
            base = config["rope_local_base_freq"] if window else base
        frequencies = _frequencies(config, depth, base)
        scale = config["query_pre_attn_scalar"] ** -0.5 if gemma else depth**-0.5
        cap = config.get("attn_logit_softcapping", 0.0)
        out = _attend(_turn(q, frequencies), _turn(k, frequencies), v, scale, window, cap)
        return linear(out.transpose(1, 0, 2).reshape(count, heads * depth), f"{at}.o_proj")

    def experts(x: Array, at: str) -> Array:
        """The experts that one token chooses."""
        shares = _softmax(linear(x, f"{at}.gate"))
        best = np.argsort(-shares, kind="stable")[: config["num_experts_per_tok"]]
        total = shares[best].sum() if config["norm_topk_prob"] else 1.0
        out = np.zeros_like(x)
        for e in best:
            inner = act(linear(x, f"{at}.experts.{e}.gate_proj")) * linear(x, f"{at}.experts.{e}.up_proj")
            out += shares[e] / total * linear(inner, f"{at}.experts.{e}.down_proj")
        return out

    def mlp(x: Array, i: int) -> Array:
        at = f"model.layers.{i}.mlp"
        if has_experts(config, i):
            return np.stack([experts(row, at) for row in x])
        if kind == "phi3":
            gate, up = np.split(linear(x, f"{at}.gate_up_proj"), 2, axis=1)
        else:
            gate, up = linear(x, f"{at}.gate_proj"), linear(x, f"{at}.up_proj")
        return linear(act(gate) * up, f"{at}.down_proj")

    x = w["model.embed_tokens.weight"][tokens]
    if gemma:
        x = x * math.sqrt(width)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        if gemma:
            x = x + norm(attention(norm(x, f"{at}.input_layernorm"), i), f"{at}.post_attention_layernorm")
            inner = mlp(norm(x, f"{at}.pre_feedforward_layernorm"), i)
            x = x + norm(inner, f"{at}.post_feedforward_layernorm")
        else:
            x = x + attention(norm(x, f"{at}.input_layernorm"), i)
            x = x + mlp(norm(x, f"{at}.post_attention_layernorm"), i)
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    found = norm(x, "model.norm") @ head.T
    cap = config.get("final_logit_softcapping", 0.0)
    return np.tanh(found / cap) * cap if cap else found


def _gpt2(config: dict[str, Any], w: Weights, tokens: list[int]) -> Array:
    heads, count = config["n_head"], len(tokens)

    def norm(x: Array, name: str) -> Array:
        centred = x - x.mean(axis=-1, keepdims=True)
        root = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + config["layer_norm_epsilon"])
        return centred / root * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x: Array, name: str) -> Array:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    x = w["wte.weight"][tokens] + w["wpe.weight"][:count]
    for i in range(config["n_layer"]):
        parts = np.split(linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn"), 3, axis=1)
        q, k, v = (part.reshape(count, heads, -1).transpose(1, 0, 2) for part in parts)
        out = _attend(q, k, v, q.shape[-1] ** -0.5).transpose(1, 0, 2).reshape(count, -1)
        x = x + linear(out, f"h.{i}.attn.c_proj")
        x = x + linear(_gelu(linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")), f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ w["wte.weight"].T


# -- files


def read_gguf(path: Path) -> tuple[dict[str, Any], Weights]:
    """A llama file as the gguf package reads it: a config, and weights in f32 under the names of folders."""
    import gguf

    file = gguf.GGUFReader(path)

    def value(key: str) -> Any:
        return file.fields[f"llama.{key}"].contents()

    layers, heads = value("block_count"), value("attention.head_count")
    keys = value("attention.head_count_kv")
    config = {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": value("embedding_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "rope_theta": value("rope.freq_base"),
    }
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    wanted = {}
    for name in shapes({**config, "intermediate_size": 1, "vocab_size": 1, "tie_word_embeddings": True}):
        wanted[f"{names.get_name(name.removesuffix('.weight'))}.weight"] = name
    weights = {}
    for tensor in file.tensors:
        name = wanted[tensor.name]
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        numbers = numbers.reshape(tuple(reversed(tensor.shape.tolist())))
        weights[name] = _converted(config, "llama", name, numbers, back=True)
    return config, weights


def write_folder(path: Path, config: dict[str, Any], weights: Weights, dtype: Any = np.float32) -> Path:
    """A folder as Hugging Face has it."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    names = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    table, at, data = {}, 0, []
    for name, value in weights.items():
        stored = value.astype(dtype)
        ends = at + stored.nbytes
        table[name] = {
            "dtype": names[stored.dtype.name],
            "shape": stored.shape,
            "data_offsets": [at, ends],
        }
        data.append(stored.tobytes())
        at = ends
    head = json.dumps(table).encode()
    (path / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + b"".join(data))
    return path


def write_gguf(
    path: Path,
    config: dict[str, Any],
    weights: Weights,
    kind: str = "F32",
    more: Callable[[Any], None] = lambda writer: None,
) -> Weights:
    """A GGUF file whose matrices have a format; returns the weights as they are after rounding to it."""
    import gguf

    model = config["model_type"].removesuffix("_text")
    arch = {"mistral": "llama", "qwen3_moe": "qwen3moe"}.get(model, model)
    layers = config.get("num_hidden_layers", config.get("n_layer"))
    writer = gguf.GGUFWriter(path, arch)
    _write_metadata(writer, config, arch, layers)
    more(writer)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), layers)
    rounded = {}
    for name, value in stacked(weights).items():
        stem, _, suffix = name.rpartition(".")
        new = names.get_name(stem if model != "gpt2" else f"transformer.{stem}")
        assert new is not None, name
        stored = _converted(config, arch, name, value)
        if stored.ndim >= 2 and kind != "F32" and "position" not in new and "gate_inp" not in new:
            quantised = gguf.GGMLQuantizationType[kind]
            packed = gguf.quants.quantize(stored, quantised)
            writer.add_tensor(f"{new}.{suffix}", packed, raw_dtype=quantised)
            stored = gguf.quants.dequantize(packed, quantised).reshape(stored.shape)
        else:
            writer.add_tensor(f"{new}.{suffix}", np.ascontiguousarray(stored))
        rounded |= unstacked({name: _converted(config, arch, name, stored, back=True)})
    if config.get("rope_scaling"):
        depth = config["hidden_size"] // config["num_attention_heads"]
        plain = config["rope_theta"] ** (-np.arange(0, depth, 2) / depth)
        factors = plain / _frequencies(config, depth, config["rope_theta"])
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return rounded


def stacked(weights: Weights) -> Weights:
    """The matrices of all experts of a layer as one tensor, as GGUF files have them."""
    found: dict[str, list[Array]] = {}
    for name, value in weights.items():
        found.setdefault(re.sub(r"experts\.\d+\.", "experts.", name), []).append(value)
    return {name: np.stack(parts) if ".experts." in name else parts[0] for name, parts in found.items()}


def unstacked(weights: Weights) -> Weights:
    """The reverse of `stacked`."""
    found: Weights = {}
    for name, value in weights.items():
        if ".experts." in name:
            found |= {name.replace("experts.", f"experts.{e}."): part for e, part in enumerate(value)}
        else:
            found[name] = value
    return found


def _converted(config: dict[str, Any], arch: str, name: str, value: Array, back: bool = False) -> Array:
    """A weight as converters to GGUF store it, or `back` again."""
    if arch == "gpt2" and value.ndim == 2 and ".c_" in name:
        return np.ascontiguousarray(value.T)
    if arch.startswith("gemma") and "norm" in name:
        return value - np.float32(1) if back else value + np.float32(1)
    if arch == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        order = np.arange(len(value)).reshape(heads, 2, -1).transpose(0, 2, 1).ravel()  # halves to pairs
        return value[np.argsort(order)] if back else value[order]
    return value


def _write_metadata(writer: Any, config: dict[str, Any], arch: str, layers: int) -> None:
    def put(key: str, value: object) -> None:
        if isinstance(value, float):
            writer.add_float32(f"{arch}.{key}", value)
        elif value is not None:
            writer.add_uint32(f"{arch}.{key}", value)

    put("block_count", layers)
    put("context_length", config.get("max_position_embeddings", config.get("n_positions")))
    put("embedding_length", config.get("hidden_size", config.get("n_embd")))
    put("attention.head_count", config.get("num_attention_heads", config.get("n_head")))
    if arch == "gpt2":
        put("attention.layer_norm_epsilon", config["layer_norm_epsilon"])
        return
    put("attention.head_count_kv", config["num_key_value_heads"])
    put("attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    put("rope.freq_base", config["rope_theta"])
    put("attention.key_length", config.get("head_dim"))
    put("attention.value_length", config.get("head_dim"))
    put("attention.sliding_window", config.get("sliding_window"))
    put("expert_count", config.get("num_experts"))
    put("expert_used_count", config.get("num_experts_per_tok"))
    put("attn_logit_softcapping", config.get("attn_logit_softcapping"))
    put("final_logit_softcapping", config.get("final_logit_softcapping"))
