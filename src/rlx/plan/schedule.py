"""Order the nodes of a DAG so that fewer bytes are alive at once.

Storage lives from the first to the last step that touches it; outputs live on to the end. The order that
minimises the peak is NP-hard to find, so a few cheap orders are tried, the best is kept; the given order is
among them and wins ties, so the result is never worse than what came in.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field
from itertools import accumulate
from typing import NoReturn

from rlx.errors import PlanError
from rlx.records import dataclass


@dataclass(frozen=True)
class Dag:
    """Nodes in a valid order, and who reads whose storage.

    - `operands`: the nodes that a node reads; ids that are not in `nodes` (weights, inputs) are ignored.
    - `sizes`: bytes of a storage root; ids without an entry have none.
    - `root_of`: a node without own storage -> the node whose storage it uses (views, in-place results).
    - `defines`: a node -> the nodes whose storage it writes besides its own (results of a multi-output op).
    - `after`: a node -> nodes that must run before it although it does not read them (effects, overwritten
      storage).
    - `outputs`: nodes whose storage must survive the last step.

    >>> diamond = Dag((0, 1, 2, 3), {1: [0], 2: [0], 3: [1, 2]}, {0: 64, 1: 640, 2: 64, 3: 8}, outputs=(3,))
    >>> peak(diamond)
    768
    """

    nodes: Sequence[int]
    operands: Mapping[int, Sequence[int]]
    sizes: Mapping[int, int]
    root_of: Mapping[int, int] = field(default_factory=dict)
    defines: Mapping[int, Sequence[int]] = field(default_factory=dict)
    after: Mapping[int, Sequence[int]] = field(default_factory=dict)
    outputs: Collection[int] = ()


@dataclass(frozen=True, slots=True)
class Schedule:
    """The chosen order, its peak in bytes, the peak of the given order, and the method that found it."""

    order: tuple[int, ...]
    peak: int
    given_peak: int
    heuristic: str


def schedule(dag: Dag) -> Schedule:
    """The best order found; the given one if nothing is better.

    Two branches that shrink are better run one after the other than side by side:

    >>> dag = Dag(nodes=(0, 1, 2, 3, 4, 5), operands={1: [0], 2: [0], 3: [1], 4: [2], 5: [3, 4]},
    ...           sizes={0: 8, 1: 1000, 2: 1000, 3: 8, 4: 8, 5: 8}, outputs=(5,))
    >>> best = schedule(dag)
    >>> best.order, best.peak, best.given_peak
    ((0, 1, 3, 2, 4, 5), 1016, 2008)
    """
    flow = _Flow.of(dag)
    best: Sequence[int] = range(len(dag.nodes))
    given_peak = best_peak = flow.peak(best)
    name, floor = "given order", flow.floor()
    for other_name, make in _HEURISTICS.items():
        if best_peak <= floor:
            break
        order = make(flow)
        order_peak = flow.peak(order)
        if order_peak < best_peak:
            best, best_peak, name = order, order_peak, other_name
    return Schedule(tuple(dag.nodes[i] for i in best), best_peak, given_peak, name)


def peak(dag: Dag, order: Sequence[int] | None = None) -> int:
    """The most bytes alive at one step of `order` (the given order if None).

    >>> peak(Dag(nodes=(0, 1, 2), operands={1: [0], 2: [1]}, sizes={0: 8, 1: 4, 2: 2}))
    12
    """
    return max(live_bytes(dag, order), default=0)


def live_bytes(dag: Dag, order: Sequence[int] | None = None) -> list[int]:
    """The bytes alive at every step of `order`: what a memory timeline shows.

    >>> live_bytes(Dag(nodes=(0, 1, 2), operands={1: [0], 2: [1]}, sizes={0: 8, 1: 4, 2: 2}))
    [8, 12, 6]
    """
    flow = _Flow.of(dag)
    return flow.live_bytes(_steps(dag, flow, order))


def lifetimes(dag: Dag, order: Sequence[int] | None = None) -> dict[int, tuple[int, int]]:
    """First and last step of every storage root: the intervals that `rlx.plan.memory.place` packs.

    >>> lifetimes(Dag(nodes=(7, 8, 9), operands={8: [7], 9: [8]}, sizes={7: 8, 9: 2}, root_of={8: 7}))
    {7: (0, 2), 9: (2, 2)}
    """
    flow = _Flow.of(dag)
    return dict(zip(flow.root_ids, flow.lifetimes(_steps(dag, flow, order)), strict=True))


@dataclass(slots=True)
class _Flow:
    """A DAG by position in the given order: who must run before whom, and the storage roots each touches.

    A root is alive from the first to the last node that touches it. That holds in both directions of time,
    so a mirrored flow is scheduled by the same code.
    """

    before: list[list[int]]
    later: list[list[int]]
    touches: list[list[int]]  # node -> roots, its own first
    touched_by: list[list[int]]  # root -> nodes
    sizes: list[int]  # root -> bytes
    root_ids: list[int]  # root -> node id
    alive_at_start: list[bool]
    alive_at_end: list[bool]

    @staticmethod
    def of(dag: Dag) -> _Flow:
        position = _positions(dag.nodes)
        flow = _Flow([], [[] for _ in position], [[] for _ in position], [], [], [], [], [])
        roots: dict[int, int] = {}  # id of a root -> its number
        for node, i in position.items():
            reads = dag.operands.get(node, ())
            needed = {position[o] for o in (*reads, *dag.after.get(node, ())) if o in position}
            if needed and max(needed) >= i:
                _refuse_order(node, dag.nodes[max(needed)])
            flow.before.append(sorted(needed))
            for earlier in needed:
                flow.later[earlier].append(i)
            for value in (node, *reads, *dag.defines.get(node, ())):
                root = dag.root_of.get(value, value)
                if root in position and root in dag.sizes:
                    number = roots.setdefault(root, len(roots))
                    if number == len(flow.sizes):
                        flow.sizes.append(dag.sizes[root])
                        flow.touched_by.append([])
                    if number not in flow.touches[i]:
                        flow.touches[i].append(number)
                        flow.touched_by[number].append(i)
        kept = {roots.get(dag.root_of.get(output, output)) for output in dag.outputs}
        flow.root_ids = list(roots)
        flow.alive_at_start = [False] * len(roots)
        flow.alive_at_end = [number in kept for number in range(len(roots))]
        return flow

    def mirrored(self) -> _Flow:
        """The same graph with time running backwards."""
        last = len(self.before) - 1

        def flip(lists: list[list[int]]) -> list[list[int]]:
            return [[last - i for i in reversed(items)] for items in lists]

        return _Flow(
            before=flip(self.later)[::-1],
            later=flip(self.before)[::-1],
            touches=self.touches[::-1],
            touched_by=flip(self.touched_by),
            sizes=self.sizes,
            root_ids=self.root_ids,
            alive_at_start=self.alive_at_end,
            alive_at_end=self.alive_at_start,
        )

    def lifetimes(self, order: Sequence[int]) -> list[tuple[int, int]]:
        """First and last step of every root when nodes run in `order`."""
        step_of = [0] * len(order)
        for step, i in enumerate(order):
            step_of[i] = step
        spans = []
        for root, nodes in enumerate(self.touched_by):
            steps = [step_of[i] for i in nodes]
            first = 0 if self.alive_at_start[root] else min(steps)
            spans.append((first, len(order) - 1 if self.alive_at_end[root] else max(steps)))
        return spans

    def live_bytes(self, order: Sequence[int]) -> list[int]:
        """Bytes alive at every step of `order`."""
        change = [0] * (len(order) + 1)
        for size, (first, last) in zip(self.sizes, self.lifetimes(order), strict=True):
            change[first] += size
            change[last + 1] -= size
        return list(accumulate(change[:-1]))

    def peak(self, order: Sequence[int]) -> int:
        return max(self.live_bytes(order), default=0)

    def floor(self) -> int:
        """No order has a lower peak: some node touches so many bytes at once, or so many are kept."""
        at_once = (sum(map(self.sizes.__getitem__, roots)) for roots in self.touches)
        kept = sum(size for size, keep in zip(self.sizes, self.alive_at_end, strict=True) if keep)
        return max(kept, max(at_once, default=0))


class _Greedy:
    """Run the node that shrinks memory most; when all grow it, look ahead along the nodes that each enables.

    Looking ahead follows Liu's rule for trees: a run that ends no higher than it began goes first, the lowest
    hill before higher ones; else the run that falls deepest from its hill, which leaves most room to others.
    """

    CANDIDATES = 6
    DEPTH = 8

    def __init__(self, flow: _Flow) -> None:
        self.flow = flow
        self.waits_for = [len(nodes) for nodes in flow.before]
        self.touches_left = [len(nodes) for nodes in flow.touched_by]
        self.alive = list(flow.alive_at_start)
        self.done = [False] * len(flow.before)
        # Bytes that each node would bring to life, and bytes that would die with it.
        self.opens = [sum(flow.sizes[r] for r in roots if not self.alive[r]) for roots in flow.touches]
        self.closes = [
            sum(flow.sizes[r] for r in roots if self._dies(r, self.touches_left[r])) for roots in flow.touches
        ]
        self.ready = sorted(self._rank(i) for i, count in enumerate(self.waits_for) if not count)

    def order(self) -> list[int]:
        order = []
        while self.ready:
            chosen = self.ready[0]
            if chosen[0] and len(self.ready) > 1:  # every ready node grows memory
                chosen = min(
                    self.ready[: self.CANDIDATES], key=lambda rank: (self._look_ahead(rank[-1]), rank)
                )
            self.ready.remove(chosen)
            self._run(chosen[-1])
            order.append(chosen[-1])
        return order

    def _dies(self, root: int, touches_left: int) -> bool:
        return touches_left == 1 and not self.flow.alive_at_end[root]

    def _rank(self, i: int) -> tuple[bool, int, int, int]:
        growth = self.opens[i] - self.closes[i]
        return (growth > 0, growth if growth <= 0 else -self.closes[i], growth, i)

    def _run(self, node: int) -> None:
        """Mark `node` as done and rank anew the ready nodes that this touches."""
        flow = self.flow
        self.done[node] = True
        newly_ready = []
        for i in flow.later[node]:
            self.waits_for[i] -= 1
            if not self.waits_for[i]:
                newly_ready.append(i)
        changed: dict[int, tuple[bool, int, int, int]] = {}  # ready node -> rank under which it is listed
        for root in flow.touches[node]:
            opened = not self.alive[root]
            self.alive[root] = True
            self.touches_left[root] -= 1
            dies_next = self._dies(root, self.touches_left[root])
            if not (opened or dies_next):
                continue
            for i in flow.touched_by[root]:
                if self.done[i]:
                    continue
                if not self.waits_for[i] and i not in newly_ready:
                    changed.setdefault(i, self._rank(i))
                self.opens[i] -= flow.sizes[root] * opened
                self.closes[i] += flow.sizes[root] * dies_next
        for rank in changed.values():
            del self.ready[bisect.bisect_left(self.ready, rank)]
        for i in (*changed, *newly_ready):
            bisect.insort(self.ready, self._rank(i))

    def _look_ahead(self, node: int) -> tuple[bool, int, int]:
        """Rank of the run that starts with `node` and goes on with what only it enables, best first."""
        flow = self.flow
        opened: set[int] = set()
        touched: dict[int, int] = {}  # root -> touches by this run
        enabled: dict[int, int] = {}  # node -> predecessors in this run
        level = hill = 0
        for _ in range(self.DEPTH):
            for root in flow.touches[node]:
                if not self.alive[root] and root not in opened:
                    opened.add(root)
                    level += flow.sizes[root]
                touched[root] = touched.get(root, 0) + 1
            hill = max(hill, level)
            for root in flow.touches[node]:
                if self._dies(root, self.touches_left[root] - touched[root] + 1):
                    level -= flow.sizes[root]
            if level <= 0:
                break
            following = None
            for i in flow.later[node]:
                enabled[i] = enabled.get(i, 0) + 1
                if enabled[i] == self.waits_for[i]:
                    growth = 0
                    for root in flow.touches[i]:
                        if not self.alive[root] and root not in opened:
                            growth += flow.sizes[root]
                        if self._dies(root, self.touches_left[root] - touched.get(root, 0)):
                            growth -= flow.sizes[root]
                    following = min(following or (growth, i), (growth, i))
            if following is None:
                break
            node = following[1]
        return (False, hill, level) if level <= 0 else (True, level - hill, level)


def _backward(flow: _Flow) -> list[int]:
    """The greedy order of the mirrored flow, turned round: starts from what the outputs need last."""
    last = len(flow.before) - 1
    return [last - i for i in reversed(_Greedy(flow.mirrored()).order())]


def _depth_first(flow: _Flow) -> list[int]:
    """Sethi-Ullman: finish one operand before the next, first the one that needs most beyond what it leaves.
    Optimal in peak for most trees; shared operands are counted as if each reader computed them."""
    count = len(flow.before)
    opens = [0] * count
    for root, nodes in enumerate(flow.touched_by):
        opens[nodes[0]] += flow.sizes[root]
    need, leaves = [0] * count, [0] * count
    operands: list[list[int]] = []
    for i in range(count):
        operands.append(sorted(flow.before[i], key=lambda j: (leaves[j] - need[j], j)))
        held = 0
        for j in operands[i]:
            need[i] = max(need[i], held + need[j])
            held += leaves[j]
        need[i] = max(need[i], held + opens[i])
        leaves[i] = opens[i] or sum(flow.sizes[root] for root in flow.touches[i][:1])
    order: list[int] = []
    seen = [False] * count
    ends = sorted((i for i in range(count) if not flow.later[i]), key=lambda i: (leaves[i] - need[i], i))
    stack = ends[::-1]
    while stack:
        i = stack.pop()
        if i < 0:
            order.append(~i)  # all its operands are in the order by now
        elif not seen[i]:
            seen[i] = True
            stack.append(~i)
            stack.extend(j for j in reversed(operands[i]) if not seen[j])
    return order


_HEURISTICS: Mapping[str, Callable[[_Flow], list[int]]] = {
    "forward greedy": lambda flow: _Greedy(flow).order(),
    "backward greedy": _backward,
    "depth first": _depth_first,
}


def _positions(nodes: Sequence[int]) -> dict[int, int]:
    position = {node: i for i, node in enumerate(nodes)}
    if len(position) != len(nodes):
        twice = next(node for i, node in enumerate(nodes) if position[node] != i)
        raise PlanError(f"node {twice} is listed twice in the order; list every node once")
    return position


def _steps(dag: Dag, flow: _Flow, order: Sequence[int] | None) -> Sequence[int]:
    """`order` by position, the given one if None; refuses what is not a topological order of the graph."""
    if order is None:
        return range(len(dag.nodes))
    position, step_of = _positions(dag.nodes), _positions(order)
    if position.keys() != step_of.keys():
        odd = min(position.keys() ^ step_of.keys())
        raise PlanError(
            f"node {odd} is not in both the graph and the order; order exactly the nodes of the graph"
        )
    for node, i in position.items():
        for earlier in flow.before[i]:
            if step_of[dag.nodes[earlier]] > step_of[node]:
                _refuse_order(node, dag.nodes[earlier])
    return [position[node] for node in order]


def _refuse_order(node: int, needed: int) -> NoReturn:
    raise PlanError(f"node {node} comes before node {needed}, which it needs; give a topological order")
