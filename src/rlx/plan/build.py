"""From a graph of kernels to a plan: roots and aliases, order, lifetimes, placement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlx.cost.io import assumed_binding
from rlx.errors import GuardError, PlanError
from rlx.ir.bind import check_constraints
from rlx.ir.dim import Dim, compile_dims
from rlx.ir.form import is_dense
from rlx.ir.graph import Graph, Node
from rlx.ir.lir import ALIGNMENT, LirBufferPlan, LirBufferSlot, LirIoManifest, LirViewAlias
from rlx.ir.op import Role
from rlx.ir.phase import Phase, derive_phases
from rlx.ir.types import TupleType
from rlx.ir.views import View, view_layouts
from rlx.plan.inplace import overwritable, share_storage
from rlx.plan.place import Block, Placement, place, replay
from rlx.plan.schedule import Dag, lifetimes, schedule

LEAF_SPACE = {Role.INPUT: "input", Role.PARAM: "weight", Role.CONSTANT: "weight", Role.STATE: "state"}
__all__ = ["Planner", "View", "view_layouts"]

MOST_PLANS = 256  # bindings whose plans are kept
GOOD_ENOUGH = 1.03  # a replayed placement this close to its bound is not searched again


class Planner:
    """Knows order, lifetimes and the winning placement order; gives a plan for any binding quickly."""

    def __init__(self, graph: Graph, assume: Mapping[str, int], order: Sequence[int] | None = None) -> None:
        self.graph = graph
        self.views = view_layouts(graph)
        self.symbols = graph.symbols()
        live = graph.live()
        self.outputs = self._output_nodes()
        self.kernels = [
            n.id for n in graph.nodes if n.id in live and n.id not in self.views and self._is_kernel(n)
        ]
        self.stored = [n for n in graph.nodes if n.id not in self.views and self._has_slot(n, live)]
        sizes: list[Dim] = [n.tensor.nbytes for n in self.stored]
        offsets: list[Dim] = [v.layout.offset * graph.nodes[i].dtype.itemsize for i, v in self.views.items()]
        strides: list[Dim] = [s for v in self.views.values() for s in v.layout.strides]
        self._evaluate = compile_dims([*sizes, *offsets, *strides], self.symbols)
        self.phases = derive_phases(graph)
        self.io = LirIoManifest.collect(graph)
        self.binding = assumed_binding(graph, assume)
        self.order, self.life = self._schedule(order)
        self._keep_prologue()
        overwrites = {k: overwritable(graph.nodes[k]) for k in self.order}
        self.shared = share_storage(graph, self.order, self.life, self.views, overwrites)
        self._plans: dict[tuple[int, ...], LirBufferPlan] = {}
        self.placed: tuple[int, ...] | None = None  # order of the last placement, replayed for other sizes

    def _keep_prologue(self) -> None:
        """What a stream computes once must not be overwritten by any of its steps."""
        last = len(self.order) - 1
        for kernel in self.order:
            for o in self.graph.nodes[kernel].operands:
                value = self._root(o.id)
                first = self.phases.get(value) is Phase.PROLOGUE and value in self.life
                if first and self.phases.get(kernel) is not Phase.PROLOGUE:
                    self.life[value] = (0, last)

    def _is_kernel(self, node: Node) -> bool:
        return node.op.role in (Role.COMPUTE, Role.REGION)

    def _has_slot(self, node: Node, live: set[int]) -> bool:
        if isinstance(node.type, TupleType):
            return False
        written = node.op.role is Role.RESULT and node.operands[0].id in live  # read or not
        return node.id in live or written or node.op.role in LEAF_SPACE

    def _output_nodes(self) -> dict[int, str]:
        out: dict[int, str] = {}
        for name, node in self.graph.outputs.items():
            if node.id in self.views or node.id in out or node.op.role in LEAF_SPACE:
                raise PlanError(
                    f"output {name!r} has no storage of its own; a copy must be inserted before planning"
                )
            out[node.id] = name
        return out

    def _root(self, node: int) -> int:
        return self.views[node].root if node in self.views else node

    def _space(self, node: Node) -> str:
        if node.op.role in LEAF_SPACE:
            return LEAF_SPACE[node.op.role]
        return "output" if node.id in self.outputs else "activation"

    @staticmethod
    def replaying(graph: Graph, plan: LirBufferPlan) -> Planner:
        """The planner of a plan that was read from a file: same order of kernels, same storage shared."""
        made = Planner(graph, plan.binding, plan.schedule)
        made.shared = dict(plan.shared)
        own = [i for i in made.life if i not in made.shared]
        made.placed = tuple(sorted(own, key=lambda i: (plan.assignments[i].offset, i)))
        made._plans[tuple([plan.binding[s] for s in made.symbols])] = plan
        return made

    def _schedule(self, given: Sequence[int] | None) -> tuple[list[int], dict[int, tuple[int, int]]]:
        """Order of kernels with the lowest peak (or the given one), and lifetimes of values in it."""
        values = self._evaluate([self.binding[s] for s in self.symbols])
        size_of = {n.id: v for n, v in zip(self.stored, values, strict=False)}
        kernel_set = set(self.kernels)
        defines: dict[int, list[int]] = {}
        owner: dict[int, int] = {}
        for n in self.graph.nodes:
            if n.op.role is Role.RESULT:
                defines.setdefault(n.operands[0].id, []).append(n.id)
                owner[n.id] = n.operands[0].id
        results = [r for k in self.kernels for r in defines.get(k, []) if r in size_of]
        nodes = sorted([*self.kernels, *results])
        operands: dict[int, list[int]] = {r: [owner[r]] for r in results}
        for k in self.kernels:
            reads = [self._root(o.id) for o in self.graph.nodes[k].operands]
            operands[k] = list(dict.fromkeys(r for r in reads if r in kernel_set or r in owner))
        activation = {n.id for n in self.stored if self._space(n) == "activation"}
        sizes = {i: -(-size_of[i] // ALIGNMENT) * ALIGNMENT for i in nodes if i in activation}
        ends = [self._root(n.id) for n in self.graph.roots()]
        dag = Dag(
            nodes=nodes,
            operands=operands,
            sizes=sizes,
            defines={k: [r for r in v if r in size_of] for k, v in defines.items() if k in kernel_set},
            outputs=[i for i in ends if i in kernel_set or i in owner],
        )
        if given is None:
            order: Sequence[int] = schedule(dag).order
        else:
            order = [i for k in given for i in (k, *dag.defines.get(k, ()))]
        life = lifetimes(dag, order)
        step, steps = 0, []  # results take no step of their own: theirs is their owner's
        for i in order:
            steps.append(step - (i in owner))
            step += i in kernel_set
        return [i for i in order if i in kernel_set], {i: (steps[a], steps[b]) for i, (a, b) in life.items()}

    def plan(self, binding: Mapping[str, int] | None = None) -> LirBufferPlan:
        """Slots for a binding, whose guards are checked here; without one, for the assumed sizes."""
        if binding is None:
            binding = self.binding
        else:
            missing = [s for s in self.symbols if s not in binding]
            if missing:
                told = f"symbol {missing[0]!r} of program {self.graph.name!r} has no size in this binding"
                raise GuardError(told)
            check_constraints(self.graph.constraints, binding)
        key = tuple([binding[s] for s in self.symbols])
        known = self._plans.get(key)
        if known is not None:
            return known
        values = self._evaluate(list(key))
        count = len(self.stored)
        sizes = {n.id: v for n, v in zip(self.stored, values, strict=False)}
        aliases = self._aliases(values[count:])
        slots: dict[int, LirBufferSlot] = {}
        used = dict.fromkeys(("weight", "input", "output", "state"), 0)
        spans: dict[int, tuple[int, int]] = {}  # storage -> steps in which any value in it is alive
        for node in self.stored:
            space = self._space(node)
            if space == "activation":
                if node.id in self.life:
                    own = self._storage(node.id)
                    first, last = self.life[node.id]
                    start, stop = spans.get(own, (first, last))
                    spans[own] = (min(start, first), max(stop, last))
                continue
            slots[node.id] = LirBufferSlot(used[space], sizes[node.id], space)
            used[space] += -(-sizes[node.id] // ALIGNMENT) * ALIGNMENT
        placed = self._place([Block(own, sizes[own], *span) for own, span in spans.items()])
        for i in self.life:
            slots[i] = LirBufferSlot(placed.offsets[self._storage(i)], sizes[i], "activation")
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
            self.graph,
        )
        if len(self._plans) >= MOST_PLANS:
            self._plans.clear()
        self._plans[key] = made
        return made

    def _storage(self, node: int) -> int:
        """The first value of those that hand one storage on to each other."""
        while node in self.shared:
            node = self.shared[node]
        return node

    def _aliases(self, values: tuple[int, ...]) -> dict[int, LirViewAlias]:
        out, at = {}, len(self.views)
        for i, (node, view) in enumerate(self.views.items()):
            rank = len(view.layout.strides)
            dense_view = is_dense(view.layout, self.graph.nodes[node].shape)
            strides = None if dense_view else tuple(values[at : at + rank])
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
