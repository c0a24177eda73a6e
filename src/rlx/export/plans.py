"""From a plan to the tables of an exported program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field

import numpy as np

from rlx.codegen.cpu.kernels import BodyKernels, KernelSet
from rlx.errors import UnsupportedError
from rlx.export.bounds import Ranges, most
from rlx.export.room import roomy_plan, slice_ranges
from rlx.export.tables import (
    ENDLESS,
    Argument,
    Assumed,
    Branch,
    Copy,
    Either,
    Guard,
    KernelCall,
    Once,
    Place,
    Repeat,
    State,
    Step,
    Symbol,
    Tables,
    condition_of,
    guard_of,
    holds_always,
)
from rlx.ir.dim import Dim, ceildiv, dim_max, dim_min, substitute
from rlx.ir.dtype import ParamValue
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Role
from rlx.ir.symbols import found_by_data
from rlx.ir.types import type_symbols
from rlx.ir.weights import round_up, weight_start
from rlx.kernel.control import loop_form
from rlx.plan.lir import LirBufferPlan, LirModule, LirWorkspace
from rlx.plan.memory.placer import Placer
from rlx.plan.phase import Phase, runs_in_streams
from rlx.records import dataclass
from rlx.runtime.derive import lazy_weights, params_without_value


def tables_of(lir: LirModule, kernels: KernelSet, ranges: Ranges, values: Mapping[str, ParamValue]) -> Tables:
    """The tables of a program whose kernels are built, for sizes in the ranges; `values` are those of its
    params. What needs Python at run time is refused by name."""
    refuse_unfit(lir, kernels)
    return _Export(lir, kernels, ranges, values).tables()


def refuse_unfit(lir: LirModule, kernels: KernelSet) -> None:
    """Refuse a program that needs Python while it runs: host thunks, sizes that data decide, streamed
    weights."""
    graph, name = lir.outline, lir.name
    for thunk in kernels.thunks.values():
        node = graph.nodes[thunk.node]
        raise UnsupportedError(
            f"program {name!r} cannot be exported: %{node.id} ({node.op.name}) runs on the host, as "
            f"{thunk.why}; an exported program has no Python to run it",
            node.where,
        )
    found = found_by_data(graph)
    for node in graph.nodes:
        own = [s for s in type_symbols(node.type) if s in found]
        revealed = node.id in kernels.kernels and kernels.kernels[node.id].reveals
        if own or revealed:
            size = f"size {own[0]!r}" if own else "its last size"
            raise UnsupportedError(
                f"program {name!r} cannot be exported: {size} of %{node.id} ({node.op.name}) depends on "
                "data, so the rest is planned in segments while it runs; use fixed sizes and a mask",
                node.where,
            )
    if lir.planner.streaming is not None:
        raise UnsupportedError(
            f"program {name!r} cannot be exported with weight_budget, as its weights are read while it runs; "
            "compile it without"
        )


class _Weights:
    """Arrays of the weights file and their offsets, in the order in which they are first asked for."""

    def __init__(self) -> None:
        self.arrays: dict[int, object] = {}
        self.end = 0
        self._known: dict[object, Place] = {}

    def place(self, key: object, array: object, nbytes: int) -> Place:
        """Where an array is; `key` stands for it."""
        if key not in self._known:
            start = weight_start(self.end, nbytes)
            self.arrays[start] = array
            self.end = start + nbytes
            self._known[key] = Place("weight", start)
        return self._known[key]


class _Export:
    """Collects the tables of one program."""

    def __init__(
        self, lir: LirModule, kernels: KernelSet, ranges: Ranges, values: Mapping[str, ParamValue]
    ) -> None:
        self.lir, self.kernels, self.ranges = lir, kernels, ranges
        self.graph, self.placer = lir.outline, lir.planner
        self.plan = roomy_plan(self.placer, ranges)
        self.weights = _Weights()
        self.loops = 0  # loops so far
        self._arrays = lazy_weights(lir, values)
        self._over = self.plan.in_states()

    def tables(self) -> Tables:
        graph = self.graph
        for id, array in self._arrays.items():  # in the order of the program, as kernels read them
            self.weights.place(id, array, array.nbytes)
        steps = tuple(self.steps())
        states = tuple(self.state(name, node) for name, node in graph.state_inputs.items())
        once = [n for n in graph.inputs if n.attrs.get("once")]
        lasting = {s for n in (*once, *graph.state_inputs.values()) for s in type_symbols(n.type)}
        sizes = self.plan.sizes()
        return Tables(
            self.lir.name,
            self.lir.target,
            tuple(Symbol(name, *self.ranges[name]) for name in graph.symbols()),
            tuple(self.guards(self.placer)),
            tuple(self.entry(n.attrs["name"], n) for n in graph.inputs),
            tuple(self.entry(name, n) for name, n in graph.outputs.items()),
            states,
            steps,
            {space: sizes[space] for space in ("activation", "state", "input", "output")}
            | {"weight": self.weights.end},
            self.scratch(),
            tuple(s for s in graph.symbols() if s in lasting),
            self.weights.arrays,
        )

    def guards(self, placer: Placer) -> Iterator[Guard]:
        """What must hold of sizes, in the program and in bodies that it always may run; of a branch, what one
        body assumes."""
        for c in placer.guards:
            guard = guard_of(c, self.ranges)
            if guard is not None:
                yield guard
        for node, inner in placer.inner.items():
            if inner.branch:
                parts = [condition_of(b.graph, self.ranges) for b in inner.bodies]
                if not any(map(holds_always, parts)):
                    yield Guard(Either(tuple(parts)), f"no branch of %{node} allows these sizes; use others")
            elif inner.cut is None:  # slices assume nothing more than the program
                for body in inner.bodies:
                    yield from self.guards(body)

    def entry(self, name: str, node: Node) -> Argument:
        place = self.place(node.id)
        return Argument(name, node.dtype, tuple(node.shape), place, self.plan.slot(node.id).size)

    def state(self, name: str, node: Node) -> State:
        value, initial = self.graph.state_values.get(name), None
        if value is not None:
            array = np.ascontiguousarray(np.asarray(value, node.dtype.np))
            initial = self.weights.place(("state", name), array, array.nbytes)
        return State(name, self.place(node.id), self.plan.slot(node.id).size, initial)

    def scratch(self) -> int:
        """Bytes of scratch that a thread needs at most."""
        kernels = [*self.kernels.kernels.values(), *self.kernels.in_bodies()]
        ranges = {**slice_ranges(self.placer, self.plan), **self.ranges}
        sizes = [most(k.scratch_per_thread, ranges, f"scratch of {k.name}") for k in kernels]
        return round_up(max(sizes, default=0), 64)

    def new_loop(self) -> int:
        """A number for a loop."""
        self.loops += 1
        return self.loops - 1

    # -- the program

    def place(self, node: int) -> Place:
        """Where a value of the program is."""
        alias = self.placer.aliases.get(node)
        root, offset = (alias.root, alias.offset) if alias else (node, 0)
        root = self._over.get(root, root)
        role = self.graph.nodes[root].op.role
        if role in (Role.PARAM, Role.CONSTANT):
            if root not in self._arrays:
                raise params_without_value(self.lir)
            return self.weights.place(root, None, 0) + offset
        slot = self.plan.assignments[root]
        return Place(slot.space, slot.offset) + offset

    def steps(self) -> Iterator[Step]:
        """All steps; those of the prologue, which come first, in one step that runs once."""
        graph, phased, first = self.graph, runs_in_streams(self.graph), list[Step]()
        frame = _Frame(graph, self.placer, self.plan, self.kernels, Place("activation", 0))
        for id in self.plan.schedule:
            node = graph.nodes[id]
            operands = [self.place(o.id) for o in node.operands]
            results = [self.place(r.id) for r in graph.results(node)]
            made = self.node(node, frame, operands, results)
            if phased and self.plan.phase_of(id) is Phase.PROLOGUE:
                first += made
                continue
            if first:
                yield Once(tuple(first))
                first = []
            yield from made
        if first:
            yield Once(tuple(first))

    def node(
        self, node: Node, frame: _Frame, operands: Sequence[Place], results: Sequence[Place]
    ) -> list[Step]:
        """The steps of a node: a call, or those of its bodies."""
        if node.id not in frame.kernels.inner:
            kernel = frame.kernels.kernels[node.id]
            dims = tuple(map(frame.size, kernel.dims))
            return [KernelCall(kernel.name, (*operands, *results), dims, kernel.serial)]
        form = loop_form(node)
        assert form is not None, "only control flow has kernels inside"
        control = _Control(self, node, frame, operands, results)
        return list(getattr(control, form.control)(**dict(form.config)))

    def body(self, frame: _Frame, inputs: Sequence[Place], outputs: Sequence[Place]) -> tuple[Step, ...]:
        """One run of a body on the given places."""
        body = frame.graph
        known = {n.id: p for n, p in zip(body.inputs, inputs, strict=True)}
        known |= {n.id: p for n, p in zip(body.outputs.values(), outputs, strict=True)}

        def place(node: int) -> Place:
            alias = frame.placer.aliases.get(node)
            root, offset = (alias.root, frame.size(alias.offset)) if alias else (node, 0)
            if root in known:
                return known[root] + offset
            if body.nodes[root].op.role is Role.CONSTANT:
                array = np.ascontiguousarray(body.nodes[root].attrs["value"].array)
                return self.weights.place((id(body), root), array, array.nbytes) + offset
            return frame.arena + frame.plan.assignments[root].offset + offset

        out: list[Step] = []
        for number in frame.plan.schedule:
            node = body.nodes[number]
            operands = [place(o.id) for o in node.operands]
            results = [place(r.id) for r in body.results(node)]
            out += self.node(node, frame, operands, results)
        return tuple(out)


@dataclass(frozen=True)
class _Frame:
    """A graph that is laid out: its placer (for views), its plan, its kernels, and where its values are."""

    graph: Graph
    placer: Placer
    plan: LirBufferPlan
    kernels: KernelSet | BodyKernels
    arena: Place
    rows: Mapping[str, Dim] = field(default_factory=dict)
    """The rows of slices around it, by their symbols."""

    def size(self, d: Dim) -> Dim:
        """A size here, in symbols of the program."""
        return substitute(d, self.rows)


@dataclass(eq=False)
class _Control:
    """One node with bodies and where everything of it is; a method per kind of control."""

    export: _Export
    node: Node
    frame: _Frame
    operands: Sequence[Place]
    results: Sequence[Place]

    @property
    def work(self) -> LirWorkspace:
        return self.frame.plan.work[self.node.id]

    @property
    def place(self) -> Place:
        return self.frame.arena + self.work.slot.offset

    @property
    def body(self) -> Graph:
        return self.node.bodies[0]

    def bytes(self, node: Node, rows: Mapping[str, Dim] | None = None) -> Dim:
        """The bytes of a value of a body, which may have rows of its own."""
        return self.frame.size(substitute(node.tensor.nbytes, rows or {}))

    def run(
        self,
        number: int,
        inputs: Sequence[Place],
        outputs: Sequence[Place],
        rows: Mapping[str, Dim] | None = None,
    ) -> tuple[Step, ...]:
        """One run of a body, which may be a slice of so many rows."""
        frame = _Frame(
            self.node.bodies[number],
            self.frame.placer.inner[self.node.id].bodies[number],
            self.work.bodies[number],
            self.frame.kernels.inner[self.node.id][number],
            self.place + self.work.arena_offset,
            {**self.frame.rows, **(rows or {})},
        )
        return self.export.body(frame, inputs, outputs)

    def carried(self) -> tuple[list[Place], list[Place]]:
        """Both places of every carried value: its result, and one in the workspace."""
        spare = [self.place + offset for offset in self.work.carry_offsets[:-1]]
        return list(self.results[: len(spare)]), spare

    def to_results(self, sources: Sequence[Place]) -> tuple[Step, ...]:
        """Copies of carried values to the results, where they are not there yet."""
        pairs = zip(sources, self.results, self.body.outputs.values(), strict=False)
        return tuple(Copy(s, r, self.bytes(n)) for s, r, n in pairs if s != r and n.tensor.nbytes != 0)

    def cond(self) -> Iterator[Step]:
        chosen, *operands = self.operands
        yield Branch(chosen, *(self.branch(number, operands) for number in range(2)))

    def branch(self, number: int, operands: Sequence[Place]) -> tuple[Step, ...]:
        """One body of a branch; a run that comes there with sizes that it does not assume fails."""
        steps = self.run(number, operands, self.results)
        condition = condition_of(self.node.bodies[number], self.export.ranges)
        return steps if holds_always(condition) else (Assumed(condition, steps),)

    def scan(self, carries: int, scanned: int, length: Dim, reverse: bool) -> Iterator[Step]:
        number = self.export.new_loop()
        rows = [self.bytes(n) for n in self.body.inputs]
        out_rows = [self.bytes(n) for n in self.body.outputs.values()]
        fixed = self.operands[carries + scanned :]
        xs = [self.operands[i].by_row(number, rows[i]) for i in range(carries, carries + scanned)]
        ys = [self.results[i].by_row(number, out_rows[i]) for i in range(carries, len(out_rows))]
        first, second = self.carried()
        yield from self.to_results(self.operands[:carries])
        there = self.run(0, [*first, *xs, *fixed], [*second, *ys])
        back = self.run(0, [*second, *xs, *fixed], [*first, *ys])
        yield Repeat(number, self.frame.size(length), there, back, self.to_results(second), reverse=reverse)

    def slices(self, symbol: str, size: Dim, sliced: int, axes: tuple[int, ...]) -> Iterator[Step]:
        """All slices but the last have the same number of rows. Both loops are over slices; the second takes
        one step, if there are rows at all, as sizes inside it are other expressions."""
        total, most_rows = self.frame.size(size), self.work.bodies[0].binding[symbol]
        full = dim_max(ceildiv(total, most_rows) - 1, 0)
        start = full * most_rows
        widths = [self.bytes(n, {symbol: 1}) for n in self.body.inputs[:sliced]]
        out_widths = [self.bytes(n, {symbol: 1}) for n in self.body.outputs.values()]

        def at(first: Dim, number: int, rows: Dim) -> tuple[Step, ...]:
            """The steps of a slice; `first` are the rows before it, and so many more for each step."""

            def cut(places: Sequence[Place], widths: Sequence[Dim]) -> list[Place]:
                pairs = zip(places, widths, strict=False)
                return [(p + first * w).by_row(number, most_rows * w) for p, w in pairs]

            inputs = [*cut(self.operands, widths), *self.operands[sliced:]]
            return self.run(0, inputs, cut(self.results, out_widths), {symbol: rows})

        number = self.export.new_loop()
        steps = at(0, number, most_rows)
        yield Repeat(number, full, steps, steps, ())
        number = self.export.new_loop()
        yield Repeat(number, dim_min(total, 1), at(start, number, dim_max(total - start, 1)), (), ())

    def loop(self, carries: int, rows: object, max_trips: int | None) -> Iterator[Step]:
        number, (first, second) = self.export.new_loop(), self.carried()
        trips, go, *rest = self.operands
        flag, step = self.place + self.work.flag_offset, Place("step", 8 * number)
        yield from self.to_results(rest[:carries])
        there = self.run(0, [*first, step, *rest[carries:]], [*second, flag])
        back = self.run(0, [*second, step, *rest[carries:]], [*first, flag])
        limit = ENDLESS if max_trips is None else max_trips
        yield Repeat(number, limit, there, back, self.to_results(second), trips, go, flag)
