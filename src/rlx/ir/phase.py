"""The phases of a stream, under the name of the contract; it lives in `rlx.plan.phase`."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    from rlx.plan import phase  # plans are above graphs

    return getattr(phase, name)
