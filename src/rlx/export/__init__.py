"""Compiled programs for places without Python: C libraries and WebAssembly modules."""

from __future__ import annotations

from rlx.export.export import export

__all__ = ["export"]
