"""The mask of a block of queries, where each query has its own: turned square by square, so that lanes are
queries; and which keys at the ends of a block it hides from all of them.

Keys are skipped where that changes nothing: every weight would be 0 to the last bit. A mask that
adds -inf hides any finite score. One that adds a large negative number does if no product of these queries
and keys can bring a score near the largest so far. Products and values must be finite, since 0 times infinity
is not a number.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rlx.codegen.native.irtypes import vector
from rlx.codegen.native.notation import inline, native
from rlx.codegen.native.words import (
    Int,
    Word,
    bitcast,
    call,
    float32,
    fmax,
    fmin_x86,
    gather,
    gep,
    i1,
    i64,
    iota,
    lanes,
    load,
    loop,
    masked_load,
    or_,
    ptr,
    reduce,
    select,
    splat,
    store,
    transpose,
    ult,
    umax,
    zext,
)

if TYPE_CHECKING:
    from rlx.codegen.cpu.attention.block import Block
    from rlx.codegen.cpu.attention.flash import Access, AttentionSpec

KEYS = 128  # keys of one block: its scores stay in L1
PART = 32  # keys of a part that a mask is asked about
HIDDEN = -math.inf  # the score of a key that weighs nothing
VANISHES = -160.0  # 2 to this power is 0 in f32, whatever is lost in rounding
LARGEST = 3e38
SLACK = 1.01  # a sum of products as it is rounded, against one of their largest sizes
SIZE_BITS = 0x7FFFFFFF
INFINITE_BITS = 0x7F800000


def is_turned(spec: AttentionSpec) -> bool:
    """Whether a mask is copied by squares: queries have rows of their own, in which keys lie side by side."""
    mask = spec.mask
    return mask is not None and mask.column == 1 and not (isinstance(mask.row, int) and mask.row == 0)


class BlockMask:
    """The mask as one block of queries reads it; `copy` has room for the part of a block of keys."""

    def __init__(self, block: Block, copy: ptr) -> None:
        self.block, self.spec, self.copy = block, block.spec, copy
        assert self.spec.mask is not None
        self.adds = self.spec.mask_kind == "add"
        self.element = block.kernel.mask_element
        self.step = block.dim(self.spec.mask.row)
        self.chunk = block.lanes * (1 if self.adds else 4)  # elements of a register
        self.part = max(PART, self.chunk)

    @staticmethod
    def rows(spec: AttentionSpec) -> int:
        """Rows of scratch."""
        return KEYS if is_turned(spec) else 0

    @inline
    def fill(self, k0: Int, n: Int) -> None:
        """Copy the part of `n` keys from k0 on. The last square overlaps the one before; a part that is
        smaller than a square is gathered key by key.
        """
        block, width = self.block, self.block.lanes
        start = gep(block.mask, k0, self.element)
        if n >= width:
            for j in range(block.vectors):
                source = gep(start, self.step * (width * j), self.element)
                last = max(block.count - width * j - 1, 0)
                alias = f"rlx_turn_clamped_{width}_{self.element}"
                turn = _turn_clamped.written(alias, lanes=width, element=self.element)
                for i in loop(0, n, width):
                    first = min(i, n - width)
                    target = block.at(self.copy, first, j)
                    place = gep(source, first, self.element)
                    call(turn, place, self.step, last, target, block.nr)
        else:
            for j in range(block.vectors):
                source = gep(start, self.step * (width * j), self.element)
                exists = lanes(max(block.count - width * j, 0), width)
                index = iota(width) * splat(self.step, width, "i64")
                for i in loop(n):
                    found = gather(gep(source, i, self.element), index, self.element, exists)
                    store(_as_words(found), block.at(self.copy, i, j))

    def read(self, row: Int, j: int) -> Word:
        """What the copy holds of a key, for vector j of queries: floats, or integers, 0 or not."""
        type_ = self.block.type if self.adds else vector("i32", self.block.lanes)
        return load(type_, self.block.at(self.copy, row, j))

    # -- keys that are hidden

    @inline
    def shown(self, k0: Int, n: Int) -> tuple[Int, Int]:
        """From where to where keys of a block count, by parts of it: those outside may be skipped."""
        start: Int = i64(0)
        stop: Int = i64(n)
        if n >= self.part:
            start, stop = i64(n), i64(0)
            for i in loop(0, n, self.part):
                first = min(i, n - self.part)  # the last one overlaps
                if self.hides(k0 + first):
                    pass
                else:
                    start, stop = min(start, first), first + self.part
        return start, stop

    @inline
    def hides(self, k0: Int) -> bool | i1:
        """Whether a part of keys may be skipped. Keys and values are only looked at where the mask hides."""
        hidden: bool | i1 = i1(False)
        top = self.largest(k0, self.part)
        covered = top < self.reach() if self.adds else top == 0
        if covered:
            hidden = self.vanishes(k0, self.part, top)
        return hidden

    @inline
    def reach(self) -> Word:
        """What a mask must be below to hide scores of 0."""
        least = self.least_top()
        return select(least == HIDDEN, float32(-LARGEST), least + VANISHES / self.block.scaling.after)

    @inline
    def least_top(self) -> Word:
        """The smallest of the largest scores that the queries have seen."""
        block = self.block
        least, *others = [load(block.type, block.at(block.top, 0, j)) for j in range(block.vectors)]
        for top in others:
            least = fmin_x86(least, top)
        return reduce(fmin_x86, least)

    @inline
    def largest(self, k0: Int, n: int) -> Word:
        """The largest number that the mask adds, or whether it keeps any key: all bytes together."""
        start = gep(self.block.mask, k0, self.element)
        type_ = vector(self.element, self.chunk)
        found = splat(HIDDEN if self.adds else 0, self.chunk, self.element)
        for i in loop(self.block.count):
            row = gep(start, i * self.step, self.element)
            for c in range(0, n, self.chunk):
                read = load(type_, gep(row, c, self.element))
                found = max(read, found) if self.adds else read | found
        return reduce(fmax if self.adds else or_, found)

    @inline
    def vanishes(self, k0: Int, n: int, top: Word) -> bool:
        """Whether keys that the mask hides are without any effect: their values, and products with them."""
        spec, block = self.spec, self.block
        values = self.size(block.v, spec.v, k0, n, spec.value_depth)
        finite = ult(values, INFINITE_BITS)
        if not self.adds:
            return finite
        keys = self.size(block.k, spec.k, k0, n, spec.depth)
        queries = self.size_of_queries()
        bound = bitcast(keys, "float") * bitcast(queries, "float") * (SLACK * spec.depth)
        hidden = (top == HIDDEN) & (bound < LARGEST)
        nearest = (bound + top - self.least_top()) * block.scaling.after
        return finite & (hidden | (nearest < VANISHES))

    @inline
    def size(self, base: ptr, access: Access, k0: Int, n: Int, columns: int) -> Word:
        """The largest size in `n` rows, as bits: an infinity and what is not a number are the largest."""
        width, step = self.block.lanes, self.block.dim(access.row)
        type_, whole = vector("float", width), columns - columns % width
        found = splat(0, width, "i32")
        for i in loop(n):
            row = gep(base, (k0 + i) * step, "float")
            for c in loop(0, whole, width):
                found = _larger(load(type_, gep(row, c, "float")), found)
            if columns > whole:
                rest = masked_load(type_, gep(row, whole, "float"), lanes(columns - whole, width))
                found = _larger(rest, found)
        return reduce(umax, found)

    @inline
    def size_of_queries(self) -> Word:
        """The same of the queries as they are packed."""
        block = self.block
        found = splat(0, block.lanes, "i32")
        for i in loop(0, self.spec.depth * block.nr, block.lanes):
            found = _larger(load(block.type, gep(block.qt, i, "float")), found)
        return reduce(umax, found)


@inline
def _larger(x: Word, found: Word) -> Word:
    """The larger one of sizes as bits, lane by lane."""
    return umax(bitcast(x, found.type) & SIZE_BITS, found)


def _as_words(found: Word) -> Word:
    return found if found.element == "float" else zext(found, "i32")


@native(internal=True, noinline=True)
def _turn_clamped(
    source: ptr, step: i64, last: i64, target: ptr, width: i64, *, lanes: int, element: str
) -> None:
    """target[i][lane] = source[lane][i] for a square of 4-byte words; rows past `last` repeat it."""
    rows = [gep(source, min(i64(i), last) * step, element) for i in range(lanes)]
    read = [_as_words(load(vector(element, lanes), row)) for row in rows]
    for i, column in enumerate(transpose(read)):
        store(column, gep(target, width * i, "float"))
