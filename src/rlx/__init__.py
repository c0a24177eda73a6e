"""RLX: an ML compiler and runtime that shows its plan."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlx import errors
from rlx.api.options import Options
from rlx.config import VERSION
from rlx.wiring import give_functions

if TYPE_CHECKING:
    from rlx import cost, dist, driver, llm, ops, serve, zoo
    from rlx.api.compile import compile
    from rlx.api.functions import grad, jit, jvp, value_and_grad, vmap
    from rlx.api.lowering import lower, optimize
    from rlx.api.session import Session, load
    from rlx.frontend.onnx import from_onnx
    from rlx.ir.graph import Graph
    from rlx.ir.tree import register_pytree
    from rlx.ops.control.custom import register_op

__version__ = VERSION
give_functions()

__all__ = [
    "Graph",
    "Options",
    "Session",
    "compile",
    "cost",
    "dist",
    "driver",
    "errors",
    "from_onnx",
    "grad",
    "jit",
    "jvp",
    "llm",
    "load",
    "lower",
    "ops",
    "optimize",
    "register_op",
    "register_pytree",
    "serve",
    "value_and_grad",
    "vmap",
    "zoo",
]

# Loaded with the first use: a program from a file starts without them.
_PARTS = ("cost", "dist", "driver", "llm", "ops", "serve", "zoo")
_HOMES = {
    "Graph": "rlx.ir.graph",
    "Session": "rlx.api.session",
    "compile": "rlx.api.compile",
    "from_onnx": "rlx.frontend.onnx",
    "grad": "rlx.api.functions",
    "jit": "rlx.api.functions",
    "jvp": "rlx.api.functions",
    "load": "rlx.api.session",
    "lower": "rlx.api.lowering",
    "optimize": "rlx.api.lowering",
    "register_op": "rlx.ops.control.custom",
    "register_pytree": "rlx.ir.tree",
    "value_and_grad": "rlx.api.functions",
    "vmap": "rlx.api.functions",
}


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return import_module(f"rlx.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'rlx' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
