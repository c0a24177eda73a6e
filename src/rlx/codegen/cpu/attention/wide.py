"""A block of queries of flash attention whose operands are narrow floats that the target cannot multiply.

Queries are widened as they are packed, keys and values block by block into scratch; the rest is f32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlx.codegen.cpu.attention.block import Block, Rows, gathered
from rlx.codegen.cpu.attention.mask import KEYS
from rlx.codegen.native.irtypes import vector
from rlx.codegen.native.notation import inline
from rlx.codegen.native.words import (
    Int,
    fpext,
    gep,
    i64,
    iota,
    lanes,
    load,
    loop,
    masked_load,
    masked_store,
    ptr,
    splat,
    store,
)

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

    @inline
    def widened(self, base: ptr, access: Access, columns: int, copy: ptr, k0: Int, n: Int) -> Rows:
        """A copy of the block's rows in f32, one behind the other."""
        start, step, column, element = self.rows_of(base, access, k0)
        apart = iota(self.lanes) * splat(i64(column), self.lanes)
        type_, whole = vector(element, self.lanes), columns - columns % self.lanes

        def part(source: ptr, target: ptr, c: Int, count: int) -> None:
            place, to = gep(source, c * column, element), gep(target, c, "float")
            there = lanes(count, self.lanes)
            if access.column != 1:
                masked_store(gathered(place, apart, element, there), to, there)
            elif count == self.lanes:
                store(fpext(load(type_, place), "float"), to)
            else:
                masked_store(fpext(masked_load(type_, place, there), "float"), to, there)

        for i in loop(n):
            source, target = gep(start, i * step, element), gep(copy, i * columns, "float")
            for c in loop(0, whole, self.lanes):
                part(source, target, c, self.lanes)
            if columns > whole:
                part(source, target, whole, columns - whole)
        return copy, columns, 1, "float"
