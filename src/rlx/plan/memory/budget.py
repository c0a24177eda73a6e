"""Memory budgets: the most bytes of activations that a program may take.

A program over its budget shrinks step by step, cheapest way first: another order of its kernels,
chains of kernels in slices of rows, then kernels that run again instead of keeping their results. The steps
do not depend on the budget, only where they end does. So the smallest plan on the way is what the refusal
names as the least budget, and it works.
With symbolic sizes, the budget is checked once sizes are known: when they are planned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, TypeAlias

from rlx.files import Json
from rlx.ir.graph import Graph
from rlx.plan.build import Planner
from rlx.plan.kernel_costs import kernel_name, priced_costs
from rlx.plan.lir import ALIGNMENT, LirModule
from rlx.plan.lir_check import written_by
from rlx.plan.memory.again import Run, with_repeats
from rlx.plan.memory.certificate import OverBudgetError
from rlx.plan.memory.inplace import overwritable
from rlx.plan.memory.recompute import recompute_once
from rlx.plan.memory.reorder import reorder
from rlx.plan.memory.split import find_chains, with_chains
from rlx.plan.memory.steps import Step, Steps, Value
from rlx.plan.phase import Phase, ops_inside, runs_in_streams
from rlx.records import dataclass

MOST_ROUNDS = 200
MANY = 64  # rows, to see whether slices help


@dataclass(frozen=True)
class Repeated:
    """Kernels that run again so that a value need not be kept."""

    value: str  # its type
    kernels: tuple[str, ...]
    picoseconds: int
    where: tuple[str, ...] = ()


@dataclass
class Report:
    """What a budget changed: bytes of activations at the assumed sizes before and after, and by what."""

    budget: int
    before: int
    after: int
    reordered: bool = False
    repeated: list[Repeated] = field(default_factory=list)
    picoseconds: int = 0  # predicted time of the program without budget

    @property
    def picoseconds_added(self) -> int:
        return sum(r.picoseconds for r in self.repeated)

    def to_json(self) -> Json:
        """Plain values, for `stats`."""
        return {
            "bytes": self.budget,
            "before": self.before,
            "after": self.after,
            "reordered": self.reordered,
            "recomputed": [
                {"value": r.value, "kernels": list(r.kernels), "ps": r.picoseconds, "where": list(r.where)}
                for r in self.repeated
            ],
            "ps_added": self.picoseconds_added,
            "ps": self.picoseconds,
        }


def fit_budget(
    graph: Graph, assume: Mapping[str, int], budget: int, gate: Mapping[str, Any], can_slice: bool = True
) -> tuple[Graph, Planner]:
    """A graph of kernels and its planner within a budget, which knows what was changed; or OverBudgetError.

    `gate` are the constants by which the time of kernels that run again is predicted, `can_slice` says
    whether the backend runs slices. A program with symbolic sizes is shrunk for the assumed ones, and
    refused only where it is planned for sizes that do not fit.
    """
    planner = Planner(graph, assume)
    size = planner.plan().arena_size
    report = Report(budget, size, size)
    if size > budget or planner.symbols:
        cuts = _cut(graph, planner, assume) if can_slice else []
        graph, planner, report = _smaller(graph, planner, cuts, assume, gate, report)
        if report.after > budget and not planner.symbols:
            raise OverBudgetError(planner.plan(), budget)
    planner.limit(budget)
    report.after = planner.plan().arena_size
    planner.fitted = report.to_json()
    return graph, planner


Made: TypeAlias = tuple[Graph, Planner, Report]


def _smaller(
    graph: Graph,
    planner: Planner,
    cuts: Sequence[tuple[Graph, Planner]],
    assume: Mapping[str, int],
    gate: Mapping[str, object],
    report: Report,
) -> Made:
    """The program that fits and takes least time, or the smallest one.

    Another order costs nothing, slices cost less than computing again. A program with symbolic sizes is cut
    if it can be: how many slices there are, sizes decide, and a single one costs nothing.
    """
    in_streams = runs_in_streams(graph)  # phases have their order then, and what a stream keeps its place
    whole = _Search(graph, planner, assume, gate, report)
    found = [(graph, planner, report) if in_streams else whole.planned(reorder(steps_of(planner)), [])]
    for cut, slicing in cuts:
        found.append((cut, slicing, replace(report, after=slicing.plan().arena_size)))
    if planner.symbols:
        found = found[::-1]
    fitting = [made for made in found if made[2].after <= report.budget]
    if fitting:
        return fitting[0]
    searches = [] if in_streams else [whole, *(_Search(*start, assume, gate, report) for start in cuts)]
    return min((*found, *(search.run() for search in searches)), key=_preference)


def _preference(made: Made) -> tuple[bool, int, int]:
    """Programs that fit first, of these the fastest, of others the smallest."""
    report = made[2]
    over = report.after > report.budget
    return over, report.after if over else report.picoseconds_added, report.after


def _cut(graph: Graph, planner: Planner, assume: Mapping[str, int]) -> list[tuple[Graph, Planner]]:
    """The program with chains in slices: those at its fullest step, and those at steps half as full."""
    live = planner.plan().live_bytes()
    many = {symbol: max(n, MANY) for symbol, n in planner.binding.items()}  # symbols may be assumed to be 1
    out: list[tuple[Graph, Planner]] = []
    known: list[list[int]] = []
    for share in (2,) if planner.symbols else (1, 2):
        full = {k for k, n in zip(planner.order, live, strict=True) if share * n >= max(live)}
        chains = find_chains(graph, planner.order, planner.phases, planner.binding, full)
        members = [m for c in chains for m in c.members]
        if members and members not in known:
            known.append(members)
            cut = with_chains(graph, planner.order, chains)
            slicing = Planner(cut, assume)
            slicing.limit(0)
            if slicing.unchecked(many).arena_size < planner.unchecked(many).arena_size:
                out.append((cut, slicing))
    return out


class _Search:
    """Tries ways to a smaller program; which ones does not depend on the budget, only where each ends."""

    def __init__(
        self,
        graph: Graph,
        planner: Planner,
        assume: Mapping[str, int],
        gate: Mapping[str, Any],
        report: Report,
    ) -> None:
        self.graph, self.planner, self.assume, self.report = graph, planner, assume, report
        module = LirModule(graph, planner.plan(), gate=dict(gate))
        costs = priced_costs(module)
        self.picoseconds = sum(c.picoseconds for c in costs)
        self.costs = {c.node.id: c.picoseconds for c in costs if c.node.graph is graph}
        once = {k for k in self.costs if any(op.effects != "none" for op in ops_inside(graph.nodes[k]))}
        once |= planner.inner.keys()
        # What overwrites a state, and who reads it before, have their place.
        once |= {k for later, earlier in planner.kernels_before().items() for k in (later, *earlier)}
        self.repeatable = {k: time for k, time in self.costs.items() if k not in once}

    def run(self) -> Made:
        """The fitting program that takes least time, or the smallest one."""
        found: list[Made] = []
        for start in self.starts():
            least = None
            for program, repeated in self.smaller(start):
                peak = program.peak()
                if peak <= self.report.budget:
                    made = self.planned(program, repeated)
                    if made[2].after <= self.report.budget:
                        found.append(made)
                        break
                if least is None or peak < least[0]:
                    least = peak, program, repeated
            else:
                assert least is not None, "the start is one of them"
                found.append(self.planned(*least[1:]))
            if _preference(found[-1])[:2] == (False, 0):
                break
        return min(found, key=_preference)

    def starts(self) -> Iterator[Steps]:
        """Orders to begin with. That of the graph may need more at first, and leave more to compute again."""
        given = steps_of(self.planner)
        yield reorder(given)
        yield given
        if given.after:
            return
        planner = Planner(self.graph, self.assume, sorted(self.planner.order))
        planner.limit(0)
        yield steps_of(planner)

    def smaller(self, program: Steps) -> Iterator[tuple[Steps, list[Repeated]]]:
        """Programs that need less and less memory."""
        repeated: list[Repeated] = []
        yield program, repeated
        for _ in range(MOST_ROUNDS):
            found = recompute_once(program, self.repeatable)
            if found is not None:
                program, again = found
                value = self.graph.nodes[again.value]
                names = tuple(kernel_name(self.graph.nodes[k]) for k in again.kernels)
                repeated = [*repeated, Repeated(str(value.type), names, again.picoseconds, value.where)]
            else:
                better = reorder(program)
                if better is program:
                    return
                program = better
            yield program, repeated

    def planned(self, program: Steps, repeated: list[Repeated]) -> Made:
        """The program that runs these steps."""
        graph, order = self.graph, [s.kernel for s in program.steps]
        reordered = list(dict.fromkeys(order)) != self.planner.order
        if repeated:
            runs = [Run(s.kernel, s.version, dict(s.reads)) for s in program.steps]
            roots = {id: view.root for id, view in self.planner.views.items()}
            graph, order = with_repeats(graph, runs, roots)
        planner = Planner(graph, self.assume, order)
        planner.limit(0)
        report = replace(self.report, after=planner.plan().arena_size, reordered=reordered)
        return graph, planner, replace(report, repeated=repeated, picoseconds=self.picoseconds)


def steps_of(planner: Planner) -> Steps:
    """The schedule of a planner in the abstract, at the sizes that it assumes.

    >>> import rlx
    >>> g = rlx.Graph("sums")
    >>> g.output("y", rlx.ops.cumsum(rlx.ops.cumsum(g.input("x", (16,), "f32"), axis=0), axis=0))
    >>> steps_of(Planner(g, {})).live_bytes()
    [64, 64]
    """
    graph, sizes = planner.graph, planner.sizes(planner.binding)
    rooms = {
        s.node: -(-sizes[s.node] // ALIGNMENT) * ALIGNMENT
        for s in planner.stored
        if s.space == "activation" and s.node in planner.life
    }
    root = {id: view.root for id, view in planner.views.items()}
    kept = frozenset(root.get(n.id, n.id) for n in graph.roots())
    whole = (0, len(planner.order) - 1)
    always = {v for v in rooms if planner.life[v] == whole and planner.phases.get(v) is Phase.PROLOGUE}
    steps, written = [], set[int]()
    for kernel in planner.order:
        node = graph.nodes[kernel]
        roots = [root.get(o.id, o.id) for o in node.operands]
        writes = [v.id for v in written_by(graph, node)]
        in_place = [
            (o.id, 0)
            for o in (node.operands[i] for i in overwritable(node))
            if o.id not in planner.views and roots.count(o.id) == 1
        ]
        reads: list[Value] = [(r, 0) for r in dict.fromkeys(roots) if r in written]
        written.update(writes)
        steps.append(Step(kernel, tuple(reads), tuple((w, 0) for w in writes), tuple(in_place)))
    work = {node: w.slot.size for node, w in planner.plan().work.items()} if planner.inner else {}
    after = planner.kernels_before()
    return Steps(tuple(steps), rooms, work, kept, frozenset(always), after)
