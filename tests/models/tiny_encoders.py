"""Random encoders: as folders, as GGUF files, and computed with NumPy in f64."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import tiny_decoders
from tiny_configs import Array, Weights

_BERT = {
    "model_type": "bert",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 96,
    "max_position_embeddings": 150,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "pad_token_id": 0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": _BERT,
    "minilm": {
        **_BERT,
        "num_hidden_layers": 2,
        "hidden_size": 96,
        "num_attention_heads": 12,
        "intermediate_size": 384,
    },
    "roberta": {
        **_BERT,
        "model_type": "roberta",
        "type_vocab_size": 1,
        "pad_token_id": 1,
        "layer_norm_eps": 1e-5,
    },
}
_LAYER = (
    ("attention.self.query", "w", "w"),
    ("attention.self.key", "w", "w"),
    ("attention.self.value", "w", "w"),
    ("attention.output.dense", "w", "w"),
    ("intermediate.dense", "h", "w"),
    ("output.dense", "w", "h"),
)
WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *map(chr, range(33, 97)),
    *("##" + c for c in "abcdefghij"),
]
WORDS += ["hello", "world", "the", "##ing", *map(chr, range(123, 127)), *"abcdefghi"]


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of weights, as Hugging Face's files have them."""
    width, sizes = config["hidden_size"], {"w": config["hidden_size"], "h": config["intermediate_size"]}
    tables = {"word": "vocab_size", "position": "max_position_embeddings", "token_type": "type_vocab_size"}
    found: dict[str, tuple[int, ...]] = {
        f"embeddings.{name}_embeddings.weight": (config[size], width) for name, size in tables.items()
    }
    norms = ["embeddings.LayerNorm"]
    for i in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{i}"
        for name, out, into in _LAYER:
            found[f"{at}.{name}.weight"], found[f"{at}.{name}.bias"] = (
                (sizes[out], sizes[into]),
                (sizes[out],),
            )
        norms += [f"{at}.attention.output.LayerNorm", f"{at}.output.LayerNorm"]
    return found | {f"{norm}.{kind}": (width,) for norm in norms for kind in ("weight", "bias")}


def random_weights(config: dict[str, Any], seed: int = 0) -> Weights:
    rng = np.random.default_rng(seed)
    return {
        name: (rng.standard_normal(shape) * (0.3 if len(shape) == 1 else 0.15)).astype(np.float32)
        + np.float32("LayerNorm.weight" in name)
        for name, shape in shapes(config).items()
    }


def features(config: dict[str, Any], given: Weights, tokens: list[int]) -> Array:
    """Features [tokens, width] of one text, in f64."""
    w = {name: value.astype(np.float64) for name, value in given.items()}
    heads, count = config["num_attention_heads"], len(tokens)
    first = config["pad_token_id"] + 1 if config["model_type"] == "roberta" else 0

    def norm(x: Array, name: str) -> Array:
        centred = x - x.mean(axis=-1, keepdims=True)
        root = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + config["layer_norm_eps"])
        return centred / root * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x: Array, name: str) -> Array:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    x = w["embeddings.word_embeddings.weight"][tokens] + w["embeddings.token_type_embeddings.weight"][0]
    x = norm(x + w["embeddings.position_embeddings.weight"][first : first + count], "embeddings.LayerNorm")
    for i in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{i}"
        q, k, v = (
            linear(x, f"{at}.attention.self.{name}").reshape(count, heads, -1).transpose(1, 0, 2)
            for name in ("query", "key", "value")
        )
        scores = q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1])
        e = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out = (e / e.sum(axis=-1, keepdims=True) @ v).transpose(1, 0, 2).reshape(count, -1)
        x = norm(x + linear(out, f"{at}.attention.output.dense"), f"{at}.attention.output.LayerNorm")
        inner = linear(x, f"{at}.intermediate.dense")
        inner = inner * 0.5 * (1 + np.vectorize(math.erf)(inner / math.sqrt(2)))
        x = norm(x + linear(inner, f"{at}.output.dense"), f"{at}.output.LayerNorm")
    return x


def write_folder(path: Path, config: dict[str, Any], weights: Weights) -> Path:
    """A folder with a tokenizer of words that begins texts with [CLS] and ends them with [SEP]."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors  # heavy

    tiny_decoders.write_folder(path, config, weights)
    made = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.add_special_tokens(WORDS[:5])
    made.enable_truncation(8)
    made.enable_padding(length=8)
    made.save(str(path / "tokenizer.json"))
    return path


def write_modules(folder: Path, mode: str | dict[str, object], *others: str) -> None:
    """Files of sentence-transformers: how features become a vector."""
    kinds = ["models.Transformer", "models.Pooling", *others]
    places = ["", *(f"{i}_{kind.rpartition('.')[2]}" for i, kind in enumerate(kinds) if i)]
    listed = [
        {"idx": i, "name": str(i), "path": place, "type": f"sentence_transformers.{kind}"}
        for i, (place, kind) in enumerate(zip(places, kinds, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    about = {f"pooling_mode_{mode}": True, "pooling_mode_none": False} if isinstance(mode, str) else mode
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(about))


def write_gguf(path: Path, config: dict[str, Any], weights: Weights, pooling: int = 1) -> None:
    """A GGUF file with its tokenizer, as converters write them."""
    import gguf

    layers = config["num_hidden_layers"]
    writer = gguf.GGUFWriter(path, "bert")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, layers)
    for key, value in (
        ("block_count", layers),
        ("context_length", config["max_position_embeddings"]),
        ("embedding_length", config["hidden_size"]),
        ("feed_forward_length", config["intermediate_size"]),
        ("attention.head_count", config["num_attention_heads"]),
        ("pooling_type", pooling),
    ):
        writer.add_uint32(f"bert.{key}", value)
    writer.add_float32("bert.attention.layer_norm_epsilon", config["layer_norm_eps"])
    writer.add_bool("bert.attention.causal", False)
    writer.add_tokenizer_model("bert")
    writer.add_token_list(
        [w if w[:1] + w[-1:] == "[]" else w[2:] if w.startswith("##") else f"\u2581{w}" for w in WORDS]
    )
    writer.add_token_types([3] * 5 + [1] * (len(WORDS) - 5))
    writer.add_uint32("tokenizer.ggml.cls_token_id", 2)
    writer.add_sep_token_id(3)
    for name, value in weights.items():
        stem, _, suffix = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
