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
from tiny_configs import CONFIGS, Array, Weights, has_experts, random_weights, shapes

__all__ = [
    "CONFIGS", "Weights", "in_blocks", "logits", "random_weights", "read_gguf", "shapes", "stacked",
    "unstacked", "write_folder", "write_gguf",
]  # fmt: skip

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


def _attend(
    q: Array, k: Array, v: Array, scale: float, window: int = 0, cap: float = 0.0, sinks: Array | None = None
) -> Array:
    """Of [heads, tokens, depth]; keys may have fewer heads. A sink is one more key, of value 0."""
    group = len(q) // len(k)
    k, v = np.repeat(k, group, 0), np.repeat(v, group, 0)
    scores = q @ k.transpose(0, 2, 1) * scale
    if cap:
        scores = np.tanh(scores / cap) * cap
    behind = np.arange(q.shape[1])[:, None] - np.arange(q.shape[1])
    hidden = (behind < 0) | ((behind >= window) if window else False)
    scores = np.where(hidden, -np.inf, scores)
    if sinks is None:
        return _softmax(scores) @ v
    more = np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
    return _softmax(np.concatenate([scores, more], axis=-1))[..., :-1] @ v


def _frequencies(config: dict[str, Any], depth: int, base: float) -> Array:
    plain = base ** (-np.arange(0, depth, 2) / depth)
    scaling = config.get("rope_scaling")
    if not scaling:
        return plain
    before, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    if scaling["rope_type"] == "yarn":  # of pairs that turn often to seldom: kept to divided
        low, high = (
            depth / 2 * math.log(before / 2 / math.pi / scaling[f"beta_{name}"]) / math.log(base)
            for name in ("fast", "slow")
        )
        low, high = max(low, 0), min(high, depth - 1)
        ramp = np.clip((np.arange(depth // 2) - low) / (high - low), 0, 1)
        return plain / factor * ramp + plain * (1 - ramp)
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


def _turn(x: Array, frequencies: Array, magnitude: float) -> Array:
    """Rotary positions of [heads, tokens, depth], halves paired."""
    angles = np.arange(x.shape[1])[:, None] * frequencies
    c, s = (magnitude * f(angles).astype(x.dtype) for f in (np.cos, np.sin))
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
        if kind in ("gemma2", "gpt_oss") and i % 2:
            window = 0
        if kind == "gemma3_text":
            window = 0 if (i + 1) % config["sliding_window_pattern"] == 0 else window
            base = config["rope_local_base_freq"] if window else base
        frequencies = _frequencies(config, depth, base)
        scale = config["query_pre_attn_scalar"] ** -0.5 if gemma else depth**-0.5
        cap = config.get("attn_logit_softcapping", 0.0)
        far = 0.1 * math.log(config["rope_scaling"]["factor"]) + 1 if kind == "gpt_oss" else 1.0
        q, k = (_turn(part, frequencies, far) for part in (q, k))
        out = _attend(q, k, v, scale, window, cap, w.get(f"{at}.sinks"))
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

    def open_experts(x: Array, at: str) -> Array:
        """The same for gpt-oss: shares of the chosen alone, biases, clamped gates in turns with `up`."""
        scores, limit = linear(x, f"{at}.router"), config["swiglu_limit"]
        best = np.argsort(-scores, kind="stable")[: config["num_experts_per_tok"]]
        out = np.zeros_like(x)
        for share, e in zip(_softmax(scores[best]), best, strict=True):
            both = x @ w[f"{at}.experts.gate_up_proj"][e] + w[f"{at}.experts.gate_up_proj_bias"][e]
            gate, up = np.minimum(both[::2], limit), np.clip(both[1::2], -limit, limit)
            inner = gate / (1 + np.exp(-gate * config.get("swiglu_alpha", 1.702))) * (up + 1)
            out += share * (inner @ w[f"{at}.experts.down_proj"][e] + w[f"{at}.experts.down_proj_bias"][e])
        return out

    def mlp(x: Array, i: int) -> Array:
        at = f"model.layers.{i}.mlp"
        if kind == "gpt_oss":
            return np.stack([open_experts(row, at) for row in x])
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
    names = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint8": "U8"}
    table, at, data = {}, 0, []
    for name, value in weights.items():
        stored = value if value.dtype == np.uint8 else value.astype(dtype)
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
    arch = {"mistral": "llama", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss"}.get(model, model)
    layers = config.get("num_hidden_layers", config.get("n_layer"))
    writer = gguf.GGUFWriter(path, arch)
    _write_metadata(writer, config, arch, layers)
    more(writer)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper().replace("-", "_")), layers)
    rounded = {}
    for name, value in (apart(weights) if arch == "gpt-oss" else stacked(weights)).items():
        stem, _, suffix = name.rpartition(".")
        new = names.get_name(stem if model != "gpt2" else f"transformer.{stem}")
        assert new is not None, name
        stored = _converted(config, arch, name, value)
        own = kind if kind != "MXFP4" or "_exps" in new else "F32"  # that is for experts only
        if (
            (suffix == "weight" and stored.ndim >= 2)
            and own != "F32"
            and not re.search("position|gate_inp", new)
        ):
            quantised = gguf.GGMLQuantizationType[kind]
            packed = gguf.quants.quantize(stored, quantised)
            writer.add_tensor(f"{new}.{suffix}", packed, raw_dtype=quantised)
            stored = gguf.quants.dequantize(packed, quantised).reshape(stored.shape)
        else:
            writer.add_tensor(f"{new}.{suffix}", np.ascontiguousarray(stored))
        rounded |= {name: _converted(config, arch, name, stored, back=True)}
    rounded = together(rounded) if arch == "gpt-oss" else unstacked(rounded)
    if config.get("rope_scaling", {}).get("rope_type") == "llama3":
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


def apart(weights: Weights) -> Weights:
    """gpt-oss as its GGUF files have it: gates and what they multiply apart, [experts, out, in]."""
    found: Weights = {}
    for name, value in weights.items():
        at, _, what = name.rpartition(".")
        stem, kind = what.removesuffix("_bias"), "bias" if what.endswith("_bias") else "weight"
        if ".experts" not in at:
            found[f"{name}.weight" if what == "sinks" else name] = value
            continue
        value = value if kind == "bias" else value.transpose(0, 2, 1)
        if stem == "down_proj":
            found[f"{at}.down_proj.{kind}"] = value
        else:
            found[f"{at}.gate_proj.{kind}"], found[f"{at}.up_proj.{kind}"] = value[:, ::2], value[:, 1::2]
    return found


def together(weights: Weights) -> Weights:
    """The reverse of `apart`."""
    found: Weights = {}
    for name, value in weights.items():
        if ".experts." not in name:
            found[name.replace("sinks.weight", "sinks")] = value
            continue
        at, what, kind = name.rsplit(".", 2)
        if what == "gate_proj":
            other = weights[f"{at}.up_proj.{kind}"]
            value = np.stack([value, other], axis=2).reshape(len(value), -1, *value.shape[2:])
        if what != "up_proj":
            new = "gate_up_proj" if what == "gate_proj" else what
            found[f"{at}.{new}" + "_bias" * (kind == "bias")] = (
                value if kind == "bias" else value.transpose(0, 2, 1)
            )
    return found


def in_blocks(weights: Weights) -> tuple[Weights, Weights]:
    """Experts of gpt-oss in MXFP4, as its folders have them, and all weights as they are after rounding."""
    import gguf

    kind, stored, rounded = gguf.GGMLQuantizationType.MXFP4, dict(weights), dict(weights)
    for name in [name for name in weights if name.endswith((".gate_up_proj", ".experts.down_proj"))]:
        rows = np.ascontiguousarray(stored.pop(name).transpose(0, 2, 1))
        packed = gguf.quants.quantize(rows, kind)
        rounded[name] = gguf.quants.dequantize(packed, kind).reshape(rows.shape).transpose(0, 2, 1)
        blocks = packed.reshape(*rows.shape[:2], -1, 17)
        halves = np.concatenate(
            [blocks[..., 1:] & 15, blocks[..., 1:] >> 4], axis=-1
        )  # neighbours share a byte
        stored[f"{name}_blocks"] = halves[..., ::2] | halves[..., 1::2] << 4
        stored[f"{name}_scales"] = np.ascontiguousarray(blocks[..., 0])
    return stored, rounded


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
    put("expert_count", config.get("num_experts", config.get("num_local_experts")))
    if arch == "gpt-oss":
        scaling = config["rope_scaling"]
        writer.add_string(f"{arch}.rope.scaling.type", "yarn")
        put("rope.scaling.factor", scaling["factor"])
        put("rope.scaling.original_context_length", scaling["original_max_position_embeddings"])
        put("rope.scaling.yarn_beta_fast", scaling["beta_fast"])
        put("rope.scaling.yarn_beta_slow", scaling["beta_slow"])
    put("expert_used_count", config.get("num_experts_per_tok"))
    put("attn_logit_softcapping", config.get("attn_logit_softcapping"))
    put("final_logit_softcapping", config.get("final_logit_softcapping"))
