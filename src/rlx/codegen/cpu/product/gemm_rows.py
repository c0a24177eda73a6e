"""Rows of A that a matmul computes itself: its prologue, evaluated a block of rows at a time into scratch.

A block holds as many rows as fit half of L2 and meets all panels of B before the next one is computed, so
that each element is computed once per thread that needs its row. Rows follow each other with a gap,
because rows at a distance of a power of two would share cache sets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlx.codegen.cpu.product.gemm_cut import both
from rlx.codegen.cpu.product.gemm_end import Frame
from rlx.codegen.cpu.product.microkernel import Kind
from rlx.codegen.native.irtext import Bool, Function, Int, Module, Value
from rlx.codegen.native.irtypes import size_bytes
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


def row_stride(k: Any) -> Any:
    """Elements from one row in scratch to the next; k may be symbolic. A whole vector may be stored at the
    end of a row.
    """
    return -(-k // _GAP) * _GAP + _GAP if isinstance(k, int) else k + 2 * _GAP


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

    @property
    def tiles(self) -> int:
        """Row tiles of a block."""
        if not isinstance(self.k, int):
            return 4
        tile = self.height * row_stride(self.k) * size_bytes(self.kind.row_element)
        return max(1, min(16, self.module.target.l2_bytes // 2 // tile))

    @property
    def scratch_bytes(self) -> Any:
        """Room for a block, in bytes."""
        return row_stride(self.k) * (self.tiles * self.height * size_bytes(self.kind.row_element))

    def compute(self, fn: Function, to: Value, row: Int, rows: Int, k: Int, depth: Int) -> None:
        """Compute elements k .. k + depth of some rows of A; `fn` is the kernel itself."""
        fn.call(self._function(), [fn.args[0], self.frame.pointer, to, row, rows, k, depth])

    def _function(self) -> str:
        name = f"{self.name}.rows"
        if self.module.defines(name):
            return name
        words = ("row", "rows", "k", "depth")
        params = [("ptr", "args"), ("ptr", "frame"), ("ptr", "to"), *(("i64", w) for w in words)]
        fn = self.module.function(name, params, internal=True, noinline=True)
        _, frame, to, row, rows, k, depth = fn.args
        stride = self.frame.read(fn, frame, "a_row")
        batch = tuple(self.frame.read(fn, frame, f"batch{axis}") for axis in range(self.batch_axes))
        lanes = self.prologue.lanes

        def one(i: Int, _: Sequence[Value]) -> None:
            at = self.prologue.row(fn, fn.add(row, i), batch)
            there = fn.gep(to, fn.mul(i, stride), self.kind.row_element)
            whole = fn.mul(fn.udiv(depth, lanes), lanes)

            def put(j: Int, mask: Value | None) -> None:
                ready = self.kind.prepared(fn, at(fn.add(k, j), mask))
                fn.store(ready, fn.gep(there, j, self.kind.row_element))

            fn.loop(0, whole, lanes, [], lambda j, _: put(j, None))
            left = fn.sub(depth, whole)
            fn.branch(fn.cmp("ne", left, 0), lambda: put(whole, fn.lanes(left, lanes)))

        fn.loop(0, rows, 1, [], one)
        return name


def share_rows(fn: Function, tiles: Int, threads: Int) -> Bool:
    """Whether threads share the row tiles: each has enough of them, and all have about as many."""
    longest = fn.mul(fn.ceildiv(tiles, threads), threads)
    even = fn.cmp("ule", fn.mul(fn.sub(longest, tiles), _UNEVEN), tiles)
    enough = fn.cmp("uge", tiles, fn.mul(threads, _LEAST_TILES))
    return both(fn, even, enough)


__all__ = ["ComputedRows", "Prologue", "row_stride", "share_rows"]
