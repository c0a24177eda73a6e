"""The plan of a program, under the name of the contract; it lives in `rlx.plan.lir`."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    from rlx.plan import lir  # plans are above graphs

    return getattr(lir, name)
