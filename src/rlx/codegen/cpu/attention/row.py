"""Attention of few queries, as when tokens are generated one by one: lanes are features.

A vector of keys is a tile: their products with the query are summed by a transpose in registers, so that the
softmax runs on whole vectors; then each weight is spread over its row of values. Keys and values are read
once. Every output has one order of operations, set by the number of keys alone.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rlx.codegen.native import vmath
from rlx.codegen.native.irtypes import vector
from rlx.codegen.native.notation import inline, native
from rlx.codegen.native.words import (
    Int,
    Word,
    broadcast,
    builder,
    fma,
    fmax,
    fpext,
    gep,
    i64,
    lanes,
    load,
    loop,
    masked_load,
    noalias,
    ptr,
    reduce,
    reduce_add,
    sdiv,
    select,
    splat,
    store,
    transpose,
)

if TYPE_CHECKING:
    from rlx.codegen.cpu.attention.flash import Attention

FEW = 4  # queries up to which rows are faster than blocks of lanes
MOST_VECTORS = 8  # of a head: query and result stay in registers
CHAINS = 2  # sums of values that run side by side
LOG2E = math.log2(math.e)
HIDDEN = -math.inf  # the score of a key that weighs nothing


def row_function(kernel: Attention) -> str | None:
    """The function for one query of a kernel, written if it is not there; None if blocks must serve."""
    spec, width = kernel.spec, kernel.lanes
    dense = all(a is None or a.column == 1 for a in (spec.q, spec.k, spec.v, spec.o, spec.mask))
    whole = spec.depth % width == 0 and spec.value_depth % width == 0
    if not dense or not whole or max(spec.depth, spec.value_depth) > MOST_VECTORS * width:
        return None
    return _attend_row.written(f"{kernel.name}.row", kernel=kernel)


@native(internal=True, noinline=True)
def _attend_row(
    args: ptr,
    scratch: noalias,
    q: ptr,
    k: ptr,
    v: ptr,
    o: ptr,
    mask: ptr,
    query: i64,
    *,
    kernel: Attention,
) -> None:
    _Row(kernel, scratch, q, k, v, o, mask, query).emit()


class _Row:
    """One query: running maximum, sum of weights per lane, and chains of sums of values."""

    def __init__(
        self, kernel: Attention, weights: ptr, q: ptr, k: ptr, v: ptr, o: ptr, mask: ptr, query: Int
    ) -> None:
        self.kernel, self.spec, self.lanes, self.type = kernel, kernel.spec, kernel.lanes, kernel.type
        self.weights, self.q, self.k, self.v, self.o, self.mask, self.query = weights, q, k, v, o, mask, query
        self.parts = self.spec.depth // self.lanes
        self.value_parts = self.spec.value_depth // self.lanes
        self.adds = self.spec.mask_kind == "add"  # then log2 e comes after the mask

    @inline
    def emit(self) -> None:
        factor = self.spec.scale * (1.0 if self.adds else LOG2E)
        self.q_parts = [self.floats(self.q, j) * factor for j in range(self.parts)]
        low, self.high = self.seen_keys()
        whole = low + sdiv(max(self.high - low, 0), self.lanes) * self.lanes
        zero = splat(0.0, self.lanes)
        top, total, sums = splat(HIDDEN, self.lanes), zero, [[zero] * self.value_parts] * CHAINS
        for k0 in loop(low, whole, self.lanes):
            top, total, sums = self.tile(k0, top, total, sums, is_last=False)
        if whole < self.high:
            top, total, sums = self.tile(whole, top, total, sums, is_last=True)
        self.write(total, sums)

    @inline
    def floats(self, base: ptr, j: int) -> Word:
        """Vector j of a row, as floats."""
        element = self.kernel.element
        return fpext(load(vector(element, self.lanes), gep(base, self.lanes * j, element)), "float")

    @inline
    def seen_keys(self) -> tuple[Int, Int]:
        """Keys that the query sees: from, to."""
        spec = self.spec
        low, high = self.kernel.dim(0), self.kernel.dim(spec.keys)
        position = self.query + self.kernel.dim(spec.offset)
        ahead = 0 if spec.causal else spec.right
        if ahead >= 0:
            high = min(high, position + (ahead + 1))
        if spec.left >= 0:
            low = max(position - spec.left, 0)
        return low, high

    @inline
    def row(self, base: ptr, k0: Int, i: int, step: Int, is_last: bool) -> ptr:
        """The row of key k0 + i. Where the last keys are fewer than lanes, the last key fills the other
        lanes, with weights of 0.
        """
        element = self.kernel.element
        if is_last:
            last = self.high - 1
            return gep(base, min(k0 + i, last) * step, element)
        return gep(gep(base, k0 * step, element), step * i, element)

    @inline
    def tile(
        self, k0: Int, top: Word, total: Word, sums: list[list[Word]], is_last: bool
    ) -> tuple[Word, Word, list[list[Word]]]:
        """Keys from k0 on, one per lane; all lanes have one unless these are the last keys."""
        there = lanes(self.high - k0, self.lanes) if is_last else None
        scores = self.masked(self.scores(k0, is_last), k0, there)
        if there is not None:
            scores = select(there, scores, HIDDEN)
        new_top = max(top, splat(reduce(fmax, scores), self.lanes))
        base = select(new_top == HIDDEN, 0.0, new_top)
        alpha, p = self.power(top - base), self.power(scores - base)
        store(p, self.weights)
        sums = [[s * alpha for s in chain] for chain in sums]
        step = self.kernel.dim(self.spec.v.row)
        for i in range(self.lanes):
            weight = broadcast(gep(self.weights, i, "float"), "float", self.lanes)
            start = self.row(self.v, k0, i, step, is_last)
            chain, *others = sums  # they take turns
            added = []
            for j in range(self.value_parts):
                s = fma(weight, self.floats(start, j), chain[j])
                if there is not None:  # 0 times what stands in may be NaN
                    s = select(k0 + i < self.high, s, chain[j])
                added.append(s)
            sums = [*others, added]
        return new_top, fma(total, alpha, p), sums

    @inline
    def scores(self, k0: Int, is_last: bool) -> Word:
        """Products with a vector of keys: partial sums of each key are one vector, turned and added up."""
        step = self.kernel.dim(self.spec.k.row)
        partial = []
        for i in range(self.lanes):
            start = self.row(self.k, k0, i, step, is_last)
            acc = self.q_parts[0] * self.floats(start, 0)
            for j in range(1, self.parts):
                acc = fma(self.q_parts[j], self.floats(start, j), acc)
            partial.append(acc)
        rows = transpose(partial)
        for _ in range(self.lanes.bit_length() - 1):
            rows = [a + b for a, b in zip(rows[::2], rows[1::2], strict=True)]
        return rows[0]

    @inline
    def masked(self, scores: Word, k0: Int, there: Word | None) -> Word:
        """Scores with the mask of their keys; `there` are the lanes that have a key, None for all."""
        if self.spec.mask is None:
            return scores
        element = "float" if self.adds else "i8"
        type_, place = vector(element, self.lanes), gep(self.mask, k0, element)
        value = load(type_, place) if there is None else masked_load(type_, place, there)
        return scores + value if self.adds else select(value != 0, scores, HIDDEN)

    @inline
    def power(self, x: Word) -> Word:
        return Word(vmath.apply(builder(), "exp2", x * LOG2E if self.adds else x, inline=True))

    @inline
    def write(self, total: Word, sums: list[list[Word]]) -> None:
        factor = self.kernel.factor(splat(reduce_add(total), self.lanes))
        for j in range(self.value_parts):
            value = sums[0][j]
            for chain in sums[1:]:
                value += chain[j]
            place = gep(self.o, self.lanes * j, self.kernel.o_element)
            store(self.kernel.stored(value * factor), place)
