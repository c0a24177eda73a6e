"""Plans of exported programs: every value has room for the largest sizes in the ranges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlx.export.bounds import Ranges, most
from rlx.plan.lir import LirBufferPlan
from rlx.plan.memory.certificate import OverBudgetError
from rlx.plan.memory.placer import Placer


def roomy_plan(placer: Placer, ranges: Ranges) -> LirBufferPlan:
    """The plan of a program for all sizes in the ranges, within the budget that the program has."""
    roomy = _Roomy(placer, ranges)
    roomy.budget = placer.budget
    plan = roomy.unchecked({s: high for s, (_, high) in ranges.items()})
    if placer.budget is not None and plan.arena_size > placer.budget:
        raise OverBudgetError(plan, placer.budget)
    return plan


def slice_ranges(placer: Placer, plan: LirBufferPlan) -> dict[str, tuple[int, int]]:
    """How many rows slices have, by the symbols of their bodies."""
    found: dict[str, tuple[int, int]] = {}
    for node, inner in placer.inner.items():
        work = plan.work[node].bodies
        if inner.cut is not None:
            found[inner.cut.rows] = (1, work[0].binding[inner.cut.rows])
        for body, made in zip(inner.bodies, work, strict=True):
            for name, (_, rows) in slice_ranges(body, made).items():
                found[name] = (1, max(rows, found.get(name, (1, 1))[1]))
    return found


class _Roomy(Placer):
    """A placer that gives every value room for the largest sizes. A symbol without a range is that of slices,
    which have at most as many rows as the plan says."""

    def __init__(self, placer: Placer, ranges: Ranges) -> None:
        super().__init__(placer.graph, placer.stored, {}, placer.phases, placer.binding)
        self.ranges = ranges
        self.order, self.life, self.shared = placer.order, placer.life, placer.shared
        self.placed, self.io = placer.placed, placer.io
        self._evaluate = self._most  # views have no part in it: they lie where sizes in force say
        self.inner = {
            node: inner._replace(bodies=tuple(_Roomy(body, ranges) for body in inner.bodies))
            for node, inner in placer.inner.items()
        }

    def _most(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The most bytes of stored values."""
        ranges = self._known(dict(zip(self.symbols, sizes, strict=True)))
        return tuple(
            most(s.size, ranges, f"%{s.node} ({self.graph.nodes[s.node].op.name})") for s in self.stored
        )

    def _rows(self, node: int, binding: Mapping[str, int]) -> int:
        cut = self.inner[node].cut
        assert cut is not None, "only these are asked for"
        return max(most(cut.size, self._known(binding), f"the rows of %{node}"), 1)

    def _known(self, binding: Mapping[str, int]) -> Ranges:
        return {**{name: (1, rows) for name, rows in binding.items()}, **self.ranges}
