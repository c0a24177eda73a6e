"""RLX: an ML compiler and runtime that shows its plan."""

from __future__ import annotations

from rlx import ops
from rlx.ir.graph import Graph

__all__ = ["Graph", "ops"]
