"""RLX: an ML compiler and runtime that shows its plan."""

from __future__ import annotations

from rlx import ops
from rlx.compile import compile, lower, optimize
from rlx.ir.graph import Graph

__version__ = "0.1.0"

__all__ = ["Graph", "compile", "lower", "ops", "optimize"]
