"""How kernels decode quantised weights: vectors of codes as f32 or bf16, scales and zeros as f32."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlx.codegen.cpu.primitives import MEMORY
from rlx.codegen.cpu.product.gemm_cut import Count
from rlx.codegen.native import twins
from rlx.codegen.native.irtext import Value, constant, lanes_of, vector
from rlx.codegen.native.notation import inline
from rlx.codegen.native.words import (
    Word,
    bitcast,
    broadcast,
    builder,
    byte_at,
    dot_bf16,
    float32,
    fma,
    fpext,
    fptrunc,
    gep,
    i32,
    load,
    lshr,
    ptr,
    select,
    sext,
    shuffle,
    sitofp,
    splat,
    store,
    udiv,
    zext,
)
from rlx.kernel.panels import BYTE_OF_K, PANEL_VECTORS, QuantLayout
from rlx.records import dataclass


@dataclass(frozen=True)
class Decoder:
    """Multiplies prepared rows of A with the codes of a group; this one converts codes to f32."""

    layout: QuantLayout
    parts: int = 1  # of an element of A, each with a sum of its own
    spare = 2  # registers that multiplying takes beside sums and codes
    unrolled = 4  # vectors of codes per turn of a loop over decoded weights

    @property
    def step(self) -> int:
        """k taken at once."""
        return {4: 8, 6: 16, 8: 1}[self.layout.bits]

    @inline
    def codes(self, place: ptr) -> list[Value]:
        """One vector of codes for each k of a step, as f32."""
        width = self.layout.lanes
        if self.layout.bits == 8:
            wider = zext if self.layout.minimums else sext
            return [sitofp(wider(load(vector("i8", width), place), i32), "float")]
        if self.layout.bits == 6:
            return [self.number(quad, byte) for quad in self.quads(place) for byte in BYTE_OF_K]
        word, floats = load(vector("i32", width), place), vector("float", width)
        nibbles = [lshr(word, 4 * (k // 2) + 16 * (k % 2)) for k in range(8)]
        if builder().module.target.has_avx512:  # the table takes the low four bits
            table = lanes_of(floats, [float(i - self.middle) for i in range(16)])
            name = "llvm.x86.avx512.permvar.sf.512"
            return [look_up(name, "avx512f", table, nibble) for nibble in nibbles]
        found = [sitofp(nibble & 15, "float") for nibble in nibbles]
        return [x - float(self.middle) if self.middle else x for x in found]

    @property
    def middle(self) -> int:
        """What unsigned codes are larger by than codes. Those of 8 bits are stored without it."""
        return 0 if self.layout.minimums else 1 << (self.layout.bits - 1)

    @inline
    def quads(self, place: ptr) -> list[Word]:
        """The quads of a set of 6-bit codes, in the low bits of their bytes; the others may be anything."""
        width = self.layout.lanes
        words = [load(vector("i32", width), byte_at(place, 4 * width * i)) for i in range(3)]
        masked = [lshr(words[i], 6 - 2 * i) & 0x03030303 << 2 * i for i in range(3)]
        return [*words, masked[0] | masked[1] | masked[2]]

    @inline
    def number(self, quad: Word, byte: int) -> Word:
        """The codes in a byte of a quad, as f32: as the last bits of a fraction they need no conversion."""
        if byte >= 2:  # above the fraction, or almost: fewer constants fit the registers
            return self.number(lshr(quad, 16), byte - 2)
        size = 23 - 8 * byte
        held = quad & 63 << 8 * byte | 127 + size << 23
        return bitcast(held, vector("float", self.layout.lanes)) - (2.0**size + self.middle)

    @property
    def depth(self) -> int:
        """k that one vector of codes holds."""
        return 1

    @property
    def code_type(self) -> str:
        """The type of a vector of codes."""
        return vector("float", self.layout.lanes)

    @inline
    def multiply(
        self, rows: Sequence[ptr], places: Sequence[ptr], sums: list[list[Value]]
    ) -> list[list[Value]]:
        """The sums after one step; `rows` point to prepared A, `places` to the codes of each vector."""
        columns: list[list[list[Value]]] = []
        for j, place in enumerate(places):
            column = sums[j :: len(places)]
            for number, code in enumerate(self.codes(place)):
                column = [self.add(row, number, code, own) for row, own in zip(rows, column, strict=True)]
            columns.append(column)
        return [own for line in zip(*columns, strict=True) for own in line]

    @inline
    def add(self, row: ptr, number: int, code: Value, sums: list[Value]) -> list[Value]:
        """The sums of an output with the products of vector `number` of the codes from `row` on."""
        return [fma(broadcast(gep(row, number, float32), "float", self.layout.lanes), code, sums[0])]

    def total(self, sums: list[Value]) -> Value:
        """The sum of a group for one output."""
        return sums[0]

    @inline
    def prepare(self, x: Value, place: ptr) -> None:
        """Store one vector of A as `multiply` reads it."""
        store(x, place)

    # -- prepared rows: their elements, then what they have for each group

    def row_bytes(self, padded_k: int) -> int:
        """Bytes of a prepared row: its elements, then one sum per group where the weights are shifted."""
        return 4 * (padded_k + (self.layout.groups if self.layout.shifted else 0))

    @property
    def row_factors(self) -> bool:
        """Whether rows have something for each group."""
        return self.layout.shifted

    def factors_start(self, padded_k: int) -> int:
        """Where in a prepared row that is."""
        return 4 * padded_k

    @inline
    def element(self, row: ptr, k: Count) -> ptr:
        """Where element k of a prepared row is."""
        return gep(row, k, float32)

    @inline
    def begin(self, factors: ptr | None, g: Count) -> list[Value]:
        """Where the sums of a group begin."""
        return [constant(vector("float", self.layout.lanes), 0.0)] * self.parts

    @inline
    def of_row(self, factors: ptr | None, g: Count) -> list[Word]:
        """What a row has for group g, in all lanes."""
        if factors is None:
            return []
        return [broadcast(gep(factors, g, float32), "float", self.layout.lanes)]

    @inline
    def scaled(
        self, own: list[Value], of_row: list[Word], scale: Word, zero: Word | None, total: Word
    ) -> Word:
        """The total of an output with the sums of a group; `zero` may be a minimum."""
        found = self.total(own)
        if zero is not None and self.layout.minimums:
            total = fma(-zero, of_row[0], total)
        elif zero is not None:
            found = fma(-zero, of_row[0], found)
        return fma(scale, found, total)


class PairDecoder(Decoder):
    """Codes of 4 or 6 bits looked up as bf16 pairs; A is a high and, of two parts, a low bf16 part."""

    @property
    def depth(self) -> int:
        return 2

    @property
    def code_type(self) -> str:
        return vector("bfloat", 2 * self.layout.lanes)

    @inline
    def codes(self, place: ptr) -> list[Value]:
        """One vector of codes for each pair of a step, as bf16."""
        width = self.layout.lanes
        halves, pairs = vector("i16", 2 * width), self.code_type
        if self.layout.bits == 6:  # the look-up takes six bits
            numbers = [_bf16_bits(i - self.middle) for i in range(64)]
            low, high = lanes_of(halves, numbers[:32]), lanes_of(halves, numbers[32:])
            bytes_ = [bitcast(lshr(quad, shift), halves) for quad in self.quads(place) for shift in (0, 8)]
            return [bitcast(look_up_in_two(low, high, index), pairs) for index in bytes_]
        # The bf16 numbers of codes, twice: the look-up takes five bits, of which the fifth is another code's.
        table = lanes_of(halves, [_bf16_bits(i % 16 - self.middle) for i in range(32)])
        word = bitcast(load(vector("i32", width), place), halves)
        name = "llvm.x86.avx512.permvar.hi.512"
        return [bitcast(look_up(name, "avx512bw", table, lshr(word, 4 * pair)), pairs) for pair in range(4)]

    @inline
    def add(self, row: ptr, number: int, code: Value, sums: list[Value]) -> list[Value]:
        width = self.layout.lanes

        def part_of_a(part: int) -> Value:
            return bitcast(splat(load(i32, gep(row, 2 * number + part, i32)), width), self.code_type)

        return [dot_bf16(total, part_of_a(part), code) for part, total in enumerate(sums)]

    @inline
    def total(self, sums: list[Value]) -> Value:
        return sums[0] if self.parts == 1 else Word(sums[0]) + sums[1]

    @inline
    def prepare(self, x: Value, place: ptr) -> None:
        high = fptrunc(x, "bfloat", exact=False)
        rest = Word(x) - fpext(high, "float")
        # The rest of an infinity is NaN and must not count.
        low = fptrunc(select(rest == rest, rest, constant(x.type, 0.0)), "bfloat", exact=False)
        words = vector("i32", x.width // 2)
        mixed = [i // 2 + i % 2 * (x.width // 2) for i in range(x.width)]
        store(shuffle(bitcast(high, words), bitcast(low, words), mixed), place)


def look_up(name: str, feature: str, table: Value, index: Value) -> Value:
    """Elements of a vector by their numbers."""
    return builder().intrinsic(name, table.type, table, index, feature=feature, twin=twins.look_up)


def look_up_in_two(low: Value, high: Value, index: Value) -> Value:
    """16-bit elements of two vectors of 512 bits by their numbers, of which the lowest six bits count."""
    return builder().intrinsic(
        "llvm.x86.avx512.vpermi2var.hi.512",
        low.type,
        low,
        index,
        high,
        feature="avx512bw",
        twin=twins.look_up_in_two,
    )


def _bf16_bits(value: int) -> int:
    return int(np.float32(value).view(np.uint32)) >> 16


@dataclass(frozen=True)
class Place:
    """Where a group is stored: its block, which group of it, and its codes."""

    layout: QuantLayout
    block: ptr
    number: Count
    codes: ptr

    @staticmethod
    @inline
    def of(layout: QuantLayout, panel: ptr, g: Count) -> Place:
        """The place of group g from a panel's start on, or from that of a block."""
        if not layout.block:
            block = byte_at(panel, g * layout.block_bytes)
            return Place(layout, block, 0, byte_at(block, layout.codes_start))
        before = udiv(g, layout.block)
        number = g - before * layout.block
        block = byte_at(panel, before * layout.block_bytes)
        return Place(layout, block, number, byte_at(block, number * layout.codes_bytes + layout.codes_start))

    @inline
    def factors(self, number: int, first: Count, lanes: int) -> Word:
        """Scales (0), or zeros or minimums (1), of `lanes` columns of the group from `first` on, as f32."""
        layout, start = self.layout, self.layout.factor_starts[number]
        element = MEMORY[layout.zero or layout.scale if number else layout.scale]

        def loaded(kind: str, start: ptr) -> Word:
            return load(kind if lanes == 1 else vector(kind, lanes), gep(start, first, kind))

        found = loaded(element, byte_at(self.block, start))
        found = fpext(found, "float") if element == "half" else found
        if not layout.block:
            return found
        row = byte_at(self.block, self.number * layout.columns + layout.factor_codes_starts[number])
        return found * sitofp(sext(loaded("i8", row), i32), "float")

    @inline
    def vectors(self, number: int) -> list[Word]:
        """The same for all columns, as vectors."""
        lanes = self.layout.lanes
        return [self.factors(number, j * lanes, lanes) for j in range(PANEL_VECTORS)]
