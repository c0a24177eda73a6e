"""The programs of a model, from a store or compiled: for a sequence alone, and for steps of many sequences.

A key says which program of a model it is: how many tokens its caches or tables hold, how many a step has at
the most, and what is rounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlx.api.options import LoadOptions
from rlx.files import Json
from rlx.llm import late
from rlx.llm.batching.pages import PAGE
from rlx.llm.config import Config
from rlx.llm.draft import MOST
from rlx.llm.encoders.texts import tokens_of_a_step
from rlx.llm.source import Source

if TYPE_CHECKING:
    from rlx.ir.graph import Graph
    from rlx.runtime.program import CompiledProgram

SLOTS, PREFILL_CHUNK = 16, 256
"""What engines have unless somebody wants otherwise."""
_ALONE, _PAGED, _ENCODER = "decoder", "paged_decoder", "encoder"


def tokens_alone(config: Config, positions: int) -> int | None:
    """The most tokens of a step for one conversation, or for texts to be embedded; None without pages."""
    if config.is_encoder:
        return tokens_of_a_step(positions)
    return MOST if config.kv != "f32" else None


def engine_tokens(
    config: Config, positions: int, prefill_chunk: int = PREFILL_CHUNK, slots: int = SLOTS, proposed: int = 0
) -> int:
    """The most tokens of a step of an engine; an encoder has a text in one step."""
    return max(prefill_chunk, positions if config.is_encoder else 0) + slots + proposed


def key_of(source: Source, positions: int, most: int | None) -> Json:
    """The key of a program for steps of at most `most` tokens; None for the one without pages."""
    config = source.config
    if most is None:
        return {_ALONE: positions, "activations": config.activations}
    kind = _ENCODER if config.is_encoder else _PAGED
    return {
        kind: positions,
        "page": PAGE,
        "most": most,
        "activations": config.activations,
        "kv": config.kv,
    }


def program_of(source: Source, key: Json, options: LoadOptions) -> CompiledProgram:
    """The program with this key."""

    def graph() -> Graph:
        config, tensors = source.config, source.tensors
        if _ALONE in key:
            return late.build(config, tensors, key[_ALONE])
        if _ENCODER in key:
            return late.build_encoder(config, tensors, key[_ENCODER], PAGE, key["most"])
        return late.build_paged(config, tensors, key[_PAGED], PAGE, key["most"])

    return source.program(key, options, graph)
