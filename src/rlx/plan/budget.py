"""Memory budgets: the most bytes of activations that a program may take.

A program over its budget is made smaller step by step, cheapest way first: another order of its kernels,
then kernels that run again instead of keeping their results. The steps do not depend on the budget, only
where they end does. So the smallest plan on the way is what the refusal names as the least budget, and it
works.
Programs with symbolic sizes are judged when sizes are known: where a plan is made for a binding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rlx.ir.graph import Graph
from rlx.ir.lir import ALIGNMENT, LirModule
from rlx.ir.lir_check import written_by
from rlx.ir.phase import Phase, ops_inside
from rlx.passes.recompute import Run, with_repeats
from rlx.plan.build import Planner
from rlx.plan.certificate import OverBudgetError
from rlx.plan.explain import kernel_costs, kernel_name
from rlx.plan.inplace import overwritable
from rlx.plan.recompute import recompute_once
from rlx.plan.reorder import reorder
from rlx.plan.steps import Step, Steps, Value

MOST_ROUNDS = 200


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

    def to_json(self) -> dict[str, Any]:
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
    graph: Graph, assume: Mapping[str, int], budget: int, gate: Mapping[str, Any]
) -> tuple[Graph, Planner]:
    """A graph of kernels and its planner within a budget, which knows what was changed; or OverBudgetError.

    `gate` are the constants by which the time of kernels that run again is predicted. A program with symbolic
    sizes is made smaller for the assumed ones, and refused only where it is planned for sizes that do not
    fit.
    """
    planner = Planner(graph, assume)
    size = planner.plan().arena_size
    report = Report(budget, size, size)
    if size > budget:
        graph, planner, report = _Search(graph, planner, assume, gate, report).run()
        if report.after > budget and not planner.symbols:
            raise OverBudgetError(planner.plan(), budget)
    planner.budget, planner.fitted = budget, report.to_json()
    return graph, planner


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
        self.costs = {c.node.id: c.picoseconds for c in kernel_costs(module)}
        once = {k for k in self.costs if any(op.effects != "none" for op in ops_inside(graph.nodes[k]))}
        self.repeatable = {k: time for k, time in self.costs.items() if k not in once}

    def run(self) -> tuple[Graph, Planner, Report]:
        """The fitting program that takes least time, or the smallest one."""
        fitting, smallest = [], []
        for start in self.starts():
            least = None
            for program, repeated in self.smaller(start):
                peak = program.peak()
                if peak <= self.report.budget:
                    made = self.planned(program, repeated)
                    if made[2].after <= self.report.budget:
                        fitting.append(made)
                        break
                if least is None or peak < least[0]:
                    least = peak, program, repeated
            else:
                assert least is not None, "the start is one of them"
                smallest.append(self.planned(*least[1:]))
            if fitting and not fitting[-1][2].repeated:
                break
        if fitting:
            return min(fitting, key=lambda made: made[2].picoseconds_added)
        return min(smallest, key=lambda made: made[2].after)

    def starts(self) -> Iterator[Steps]:
        """Orders to begin with. That of the graph may need more at first, and leave more to compute again."""
        given = steps_of(self.planner)
        yield reorder(given)
        yield given
        yield steps_of(Planner(self.graph, self.assume, sorted(self.planner.order)))

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

    def planned(self, program: Steps, repeated: list[Repeated]) -> tuple[Graph, Planner, Report]:
        """The program that runs these steps."""
        graph, order = self.graph, [s.kernel for s in program.steps]
        reordered = list(dict.fromkeys(order)) != self.planner.order
        if repeated:
            runs = [Run(s.kernel, s.version, dict(s.reads)) for s in program.steps]
            roots = {id: view.root for id, view in self.planner.views.items()}
            graph, order = with_repeats(graph, runs, roots)
        planner = Planner(graph, self.assume, order)
        report = replace(self.report, after=planner.plan().arena_size, reordered=reordered)
        return graph, planner, replace(report, repeated=repeated, picoseconds=sum(self.costs.values()))


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
    return Steps(tuple(steps), rooms, work, kept, frozenset(always))
