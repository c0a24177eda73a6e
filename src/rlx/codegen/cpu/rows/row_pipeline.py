"""Rows larger than the caches: one loop runs every pass at once, each behind the pass before it.

Pass by pass, a kernel first reads a row from memory and later writes one: memory idles one way while it is
busy the other way, and both ways during the passes in between. In the pipeline the first pass reads row r + 2
while the second works on row r + 1 and the last stores row r: reads, arithmetic and stores go on evenly. At
both ends passes run one by one, the last first: it reads scratch that an earlier one writes anew.

What all rows share (scale and shift), where it fills the first cache, comes from the second one for every row
anew, and that takes longer than memory does. Then every pass works on two rows at a time.
The order of every reduction is the same in all this, and so are the bits of the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlx.codegen.cpu.expression import STREAM_AHEAD, Ahead, Lane, is_load
from rlx.codegen.cpu.frame import unflatten
from rlx.codegen.cpu.rows.reduction import Round
from rlx.codegen.native.irtext import Int
from rlx.codegen.native.irtypes import Value, constant
from rlx.kernel.scalar import Scalar
from rlx.target.cpu import Target

if TYPE_CHECKING:
    from rlx.codegen.cpu.rows.row_nest import Pass, RowNest

# Two rows at a time: as far ahead in time as STREAM_AHEAD, half as far along a row.
TWO_ROWS_AHEAD = (Ahead(4096, 2), Ahead(2048, 2), Ahead(768))


def crowded_bytes(target: Target) -> int:
    """Operands that all rows share leave the first cache from this size on."""
    return target.l1_bytes // 2


class RowPipeline:
    """All rows of one thread, for a nest with one inner axis and nothing but stores that cover it."""

    def __init__(self, nest: RowNest) -> None:
        self.nest, self.fn = nest, nest.fn
        self.last = nest.last
        self.results = [nest.reducer(number).result_types for number in range(nest.last)]
        read = [_operands(bodies) for bodies in nest.bodies]
        self.cached = [set[int]().union(*read[:number]) for number in range(len(read))]
        self.shared = [
            e
            for body in nest.bodies[self.last]
            for e in body.walk()
            if is_load(e) and not any(_differs_by_row(x, nest.nest.outer) for x in e.walk())
        ]
        leave = self.shared_bytes() >= crowded_bytes(nest.frame.module.target)
        self.together = 2 if not nest.saved and leave else 1

    def shared_bytes(self) -> int:
        """Bytes that every row reads again, 0 where only a run knows the length of rows."""
        extent, sizes = self.nest.nest.space[-1], {e.data: e.dtype.itemsize for e in self.shared}
        return sum(sizes.values()) * extent if isinstance(extent, int) else 0

    def emit(self) -> None:
        fn, nest, together = self.fn, self.nest, self.together
        sizes = nest.sizes[: nest.nest.outer]
        total: Int = 1
        for n in sizes:
            total = fn.mul(total, n)
        low, high = nest.frame.share(total)
        passes, slots = range(self.last + 1), range(together)
        # A row in pass n brings the results of all passes before.
        brings = [[type_ for types in self.results[:n] for type_ in types] for n in passes]
        start = [constant(type_, 0) for types in brings for _ in slots for type_ in types]

        def step(t: Int, flat: list[Value]) -> list[Value]:
            left = iter(flat)
            known = [[[next(left) for _ in types] for _ in slots] for types in brings]
            rows = [[fn.sub(fn.add(t, slot), number * together) for slot in slots] for number in passes]

            def there(number: int, slot: int) -> Value:
                r = rows[number][slot]
                return fn.value(fn.and_(fn.value(fn.cmp("sge", r, low)), fn.value(fn.cmp("slt", r, high))))

            def begin(number: int, slot: int) -> Pass:
                row = unflatten(fn, rows[number][slot], sizes)
                outside = nest.outside(row)
                outside.accs = known[number][slot]
                cached = self.cached[number]
                return nest.begin(number, row, outside, self.ahead, cached, rows[number][slot])

            def alone(number: int, slot: int) -> list[Value]:
                """One pass over one row, if the row exists."""
                nothing = [
                    constant(type_, 0) for types in self.results[number : number + 1] for type_ in types
                ]
                sweep = lambda: self.sweep([begin(number, slot)])  # noqa: E731
                return fn.if_value(there(number, slot), sweep, lambda: nothing)

            def one_by_one() -> list[Value]:
                found = [[alone(number, slot) for slot in slots] for number in reversed(passes)]
                return [v for of_pass in reversed(found) for values in of_pass for v in values]

            everywhere = fn.value(fn.and_(there(0, together - 1), there(self.last, 0)))
            at_once = lambda: self.sweep([begin(n, slot) for n in passes for slot in slots])  # noqa: E731
            found = iter(fn.if_value(everywhere, at_once, one_by_one))
            return [
                v
                for n in passes[:-1]
                for slot in slots
                for v in (*known[n][slot], *(next(found) for _ in self.results[n]))
            ]

        fn.loop(low, fn.add(high, self.last * together), together, start, step)

    def ahead(self, base: Int) -> Sequence[Ahead]:
        """What a place in a row prefetches. With two rows at a time, the next two follow their end."""
        if self.together == 1:
            return STREAM_AHEAD
        fn, extent = self.fn, self.nest.sizes[-1]

        def along(elements: Int) -> Int:
            ends = fn.udiv(fn.add(base, elements), extent)
            return fn.add(elements, fn.mul(ends, extent))

        return [Ahead(along(each.elements), each.locality) for each in TWO_ROWS_AHEAD]

    def sweep(self, passes: Sequence[Pass]) -> list[Value]:
        """Some passes, each over its own row, in one loop; the results of their reductions."""
        nest = self.nest
        reducing = [now for now in passes if now.number < self.last]
        # Scratch is read before it is written anew, and loads come before stores, which they might have to
        # wait for: a store is taken for one to the same place if the last 12 bits of addresses agree.
        keeping = [n for n, now in enumerate(passes) if nest.fresh(now.number)]
        order = [*(n for n in range(len(passes)) if n not in keeping), *reversed(keeping)]

        def visit(lane: Lane, group: list[Value], turn: Round) -> list[Value]:
            left, out = iter(group), dict[int, list[Value]]()
            parts = {
                n: [next(left) for _ in nest.reducer(now.number).start()]
                for n, now in enumerate(passes)
                if now.number < self.last
            }
            shared = dict[Scalar, Value]()
            for n in order:
                now, axes = passes[n], [*passes[n].row, lane.base]
                if n in parts:
                    reducer = nest.reducer(now.number, lane.width)
                    out[n] = nest.add_vector(now, reducer, axes, lane, parts[n], turn)
                    continue
                at = nest.at(axes, lane, now)
                at.memo |= shared
                nest.store_all(at)
                # What was loaded, the memo says: a load inside an expression that is kept was not.
                shared = {e: at.memo[e] for e in self.shared if e in at.memo}
            return [v for n in parts for v in out[n]]

        reducers = [nest.reducer(now.number) for now in reducing]
        held = [v for reducer in reducers for v in reducer.held()]
        paired = self.together == 1
        groups = nest.over_row(reducers, [list(held) for _ in range(nest.groups)], visit, paired)
        results, first = list[Value](), 0
        for reducer, now in zip(reducers, reducing, strict=True):
            end = first + len(reducer.held())
            results += reducer.results([g[first:end] for g in groups], now.pivot)
            first = end
        return results


def _operands(bodies: Sequence[Scalar]) -> set[int]:
    """Inputs that expressions load."""
    return {e.data for body in bodies for e in body.walk() if is_load(e)}


def _differs_by_row(e: Scalar, outer: int) -> bool:
    return e.prim == "acc" or (e.prim == "axis" and e.data < outer)
