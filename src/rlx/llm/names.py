"""Names of weights in Hugging Face's files, as GGUF files have them."""

from __future__ import annotations

import re

from rlx.errors import FormatError
from rlx.llm.hf import check_numbers
from rlx.llm.tensors import Entry, Stack, Tensors
from rlx.llm.views import expert_tensors

_WHOLE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "wte": "token_embd",
    "wpe": "position_embd",
    "ln_f": "output_norm",
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
_OLD_KINDS = {"gamma": "weight", "beta": "bias"}
_OUTER = re.compile(r"(?:transformer\.)?(?:language_model\.)?(?:bert\.|roberta\.)?")
_IN_LAYER = re.compile(r"(?:model\.layers|encoder\.layer|h)\.(\d+)\.(.+)\.(weight|bias|gamma|beta)")
_SINKS = re.compile(r"model\.layers\.(\d+)\.self_attn\.sinks")
_FUSED = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.((?:gate_up|down)_proj(?:_blocks|_scales|_bias)?)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj")
_ONE_OF = re.compile(r"(.+_exps)\.(\d+)\.(weight|bias)")
_ELSEWHERE = re.compile(r"(.+)\.(weight|bias|gamma|beta)")


def gguf_name(name: str, sandwich: bool) -> str | None:
    """The name in a GGUF file; None for what is not a weight of the decoder.

    In a `sandwich` the norm called post_attention_layernorm follows attention; else it precedes the MLP.

    >>> gguf_name("model.layers.3.self_attn.q_proj.weight", False)
    'blk.3.attn_q.weight'
    >>> gguf_name("model.layers.3.mlp.experts.7.up_proj.weight", False)  # one of several to be stacked
    'blk.3.ffn_up_exps.7.weight'
    >>> gguf_name("model.layers.0.post_attention_layernorm.weight", True)
    'blk.0.post_attention_norm.weight'
    """
    name = _OUTER.sub("", name, count=1)
    inside = _IN_LAYER.fullmatch(name)
    if inside:
        layer, what, kind = inside[1], inside[2], _OLD_KINDS.get(inside[3], inside[3])
        expert = _EXPERT.fullmatch(what)
        if expert:
            return f"blk.{layer}.ffn_{expert[2]}_exps.{int(expert[1])}.{kind}"
        if what == "post_attention_layernorm":
            found: str | None = "post_attention_norm" if sandwich else "ffn_norm"
        else:
            found = _LAYER.get(what)
        return None if found is None else f"blk.{layer}.{found}.{kind}"
    sinks = _SINKS.fullmatch(name)
    if sinks:
        return f"blk.{sinks[1]}.attn_sinks.weight"
    outside = _ELSEWHERE.fullmatch(name)
    if outside and outside[1] in _WHOLE:
        return f"{_WHOLE[outside[1]]}.{_OLD_KINDS.get(outside[2], outside[2])}"
    return None


def renamed(tensors: Tensors) -> Tensors:
    """The same tensors under the names of GGUF files; others are left out, experts are stacked."""
    sandwich = any("pre_feedforward_layernorm" in name for name in tensors)
    found: dict[str, Entry] = {}
    experts: dict[str, dict[int, Entry]] = {}
    fused: dict[str, dict[str, Entry]] = {}
    for name, entry in tensors.entries.items():
        part = _FUSED.fullmatch(name)
        if part:
            fused.setdefault(f"blk.{part[1]}", {})[part[2]] = entry
            continue
        new = gguf_name(name, sandwich)
        if new is not None:
            check_numbers(tensors.path, entry)
        one = None if new is None else _ONE_OF.fullmatch(new)
        if one:
            experts.setdefault(f"{one[1]}.{one[3]}", {})[int(one[2])] = entry
        elif new is not None:
            found[new] = Entry(new, entry.shape, entry.format, entry.source, entry.offset)
    for at, parts_of_layer in fused.items():
        found |= expert_tensors(tensors.path, at, parts_of_layer)
    for name, parts in experts.items():
        found[name] = _stacked(tensors.path, name, parts)
    return Tensors(tensors.path, found)


def _stacked(path: str, name: str, parts: dict[int, Entry]) -> Stack:
    first = next(iter(parts.values()))
    numbers = set(range(len(parts)))
    if parts.keys() != numbers or any(
        (e.shape, e.format) != (first.shape, first.format) for e in parts.values()
    ):
        raise FormatError(
            f"{path}: the experts of {name!r} are not {len(parts)} matrices of one shape and type"
        )
    own = tuple(parts[i] for i in sorted(parts))
    return Stack(name, (len(own), *first.shape), first.format, first.source, first.offset, own)
