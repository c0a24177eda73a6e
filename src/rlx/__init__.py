"""RLX: an ML compiler and runtime that shows its plan."""

from __future__ import annotations

from typing import Any

from rlx import ops
from rlx.ir.graph import Graph

__version__ = "0.1.0"

_LAZY = {"compile": "rlx.compile", "lower": "rlx.compile", "optimize": "rlx.compile"}


def __getattr__(name: str) -> Any:
    """Heavier parts are imported when first used, so that `import rlx` stays light."""
    if name in _LAZY:
        import importlib

        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'rlx' has no attribute {name!r}")


__all__ = ["Graph", "ops", *sorted(_LAZY)]
