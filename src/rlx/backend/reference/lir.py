"""Executes LIR with NumPy exactly as planned: schedule, slots, aliases, spaces.

The oracle for native backends.

Kernels compute by the reference of their ops, but read and write only the bytes that the plan gives them.
With `poison`, memory is spoilt before the run and wherever a value ends, so a plan that frees too early,
places two values together or reads what nobody wrote gives NaN (or another absurd value) instead of a lucky
result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rlx.backend.reference.interpreter import Interpreter, evaluate
from rlx.errors import InputError
from rlx.ir.bind import check_array
from rlx.ir.graph import Node
from rlx.ir.lir import LirBufferPlan, LirBufferSlot, LirModule
from rlx.ir.lir_check import written_by
from rlx.ir.op import Role
from rlx.ir.types import tensor_types

POISON = 0xFF  # NaN in every float, -1 or the largest value in integers


class LirInterpreter:
    """Runs one program; `memory` and `plan` stay readable after a run.

    >>> import rlx
    >>> from rlx.compile import plan
    >>> g = rlx.Graph("double")
    >>> g.output("y", g.input("x", ("n",), "f32") * 2.0)
    >>> LirInterpreter(plan(g), poison=True).run({"x": np.array([1, 2, 3], np.float32)})["y"]
    array([2., 4., 6.], dtype=float32)
    """

    def __init__(self, module: LirModule, poison: bool = False) -> None:
        self.module, self.graph, self.poison = module, module.mir, poison
        self.plan: LirBufferPlan = module.plan
        self.binding: dict[str, int] = {}
        self.memory: dict[str, np.ndarray] = {}  # space -> bytes
        self.states: dict[str, np.ndarray] = {}

    def run(
        self,
        inputs: Mapping[str, Any],
        params: Mapping[str, Any] | None = None,
        states: Mapping[str, Any] | None = None,
    ) -> dict[str, np.ndarray]:
        """Outputs by name; `states` after the run are in `self.states`."""
        given = self._given(inputs, params, states or {})
        later = [s for s in self.graph.symbols() if s not in self.binding]
        self._place({**self.binding, **dict.fromkeys(later, 0)})
        streamed = {f.node for f in self.plan.fetches}
        for node, array in given.items():
            if node not in streamed:
                self._write(self.graph.nodes[node], array)
        for step, kernel in enumerate(self.plan.schedule):
            self._fetch(step, given)
            self._run_kernel(self.graph.nodes[kernel])
            if self.poison:
                self._spoil_dead(step)
        self.states = {s.name: np.array(self._read(s.output)) for s in self.graph.states}
        return {name: np.array(self._read(node)) for name, node in self.graph.outputs.items()}

    # -- what goes in

    def _given(
        self, inputs: Mapping[str, Any], params: Mapping[str, Any] | None, states: Mapping[str, Any]
    ) -> dict[int, np.ndarray]:
        self.binding = {}
        values: dict[int, np.ndarray] = {}
        named = [(n, "input", inputs.get(n.attrs["name"])) for n in self.graph.inputs]
        weights = self._weights(params or {})
        named += [(n, "param", weights.get(name)) for name, n in self.graph.params.items()]
        for node, kind, value in named:
            name = node.attrs["name"]
            if value is None:
                raise InputError(f"{kind} {name!r} ({node.type}) of program {self.graph.name!r} is missing")
            array = np.asarray(value)
            check_array(node.tensor, array, self.binding, f"{kind} {name!r}")
            values[node.id] = array
        for name, node in self.graph.state_inputs.items():
            shape = node.tensor.bind(self.binding)
            known = states.get(name, self.graph.state_values.get(name))
            values[node.id] = np.zeros(shape, node.dtype.np) if known is None else np.asarray(known)
        for node in self.graph.nodes:
            if node.op.role is Role.CONSTANT:
                values[node.id] = node.attrs["value"].array
        return values

    def _weights(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Values of the program's params; derived ones are computed from the user's."""
        derived = self.module.derived
        if derived is None:
            return {**self.graph.param_values, **params}
        own = {**derived.param_values, **params}
        return {**own, **evaluate(derived, {}, own)}

    # -- memory

    def _place(self, binding: Mapping[str, int]) -> None:
        """Fresh memory for a binding."""
        found = self.module.specialize(binding).plan
        self.plan = replace(found, assignments=dict(found.assignments))  # streamed weights move
        fill = POISON if self.poison else 0
        self.memory = {space: np.full(n, fill, np.uint8) for space, n in self.plan.sizes().items()}

    def _fetch(self, step: int, given: Mapping[int, np.ndarray]) -> None:
        """Fill the ring as early as the plan allows, and read each weight where its latest fetch put it."""
        for f in self.plan.fetches:
            if f.at == step:
                place = self.memory["ring"][f.offset : f.offset + f.size]
                place[:] = np.ascontiguousarray(given[f.node]).reshape(-1).view(np.uint8)
            if f.first == step:
                self.plan.assignments[f.node] = LirBufferSlot(f.offset, f.size, "ring")

    def _bytes(self, value: int) -> np.ndarray:
        slot = self.plan.assignments[value]
        return self.memory[slot.space][slot.offset : slot.offset + slot.size]

    def _read(self, node: Node) -> np.ndarray:
        """A value as an array over its bytes: its own, or through a view."""
        shape, itemsize = node.tensor.bind(self.plan.binding), node.dtype.itemsize
        alias = self.plan.view_aliases.get(node.id)
        if alias is None or alias.strides is None:
            start = alias.byte_offset if alias else 0
            raw = self._bytes(self.plan.root(node.id))
            count = int(np.prod(shape, dtype=np.int64)) * itemsize
            return raw[start : start + count].view(node.dtype.np).reshape(shape)
        flat = self._bytes(alias.root).view(node.dtype.np)[alias.byte_offset // itemsize :]
        return np.lib.stride_tricks.as_strided(flat, shape, [s * itemsize for s in alias.strides])

    def _write(self, node: Node, value: np.ndarray) -> None:
        target = self._bytes(node.id)
        if target.size:
            target[:] = np.ascontiguousarray(value).reshape(-1).view(np.uint8)

    def _spoil_dead(self, step: int) -> None:
        """Overwrite values whose last step this was, unless another value took their place."""
        for value, (_, last) in self.plan.lifetimes.items():
            if last == step and value not in self.plan.shared.values() and not self._is_needed(value):
                self._bytes(value)[:] = POISON

    def _is_needed(self, value: int) -> bool:
        return any(self.plan.root(n.id) == value for n in self.graph.roots())

    # -- kernels

    def _run_kernel(self, node: Node) -> None:
        run = Interpreter(self.graph, self._known())
        for o in node.operands:
            run.values[o.id] = self._read(o)
        out = run.compute(node)
        results = written_by(self.graph, node)
        values = out if isinstance(out, tuple) else (out,)
        numbers = [r.attrs["index"] if r.op.role is Role.RESULT else 0 for r in results]
        found = {s: n for s, n in run.binding.items() if s not in self.binding}
        if found and any(_mentions(t, found) for t in tensor_types(node.type)):
            self._grow(found, node)
        for result, number in zip(results, numbers, strict=True):
            if result.id in self.plan.assignments:
                self._write(result, np.array(values[number]))

    def _known(self) -> dict[str, int]:
        return dict(self.binding)

    def _grow(self, found: Mapping[str, int], at: Node) -> None:
        """Sizes that depend on data are known now: place anew, and carry over what was computed."""
        self.binding |= found
        old_plan, old_memory = self.plan, self.memory
        later = [s for s in self.graph.symbols() if s not in self.binding]
        self._place({**self.binding, **dict.fromkeys(later, 0)})
        done = old_plan.schedule[: old_plan.schedule.index(at.id)]
        kept = {r.id for k in done for r in written_by(self.graph, self.graph.nodes[k])}
        kept |= {i for i, slot in old_plan.assignments.items() if slot.space != "activation"}
        step = len(done)
        for value in sorted(kept & self.plan.assignments.keys() & old_plan.assignments.keys()):
            alive = value not in self.plan.lifetimes or self.plan.lifetimes[value][1] >= step
            slot = old_plan.assignments[value]
            if alive and slot.size == self.plan.assignments[value].size:
                self._bytes(value)[:] = old_memory[slot.space][slot.offset : slot.offset + slot.size]


def _mentions(type_: Any, names: Mapping[str, int]) -> bool:
    from rlx.ir.types import type_symbols

    return any(s in names for s in type_symbols(type_))


def run_lir(
    module: LirModule,
    inputs: Mapping[str, Any],
    params: Mapping[str, Any] | None = None,
    poison: bool = False,
) -> dict[str, np.ndarray]:
    """Outputs by name of a program, executed as planned.

    >>> import rlx
    >>> from rlx.compile import plan
    >>> g = rlx.Graph("sum")
    >>> g.output("y", rlx.ops.sum(g.input("x", (3,), "f32")))
    >>> run_lir(plan(g), {"x": np.ones(3, np.float32)})["y"]
    array(3., dtype=float32)
    """
    return LirInterpreter(module, poison).run(inputs, params)
