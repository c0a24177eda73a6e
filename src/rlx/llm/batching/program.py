"""The program that computes tokens of many sequences in pages, from the store or compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlx.api.options import LoadOptions
from rlx.api.session import known, stored_program
from rlx.llm import late
from rlx.llm.batching.pages import PAGE
from rlx.llm.source import Source

if TYPE_CHECKING:
    from rlx.api.session import Imported
    from rlx.runtime.program import CompiledProgram


def paged_program(source: Source, positions: int, most: int, options: LoadOptions) -> CompiledProgram:
    """The program of a decoder or encoder for steps of at most `most` tokens."""
    is_encoder = source.config.is_encoder

    def graph() -> Imported:
        build = late.build_encoder if is_encoder else late.build_paged
        made = build(source.config, source.tensors, positions, PAGE, most)
        return made, [known(other) for other in source.others]

    kind, rounded = "encoder" if is_encoder else "paged_decoder", source.config.activations
    key = {kind: positions, "page": PAGE, "most": most, "activations": rounded, "kv": source.config.kv}
    program = stored_program(known(source.path), {**options}, key, graph)
    source.tensors.check()
    return program
