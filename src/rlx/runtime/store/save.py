"""Writing compiled programs to `.rlx` files; `rlx.runtime.store.artifact` describes and reads them."""

from __future__ import annotations

import json
import os
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
from rlx.runtime.native_code import code_blob, runtime_blob
from rlx.runtime.recover import Steps, recoverable, recovery
from rlx.runtime.store import container
from rlx.runtime.store.cache import ObjectCache, default_cache
from rlx.runtime.store.origin import RECOVERY, Origin, generator, signed_bytes
from rlx.runtime.store.trust import MAC_BYTES
from rlx.target.cpu import resolve

if TYPE_CHECKING:
    from rlx.runtime.program import CompiledProgram

_NO_MAC = "0" * 2 * MAC_BYTES


class _Arrays:
    """Arrays of a file; each is stored once, whoever refers to it."""

    def __init__(self) -> None:
        self.arrays: list[Stored] = []
        self._number: dict[object, int] = {}

    def add(self, key: object, array: Stored) -> int:
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
    cache = cache or default_cache()
    source = origin.graph()
    arrays, parts, blobs = _Arrays(), dict[str, bytes](), dict[str, np.ndarray]()
    variants = [_Variant(lir, weights)] if own else []
    known = {resolve(v.lir.target).name for v in variants}
    for target in (resolve(t).name for t in targets):
        if resolve(target).web:
            raise FormatError(f"a .rlx file has no code for {target}; export it: rlx export MODEL --wasm DIR")
        if target not in known:
            known.add(target)
            other = _planned(origin, source, target, values)
            variants.append(_Variant(other, lazy_weights(other, (other.derived or other.mir).param_values)))
    described = [v.write(f"{i}.", parts, blobs, arrays, values, cache) for i, v in enumerate(variants)]
    parts["source"] = graph_text(source, blobs=blobs).encode()
    given: dict[str, ParamValue] = {**source.param_values, **values}
    packed = _packed_params(lir, weights, given) if own else {}
    if packed:
        parts[RECOVERY] = graph_text(recovery(lir, packed)).encode()
    kept = {name: value for name, value in given.items() if name not in packed}
    tables: dict[str, Mapping[str, Stored]]
    tables = {"params": kept, "states": source.state_values, "blobs": blobs}

    def seal(header: Json) -> None:
        last()
        for number, variant in enumerate(header["variants"]):
            variant["mac"] = cache.ring().sign(signed_bytes(header, number)).hex()

    header = {
        "name": source.name,
        "facts": dict(facts or {}),
        "variants": described,
        "packed_params": {n: [str(dtype(given[n].dtype)), list(given[n].shape)] for n in packed},
        **{kind: _add_all(arrays, kind, table) for kind, table in tables.items()},
    }
    container.write(path, header, parts, arrays.arrays, seal)


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


def _add_all(arrays: _Arrays, kind: str, table: Mapping[str, Stored]) -> dict[str, int]:
    return {name: arrays.add((kind, name), array) for name, array in table.items()}


@dataclass
class _Variant:
    """A program for one target, on its way into a file."""

    lir: LirModule
    weights: Mapping[int, Stored]  # arrays, their bytes, or lazy arrays, by node id

    def write(
        self,
        prefix: str,
        parts: dict[str, bytes],
        blobs: dict[str, np.ndarray],
        arrays: _Arrays,
        values: Mapping[str, ParamValue],
        cache: ObjectCache,
    ) -> Json:
        """Add parts and arrays; returns the description for the header."""
        lir, target = self.lir, resolve(self.lir.target)
        outlined = {"graph": outline(lir.mir, blobs), "placer": lir.planner.to_json()}
        parts[prefix + "plan"] = lir.to_text(blobs).encode()
        parts[prefix + "outline"] = json.dumps(outlined).encode()
        parts[prefix + "code"] = code_blob(lir, target, cache)
        parts[prefix + "runtime"] = runtime_blob(target, cache, streams="weight_budget" in lir.options)
        parts[prefix + "unfused"] = (
            b"" if lir.unfused is None else graph_text(lir.unfused, blobs=blobs).encode()
        )
        weights = []
        for id, weight in self.weights.items():
            node = lir.mir.nodes[id]
            direct = node.op.role is Role.PARAM and node.attrs["name"] in values
            key = ("params", node.attrs["name"]) if direct else (prefix, id)
            if isinstance(weight, np.ndarray):
                weight = weight.view(node.dtype.np).reshape(node.shape)
            weights.append([id, arrays.add(key, weight)])
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
