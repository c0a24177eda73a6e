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
from rlx.codegen.cpu.rows.reduction import Round
from rlx.codegen.native.irtypes import Value, constant
from rlx.codegen.native.notation import inline
from rlx.codegen.native.words import Index, Word, loop, udiv
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
        self.nest, self.last = nest, nest.last
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

    @inline
    def emit(self) -> None:
        nest, together = self.nest, self.together
        sizes = nest.sizes[: nest.nest.outer]
        low, high = nest.share(sizes)
        passes, slots = range(self.last + 1), range(together)

        def is_there(r: Word) -> bool:
            return (r >= low) & (r < high)

        def begin(number: int, r: Word, accs: list[Word]) -> Pass:
            row = nest.indices(r, sizes)
            outside = nest.outside(row)
            outside.accs = accs
            return nest.begin(number, row, outside, self.ahead, self.cached[number], r)

        def alone(number: int, r: Word, accs: list[Word]) -> list[Word]:
            """One pass over one row, if the row exists."""
            return self.sweep([begin(number, r, accs)]) if is_there(r) else self.nothing(number)

        def one_by_one(rows: list[list[Word]], known: list[list[list[Word]]]) -> list[Word]:
            found = [[alone(n, *of) for of in zip(rows[n], known[n], strict=True)] for n in reversed(passes)]
            return [v for of_pass in reversed(found) for values in of_pass for v in values]

        def at_once(rows: list[list[Word]], known: list[list[list[Word]]]) -> list[Word]:
            return self.sweep([begin(n, rows[n][slot], known[n][slot]) for n in passes for slot in slots])

        # Row `slot` of pass n, which brings the results of all passes before.
        known = [[self.results_before(n) for _ in slots] for n in passes]
        for t in loop(low, high + self.last * together, together):
            rows = [[Word(t) + slot - n * together for slot in slots] for n in passes]
            is_inside = is_there(rows[0][together - 1]) & is_there(rows[self.last][0])
            found = at_once(rows, known) if is_inside else one_by_one(rows, known)
            known = self.handed_on(known, found)

    def nothing(self, number: int) -> list[Word]:
        """In place of the results of a pass over a row that does not exist."""
        return [Word(constant(type_, 0)) for types in self.results[number : number + 1] for type_ in types]

    def results_before(self, number: int) -> list[Word]:
        """In place of what a row that does not exist brings to a pass."""
        return [v for n in range(number) for v in self.nothing(n)]

    def handed_on(self, known: list[list[list[Word]]], found: list[Word]) -> list[list[list[Word]]]:
        """What rows bring to their next pass: what they brought to this one, and its results."""
        left = iter(found)
        following = [
            [[*accs, *(next(left) for _ in self.results[n])] for accs in known[n]] for n in range(self.last)
        ]
        return [known[0], *following]

    def ahead(self, base: Index) -> Sequence[Ahead]:
        """What a place in a row prefetches. With two rows at a time, the next two follow their end."""
        if self.together == 1:
            return STREAM_AHEAD
        return [Ahead(self.along(base, Word(each.elements)), each.locality) for each in TWO_ROWS_AHEAD]

    @inline
    def along(self, base: Index, elements: Index) -> Index:
        """The distance of `elements` from a place in a row, if every second row is skipped."""
        extent = self.nest.sizes[-1]
        ends = udiv(Word(base + elements), extent)
        return elements + ends * extent

    def sweep(self, passes: Sequence[Pass]) -> list[Word]:
        """Some passes, each over its own row, in one loop; the results of their reductions."""
        nest = self.nest
        reducing = [now for now in passes if now.number < self.last]
        # Scratch is read before it is written anew, and loads come before stores, which they might have to
        # wait for: a store is taken for one to the same place if the last 12 bits of addresses agree.
        keeping = [n for n, now in enumerate(passes) if nest.fresh[now.number]]
        order = [*(n for n in range(len(passes)) if n not in keeping), *reversed(keeping)]

        def visit(lane: Lane, group: list[Word], turn: Round) -> list[Word]:
            left, out = iter(group), dict[int, list[Word]]()
            parts = {
                n: [next(left) for _ in nest.reducer(now.number).start()]
                for n, now in enumerate(passes)
                if now.number < self.last
            }
            shared = dict[Scalar, Value]()
            for n in order:
                now, axes = passes[n], [*passes[n].row, Word(lane.base)]
                if n in parts:
                    reducer = nest.reducer(now.number, lane.width)
                    out[n] = nest.add_vector(now, reducer, axes, lane, parts[n], turn)
                    continue
                at = nest.at(axes, lane, now)
                at.memo |= shared
                nest.store_all(at, axes)
                # What was loaded, the memo says: a load inside an expression that is kept was not.
                shared = {e: at.memo[e] for e in self.shared if e in at.memo}
            return [v for n in parts for v in out[n]]

        reducers = [nest.reducer(now.number) for now in reducing]
        held = [v for reducer in reducers for v in reducer.held()]
        paired = self.together == 1
        groups = nest.over_row(reducers, [list(held) for _ in range(nest.groups)], visit, paired)
        results, first = list[Word](), 0
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
