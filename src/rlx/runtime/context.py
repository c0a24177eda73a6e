"""Buffers and argument tables for one run at a time, for one binding of the symbols."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from rlx.codegen.cpu.kernels import EmittedKernel, HostThunk, KernelSet, part_word
from rlx.errors import PlanError
from rlx.ir.dim import Dim
from rlx.ir.graph import Node
from rlx.ir.op import Role
from rlx.plan.lir import PLACED, LirBufferPlan, LirFetch, LirModule, Point
from rlx.plan.phase import Phase, runs_in_streams
from rlx.records import dataclass
from rlx.runtime.barriers import EVERYWHERE, Span, settle
from rlx.runtime.control import CallList, CallRecord, Pointer
from rlx.runtime.derive import params_without_value
from rlx.runtime.memory import address_of, allocate
from rlx.runtime.native.driver import NativeProgram, Record
from rlx.runtime.sizes import Evaluate, Sizes
from rlx.runtime.weights import Weights

PAUSES = 10  # of a run with streamed weights
_GATE_PS = 1_000_000_000  # of work, so that all threads take part: they help to read
Place = tuple[np.ndarray, int, int]  # table, index, bytes to add to the address


@dataclass
class Step:
    """One native segment or one host thunk, with the time of its last run; `nodes` are the kernels in it.

    A segment of one kernel may reveal the size of its result, which it leaves in scratch.
    """

    nodes: tuple[int, ...]
    program: NativeProgram | None
    thunk: HostThunk | None
    span: tuple[int, int] = (0, 0)
    reveals: bool = False
    phase: Phase = Phase.STEADY_STATE


def _pauses(plan: LirBufferPlan) -> set[int]:
    """Kernels after which a run of streamed weights comes back to Python, to look who needs the cores: some
    ten of them, after about as many bytes each."""
    step = sum(f.size for f in plan.fetches) / PAUSES
    found: set[int] = set()
    done = 0.0
    for f in plan.fetches:
        if done >= step and f.first:
            found.add(plan.schedule[f.first - 1])
            done = 0.0
        done += f.size
    return found


@dataclass(frozen=True)
class Moving:
    """Words of one table that change with sizes that need no new plan: word = base + value."""

    table: np.ndarray
    index: np.ndarray
    base: np.ndarray
    values: Evaluate


class Context:
    """What one run needs besides its inputs and outputs."""

    def __init__(
        self,
        lir: LirModule,
        kernels: KernelSet,
        code: object,
        plan: LirBufferPlan,
        dims: Sequence[int],
        weights: Mapping[int, np.ndarray],
        threads: int,
        one_by_one: bool = False,
        profile: bool = False,
        heap: np.ndarray | None = None,
        streamed: Weights | None = None,
        sizes: Sizes | None = None,
        meet: Callable[[Context, int], tuple[int, np.ndarray] | None] | None = None,
    ) -> None:
        graph = self.graph = lir.outline
        self.key = tuple([plan.binding[s] for s in plan.dynamic_symbols])  # under which it is kept
        if sizes is not None:  # then the binding is this context's own, and moves
            plan = replace(plan, binding=dict(plan.binding), view_aliases=dict(plan.view_aliases))
        self.lir, self.kernels, self.code, self.plan, self.sizes = lir, kernels, code, plan, sizes
        self.threads, self.profile = threads, profile
        self.arena = allocate(max(plan.arena_size, 64), fence=True)
        self.dims, self._dims_at, per_thread = dims, {}, 0
        at = 0
        for id, kernel in kernels.kernels.items():
            self._dims_at[id] = at
            at += len(kernel.dims) + 1
            per_thread = max(per_thread, dims[at - 1])
        per_thread = max(per_thread, kernels.scratch_in_bodies(plan))
        self.scratch_per_thread = -(-per_thread // 64) * 64
        self.scratch = allocate(max(self.scratch_per_thread * threads, 64), fence=True)
        self._work = kernels.picoseconds(plan)
        self._streamed = streamed if plan.fetches else None
        self._position = {id: at for at, id in enumerate(plan.schedule)}
        self._ends = _pauses(plan)
        self._fetches_at: dict[int, list[LirFetch]] = {}  # those that steps of the schedule read
        for f in reversed(plan.fetches):  # of parts, the first counts
            for at in range(f.first, f.last + 1):
                self._fetches_at.setdefault(at, []).append(f)
        self.memory: dict[int, np.ndarray] = dict(weights)
        self._addresses: dict[int, int] = {}  # of memory, created on request: NumPy takes its time
        for id, slot in plan.assignments.items():
            if slot.space == "activation":
                self.memory[id] = self.arena.array[slot.offset : slot.offset + slot.size]
                self._addresses[id] = self.arena.address + slot.offset
            elif slot.space == "heap" and heap is not None:
                self.memory[id] = heap[slot.offset : slot.offset + slot.size]
        self.outside = {n.id for n in graph.nodes if n.op.role in (Role.INPUT, Role.STATE)} | {
            n.id for n in graph.outputs.values()
        }
        self._over = plan.in_states()
        # A caller may give the memory of a state as an input, too.
        self._together = self.outside - {n.id for n in graph.outputs.values()} if graph.states else set()
        self.places: dict[int, list[Place]] = {id: [] for id in self.outside}
        self.bound: dict[int, np.ndarray] = {}
        self.connected: object = None  # the states whose memory is in the tables now
        self.generation = 0  # of the weights whose addresses are in the tables
        self._keep: list[object] = []
        self._moving: list[Moving] = []
        # Of a profiled run: where it went on when data had decided sizes, and after which step.
        self.later: Context | None = None
        self.left_at = 0
        self.meetings: dict[int, Callable[[], None]] = {}  # collective -> what runs it on this memory
        # Collectives that are kernels like others: their addresses, and tables that they read.
        native = {id: meet(self, id) for id in kernels.thunks} if meet is not None else {}
        self.native_meetings = {id: call for id, call in native.items() if call is not None}
        self.output_shapes: list[tuple[tuple[int, ...], np.dtype]] | None = None
        self.steps = self._steps(one_by_one)
        # Whether values at the edges are read by NumPy too: by host thunks, as states, or to be checked.
        self.keeps_edges = (
            one_by_one or bool(graph.states) or any(s.thunk is not None or s.reveals for s in self.steps)
        )

    def _steps(self, one_by_one: bool) -> list[Step]:
        out: list[Step] = []
        batch: list[int] = []

        def flush() -> None:
            if batch:
                out.append(Step(tuple(batch), self._segment(batch), None, phase=phase))
                batch.clear()

        phased, phase = runs_in_streams(self.graph), Phase.STEADY_STATE
        for id in self.plan.schedule:
            if phased and self.plan.phase_of(id) is not phase:
                flush()
                phase = self.plan.phase_of(id)
            if id in self.kernels.thunks and id not in self.native_meetings:
                flush()
                out.append(Step((id,), None, self.kernels.thunks[id], phase=phase))
            elif id in self.kernels.kernels and self.kernels.kernels[id].reveals:
                flush()
                out.append(Step((id,), self._segment([id]), None, reveals=True, phase=phase))
            else:
                batch.append(id)
                if one_by_one or id in self._ends:
                    flush()
        flush()
        return out

    def _segment(self, nodes: Sequence[int]) -> NativeProgram:
        """Argument tables of a run of kernels, branches and loops."""
        address = self.code.address  # type: ignore[attr-defined]
        layout = CallList(address, self.plan.binding, self._keep, self._together)
        calls_of: dict[int, int] = {}  # number of a call -> the node whose kernel it is
        for id in nodes:
            first = len(layout.calls)
            self._lay_out(id, layout)
            if id in self.kernels.kernels:
                calls_of.update((i, id) for i in range(first, len(layout.calls)) if layout.calls[i].label)
        if self.threads > 1:
            settle(layout.calls, self.threads)
        records = [
            Record(
                c.address,
                3 + len(c.pointers) + len(c.words),
                c.label,
                owner=c.owner,
                meets=c.meets,
                jump=c.to is not None,
                part=c.part,
            )
            for c in layout.calls
        ]
        program = NativeProgram(
            records, threads=self.threads, keep=(self.code, self._keep), profile=self.profile
        )
        self.code.follow(program)  # type: ignore[attr-defined]
        table = program.table
        for i, call in enumerate(layout.calls):
            at = program.start(i)
            table[at + 1] = self.scratch.address + max(call.owner, 0) * self.scratch_per_thread
            table[at + 2] = self.scratch_per_thread
            at += 3
            for p in call.pointers:
                if p.root is None:
                    table[at] = p.offset
                else:
                    self.places[p.root].append((table, at, p.offset))
                at += 1
            table[at : at + len(call.words)] = call.words
        if self.sizes is not None:
            starts = [(id, program.start(i) + 3) for i, id in calls_of.items()]
            self._moving += self._moving_words(table, starts, self.sizes)
        return program

    def _moving_words(
        self, table: np.ndarray, starts: Sequence[tuple[int, int]], sizes: Sizes
    ) -> list[Moving]:
        """The words of calls that change with sizes: dims, and addresses of views."""
        found: list[tuple[int, Dim, int]] = []  # index, what changes, what is added
        views = self.lir.planner.aliases
        for id, at in starts:
            node = self.graph.nodes[id]
            values = [*node.operands, *self.graph.results(node)]
            for number, value in enumerate(values):
                view = views.get(value.id)
                if view is not None and sizes.moves(view.offset):
                    found.append((at + number, view.offset, self._address(self._root(value.id)[0])))
            for number, d in enumerate(self.kernels.kernels[id].dims, len(values)):
                if sizes.moves(d):
                    found.append((at + number, d, 0))
        if not found:
            return []
        index, dims, base = zip(*found, strict=True)
        return [Moving(table, np.array(index), np.array(base), sizes.function(dims))]

    def move_to(self, binding: Mapping[str, int]) -> None:
        """Run at other sizes from now on, which the plan has room for and which meet their guards."""
        sizes = self.sizes
        if sizes is None or all(self.plan.binding[s] == binding[s] for s in sizes.room):
            return
        values = [binding[s] for s in sizes.symbols]
        for m in self._moving:
            m.table[m.index] = m.base + m.values(values)
        self.plan.binding.update((s, binding[s]) for s in sizes.room)
        self.output_shapes = None
        if any(s.thunk is not None for s in self.steps):  # the host reads through views
            self.plan.view_aliases.update(self.lir.planner.aliases_at(self.plan.binding))

    def _lay_out(self, id: int, layout: CallList) -> None:
        """The calls of a node: one, or those of its bodies."""
        node, work = self.graph.nodes[id], self.plan.work.get(id)
        if id in self.native_meetings:
            address, read = self.native_meetings[id]
            fields = [int(read.ctypes.data)]
            layout.calls.append(
                CallRecord(
                    address=address,
                    label=str(id),
                    pointers=[],
                    values=fields,
                    alone=True,
                    waits_for_all=True,
                    all_wait_for=True,
                )
            )
            return
        parts = self._arrive_at(id, layout)
        operands = [self.pointer(o.id) for o in node.operands]
        results = [self.pointer(r.id) for r in self.graph.results(node)]
        if work is not None:
            kernels = self.kernels.inner[id]
            place = Pointer(None, self.arena.address + work.slot.offset)
            layout.control(node, kernels, work, operands, results, place, str(id))
        else:
            kernel, first = self.kernels.kernels[id], self._dims_at[id]
            dims = list(self.dims[first : first + len(kernel.dims)])
            reads = [s for o in node.operands for s in self._span(o.id, layout)]
            writes = [s for r in self.graph.results(node) for s in self._span(r.id, layout)]
            call = layout.kernel(kernel, str(id), operands + results, dims, reads, writes, self._work[id])
            if parts:
                self._in_parts(kernel, call, parts, layout)

    def _span(self, node: int, layout: CallList) -> Iterator[Span]:
        """What a kernel touches of a value: all bytes of its root, as views move with sizes. Nothing, if it
        is never written."""
        root, _ = self._root(node)
        if root in self.outside:
            yield layout.span(Pointer(root, 0), EVERYWHERE[1])
        elif (slot := self.plan.assignments.get(root)) is not None and slot.space in PLACED:
            yield layout.span(Pointer(None, self._address(root)), slot.size)

    # -- streamed weights

    def arrive(self, step: Step, weights: Weights) -> None:
        """Have streamed weights of a thunk in place, or choose the threads of a native step, which has gates:
        reading gets its own core where it is what binds."""
        if step.program is None:
            position = self._position[step.nodes[0]]
            weights.reach(position)
            self._bring(position)
        elif not self.profile:
            step.program.threads = max(1, self.threads - weights.share_cores())

    def _arrive_at(self, id: int, layout: CallList) -> list[LirFetch]:
        """A gate in front of the calls of a node, if there is one. Gives the parts that the node runs in."""
        if self._streamed is None:
            return []
        position = self._position[id]
        self._bring(position)
        self._gate((position, 0), layout)
        return self.plan.in_parts(position)

    def _gate(self, point: Point, layout: CallList) -> None:
        """Wait for the weights of a point of the run, if any are awaited there."""
        assert self._streamed is not None and self._streamed.reader is not None
        reader, gate = self._streamed.reader, self._streamed.gates.get(point)
        if gate is not None:
            control = Pointer(None, reader.address)
            layout.calls.append(
                CallRecord(
                    address=reader.gate_address,
                    label="",
                    pointers=[control],
                    values=list(gate),
                    work=_GATE_PS,
                    waits_for_all=True,
                    all_wait_for=True,
                )
            )

    def _bring(self, position: int) -> None:
        """Streamed weights are where the step at `position` reads them."""
        if self._streamed is None or self._streamed.ring is None:
            return
        for f in self._fetches_at.get(position, ()):
            self.memory[f.node] = self._streamed.ring[f.offset : f.offset + f.size]
            self._addresses.pop(f.node, None)

    def _in_parts(
        self, kernel: EmittedKernel, whole: CallRecord, parts: Sequence[LirFetch], layout: CallList
    ) -> None:
        """Put a call per part in place of the call of a kernel, with a gate in front of each: it sees the
        weight as if it were contiguous around the part that is there."""
        cut = kernel.cut
        if cut is None or any(f.begin % cut.nbytes for f in parts):
            told = f"kernel %{whole.label} reads %{parts[0].node} in parts that it cannot be run in"
            raise PlanError(told)
        layout.calls.remove(whole)
        place, first = whole.pointers[cut.operand], parts[0].offset
        for f in parts:
            if f.part:
                self._gate(f.awaited, layout)
            pointers = list(whole.pointers)
            pointers[cut.operand] = place + (f.offset - first - f.begin)
            stop = -(-(f.begin + f.size) // cut.nbytes)
            part = part_word(f.begin // cut.nbytes, stop)
            work = whole.work // len(parts)
            layout.calls.append(replace(whole, pointers=pointers, part=part, work=work))

    def pointer(self, node: int) -> Pointer:
        """Where a value of the program is."""
        root, offset = self._root(node)
        return Pointer(root, offset) if root in self.outside else Pointer(None, self._address(root) + offset)

    def _root(self, node: int) -> tuple[int, int]:
        alias = self.plan.view_aliases.get(node)
        root, offset = (alias.root, alias.byte_offset) if alias else (node, 0)
        return self._over.get(root, root), offset

    def _address(self, root: int) -> int:
        found = self._addresses.get(root)
        if found is None:
            if root not in self.memory:
                raise params_without_value(self.lir)
            found = self._addresses[root] = int(self.memory[root].ctypes.data)
        return found

    def connect(self, node: int, array: np.ndarray) -> None:
        """Use an array's memory for an input, state or output of this run."""
        address = address_of(array)
        for table, index, offset in self.places[node]:
            table[index] = address + offset
        if self.keeps_edges:
            self.bound[node] = array.reshape(-1).view(np.uint8)

    # -- values as NumPy sees them (host thunks, debugging)

    def raw(self, root: int) -> np.ndarray:
        """Bytes of a stored value."""
        root = self._over.get(root, root)
        found = self.bound.get(root)
        return self.memory[root] if found is None else found

    def stores(self, node: int) -> bool:
        """Whether a value has its own memory that can be seen now."""
        return node in self.memory or self._over.get(node, node) in self.bound

    def array(self, node: Node) -> np.ndarray:
        """A value as an array over its memory."""
        return array_over(self.plan, node, self.raw)

    def take_results(self, kernels: Sequence[int], old: Context) -> None:
        """Copy what kernels have computed in another context; their results have the same sizes here."""
        for kernel in kernels:
            for value in self.graph.results(self.graph.nodes[kernel]):
                if value.id in old.memory:
                    self.memory[value.id][:] = old.memory[value.id]

    def take_over(self, old: Context, done: int) -> None:
        """Copy what steps before `done` computed and later ones read from a context for other sizes."""
        made = {
            r.id for s in old.steps[:done] for id in s.nodes for r in self.graph.results(self.graph.nodes[id])
        }
        for step in self.steps[done:]:
            for id in step.nodes:
                for operand in self.graph.nodes[id].operands:
                    root, _ = self._root(operand.id)
                    if root in made and root in self.memory and root in old.memory:
                        size = min(len(self.memory[root]), len(old.memory[root]))
                        self.memory[root][:size] = old.memory[root][:size]


def array_over(plan: LirBufferPlan, node: Node, raw: Callable[[int], np.ndarray]) -> np.ndarray:
    """A value as an array over the bytes that `raw` gives for the value whose storage it uses."""
    shape, itemsize = node.tensor.bind(plan.binding), node.dtype.itemsize
    alias = plan.view_aliases.get(node.id)
    stored = raw(alias.root if alias else node.id)
    if alias is None or alias.strides is None:
        start = alias.byte_offset if alias else 0
        count = int(np.prod(shape, dtype=np.int64)) * itemsize
        return stored[start : start + count].view(node.dtype.np).reshape(shape)
    flat = stored.view(node.dtype.np)[alias.byte_offset // itemsize :]
    return np.lib.stride_tricks.as_strided(flat, shape, [s * itemsize for s in alias.strides])
