"""Refusals of memory budgets, with their proof: what is alive together, and the least budget that works."""

from __future__ import annotations

from typing import NamedTuple

from rlx.config import bytes_text
from rlx.errors import BudgetError
from rlx.plan.lir import LirBufferPlan
from rlx.plan.lir_check import written_by

MOST_LISTED = 12


class LiveValue(NamedTuple):
    """A value that is alive at the fullest step: its node, bytes, type and source locations."""

    node: int
    size: int
    type: str
    where: tuple[str, ...]


class OverBudgetError(BudgetError):
    """A program does not fit its memory budget.

    `budget` and `least` are bytes: what was given, and the least that works. `alive` are the values that are
    alive together at the step of kernel `kernel`, largest first; their bytes are what makes it `least`. If it
    is `proven`, that kernel itself reads or writes all of them: no order of these kernels needs less.
    """

    def __init__(self, plan: LirBufferPlan, budget: int) -> None:
        self.budget, self.least = budget, plan.arena_size
        self.kernel, self.alive = fullest_step(plan)
        assert plan.graph is not None, "plans are made for a graph"
        node = plan.graph.nodes[self.kernel]
        touched = {
            node.id,
            *(plan.root(o.id) for o in node.operands),
            *(v.id for v in written_by(plan.graph, node)),
        }
        self.proven = all(v.node in touched for v in self.alive)
        lines = [f"  {bytes_text(v.size):>9}  %{v.node} {v.type}{_at(v)}" for v in self.alive[:MOST_LISTED]]
        more = len(self.alive) - MOST_LISTED
        if more > 0:
            rest = sum(v.size for v in self.alive[MOST_LISTED:])
            lines.append(f"  {bytes_text(rest):>9}  in {more} smaller one{'s' * (more > 1)}")
        sizes = ", ".join(f"{s} = {plan.binding[s]}" for s in plan.dynamic_symbols)
        super().__init__(
            f"program {plan.graph.name!r}{' at ' + sizes if sizes else ''} needs {self.least} bytes of "
            f"activations, but its budget is {budget}; give budget={self.least} or more"
            f"{', or run smaller sizes' if sizes else ''}. "
            f"Alive together while kernel %{self.kernel} runs{', which uses all of it' * self.proven}:\n"
            + "\n".join(lines)
        )


def _at(value: LiveValue) -> str:
    return f" (at {', '.join(value.where[:2])})" if value.where else ""


def fullest_step(plan: LirBufferPlan) -> tuple[int, list[LiveValue]]:
    """The kernel at whose step most bytes are alive, and the values that are, largest first.

    Of two values that share storage there, the one that ends is listed.
    """
    assert plan.graph is not None, "plans are made for a graph"
    live = plan.live_bytes()
    step = live.index(max(live))
    alive = []
    for node, (first, last) in plan.lifetimes.items():
        begins_in_place = node in plan.shared and first == step
        if first <= step <= last and not begins_in_place:
            of = plan.graph.nodes[node]
            alive.append(LiveValue(node, plan.assignments[node].size, str(of.type), of.where))
    kernel = plan.schedule[step]
    if kernel in plan.work:
        loop, size = plan.graph.nodes[kernel], plan.work[kernel].slot.size
        alive.append(LiveValue(kernel, size, f"workspace of {loop.op.name}", loop.where))
    return kernel, sorted(alive, key=lambda v: (-v.size, v.node))
