"""Attention of few queries, as when tokens are generated one by one.

The order of operations is that of blocks of queries (`block.py`), so a query has the same bits in a block and
on its own: keys are taken in the same blocks of 128, the products of a score are added feature by feature,
and weights and weighted values key by key. For the scores, lanes are keys: squares of four keys and four
features are turned in registers. For the values, lanes are features, and each weight is spread over its row.
Keys and values are read once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlx.codegen.cpu.attention.mask import HIDDEN, KEYS
from rlx.codegen.native.irtypes import size_bytes, vector
from rlx.codegen.native.notation import inline
from rlx.codegen.native.words import (
    Int,
    Word,
    broadcast,
    byte_at,
    fma,
    fmax_x86,
    fpext,
    gep,
    lanes,
    load,
    loop,
    masked_load,
    ptr,
    reduce,
    select,
    shuffle,
    splat,
    store,
    touch,
    udiv,
)

if TYPE_CHECKING:
    from rlx.codegen.cpu.attention.flash import Access, Attention

FEW = 4  # queries up to which rows are faster than blocks of lanes
MOST_VECTORS = 8  # of a head: the result stays in registers
TILES = {4: 4, 8: 4, 16: 2}  # by lanes: vectors of keys side by side, since each sum is a chain of additions
SQUARE = 4  # keys and features of a square


class Row:
    """The function for one query of f32, or of narrow floats that are widened."""

    def __init__(
        self, kernel: Attention, scratch: ptr, q: ptr, k: ptr, v: ptr, o: ptr, mask: ptr, query: Int
    ) -> None:
        self.kernel, self.spec, self.scaling = kernel, kernel.spec, kernel.scaling
        self.lanes, self.type, self.element = kernel.lanes, kernel.type, kernel.element
        self.q, self.k, self.v, self.o, self.mask, self.query = q, k, v, o, mask, query
        self.weights, self.packed = scratch, gep(scratch, KEYS, "float")  # of a block of keys; the query
        self.words = self.spec.depth  # 4-byte words of a row, which squares are made of
        self.value_parts = self.spec.value_depth // self.lanes

    @staticmethod
    def serves(kernel: Attention) -> bool:
        """Whether there is such a function for a kernel; else blocks serve any number of queries."""
        spec, width = kernel.spec, kernel.lanes
        dense = all(a is None or a.column == 1 for a in (spec.q, spec.k, spec.v, spec.o, spec.mask))
        whole = spec.depth % width == 0 and spec.value_depth % width == 0
        return dense and whole and max(spec.depth, spec.value_depth) <= MOST_VECTORS * width

    @inline
    def emit(self) -> None:
        self.pack_query()
        low, high = self.seen_keys()
        top, total = splat(HIDDEN, self.lanes), splat(0.0, self.lanes)
        sums = [splat(0.0, self.lanes)] * self.value_parts
        for k0 in loop(udiv(low, KEYS) * KEYS, high, KEYS):
            first = self.first_key(k0, low)
            n = min(high, k0 + KEYS) - first
            new_top = self.scores(first, n, low, top)
            base = select(new_top == HIDDEN, 0.0, new_top)
            alpha = self.scaling.power(top, base)
            self.weigh(n, base)
            total, sums = self.values(first, n, total * alpha, [s * alpha for s in sums])
            top = new_top
        self.write(total, sums)

    @inline
    def pack_query(self) -> None:
        """The query with its scale."""
        for j in range(self.words // self.lanes):
            scaled = self.floats(self.q, self.lanes * j) * self.scaling.queries
            store(scaled, gep(self.packed, self.lanes * j, "float"))

    @inline
    def floats(self, row: ptr, column: Int) -> Word:
        """A vector of a row, as floats."""
        place = gep(row, column, self.element)
        return fpext(load(vector(self.element, self.lanes), place), "float")

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
    def first_key(self, k0: Int, low: Int) -> Int:
        """The first key of a block that is read."""
        return max(k0, low) if self.spec.left >= 0 else k0

    # -- scores

    @inline
    def scores(self, first: Int, n: Int, low: Int, top: Word) -> Word:
        """Scores of n keys, stored where their weights will be; gives the largest one so far."""
        group = self.lanes * TILES[self.lanes]
        whole = max(n, 0) // group * group
        for i in loop(0, whole, group):
            for number in loop(i, i + group):
                self.meet(first + number)
            rows = [self.row(self.k, self.spec.k, first + i, m) for m in range(group)]
            top = self.tiles(rows, first, i, low, None, top)
        for i in loop(whole, n, self.lanes):
            # Where the last keys are fewer than lanes, the last one stands in for those that are not there.
            keys = [min(first + i + m, first + n - 1) for m in range(self.lanes)]
            rows = [self.row(self.k, self.spec.k, key, 0) for key in keys]
            top = self.tiles(rows, first, i, low, lanes(n - i, self.lanes), top)
        return splat(reduce(fmax_x86, top), self.lanes)

    @inline
    def row(self, base: ptr, access: Access, key: Int, m: int) -> ptr:
        """The row of key + m."""
        step = self.kernel.dim(access.row)
        return gep(gep(base, key * step, self.element), step * m, self.element)

    @inline
    def meet(self, key: Int) -> None:
        """Touch the row of a key. Done for one after the other, the processor reads on from there, which it
        does not along columns of squares.
        """
        row = self.row(self.k, self.spec.k, key, 0)
        for byte in range(0, self.spec.depth * size_bytes(self.element), 64):
            touch(byte_at(row, byte))

    @inline
    def tiles(self, rows: list[ptr], first: Int, i: Int, low: Int, there: Word | None, top: Word) -> Word:
        """Scores of keys, from number i of the block on; `there` are those that exist, None for all."""
        width = self.lanes
        tiles = [rows[m : m + width] for m in range(0, len(rows), width)]
        sums = [splat(0.0, width)] * len(tiles)
        for c in loop(0, self.words, SQUARE):
            query = [self.query_word(c + m) for m in range(SQUARE)]
            added = []
            for s, tile in zip(sums, tiles, strict=True):
                for keys, q in zip(self.columns(tile, c), query, strict=True):
                    s = self.multiply_add(keys, q, s)
                added.append(s)
            sums = added
        for t, s in enumerate(sums):
            x = self.seen(s, first + i + width * t, low, there)
            store(x, gep(self.weights, i + width * t, "float"))
            top = fmax_x86(x, top)  # what is not a number makes the sum so
        return top

    def columns(self, tile: list[ptr], c: Int) -> list[Word]:
        """Four words from c on, of one key per lane: squares that lie side by side are turned at once."""
        parts = [self.words_at(row, c) for row in tile]
        return turned([self.widened(joined(parts[m::SQUARE])) for m in range(SQUARE)])

    def words_at(self, row: ptr, c: Int) -> Word:
        """Four words of a key, as they are stored."""
        return load(vector(self.element, SQUARE), gep(row, c, self.element))

    def widened(self, words: Word) -> Word:
        return fpext(words, "float")

    def query_word(self, c: Int) -> Word:
        """Word c of the query, in all lanes."""
        return broadcast(gep(self.packed, c, "float"), "float", self.lanes)

    def multiply_add(self, keys: Word, query: Word, total: Word) -> Word:
        return fma(keys, query, total)

    @inline
    def seen(self, x: Word, key: Int, low: Int, there: Word | None) -> Word:
        """Scores as they are weighed: with the mask of their keys, and -inf where there is none."""
        mask = None
        if self.spec.mask is not None:
            element = self.kernel.mask_element
            type_, place = vector(element, self.lanes), gep(self.mask, key, element)
            mask = load(type_, place) if there is None else masked_load(type_, place, there)
        x = self.scaling.masked(x, mask)
        return x if there is None else select(there, x, HIDDEN)

    # -- weights and values

    @inline
    def weigh(self, n: Int, base: Word) -> None:
        """Weights in place of scores."""
        for i in loop(0, n, self.lanes):
            place = gep(self.weights, i, "float")
            store(self.scaling.power(load(self.type, place), base), place)

    @inline
    def values(self, first: Int, n: Int, total: Word, sums: list[Word]) -> tuple[Word, list[Word]]:
        """The sum of weights, which all lanes have, and the sums of weighted values."""
        for i in loop(n):
            weight = broadcast(gep(self.weights, i, "float"), "float", self.lanes)
            row = self.row(self.v, self.spec.v, first + i, 0)
            total += weight
            sums = [fma(self.floats(row, self.lanes * j), weight, s) for j, s in enumerate(sums)]
        return total, sums

    @inline
    def write(self, total: Word, sums: list[Word]) -> None:
        factor = self.kernel.factor(total)
        for j, s in enumerate(sums):
            store(self.kernel.stored(s * factor), gep(self.o, self.lanes * j, self.kernel.o_element))


def joined(parts: list[Word]) -> Word:
    """The lanes of vectors, one after the other."""
    while len(parts) > 1:
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [shuffle(a, b, range(2 * a.width)) for a, b in pairs]
    return parts[0]


def turned(rows: list[Word]) -> list[Word]:
    """Squares that lie side by side in four vectors, each transposed."""
    width = rows[0].width
    groups = range(0, width, SQUARE)
    low, high = (
        [g + i + width * k for g in groups for i in half for k in (0, 1)] for half in ((0, 1), (2, 3))
    )
    first, second = (
        [g + i + width * k for g in groups for k in (0, 1) for i in half] for half in ((0, 1), (2, 3))
    )
    a, b, c, d = rows
    (e, f), (g, h) = (((shuffle(a, b, picked), shuffle(c, d, picked))) for picked in (low, high))
    return [shuffle(x, y, picked) for x, y in ((e, f), (g, h)) for picked in (first, second)]
