"""Streams: runs of one program in a row, with their own states in handles that outlive every run."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from rlx.driver.buffer import Buffer, BufferHandle
from rlx.errors import InputError, UnsupportedError
from rlx.ir.dtype import plain_array
from rlx.ir.graph import Node
from rlx.ir.types import type_symbols
from rlx.ir.weights import ALIASED, round_up
from rlx.plan.phase import Phase
from rlx.runtime.context import Context
from rlx.runtime.execution import Given
from rlx.runtime.memory import HUGE_PAGE

if TYPE_CHECKING:
    from rlx.runtime.program import CompiledProgram

NOTHING: frozenset[Phase] = frozenset()


class Stream:
    """What `program.stream()` returns. One thread at a time steps it; other streams run concurrently.

    The prologue runs with the first step; its results stay in the stream's memory.

    >>> import rlx
    >>> g = rlx.Graph("last")
    >>> before, x = g.state("before", (2,), "f32"), g.input("x", (2,), "f32")
    >>> g.set_state("before", x)
    >>> g.output("change", x - before)
    >>> stream = rlx.compile(g).stream()
    >>> [stream.step({"x": np.full(2, n, np.float32)})["change"].tolist() for n in (3, 5)]
    [[3.0, 3.0], [2.0, 2.0]]
    >>> stream.state("before").read().tolist()
    [5.0, 5.0]
    """

    def __init__(
        self,
        program: CompiledProgram,
        inputs: Mapping[str, object],
        states: Mapping[str, BufferHandle],
        sizes: Mapping[str, int],
    ) -> None:
        self.program = program
        graph, plan = program.graph, program.lir.planner
        self._name = graph.name
        self._binding: dict[str, int] = dict(sizes)  # sizes that hold for the whole stream
        self._arrays: list[np.ndarray] = [_NONE] * len(program.inputs)  # of all inputs, in order
        self._steps: dict[str, int] = {}  # inputs of every step -> their numbers
        once = {n.attrs["name"] for n in program.inputs if n.attrs.get("once")}
        self._refuse_unknown(inputs, once, "declared once")
        for number, name in enumerate(program.input_names):
            if name not in once:
                self._steps[name] = number
            elif name in inputs:
                # A copy: the prologue may run again, whatever the caller does to the array.
                own = np.array(plain_array(inputs[name], f"input {name!r}"))
                self._arrays[number] = program.entries[number](own, self._binding)
            else:
                raise InputError(
                    f"input {name!r} of {self._name!r} is read once per stream; give it to stream()"
                )
        made_in = [plan.phases.get(n.id) for n in program.outputs]
        self._late = [n for n, p in zip(graph.outputs, made_in, strict=True) if p is Phase.EPILOGUE]
        self._first = [number for number, p in enumerate(made_in) if p is Phase.PROLOGUE]
        self._kept: dict[int, np.ndarray] = {}  # outputs of the prologue, which steps may read
        self._prologue = [k for k in plan.order if plan.phases.get(k) is Phase.PROLOGUE]
        self._given = dict(states)
        self._handles: dict[str, BufferHandle] | None = None
        self._memory: dict[str, np.ndarray | Buffer] = {}  # of the states, as the program takes it
        if all(s in self._binding for n in graph.state_inputs.values() for s in type_symbols(n.type)):
            self._bind_states()
        self._context: Context | None = None
        self._started = self._spoilt = False
        self._turn = threading.Lock()

    # -- running

    def __repr__(self) -> str:
        names = ", ".join(self.program.graph.state_inputs) or "none"
        now = "failed, call reset()" if self._spoilt else "running" if self._started else "not started"
        return f"<stream of {self._name!r}: states {names}; {now}>"

    def step(
        self, inputs: Mapping[str, object] | None = None, epilogue: bool = True
    ) -> dict[str, np.ndarray]:
        """Run the steady part and the epilogue on the inputs of a step; returns the outputs by name.

        Without `epilogue`, what follows the last heavy step is not run, and its outputs are left out.
        """
        given = {} if inputs is None else inputs
        with self._turn:
            if self._spoilt:
                raise InputError(
                    f"a step of this stream of {self._name!r} failed halfway; call reset() first"
                )
            program, binding = self.program, dict(self._binding)
            arrays, entries = self._arrays, program.entries
            try:
                for name, number in self._steps.items():
                    arrays[number] = entries[number](given[name], binding)
            except KeyError as e:
                if e.args[0] in self._steps:
                    raise InputError(f"input {e.args[0]!r} of program {self._name!r} is missing") from None
                raise
            if len(given) != len(self._steps):
                self._refuse_unknown(given, self._steps, "of every step")
            if self._handles is None:
                self._bind_states(binding)
            context = self._context_for(binding)
            skip = NOTHING if epilogue else _EPILOGUE
            if self._started:
                skip |= _PROLOGUE
            return self._run(context, binding, skip)

    def _run(
        self, context: Context, binding: dict[str, int], skip: frozenset[Phase]
    ) -> dict[str, np.ndarray]:
        try:
            kept = self._kept if self._started else {}
            given = Given(self._arrays, self._memory, binding, skip, kept)
            values = self.program.execute(context, given)
        except BaseException as e:
            self._spoilt = bool(self._memory)  # a kernel may have replaced part of the states
            self._started = False
            bug = self.program.found_bug(e) if isinstance(e, Exception) else None
            if bug is None:
                raise
            raise bug from e
        if not self._started:
            self._kept = {number: values[number] for number in self._first}
            self._started = self.program.debug is None  # debug modes overwrite what a run leaves behind
        for number in self._first:
            values[number] = values[number].copy()
        out = dict(zip(self.program.output_names, values, strict=True))
        if Phase.EPILOGUE in skip:
            for name in self._late:
                del out[name]
        return out

    def _context_for(self, binding: dict[str, int]) -> Context:
        """The stream's context, or another if sizes require it; results of the prologue move there."""
        old = self._context
        found = self.program.acquire(binding, old)
        if old is not None and found is not old:
            if found.generation != old.generation:  # weights have changed, and so has the prologue
                self._started = False
            if self._started and self._prologue:
                found.take_results(self._prologue, old)
            self.program.release(old)
        self._context = found
        return found

    # -- states

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the states."""
        return tuple(self.program.graph.state_inputs)

    def state(self, name: str) -> BufferHandle:
        """The memory of a state, which steps read and replace in place: `state(name).buffer.numpy()`."""
        if name not in self.program.graph.state_inputs:
            known = ", ".join(self.states) or "none"
            raise InputError(f"program {self._name!r} has no state {name!r}; it has: {known}")
        if self._handles is None:
            raise InputError(
                f"the size of state {name!r} is known with the first step; run one, or give sizes to stream()"
            )
        return self._handles[name]

    def reset(self) -> None:
        """Back to the beginning: states as they were at first. What was given once stays."""
        with self._turn:
            for handle in (self._handles or {}).values():
                handle.reset()
            self._spoilt = False

    def _bind_states(self, binding: Mapping[str, int] | None = None) -> None:
        """Memory for the states, once their sizes are known; from then on those sizes are fixed."""
        if binding is not None:
            nodes = self.program.graph.state_inputs.values()
            self._binding |= {s: binding[s] for n in nodes for s in type_symbols(n.type)}
        self._handles = handles_for(self.program, self._given, self._binding)
        self._memory = {name: self.program.state_memory(h) for name, h in self._handles.items()}

    def _refuse_unknown(self, given: Mapping[str, object], known: Collection[str], what: str) -> None:
        for name in given:
            if name not in known:
                names = ", ".join(sorted(known)) or "none"
                raise InputError(f"{name!r} is not an input {what}; program {self._name!r} has: {names}")


_NONE = np.empty(0, np.uint8)
_PROLOGUE, _EPILOGUE = frozenset([Phase.PROLOGUE]), frozenset([Phase.EPILOGUE])


def handles_for(
    program: CompiledProgram, given: Mapping[str, BufferHandle], binding: Mapping[str, int]
) -> dict[str, BufferHandle]:
    """A bound handle for every state: the given one, else a new one with the state's initial value."""
    graph = program.graph
    for name in given:
        if name not in graph.state_inputs:
            known = ", ".join(graph.state_inputs) or "none"
            raise InputError(f"program {graph.name!r} has no state {name!r}; it has: {known}")
    out = {}
    for name, node in graph.state_inputs.items():
        shape = _shape(name, node, binding)
        handle = given.get(name)
        if handle is None:
            initial = program.initial_state(name, shape) if name in graph.state_values else None
            handle = BufferHandle(name, shape, node.dtype, initial)
        elif handle.shape != shape or handle.dtype is not node.dtype:
            raise InputError(
                f"state {name!r} is {node.type}, its handle {handle.dtype}{list(handle.shape)}; "
                "make them equal"
            )
        out[name] = handle
    for handle, room in _large_states(program, [h for name, h in out.items() if name not in given]):
        handle.bind(program.state_device, room)
    for handle in out.values():
        handle.bind(program.state_device)
    return out


def _large_states(
    program: CompiledProgram, handles: Iterable[BufferHandle]
) -> Iterator[tuple[BufferHandle, Buffer]]:
    """New states that fill huge pages, with their memory: one behind the other on the host, so that the last
    huge page of each is not wasted."""
    large = [handle for handle in handles if handle.nbytes >= HUGE_PAGE]
    if program.state_device != "cpu" or len(large) < 2:
        return
    starts = list(accumulate((round_up(handle.nbytes, ALIASED) for handle in large), initial=0))
    whole = Buffer.empty((starts[-1],), "u8")
    for handle, start in zip(large, starts[:-1], strict=True):
        yield handle, whole.view("u8", (handle.nbytes,), start)


def _shape(name: str, node: Node, binding: Mapping[str, int]) -> tuple[int, ...]:
    missing = [s for s in type_symbols(node.type) if s not in binding]
    if missing:
        raise InputError(f"state {name!r} is {node.type}; give the size of {missing[0]!r}")
    if node.dtype.bits < 8:
        raise UnsupportedError(
            f"state {name!r} is {node.type}: streams have no states of packed dtypes; cast it"
        )
    return node.tensor.bind(dict(binding))
