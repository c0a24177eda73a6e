"""Weights of a program: params, derived weights and constants in one region, shared by all runs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rlx.ir.lir import ALIGNMENT, LirModule
from rlx.ir.op import Role
from rlx.runtime.memory import Region, allocate


def _room(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Weights:
    """Memory of every weight node of a program, by node id.

    Weights that were laid out before are given with the `values` of params that they were made from.
    """

    def __init__(
        self,
        lir: LirModule,
        values: dict[str, np.ndarray] | None = None,
        memory: dict[int, np.ndarray] | None = None,
    ) -> None:
        self.lir = lir
        self.values = dict((lir.derived or lir.mir).param_values) if values is None else values
        self.memory: dict[int, np.ndarray] = {} if memory is None else memory
        self.region: Region | None = None
        if memory is None:
            self.load()

    def load(self) -> None:
        """Run the derived-weight graph and lay everything out; params without a value are left out."""
        arrays = self._arrays()
        region = allocate(max(sum(_room(a.nbytes) for a in arrays.values()), ALIGNMENT))
        memory, at = {}, 0
        for id, array in arrays.items():
            dense = np.ascontiguousarray(array)
            place = region.array[at : at + dense.nbytes]
            place[:] = dense.reshape(-1).view(np.uint8)
            memory[id] = place
            at += _room(dense.nbytes)
        self.memory, self.region = memory, region

    def _arrays(self) -> dict[int, np.ndarray]:
        from rlx.backend.reference.interpreter import evaluate

        derived, graph = self.lir.derived, self.lir.mir
        computed: Mapping[str, np.ndarray] = {}
        if derived is not None and all(name in self.values for name in derived.params):
            computed = evaluate(derived, {}, self.values)
        arrays: dict[int, np.ndarray] = {}
        for node in graph.nodes:
            if node.op.role is Role.CONSTANT:
                arrays[node.id] = node.attrs["value"].array
            elif node.op.role is Role.PARAM:
                name = node.attrs["name"]
                found = computed.get(name, self.values.get(name))
                if found is not None:
                    arrays[node.id] = found
        return arrays

    def set(self, name: str, value: np.ndarray) -> None:
        """Give a param a value; what is derived from it follows."""
        source = self.lir.derived or self.lir.mir
        source.set_param(name, value)
        self.values[name] = source.param_values[name]
        self.load()
