"""A compiled program: native code, weights, and one set of buffers per concurrent run."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlx.backend.cpu.build import HostThunk, KernelSet
from rlx.backend.cpu.frame import EmittedKernel
from rlx.backend.reference.interpreter import Interpreter, evaluate
from rlx.errors import InputError, KernelError
from rlx.ir.bind import check_array
from rlx.ir.dim import compile_dims
from rlx.ir.graph import Node
from rlx.ir.lir import LirBufferPlan, LirModule
from rlx.ir.op import Role
from rlx.ir.types import tensor_types
from rlx.runtime.driver import NativeProgram, Record, RecordError
from rlx.runtime.memory import Region, allocate

MESSAGES = {1: "an index from data is out of range"}


@dataclass
class Step:
    """One native segment or one host thunk."""

    program: NativeProgram | None
    thunk: HostThunk | None


@dataclass
class Context:
    """Buffers and argument tables for one run at a time, for one binding."""

    plan: LirBufferPlan
    arena: Region
    scratch: Region
    steps: list[Step]
    input_places: list[list[tuple[np.ndarray, int, int]]]  # per input: (table, index, byte offset of a view)
    output_places: list[list[tuple[np.ndarray, int, int]]]
    arrays: dict[int, np.ndarray] = field(default_factory=dict)  # roots with fixed memory, as uint8
    bound: dict[int, np.ndarray] = field(default_factory=dict)  # inputs and outputs of this run


class CompiledProgram:
    """What `rlx.compile` returns: call it, bind it, look into it, save it."""

    def __init__(self, lir: LirModule, kernels: KernelSet, code: Any, threads: int, debug: str | None = None) -> None:
        self.lir, self.kernels, self._code, self.threads, self.debug = lir, kernels, code, threads, debug
        self.graph = lir.mir
        self.inputs: list[Node] = self.graph.inputs
        self.outputs: list[Node] = list(self.graph.outputs.values())
        self.output_names = list(self.graph.outputs)
        self._symbols = self.graph.symbols()
        self._free: dict[tuple[int, ...], list[Context]] = {}
        self._plans: dict[tuple[int, ...], LirBufferPlan] = {}
        self._lock = threading.Lock()
        self.param_values: dict[str, np.ndarray] = {}
        self._weights: dict[int, np.ndarray] = {}
        self._load_weights(dict((lir.derived or self.graph).param_values))
        dims = [d for k in kernels.kernels.values() for d in (*k.dims, k.scratch_per_thread)]
        self._dims = compile_dims(dims, self._symbols)
        self.stats: dict[str, Any] = {
            "kernels": len(kernels.kernels),
            "distinct_kernels": kernels.distinct,
            "host_thunks": [
                {"node": t.node, "op": self.graph.nodes[t.node].op.name, "why": t.why} for t in kernels.thunks.values()
            ],
        }

    # -- weights

    def _load_weights(self, values: dict[str, np.ndarray]) -> None:
        """Params, derived weights and constants into one region of huge pages."""
        self.param_values = values
        derived = self.lir.derived
        arrays: dict[int, np.ndarray] = {}
        computed = evaluate(derived, {}, values) if derived is not None else {}
        for node in self.graph.nodes:
            if node.op.role is Role.CONSTANT:
                arrays[node.id] = node.attrs["value"].array
            elif node.op.role is Role.PARAM:
                name = node.attrs["name"]
                found = computed.get(name, values.get(name))
                if found is not None:
                    arrays[node.id] = found
        total = sum(-(-a.nbytes // 64) * 64 for a in arrays.values())
        region = allocate(max(total, 64))
        at = 0
        for id, array in arrays.items():
            dense = np.ascontiguousarray(array)
            place = region.array[at : at + dense.nbytes]
            place[:] = dense.reshape(-1).view(np.uint8)
            self._weights[id] = place
            at += -(-dense.nbytes // 64) * 64
        self._weight_region = region

    def set_param(self, name: str, value: np.ndarray) -> None:
        """Give a parameter a value; derived weights follow."""
        source = self.lir.derived or self.graph
        source.set_param(name, value)
        with self._lock:
            self._free.clear()
            self._load_weights(dict(source.param_values))

    # -- running

    def run(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Outputs by name for a dict of inputs."""
        names = [n.attrs["name"] for n in self.inputs]
        for key in inputs:
            if key not in names:
                raise InputError(f"unknown input {key!r}; program {self.graph.name!r} has: {', '.join(names) or 'none'}")
        missing = [n for n in names if n not in inputs]
        if missing:
            raise InputError(f"input {missing[0]!r} of program {self.graph.name!r} is missing")
        values = self._run([inputs[n] for n in names])
        return dict(zip(self.output_names, values, strict=True))

    def __call__(self, *inputs: Any) -> Any:
        """Outputs for inputs in order: one array, or a tuple."""
        if len(inputs) != len(self.inputs):
            raise InputError(f"program {self.graph.name!r} takes {len(self.inputs)} inputs, got {len(inputs)}")
        out = self._run(inputs)
        return out[0] if len(out) == 1 else tuple(out)

    def _run(self, given: Sequence[Any]) -> list[np.ndarray]:
        binding: dict[str, int] = {}
        arrays = []
        for node, value in zip(self.inputs, given, strict=True):
            array = np.asarray(value)
            check_array(node.tensor, array, binding, f"input {node.attrs['name']!r}")
            arrays.append(array if array.flags.c_contiguous else np.ascontiguousarray(array))
        outputs = [np.empty(n.tensor.bind(binding), n.dtype.np) for n in self.outputs]
        context = self._acquire(binding)
        try:
            self._execute(context, arrays, outputs)
        finally:
            self._release(context)
        return outputs

    def _execute(self, context: Context, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> None:
        for places, array in zip(context.input_places, inputs, strict=True):
            address = array.ctypes.data
            for table, index, offset in places:
                table[index] = address + offset
        for places, array in zip(context.output_places, outputs, strict=True):
            address = array.ctypes.data
            for table, index, offset in places:
                table[index] = address + offset
        if self.kernels.thunks:
            for node, array in zip([*self.inputs, *self.outputs], [*inputs, *outputs], strict=True):
                context.bound[node.id] = array.reshape(-1).view(np.uint8)
        for step in context.steps:
            if step.program is not None:
                try:
                    step.program.run()
                except RecordError as e:
                    node = self.graph.nodes[int(e.name)]
                    raise KernelError(
                        f"kernel {self.describe(node)}: {MESSAGES.get(e.code, f'error code {e.code}')}", node.where
                    ) from None
            else:
                assert step.thunk is not None
                self._run_thunk(context, step.thunk)

    def describe(self, node: Node) -> str:
        """A kernel's ops, for messages."""
        ops = [n.op.name for n in node.bodies[0].nodes if n.op.role is Role.COMPUTE] if node.bodies else [node.op.name]
        return f"%{node.id} ({' + '.join(ops)})"

    def _run_thunk(self, context: Context, thunk: HostThunk) -> None:
        node = self.graph.nodes[thunk.node]
        interpreter = Interpreter(self.graph, context.plan.binding)
        for o in node.operands:
            interpreter.values[o.id] = self._array(context, o)
        out = interpreter.compute(node)
        results = self.graph.results(node)
        for target, value in zip(results, out if isinstance(out, tuple) else (out,), strict=True):
            self._memory(context, target.id)[:] = np.ascontiguousarray(value).reshape(-1).view(np.uint8)

    def _memory(self, context: Context, root: int) -> np.ndarray:
        found = context.bound.get(root)
        return context.arrays[root] if found is None else found

    def _array(self, context: Context, node: Node) -> np.ndarray:
        """A value as NumPy sees it."""
        plan, shape, itemsize = context.plan, node.tensor.bind(context.plan.binding), node.dtype.itemsize
        alias = plan.view_aliases.get(node.id)
        raw = self._memory(context, alias.root if alias else node.id)
        if alias is None or alias.strides is None:
            start = alias.byte_offset if alias else 0
            count = int(np.prod(shape, dtype=np.int64)) * itemsize
            return raw[start : start + count].view(node.dtype.np).reshape(shape)
        flat = raw.view(node.dtype.np)[alias.byte_offset // itemsize :]
        return np.lib.stride_tricks.as_strided(flat, shape, [s * itemsize for s in alias.strides])

    # -- contexts

    def plan_for(self, binding: Mapping[str, int]) -> LirBufferPlan:
        """The plan for a binding; cached."""
        key = tuple(binding[s] for s in self._symbols)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self.lir.planner.plan(binding)
        return plan

    def memory(self, binding: Mapping[str, int] | None = None) -> dict[str, int]:
        """Bytes per space for a binding, before running."""
        plan = self.plan_for(binding or {})
        sizes = plan.sizes()
        values = self._dims([plan.binding[s] for s in self._symbols])
        sizes["scratch"] = self._scratch_bytes(values) * self.threads
        return sizes

    def _scratch_bytes(self, values: Sequence[int]) -> int:
        at, most = 0, 0
        for k in self.kernels.kernels.values():
            at += len(k.dims) + 1
            most = max(most, values[at - 1])
        return -(-most // 64) * 64

    def _acquire(self, binding: Mapping[str, int]) -> Context:
        key = tuple(binding[s] for s in self._symbols)
        with self._lock:
            free = self._free.get(key)
            if free:
                return free.pop()
        return self._make_context(self.plan_for(binding))

    def _release(self, context: Context) -> None:
        key = tuple(context.plan.binding[s] for s in self._symbols)
        with self._lock:
            self._free.setdefault(key, []).append(context)

    def _make_context(self, plan: LirBufferPlan) -> Context:
        values = self._dims([plan.binding[s] for s in self._symbols])
        per_thread = self._scratch_bytes(values)
        arena = allocate(max(plan.arena_size, 64))
        scratch = allocate(max(per_thread * self.threads, 64))
        arrays: dict[int, np.ndarray] = dict(self._weights)
        for id, slot in plan.assignments.items():
            if slot.space == "activation":
                arrays[id] = arena.array[slot.offset : slot.offset + slot.size]
        context = Context(plan, arena, scratch, [], [[] for _ in self.inputs], [[] for _ in self.outputs], arrays)
        number = {n.id: i for i, n in enumerate(self.inputs)}
        out_number = {n.id: i for i, n in enumerate(self.outputs)}
        dims_at, at = {}, 0
        for id, k in self.kernels.kernels.items():
            dims_at[id] = at
            at += len(k.dims) + 1
        batch: list[int] = []

        def flush() -> None:
            if batch:
                context.steps.append(Step(self._segment(context, batch, values, dims_at, per_thread, number, out_number), None))
                batch.clear()

        for id in plan.schedule:
            if id in self.kernels.thunks:
                flush()
                context.steps.append(Step(None, self.kernels.thunks[id]))
            else:
                batch.append(id)
        flush()
        return context

    def _segment(
        self,
        context: Context,
        nodes: Sequence[int],
        values: Sequence[int],
        dims_at: Mapping[int, int],
        per_thread: int,
        inputs: Mapping[int, int],
        outputs: Mapping[int, int],
    ) -> NativeProgram:
        """Argument tables of a run of kernels."""
        plan, records = context.plan, []
        for id in nodes:
            kernel: EmittedKernel = self.kernels.kernels[id]
            node = self.graph.nodes[id]
            fields = 3 + len(node.operands) + len(tensor_types(node.type)) + len(kernel.dims)
            records.append(Record(self._code.address(kernel.name), fields, str(id), serial=kernel.serial))
        program = NativeProgram(records, threads=self.threads, keep=self._code)
        table = program.table
        for i, id in enumerate(nodes):
            kernel, node, start = self.kernels.kernels[id], self.graph.nodes[id], program.start(i)
            table[start + 1] = context.scratch.address
            table[start + 2] = per_thread
            at = start + 3
            for value in (*node.operands, *self.graph.results(node)):
                alias = plan.view_aliases.get(value.id)
                root, offset = (alias.root, alias.byte_offset) if alias else (value.id, 0)
                if root in inputs:
                    context.input_places[inputs[root]].append((table, at, offset))
                elif root in outputs:
                    context.output_places[outputs[root]].append((table, at, offset))
                else:
                    if root not in context.arrays:
                        raise InputError(f"{self.graph.nodes[root]!r} has no value; give params theirs with set_param")
                    table[at] = context.arrays[root].ctypes.data + offset
                at += 1
            first = dims_at[id]
            table[at : at + len(kernel.dims)] = values[first : first + len(kernel.dims)]
        return program

    def explain(self) -> str:
        """What the program does and where its memory goes."""
        from rlx.plan.explain import explain

        return explain(self)


