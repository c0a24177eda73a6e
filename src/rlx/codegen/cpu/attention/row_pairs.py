"""One query of flash attention whose operands are bf16: dot products of pairs, as in blocks (`pairs.py`).

Rows have pairs of features side by side, so squares of words are turned. Weights of two neighbouring keys are
rounded and stored side by side, and their rows of values are interleaved as they are read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlx.codegen.cpu.attention.mask import HIDDEN, KEYS
from rlx.codegen.cpu.attention.pairs import CHUNK, as_pairs
from rlx.codegen.cpu.attention.row import Row, turned
from rlx.codegen.native.irtypes import vector
from rlx.codegen.native.notation import inline
from rlx.codegen.native.words import (
    Int,
    Word,
    bitcast,
    broadcast,
    dot_bf16,
    gep,
    i32,
    iota,
    load,
    loop,
    ptr,
    round_to_bf16,
    select,
    shuffle,
    splat,
    store,
    udiv,
    urem,
)

if TYPE_CHECKING:
    from rlx.codegen.cpu.attention.flash import Attention

INTERLEAVED = [i for pair in zip(range(CHUNK // 2), range(CHUNK // 2, CHUNK), strict=True) for i in pair]


class PairRow(Row):
    """The function for one query."""

    partial_sums = 1

    def __init__(
        self, kernel: Attention, scratch: ptr, q: ptr, k: ptr, v: ptr, o: ptr, mask: ptr, query: Int
    ) -> None:
        super().__init__(kernel, scratch, q, k, v, o, mask, query)
        self.pairs = gep(scratch, KEYS, "float")  # weights of pairs of keys
        self.word, self.align, self.words = "i32", 2, self.spec.depth // 2

    def pack_query(self) -> None:
        """It is read in place: its pairs are not scaled."""

    @inline
    def first_key(self, k0: Int, low: Int) -> Int:
        """Pairs begin with an even key; one that the query does not see weighs nothing."""
        return max(k0, udiv(low, 2) * 2) if self.spec.left >= 0 else k0

    def widened(self, words: Word) -> Word:
        return words

    @inline
    def multiply_add(self, keys: list[Word], c: Int, sums: list[Word]) -> list[Word]:
        """Each score is one sum, whose lane is its key."""
        (total,) = sums
        for i, words in enumerate(turned(keys)):
            query = splat(load(i32, gep(self.q, c + i, "i32"), self.align), self.lanes)
            total = dot_bf16(total, as_pairs(words), as_pairs(query))
        return [total]

    def added_up(self, sums: list[Word]) -> Word:
        return sums[0]

    @inline
    def seen(self, x: Word, key: Int, low: Int, there: Word | None) -> Word:
        x = Row.seen(self, x, key, low, there)
        if self.spec.left < 0:
            return x
        keys = splat(key, self.lanes, "i64") + iota(self.lanes)
        return select(keys < splat(low, self.lanes, "i64"), HIDDEN, x)

    @inline
    def weigh(self, n: Int, base: Word) -> None:
        for i in loop(0, n, 2 * self.lanes):
            places = [gep(self.weights, i + self.lanes * half, "float") for half in range(2)]
            low, high = [self.scaling.power(load(self.type, place), base) for place in places]
            store(low, places[0])
            store(high, places[1])
            rounded = bitcast(round_to_bf16(low, high), vector("i32", self.lanes))
            store(rounded, gep(self.pairs, udiv(i, 2), "i32"))

    @inline
    def weighed(
        self, first: Int, n: Int, parts: range, total: Word, sums: list[Word]
    ) -> tuple[Word, list[Word]]:
        step, half = self.kernel.dim(self.spec.v.row), vector("i16", self.lanes)
        start = gep(self.v, first * step, "i16")

        def pair(i: Int, total: Word, sums: list[Word], is_single: bool) -> tuple[Word, list[Word]]:
            even = gep(start, i * step, "i16")
            odd = gep(even, step, "i16")
            weight = as_pairs(broadcast(gep(self.pairs, udiv(i, 2), "i32"), "i32", self.lanes))
            for key in range(2):  # a missing one weighs 0
                total += broadcast(gep(self.weights, i + key, "float"), "float", self.lanes)
            added = []
            for j, s in zip(parts, sums, strict=True):
                one, other = load(half, gep(even, self.lanes * j, "i16")), splat(0, self.lanes, "i16")
                if not is_single:
                    other = load(half, gep(odd, self.lanes * j, "i16"))
                both = bitcast(shuffle(one, other, INTERLEAVED), vector("bfloat", CHUNK))
                added.append(dot_bf16(s, both, weight))
            return total, added

        whole = n - urem(n, 2)
        for i in loop(0, whole, 2):
            total, sums = pair(i, total, sums, is_single=False)
        if whole < n:
            total, sums = pair(whole, total, sums, is_single=True)
        return total, sums
