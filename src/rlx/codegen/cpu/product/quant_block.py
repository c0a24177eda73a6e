"""Many rows times quantised weights: a block of a panel is decoded once, and all row tiles read it.

A decoded group is its scales and zeros (if any) as f32, then the vectors of codes in the order in which they
are multiplied. Blocks fit L1. Sums of a tile are in registers for the length of a group, totals in a stage
that stays in L1, too: so tiles are as tall as those of an f32 matmul. The operations of an output and their
order are those of `quant_gemm.compute_tile`, and so are its bits.
"""

from __future__ import annotations

import math

from rlx.codegen.cpu.product.quant_decode import Decoder, Place
from rlx.codegen.native.irtext import Value, vector
from rlx.codegen.native.notation import inline, native
from rlx.codegen.native.words import (
    Word,
    byte_at,
    float32,
    gep,
    i64,
    load,
    loop,
    noalias,
    prefetch,
    ptr,
    store,
)
from rlx.kernel.panels import PANEL_VECTORS

LINE = 64  # bytes of a cache line
_BLOCK_BYTES = 16 << 10  # of decoded weights: half of L1


class Decoded:
    """Sizes of decoded weights."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.layout = decoder, decoder.layout
        self.vector_bytes = 4 * self.layout.lanes
        self.line_bytes = PANEL_VECTORS * self.vector_bytes
        self.codes_start = self.line_bytes * (1 + self.layout.shifted)
        self.lines = self.layout.group // decoder.depth  # of codes in a group
        self.unrolled = math.gcd(self.lines, decoder.unrolled)
        self.group_bytes = self.codes_start + self.lines * self.line_bytes
        self.groups = max(1, min(_BLOCK_BYTES // self.group_bytes, self.layout.groups))

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return self.groups * self.group_bytes

    def rows(self, registers: int) -> int:
        """Rows of the tallest tile: registers hold its sums, a line of codes and an element of A."""
        left = registers - PANEL_VECTORS - self.decoder.spare
        return min(left // (PANEL_VECTORS * self.decoder.parts), 12)


@native(internal=True, noinline=True)
def decode_block(panel: noalias, to: noalias, first: i64, groups: i64, *, decoded: Decoded) -> None:
    """Decode groups of a panel from `first` on, as tiles read them."""
    layout, decoder = decoded.layout, decoded.decoder
    step_bytes = layout.columns * layout.bits * decoder.step // 8
    step_lines = decoder.step // decoder.depth
    for g in loop(groups):
        source = Place.of(layout, panel, first + g)
        target = byte_at(to, g * decoded.group_bytes)
        for line in range(1 + layout.shifted):
            for j, found in enumerate(source.vectors(line)):
                store(found, byte_at(target, line * decoded.line_bytes + j * decoded.vector_bytes))
        for s in loop(layout.group // decoder.step):
            codes = byte_at(source.codes, s * step_bytes)
            lines = byte_at(target, s * (step_lines * decoded.line_bytes) + decoded.codes_start)
            for j in range(PANEL_VECTORS):
                for number, code in enumerate(decoder.codes(byte_at(codes, j * step_bytes // PANEL_VECTORS))):
                    store(code, byte_at(lines, number * decoded.line_bytes + j * decoded.vector_bytes))


@native(internal=True, noinline=True)
def add_block(
    a: noalias,
    b: noalias,
    factors: noalias,
    stage: noalias,
    groups: i64,
    later: ptr,
    fetched: i64,
    *,
    decoded: Decoded,
    row_bytes: int,
    rows: int,
) -> None:
    """Add the products of some rows with decoded groups to their totals in the stage. For each group, so many
    cache lines from `later` on are prefetched.
    """
    decoder, layout = decoded.decoder, decoded.layout
    floats = vector("float", layout.lanes)

    def factors_of(n: int) -> ptr | None:
        """What the row of output n has for each group."""
        return byte_at(factors, n // PANEL_VECTORS * row_bytes) if decoder.row_factors else None

    for g in loop(groups):
        for ahead in loop(g * fetched, (g + 1) * fetched):
            prefetch(byte_at(later, ahead * LINE))
        group = byte_at(b, g * decoded.group_bytes)
        prepared = decoder.element(a, g * layout.group)
        sums = [decoder.begin(factors_of(n), g) for n in range(rows * PANEL_VECTORS)]
        for s in loop(0, decoded.lines, decoded.unrolled):
            lines = byte_at(group, s * decoded.line_bytes + decoded.codes_start)
            at = decoder.element(prepared, s * decoder.depth)
            for number in range(decoded.unrolled):
                line = byte_at(lines, number * decoded.line_bytes)
                sums = line_of_sums(decoded, row_bytes, at, line, number, sums)
        columns = [byte_at(group, j * decoded.vector_bytes) for j in range(PANEL_VECTORS)]
        scales = [load(floats, at) for at in columns]
        zeros = [load(floats, byte_at(at, decoded.line_bytes)) if layout.shifted else None for at in columns]
        for i in range(rows):
            own = sums[i * PANEL_VECTORS : (i + 1) * PANEL_VECTORS]
            of_row = decoder.of_row(factors_of(i * PANEL_VECTORS), g)
            add_row(decoder, own, of_row, scales, zeros, gep(stage, i * layout.columns, float32))


@inline
def add_row(
    decoder: Decoder,
    sums: list[list[Value]],
    of_row: list[Word],
    scales: list[Word],
    zeros: list[Word | None],
    stage: ptr,
) -> None:
    """Add the sums of a group to the totals of a row."""
    for j, (own, scale, zero) in enumerate(zip(sums, scales, zeros, strict=True)):
        place = gep(stage, j * decoder.layout.lanes, float32)
        total = load(vector("float", decoder.layout.lanes), place)
        store(decoder.scaled(own, of_row, scale, zero, total), place)


@inline
def line_of_sums(
    decoded: Decoded, row_bytes: int, at: ptr, line: ptr, number: int, sums: list[list[Value]]
) -> list[list[Value]]:
    """The sums of a tile after one line of codes."""
    decoder = decoded.decoder
    type_ = decoder.code_type
    codes = [load(type_, byte_at(line, j * decoded.vector_bytes)) for j in range(PANEL_VECTORS)]
    return [
        decoder.add(byte_at(at, n // PANEL_VECTORS * row_bytes), number, codes[n % PANEL_VECTORS], own)
        for n, own in enumerate(sums)
    ]
