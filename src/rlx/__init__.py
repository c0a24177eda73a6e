"""RLX: an ML compiler and runtime that shows its plan."""

from __future__ import annotations

from rlx import errors, ops
from rlx.compile import compile, lower, optimize
from rlx.config import VERSION
from rlx.frontend.onnx import from_onnx
from rlx.functions import grad, jit, jvp, value_and_grad, vmap
from rlx.ir.graph import Graph
from rlx.ops.custom import register_op
from rlx.session import Session, load

__version__ = VERSION

__all__ = [
    "Graph",
    "Session",
    "compile",
    "errors",
    "from_onnx",
    "grad",
    "jit",
    "jvp",
    "load",
    "lower",
    "ops",
    "optimize",
    "register_op",
    "value_and_grad",
    "vmap",
]
