"""A block of queries of flash attention whose operands are narrow floats that the target cannot multiply.

Queries are widened as they are packed, keys and values block by block into scratch; the rest is f32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlx.codegen.cpu.attention.block import Block, Rows, gathered
from rlx.codegen.cpu.attention.mask import KEYS
from rlx.codegen.native.irtext import Int
from rlx.codegen.native.irtypes import Value, vector

if TYPE_CHECKING:
    from rlx.codegen.cpu.attention.flash import Access, AttentionSpec


class WideBlock(Block):
    """The function for one number of query vectors."""

    @staticmethod
    def parts(spec: AttentionSpec, width: int) -> tuple[int, ...]:
        copies = (-(-n * KEYS // width) for n in (spec.depth, spec.value_depth))
        return (*Block.parts(spec, width), *copies)

    def key_rows(self, k0: Int, n: Int) -> Rows:
        return self.widened(self.k, self.spec.k, self.spec.depth, self.copies[0], k0, n)

    def value_rows(self, k0: Int, n: Int) -> Rows:
        return self.widened(self.v, self.spec.v, self.spec.value_depth, self.copies[1], k0, n)

    def widened(self, base: Value, access: Access, columns: int, copy: Value, k0: Int, n: Int) -> Rows:
        """A copy of the block's rows in f32, one behind the other."""
        fn, lanes = self.fn, self.lanes
        start, step, column, element = self.rows_of(base, access, k0)
        apart = fn.value(fn.mul(fn.iota(lanes), fn.splat(fn.value(column), lanes)))
        whole = columns - columns % lanes

        def row(i: Int, _: list[Value]) -> None:
            source, target = (
                fn.gep(start, fn.mul(i, step), element),
                fn.gep(copy, fn.mul(i, columns), "float"),
            )

            def part(c: Int, count: int) -> None:
                place, to = fn.gep(source, fn.mul(c, column), element), fn.gep(target, c, "float")
                there = fn.lanes(count, lanes)
                if column != 1:
                    fn.masked_store(gathered(fn, place, apart, element, there), to, there)
                elif count == lanes:
                    fn.store(fn.fpext(fn.load(vector(element, lanes), place), "float"), to)
                else:
                    read = fn.masked_load(vector(element, lanes), place, there)
                    fn.masked_store(fn.fpext(read, "float"), to, there)

            fn.loop(0, whole, lanes, [], lambda c, _: part(c, lanes))
            if columns > whole:
                part(whole, columns - whole)

        fn.loop(0, n, 1, [], row)
        return copy, columns, 1, "float"
