"""States in place: which values are written into the memory of a state, and what must run before they are.

A state's new value may take the state's own slot if nobody reads the old value afterwards. Either it is the
end of a chain of kernels that each may overwrite the operand that they replace (an append by
dynamic_update_slice, an elementwise update), or it is written anew after the last reader. Where neither is
possible there is a copy: a separate kernel, which runs after all readers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from itertools import pairwise

from rlx.ir.graph import Graph, Node, State
from rlx.ir.op import Role, get_op
from rlx.ir.rewrite import rewrite
from rlx.kernel.views import View, view_layouts
from rlx.plan.memory.inplace import overwritable
from rlx.plan.phase import Phase, PhaseSchedule, derive_phases
from rlx.records import dataclass

LEAVES = (Role.INPUT, Role.PARAM, Role.CONSTANT, Role.STATE)


@dataclass
class StatePlan:
    """How states are updated.

    `over`: value -> the value whose memory it takes, ending at a state. `after`: kernel -> kernels that must
    run before it. `refused`: state -> why its new value is not written in place.
    """

    over: dict[int, int] = field(default_factory=dict)
    after: dict[int, list[int]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def plan_states(graph: Graph, views: Mapping[int, View], phases: PhaseSchedule) -> StatePlan:
    """How the states of a graph of kernels are updated.

    >>> from rlx import ops
    >>> g = Graph()
    >>> x, cache = g.input("x", (1, 4), "f32"), g.state("cache", (8, 4), "f32")
    >>> g.set_state("cache", ops.dynamic_update_slice(cache, x, [2], axes=(0,)))
    >>> found = plan_states(g, {}, derive_phases(g))
    >>> {g.nodes[new].op.name: g.nodes[old].op.name for new, old in found.over.items()}
    {'dynamic_update_slice': 'state'}
    """
    if not any(s.output is not s.input for s in graph.states):
        return StatePlan()
    return _Finder(graph, views, phases).find()


def settle_states(graph: Graph) -> Graph:
    """A graph whose states can all be updated in place: the others get a copy at the end."""
    for _ in range(2):  # a state that takes the value of another may need a second copy
        refused = plan_states(graph, view_layouts(graph), derive_phases(graph)).refused
        if not refused:
            break
        graph = rewrite(graph, lambda node, operands, out: None)
        copying = get_op("copy")
        graph.states = [
            State(s.name, s.input, graph.add(copying, (s.output,), where=s.output.where))
            if s.name in refused
            else s
            for s in graph.states
        ]
    return graph


def why_copied(graph: Graph) -> dict[str, str]:
    """States that are replaced by a copy of their new value -> what kept it from being written in place."""
    sources = {s.name: s.output.operands[0] for s in graph.states if s.output.op.family == "copy"}
    if not sources:
        return {}
    direct = Graph.__new__(Graph)  # the same nodes, which copy(graph) does not share, with other states
    direct.__dict__ |= graph.__dict__
    direct.states = [State(s.name, s.input, sources.get(s.name, s.output)) for s in graph.states]
    reasons = plan_states(direct, view_layouts(graph), derive_phases(direct)).refused
    return {name: reasons.get(name, "the graph asks for one") for name in sources}


class _Finder:
    def __init__(self, graph: Graph, views: Mapping[int, View], phases: PhaseSchedule) -> None:
        self.graph, self.views, self.phases = graph, views, phases
        live = graph.live()
        self.kernels = [n for n in graph.nodes if n.id in live and self._is_kernel(n)]
        self.readers: dict[int, list[int]] = {}  # value -> kernels that read its storage
        self.needs: dict[int, list[int]] = {}  # kernel -> kernels that must run before it
        for kernel in self.kernels:
            for root in dict.fromkeys(self._root(o) for o in kernel.operands):
                self.readers.setdefault(root, []).append(kernel.id)
            made_by = (self._kernel(graph.nodes[self._root(o)]) for o in kernel.operands)
            self.needs[kernel.id] = list(dict.fromkeys(k for k in made_by if k is not None))
        self.kept = {n.id for n in graph.outputs.values()}
        self.plan = StatePlan()

    def _is_kernel(self, node: Node) -> bool:
        return node.op.role in (Role.COMPUTE, Role.REGION) and node.id not in self.views

    def _root(self, node: Node) -> int:
        view = self.views.get(node.id)
        return node.id if view is None else view.root

    def _kernel(self, value: Node) -> int | None:
        """The kernel that writes a value; None for what is given."""
        if value.op.role is Role.RESULT:
            return value.operands[0].id
        return None if value.op.role in LEAVES else value.id

    def find(self) -> StatePlan:
        taken = {s.output.id for s in self.graph.states}
        for state in self.graph.states:
            if state.output is state.input:
                continue
            why = self._refusal(state)
            if why is None:
                why = self._place(state, taken)
            if why is not None:
                self.plan.refused[state.name] = why
        return self.plan

    def _refusal(self, state: State) -> str | None:
        value = state.output
        if value.id in self.views or value.op.role in LEAVES:
            return "its new value lies in other memory"
        if value.id in self.kept:
            return "its new value is an output too"
        if value.id in self.plan.over:
            return "its new value is another state's too"
        return None

    def _place(self, state: State, taken: set[int]) -> str | None:
        """Enter a chain of values in the state's memory; the reason if there is none."""
        chain = self._chain(state.output, state.input.id, taken, {})
        for values in ([state.input.id, *chain] if chain else None, [state.input.id, state.output.id]):
            if values is None:
                continue
            kernel = self._kernel(state.output)
            assert kernel is not None
            if len(values) == 2 and values[1:] != chain and kernel in self.readers.get(state.input.id, ()):
                return "the kernel that makes its new value reads the old one elsewhere"
            edges = self._edges(values)
            if edges is None:
                continue
            self.plan.over |= dict(zip(values[1:], values, strict=False))
            for kernel, before in edges.items():
                known = self.plan.after.setdefault(kernel, [])
                known += [k for k in before if k not in known]
                self.needs[kernel] += before
            return None
        return "its old value is read after the new one is made"

    def _chain(self, value: Node, goal: int, taken: set[int], known: dict[int, list[int]]) -> list[int]:
        """Values from the state on, each written over the one before it; empty if there is no such way."""
        if value.id in known:
            return known[value.id]
        known[value.id] = []
        made_by = None if value.id in self.views else self._kernel(value)
        if made_by is None:
            return []
        kernel = self.graph.nodes[made_by]
        roots = [self._root(o) for o in kernel.operands]
        for number in overwritable(kernel, value.attrs["index"] if kernel is not value else 0):
            source = kernel.operands[number]
            if source.id in self.views or roots.count(source.id) != 1:
                continue
            if source.id == goal:
                known[value.id] = [value.id]
                break
            if source.id in taken or source.id in self.kept or source.id in self.plan.over:
                continue
            before = self._chain(source, goal, taken, known)
            if before:
                known[value.id] = [*before, value.id]
                break
        return known[value.id]

    def _edges(self, values: list[int]) -> dict[int, list[int]] | None:
        """kernel -> kernels that read what it overwrites; None if one of those needs its result."""
        out: dict[int, list[int]] = {}
        for old, new in pairwise(values):
            writer = self._kernel(self.graph.nodes[new])
            assert writer is not None
            before = [k for k in self.readers.get(old, ()) if k != writer]
            late = any(self.phases.get(k) is Phase.EPILOGUE for k in before)
            if late or any(self._depends(k, writer, out) for k in before):
                return None
            out[writer] = before
        return out

    def _depends(self, kernel: int, on: int, extra: Mapping[int, Iterable[int]]) -> bool:
        seen: set[int] = set()
        stack = [kernel]
        while stack:
            k = stack.pop()
            if k == on:
                return True
            if k not in seen:
                seen.add(k)
                stack += [*self.needs.get(k, ()), *extra.get(k, ())]
        return False


def state_lifetimes(
    graph: Graph, over: Mapping[int, int], order: list[int], root: Callable[[int], int]
) -> dict[int, tuple[int, int]]:
    """First and last step of every value in the memory of an updated state."""
    values = {*over, *over.values()}
    last = len(order) - 1
    spans: dict[int, tuple[int, int]] = {}
    for v in values:
        if graph.nodes[v].op.role is Role.STATE:
            spans[v] = (0, 0)
    for step, kernel in enumerate(order):
        node = graph.nodes[kernel]
        for v in [kernel, *(r.id for r in graph.results(node)), *(root(o.id) for o in node.operands)]:
            if v in values:
                spans[v] = (spans.get(v, (step, step))[0], step)
    for s in graph.states:
        if s.output.id in values:
            spans[s.output.id] = (spans[s.output.id][0], last)
    return {v: spans[v] for v in sorted(spans)}
