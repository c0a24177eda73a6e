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
import json
import os
import struct
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.backend.cpu.generator import generator_version
from rlx.backend.cpu.target import Target, resolve
from rlx.errors import RlxError
from rlx.ir.dtype import dtype
from rlx.ir.graph import Graph, Node
from rlx.ir.lir import LirModule
from rlx.ir.op import Level, Role
from rlx.records import dataclass
from rlx.runtime.container import Container
from rlx.runtime.meanwhile import meanwhile
from rlx.runtime.native_code import FORMAT, native_code, open_blob, open_runtime
from rlx.runtime.stored import StoredLir
from rlx.runtime.trust import accept, accepted, keyring
from rlx.runtime.weights import Weights

if TYPE_CHECKING:
    from rlx.runtime.program import CompiledProgram

SIGNED_PARTS = ("plan", "outline", "code", "runtime")


class ArtifactWarning(UserWarning):
    """Code in a file was not used; the program was made again and is as good."""


@dataclass(frozen=True)
class Origin:
    """Where a program comes from: its graph as the user gave it, and how to plan it for a target."""

    graph: Callable[[], Graph]
    plan: Callable[[Graph, str], LirModule]


def generator() -> str:
    """What code must have been made by to fit this runtime."""
    return f"{FORMAT}-{generator_version()}"


def signed_bytes(described: Mapping[str, Any], digests: Mapping[str, str]) -> bytes:
    """What a signature covers: plan, code and how they go together. Not the weights: data cannot run."""
    covered = {key: value for key, value in described.items() if key != "mac"}
    return b"rlx program\n" + json.dumps([covered, digests], sort_keys=True).encode()


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
        self.container = Container(path)
        header = self.container.header
        kinds = {"name": str, "facts": dict, "variants": list, "params": dict, "states": dict, "blobs": dict}
        wrong = [key for key, kind in kinds.items() if not isinstance(header.get(key), kind)]
        if wrong or not all(map(_is_variant, header["variants"])):
            raise self.container.fail(f"its header has no sound {wrong[0] if wrong else 'variants'}")
        self._tables: dict[str, dict[str, np.ndarray]] = {}
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
            if about["target"] == target.name and about["generator"] == generator():
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
        return signed_bytes(self._variants[number], digests)

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

    def graph(self, part: str, level: Level) -> Graph | None:
        """A graph of the file, verified; None for an empty part."""
        text = self.container.text(part)
        if not text and part != "source":
            return None
        from rlx.ir.parse import parse_graph
        from rlx.ir.verify import verify

        return self.read(text, lambda text, blobs: verify(parse_graph(text, blobs), level), part)

    def read(self, text: str, parse: Callable[..., Graph], part: str = "plan") -> Graph:
        """A graph with the values that the file has for it."""
        try:
            graph = parse(text, self._blobs)
            self.give_values(graph)
        except RlxError as e:
            raise self.container.fail(f"its part {part!r} does not hold a sound graph: {e}") from e
        return graph

    def give_values(self, graph: Graph) -> None:
        """Hand a graph the values of its params and states; each must have the type of its node."""
        graph.param_values = self.values("params", graph.params)
        graph.state_values = self.values("states", graph.state_inputs)

    def values(self, kind: str, nodes: Mapping[str, Node]) -> dict[str, np.ndarray]:
        """Values of the file for params or states, which must have the types of their nodes."""
        found = {name: value for name, value in self._table(kind).items() if name in nodes}
        for name, value in found.items():
            want = nodes[name].tensor
            fits = value.shape == want.shape or not want.is_static
            if dtype(value.dtype) is not want.dtype or not fits:
                raise self.container.fail(
                    f"its value of {name!r} is {value.dtype}{list(value.shape)}, not {want}"
                )
        return found

    @functools.cached_property
    def params(self) -> dict[str, np.ndarray]:
        """Values of params by name, over the memory of the file."""
        return dict(self._table("params"))

    @property
    def _blobs(self) -> dict[str, np.ndarray]:
        return self._table("blobs")

    def _table(self, kind: str) -> dict[str, np.ndarray]:
        """Arrays of a table of the header by name."""
        if kind not in self._tables:
            numbers = self.container.header[kind]
            self._tables[kind] = {name: self.container.array(number) for name, number in numbers.items()}
        return self._tables[kind]

    # -- programs

    def program(
        self,
        number: int,
        threads: int,
        debug: str | None = None,
        trust_native: bool = False,
        cache: bool = True,
        weight_budget: int | None = None,
        make: Callable[..., CompiledProgram] | None = None,
    ) -> CompiledProgram:
        """The program of a variant; `weight_budget` bytes replace the budget that it was compiled with."""
        about = self._variants[number]
        target, notes = resolve(about["target"]), []
        trusted = self.is_trusted(number)
        lir = StoredLir(self, number, about) if trusted else self._checked(number)
        streamed = weight_budget is not None or "weight_budget" in lir.options
        with meanwhile(lambda: self.container.check_arrays(mapped=not streamed), "rlx-check") as checked:
            from rlx.runtime.program import CompiledProgram

            if trusted or trust_native:
                kernels, code = self._code(number, target)
            else:
                notes.append(
                    f"the code in {self.container.path} is not signed by this user and was not run; "
                    "it was made again from the plan (rlx trust FILE accepts it)"
                )
                warnings.warn(notes[-1], ArtifactWarning, stacklevel=4)
                kernels, code = native_code(lir, target, cache)
            checked()
        if weight_budget is not None:
            lir.set_weight_budget(weight_budget, kernels.cuts)
        weights: Weights
        if streamed:
            from rlx.runtime.streaming import streamed_weights

            weights = streamed_weights(lir, dict(self.params), self.container, about["weights"])
        else:
            weights = self._weights(lir, about["weights"])
        program = (make or CompiledProgram)(lir, kernels, code, threads, debug, weights)
        program.notes = notes
        return program

    def _checked(self, number: int) -> LirModule:
        """The plan of a variant that nobody vouches for: verified and proved."""
        text = self.container.text(f"{number}.plan")
        try:
            lir = LirModule.from_text(text, self._blobs)
        except RlxError as e:
            raise self.container.fail(f"its plan is not sound: {e}") from e
        if lir.target != self._variants[number]["target"]:
            raise self.container.fail(f"its plan is for {lir.target!r}, but it says otherwise")
        for graph in (lir.mir, lir.derived):
            if graph is not None:
                self.give_values(graph)
        lir.unfused = self.graph(f"{number}.unfused", Level.MIR)
        return lir

    def _code(self, number: int, target: Target) -> tuple[Any, Any]:
        blob, runtime = (self.container.part(f"{number}.{name}") for name in ("code", "runtime"))
        try:
            open_runtime(runtime)
            return open_blob(blob, target)
        except (struct.error, ValueError, KeyError, TypeError, IndexError, RecursionError) as e:
            raise self.container.fail(f"its code is damaged ({type(e).__name__})") from e

    def _weights(self, lir: LirModule, entries: Iterable[Any]) -> Weights:
        """Weights where they lie in the file; every one must have the size of its node."""
        memory: dict[int, np.ndarray] = {}
        for id, number in entries:
            if not 0 <= id < len(lir.outline.nodes):
                raise self.container.fail(f"it has a weight for %{id}, which its plan does not have")
            node, raw = lir.outline.nodes[id], self.container.raw(number)
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
        "gate": dict,
        "options": dict,
        "weights": list,
        "mac": str,
    }
    if not isinstance(about, dict) or not all(isinstance(about.get(key), kinds[key]) for key in kinds):
        return False
    pairs = about["weights"]
    return all(isinstance(p, list) and len(p) == 2 and all(type(n) is int for n in p) for p in pairs)
