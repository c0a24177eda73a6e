"""Rows past the caches: one loop runs every pass at once, each a row behind the pass before it.

Pass by pass, a kernel first reads a row from memory and later writes one: memory idles one way while it is
busy the other way, and both ways during the passes in between. In the pipeline the first pass reads row r + 2
while the second works on row r + 1 and the last stores row r: reads, arithmetic and stores go on evenly. At
both ends passes run one by one, the last first: it reads scratch that an earlier one writes anew.
The order of every reduction is the same in all this, and so are the bits of the results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rlx.backend.cpu.expression import STREAM_AHEAD, Lane
from rlx.backend.cpu.frame import unflatten
from rlx.backend.cpu.irtext import Int
from rlx.backend.cpu.irtypes import Value, constant
from rlx.backend.cpu.reduction import Round
from rlx.ir.scalar import LOADS, Scalar

if TYPE_CHECKING:
    from rlx.backend.cpu.row_nest import Pass, RowNest


class RowPipeline:
    """All rows of one thread, for a nest with one inner axis and nothing but stores that cover it."""

    def __init__(self, nest: RowNest) -> None:
        self.nest, self.fn = nest, nest.fn
        self.last = nest.last
        self.results = [nest.reducer(number).result_types for number in range(nest.last)]
        read = [_operands(bodies) for bodies in nest.bodies]
        self.cached = [set[int]().union(*read[:number]) for number in range(len(read))]

    def emit(self) -> None:
        fn, nest = self.fn, self.nest
        sizes = nest.sizes[: nest.nest.outer]
        total: Int = 1
        for n in sizes:
            total = fn.mul(total, n)
        low, high = nest.frame.share(total)
        # A row in pass n brings the results of all passes before.
        brings = [[type_ for types in self.results[:n] for type_ in types] for n in range(self.last + 1)]
        start = [constant(type_, 0) for types in brings for type_ in types]

        def step(t: Int, flat: list[Value]) -> list[Value]:
            left = iter(flat)
            known = [[next(left) for _ in types] for types in brings]
            rows = [fn.sub(t, number) for number in range(self.last + 1)]
            there = [
                fn.value(fn.and_(fn.value(fn.cmp("sge", r, low)), fn.value(fn.cmp("slt", r, high))))
                for r in rows
            ]
            passes = range(self.last + 1)

            def begin(number: int) -> Pass:
                row = unflatten(fn, rows[number], sizes)
                outside = nest.outside(row)
                outside.accs = known[number]
                return nest.begin(number, row, outside, STREAM_AHEAD, self.cached[number], rows[number])

            def one_by_one() -> list[Value]:
                fn.branch(there[self.last], lambda: self.sweep([begin(self.last)]))
                found = [self.alone(there[n], n, begin) for n in reversed(passes[:-1])]
                return [v for values in reversed(found) for v in values]

            everywhere = fn.value(fn.and_(there[0], there[self.last]))
            found = iter(fn.if_value(everywhere, lambda: self.sweep([begin(n) for n in passes]), one_by_one))
            return [v for n in passes[:-1] for v in (*known[n], *(next(found) for _ in self.results[n]))]

        fn.loop(low, fn.add(high, self.last), 1, start, step)

    def alone(self, there: Value, number: int, begin: Callable[[int], Pass]) -> list[Value]:
        """One reduction, if its row exists."""
        nothing = [constant(type_, 0) for type_ in self.results[number]]
        return self.fn.if_value(there, lambda: self.sweep([begin(number)]), lambda: nothing)

    def sweep(self, passes: Sequence[Pass]) -> list[Value]:
        """Some passes, each over its own row, in one loop; the results of their reductions."""
        nest, reducing = self.nest, [now for now in passes if now.number < self.last]
        # Scratch is read before it is written anew, and loads come before stores, which they might have to
        # wait for: a store is taken for one to the same place if the last 12 bits of addresses agree.
        keeping = [now for now in passes if nest.fresh(now.number)]
        order = [*(now for now in passes if now not in keeping), *reversed(keeping)]

        def visit(lane: Lane, group: list[Value], turn: Round) -> list[Value]:
            left, out = iter(group), dict[int, list[Value]]()
            parts = {n.number: [next(left) for _ in nest.reducer(n.number).start()] for n in reducing}
            for now in order:
                axes = [*now.row, lane.base]
                if now.number == self.last:
                    nest.store_all(axes, lane, now)
                else:
                    reducer, carried = nest.reducer(now.number, lane.width), parts[now.number]
                    out[now.number] = nest.add_vector(now, reducer, axes, lane, carried, turn)
            return [v for now in reducing for v in out[now.number]]

        start = [v for now in reducing for v in nest.reducer(now.number).start()]
        groups = nest.over_vectors([list(start) for _ in range(nest.groups)], visit, paired=True)
        results, first = list[Value](), 0
        for reducer in (nest.reducer(now.number) for now in reducing):
            end = first + reducer.parts
            results += reducer.results([g[first:end] for g in groups])
            first = end
        return results


def _operands(bodies: Sequence[Scalar]) -> set[int]:
    """Inputs that expressions load."""
    return {e.data for body in bodies for e in body.walk() if e.prim in LOADS or e.prim == "at"}
