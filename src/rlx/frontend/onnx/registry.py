"""The table of ONNX ops: which function converts an op, from which version of its domain on.

ONNX versions an op by the opset that changed it last: a model of opset 13 means the newest entry with
`since` <= 13. An entry is one function: of the inputs and attributes of the op
(`rlx.frontend.onnx.signature`), or of the node itself, a `Call`. It returns the values of the node's outputs.

>>> find("", "Relu", 13).since, find("", "NoSuchOp", 13)
(1, None)
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from rlx.frontend.onnx.signature import by_signature, is_plain
from rlx.records import dataclass

if TYPE_CHECKING:
    from rlx.frontend.onnx.call import Call
    from rlx.frontend.onnx.value import Outputs

Convert = Callable[["Call"], "Outputs"]
F = TypeVar("F", bound=Callable[..., "Outputs"])

FAMILIES = (
    *(f"ops.{family}" for family in (
        "math", "logic", "activation", "reduce", "shape", "slicing", "gather", "create", "matmul", "conv",
        "pool", "norm", "attention", "image", "signal", "recurrent", "quant", "random", "loss", "dynamic",
        "text", "training",
    )),
    "loops.control", "loops.loop", "loops.sequence", "ml.features", "ml.linear", "ml.trees", "contrib.basic",
    "contrib.attention", "contrib.blocks", "contrib.moe", "contrib.quant",
)  # fmt: skip
"""Modules with entries, each about one family of ops."""


@dataclass(frozen=True)
class Conversion:
    """How one op is converted, from one version on."""

    domain: str
    op: str
    since: int
    convert: Convert
    family: str
    ignored: frozenset[str]
    """Attributes that do not change results (hints), which the function need not read."""


_TABLE: dict[tuple[str, str], list[Conversion]] = {}
_loaded = False


def onnx_op(*names: str, since: int = 1, domain: str = "", ignored: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Decorator: the function converts these ops from opset `since` of their domain on."""

    def register(function: F) -> F:
        family = function.__module__.removeprefix(f"{__package__}.")
        convert = function if is_plain(function) else by_signature(function)
        for name in names:
            entries = _TABLE.setdefault((domain, name), [])
            if any(e.since == since for e in entries):
                raise TypeError(f"ONNX op {name} since {since} is declared twice")
            entries.append(Conversion(domain, name, since, convert, family, frozenset(ignored)))
            entries.sort(key=lambda e: e.since)
        return function

    return register


def find(domain: str, op: str, version: int) -> Conversion | None:
    """The entry in force for an op in a version of its domain."""
    global _loaded
    if not _loaded:
        for family in FAMILIES:
            importlib.import_module(f"rlx.frontend.onnx.{family}")
        _loaded = True
    domain = "" if domain == "ai.onnx" else domain
    found = None
    for entry in _TABLE.get((domain, op), ()):
        if entry.since <= version:
            found = entry
    return found


def entries() -> list[Conversion]:
    """Every entry, for documentation and tests."""
    find("", "", 1)
    return [e for key in sorted(_TABLE) for e in _TABLE[key]]
