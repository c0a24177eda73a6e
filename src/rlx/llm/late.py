"""What is loaded with its first use: it brings all ops, and a program that was stored starts without them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlx.llm.decoder import build as build
    from rlx.llm.decoder import build_paged as build_paged
    from rlx.llm.encoders.graph import build_encoder as build_encoder
    from rlx.llm.memory import weight_budget as weight_budget

_HOMES = {
    "build": "rlx.llm.decoder",
    "build_paged": "rlx.llm.decoder",
    "build_encoder": "rlx.llm.encoders.graph",
    "weight_budget": "rlx.llm.memory",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
