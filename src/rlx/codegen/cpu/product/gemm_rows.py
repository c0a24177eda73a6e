"""Rows of A that a matmul computes itself: its prologue, evaluated a block of rows at a time into scratch.

A block holds as many rows as fit half of L2 and meets all panels of B before the next one is computed, so
that each element is computed once per thread that needs its row. Rows follow each other with a gap,
because rows at a distance of a power of two would share cache sets.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.codegen.cpu.product.gemm_cut import Count
from rlx.codegen.cpu.product.gemm_end import Frame
from rlx.codegen.cpu.product.microkernel import Kind
from rlx.codegen.native.irtext import Function, Int, Module, Value, constant, vector
from rlx.codegen.native.irtypes import size_bytes
from rlx.codegen.native.notation import inline, native
from rlx.codegen.native.words import (
    Word,
    bitcast,
    builder,
    byte_at,
    call,
    ceildiv,
    gep,
    i32,
    i64,
    lanes,
    loop,
    ptr,
    reduce_add,
    round_up,
    select,
    sext,
    store,
    udiv,
    uge,
    ule,
)
from rlx.records import dataclass

_GAP = 16  # elements between rows
_LEAST_TILES = 4  # row tiles per thread from which threads share rows and each computes its own
_UNEVEN = 8  # one part in so many of the work may be waited for, where rows are shared


@dataclass(frozen=True)
class Prologue:
    """How elements of A are computed.

    `row(fn, row, batch)` prepares a row and gives `at(k, mask)`: `lanes` elements from k on, as they are
    stored; lanes off the mask (None: all are on) do not exist and must not be loaded.
    """

    lanes: int
    row: Callable[[Function, Int, tuple[Int, ...]], Callable[[Int, Value | None], Value]]


def row_stride(k: Count, unit: int = 1) -> Count:
    """Elements from one row in scratch to the next; k may be symbolic. A whole vector may be stored at the
    end of a row. Rows that are padded to cache lines, of `unit` elements, are an odd number of these apart.
    """
    if unit > 1:
        return (-(-k // unit) | 1) * unit
    return -(-k // _GAP) * _GAP + _GAP if isinstance(k, int) else k + 2 * _GAP


def row_sum_at(k: int) -> int:
    """First byte, in a row of bytes in scratch, of its sum as i32, for kinds that count rows."""
    return row_stride(k) - _GAP


@dataclass(frozen=True)
class ComputedRows:
    """The rows in scratch, and the function that computes them."""

    module: Module
    name: str
    kind: Kind
    prologue: Prologue
    frame: Frame
    batch_axes: int
    k: object
    height: int  # of a tile
    unit: int = 1  # elements of a cache line, where rows are padded to whole ones with zeros

    @property
    def stride(self) -> Count:
        """Elements from one row to the next."""
        return row_stride(self.k, self.unit)

    @property
    def tiles(self) -> int:
        """Row tiles of a block."""
        if not isinstance(self.k, int):
            return 4
        tile = self.height * self.stride * size_bytes(self.kind.row_element)
        return max(1, min(16, self.module.target.l2_bytes // 2 // tile))

    @property
    def scratch_bytes(self) -> Count:
        """Room for a block, in bytes."""
        return self.stride * (self.tiles * self.height * size_bytes(self.kind.row_element))

    @inline
    def compute(self, args: ptr, to: ptr, row: Count, rows: Count, k: Count, depth: Count) -> None:
        """Compute elements k .. k + depth of some rows of A, in the kernel itself."""
        call(
            compute_rows.written(f"{self.name}.rows", rows_of_a=self),
            args,
            self.frame.pointer,
            to,
            row,
            rows,
            k,
            depth,
        )


@native(internal=True, noinline=True)
def compute_rows(
    args: ptr, frame: ptr, to: ptr, row: i64, rows: i64, k: i64, depth: i64, *, rows_of_a: ComputedRows
) -> None:
    """Write `rows` rows of A from `row` on to scratch, as tiles read them."""
    kind, width = rows_of_a.kind, rows_of_a.prologue.lanes
    stride, *batch = rows_of_a.frame.named(
        frame, "a_row", *(f"batch{n}" for n in range(rows_of_a.batch_axes))
    )
    for i in loop(rows):
        at = rows_of_a.prologue.row(builder(), row + i, tuple(batch))
        there = gep(to, i * stride, kind.row_element)
        whole = udiv(depth, width) * width
        total = Word(constant(vector("i32", width), 0))
        for j in loop(0, whole, width):
            x = kind.prepared(builder(), at(k + j, None))
            store(x, gep(there, j, kind.row_element))
            if kind.counts_rows:
                total += sext(x, i32)
        left = depth - whole
        if left != 0:
            mask = lanes(left, width)
            x = kind.prepared(builder(), at(k + whole, mask))
            if rows_of_a.unit > 1:
                x = select(mask, bitcast(x, vector(kind.moved, width)), 0)
            store(x, gep(there, whole, kind.row_element))
            if kind.counts_rows:
                total += select(mask, sext(x, i32), 0)
        if rows_of_a.unit > 1:
            zeros = constant(vector(kind.moved, width), 0)
            for j in loop(round_up(depth, width), round_up(depth, rows_of_a.unit), width):
                store(zeros, gep(there, j, kind.row_element))
        if kind.counts_rows:
            assert isinstance(rows_of_a.k, int)
            store(reduce_add(total), byte_at(there, row_sum_at(rows_of_a.k)), 1)


@inline
def share_rows(tiles: Count, threads: Count) -> bool:
    """Whether threads share the row tiles: each has enough of them, and all have about as many."""
    longest = ceildiv(tiles, threads) * threads
    even = ule((longest - tiles) * _UNEVEN, tiles)
    enough = uge(tiles, threads * _LEAST_TILES)
    return even & enough


__all__ = ["ComputedRows", "Prologue", "row_stride", "row_sum_at", "share_rows"]
