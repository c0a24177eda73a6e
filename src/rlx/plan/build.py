"""From a graph of kernels to a plan: roots and aliases, order, lifetimes, placement."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from itertools import pairwise

from rlx.cost.io import assumed_binding
from rlx.errors import PlanError
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Role
from rlx.ir.symbols import waits_for_sizes
from rlx.ir.types import TupleType
from rlx.kernel.control import is_branch, is_laid_out, loop_form, own_symbols
from rlx.kernel.form import Loop, is_dense
from rlx.kernel.views import View, view_layouts
from rlx.plan.lir import ALIGNMENT, PLACED, LirBufferPlan
from rlx.plan.memory.inplace import overwritable, share_storage
from rlx.plan.memory.placer import Cut, Inner, PlacedView, Placer, StoredValue
from rlx.plan.phase import Phase, derive_phases, runs_in_streams
from rlx.plan.schedule import Dag, lifetimes, schedule
from rlx.plan.states import StatePlan, plan_states, state_lifetimes
from rlx.plan.stream import Streaming

LEAF_SPACE = {Role.INPUT: "input", Role.PARAM: "weight", Role.CONSTANT: "weight", Role.STATE: "state"}
__all__ = ["Planner", "View", "view_layouts"]


class Planner(Placer):
    """Finds order, lifetimes and shared storage of a graph of kernels; a placer builds plans from them."""

    def __init__(self, graph: Graph, assume: Mapping[str, int], order: Sequence[int] | None = None) -> None:
        self.views = view_layouts(graph)
        live = graph.live()
        self.outputs = self._output_nodes(graph)
        self.met = self._met_values(graph)
        self.kernels = [
            n.id for n in graph.nodes if n.id in live and n.id not in self.views and self._is_kernel(n)
        ]
        stored = [n for n in graph.nodes if n.id not in self.views and self._has_slot(n, live)]
        phases = derive_phases(graph)
        self.states = self._settled(plan_states(graph, self.views, phases))
        super().__init__(
            graph,
            [StoredValue(n.id, n.tensor.nbytes, self._space(n)) for n in stored],
            {id: _placed_view(graph.nodes[id], view) for id, view in self.views.items()},
            phases,
            assumed_binding(graph, assume),
        )
        self.order, self.life = self._schedule(order)
        self._keep_prologue()
        overwrites = {k: overwritable(graph.nodes[k]) for k in self.order if k in self.life}
        shared = share_storage(graph, self.order, self.life, self.views, overwrites)
        self.shared = {k: v for k, v in shared.items() if k not in self.met or v in self.met}
        self.shared |= self.states.over
        self.life |= state_lifetimes(graph, self.states.over, self.order, self._root)
        for node in (graph.nodes[k] for k in self.order):
            form = loop_form(node)
            if form is not None and is_laid_out(node):
                bodies = tuple(Planner(b, assume) for b in node.bodies)
                self.inner[node.id] = Inner(bodies, form.carries, _cut(form), is_branch(node))

    def _keep_prologue(self) -> None:
        """What a stream computes once must not be overwritten by any of its steps."""
        last = len(self.order) - 1
        for kernel in self.order:
            for o in self.graph.nodes[kernel].operands:
                value = self._root(o.id)
                first = self.phases.get(value) is Phase.PROLOGUE and value in self.life
                if first and self.phases.get(kernel) is not Phase.PROLOGUE:
                    self.life[value] = (0, last)

    def _settled(self, states: StatePlan) -> StatePlan:
        for name, why in states.refused.items():
            raise PlanError(f"state {name!r} needs a copy before planning: {why}")
        return states

    def _is_kernel(self, node: Node) -> bool:
        return node.op.role in (Role.COMPUTE, Role.REGION)

    def _has_slot(self, node: Node, live: set[int]) -> bool:
        if isinstance(node.type, TupleType):
            return False
        written = node.op.role is Role.RESULT and node.operands[0].id in live  # read or not
        return node.id in live or written or node.op.role in LEAF_SPACE

    def _output_nodes(self, graph: Graph) -> dict[int, str]:
        out: dict[int, str] = {}
        for name, node in graph.outputs.items():
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
        if node.id in self.states.over:
            return "state"
        if node.id in self.outputs:
            return "output"
        return "heap" if node.id in self.met else "activation"

    def _met_values(self, graph: Graph) -> set[int]:
        """Values that other ranks read or write: operands of collectives, and results in their place."""
        collectives = [n for n in graph.nodes if n.op.family == "collective"]
        operands = {self._root(n.operands[0].id) for n in collectives}
        return operands | {n.id for n in collectives if n.op.in_place}

    @staticmethod
    def replaying(graph: Graph, plan: LirBufferPlan) -> Planner:
        """The planner of a plan that was read from a file: same order of kernels, same storage shared."""
        made = Planner(graph, plan.binding, plan.schedule)
        made.shared, made.io = dict(plan.shared), plan.io
        if "ring" in plan.space_sizes:
            sizes = plan.sizes()
            unread = tuple(s.node for s in made.stored if s.node not in plan.assignments)
            made.streaming = Streaming(sizes["weight"] + sizes["ring"], sizes["ring"], plan.fetches, unread)
        for id, work in plan.work.items():
            bodies = zip(graph.nodes[id].bodies, work.bodies, strict=True)
            placers = tuple(Planner.replaying(b, p) for b, p in bodies)
            made.inner[id] = made.inner[id]._replace(bodies=placers)
        at = {i: plan.assignments[i].offset for i in made.life if made._is_placed(i)}
        at |= {~id: work.slot.offset for id, work in plan.work.items()}
        made.placed = tuple(sorted(at, key=lambda i: (at[i], i)))
        made._plans[tuple([plan.binding[s] for s in made.symbols])] = plan
        return made

    def _is_placed(self, value: int) -> bool:
        """Whether a value has its own room among activations."""
        own = value not in self.shared and value not in self.met
        return own and self.graph.nodes[value].op.role not in LEAF_SPACE

    def kernels_before(self) -> dict[int, list[int]]:
        """kernel -> kernels that must run before it though it does not read them: readers of what it
        overwrites, effects in their order, and those that find its size in data.
        """
        after = {k: list(v) for k, v in self.states.after.items()}
        ordered = [k for k in self.kernels if self.graph.nodes[k].op.effects == "ordered"]
        for earlier, later in pairwise(ordered):
            after.setdefault(later, []).append(earlier)
        kernels = set(self.kernels)
        for later, finders in waits_for_sizes(self.graph).items():
            if later in kernels:
                after.setdefault(later, []).extend(i for i in finders if i in kernels)
        return after

    def _schedule(self, given: Sequence[int] | None) -> tuple[list[int], dict[int, tuple[int, int]]]:
        """Order of kernels with the lowest peak (or the given one), and lifetimes of values in it."""
        size_of = self.sizes(self.binding)
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
        placed = {s.node for s in self.stored if s.space in PLACED}
        sizes = {i: -(-size_of[i] // ALIGNMENT) * ALIGNMENT for i in nodes if i in placed}
        ends = [self._root(n.id) for n in self.graph.ends()]
        after = self.kernels_before()
        dag = Dag(
            nodes=_in_valid_order(nodes, operands, after) if self.states.after else nodes,
            operands=operands,
            sizes=sizes,
            defines={k: [r for r in v if r in size_of] for k, v in defines.items() if k in kernel_set},
            after=after,
            outputs=[i for i in ends if i in kernel_set or i in owner],
        )
        if given is None:
            order: Sequence[int] = schedule(dag).order
            if runs_in_streams(self.graph):
                rank = {phase: number for number, phase in enumerate(Phase)}
                order = sorted(order, key=lambda i: rank[self.phases.get(owner[i] if i in owner else i)])
        else:
            order = [i for k in given for i in (k, *dag.defines.get(k, ()))]
        life = lifetimes(dag, order)
        step, steps = 0, []  # results have the step of their owner
        for i in order:
            steps.append(step - (i in owner))
            step += i in kernel_set
        return [i for i in order if i in kernel_set], {i: (steps[a], steps[b]) for i, (a, b) in life.items()}


def _in_valid_order(
    nodes: Sequence[int], operands: Mapping[int, Sequence[int]], after: Mapping[int, Sequence[int]]
) -> list[int]:
    """Nodes after what they read and what they overwrite; otherwise by number."""
    needs = {n: {*operands.get(n, ()), *after.get(n, ())} for n in nodes}
    later: dict[int, list[int]] = {}
    for n, before in needs.items():
        for b in before:
            later.setdefault(b, []).append(n)
    ready = [n for n in nodes if not needs[n]]  # ascending, hence a heap
    out: list[int] = []
    while ready:
        n = heapq.heappop(ready)
        out.append(n)
        for i in later.get(n, ()):
            needs[i].discard(n)
            if not needs[i]:
                heapq.heappush(ready, i)
    return out


def _cut(form: Loop) -> Cut | None:
    """How a body is run in slices, if it is."""
    config = dict(form.config)
    return Cut(config["symbol"], config["size"]) if own_symbols(form) else None


def _placed_view(node: Node, view: View) -> PlacedView:
    """A view as bytes into its root; strides only where they say something."""
    layout = view.layout
    strides = None if is_dense(layout, node.shape) else tuple(layout.strides)
    return PlacedView(view.root, layout.offset * node.dtype.itemsize, strides)
