"""Executes LIR with NumPy exactly as planned: schedule, slots, aliases, spaces.

The oracle for native backends.

Kernels compute by the reference of their ops, but read and write only the bytes that the plan gives them.
With `poison`, memory is overwritten before the run and wherever a value ends, so a plan that frees too early,
places two values together or reads what nobody wrote gives NaN (or another absurd value) instead of a lucky
result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from rlx.errors import InputError, PlanError
from rlx.ir.bind import as_given, check_array, match_shape
from rlx.ir.dim import evaluate as size_of
from rlx.ir.graph import Graph, Node
from rlx.ir.op import BodyRunner, Role
from rlx.ir.symbols import sizes_at_bounds
from rlx.ir.types import Type, tensor_types, type_symbols
from rlx.plan.lir import LirBufferPlan, LirBufferSlot, LirModule, LirWorkspace
from rlx.plan.lir_check import written_by
from rlx.reference.interpreter import Interpreter, evaluate

POISON = 0xFF  # NaN in every float, -1 or the largest value in integers


class PlannedRun:
    """A graph of kernels on memory that a plan has placed: spaces as arrays of bytes."""

    def __init__(self, graph: Graph, plan: LirBufferPlan, poison: bool) -> None:
        self.graph, self.plan, self.poison = graph, plan, poison
        self.binding: dict[str, int] = dict(plan.binding)
        self.memory: dict[str, np.ndarray] = {}  # space -> bytes

    def run_kernels(self, before: Callable[[int], None] = lambda step: None) -> None:
        """All kernels in their order; `before` is called with the number of each."""
        for step, kernel in enumerate(self.plan.schedule):
            before(step)
            self._run_kernel(self.graph.nodes[kernel])
            if self.poison:
                self._spoil_dead(step)

    def _bytes(self, value: int) -> np.ndarray:
        slot = self.plan.assignments[value]
        return self.memory[slot.space][slot.offset : slot.offset + slot.size]

    def read(self, node: Node) -> np.ndarray:
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

    def write(self, node: Node, value: np.ndarray) -> None:
        """Store a value in its own bytes."""
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
        run = _OneKernel(self.graph, self.binding, self)
        for o in node.operands:
            run.values[o.id] = self.read(o)
        out = run.compute(node)
        results = written_by(self.graph, node)
        values = out if isinstance(out, tuple) else (out,)
        numbers = [r.attrs["index"] if r.op.role is Role.RESULT else 0 for r in results]
        found = {s: n for s, n in run.binding.items() if s not in self.binding}
        if found and any(_mentions(t, found) for t in tensor_types(node.type)):
            self._grow(found, node)
        for result, number in zip(results, numbers, strict=True):
            if result.id in self.plan.assignments:
                self.write(result, np.array(values[number]))

    def _grow(self, found: Mapping[str, int], at: Node) -> None:
        """Sizes that depend on data are known now."""
        raise PlanError(f"%{at.id} decides a size by data, which a body cannot be planned for", at.where)


class _OneKernel(Interpreter):
    """Computes one node of a planned run: its bodies run in their workspace."""

    def __init__(self, graph: Graph, binding: Mapping[str, int], owner: PlannedRun) -> None:
        super().__init__(graph, binding)
        self.owner = owner

    def bodies(self, node: Node) -> BodyRunner:
        work = self.owner.plan.work.get(node.id)
        if work is None:
            return super().bodies(node)
        start, size = work.slot.offset, work.slot.size
        place = self.owner.memory["activation"][start : start + size]
        return _PlannedBodies(node, work, place, self.owner.poison)


class _PlannedBodies:
    """Runs the bodies of a node in its workspace, for its `ref`."""

    def __init__(self, node: Node, work: LirWorkspace, place: np.ndarray, poison: bool) -> None:
        self.node, self.work, self.place, self.poison = node, work, place, poison

    def __call__(self, number: int, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        plan = _at_shapes(self.work.bodies[number], self.node.bodies[number], values)
        run = PlannedRun(self.node.bodies[number], plan, self.poison)
        fill = POISON if self.poison else 0
        run.memory = {space: np.full(n, fill, np.uint8) for space, n in plan.sizes().items()}
        start = self.work.arena_offset
        run.memory["activation"] = self.place[start : start + plan.arena_size]
        run.memory["activation"][:] = fill
        for node, value in zip(run.graph.inputs, values, strict=True):
            run.write(node, value)
        for node in run.graph.nodes:
            if node.op.role is Role.CONSTANT:
                run.write(node, node.attrs["value"].array)
        run.run_kernels()
        return [np.array(run.read(node)) for node in run.graph.outputs.values()]

    def empty(self, number: int) -> list[np.ndarray]:
        binding = dict(self.work.bodies[number].binding)
        outputs = self.node.bodies[number].outputs.values()
        return [np.empty(n.tensor.bind(binding), n.dtype.np) for n in outputs]

    def planned(self, number: int, symbol: str) -> int | None:
        return self.work.bodies[number].binding.get(symbol)


def _at_shapes(plan: LirBufferPlan, body: Graph, values: Sequence[np.ndarray]) -> LirBufferPlan:
    """A body's plan where its inputs are smaller than planned, as the last of several slices may be."""
    found: dict[str, int] = {}
    for node, value in zip(body.inputs, values, strict=True):
        match_shape(node.shape, value.shape, found, "an input of a body")
    binding = {**plan.binding, **found}
    if binding == plan.binding:
        return plan
    slots = {
        id: replace(slot, size=size_of(body.nodes[id].tensor.nbytes, binding))
        for id, slot in plan.assignments.items()
    }
    return replace(plan, binding=binding, assignments=slots)


class LirInterpreter(PlannedRun):
    """Runs one program; `memory` and `plan` stay readable after a run.

    >>> import rlx
    >>> from rlx.api.compile import plan
    >>> g = rlx.Graph("double")
    >>> g.output("y", g.input("x", ("n",), "f32") * 2.0)
    >>> LirInterpreter(plan(g), poison=True).run({"x": np.array([1, 2, 3], np.float32)})["y"]
    array([2., 4., 6.], dtype=float32)
    """

    def __init__(self, module: LirModule, poison: bool = False) -> None:
        super().__init__(module.mir, module.plan, poison)
        self.module = module
        self.states: dict[str, np.ndarray] = {}
        self.room: dict[str, int] = {}  # sizes that data decides -> the most they can be
        self.joined: dict[int, np.ndarray] = {}  # weights that come in parts: those that have come

    def run(
        self,
        inputs: Mapping[str, object],
        params: Mapping[str, object] | None = None,
        states: Mapping[str, object] | None = None,
    ) -> dict[str, np.ndarray]:
        """Outputs by name; `states` after the run are in `self.states`."""
        given = self._given(inputs, params, states or {})
        self.room = {} if self.plan.work else sizes_at_bounds(self.graph, self.binding)
        self._place()
        streamed = {f.node for f in self.plan.fetches}
        for node, array in given.items():
            if node not in streamed:
                self.write(self.graph.nodes[node], array)
        self.run_kernels(lambda step: self._fetch(step, given))
        self.states = {s.name: np.array(self.read(s.output)) for s in self.graph.states}
        return {name: np.array(self.read(node)) for name, node in self.graph.outputs.items()}

    # -- what goes in

    def _given(
        self, inputs: Mapping[str, object], params: Mapping[str, object] | None, states: Mapping[str, object]
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
            array = as_given(node.tensor, value)
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

    def _weights(self, params: Mapping[str, object]) -> dict[str, object]:
        """Values of the program's params; derived ones are computed from the user's."""
        derived = self.module.derived
        if derived is None:
            return {**self.graph.param_values, **params}
        own = {**derived.param_values, **params}
        return {**own, **evaluate(derived, {}, own)}

    # -- memory

    def _planned(self) -> LirBufferPlan:
        """The plan for the sizes that are known; others that have a bound have room for it."""
        found = self.module.planner.within(self.binding, self.room)
        return replace(found, assignments=dict(found.assignments))  # streamed weights move

    def _place(self) -> None:
        """Fresh memory for the sizes that are known."""
        self.plan = self._planned()
        fill = POISON if self.poison else 0
        self.memory = {space: np.full(n, fill, np.uint8) for space, n in self.plan.sizes().items()}

    def _fetch(self, step: int, given: Mapping[int, np.ndarray]) -> None:
        """Fill the ring as early as the plan allows, and read each weight where its latest fetch put it.

        A kernel that runs part by part is computed at once, with the parts as it would find them.
        """
        for point in self.plan.stops():
            if point[0] != step:
                continue
            for f in self.plan.fetches:
                place = self.memory["ring"][f.offset : f.offset + f.size] if f.starts <= point else None
                if place is not None and f.starts == point:
                    whole = np.ascontiguousarray(given[f.node]).reshape(-1).view(np.uint8)
                    place[:] = whole[f.begin : f.begin + f.size]
                if place is not None and f.awaited == point and f.parts:
                    self.joined[f.node] = np.concatenate([self.joined[f.node], place] if f.part else [place])
                elif f.awaited == point:
                    self.plan.assignments[f.node] = LirBufferSlot(f.offset, f.size, "ring")

    def _bytes(self, value: int) -> np.ndarray:
        joined = self.joined.get(value)
        return super()._bytes(value) if joined is None else joined

    def _grow(self, found: Mapping[str, int], at: Node) -> None:
        """Sizes that depend on data are known now: where there is room for them, values stay where they are;
        else all is placed anew, and what was computed carried over."""
        self.binding |= found
        if found.keys() <= self.room.keys():
            self.plan = self._planned()
            return
        old_plan, old_memory = self.plan, self.memory
        self._place()
        done = old_plan.schedule[: old_plan.schedule.index(at.id)]
        kept = {r.id for k in done for r in written_by(self.graph, self.graph.nodes[k])}
        kept |= {i for i, slot in old_plan.assignments.items() if slot.space != "activation"}
        step = len(done)
        for value in sorted(kept & self.plan.assignments.keys() & old_plan.assignments.keys()):
            alive = value not in self.plan.lifetimes or self.plan.lifetimes[value][1] >= step
            slot = old_plan.assignments[value]
            if alive and slot.size == self.plan.assignments[value].size:
                self._bytes(value)[:] = old_memory[slot.space][slot.offset : slot.offset + slot.size]


def _mentions(type_: Type, names: Mapping[str, int]) -> bool:
    return any(s in names for s in type_symbols(type_))


def run_lir(
    module: LirModule,
    inputs: Mapping[str, object],
    params: Mapping[str, object] | None = None,
    poison: bool = False,
) -> dict[str, np.ndarray]:
    """Outputs by name of a program, executed as planned.

    >>> import rlx
    >>> from rlx.api.compile import plan
    >>> g = rlx.Graph("sum")
    >>> g.output("y", rlx.ops.sum(g.input("x", (3,), "f32")))
    >>> run_lir(plan(g), {"x": np.ones(3, np.float32)})["y"]
    array(3., dtype=float32)
    """
    return LirInterpreter(module, poison).run(inputs, params)
