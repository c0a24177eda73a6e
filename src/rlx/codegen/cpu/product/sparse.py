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
from rlx.codegen.cpu.frame import KernelFrame, Slot, unflatten
from rlx.codegen.cpu.kernels import EmittedKernel
from rlx.codegen.cpu.primitives import memory_type, to_memory
from rlx.codegen.native.irtext import Int, Module
from rlx.codegen.native.irtypes import Value, constant, size_bytes, vector
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
        self.element, self.width = memory_type(dtype), frame.module.target.lanes(dtype.name)
        self.type = vector(self.element, self.width)
        self.operands = frame.operands(self.fn)
        packed = self.operands[nest.rhs.data].pointer
        self.starts = packed
        self.rows_at = self.fn.gep(packed, self.columns.rows_at, "i8")
        self.values_at = self.fn.gep(packed, self.columns.values_at, "i8")
        self.row_axes = list(range(nest.kept - 1))  # the last kept axis is the matrix's

    @property
    def tile_bytes(self) -> int:
        return self.columns.k * self.width * size_bytes(self.element)

    def emit(self) -> EmittedKernel:
        fn, width = self.fn, self.width
        sizes = [self.frame.dim(fn, self.nest.space[i]) for i in self.row_axes]
        total: Int = 1
        for d in sizes:
            total = fn.mul(total, d)
        low, high = self.frame.share(fn.ceildiv(total, width))
        base = self.frame.scratch()
        tile, sums = base, fn.gep(base, self.tile_bytes, "i8")

        def group(g: Int, _: list[Value]) -> None:
            start = fn.mul(g, width)
            last = fn.sub(total, 1)
            rows = [unflatten(fn, fn.smin(fn.add(start, i), last), sizes) for i in range(width)]
            exists = [fn.cmp("slt", fn.add(start, i), total) for i in range(width)]
            finite = self.read(rows, tile)
            fn.loop(0, self.columns.n, 1, [], lambda n, _: self.put(self.column(n, tile, finite), sums, n))
            self.write(rows, exists, sums)

        fn.loop(low, high, 1, [], group)
        return self.frame.finish(self.tile_bytes + self.columns.n * self.width * size_bytes(self.element))

    def put(self, x: Value, buffer: Value, number: Int) -> None:
        fn = self.fn
        fn.store(
            x, fn.gep(buffer, fn.mul(number, self.width), self.element), self.width * size_bytes(self.element)
        )

    def vector_at(self, buffer: Value, number: Int) -> Value:
        fn = self.fn
        place = fn.gep(buffer, fn.mul(number, self.width), self.element)
        return fn.load(self.type, place, self.width * size_bytes(self.element))

    def read(self, rows: list[list[Int]], tile: Value) -> Value:
        """The rows, lane = row, and whether all their elements are finite."""
        fn, nest = self.fn, self.nest

        def one(row: int, t: Int, mask: Value | None) -> Value:
            lane = Lane(nest.kept, t, self.width, mask)
            axes = [*rows[row], 0, t]
            return Expression(fn, self.frame.dim, self.operands, axes, lane, error=self.frame.error).vector(
                nest.lhs
            )

        turn_rows(fn, self.columns.k, self.width, one, lambda x, t: self.put(x, tile, t))
        zero = constant(self.type, 0.0)

        def check(k: Int, found: list[Value]) -> list[Value]:
            return [fn.fma(self.vector_at(tile, k), zero, found[0])]

        (found,) = fn.loop(0, self.columns.k, 1, [zero], check)
        bad = fn.any_lane(fn.is_nan(found))
        return fn.value(fn.not_(bad))

    def column(self, n: Int, tile: Value, finite: Value) -> Value:
        """One column of the product, for all rows of the group."""
        fn, zero = self.fn, constant(self.type, 0.0)
        # Weights may come from a file that changes under us: whatever they hold, no address leaves its array.
        room, last = self.columns.room, self.columns.k - 1
        start = fn.value(fn.umin(fn.load("i64", fn.gep(self.starts, n, "i64")), room))
        end = fn.value(fn.umin(fn.load("i64", fn.gep(self.starts, fn.add(n, 1), "i64")), room))

        def entry(p: Int) -> tuple[Value, Value]:
            row = fn.value(fn.umin(fn.load("i64", fn.gep(self.rows_at, p, "i64")), last))
            return row, fn.broadcast(fn.gep(self.values_at, p, self.element), self.element, self.width)

        def listed() -> list[Value]:
            def add(p: Int, total: list[Value]) -> list[Value]:
                row, value = entry(p)
                return [fn.fma(self.vector_at(tile, row), value, total[0])]

            return fn.loop(start, end, 1, [zero], add)

        def every() -> list[Value]:
            def add(k: Int, carried: list[Value]) -> list[Value]:
                p, total = carried
                row, value = entry(fn.smin(p, self.columns.room - 1))
                inside = fn.value(fn.cmp("slt", p, end), "i1")
                hit = fn.value(fn.and_(inside, fn.value(fn.cmp("eq", row, k), "i1")))
                factor = fn.select(fn.splat(hit, self.width), value, zero)
                return [
                    fn.value(fn.add(p, fn.zext(hit, "i64"))),
                    fn.fma(self.vector_at(tile, k), factor, total),
                ]

            return fn.loop(0, self.columns.k, 1, [start, zero], add)[1:]

        return fn.if_value(finite, listed, every)[0]

    def write(self, rows: list[list[Int]], exists: list[Value | bool], sums: Value) -> None:
        """Results turned back to rows, through the epilogue."""
        fn, nest, width = self.fn, self.nest, self.width
        store, slot = nest.stores[0], self.frame.outputs[0]

        def block(base: Int, mask: Value | None) -> None:
            count = min(self.columns.n, width)
            found = [self.vector_at(sums, fn.add(base, j)) for j in range(count)]
            turned = fn.transpose(found + [found[-1]] * (width - count))
            for r in range(width):
                fn.branch(exists[r], lambda r=r: one(r, base, turned[r], mask))  # type: ignore[misc]

        def one(r: int, base: Int, x: Value, mask: Value | None) -> None:
            axes = [*rows[r], base]
            lane = Lane(nest.kept - 1, base, width, mask)
            at = Expression(fn, self.frame.dim, self.operands, axes, lane, [x], error=self.frame.error)
            offset: Int = 0
            for i, step in zip(axes, store.strides, strict=True):
                offset = fn.add(offset, fn.mul(i, self.frame.dim(fn, step)))
            value = to_memory(fn, at.vector(store.body), slot.dtype)
            place = fn.gep(self.frame.output(0).pointer, offset, memory_type(slot.dtype))
            if store.strides[-1] != 1:
                steps = fn.mul(fn.iota(width), fn.splat(self.frame.dim(fn, store.strides[-1]), width, "i64"))
                fn.scatter(value, place, fn.value(steps), mask)
            elif mask is None:
                fn.store(value, place)
            else:
                fn.masked_store(value, place, mask)

        across(fn, self.columns.n, width, block)
