"""Running the steps of a program in a context: native segments, host thunks, sizes that data decide."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rlx.codegen.cpu.kernels import KernelSet
from rlx.errors import KernelError, RlxError
from rlx.ir.bind import match_shape
from rlx.ir.graph import Graph, Node
from rlx.ir.operand import Arrays
from rlx.ir.symbols import NOT_FOUND
from rlx.ir.types import type_symbols
from rlx.kernel.control import broken_guard
from rlx.plan.lir import LirBufferPlan, LirModule
from rlx.plan.phase import Phase
from rlx.runtime.context import Context, Step
from rlx.runtime.debug import WATCHES, Watch
from rlx.runtime.memory import OutputPool
from rlx.runtime.native.driver import CLOSED_BRANCH, RecordError
from rlx.runtime.sizes import Sizes
from rlx.runtime.weights import Weights

if TYPE_CHECKING:
    from rlx.driver.buffer import Buffer

MESSAGES = {
    1: "an index from data is out of range",
    CLOSED_BRANCH: "data chose a branch that assumes other sizes than those of this run",
}


class Given(NamedTuple):
    """What a run is given: inputs in order, states (which it replaces), sizes (to which it adds those that it
    finds), phases to skip, and outputs, by number, that have been computed before."""

    inputs: Sequence[np.ndarray]
    states: Mapping[str, np.ndarray | Buffer]
    binding: dict[str, int]
    skip: Collection[Phase] = ()
    kept: Mapping[int, np.ndarray] = {}


class Execution:
    """The part of a program that runs it."""

    lir: LirModule
    graph: Graph
    kernels: KernelSet
    inputs: list[Node]
    outputs: list[Node]
    debug: str | None
    _weights: Weights
    _output_memory: OutputPool
    _sizes: Sizes | None
    _found_later: list[str]

    def describe(self, node: Node) -> str:
        """A kernel's ops, for messages."""
        raise NotImplementedError

    def _make_context(self, binding: Mapping[str, int], profile: bool = False) -> Context:
        raise NotImplementedError

    def _until_found(self, binding: Mapping[str, int]) -> Mapping[str, int]:
        """All sizes of a run; those that data have not decided yet have a stand-in."""
        return {**dict.fromkeys(self._found_later, NOT_FOUND), **binding} if self._found_later else binding

    def execute(self, context: Context, given: Given) -> list[np.ndarray]:
        """Outputs of a run in a context."""
        with self._weights.running():
            return self._run_steps(context, given)

    def _run_steps(self, context: Context, given: Given) -> list[np.ndarray]:
        binding = given.binding
        outputs = [self._output_memory.empty(shape, d) for shape, d in self._output_shapes(context)]
        for number, array in given.kept.items():
            outputs[number] = array
        self._connect(context, given, outputs)
        watch = self._watch(context)
        number = 0
        while number < len(context.steps):
            step = context.steps[number]
            if step.phase in given.skip:
                number += 1
                continue
            found, value = self._run_step(context, step, number, watch)
            number += 1
            if found:  # sizes that depend on data are known now
                binding |= found
                self.lir.planner.check_guards(binding)
                context = self._at_sizes(context, binding, set(found), number)
                shapes = self._output_shapes(context)
                outputs = [
                    old if old.shape == shape else np.empty(shape, kind)
                    for old, (shape, kind) in zip(outputs, shapes, strict=True)
                ]
                self._connect(context, given, outputs)
                assert value is not None, "what reveals a size has a value"
                self._store_thunk(context, step, value)
                watch = watch and watch.moved(context, number)
        return outputs

    def _at_sizes(self, context: Context, binding: dict[str, int], found: set[str], done: int) -> Context:
        """Where a run goes on after `done` steps that have found sizes: in the same memory if it has room for
        all that they can be, else in memory that is planned for them."""
        if all(context.plan.binding[s] == binding[s] for s in found):
            return context
        if self._sizes is not None and found <= self._sizes.room.keys():
            context.move_to(self._until_found(binding))
            return context
        later = self._make_context(binding, context.profile)
        if context.profile:
            context.later, context.left_at = later, done
        later.take_over(context, done)
        return later

    def _output_shapes(self, context: Context) -> list[tuple[tuple[int, ...], np.dtype]]:
        """Shape and dtype of every output; worked out once per context."""
        if context.output_shapes is None:
            binding = context.plan.binding
            context.output_shapes = [(n.tensor.bind(binding), n.dtype.np) for n in self.outputs]
        return context.output_shapes

    def _connect(self, context: Context, given: Given, outputs: Sequence[np.ndarray]) -> None:
        for node, array in zip(self.inputs, given.inputs, strict=True):
            context.connect(node.id, array)
        for node, array in zip(self.outputs, outputs, strict=True):
            context.connect(node.id, array)
        if context.connected is not given.states:
            context.connected = given.states
            for name, node in self.graph.state_inputs.items():
                state = given.states[name]
                assert isinstance(state, np.ndarray), "states of a program on the host are arrays"
                context.connect(node.id, state)

    def _watch(self, context: Context) -> Watch | None:
        """Who looks at the steps of a run in debug mode."""
        return None if self.debug is None else WATCHES[self.debug](context, self.describe)

    def _run_step(
        self, context: Context, step: Step, number: int = 0, watch: Watch | None = None
    ) -> tuple[dict[str, int], Arrays | None]:
        """Run one step; returns the sizes that it revealed and, with them, the value that did, which is not
        stored yet: it may need another place."""
        if self._weights.ring is not None:
            context.arrive(step, self._weights)
        if watch is None:
            return self._run_unwatched(context, step)
        watch.before(number)
        found, value = self._run_unwatched(context, step)
        if not found:
            watch.after(number)
        return found, value

    def _run_unwatched(self, context: Context, step: Step) -> tuple[dict[str, int], Arrays | None]:
        if step.program is not None:
            try:
                step.program.run()
            except RecordError as e:
                raise self.kernel_error(e, context.plan.binding) from None
            return self._revealed(context, step) if step.reveals else ({}, None)
        assert step.thunk is not None
        start = time.perf_counter_ns()
        found, out = self._on_host(self.lir.mir.nodes[step.thunk.node], context.plan, context.array)
        if not found:
            self._store_thunk(context, step, out)
        step.span = (start, time.perf_counter_ns())
        return found, out

    def _on_host(
        self, node: Node, plan: LirBufferPlan, array: Callable[[Node], np.ndarray]
    ) -> tuple[dict[str, int], Arrays]:
        """A node computed by its reference: the sizes that it revealed, and its value."""
        from rlx.reference.interpreter import Interpreter  # start time: native code needs none

        unknown = self.finds(node)
        known = {k: v for k, v in plan.binding.items() if k not in unknown}
        interpreter = Interpreter(self.lir.mir, known)
        for o in node.operands:
            interpreter.values[o.id] = array(o)
        try:
            out = interpreter.compute(node)
        except RlxError:
            raise
        except Exception as e:
            told = f"{self.describe(node)} raised {type(e).__name__} on the host: {e}"
            raise KernelError(told, node.where) from e
        return {k: v for k, v in interpreter.binding.items() if k in unknown}, out

    def _revealed(self, context: Context, step: Step) -> tuple[dict[str, int], np.ndarray]:
        """Size and value of a result that a kernel has left in scratch."""
        node = self.graph.nodes[step.nodes[0]]
        words = context.scratch.array.view(node.dtype.np)
        lead, count = node.tensor.shape[0], int(words[0])
        value = words[1 : 1 + lead * count].reshape(lead, count).copy()
        unknown = self.finds(node)
        known = {k: v for k, v in context.plan.binding.items() if k not in unknown}
        match_shape(node.shape, value.shape, known, f"result of {node.op.name}")
        if not unknown:
            self._store_thunk(context, step, value)
        return {k: v for k, v in known.items() if k in unknown}, value

    def finds(self, node: Node) -> set[str]:
        """Sizes that a node decides by data."""
        known = {s for o in node.operands for s in type_symbols(o.type)}
        return {s for s in type_symbols(node.type) if s in self._found_later and s not in known}

    def _store_thunk(self, context: Context, step: Step, out: Arrays) -> None:
        node = self.graph.nodes[step.nodes[0]]
        for target, value in zip(
            self.graph.results(node), out if isinstance(out, tuple) else (out,), strict=True
        ):
            if context.stores(target.id):
                data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
                context.raw(target.id)[: data.size] = data  # there may be room for more

    def kernel_error(self, e: RecordError, binding: Mapping[str, int]) -> Exception:
        if not e.name:  # a gate
            return self._weights.failure() or e
        node = self.graph.nodes[int(e.name)]
        what = MESSAGES.get(e.code, f"error code {e.code}")
        if e.code == CLOSED_BRANCH:
            broken = [c.describe() for c in (broken_guard(b, binding) for b in node.bodies) if c is not None]
            what += f": {broken[0]}" if broken else ""
        return KernelError(f"kernel {self.describe(node)}: {what}", node.where)
