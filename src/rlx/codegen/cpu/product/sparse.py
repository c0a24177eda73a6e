"""Products with a sparse constant matrix: lanes are rows of the other operand, each column of the matrix a
short list.

A group of rows is turned so that lanes are rows; then every column adds up its few elements, and the results
are turned back. A zero of the matrix is not multiplied, except where a row holds an infinity or NaN: then all
are, since zero times that is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.codegen.cpu.expression import Expression, Lane
from rlx.codegen.cpu.fft.rows import across, turn_rows
from rlx.codegen.cpu.frame import KernelFrame, Slot, product, unflatten
from rlx.codegen.cpu.kernels import EmittedKernel
from rlx.codegen.cpu.primitives import memory_type, to_memory
from rlx.codegen.cpu.product.gemm_cut import Count
from rlx.codegen.native.irtext import Module
from rlx.codegen.native.irtypes import Value, constant, size_bytes, vector
from rlx.codegen.native.notation import inline, write
from rlx.codegen.native.words import (
    Word,
    any_lane,
    broadcast,
    byte_at,
    ceildiv,
    fma,
    gep,
    i64,
    iota,
    is_nan,
    load,
    loop,
    masked_store,
    ptr,
    scatter,
    select,
    splat,
    store,
    transpose,
    umin,
    zext,
)
from rlx.errors import UnsupportedError
from rlx.kernel.nests import ContractNest
from rlx.ops.storage.sparse import columns_of


def emit_sparse(
    module: Module, name: str, nest: ContractNest, inputs: Sequence[Slot], outputs: Sequence[Slot]
) -> EmittedKernel:
    """Write the kernel of a contraction whose right operand is `unpack_sparse`."""
    if nest.form.batch or len(nest.space) - nest.kept != 1 or len(nest.stores) != 1:
        raise UnsupportedError("a product with a sparse matrix has no batch and sums over one axis")
    return _SparseKernel(KernelFrame(module, name, inputs, outputs), nest).emit()


class _SparseKernel:
    def __init__(self, frame: KernelFrame, nest: ContractNest) -> None:
        assert nest.rhs_layout is not None
        self.frame, self.fn, self.nest = frame, frame.fn, nest
        self.columns = columns_of(**dict(nest.rhs_layout[1]))
        dtype = nest.form.dtype
        target = frame.module.target
        # Engines read a constant, and an element of the matrix, once for two vectors.
        self.element, self.width = memory_type(dtype), target.lanes(dtype.name) * (2 if target.web else 1)
        self.type = vector(self.element, self.width)
        self.align = self.width * size_bytes(self.element)
        self.operands = frame.operands(self.fn)

    @property
    def tile_bytes(self) -> int:
        return self.columns.k * self.width * size_bytes(self.element)

    def emit(self) -> EmittedKernel:
        """Write the kernel."""
        write(self.fn, self.kernel)
        return self.frame.finish(self.tile_bytes + self.columns.n * self.width * size_bytes(self.element))

    @inline
    def kernel(self) -> None:
        """Threads share the groups of rows."""
        width, columns = self.width, self.columns
        self.starts = ptr(self.operands[self.nest.rhs.data].pointer)
        self.rows_at = byte_at(self.starts, columns.rows_at)
        self.values_at = byte_at(self.starts, columns.values_at)
        sizes = self.frame.sizes(self.nest.space[: self.nest.kept - 1])  # the last kept axis is the matrix's
        total = product(sizes)
        low, high = self.frame.share(ceildiv(total, width))
        tile = ptr(self.frame.scratch())
        sums = byte_at(tile, self.tile_bytes)
        for g in loop(low, high):
            start = g * width
            last = total - 1
            rows = [unflatten(self.fn, min(start + i, last), sizes) for i in range(width)]
            exists = [start + i < total for i in range(width)]
            is_finite = self.read(rows, tile)
            for n in loop(columns.n):
                self.put(self.column(n, tile, is_finite), sums, n)
            self.write(rows, exists, sums)

    @inline
    def put(self, x: Value, buffer: ptr, number: Count) -> None:
        store(x, gep(buffer, number * self.width, self.element), self.align)

    @inline
    def vector_at(self, buffer: ptr, number: Count) -> Word:
        return load(self.type, gep(buffer, number * self.width, self.element), self.align)

    @inline
    def read(self, rows: list[list[Count]], tile: ptr) -> bool:
        """Put the rows into the tile, lane = row; whether all their elements are finite."""
        nest = self.nest

        def one(row: int, t: Count, mask: Value | None) -> Value:
            return self.at([*rows[row], 0, t], Lane(nest.kept, t, self.width, mask)).vector(nest.lhs)

        turn_rows(self.columns.k, self.width, one, lambda x, t: self.put(x, tile, t))
        zero = constant(self.type, 0.0)
        found: Value = zero
        for k in loop(self.columns.k):
            found = fma(self.vector_at(tile, k), zero, found)
        return not any_lane(is_nan(found))

    @inline
    def column(self, n: Count, tile: ptr, is_finite: bool) -> Value:
        """One column of the product, for all rows of the group."""
        zero = constant(self.type, 0.0)
        # Weights may come from a file that changes under us: whatever they hold, no address leaves its array.
        room, last = self.columns.room, self.columns.k - 1
        start = umin(self.starts[n], room)
        end = umin(self.starts[n + 1], room)

        def entry(p: Count) -> tuple[i64, Word]:
            """Row and value of a stored element."""
            row = umin(self.rows_at[p], last)
            return row, broadcast(gep(self.values_at, p, self.element), self.element, self.width)

        following, total = start, Word(zero)
        if is_finite:  # what is stored
            for p in loop(start, end):
                row, value = entry(p)
                total = fma(self.vector_at(tile, row), value, total)
        else:  # every row, whether it is the one that is stored next or not
            for k in loop(self.columns.k):
                row, value = entry(min(following, room - 1))
                hit = (following < end) & (row == k)
                chosen = select(splat(hit, self.width), value, zero)
                following += zext(hit, i64)
                total = fma(self.vector_at(tile, k), chosen, total)
        return total

    def at(self, axes: list[Count], lane: Lane, sums: Sequence[Value] = ()) -> Expression:
        """Expressions over the operands."""
        return Expression(
            self.fn, self.frame.dim, self.operands, axes, lane, list(sums), error=self.frame.error
        )

    @inline
    def write(self, rows: list[list[Count]], exists: list[bool], sums: ptr) -> None:
        """Results turned back to rows, through the epilogue."""
        f, nest, width = self.fn, self.nest, self.width
        wanted, slot = nest.stores[0], self.frame.outputs[0]

        def block(base: Count, mask: Value | None) -> None:
            count = min(self.columns.n, width)
            found: list[Value] = [self.vector_at(sums, base + j) for j in range(count)]
            turned = transpose(found + [found[-1]] * (width - count))
            for r in range(width):
                if exists[r]:
                    one(rows[r], base, turned[r], mask)

        def one(row: list[Count], base: Count, x: Value, mask: Value | None) -> None:
            axes = [*row, base]
            at = self.at(axes, Lane(nest.kept - 1, base, width, mask), [x])
            offset = 0
            for i, step in zip(axes, wanted.strides, strict=True):
                offset += i * self.frame.dim(f, step)
            value = to_memory(f, at.vector(wanted.body), slot.dtype)
            place = gep(self.frame.result(0), offset, memory_type(slot.dtype))
            if wanted.strides[-1] != 1:
                apart = splat(self.frame.dim(f, wanted.strides[-1]), width, "i64")
                scatter(value, place, iota(width) * apart, mask)
            elif mask is None:
                store(value, place)
            else:
                masked_store(value, place, mask)

        across(self.columns.n, width, block)
