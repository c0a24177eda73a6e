"""What a model needs, told from the head of its file: no weight is read and nothing is compiled."""

from __future__ import annotations

from collections.abc import Mapping

from rlx import config
from rlx.api.compile import plan
from rlx.errors import BudgetError
from rlx.ir.dtype import dtype
from rlx.llm.batching.pages import PAGE, pages_for
from rlx.llm.decoder import build, build_paged
from rlx.llm.draft import MOST
from rlx.llm.encoders.graph import build_encoder
from rlx.llm.encoders.texts import tokens_of_a_step
from rlx.llm.source import AT_ONCE, Source


def memory_of(source: Source, context: int | None = None) -> Mapping[str, int]:
    """Bytes by what they are for; `activations` for a prompt of 512 tokens or the whole context."""
    positions = source.positions(context)
    at_once, in_pages = min(AT_ONCE, positions), source.config.kv != "f32"
    if source.config.is_encoder:
        most = tokens_of_a_step(positions)
        lir = plan(build_encoder(source.config, source.tensors, positions, PAGE, most, values=False))
    elif in_pages:
        lir = plan(build_paged(source.config, source.tensors, positions, PAGE, MOST, values=False))
    else:
        lir = plan(build(source.config, source.tensors, positions, values=False))

    def planned(new: int) -> Mapping[str, int]:
        """Sizes of a step of so many tokens."""
        if source.config.is_encoder:
            sizes = {"new": new, "features": new, "pages": pages_for(positions), "slots": 1}
        elif in_pages:
            sizes = {"new": new, "answers": 1, "features": 0, "pages": pages_for(positions), "slots": 1}
        else:
            sizes = {"past": positions - new, "new": new, "wanted": 1}
        return lir.planner.plan(sizes, sizes).sizes()

    def activations(new: int) -> int:
        return int(planned(new)["activation"])

    of_one = source.config.kv_numbers * dtype(source.config.attention_dtype).itemsize
    sizes = planned(1)
    return {
        "file": source.tensors.nbytes if source.prepared is None else source.prepared.nbytes,
        "weights": int(sizes["weight"]),
        "context": positions,
        "kv_per_1000_tokens": 1000 * (source.config.page_bytes if in_pages else of_one),
        "kv": int(sizes["state"]),
        "activations": activations(at_once),
        "activations_of_one_token": activations(1),
        "tokens_at_once": at_once,
    }


def weight_budget(source: Source, positions: int, limit: int | str) -> int | None:
    """Bytes of weights that may be in memory at once, so that a model fits a limit; None for all of them."""
    most = config.parse_bytes(limit, "memory_limit")
    needs = memory_of(source, positions)
    others = needs["kv"] + needs["activations"]
    if others + needs["weights"] <= most:
        return None
    if others >= most:
        smaller = "give" if source.prepared is None else "prepare a file with"
        raise BudgetError(
            f"{source.path} does not fit a memory_limit of {most} bytes: keys and values of {positions} "
            f"tokens take {needs['kv']}, activations {needs['activations']}; {smaller} a smaller context, or "
            "give a larger limit"
        )
    return most - others
