"""Rows rounded to 8 bits times quantised weights: groups are summed in integers.

Each group of a row of A is rounded to i8 with a scale of its own, as `rlx.ops.quant.coded` says. Sums of a
group are exact integers. What follows is f32 with one rounding per operation and no fused multiply-add, in an
order that depends on k and the group alone: so bits are the same for any tile, on any machine.

Weights are read as 32-bit words: eight codes of 4 bits, or four of 6 or 8 bits, of a column. How bytes are
multiplied is the target's: four at a time (`Quads`), four in pairs of 16 bits (`Pairs16`, `SmallQuads`), two
as 16-bit integers (`Shorts`), or one at a time (`Singles`). Codes that are multiplied as unsigned ones have
`offset` added, so the sums of a row's group begin at -offset times the sum of its codes. Those with minimums
are unsigned as they are.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from rlx.codegen.cpu.product.gemm_dot import combine_each
from rlx.codegen.cpu.product.quant_decode import Decoder
from rlx.codegen.native.irtext import Value, constant, vector
from rlx.codegen.native.notation import inline, native
from rlx.codegen.native.words import (
    Word,
    bitcast,
    broadcast,
    builder,
    byte_at,
    float32,
    gep,
    i8,
    i16,
    i32,
    i64,
    lanes,
    load,
    loop,
    lshr,
    masked_load,
    ptr,
    select,
    shuffle,
    sitofp,
    splat,
    store,
    trunc,
)
from rlx.kernel.panels import BYTE_OF_K, QuantLayout
from rlx.kernel.rounded import INFINITE, LEAST, MAGIC, MAGIC_BITS, NAN, TOP

if TYPE_CHECKING:
    from collections.abc import Callable

    Combine = Callable[[Word, Word], Word]

    from rlx.codegen.cpu.product.gemm_cut import Count
    from rlx.target.cpu import Target

_TOGETHER = 8  # groups that are rounded at once


def byte_decoder(layout: QuantLayout, target: Target) -> ByteDecoder:
    """How a target multiplies bytes.

    >>> from rlx.target.cpu import resolve
    >>> layout = QuantLayout(64, 32, bits=4, group=32, lanes=8)
    >>> [type(byte_decoder(layout, resolve(name))).__name__ for name in ("x86-64-v3-vnni", "x86-64-v3")]
    ['Quads', 'Pairs16']
    """
    if target.has_vnni:
        return Quads(layout)
    if layout.bits == 4 and target.has("ssse3"):
        return Pairs16(layout) if layout.group <= Pairs16.most else SmallQuads(layout)
    if layout.bits == 6 and target.has("ssse3"):
        return SmallQuads(layout)
    return Shorts(layout) if target.x86 else Singles(layout)


class ByteDecoder(Decoder):
    """A prepared row is its codes, then for each group its scale, where its sums begin, and its sum."""

    unrolled = 8

    @property
    def begins_late(self) -> bool:
        """Whether what sums begin with is added at their end."""
        return False

    @property
    def offset(self) -> int:
        """What is added to codes to multiply them."""
        return 0

    @property
    def step(self) -> int:
        return {4: 8, 6: 16, 8: 4}[self.layout.bits]

    @property
    def order(self) -> list[int]:
        """The k of a step in the order in which a prepared row has them."""
        return list(range(self.step))

    @property
    def k_bytes(self) -> int:
        """Bytes of an element of a prepared row."""
        return 4 // self.depth

    def row_bytes(self, padded_k: int) -> int:
        return self.k_bytes * padded_k + 4 * self.layout.groups * (2 + self.layout.shifted)

    @property
    def row_factors(self) -> bool:
        return True

    def factors_start(self, padded_k: int) -> int:
        return self.k_bytes * padded_k

    @inline
    def element(self, row: ptr, k: Count) -> ptr:
        return byte_at(row, k * self.k_bytes)

    @inline
    def as_stored(self, codes: Value) -> Value:
        """Codes, with the bits of `MAGIC` above them, as a prepared row has them."""
        width, order = codes.width, self.order
        if self.k_bytes == 4:
            return Word(codes) - MAGIC_BITS
        narrow = trunc(codes, i8 if self.k_bytes == 1 else i16)
        if order == sorted(order):
            return narrow
        return shuffle(narrow, None, [at - at % len(order) + order[at % len(order)] for at in range(width)])

    @inline
    def words(self, place: ptr) -> Word:
        """A word of codes for each column."""
        return load(vector("i32", self.layout.lanes), place)

    @inline
    def read(self, row: ptr, number: int) -> Value:
        """What vector `number` of the codes is multiplied with, in every lane."""
        return bitcast(splat(load(i32, gep(row, number, i32)), self.layout.lanes), self.code_type)

    @inline
    def begin(self, factors: ptr | None, g: Count) -> list[Value]:
        assert factors is not None
        sums = vector("i32", self.layout.lanes)
        if not self.offset:
            return [constant(sums, 0)]
        return [broadcast(gep(factors, g + self.layout.groups, i32), "i32", self.layout.lanes)]

    @inline
    def of_row(self, factors: ptr | None, g: Count) -> list[Word]:
        """The scale, the sum if weights are shifted, and where sums begin if they do not begin there."""
        assert factors is not None
        groups, width = self.layout.groups, self.layout.lanes
        found = [broadcast(gep(factors, g, float32), "float", width)]
        if self.layout.shifted:
            found.append(broadcast(gep(factors, g + 2 * groups, float32), "float", width))
        if self.begins_late:
            found.append(broadcast(gep(factors, g + groups, i32), "i32", width))
        return found

    @inline
    def scaled(
        self, own: list[Value], of_row: list[Word], scale: Word, zero: Word | None, total: Word
    ) -> Word:
        found = sitofp(self.whole(own, of_row), "float")
        if zero is not None and self.layout.minimums:
            return total + (found * scale - zero * of_row[1]) * of_row[0]
        if zero is not None:
            found = found - zero * of_row[1]
        return total + found * of_row[0] * scale

    @inline
    def whole(self, own: list[Value], of_row: list[Word]) -> Value:
        """The sums of a group as i32."""
        return own[0]


class Quads(ByteDecoder):
    """Four k at a time: unsigned codes by signed bytes, summed in i32 at once."""

    @property
    def offset(self) -> int:
        return self.middle

    @property
    def depth(self) -> int:
        return 4

    @property
    def order(self) -> list[int]:
        return {4: [0, 4, 1, 5, 2, 6, 3, 7], 6: list(BYTE_OF_K), 8: [0, 1, 2, 3]}[self.layout.bits]

    @property
    def code_type(self) -> str:
        return vector("i8", 4 * self.layout.lanes)

    @inline
    def codes(self, place: ptr) -> list[Value]:
        if self.layout.bits == 6:
            return [bitcast(quad & 0x3F3F3F3F, self.code_type) for quad in self.quads(place)]
        words = self.words(place)
        if self.layout.bits == 8:
            return [bitcast(words ^ -0x7F7F7F80 if self.offset else words, self.code_type)]
        return [bitcast(half & 0x0F0F0F0F, self.code_type) for half in (words, lshr(words, 4))]

    @inline
    def add(self, row: ptr, number: int, code: Value, sums: list[Value]) -> list[Value]:
        return [builder().dot_u8i8(sums[0], code, self.read(row, number))]


class SmallQuads(Quads):
    """Four k at a time: products of codes of 4 or 6 bits are added in pairs in 16 bits, then in i32."""

    spare = 3

    @inline
    def add(self, row: ptr, number: int, code: Value, sums: list[Value]) -> list[Value]:
        return [Word(sums[0]) + in_pairs(builder().saturating_dot_u8i8(code, self.read(row, number)))]


class Pairs16(Quads):
    """4-bit codes in groups so short that 16 bits hold their sums: 2 x 15 x 127 for each of eight steps."""

    most = 32  # k of a group

    @property
    def begins_late(self) -> bool:
        return self.offset > 0

    @inline
    def begin(self, factors: ptr | None, g: Count) -> list[Value]:
        return [constant(vector("i16", 2 * self.layout.lanes), 0)]

    @inline
    def add(self, row: ptr, number: int, code: Value, sums: list[Value]) -> list[Value]:
        return [Word(sums[0]) + builder().saturating_dot_u8i8(code, self.read(row, number))]

    @inline
    def whole(self, own: list[Value], of_row: list[Word]) -> Value:
        found = in_pairs(own[0])
        return of_row[-1] + found if self.begins_late else found


class Shorts(ByteDecoder):
    """Two k at a time as 16-bit integers."""

    @property
    def offset(self) -> int:
        return 0 if self.layout.bits == 8 else self.middle

    @property
    def depth(self) -> int:
        return 2

    @property
    def order(self) -> list[int]:
        return [0, 2, 1, 3] if self.layout.bits == 8 else list(range(8))

    @property
    def code_type(self) -> str:
        return vector("i16", 2 * self.layout.lanes)

    @inline
    def codes(self, place: ptr) -> list[Value]:
        if self.layout.bits == 6:  # neighbours are in the low bytes of both halves, or in the high ones
            shifted = [lshr(quad, shift) for quad in self.quads(place) for shift in (0, 8)]
            return [bitcast(pair & 0x003F003F, self.code_type) for pair in shifted]
        words = self.words(place)
        if self.layout.bits == 4:
            return [bitcast(lshr(words, 4 * pair) & 0x000F000F, self.code_type) for pair in range(4)]
        halves = Word(bitcast(words, self.code_type))
        if self.layout.minimums:
            return [halves & 255, lshr(halves, 8)]
        return [halves << 8 >> 8, halves >> 8]

    @inline
    def add(self, row: ptr, number: int, code: Value, sums: list[Value]) -> list[Value]:
        return [Word(sums[0]) + builder().dot_i16(code, self.read(row, number))]


class Singles(ByteDecoder):
    """One k at a time in i32."""

    @inline
    def codes(self, place: ptr) -> list[Value]:
        if self.layout.bits == 6:
            sixes = [lshr(quad, 8 * byte) & 63 for quad in self.quads(place) for byte in BYTE_OF_K]
            return [code - self.middle if self.middle else code for code in sixes]
        words, bits = self.words(place), self.layout.bits
        if bits == 4:  # even k are in the low half of a word, odd ones in the high half
            found = [lshr(words, 4 * (k // 2) + 16 * (k % 2)) & 15 for k in range(8)]
            return [word - self.middle if self.middle else word for word in found]
        if self.layout.minimums:
            return [lshr(words, 8 * k) & 255 for k in range(4)]
        return [words << 8 * (3 - k) >> 24 for k in range(4)]

    @property
    def code_type(self) -> str:
        return vector("i32", self.layout.lanes)

    @inline
    def add(self, row: ptr, number: int, code: Value, sums: list[Value]) -> list[Value]:
        return [Word(sums[0]) + Word(code) * self.read(row, number)]


@inline
def in_pairs(sums: Value) -> Word:
    """Neighbouring 16-bit integers added, as i32."""
    return Word(builder().dot_i16(sums, constant(sums.type, 1)))


@native(internal=True, noinline=True)
def round_rows(
    a: ptr, a_row: i64, to: ptr, rows: i64, *, decoder: ByteDecoder, row_bytes: int, padded_k: int
) -> None:
    """Round rows of A into scratch, group by group; the last one is padded with zeros."""
    layout = decoder.layout
    whole = layout.k // layout.group
    together = whole // _TOGETHER * _TOGETHER
    for i in loop(rows):
        source = gep(a, i * a_row, float32)
        target = byte_at(to, i * row_bytes)
        factors = byte_at(target, decoder.factors_start(padded_k))
        for g in loop(0, together, _TOGETHER):
            round_groups(decoder, source, target, factors, g, [layout.group] * _TOGETHER)
        for g in loop(together, whole):
            round_groups(decoder, source, target, factors, g, [layout.group])
        if whole < layout.groups:
            round_groups(decoder, source, target, factors, whole, [layout.k - whole * layout.group])


@inline
def round_groups(
    decoder: ByteDecoder, source: ptr, target: ptr, factors: ptr, g: Count, sizes: list[int]
) -> None:
    """Groups of a row from g on, of which so many elements exist; what is one number a group is a vector."""
    layout, count = decoder.layout, len(sizes)
    width = layout.lanes if layout.lanes > 8 and layout.group % layout.lanes == 0 else 8
    ints, floats = vector("i32", width), vector("float", count)
    start = gep(source, g * layout.group, float32)
    xs = [
        elements(gep(start, i * layout.group + first, float32), width, size - first)
        for i, size in enumerate(sizes)
        for first in range(0, layout.group, width)
    ]
    each = len(xs) // count
    most = of_each(larger, [bitcast(x, ints) & 0x7FFFFFFF for x in xs], each)
    finite = most < INFINITE
    counts = finite & (most >= LEAST)
    # Groups that do not count are multiplied by 0.
    largest = bitcast(select(counts, most, constant(most.type, INFINITE)), floats)
    missing = bitcast(constant(most.type, NAN), floats)
    scale = select(finite, select(counts, largest / TOP, constant(largest.type, 0.0)), missing)
    by = Word(constant(largest.type, TOP)) / largest
    codes = [bitcast(x * in_lanes(by, n // each, width) + MAGIC, ints) for n, x in enumerate(xs)]
    whole = of_each(added, codes, each) - MAGIC_BITS * layout.group % 2**32
    place = decoder.element(target, g * layout.group)
    for number, code in enumerate(codes):
        store(decoder.as_stored(code), byte_at(place, number * width * decoder.k_bytes))
    store(scale, gep(factors, g, float32))
    if decoder.offset:
        store(whole * -decoder.offset, gep(factors, g + layout.groups, i32))
    if layout.shifted:
        store(sitofp(whole, "float"), gep(factors, g + 2 * layout.groups, float32))


@inline
def elements(place: ptr, width: int, count: int) -> Word:
    """A vector of numbers, of which `count` exist; the others are zeros."""
    floats = vector("float", width)
    if count >= width:
        return load(floats, place)
    if count <= 0:
        return Word(constant(floats, 0.0))
    return masked_load(floats, place, lanes(count, width))


@inline
def of_each(combine: Combine, vectors: list[Word], each: int) -> Word:
    """All lanes of each run of vectors combined; the results are the lanes of one vector."""
    parts = [
        functools.reduce(combine, vectors[first : first + each]) for first in range(0, len(vectors), each)
    ]
    return Word(combine_each(combine, parts))


@inline
def in_lanes(x: Word, lane: int, width: int) -> Word:
    """One of the lanes, or a scalar, in all lanes."""
    return splat(x, width) if x.width == 1 else shuffle(x, None, [lane] * width)


@inline
def larger(a: Word, b: Word) -> Word:
    return select(a > b, a, b)


@inline
def added(a: Word, b: Word) -> Word:
    return a + b
