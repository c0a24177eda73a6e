"""Where a program comes from, and what the signature of its file covers."""

from __future__ import annotations

import json
from collections.abc import Callable

from rlx.codegen.cpu.generator import generator_version
from rlx.files import Json
from rlx.ir.graph import Graph
from rlx.plan.lir import LirModule
from rlx.records import dataclass
from rlx.runtime.native_code import code_version

SIGNED_PARTS = ("plan", "outline", "code", "runtime", "unfused")
"""Parts of a variant that its signature covers; the parts that all share are covered too."""
RECOVERY = "recovery"
"""The part with the graph that computes params from the weights of the first variant."""
INNER = "inner"
"""The key of a header for programs beside the first, by name; they share arrays, params and what is ABOUT."""
ABOUT = "about/"
"""How names of parts begin that are the caller's own."""
DEFLATED = ".deflated"
"""How names of parts end whose texts are compressed."""


@dataclass(frozen=True)
class Origin:
    """Where a program comes from: its graph as the user gave it, and how to plan it for a target."""

    graph: Callable[[], Graph]
    plan: Callable[[Graph, str], LirModule]


def generator() -> str:
    """What code must have been made by to fit this runtime."""
    return f"{code_version()}-{generator_version()}"


def signed_bytes(header: Json, number: int, prefix: str = "") -> bytes:
    """What the signature of a variant covers: what it says of itself, the digests of its parts and of those
    that all share, where every array lies, and the SHA-256 of all arrays. The parts of a program beside the
    first have a `prefix`."""
    covered = {key: value for key, value in header["variants"][number].items() if key != "mac"}
    names = {RECOVERY, prefix + "source", *(f"{prefix}{number}.{name}" for name in SIGNED_PARTS)}
    digests = sorted(
        [name, digest]
        for name, _, _, digest in header["parts"]
        if name.removesuffix(DEFLATED) in names or name.startswith(ABOUT)
    )
    own = ("variants", "parts", "array_sums", INNER)
    rest = {key: value for key, value in header.items() if key not in own}
    return b"rlx program 2\n" + json.dumps([covered, digests, rest], sort_keys=True).encode()


_OF_INNER = {"name", "facts", "variants", "states"}


def is_inner(about: object) -> bool:
    """Whether a program beside the first says only what is its own; arrays are those of the file."""
    return isinstance(about, dict) and about.keys() == _OF_INNER


def inner_header(header: Json, name: str) -> Json:
    """The header of a program beside the first: its own facts, and what all programs share."""
    shared = {key: value for key, value in header.items() if key != INNER}
    return {**shared, **header[INNER][name]}
