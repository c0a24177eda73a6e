"""Compiled programs in `.rlx` files: plan, native code and weights, for one or more targets.

A file holds the graph as the user gave it, the values of its params, and per target a *variant*: the LIR
graph, the graph of derived weights, the code and the derived weights themselves. Params that are the derived
weights of the first variant in another order are not stored next to them: a graph that moves elements back
(`rlx.runtime.recover`) gives them to who asks. Loading maps the weights and runs nothing in the file but code
that this user has signed:

- a variant whose HMAC verifies under the user's key, or was accepted by `trust`, is loaded as it is;
- of any other file only the graph as the user gave it is used, with its params, and compiled: neither code
  nor plan is looked at. Params are taken from derived weights by NumPy, in layouts that are checked;
- a file without a variant for this machine and this version of the generator is compiled from its graph.

A file may hold further programs (`inner`), which share its arrays and params: those of a language model.

A signature covers plan, code, source, all tables of the header and the SHA-256 of the weights. That digest is
compared with the weights when a file is first loaded, by `trust` and by `verify`. Later loads of the same
file, as its size and times tell, read no weight: pages come from the file when kernels need them.
"""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from rlx.errors import RlxError
from rlx.files import Json
from rlx.ir.dtype import DType, LazyArray, ParamValue, dtype
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Role, get_op
from rlx.plan.lir import LirModule
from rlx.runtime.background import meanwhile
from rlx.runtime.memory import allocate
from rlx.runtime.native_code import open_blob, open_runtime
from rlx.runtime.recover import Recovered, check_recovery
from rlx.runtime.store.container import Container
from rlx.runtime.store.origin import (
    DEFLATED,
    INNER,
    RECOVERY,
    Origin,
    generator,
    inner_header,
    is_inner,
    signed_bytes,
)
from rlx.runtime.store.stored import StoredLir
from rlx.runtime.store.trust import accept, accepted, is_noted, keyring, note
from rlx.runtime.weights import Weights
from rlx.target.cpu import Target, resolve

if TYPE_CHECKING:
    from rlx.codegen.cpu.kernels import KernelSet
    from rlx.runtime.program import CompiledProgram


class ArtifactWarning(UserWarning):
    """Code in a file was not used; the program was made again and is as good."""


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
        self._main = self
        self._read(self.container.header)

    def _read(self, header: Json, prefix: str = "") -> None:
        """Take a program whose parts have this prefix."""
        kinds = {"name": str, "facts": dict, "variants": list, "params": dict, "states": dict, "blobs": dict}
        if "packed_params" in header:  # which files of earlier versions do not have
            kinds["packed_params"] = dict
        wrong = [key for key, kind in kinds.items() if not isinstance(header.get(key), kind)]
        if wrong or not all(map(_is_variant, header["variants"])):
            raise self.container.fail(f"its header has no sound {wrong[0] if wrong else 'variants'}")
        self.header, self._prefix = header, prefix
        self._tables: dict[str, dict[str, np.ndarray]] = {}
        self.name: str = header["name"]
        self.facts: Json = header["facts"]

    @functools.cached_property
    def inner(self) -> Mapping[str, Artifact]:
        """Programs beside this one, by name."""
        found: dict[str, Artifact] = {}
        if INNER in self.header:
            programs = self.header[INNER]
            if not isinstance(programs, dict) or not all(map(is_inner, programs.values())):
                raise self.container.fail(f"its header has no sound {INNER}")
            for name in programs:
                one = found[name] = Artifact.__new__(Artifact)
                one.container, one._main = self.container, self
                one._read(inner_header(self.header, name), f"{name}/")
        return found

    def part(self, name: str) -> bytes:
        """A part of this program."""
        return self.container.part(self._prefix + name)

    def text(self, name: str) -> str:
        """A part of this program that is text, perhaps compressed: to less than its file would hold."""
        full, container = self._prefix + name, self.container
        if full + DEFLATED not in container.part_names:
            return container.text(full)
        unpacking = zlib.decompressobj()
        try:
            content = unpacking.decompress(container.part(full + DEFLATED), container.size)
            if not unpacking.eof or unpacking.unused_data:
                raise ValueError
            return content.decode()
        except (zlib.error, ValueError):
            raise container.fail(f"part {full[:40]!r} is not text that was compressed") from None

    @property
    def targets(self) -> list[str]:
        """Targets that the file has code for."""
        return [v["target"] for v in self._variants]

    @property
    def _variants(self) -> list[Json]:
        variants: list[Json] = self.header["variants"]
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
        return signed_bytes(self.header, number, self._prefix)

    @property
    def _all(self) -> list[Artifact]:
        """This program and those beside it."""
        return [self, *self.inner.values()]

    def verify(self) -> list[str]:
        """Compare every byte of the file with its SHA-256; returns the targets that this user trusts."""
        self.container.check_all()
        trusted = [
            [target for number, target in enumerate(one.targets) if one.is_trusted(number)]
            for one in self._all
        ]
        return [target for target in trusted[0] if all(target in others for others in trusted)]

    def accept(self) -> list[str]:
        """Check the whole file and trust all of it from now on; returns the targets that it has code for."""
        self.container.check_all()
        for one in self._all:
            for number in range(len(one._variants)):
                accept(one._signed(number))
        return self.targets

    def _check_weights(self, number: int, streamed: bool) -> None:
        """The weights of a signed variant, the first time that this user loads the file as it is: against the
        digest that was signed, or in a folder that is RLX's own against accidents. Later loads read none."""
        digests = [self.header[key] for key in ("array_sums", "array_sha256")]
        known = repr([self.container.state, digests]).encode()
        if is_noted(self.container.path, known):
            return
        if self.container.is_own:
            self.container.check_arrays(mapped=not streamed)
        else:
            self.container.check_weights(mapped=not streamed)
        note(self.container.path, known)

    # -- graphs and values

    def source(self, custom: Collection[str] | None = ()) -> Graph:
        """The graph that was compiled, with its values; it may call the custom ops named (None: any)."""
        from rlx.ir.text.files import read_foreign  # start time: signed code needs no graph

        text = self.text("source")
        self.check_arrays()
        return self.read(text, lambda text, blobs: read_foreign(text, blobs, custom), "source")

    def check_arrays(self) -> None:
        """Refuse arrays that were damaged."""
        self.container.check_arrays(mapped=not self.container.stay_in_file)

    def graph(self, part: str) -> Graph | None:
        """A MIR graph of the file, verified; None for an empty part."""
        text = self.text(part)
        if not text:
            return None
        from rlx.ir.text.files import read_mir  # start time: signed code needs no graph

        return self.read(text, read_mir, part)

    def planned_with(self, number: int, kinds: Mapping[str, type]) -> Json:
        """The options that a variant was planned with; `kinds` are the types of those that exist. They are
        read from a file that nobody vouches for: types are checked here, values by the compiler."""
        about = self._variants[number]
        options, kinds = (
            about["options"],
            {"precision": str, "winograd": bool, "budget": int, "weight_budget": int},
        )
        sizes = [*about["assume"].values()]
        if not all(type(v) is kinds.get(k) for k, v in options.items()) or not all(
            type(n) is int and 0 <= n < 1 << 62 for n in sizes
        ):
            raise self.container.fail("its header has options that rlx.compile does not have")
        return {**options, **({"assume": about["assume"]} if sizes else {})}

    def read(self, text: str, parse: Callable[..., Graph], part: str = "plan") -> Graph:
        """A graph with the values that the file has for it."""
        try:
            graph = parse(text, self.blobs)
            self.give_values(graph)
        except RlxError as e:
            raise self.container.fail(f"its part {part!r} does not hold a valid graph: {e}") from e
        return graph

    def give_values(self, graph: Graph) -> None:
        """Hand a graph the values of its params and states; each must have the type of its node."""
        params = self.params
        graph.param_values = {name: params[name] for name in graph.params if name in params}
        self._check_types(graph.param_values, graph.params)
        graph.state_values = self.values("states", graph.state_inputs)

    def values(self, kind: str, nodes: Mapping[str, Node]) -> dict[str, np.ndarray]:
        """Values of the file for states, which must have the types of their nodes."""
        found = {name: value for name, value in self._table(kind).items() if name in nodes}
        self._check_types(found, nodes)
        return found

    def _check_types(self, found: Mapping[str, ParamValue], nodes: Mapping[str, Node]) -> None:
        for name, value in found.items():
            want = nodes[name].tensor
            fits = value.shape == want.shape or not want.is_static
            if dtype(value.dtype) is not want.dtype or not fits:
                raise self.container.fail(
                    f"its value of {name!r} is {value.dtype}{list(value.shape)}, not {want}"
                )

    @functools.cached_property
    def params(self) -> dict[str, ParamValue]:
        """Values of params by name: over the memory of the file, or lazy arrays, computed from weights."""
        if self._main is not self:
            return self._main.params
        found: dict[str, ParamValue] = dict(self._table("params"))
        for name, about in self.header.get("packed_params", {}).items():
            try:
                of, shape = dtype(about[0]), tuple([int(d) for d in about[1]])
            except (RlxError, LookupError, TypeError, ValueError):
                raise self.container.fail(f"its param {name[:40]!r} is of no known type") from None
            found[name] = LazyArray(of, shape, functools.partial(self._recovered, name, of, shape))
        return found

    def _recovered(self, name: str, of: DType, shape: tuple[int, ...]) -> np.ndarray:
        """A param, computed from weights."""
        with self._damage(RECOVERY):
            try:
                found = self._recovery.value(name)
            except RlxError as e:
                raise self.container.fail(f"it does not tell its param {name!r}: {e.message}") from e
            if found.shape != shape or dtype(found.dtype) is not of:
                raise self.container.fail(f"its param {name!r} is not {of}{list(shape)}")
            return found

    @functools.cached_property
    def _recovery(self) -> Recovered:
        from rlx.ir.text.files import read_mir  # start time: few programs need it

        graph = read_mir(self.text(RECOVERY), {})
        check_recovery(graph)
        numbers = dict(self._variants[0]["weights"]) if self._variants else {}
        missing = [name for name in graph.params if not name.isdecimal() or int(name) not in numbers]
        if missing:
            raise self.container.fail(
                f"its params need the weight {missing[0][:20]!r}, which it does not have"
            )
        return Recovered(graph, lambda id: self.container.raw(numbers[id]))

    @property
    def blobs(self) -> dict[str, np.ndarray]:
        """Constants that are too large for texts, by digest."""
        return self._table("blobs")

    def _table(self, kind: str) -> dict[str, np.ndarray]:
        """Arrays of a table of the header by name."""
        if kind not in self._tables:
            self._tables[kind] = self.container.arrays_of(self.header.get(kind), kind)
        return self._tables[kind]

    # -- programs

    def program(
        self,
        number: int,
        threads: int,
        debug: str | None = None,
        weight_budget: int | None = None,
        make: Callable[..., CompiledProgram] | None = None,
    ) -> CompiledProgram:
        """The program of a variant that the caller trusts: its plan and code are taken as they are.
        `weight_budget` bytes replace the budget that it was compiled with."""
        about = self._variants[number]
        streamed = weight_budget is not None or "weight_budget" in about["options"]
        self.container.stay_in_file = streamed  # before an array is taken
        with self._damage("code"):
            open_runtime(self.part(f"{number}.runtime"))  # which guards arrays, too
        with self._damage("plan"):
            lir = StoredLir(self, number, about)
        with meanwhile(lambda: self._check_weights(number, streamed), "rlx-check") as checked:
            from rlx.runtime.program import CompiledProgram  # start time: while weights are compared

            kernels, code = self._code(number, resolve(about["target"]))
            checked()
        if weight_budget is not None:
            lir.set_weight_budget(weight_budget, kernels.cuts)
        weights: Weights
        with self._damage("weights"):
            addresses = self._checked_addresses(about)
        if streamed:
            from rlx.runtime.native.streaming import streamed_weights  # start time

            weights = streamed_weights(lir, dict(self.params), self.container, about["weights"])
        else:
            weights = self._weights(lir, about["weights"], addresses)
        return (make or CompiledProgram)(lir, kernels, code, threads, debug, weights)

    def _checked_addresses(self, about: Json) -> dict[int, np.ndarray]:
        """Weights that kernels compute addresses from must stay in range, whoever signed the file, and
        whoever writes to it: here they are in memory of our own, by node."""
        numbers, found = dict(about["weights"]), {}
        for id, name, attrs in about["addresses"]:
            op = get_op(name)
            if id in numbers:
                raw, stored = self.container.raw(numbers[id]), self.container.array(numbers[id])
                own = allocate(len(raw), fence=True).array
                own[:] = raw
                array = own.view(stored.dtype).reshape(stored.shape)
                fault = op.check_stored(array, **op.canonical_attrs(attrs))
                if fault is not None:
                    raise self.container.fail(f"its weights hold {fault}")
                found[id] = own
        return found

    def _code(self, number: int, target: Target) -> tuple[KernelSet, object]:
        blob = self.part(f"{number}.code")
        with self._damage("code"):
            return open_blob(blob, target)

    @contextmanager
    def _damage(self, what: str) -> Iterator[None]:
        """A part that its user trusts may still be damaged, or not be what it says."""
        try:
            yield
        except RlxError:
            raise
        except Exception as e:
            raise self.container.fail(f"its {what} is damaged ({type(e).__name__})") from e

    def _weights(
        self, lir: LirModule, entries: Iterable[tuple[int, int]], own: Mapping[int, np.ndarray]
    ) -> Weights:
        """Weights where they lie in the file, or in memory of our `own`; every one must have the size of its
        node."""
        memory: dict[int, np.ndarray] = {}
        for id, number in entries:
            if not 0 <= id < len(lir.outline.nodes):
                raise self.container.fail(f"it has a weight for %{id}, which its plan does not have")
            node, raw = lir.outline.nodes[id], self.container.raw(number)
            if node.op.role not in (Role.PARAM, Role.CONSTANT) or len(raw) != _static_bytes(node):
                raise self.container.fail(f"it has a weight of {len(raw)} bytes for {node}")
            memory[id] = own.get(id, raw)
        return Weights(lir, dict(self.params), memory, self.container)


def _static_bytes(node: Node) -> int:
    size = node.tensor.nbytes
    return size if isinstance(size, int) else -1


def _is_variant(about: object) -> bool:
    kinds = {
        "target": str,
        "generator": str,
        "gate": dict,
        "options": dict,
        "assume": dict,
        "weights": list,
        "addresses": list,
        "mac": str,
    }
    if not isinstance(about, dict) or not all(isinstance(about.get(key), kinds[key]) for key in kinds):
        return False
    pairs = about["weights"]
    return all(isinstance(p, list) and len(p) == 2 and all(type(n) is int for n in p) for p in pairs)


__all__ = ["Artifact", "ArtifactWarning", "Origin", "generator", "signed_bytes"]
