"""A compiled program on a device with its own memory: uploads, launches in a queue, read-backs.

Every space of the plan is one arena on the device. A node without a kernel is a host thunk: its operands are
read back, its reference computes, its results are uploaded; the queue is empty at that point, a sync point.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from rlx.codegen.cpu.kernels import KernelSet
from rlx.codegen.opencl.build import OpenCLTarget, build_kernels, program_text, resolve
from rlx.codegen.opencl.printer import PrintedKernel
from rlx.driver.buffer import Buffer, BufferHandle
from rlx.driver.device import open_device
from rlx.errors import KernelError, UnsupportedError
from rlx.ir.graph import Graph, Node
from rlx.ir.operand import Arrays
from rlx.plan.lir import LirModule
from rlx.plan.phase import Phase
from rlx.runtime.bound import check_bound
from rlx.runtime.derive import params_without_value
from rlx.runtime.device_context import DeviceContext, arena_for
from rlx.runtime.execution import MESSAGES, Given
from rlx.runtime.program import CompiledProgram

if TYPE_CHECKING:
    from rlx.driver.arena import Arena
    from rlx.driver.opencl.device import OpenCLDevice


class DeviceProgram(CompiledProgram):
    """What `rlx.compile(..., device="opencl")` returns: called, asked and explained like any program."""

    moves_sizes = False
    quick = False

    def __init__(self, lir: LirModule, kernels: KernelSet, device: str, debug: str | None = None) -> None:
        if debug not in (None, "nan"):
            raise UnsupportedError(f"debug={debug!r} watches host memory; compile for device 'cpu' to use it")
        opened: Any = open_device(device)
        super().__init__(lir, kernels, None, opened.capabilities.compute_units, debug)
        self._sizes = None  # arguments of kernels are set for one binding: other sizes have other contexts
        self.device = self.state_device = device
        self._opened: OpenCLDevice = opened
        self._weight_arena: Arena | None = None
        self._opening = threading.Lock()
        self._printed = {k.name: k for k in kernels.kernels.values() if isinstance(k, PrintedKernel)}
        self._ready()

    @property
    def stats(self) -> dict[str, Any]:
        """As for other programs; `sync_points` are those of one run: its host thunks and its end."""
        return {**super().stats, "device": self.device, "sync_points": len(self.kernels.thunks) + 1}

    def set_param(self, name: str, value: np.ndarray) -> None:
        """Give a parameter a value; derived weights follow, and all are uploaded before the next run."""
        with self._opening:  # no run may meet new weights and their old copy on the device
            super().set_param(name, value)
            self._weight_arena = None

    def explain(self, measure: bool = False, binding: Mapping[str, int] | None = None) -> str:
        """What the program does, why it was fused so, and where its memory goes."""
        if measure:
            raise UnsupportedError(
                f"decisions are measured on 'cpu' only; explain {self.device} without measure"
            )
        return super().explain(binding=binding)

    def save(self, path: str | os.PathLike[str], targets: Sequence[str] = ()) -> None:
        """Files hold programs for the host: one for a device is refused."""
        raise UnsupportedError(
            f"a program for {self.device} cannot be saved; compile for 'cpu' and save that, or save the graph"
        )

    def trace(self, inputs: Mapping[str, object], rounds: int = 1) -> NoReturn:
        """Kernels on a device are not timed by this version."""
        raise UnsupportedError(f"a program for {self.device} has no traces; compile for 'cpu' to trace it")

    def bind(self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> Callable[[], None]:
        """A function that runs the program on fixed arrays: they are uploaded and read back by every call."""
        check_bound(self, inputs, outputs)

        def run() -> None:
            for name, value in self.run(inputs).items():
                outputs[name][...] = value

        return run

    # -- the device

    def state_memory(self, handle: BufferHandle) -> Buffer:
        """States of streams stay on the device from step to step."""
        return handle.buffer

    def _ready(self) -> tuple[OpenCLDevice, Arena]:
        """The device with this program's kernels and weights on it; one that was lost is opened again."""
        with self._opening:
            if self._opened.lost:
                reopened: Any = open_device(self.device)
                self._opened, self._weight_arena = reopened, None
                with self._lock:
                    self._free.clear()
            device = self._opened
            device.ensure(self._printed, lambda names: program_text(self._printed[n] for n in names))
            if self._weight_arena is None:
                self._weight_arena = self._uploaded_weights(device)
            return device, self._weight_arena

    def _uploaded_weights(self, device: OpenCLDevice) -> Arena:
        plan = self.lir.plan
        arena = arena_for(device, self.graph, plan, "weight")
        for id, data in self._weights.memory.items():
            arena.memory.write(plan.assignments[id].offset, data)
        return arena

    def acquire(self, binding: dict[str, int], last: Any = None) -> Any:
        """As for other programs; a context of a lost device, or one whose run failed, is not used again."""
        self._ready()
        if last is not None and (last.failed or last.device is not self._opened):
            last = None
        return super().acquire(binding, last)

    def release(self, context: Any) -> None:
        """Give a context back to the pool if it is good for another run."""
        if not context.failed and context.device is self._opened:
            super().release(context)

    def _make_context(self, binding: Mapping[str, int], profile: bool = False) -> Any:
        device, weights = self._ready()
        sizes = self._until_found(binding)
        plan = self._plan_for(binding, sizes)
        read = {plan.root(o.id) for id in plan.schedule for o in self.graph.nodes[id].operands}
        for id in sorted(read):
            if plan.assignments[id].space == "weight" and id not in self._weights.memory:
                raise params_without_value(self.lir)
        values = self._dims([plan.binding[s] for s in self._symbols])
        return DeviceContext(self.graph, self.kernels, device, plan, values, weights, self._key(sizes))

    # -- running

    def execute(self, context: Any, given: Given) -> list[np.ndarray]:
        """Upload, run and read back, but for the epilogue if it is to be skipped; replaces states, which are
        arrays of the host or buffers of the device. Nothing else on the device is kept from run to run, so
        the prologue is never skipped.
        """
        late = Phase.EPILOGUE in given.skip
        first, now = context, context
        first.failed = True  # until it is proved otherwise
        self._feed(now, given)
        for number, id in enumerate(first.plan.schedule):
            node = self.graph.nodes[id]
            if late and first.plan.phases.get(id) is Phase.EPILOGUE:
                continue
            if id not in self.kernels.thunks:
                now.launch(id)
            elif not self.finds(node):
                now.stream.call(partial(self._thunk, now, node))
            else:
                now = self._reveal(now, node, number, given)
            if self.debug is not None:
                self._finish(now)
                self._check_results(now, node)
        outputs = [
            self._output_memory.empty(n.tensor.bind(now.plan.binding), n.dtype.np) for n in self.outputs
        ]
        for node, array in zip(self.outputs, outputs, strict=True):
            now.download(node.id, array)
        self._finish(now)
        self._replace(now, given.states)
        first.failed = False
        return outputs

    def _replace(self, context: DeviceContext, states: Mapping[str, np.ndarray | Buffer]) -> None:
        """Give states their new values, after a run that has done well."""
        on_device, new = False, []
        for s in self.graph.states:
            state = states[s.name]
            if isinstance(state, Buffer):
                context.keep(s.output, state)
                on_device = True
            else:
                new.append((s.output, state))
        if on_device:
            context.stream.submit_and_wait()
        values = [np.array(context.array(output)) for output, _ in new]  # one may be another's
        for (_, state), value in zip(new, values, strict=True):
            state[...] = value

    def _feed(self, context: DeviceContext, given: Given) -> None:
        context.begin()
        for node, array in zip(self.inputs, given.inputs, strict=True):
            context.upload(node.id, array)
        for name, node in self.graph.state_inputs.items():
            state = given.states[name]
            if isinstance(state, Buffer):
                context.stream.copy(state, context.tile(node.id))
            else:
                context.upload(node.id, state)

    def _finish(self, context: DeviceContext) -> None:
        context.finish()
        for id, code in context.reported():
            node = self.graph.nodes[id]
            what = MESSAGES.get(code, f"error code {code}")
            raise KernelError(f"kernel {self.describe(node)}: {what}", node.where)

    def _thunk(self, context: DeviceContext, node: Node) -> None:
        """Compute a node on the host; its operands are on the device, the queue is empty."""
        self._store(context, node, self._computed(context, node)[1])

    def _computed(self, context: DeviceContext, node: Node) -> tuple[dict[str, int], Arrays]:
        return self._on_host(self.lir.mir.nodes[node.id], context.plan, context.array)

    def _store(self, context: DeviceContext, node: Node, out: Arrays) -> None:
        values = out if isinstance(out, tuple) else (out,)
        for target, value in zip(self.graph.results(node), values, strict=True):
            if target.id in context.plan.assignments:
                tile = context.tile(target.id)
                tile.memory.write(tile.offset, np.ascontiguousarray(value).reshape(-1).view(np.uint8))

    def _reveal(self, context: DeviceContext, node: Node, number: int, given: Given) -> DeviceContext:
        """Run a node whose result has a size that depends on data: the rest is planned for what it is."""
        self._finish(context)
        found, out = self._computed(context, node)
        given.binding.update(found)
        self.lir.planner.check_guards(given.binding)
        if any(context.plan.binding[s] != n for s, n in found.items()):
            later: DeviceContext = self._make_context(given.binding)
            self._feed(later, given)
            later.take_over(context, context.plan.schedule[:number])
            self._finish(later)
            context = later
        self._store(context, node, out)
        return context

    def _check_results(self, context: DeviceContext, node: Node) -> None:
        for result in self.graph.results(node):
            if result.dtype.is_float and result.id in context.plan.assignments:
                if not np.isfinite(context.array(result).astype(np.float32)).all():
                    raise KernelError(f"kernel {self.describe(node)} produced a NaN or infinity", node.where)


def compile_for_device(
    graph: Graph, device: str, target: str, debug: str | None, planned: Callable[[Graph, str], LirModule]
) -> DeviceProgram:
    """The program of a graph for a device; `planned` plans it for a target, "host" is what the device has."""
    if target == "host":
        target = OpenCLTarget(open_device(device).capabilities.float64).name
    lir = planned(graph, target)
    return DeviceProgram(lir, build_kernels(lir, resolve(target)), device, debug)
