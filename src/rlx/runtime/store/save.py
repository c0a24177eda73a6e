"""Writing compiled programs to `.rlx` files; `rlx.runtime.store.artifact` describes and reads them."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlx.errors import FormatError
from rlx.files import Json
from rlx.ir.dtype import DType, ParamValue, dtype
from rlx.ir.graph import Graph
from rlx.ir.op import Role
from rlx.ir.text.container import Stored
from rlx.ir.text.write import graph_text
from rlx.plan.lir import LirModule
from rlx.plan.outline import outline
from rlx.records import dataclass
from rlx.runtime.derive import lazy_weights
from rlx.runtime.memory import drop_pages
from rlx.runtime.native_code import code_blob, runtime_blob
from rlx.runtime.recover import Steps, recoverable, recovery
from rlx.runtime.store import container
from rlx.runtime.store.cache import ObjectCache, default_cache
from rlx.runtime.store.origin import (
    ABOUT,
    DEFLATED,
    INNER,
    RECOVERY,
    Origin,
    generator,
    inner_header,
    signed_bytes,
)
from rlx.runtime.store.trust import MAC_BYTES
from rlx.target.cpu import resolve

if TYPE_CHECKING:
    from rlx.runtime.program import CompiledProgram

_NO_MAC = "0" * 2 * MAC_BYTES
_RARELY_READ = ("plan", "unfused", "source", RECOVERY)  # texts of a program that runs without them


class _Arrays:
    """Arrays of a file; each is stored once, whoever refers to it. With `by_content`, equal ones are one."""

    def __init__(self, by_content: bool) -> None:
        self.arrays: list[Stored] = []
        self._number: dict[object, int] = {}
        self._by_content = by_content

    def add(self, key: object, array: Stored) -> int:
        if self._by_content:
            dense = np.ascontiguousarray(array)  # computed here, if it is a lazy one
            digest = hashlib.sha256(dense.reshape(-1).view(np.uint8).data).digest()
            drop_pages(dense)
            key = (digest, str(dtype(array.dtype)), array.shape)
        if key not in self._number:
            self._number[key] = len(self.arrays)
            self.arrays.append(array)
        return self._number[key]


def save(
    program: CompiledProgram,
    path: str | os.PathLike[str],
    targets: Sequence[str] = (),
    facts: Json | None = None,
    own: bool = True,
) -> None:
    """Write a program to a file, with code for its own target (unless `own` is off) and for `targets`.

    `facts` are JSON values of the caller's that are kept in the header.
    """
    if not isinstance(path, str | os.PathLike):
        raise FormatError(f"a program is saved to a path, for example 'model.rlx', not to {path!r}")
    origin, values = _origin_of(program), program.stored_params
    write(path, program.lir, origin, program.weight_memory, values, targets, facts, own=own)


def lir_for(program: CompiledProgram, target: str) -> LirModule:
    """The plan of a program for another target, with the values that its params have now."""
    origin = _origin_of(program)
    return _planned(origin, origin.graph(), resolve(target).name, program.stored_params)


def _origin_of(program: CompiledProgram) -> Origin:
    if program.origin is None:
        raise FormatError(
            f"program {program.graph.name!r} does not know its graph; use one that rlx.compile returned"
        )
    return program.origin


def write(
    path: str | os.PathLike[str],
    lir: LirModule,
    origin: Origin,
    weights: Mapping[int, Stored],
    values: Mapping[str, ParamValue],
    targets: Sequence[str] = (),
    facts: Json | None = None,
    cache: ObjectCache | None = None,
    last: Callable[[], None] = lambda: None,
    own: bool = True,
) -> None:
    """Write a program; its weights are arrays, their bytes, or lazy arrays, by node id.

    Code comes from `cache` and is signed with its key. `last` is called when everything has been read and
    written; if it raises, there is no file."""
    program = Saved(lir, origin, weights, values, facts or {}, own)
    write_programs(path, program, {}, {}, targets, cache, last)


@dataclass(frozen=True, eq=False)
class Saved:
    """A program on its way into a file; see `write`."""

    lir: LirModule
    origin: Origin
    weights: Mapping[int, Stored]
    values: Mapping[str, ParamValue]
    facts: Json
    own: bool = True

    @staticmethod
    def of(program: CompiledProgram, facts: Json, own: bool = True) -> Saved:
        """A program as it is now."""
        values = program.stored_params
        return Saved(program.lir, _origin_of(program), program.weight_memory, values, facts, own)

    def variants(self, source: Graph, targets: Sequence[str]) -> list[_Variant]:
        """The program for its own target and for others."""
        found = [_Variant(self.lir, self.weights)] if self.own else []
        known = {resolve(v.lir.target).name for v in found}
        for target in (resolve(t).name for t in targets):
            if resolve(target).web:
                raise FormatError(
                    f"a .rlx file has no code for {target}; export it: rlx export MODEL --wasm DIR"
                )
            if target not in known:
                known.add(target)
                other = _planned(self.origin, source, target, self.values)
                values = (other.derived or other.mir).param_values
                found.append(_Variant(other, lazy_weights(other, values)))
        return found

    def write(self, file: _Contents, prefix: str, targets: Sequence[str], first: bool) -> Json:
        """Add parts and arrays; returns what the header says of this program. That of the first one has the
        params, which all have in common."""
        source = self.origin.graph()
        variants = self.variants(source, targets)
        described = [v.write(f"{prefix}{i}.", file, self.values) for i, v in enumerate(variants)]
        file.parts[prefix + "source"] = graph_text(source, blobs=file.blobs).encode()
        states = file.numbers("states", source.state_values)
        own = {"name": source.name, "facts": dict(self.facts), "variants": described, "states": states}
        if not first:
            return own
        given: dict[str, ParamValue] = {**source.param_values, **self.values}
        packed = _packed_params(variants[0].lir, variants[0].weights, given)
        if packed:
            file.parts[RECOVERY] = graph_text(recovery(variants[0].lir, packed)).encode()
        kept = {name: value for name, value in given.items() if name not in packed}
        return {
            **own,
            "packed_params": {n: [str(dtype(given[n].dtype)), list(given[n].shape)] for n in packed},
            "params": file.numbers("params", kept),
        }


class _Contents:
    """What goes into a file."""

    def __init__(self, cache: ObjectCache, shared: bool) -> None:
        self.cache, self.parts, self.blobs = cache, dict[str, bytes](), dict[str, np.ndarray]()
        self.arrays = _Arrays(by_content=shared)

    def numbers(self, kind: str, table: Mapping[str, Stored]) -> dict[str, int]:
        """Numbers of arrays by name."""
        return {name: self.arrays.add((kind, name), array) for name, array in table.items()}

    def deflate(self) -> None:
        """Compress the texts that running does not read, unless they are most of the file."""
        room = sum(array.nbytes for array in self.arrays.arrays)
        for name, content in list(self.parts.items()):
            if name.rpartition("/")[2].rpartition(".")[2] in _RARELY_READ and len(content) <= room:
                self.parts[name + DEFLATED] = zlib.compress(self.parts.pop(name))


def write_programs(
    path: str | os.PathLike[str],
    program: Saved,
    inner: Mapping[str, Saved],
    about: Mapping[str, bytes],
    targets: Sequence[str] = (),
    cache: ObjectCache | None = None,
    last: Callable[[], None] = lambda: None,
) -> None:
    """Write a program, others of the same params beside it, and parts of the caller's own."""
    cache = cache or default_cache()
    file = _Contents(cache, shared=bool(inner))
    header = program.write(file, "", targets, first=True)
    beside = {name: one.write(file, f"{name}/", targets, first=False) for name, one in inner.items()}
    header["blobs"] = file.numbers("blobs", file.blobs)
    if inner:
        header[INNER] = beside
        file.deflate()
    parts = {**file.parts, **{ABOUT + name: content for name, content in about.items()}}

    def seal(complete: Json) -> None:
        last()
        whole = {"": complete, **{f"{name}/": inner_header(complete, name) for name in beside}}
        for prefix, one in whole.items():
            for number, variant in enumerate(one["variants"]):
                variant["mac"] = cache.ring().sign(signed_bytes(one, number, prefix)).hex()

    container.write(path, header, parts, file.arrays.arrays, seal)


def _packed_params(
    lir: LirModule, weights: Collection[int], given: Collection[str]
) -> dict[str, tuple[int, Steps]]:
    """Params that the file has only as the first variant reads them. Those that it reads as they are given
    are stored once anyway, and others may read them, too."""
    found = recoverable(lir, weights)
    return {name: (id, steps) for name, (id, steps) in found.items() if steps and name in given}


def _address_weights(lir: LirModule) -> list[list[object]]:
    """Weights that kernels compute addresses from: node, and the op with its attributes that made them."""
    made = {} if lir.derived is None else lir.derived.outputs
    found = []
    for node in lir.mir.nodes:
        by = made.get(node.attrs["name"]) if node.op.role is Role.PARAM else None
        if by is not None and by.op.has("check_stored"):
            attrs = {k: v.name if isinstance(v, DType) else v for k, v in by.attrs.items()}
            found.append([node.id, by.op.name, attrs])
    return found


def _planned(origin: Origin, source: Graph, target: str, values: Mapping[str, ParamValue]) -> LirModule:
    """The program for another target, with the values that params have now."""
    lir = origin.plan(source, target)
    for graph in (lir.mir, lir.derived):
        if graph is not None:
            graph.param_values |= {k: v for k, v in values.items() if k in graph.params}
    return lir


@dataclass
class _Variant:
    """A program for one target, on its way into a file."""

    lir: LirModule
    weights: Mapping[int, Stored]  # arrays, their bytes, or lazy arrays, by node id

    def write(self, prefix: str, file: _Contents, values: Mapping[str, ParamValue]) -> Json:
        """Add parts and arrays; returns the description for the header."""
        lir, target = self.lir, resolve(self.lir.target)
        parts, blobs, cache = file.parts, file.blobs, file.cache
        outlined = {"graph": outline(lir.mir, blobs), "placer": lir.planner.to_json()}
        parts[prefix + "plan"] = lir.to_text(blobs).encode()
        parts[prefix + "outline"] = json.dumps(outlined).encode()
        parts[prefix + "code"] = code_blob(lir, target, cache)
        parts[prefix + "runtime"] = runtime_blob(target, cache, streams="weight_budget" in lir.options)
        unfused = b"" if lir.unfused is None else graph_text(lir.unfused, blobs=blobs).encode()
        parts[prefix + "unfused"] = unfused
        weights = []
        for id, weight in self.weights.items():
            node = lir.mir.nodes[id]
            direct = node.op.role is Role.PARAM and node.attrs["name"] in values
            key = ("params", node.attrs["name"]) if direct else (prefix, id)
            if isinstance(weight, np.ndarray):
                weight = weight.view(node.dtype.np).reshape(node.shape)
            weights.append([id, file.arrays.add(key, weight)])
        return {
            "target": target.name,
            "generator": generator(),
            "options": lir.options,
            "assume": dict(lir.planner.binding),
            "gate": lir.gate,
            "weights": weights,
            "addresses": _address_weights(lir),
            "mac": _NO_MAC,
        }
