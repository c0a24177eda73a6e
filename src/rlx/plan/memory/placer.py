"""Plans for any sizes, from what is known of a program: order of kernels, lifetimes, views, shared storage.

This is the half of planning that a compiled program needs at run time. It knows nothing of ops, and its facts
can be written down and read back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from rlx.config import bytes_text
from rlx.errors import BudgetError, GuardError
from rlx.files import Json
from rlx.ir.bind import check_constraints
from rlx.ir.dim import Constraint, Dim, compile_dims, evaluate, parse_dim
from rlx.ir.graph import Graph
from rlx.ir.op import Role
from rlx.ir.symbols import NOT_FOUND, sizes_at_bounds
from rlx.kernel.control import is_branch, is_open
from rlx.plan.lir import (
    ALIGNMENT,
    PLACED,
    LirBufferPlan,
    LirBufferSlot,
    LirFetch,
    LirIoManifest,
    LirViewAlias,
    LirWorkspace,
    WeightCut,
)
from rlx.plan.memory.certificate import OverBudgetError
from rlx.plan.memory.place import Block, Placement, place, replay
from rlx.plan.phase import Phase, PhaseSchedule
from rlx.plan.stream import BudgetTooSmall, Streaming, stream_weights

MOST_PLANS = 256  # bindings whose plans are kept
MOST_SLICES = 64
GOOD_ENOUGH = 1.03  # a replayed placement this close to its bound is not searched again


class StoredValue(NamedTuple):
    """A value with its own storage."""

    node: int
    size: Dim
    space: str


class PlacedView(NamedTuple):
    """A value inside another's storage: bytes into it, and strides in elements (None: dense)."""

    root: int
    offset: Dim
    strides: tuple[Dim, ...] | None


class Cut(NamedTuple):
    """How a body runs in slices: its symbol for the rows of one, and how many rows there are in all."""

    rows: str
    size: Dim


class Inner(NamedTuple):
    """Bodies of a node, each with its own placer, and how many values they carry from step to step."""

    bodies: tuple[Placer, ...]
    carries: int
    cut: Cut | None = None
    branch: bool = False  # whether a run takes one of the bodies


def _guards(graph: Graph) -> list[Constraint]:
    """What a program and the kernels in it assume. Kernels that RLX made assume what the program does; a plan
    in a file may say anything."""
    out = {(c.kind, c.lhs, c.rhs): c for c in graph.constraints}
    regions = (n for n in graph.nodes if n.op.role is Role.REGION)
    for c in (c for node in regions for body in node.bodies for c in body.constraints):
        out.setdefault((c.kind, c.lhs, c.rhs), c)
    return list(out.values())


class Placer:
    """Gives a plan for any binding quickly. `order`, `life` and `shared` say which values need room when."""

    def __init__(
        self,
        graph: Graph,
        stored: Sequence[StoredValue],
        views: Mapping[int, PlacedView],
        phases: PhaseSchedule,
        binding: Mapping[str, int],
    ) -> None:
        self.graph, self.stored, self.aliases, self.phases = graph, list(stored), dict(views), phases
        self.symbols = graph.symbols()
        self.guards = _guards(graph)
        self.io = LirIoManifest.collect(graph)
        self.binding = dict(binding)
        self.order: list[int] = []
        self.life: dict[int, tuple[int, int]] = {}
        self.shared: dict[int, int] = {}
        self.streaming: Streaming | None = None  # of weights, if they have a budget
        self.inner: dict[int, Inner] = {}
        self.placed: tuple[int, ...] | None = None  # order of the last placement, replayed for other sizes
        self._plans: dict[tuple[int, ...], LirBufferPlan] = {}
        self.budget: int | None = None  # the most bytes of activations that a plan may take
        self.fitted: Json | None = None  # what the budget changed (`rlx.plan.memory.budget`)
        offsets = [v.offset for v in self.aliases.values()]
        strides = [s for v in self.aliases.values() for s in v.strides or ()]
        self._evaluate = compile_dims([*(s.size for s in self.stored), *offsets, *strides], self.symbols)

    def name_weights(self, derived: Graph | None) -> None:
        """Let plans list weights by the names of the params that `derived` makes them of."""
        self.io = LirIoManifest.collect(self.graph, derived)
        self._plans.clear()

    def sizes(self, binding: Mapping[str, int]) -> dict[int, int]:
        """Bytes of every stored value."""
        return self._bytes(self._evaluate([binding[s] for s in self.symbols]))

    def _bytes(self, values: Sequence[int]) -> dict[int, int]:
        """Bytes of every stored value. Negative ones, which only assumed sizes that a guard would refuse can
        give, take no room."""
        return {s.node: max(v, 0) for s, v in zip(self.stored, values, strict=False)}

    def plan(
        self, binding: Mapping[str, int] | None = None, room: Mapping[str, int] | None = None
    ) -> LirBufferPlan:
        """Slots for a binding, whose guards and budget are checked; without one, for the assumed sizes. Sizes
        that data decide need not be in the binding: they are placed at their bounds, and guards that speak of
        them wait until they are known.
        Symbols in `room` get slots for those sizes instead.
        """
        if binding is None:
            return self.unchecked(self.binding)
        sizes = {**self.completed(binding), **(room or {})}
        missing = [s for s in self.symbols if s not in sizes]
        if missing:
            told = f"symbol {missing[0]!r} of program {self.graph.name!r} has no size; give one"
            raise GuardError(told)
        for symbol in self.symbols:
            if not hasattr(sizes[symbol], "__index__") or sizes[symbol] < 0:
                told = f"symbol {symbol!r} of program {self.graph.name!r} cannot be {sizes[symbol]!r}"
                raise GuardError(f"{told}; a size is a whole number of at least 0")
        self.check_guards(binding)
        made = self.unchecked(sizes)
        if self.budget is not None and made.arena_size > self.budget:
            raise OverBudgetError(made, self.budget)
        return made

    def completed(self, binding: Mapping[str, int]) -> Mapping[str, int]:
        """A binding in which sizes that data decide are at their bounds, unless it says otherwise."""
        if all(s in binding for s in self.symbols):
            return binding
        return {**sizes_at_bounds(self.graph, binding), **binding}

    def check_guards(self, binding: Mapping[str, int]) -> None:
        """Assumptions of the program and of the bodies in it hold, as far as sizes are known; of a branch,
        those of one body: a run that takes another is refused then."""
        check_constraints(self.guards, binding)
        for inner in self.inner.values():
            if inner.cut is not None:  # slices assume nothing more than the program
                continue
            if inner.branch and any(is_open(b.graph, binding) for b in inner.bodies):
                continue
            for body in inner.bodies:
                body.check_guards(binding)

    def unchecked(self, binding: Mapping[str, int]) -> LirBufferPlan:
        """Slots for a binding, whatever its guards and the budget say."""
        key = tuple([binding[s] for s in self.symbols])
        made = self._plans.get(key)
        if made is None:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            made = self._plans[key] = self._sliced(binding)
        return made

    def _sliced(self, binding: Mapping[str, int]) -> LirBufferPlan:
        """A plan with no more slices than its budget needs; the smallest there is, if none fits."""
        parts = {node: 1 for node, inner in self.inner.items() if inner.cut is not None}
        made = self._placed(binding, parts)
        while self.budget is not None and made.arena_size > self.budget:
            more = self._more_slices(made, parts, binding)
            if more == parts:
                break
            parts = more
            made = self._placed(binding, parts)
        return made

    def _more_slices(
        self, made: LirBufferPlan, parts: Mapping[int, int], binding: Mapping[str, int]
    ) -> dict[int, int]:
        """More slices where the plan is over its budget; all there may be, where that is not the reason."""
        assert self.budget is not None, "without a budget nothing is cut"
        live, out = made.live_bytes(), dict(parts)
        most = {node: min(MOST_SLICES, self._rows(node, binding)) for node in parts}
        for node, count in parts.items():
            size = made.work[node].slot.size
            room = self.budget - (live[self.order.index(node)] - size)
            if room < size:
                enough = -(-size * count // room) if room > 0 else most[node]
                out[node] = min(max(count + 1, enough), most[node])
        if out == parts:
            out = {node: min(2 * count, most[node]) for node, count in parts.items()}
        return out

    def _rows(self, node: int, binding: Mapping[str, int]) -> int:
        """All rows of a node that runs in slices; at least 1."""
        cut = self.inner[node].cut
        assert cut is not None, "only these are asked for"
        return max(evaluate(cut.size, binding), 1)

    def _placed(self, binding: Mapping[str, int], parts: Mapping[int, int]) -> LirBufferPlan:
        """A plan in which nodes run in so many slices."""
        values = self._evaluate([binding[s] for s in self.symbols])
        sizes = self._bytes(values)
        aliases = self._aliases(values[len(self.stored) :])
        slots: dict[int, LirBufferSlot] = {}
        used = dict.fromkeys(("weight", "input", "output", "state"), 0)
        fetches: tuple[LirFetch, ...] = ()
        absent: set[int] = set()
        if self.streaming is not None:
            fetches, used["ring"] = self.streaming.fetches, self.streaming.ring
            absent = {*self.streaming.unread, *(f.node for f in fetches)}
        for f in reversed(fetches):  # of a weight that is fetched twice, the first place counts
            slots[f.node] = LirBufferSlot(f.offset, f.size, "ring")
        spans: dict[int, tuple[int, int]] = {}  # storage -> steps in which any value in it is alive
        for node, _, space in self.stored:
            if space in PLACED:
                if node in self.life:
                    own = self._storage(node)
                    first, last = self.life[node]
                    start, stop = spans.get(own, (first, last))
                    spans[own] = (min(start, first), max(stop, last))
                continue
            if node in absent or node in self.shared:
                continue
            slots[node] = LirBufferSlot(used[space], sizes[node], space)
            used[space] += -(-sizes[node] // ALIGNMENT) * ALIGNMENT
        work = {}
        for node, inner in self.inner.items():
            rows = {}
            if inner.cut is not None:
                rows[inner.cut.rows] = -(-self._rows(node, binding) // parts[node])
            work[node] = self._workspace(inner, {**binding, **rows})
        steps = {node: self.order.index(node) for node in work}
        met = {s.node for s in self.stored if s.space == "heap"}
        heap = place(Block(own, sizes[own], *span) for own, span in spans.items() if own in met)
        blocks = [Block(own, sizes[own], *span) for own, span in spans.items() if own not in met]
        blocks += [Block(~node, w.slot.size, steps[node], steps[node]) for node, w in work.items()]
        placed = self._place(blocks)
        for i in self.life:
            own = self._storage(i)
            if own in placed.offsets:
                slots[i] = LirBufferSlot(placed.offsets[own], sizes[i], "activation")
            elif own in met:
                slots[i] = LirBufferSlot(heap.offsets[own], sizes[i], "heap")
            else:  # in the memory of a state
                slots[i] = slots[own]
        if met:
            used["heap"] = heap.total
        made = LirBufferPlan(
            slots,
            list(self.order),
            aliases,
            self.phases,
            self.io,
            dict(self.life),
            {"activation": placed.total, **used},
            ALIGNMENT,
            self.symbols,
            dict(binding),
            dict(self.shared),
            placed.heuristic,
            {
                node: replace(w, slot=LirBufferSlot(placed.offsets[~node], w.slot.size))
                for node, w in work.items()
            },
            self.graph,
            fetches=fetches,
        )
        return made

    def limit(self, budget: int) -> None:
        """From now on plans take no more than `budget` bytes of activations, if they can; of no bytes, the
        least they can.
        """
        self.budget = budget
        self._plans.clear()

    def stream(self, budget: int, cuts: Mapping[int, WeightCut] | None = None) -> None:
        """From now on plans keep weights within `budget` bytes: resident ones and a ring for the others.
        `cuts` says of kernels (by node) which operand they can read in parts.
        """
        sizes = {s.node: s.size for s in self.stored if s.space == "weight"}
        fixed = {node: size for node, size in sizes.items() if isinstance(size, int)}
        for node in sizes.keys() - fixed.keys():
            raise BudgetError(f"weight %{node} has {sizes[node]} bytes; weight_budget needs fixed sizes")
        reads = [self._weights_of(kernel, fixed) for kernel in self.order]
        parts = {
            self.graph.nodes[kernel].operands[cut.operand].id: cut.nbytes
            for kernel, cut in (cuts or {}).items()
            if kernel in self.order
        }
        try:
            self.streaming = stream_weights(reads, fixed, budget, parts)
        except BudgetTooSmall as e:
            kernel = self.graph.nodes[self.order[e.step]]
            names = ", ".join(self.io.names_of(n) or f"%{n}" for n in e.weights)
            raise BudgetError(
                f"weight_budget is {bytes_text(budget)}, but kernel %{kernel.id} alone reads "
                f"{bytes_text(e.least)} of weights ({names}); the smallest budget that works is "
                f"{e.least} bytes",
                kernel.where,
            ) from None
        self._plans.clear()

    def _weights_of(self, kernel: int, weights: Mapping[int, int]) -> list[int]:
        """Weights that a kernel reads, through views too."""
        reads = (o.id for o in self.graph.nodes[kernel].operands)
        roots = (self.aliases[i].root if i in self.aliases else i for i in reads)
        return [root for root in roots if root in weights]

    def _workspace(self, inner: Inner, binding: Mapping[str, int]) -> LirWorkspace:
        """What the bodies of a node need, not placed yet. A branch that is closed for these sizes, which may
        make none of sense in it, is planned for those that it assumes."""
        plans = tuple(
            p.unchecked(
                p.binding
                if inner.branch and not is_open(p.graph, binding)
                else {s: binding[s] for s in p.symbols}
            )
            for p in inner.bodies
        )
        empty = LirWorkspace(LirBufferSlot(0, 0), plans, inner.carries)
        return replace(empty, slot=LirBufferSlot(0, empty.needed))

    def _storage(self, node: int) -> int:
        """The first value of those that hand one storage on to each other."""
        while node in self.shared:
            node = self.shared[node]
        return node

    def within(self, binding: Mapping[str, int], room: Mapping[str, int]) -> LirBufferPlan:
        """The plan for a binding in the places of a larger one: values stay where they are when a size that
        data decides becomes known. Until then it has a stand-in."""
        here = self.plan(binding, {s: NOT_FOUND for s in self.symbols if s not in binding})
        if not room:
            return here
        wide = self.unchecked({**here.binding, **room})
        slots = {n: replace(s, offset=wide.assignments[n].offset) for n, s in here.assignments.items()}
        return replace(here, assignments=slots, space_sizes=dict(wide.space_sizes))

    def aliases_at(self, binding: Mapping[str, int]) -> dict[int, LirViewAlias]:
        """Views at given sizes."""
        return self._aliases(self._evaluate([binding[s] for s in self.symbols])[len(self.stored) :])

    def _aliases(self, values: Sequence[int]) -> dict[int, LirViewAlias]:
        """Views at the sizes in force; `values` are all offsets, then all strides."""
        out, at = {}, len(self.aliases)
        for i, (node, view) in enumerate(self.aliases.items()):
            rank = len(view.strides or ())
            strides = None if view.strides is None else tuple(values[at : at + rank])
            at += rank
            out[node] = LirViewAlias(view.root, values[i], strides)
        return out

    def _place(self, blocks: list[Block]) -> Placement:
        if self.placed is not None:
            again = replay(self.placed, blocks)
            if again.ratio <= GOOD_ENOUGH:
                return again
        found = place(blocks)
        self.placed = found.order
        return found

    # -- written down

    def to_json(self) -> Json:
        """All facts as plain JSON values; `from_json` reads them back for the same graph."""
        return {
            "stored": [[s.node, str(s.size), s.space] for s in self.stored],
            "views": [
                [id, v.root, str(v.offset), None if v.strides is None else [str(s) for s in v.strides]]
                for id, v in self.aliases.items()
            ],
            "phases": [[node, str(phase)] for node, phase in self.phases.iter()],
            "params": [list(pair) for pair in self.io.params],
            "binding": self.binding,
            "order": self.order,
            "life": [[node, *span] for node, span in self.life.items()],
            "shared": [list(pair) for pair in self.shared.items()],
            "placed": self.placed,
            "streaming": None if self.streaming is None else self.streaming.to_json(),
            "inner": [
                [node, i.carries, [p.to_json() for p in i.bodies], i.cut and [i.cut.rows, str(i.cut.size)]]
                for node, i in self.inner.items()
            ],
            "budget": self.budget,
            "fitted": self.fitted,
        }

    @staticmethod
    def from_json(data: Json, graph: Graph) -> Placer:
        """The placer that wrote these facts; they are believed, so they must come from one's own hand."""
        known: dict[str, Dim] = {}

        def dim(text: str) -> Dim:
            if text not in known:
                known[text] = parse_dim(text)
            return known[text]

        phases = PhaseSchedule()
        for node, phase in data["phases"]:
            phases.set(node, Phase(phase))
        made = Placer(
            graph,
            [StoredValue(node, dim(size), space) for node, size, space in data["stored"]],
            {
                id: PlacedView(root, dim(offset), None if strides is None else tuple(map(dim, strides)))
                for id, root, offset, strides in data["views"]
            },
            phases,
            data["binding"],
        )
        made.io = replace(made.io, params=tuple((name, node) for name, node in data["params"]))
        made.order = list(data["order"])
        made.life = {node: (first, last) for node, first, last in data["life"]}
        made.shared = dict(data["shared"])
        made.placed = None if data["placed"] is None else tuple(data["placed"])
        if data["streaming"] is not None:
            made.streaming = Streaming.from_json(data["streaming"])
        for node, carries, facts, cut in data["inner"]:
            found = graph.nodes[node]
            placers = [Placer.from_json(f, b) for f, b in zip(facts, found.bodies, strict=True)]
            made.inner[node] = Inner(
                tuple(placers), carries, cut and Cut(cut[0], dim(cut[1])), is_branch(found)
            )
        made.budget, made.fitted = data["budget"], data["fitted"]
        return made
