"""Compiled programs in `.rlx` files: plan, native code and weights, for one or more targets.

A file holds the graph as the user gave it, the values of its params, and per target a *variant*: the LIR
graph, the graph of derived weights, the code and the derived weights themselves. Loading maps the weights and
runs nothing in the file but code that this user has signed:

- code whose HMAC verifies under the user's key, or was accepted by `trust`, is loaded as it is;
- other code is not executed: it is made again from the plan, which is parsed and verified first;
- a file without a variant for this machine and this version of the generator is compiled from its graph.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.backend.cpu.generator import generator_version
from rlx.backend.cpu.target import Target, resolve
from rlx.errors import FormatError, RlxError
from rlx.ir.graph import Graph
from rlx.ir.lir import LirModule
from rlx.ir.op import Level, Role
from rlx.ir.parse import parse_graph, read_signed
from rlx.ir.text import graph_text
from rlx.plan.build import Planner
from rlx.runtime import container
from rlx.runtime.native_code import FORMAT, code_blob, open_blob
from rlx.runtime.trust import accept, accepted, keyring
from rlx.runtime.weights import Weights

if TYPE_CHECKING:
    from rlx.runtime.program import CompiledProgram

VARIANT_PARTS = ("lir", "derived", "code", "decisions", "unfused")
SIGNED_PARTS = ("lir", "derived", "code")


class ArtifactWarning(UserWarning):
    """Code in a file was not used; the program was made again and is as good."""


@dataclass(frozen=True)
class Origin:
    """Where a program comes from: its graph as the user gave it, and how to plan it for a target."""

    graph: Callable[[], Graph]
    plan: Callable[[Graph, str], LirModule]


# -- saving


class _Arrays:
    """Arrays of a file; each is stored once, whoever refers to it."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []
        self._number: dict[object, int] = {}

    def add(self, key: object, array: np.ndarray) -> int:
        if key not in self._number:
            self._number[key] = len(self.arrays)
            self.arrays.append(array)
        return self._number[key]


def save(
    program: CompiledProgram,
    path: str | os.PathLike[str],
    targets: Sequence[str] = (),
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Write a program to a file, with code for its own target and for `targets`.

    `facts` are JSON values of the caller's that are kept in the header.
    """
    if program.origin is None:
        name = program.graph.name
        raise FormatError(f"program {name!r} does not know its graph; save one that rlx.compile made")
    source, values = program.origin.graph(), program.param_values
    arrays, parts, blobs = _Arrays(), dict[str, bytes](), dict[str, np.ndarray]()
    variants = [_Variant.of(program.lir, program.weight_memory)]
    known = {resolve(program.lir.target).name}
    for target in (resolve(t).name for t in targets):
        if target not in known:
            known.add(target)
            variants.append(_Variant.of(_planned(program.origin, source, target, values)))
    described = [v.write(f"{i}.", parts, blobs, arrays, values) for i, v in enumerate(variants)]
    parts["source"] = graph_text(source, blobs=blobs).encode()
    tables = {"params": {**source.param_values, **values}, "states": source.state_values, "blobs": blobs}
    header = {
        "name": source.name,
        "facts": dict(facts or {}),
        "variants": described,
        **{kind: _add_all(arrays, kind, table) for kind, table in tables.items()},
    }
    container.write(path, header, parts, arrays.arrays)


def _planned(origin: Origin, source: Graph, target: str, values: Mapping[str, np.ndarray]) -> LirModule:
    """The program for another target, with the values that params have now."""
    lir = origin.plan(source, target)
    for graph in (lir.mir, lir.derived):
        if graph is not None:
            graph.param_values |= {k: v for k, v in values.items() if k in graph.params}
    return lir


def _add_all(arrays: _Arrays, kind: str, table: Mapping[str, np.ndarray]) -> dict[str, int]:
    return {name: arrays.add((kind, name), array) for name, array in table.items()}


@dataclass
class _Variant:
    """A program for one target, on its way into a file."""

    lir: LirModule
    memory: Mapping[int, np.ndarray]

    @staticmethod
    def of(lir: LirModule, memory: Mapping[int, np.ndarray] | None = None) -> _Variant:
        return _Variant(lir, Weights(lir).memory if memory is None else memory)

    def write(
        self,
        prefix: str,
        parts: dict[str, bytes],
        blobs: dict[str, np.ndarray],
        arrays: _Arrays,
        values: Mapping[str, np.ndarray],
    ) -> dict[str, Any]:
        """Add parts and arrays; returns the description for the header."""
        lir, target = self.lir, resolve(self.lir.target)
        texts = {
            "lir": graph_text(lir.mir, blobs=blobs),
            "derived": "" if lir.derived is None else graph_text(lir.derived, blobs=blobs),
            "unfused": "" if lir.unfused is None else graph_text(lir.unfused, blobs=blobs),
            "decisions": json.dumps([d.to_json() for d in lir.decisions]),
        }
        parts |= {prefix + name: text.encode() for name, text in texts.items()}
        parts[prefix + "code"] = code_blob(lir, target, cache=True)
        weights = []
        for id, memory in self.memory.items():
            node = lir.mir.nodes[id]
            direct = node.op.role is Role.PARAM and node.attrs["name"] in values
            key = ("params", node.attrs["name"]) if direct else (prefix, id)
            weights.append([id, arrays.add(key, memory.view(node.dtype.np).reshape(node.shape))])
        described = {
            "target": target.name,
            "generator": _generator(),
            "binding": lir.planner.binding,
            "placed": list(lir.planner.placed or ()),
            "gate": lir.gate,
            "options": lir.options,
            "weights": weights,
        }
        digests = {name: hashlib.sha256(parts[prefix + name]).hexdigest() for name in SIGNED_PARTS}
        return {**described, "mac": keyring().sign(_signed_bytes(described, digests)).hex()}


def _generator() -> str:
    """What code must have been made by to fit this runtime."""
    return f"{FORMAT}-{generator_version()}"


def _signed_bytes(described: Mapping[str, Any], digests: Mapping[str, str]) -> bytes:
    """What a signature covers: plan, code and how they go together. Not the weights: data cannot run."""
    covered = {key: value for key, value in described.items() if key != "mac"}
    return b"rlx program\n" + json.dumps([covered, digests], sort_keys=True).encode()


# -- loading


class StoredLir(LirModule):
    """A plan from a file. What running does not need is read when it is asked for."""

    def __init__(
        self, file: Artifact, number: int, mir: Graph, planner: Planner, about: Mapping[str, Any]
    ) -> None:
        super().__init__(mir, planner.plan(), target=about["target"], gate=about["gate"], planner=planner)
        self.options = about["options"]
        self._file, self._number = file, number
        for name in ("derived", "decisions", "unfused"):
            del self.__dict__[name]  # set by the dataclass; the properties below take their place

    @functools.cached_property
    def derived(self) -> Graph | None:  # type: ignore[override]
        return self._file.graph(f"{self._number}.derived", Level.MIR)

    @functools.cached_property
    def unfused(self) -> Graph | None:  # type: ignore[override]
        return self._file.graph(f"{self._number}.unfused", Level.MIR)

    @functools.cached_property
    def decisions(self) -> Any:  # type: ignore[override]
        from rlx.cost.decision import DecisionLog

        try:
            return DecisionLog.from_json(json.loads(self._file.container.text(f"{self._number}.decisions")))
        except (ValueError, TypeError, RecursionError):
            raise self._file.container.fail("its decisions are not understood") from None


class Artifact:
    """An open `.rlx` file.

    >>> import tempfile, rlx
    >>> g = rlx.Graph("double")
    >>> g.output("y", g.input("x", ("n",), "f32") * 2.0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rlx.compile(g, target="x86-64").save(folder + "/double.rlx")
    ...     file = Artifact(folder + "/double.rlx")
    ...     file.name, file.targets, file.is_trusted(0)
    ('double', ['x86-64'], True)
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.container = container.Container(path)
        header = self.container.header
        kinds = {"name": str, "facts": dict, "variants": list, "params": dict, "states": dict, "blobs": dict}
        wrong = [key for key, kind in kinds.items() if not isinstance(header.get(key), kind)]
        if wrong or not all(map(_is_variant, header["variants"])):
            raise self.container.fail(f"its header has no sound {wrong[0] if wrong else 'variants'}")
        self.name: str = header["name"]
        self.facts: dict[str, Any] = header["facts"]

    @property
    def targets(self) -> list[str]:
        """Targets that the file has code for."""
        return [v["target"] for v in self._variants]

    @property
    def _variants(self) -> list[dict[str, Any]]:
        variants: list[dict[str, Any]] = self.container.header["variants"]
        return variants

    def find(self, target: Target) -> int | None:
        """The variant for a target, made by the generator of this version; None if there is none."""
        for number, about in enumerate(self._variants):
            if about["target"] == target.name and about["generator"] == _generator():
                return number
        return None

    def is_trusted(self, number: int) -> bool:
        """Whether the code of a variant was signed or accepted by this user."""
        signed = self._signed(number)
        try:
            mac = bytes.fromhex(self._variants[number]["mac"])
        except ValueError:
            mac = b""
        return keyring().verify(signed, mac) or accepted(signed)

    def _signed(self, number: int) -> bytes:
        digests = {name: self.container.digest(f"{number}.{name}") for name in SIGNED_PARTS}
        return _signed_bytes(self._variants[number], digests)

    def accept(self) -> list[str]:
        """Check the whole file and trust the code of all variants from now on; returns their targets."""
        self.container.check_all()
        for number in range(len(self._variants)):
            accept(self._signed(number))
        return self.targets

    # -- graphs and values

    def source(self) -> Graph:
        """The graph that was compiled, with its values."""
        graph = self.graph("source", Level.HIR)
        assert graph is not None, "the source is never empty"
        return graph

    def graph(self, part: str, level: Level, checked: bool = True) -> Graph | None:
        """A graph of the file, verified unless its signature was; None for an empty part."""
        text = self.container.text(part)
        if not text and part != "source":
            return None
        try:
            graph = parse_graph(text, self._blobs) if checked else read_signed(text, self._blobs)
            graph.param_values = {k: v for k, v in self.params.items() if k in graph.params}
            graph.state_values = {k: v for k, v in self._table("states").items() if k in graph.state_inputs}
            if checked:
                from rlx.ir.verify import verify

                verify(graph, level)
        except RlxError as e:
            raise self.container.fail(f"its part {part!r} does not hold a sound graph: {e}") from e
        return graph

    @functools.cached_property
    def params(self) -> dict[str, np.ndarray]:
        """Values of params by name, over the memory of the file."""
        return self._table("params")

    @functools.cached_property
    def _blobs(self) -> dict[str, np.ndarray]:
        return self._table("blobs")

    def _table(self, kind: str) -> dict[str, np.ndarray]:
        return {name: self.container.array(number) for name, number in self.container.header[kind].items()}

    # -- programs

    def program(
        self,
        number: int,
        threads: int,
        debug: str | None = None,
        trust_native: bool = False,
        cache: bool = True,
    ) -> CompiledProgram:
        """The program of a variant."""
        from rlx.runtime.program import CompiledProgram

        trusted = self.is_trusted(number)
        self.container.check_arrays()
        about = self._variants[number]
        target = resolve(about["target"])
        mir = self.graph(f"{number}.lir", Level.MIR, checked=not trusted)
        if mir is None:
            raise self.container.fail("its plan is empty")
        try:
            planner = Planner(mir, about["binding"])
            if trusted:
                planner.placed = tuple(about["placed"]) or None
            lir = StoredLir(self, number, mir, planner, about)
        except RlxError as e:
            raise self.container.fail(f"its plan is not sound: {e}") from e
        notes = []
        if trusted or trust_native:
            kernels, code = self._code(number, target)
        else:
            notes.append(
                f"the code in {self.container.path} is not signed by this user and was not run; "
                "it was made again from the plan (rlx trust FILE accepts it)"
            )
            warnings.warn(notes[-1], ArtifactWarning, stacklevel=4)
            lir.derived, lir.unfused  # noqa: B018  (verified before code is made from the plan)
            kernels, code = open_blob(code_blob(lir, target, cache), target)
        program = CompiledProgram(lir, kernels, code, threads, debug, self._weights(lir, about["weights"]))
        program.notes = notes
        return program

    def _code(self, number: int, target: Target) -> tuple[Any, Any]:
        blob = self.container.part(f"{number}.code")
        try:
            return open_blob(blob, target)
        except (ValueError, KeyError, TypeError, IndexError, RecursionError, UnicodeDecodeError) as e:
            raise self.container.fail(f"its code is damaged ({type(e).__name__})") from e

    def _weights(self, lir: LirModule, entries: Iterable[Any]) -> Weights:
        """Weights where they lie in the file; every one must have the size of its node."""
        memory: dict[int, np.ndarray] = {}
        for id, number in entries:
            if not 0 <= id < len(lir.mir.nodes):
                raise self.container.fail(f"it has a weight for %{id}, which its plan does not have")
            node, raw = lir.mir.nodes[id], self.container.raw(number)
            if node.op.role not in (Role.PARAM, Role.CONSTANT) or len(raw) != _static_bytes(node):
                raise self.container.fail(f"it has a weight of {len(raw)} bytes for {node}")
            memory[id] = raw
        return Weights(lir, dict(self.params), memory)


def _static_bytes(node: Any) -> int:
    size = node.tensor.nbytes
    return size if isinstance(size, int) else -1


def _is_variant(about: Any) -> bool:
    kinds = {
        "target": str,
        "generator": str,
        "binding": dict,
        "placed": list,
        "gate": dict,
        "options": dict,
        "weights": list,
        "mac": str,
    }
    if not isinstance(about, dict) or not all(isinstance(about.get(key), kinds[key]) for key in kinds):
        return False
    pairs = about["weights"]
    return (
        all(type(n) is int and n >= 0 for n in about["binding"].values())
        and all(isinstance(p, list) and len(p) == 2 and all(type(n) is int for n in p) for p in pairs)
        and all(type(n) is int for n in about["placed"])
    )
