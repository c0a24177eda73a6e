"""What a decoder is: sizes and flags, read from the metadata of GGUF files or from config.json.

All supported architectures are one decoder with flags. What a weight's presence says (a bias, a norm after a
block) is not repeated here: the builder looks for the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rlx.errors import FormatError, UnsupportedError
from rlx.files import Json
from rlx.llm.gguf import GgufFile
from rlx.llm.rope import Rope, gguf_rope, hf_rope, hf_values, real_of
from rlx.records import dataclass

DECODERS = (
    "llama", "mistral", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "phi3", "gpt2", "gpt-oss",
)  # fmt: skip
"""As both kinds of files name them; Mistral's GGUF files say llama, and so do SmolLM's."""
ENCODERS = ("bert", "roberta", "xlm-roberta")
"""Architectures that turn texts to vectors; GGUF files of all of them say bert."""

ACTIVATIONS = ("f32", "i8")
"""What rows of matmuls, and keys and values, may be."""
ARITHMETIC = ("silu", "gelu", "gelu_tanh")
"""Activation functions."""

_MOST = 1 << 24  # of anything but the context: more is damage


@dataclass(frozen=True)
class Config:
    """A decoder. `window` is how many tokens a layer with a window sees, the newest included."""

    architecture: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    depth: int
    """Features of a head."""
    context: int
    """Tokens that it was trained for."""
    eps: float
    rope: Rope | None
    local_rope: Rope | None = None
    """Of layers with a window, if it is another."""
    window: int = 0
    windowed: tuple[bool, ...] = ()
    """Which layers have the window; all if empty."""
    scale: float | None = None
    """Of attention scores; by default 1 / sqrt(depth)."""
    score_cap: float = 0.0
    logit_cap: float = 0.0
    embedding_scale: float = 1.0
    norm_offset: float = 0.0
    """What is added to the weights of RMS norms."""
    activation: str = "silu"
    columns_first: bool = False
    """Whether matrices are [in, out], as in GPT-2's own files."""
    experts: int = 0
    """Of each layer that has some."""
    chosen: int = 0
    """Experts that a token goes through."""
    shares_of_chosen: bool = True
    """Whether the shares of the chosen experts, not those of all, add up to 1."""
    activations: str = "f32"
    """What rows are multiplied as where weights are codes: "f32", or rounded to "i8"."""
    kv: str = "f32"
    """What keys and values in pages are: "f32", or "i8" with a scale for each token of a head."""
    gate_limit: float = 0.0
    """Of what experts multiply: above 0 that is x * sigmoid(gate_slope * x) and y + 1 of clamped x, y."""
    gate_slope: float = 1.0

    first_position: int = 0
    """Of the table of positions: what is before it is not used."""

    @property
    def is_encoder(self) -> bool:
        return self.architecture in ENCODERS

    def window_of(self, layer: int) -> int:
        """Tokens that a layer sees; 0 for all."""
        return self.window if not self.windowed or self.windowed[layer] else 0

    def rope_of(self, layer: int) -> Rope | None:
        return self.local_rope if self.local_rope is not None and self.window_of(layer) else self.rope

    @property
    def attention_dtype(self) -> str:
        """What queries, keys and values of a single sequence are that is not in pages."""
        return "bf16" if self.activations == "i8" and not self.is_encoder else "f32"

    @property
    def kv_numbers(self) -> int:
        """Numbers in keys and values of each token; layers of encoders have theirs in turns."""
        return self.kv_rows * self.depth

    @property
    def kv_rows(self) -> int:
        """Rows of keys and values of each token."""
        return 2 * (1 if self.is_encoder else self.layers) * self.kv_heads

    @property
    def page_bytes(self) -> int:
        """Bytes that each token takes in pages."""
        return self.kv_numbers + 4 * self.kv_rows if self.kv == "i8" else 4 * self.kv_numbers


def _refuse(path: str, architecture: object) -> UnsupportedError:
    return UnsupportedError(
        f"{path}: the architecture {architecture!r} is not supported; RLX runs "
        f"{', '.join((*DECODERS, *ENCODERS))}"
    )


def checked(path: str, config: Config) -> Config:
    """The same decoder, or a FormatError if its sizes fit no model."""
    sizes = {name: getattr(config, name) for name in ("layers", "width", "heads", "kv_heads", "depth")}
    for name, size in sizes.items():
        if not 1 <= size <= _MOST:
            raise FormatError(f"{path}: {name} is {size}")
    if not 1 <= config.context <= 1 << 40 or config.heads % config.kv_heads:
        raise FormatError(
            f"{path}: {config.context} tokens of context, {config.heads} heads for {config.kv_heads} of keys"
        )
    for rope in (config.rope, config.local_rope):
        if rope is None:
            continue
        pairs = rope.features // 2
        bad = rope.features % 2 or not 2 <= rope.features <= config.depth or not rope.base > 0
        if bad or len(rope.factors) not in (0, pairs) or not all(f > 0 for f in rope.factors):
            raise FormatError(f"{path}: rotary positions {rope} do not fit heads of {config.depth} features")
    if not (config.gate_limit >= 0 and math.isfinite(config.gate_slope)):
        raise FormatError(f"{path}: gates have the limit {config.gate_limit}, the slope {config.gate_slope}")
    if not 0 <= config.experts <= _MOST or not min(config.experts, 1) <= config.chosen <= config.experts:
        raise FormatError(f"{path}: {config.chosen} of {config.experts} experts for each token")
    if config.window < 0 or len(config.windowed) not in (0, config.layers):
        raise FormatError(
            f"{path}: a window of {config.window} tokens, {len(config.windowed)} layers with one"
        )
    return config


def _gemma_scale(config: Config) -> float:
    """Of Gemma's scores: by the features of a head, but in the models of 27B by width / heads."""
    return 1 / math.sqrt(config.width / config.heads if config.layers in (46, 62) else config.depth)


# -- GGUF


def from_gguf(file: GgufFile) -> Config:
    """The decoder of a GGUF file."""
    kind = file.get("general.architecture", str)
    if kind not in (*DECODERS, "bert"):
        raise _refuse(file.path, kind)

    def whole(key: str, default: int | None = None) -> int:
        return file.get(f"{kind}.{key}", int, default)

    def real(key: str, default: float | None = None) -> float:
        return file.get(f"{kind}.{key}", float, default)

    layers, width = whole("block_count"), whole("embedding_length")
    heads = whole("attention.head_count")
    if not (1 <= layers <= _MOST and 1 <= heads <= _MOST):
        raise FormatError(f"{file.path}: {layers} layers, {heads} heads")
    depth = whole("attention.key_length", width // heads)
    centred = kind in ("gpt2", "bert")  # its norms
    epsilon = "attention.layer_norm_epsilon" if centred else "attention.layer_norm_rms_epsilon"
    found = Config(
        architecture=kind,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=whole("attention.head_count_kv", heads),
        depth=depth,
        context=min(whole("context_length"), _gguf_short(file, kind)),
        eps=real(epsilon),
        rope=None if centred else gguf_rope(file, kind, depth),
        window=whole("attention.sliding_window", 0),
        activation={"gpt2": "gelu_tanh", "bert": "gelu"}.get(kind, "silu"),
        experts=whole("expert_count", 0),
        chosen=whole("expert_used_count", 0),
    )
    if kind in ("gemma2", "gemma3"):
        second = kind == "gemma2"
        found = replace(
            found,
            scale=_gemma_scale(found),
            embedding_scale=math.sqrt(width),
            score_cap=real("attn_logit_softcapping", 50.0 if second else 0.0),
            logit_cap=real("final_logit_softcapping", 30.0 if second else 0.0),
            activation="gelu_tanh",
            windowed=tuple(i % 2 == 0 if second else i % 6 < 5 for i in range(layers)),
            local_rope=None if second else Rope(10000.0, depth),
        )
    if kind == "gpt-oss":  # files do not state what all of its models have
        found = replace(
            found, gate_limit=7.0, gate_slope=1.702, windowed=tuple(i % 2 == 0 for i in range(layers))
        )
    return checked(file.path, found)


def _gguf_short(file: GgufFile, kind: str) -> int:
    """The context that the factors of short texts are for; there are others for longer ones."""
    if "rope_factors_short.weight" not in file.tensors:
        return 1 << 40
    return file.get(f"{kind}.rope.scaling.original_context_length", int)


# -- config.json

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
}
_GGUF_NAMES = {"gemma3_text": "gemma3", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss"}
_CENTRED = {"rms_norm_eps": "layer_norm_eps"}
_RENAMED = {  # words of others for the usual ones
    "gpt2": {
        "num_hidden_layers": "n_layer",
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "rms_norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation_function",
    },
    **dict.fromkeys(ENCODERS, _CENTRED),
}


def from_hf(path: str, given: Json) -> Config:
    """The decoder of a folder with a config.json."""
    kind = _GGUF_NAMES.get(str(given.get("model_type")), given.get("model_type"))
    if kind not in (*DECODERS, *ENCODERS):
        raise _refuse(path, kind)
    gpt2 = kind == "gpt2"

    def get(key: str, check: Callable[[object], bool], default: object = None) -> Any:
        name = _RENAMED.get(kind, {}).get(key, key)
        value = given.get(name)
        value = default if value is None else value
        if not check(value):
            raise FormatError(f"{path}: config.json has {name} = {value!r}")
        return value

    def is_size(value: object) -> bool:
        return type(value) is int and 0 < value <= 1 << 40

    def is_number(value: object) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

    layers, width = get("num_hidden_layers", is_size), get("hidden_size", is_size)
    if layers > _MOST:
        raise FormatError(f"{path}: config.json has num_hidden_layers = {layers}")
    heads = get("num_attention_heads", is_size)
    depth = get("head_dim", is_size, max(width // heads, 1))
    activation = get("hidden_activation", lambda v: v is None or isinstance(v, str))
    activation = activation or get("hidden_act", lambda v: isinstance(v, str))
    if activation not in _ACTIVATIONS:
        raise UnsupportedError(f"{path}: the activation {activation!r} is not supported")
    found = Config(
        architecture=kind,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=get("num_key_value_heads", is_size, heads),
        depth=depth,
        context=_short(given, get("max_position_embeddings", is_size)),
        eps=float(get("rms_norm_eps", is_number)),
        rope=None if gpt2 or kind in ENCODERS else hf_rope(path, given, depth),
        activation=_ACTIVATIONS[activation],
        columns_first=gpt2,
    )
    if kind in ENCODERS:
        return checked(path, _hf_encoder(path, found, given))
    if kind == "qwen3moe":
        found = replace(
            found,
            experts=get("num_experts", is_size, given.get("num_local_experts")),
            chosen=get("num_experts_per_tok", is_size),
            shares_of_chosen=get("norm_topk_prob", lambda v: isinstance(v, bool), False),
        )
    if kind == "gpt-oss":
        found = replace(
            found,
            experts=get("num_local_experts", is_size, given.get("num_experts")),
            chosen=get("num_experts_per_tok", is_size, given.get("experts_per_token")),
            gate_limit=float(get("swiglu_limit", is_number, 7.0)),
            gate_slope=float(get("swiglu_alpha", is_number, 1.702)),
        )
    window = 0 if given.get("use_sliding_window") is False else given.get("sliding_window") or 0
    if type(window) is not int:
        raise FormatError(f"{path}: config.json has sliding_window = {window!r}")
    if window:
        found = replace(found, window=window, windowed=_hf_windowed(path, kind, given, layers))
    if kind in ("gemma2", "gemma3"):
        found = replace(
            found,
            scale=get("query_pre_attn_scalar", is_number, depth) ** -0.5,
            embedding_scale=math.sqrt(width),
            score_cap=float(get("attn_logit_softcapping", is_number, 0.0)),
            logit_cap=float(get("final_logit_softcapping", is_number, 0.0)),
            norm_offset=1.0,
        )
    if kind == "gemma3":
        local = hf_values(given, "sliding_attention")
        base = real_of("rope_theta", (local,), real_of("rope_local_base_freq", (given,), 10000.0))
        found = replace(found, local_rope=Rope(base, depth))
    return checked(path, found)


def _hf_encoder(path: str, found: Config, given: Json) -> Config:
    """An encoder. RoBERTa's positions begin after that of padding."""
    for key, usual in (("position_embedding_type", "absolute"), ("is_decoder", False)):
        if given.get(key, usual) not in (usual, None):
            raise UnsupportedError(f"{path}: {key} = {given[key]!r} is not supported; RLX has {usual!r}")
    first = 0
    if found.architecture != "bert":
        padding = given.get("pad_token_id", 1)
        if type(padding) is not int or not 0 <= padding < found.context - 1:
            raise FormatError(f"{path}: config.json has pad_token_id = {padding!r}")
        first = padding + 1
    return replace(found, context=found.context - first, first_position=first)


def _short(given: Json, context: int) -> int:
    """The context that the factors of short texts are for; there are others for longer ones."""
    if hf_values(given, "full_attention").get("rope_type") == "longrope" or "rope_scaling" in given:
        return min(context, int(given.get("original_max_position_embeddings") or context))
    return context


def _hf_windowed(path: str, kind: str, given: Json, layers: int) -> tuple[bool, ...]:
    """Which layers have the window."""
    types = given.get("layer_types")
    if isinstance(types, list):
        return tuple(name == "sliding_attention" for name in types)
    if kind in ("gemma2", "gpt-oss"):
        return tuple(i % 2 == 0 for i in range(layers))
    if kind == "gemma3":
        every = given.get("sliding_window_pattern", 6)
        if type(every) is not int or every < 1:
            raise FormatError(f"{path}: config.json has sliding_window_pattern = {every!r}")
        return tuple((i + 1) % every != 0 for i in range(layers))
    first = given.get("max_window_layers", 0) if kind in ("qwen2", "qwen3", "qwen3moe") else 0
    return tuple(i >= first for i in range(layers))
