"""A block of queries of flash attention whose operands are bf16: both matmuls by dot products of pairs.

Pairs run along the summed axis. Rows of queries and keys have theirs side by side already; weights of two
neighbouring keys are rounded and interleaved as they are computed, and so are rows of values, block by block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlx.codegen.cpu.attention.block import Block
from rlx.codegen.cpu.attention.mask import HIDDEN, KEYS
from rlx.codegen.native.irtext import Function
from rlx.codegen.native.irtypes import vector
from rlx.codegen.native.notation import inline, native
from rlx.codegen.native.words import (
    Int,
    Word,
    bitcast,
    ceildiv,
    dot_bf16,
    gep,
    i16,
    i32,
    i64,
    lanes,
    load,
    loop,
    masked_load,
    ptr,
    round_to_bf16,
    select,
    shuffle,
    splat,
    store,
    transpose,
    udiv,
    urem,
    zext,
)

if TYPE_CHECKING:
    from rlx.codegen.cpu.attention.flash import Attention, AttentionSpec

CHUNK = 32  # bf16 elements of a register
LANES = CHUNK // 2
LOW = [i // 2 + CHUNK * (i % 2) for i in range(CHUNK)]  # interleaves the first halves of two vectors
HIGH = [i + LANES for i in LOW]
HALVES = [i // 2 + LANES * (i % 2) for i in range(CHUNK)]  # interleaves the halves of one


class PairBlock(Block):
    """The function for one number of query vectors."""

    def __init__(self, kernel: Attention, fn: Function, vectors: int) -> None:
        super().__init__(kernel, fn, vectors)
        (self.packed_values,) = self.copies

    @staticmethod
    def parts(spec: AttentionSpec, width: int) -> tuple[int, ...]:
        queries, values = (-(-n // CHUNK) * CHUNK for n in (spec.depth, spec.value_depth))
        return queries // 2, spec.value_depth, KEYS, 1, 1, 1, -(-values * (KEYS // 2) // width)

    def score_rows(self) -> int:
        """Each score is one sum: more of them would spend their time in adding."""
        return self.kernel.tile_rows[self.vectors]

    @property
    def value_row(self) -> int:
        """Pairs from one packed row of values to the next."""
        return -(-self.spec.value_depth // CHUNK) * CHUNK

    @inline
    def pack_queries(self) -> None:
        """Q^T in pairs; lanes past the last query repeat it, features past the last are zeros."""
        depth, step = self.spec.depth, self.dim(self.spec.q.row)
        for j in range(self.vectors):
            start = gep(self.q, step * (self.lanes * j), "i16")
            last = max(self.count - self.lanes * j - 1, 0)
            for d in loop(0, depth, CHUNK):
                source, target = gep(start, d, "i16"), self.at(self.qt, udiv(d, 2), j)
                rlx_pack_pairs(source, step, last, target, self.nr, depth - d)

    def pairs(self, word: Word) -> Word:
        """One pair in every lane."""
        return as_pairs(splat(word, self.lanes))

    def load_pairs(self, place: ptr) -> Word:
        return as_pairs(load(vector("i32", self.lanes), place))

    @inline
    def products(self, keys: list[ptr], column: Int) -> list[list[Word]]:
        depth = self.spec.depth

        def step(d: Int, count: int, sums: list[list[Word]]) -> list[list[Word]]:
            q = [self.load_pairs(self.at(self.qt, udiv(d, 2), j)) for j in range(self.vectors)]
            added = []
            for start, before in zip(keys, sums, strict=True):
                place = gep(start, d, "i16")
                k = self.pairs(load(i32, place, 2) if count == 2 else zext(load(i16, place), i32))
                added.append([dot_bf16(s, k, x) for x, s in zip(q, before, strict=True)])
            return added

        sums = [[splat(0.0, self.lanes)] * self.vectors] * len(keys)
        for d in loop(0, depth - depth % 2, 2):
            sums = step(d, 2, sums)
        return step(depth - 1, 1, sums) if depth % 2 else sums

    @inline
    def weights(self, n: Int, bases: list[Word], sums: list[Word]) -> list[Word]:
        """Two rows of scores become one of pairs, which takes the place of one that has been read."""
        if urem(n, 2) != 0:  # the last key is paired with one of weight 0
            for j in range(self.vectors):
                store(splat(HIDDEN, self.lanes), self.at(self.st, n, j))
        for i in loop(0, n, 2):
            added = []
            for j in range(self.vectors):
                scores = (load(self.type, self.at(self.st, i + k, j)) for k in (0, 1))
                p, q = (self.scaling.power(score, bases[j]) for score in scores)
                both = shuffle(round_to_bf16(p, q), None, HALVES)
                store(bitcast(both, vector("i32", self.lanes)), self.at(self.st, udiv(i, 2), j))
                added.append(sums[j] + p + q)
            sums = added
        return sums

    @inline
    def values(self, k0: Int, n: Int) -> None:
        step, row = self.dim(self.spec.v.row), self.value_row
        packed = self.packed_values
        rlx_interleave_rows(gep(self.v, k0 * step, "i16"), step, packed, row, self.spec.value_depth, n)

        def value(pair: Int, d: Int) -> Word:
            return self.pairs(load(i32, gep(packed, pair * row + d, "i32")))

        def weight(pair: Int, j: int) -> Word:
            return self.load_pairs(self.at(self.st, pair, j))

        self.weigh(ceildiv(n, 2), value, weight, lambda v, p, total: dot_bf16(total, v, p))


def as_pairs(words: Word) -> Word:
    return bitcast(words, vector("bfloat", CHUNK))


@native(internal=True, noinline=True)
def rlx_pack_pairs(source: ptr, step: i64, last: i64, target: ptr, width: i64, left: i64) -> None:
    """target[i][lane] = pair i of row `lane` of the source, of up to 16 pairs that `left` elements hold;
    rows past `last` repeat it.
    """
    there, words = lanes(left, CHUNK), vector("i32", LANES)
    rows = [gep(source, min(i64(i), last) * step, "i16") for i in range(LANES)]
    read = [bitcast(masked_load(vector("i16", CHUNK), row, there), words) for row in rows]
    for i, column in enumerate(transpose(read)):
        store(column, gep(target, width * i, "i32"))


@native(internal=True, noinline=True)
def rlx_interleave_rows(source: ptr, step: i64, target: ptr, width: i64, columns: i64, rows: i64) -> None:
    """target[i][c] = (source[2 i][c], source[2 i + 1][c]) for `columns` of `rows`; zeros stand for a row
    that an odd number lacks.
    """
    type_ = vector("i16", CHUNK)
    for i in loop(0, rows, 2):
        even = gep(source, i * step, "i16")
        paired = i + 1 < rows
        odd = select(paired, gep(even, step, "i16"), even)
        to = gep(target, udiv(i, 2) * width, "i32")
        for c in loop(0, columns, CHUNK):
            count = columns - c
            first = masked_load(type_, gep(even, c, "i16"), lanes(count, CHUNK))
            there = lanes(select(paired, count, 0), CHUNK)
            second = masked_load(type_, gep(odd, c, "i16"), there)
            for part, picked in enumerate((LOW, HIGH)):
                place = gep(to, c + part * LANES, "i32")
                store(shuffle(first, second, picked), place)
