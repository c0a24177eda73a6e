"""Compiled programs for places without Python: C libraries, WebAssembly modules and pages that run them."""

from __future__ import annotations

from rlx.export.export import export
from rlx.runtime.exported import Exported, Page

__all__ = ["Exported", "Page", "export"]
