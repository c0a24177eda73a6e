"""Names of weights in Hugging Face's files, as GGUF files have them."""

from __future__ import annotations

import re

from rlx.llm.tensors import Entry, Tensors

_WHOLE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "wte": "token_embd",
    "wpe": "position_embd",
    "ln_f": "output_norm",
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
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_IN_LAYER = re.compile(r"(?:model\.layers|h)\.(\d+)\.(.+)\.(weight|bias)")
_ELSEWHERE = re.compile(r"(.+)\.(weight|bias)")


def gguf_name(name: str, sandwich: bool) -> str | None:
    """The name in a GGUF file; None for what is not a weight of the decoder.

    In a `sandwich` the norm called post_attention_layernorm follows attention; else it precedes the MLP.

    >>> gguf_name("model.layers.3.self_attn.q_proj.weight", False)
    'blk.3.attn_q.weight'
    >>> gguf_name("model.layers.0.post_attention_layernorm.weight", True)
    'blk.0.post_attention_norm.weight'
    """
    name = name.removeprefix("transformer.").removeprefix("language_model.")
    inside = _IN_LAYER.fullmatch(name)
    if inside:
        layer, what, kind = inside.groups()
        if what == "post_attention_layernorm":
            found: str | None = "post_attention_norm" if sandwich else "ffn_norm"
        else:
            found = _LAYER.get(what)
        return None if found is None else f"blk.{layer}.{found}.{kind}"
    outside = _ELSEWHERE.fullmatch(name)
    if outside and outside[1] in _WHOLE:
        return f"{_WHOLE[outside[1]]}.{outside[2]}"
    return None


def renamed(tensors: Tensors) -> Tensors:
    """The same tensors under the names of GGUF files; others are left out."""
    sandwich = any("pre_feedforward_layernorm" in name for name in tensors)
    found: dict[str, Entry] = {}
    for name, entry in tensors.entries.items():
        new = gguf_name(name, sandwich)
        if new is not None:
            found[new] = Entry(new, entry.shape, entry.format, entry.source, entry.offset)
    return Tensors(tensors.path, found)
