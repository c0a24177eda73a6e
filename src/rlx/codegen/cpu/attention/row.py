"""Attention of few queries, as when tokens are generated one by one.

The order of operations is that of blocks of queries (`block.py`), so a query has the same bits in a block and
on its own: keys are taken in the same blocks of 128, a score is the sum of four partial sums, and weights and
weighted values are added key by key. For scores, a vector holds four features of several keys, one for each
partial sum. For values, lanes are features, and each weight is spread over its row. Keys and values are read
once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlx.codegen.cpu.attention.block import PARTIAL_SUMS
from rlx.codegen.cpu.attention.mask import HIDDEN, KEYS
from rlx.codegen.native.irtypes import vector
from rlx.codegen.native.notation import inline
from rlx.codegen.native.words import (
    Int,
    Word,
    broadcast,
    concat,
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
    udiv,
)

if TYPE_CHECKING:
    from rlx.codegen.cpu.attention.flash import Access, Attention

FEW = 5  # queries up to which rows are faster than a block of one vector; the bits are the same
SQUARE = PARTIAL_SUMS  # features of a key that are side by side in a vector, and keys between two of it


class Row:
    """The function for one query of f32, or of narrow floats that are widened."""

    partial_sums = PARTIAL_SUMS

    def __init__(
        self, kernel: Attention, scratch: ptr, q: ptr, k: ptr, v: ptr, o: ptr, mask: ptr, query: Int
    ) -> None:
        self.kernel, self.spec, self.scaling = kernel, kernel.spec, kernel.scaling
        self.lanes, self.type, self.element = kernel.lanes, kernel.type, kernel.element
        self.q, self.k, self.v, self.o, self.mask, self.query = q, k, v, o, mask, query
        # Squares are made of words of a row.
        self.word, self.align, self.words = self.element, 0, self.spec.depth
        self.value_parts = self.spec.value_depth // self.lanes
        # Scratch: weights of a block of keys, the query or weights in pairs, the sums.
        self.weights, self.packed = scratch, gep(scratch, KEYS, "float")
        self.sums = gep(scratch, KEYS + max(KEYS, self.spec.depth), "float")
        self.most = kernel.module.target.registers // 2  # sums of values that are in registers at a time
        self.has_room = self.value_parts <= self.most

    @staticmethod
    def serves(kernel: Attention) -> bool:
        """Whether there is such a function for a kernel; else blocks serve any number of queries."""
        spec, width = kernel.spec, kernel.lanes
        dense = all(a is None or a.column == 1 for a in (spec.q, spec.k, spec.v, spec.o, spec.mask))
        return dense and width >= SQUARE and spec.depth % width == 0 and spec.value_depth % width == 0

    @inline
    def emit(self) -> None:
        self.pack_query()
        low, high = self.seen_keys()
        top, total = splat(HIDDEN, self.lanes), splat(0.0, self.lanes)
        sums = [splat(0.0, self.lanes)] * self.value_parts
        if not self.has_room:
            self.keep(range(self.value_parts), sums)
        for k0 in loop(udiv(low, KEYS) * KEYS, high, KEYS):
            first = self.first_key(k0, low)
            n = min(high, k0 + KEYS) - first
            new_top = self.scores(first, n, low, top)
            base = select(new_top == HIDDEN, 0.0, new_top)
            alpha = self.scaling.power(top, base)
            self.weigh(n, base)
            total *= alpha
            if self.has_room:
                sums = [s * alpha for s in sums]
                total, sums = self.weighed(first, n, range(self.value_parts), total, sums)
            else:
                total = self.in_turns(first, n, total, alpha)
            top = new_top
        self.write(top, total, sums)

    @inline
    def pack_query(self) -> None:
        """The query with its scale."""
        for j in range(self.words // self.lanes):
            place = gep(self.q, self.lanes * j, self.element)
            scaled = fpext(load(vector(self.element, self.lanes), place), "float") * self.scaling.queries
            store(scaled, gep(self.packed, self.lanes * j, "float"))

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
        whole = udiv(max(n, 0), self.lanes) * self.lanes
        for i in loop(0, whole, self.lanes):
            rows = [self.row(self.k, self.spec.k, first + i, m) for m in range(self.lanes)]
            x = self.tile(rows, first + i, low, None)
            store(x, gep(self.weights, i, "float"))
            top = fmax_x86(x, top)  # what is not a number makes the sum so
        if whole < n:
            # The last key stands in for those that are not there.
            keys = [min(first + whole + m, first + n - 1) for m in range(self.lanes)]
            rows = [self.row(self.k, self.spec.k, key, 0) for key in keys]
            x = self.tile(rows, first + whole, low, lanes(n - whole, self.lanes))
            store(x, gep(self.weights, whole, "float"))
            top = fmax_x86(x, top)
        return splat(reduce(fmax_x86, top), self.lanes)

    @inline
    def row(self, base: ptr, access: Access, key: Int, m: int) -> ptr:
        """The row of key + m."""
        step = self.kernel.dim(access.row)
        return gep(gep(base, key * step, self.element), step * m, self.element)

    @inline
    def tile(self, rows: list[ptr], key: Int, low: Int, there: Word | None) -> Word:
        """Scores of some keys, of which those exist that are `there`; None: all of them."""
        sums = [splat(0.0, self.lanes)] * self.partial_sums
        for c in loop(0, self.words, max(SQUARE, self.lanes // 2)):
            for square, keys in enumerate(self.squares(rows, c)):
                sums = self.multiply_add(keys, c + SQUARE * square, sums)
        return self.seen(self.added_up(sums), key, low, there)

    @inline
    def squares(self, rows: list[ptr], c: Int) -> list[list[Word]]:
        """Four words from c on of every fourth key, side by side: from key 0, 1, 2 and 3 on. Vectors of more
        than eight lanes give the next four words, too.
        """
        type_ = vector(self.word, max(SQUARE, self.lanes // 2))
        read = [load(type_, gep(row, c, self.word), self.align) for row in rows]
        if self.lanes > SQUARE:  # the second one is inserted by its load
            pairs = zip(_every_other_square(read), _every_other_square(read[SQUARE:]), strict=True)
            read = [concat(a, b) for a, b in pairs]
        joined = [self.widened(words) for words in read]
        if self.lanes <= 2 * SQUARE:
            return [joined]
        found = []
        for first in (0, SQUARE):
            picked = [2 * SQUARE * k + first + i for k in range(4) for i in range(SQUARE)]
            pairs = zip(joined[:SQUARE], joined[SQUARE:], strict=True)
            found.append([shuffle(a, b, picked) for a, b in pairs])
        return found

    def widened(self, words: Word) -> Word:
        return fpext(words, "float")

    @inline
    def multiply_add(self, keys: list[Word], c: Int, sums: list[Word]) -> list[Word]:
        """Sums of every fourth word, of every fourth key, with the products of a square added."""
        words = load(vector("float", SQUARE), gep(self.packed, c, "float"))
        query = shuffle(words, None, list(range(SQUARE)) * (self.lanes // SQUARE))
        return [fma(k, query, s) for k, s in zip(keys, sums, strict=True)]

    @inline
    def added_up(self, sums: list[Word]) -> Word:
        """One score per lane."""
        total = splat(0.0, self.lanes)
        for s in turned(sums):
            total += s
        return total

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
    def in_turns(self, first: Int, n: Int, total: Word, alpha: Word) -> Word:
        """Add weighted values to sums in memory, as many columns at a time as have room in registers."""
        for start in range(0, self.value_parts, self.most):
            parts = range(start, min(start + self.most, self.value_parts))
            sums = [s * alpha for s in self.kept(parts)]
            added, sums = self.weighed(first, n, parts, total, sums)
            self.keep(parts, sums)
        return added

    @inline
    def keep(self, parts: range, sums: list[Word]) -> None:
        for j, s in zip(parts, sums, strict=True):
            store(s, gep(self.sums, self.lanes * j, "float"))

    def kept(self, parts: range) -> list[Word]:
        return [load(self.type, gep(self.sums, self.lanes * j, "float")) for j in parts]

    @inline
    def weighed(
        self, first: Int, n: Int, parts: range, total: Word, sums: list[Word]
    ) -> tuple[Word, list[Word]]:
        """Sums with n weights added, and with those vectors of their rows of values."""
        for i in loop(n):
            weight = broadcast(gep(self.weights, i, "float"), "float", self.lanes)
            row = self.row(self.v, self.spec.v, first + i, 0)
            total += weight
            sums = [fma(self.floats(row, j), weight, s) for j, s in zip(parts, sums, strict=True)]
        return total, sums

    @inline
    def floats(self, row: ptr, j: int) -> Word:
        """Vector j of a row, as floats."""
        place = gep(row, self.lanes * j, self.element)
        return fpext(load(vector(self.element, self.lanes), place), "float")

    @inline
    def write(self, top: Word, total: Word, sums: list[Word]) -> None:
        factor = self.kernel.share(total, top, self.weights)
        for j, s in enumerate(sums if self.has_room else self.kept(range(self.value_parts))):
            store(self.kernel.stored(s * factor), gep(self.o, self.lanes * j, self.kernel.o_element))


def _every_other_square(rows: list[Word]) -> list[Word]:
    """The first four of every eight."""
    return [row for i, row in enumerate(rows) if i % (2 * SQUARE) < SQUARE]


def turned(rows: list[Word]) -> list[Word]:
    """Squares that are stored side by side in four vectors, each transposed."""
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
