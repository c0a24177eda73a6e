"""Attention in flash style: online softmax over blocks of keys, no matrix of scores beyond a tile.

Lanes are queries. A block of one to three vectors of queries is packed once as Q^T; for each block of keys
    S^T = K Q^T              keys are rows, read in place by broadcast
    P^T = exp2(S^T - max)    maximum and sum run down the rows: no horizontal step
    O^T = alpha O^T + V^T P^T
and O^T is transposed and divided by the sum at the end. Neither K nor V is copied. Every output has one order
of operations, set by the block of keys alone. A few queries are served one by one (`attention_row.py`).

Operands of bf16 are multiplied in pairs (`attention_pairs.py`) where the target can, other narrow ones are
widened block by block (`attention_wide.py`); scores, softmax and sums are f32 in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.codegen.cpu.attention.block import TILE_ROWS, Block, narrowed
from rlx.codegen.cpu.attention.mask import BlockMask
from rlx.codegen.cpu.attention.pairs import PairBlock
from rlx.codegen.cpu.attention.row import FEW, row_function
from rlx.codegen.cpu.attention.wide import WideBlock
from rlx.codegen.cpu.frame import FIRST_OPERAND, ArgumentTable, EmittedKernel, Slot, unflatten
from rlx.codegen.cpu.kernels import KERNEL_ARGS
from rlx.codegen.cpu.primitives import MEMORY
from rlx.codegen.native.irtext import Function, Int, Module
from rlx.codegen.native.irtypes import Value, constant, size_bytes, vector
from rlx.ir.dim import Dim
from rlx.records import dataclass


@dataclass(frozen=True)
class Access:
    """Element steps of an operand: per batch axis (heads included), per row, and along the feature axis."""

    operand: int
    batch: tuple[Dim, ...]
    row: Dim
    column: Dim = 1
    start: Dim = 0


@dataclass(frozen=True)
class AttentionSpec:
    """softmax(q k^T * scale + mask) v over batch axes; `mask` is None, "bool" (what may be seen) or "add"."""

    batch: tuple[Dim, ...]
    queries: Dim
    keys: Dim
    depth: int
    value_depth: int
    scale: float
    q: Access
    k: Access
    v: Access
    o: Access
    mask: Access | None = None  # row: step per query, column: step per key
    mask_kind: str = ""
    causal: bool = False
    offset: Dim = 0  # key position of query 0
    left: int = -1  # keys further back than this are hidden; -1: none
    right: int = -1
    empty_is_zero: bool = True  # the result of a query that sees none of many keys; else NaN


def emit_attention(
    module: Module, name: str, spec: AttentionSpec, inputs: Sequence[Slot], outputs: Sequence[Slot]
) -> EmittedKernel:
    """Write the kernel: every thread takes blocks of queries of any head."""
    return Attention(module, name, spec, inputs, outputs).emit()


class Attention:
    """A kernel under construction."""

    def __init__(
        self, module: Module, name: str, spec: AttentionSpec, inputs: Sequence[Slot], outputs: Sequence[Slot]
    ) -> None:
        self.module, self.name, self.spec = module, name, spec
        self.table = ArgumentTable(inputs, outputs)
        self.lanes = module.target.lanes("f32")
        self.type = vector("float", self.lanes)
        self.tile_rows = TILE_ROWS[module.target.registers]
        self.most = max(self.tile_rows)  # vectors of queries of one block
        self.width = self.lanes * self.most  # queries that scratch has room for
        dtype = inputs[spec.q.operand].dtype.name
        self.element, self.o_element = MEMORY[dtype], MEMORY[outputs[0].dtype.name]
        self.mask_element = "i8" if spec.mask_kind == "bool" else "float"
        self.block_type: type[Block] = Block if dtype == "f32" else WideBlock
        if (
            dtype == "bf16"
            and module.target.has_bf16
            and all(a.column == 1 for a in (spec.q, spec.k, spec.v))
        ):
            self.block_type = PairBlock

    def emit(self) -> EmittedKernel:
        spec, table = self.spec, self.table
        fn = self.module.function(self.name, KERNEL_ARGS)
        dim = lambda d: table.dim(fn, d)  # noqa: E731
        queries = dim(spec.queries)
        blocks = fn.ceildiv(queries, self.width)
        batch = [dim(d) for d in spec.batch]
        units: Int = blocks
        for n in batch:
            units = fn.mul(units, n)
        args, thread, threads, _ = fn.args
        always = isinstance(spec.queries, int) and spec.queries <= FEW
        never = isinstance(spec.queries, int) and spec.queries > FEW
        row = None if never else row_function(self)
        scratch = fn.gep(table.field(fn, 1, "ptr"), fn.mul(thread, table.field(fn, 2)), "i8")
        low = fn.udiv(fn.mul(units, thread), threads)
        high = fn.udiv(fn.mul(units, fn.add(thread, 1)), threads)

        def unit(u: Int, _: list[Value]) -> None:
            *index, block = unflatten(fn, u, [*batch, blocks])
            first = fn.mul(block, self.width)
            count = fn.smin(fn.sub(queries, first), self.width)
            places = [self.base(fn, a, index, first, dim) for a in (spec.q, spec.k, spec.v, spec.o)]
            mask = self.base(fn, spec.mask, index, first, dim) if spec.mask else constant("ptr", 0)
            if row is None or not always:
                self.ask(fn, fn.add(u, blocks), high, [*batch, blocks], dim)
            vectors = fn.ceildiv(count, self.lanes)

            def one(i: Int, _: list[Value]) -> None:
                q, k, v, o = places
                q = fn.gep(q, fn.mul(i, dim(spec.q.row)), self.element)
                o = fn.gep(o, fn.mul(i, dim(spec.o.row)), self.o_element)
                own = fn.gep(mask, fn.mul(i, dim(spec.mask.row)), self.mask_element) if spec.mask else mask
                fn.call(row or "", [args, scratch, q, k, v, o, own, fn.value(fn.add(first, i))])

            def call(n: int) -> None:
                def go() -> None:
                    name, sizes = self.block(n)
                    fn.call(name, [args, scratch, *places, mask, fn.value(first), fn.value(count), sizes])

                if n == 1:
                    go()
                else:
                    fn.branch(fn.cmp("eq", vectors, n), go, lambda: call(n - 1))

            if row is None:
                call(self.most)
            elif always:
                fn.loop(0, count, 1, [], one)
            else:
                few = fn.cmp("sle", queries, FEW)
                fn.branch(few, lambda: fn.loop(0, count, 1, [], one), lambda: call(self.most))

        fn.loop(low, high, 1, [], unit)
        rows = sum(self.block_type.parts(spec, self.width)) + BlockMask.rows(spec)
        return EmittedKernel(self.name, table.dims, rows * self.width * 4 + 64)

    def ask(self, fn: Function, unit: Int, stop: Int, extents: list[Int], dim: Callable[[Dim], Int]) -> None:
        """Have a unit's part of the operands of a later head on its way: its queries, and as large a part of
        the keys and values as it is of the queries. Short pieces of far rows are nothing that a processor
        sees coming.
        """
        spec, blocks = self.spec, extents[-1]

        def rows(access: Access, columns: int, index: Sequence[Int], first: Int, last: Int) -> None:
            start = self.base(fn, access, index, 0, dim)

            def row(i: Int, _: list[Value]) -> None:
                place = fn.gep(start, fn.mul(i, dim(access.row)), self.element)
                for byte in range(0, columns * size_bytes(self.element), 64):
                    fn.prefetch(fn.gep(place, byte, "i8"), locality=2)

            fn.loop(first, last, 1, [], row)

        def all_operands() -> None:
            *index, block = unflatten(fn, unit, extents)
            for access, count, columns in (
                (spec.q, spec.queries, spec.depth),
                (spec.k, spec.keys, spec.depth),
                (spec.v, spec.keys, spec.value_depth),
            ):
                total = dim(count)
                low, high = (fn.udiv(fn.mul(total, b), blocks) for b in (block, fn.add(block, 1)))
                if access.column == 1:
                    rows(access, columns, index, low, high)

        fn.branch(fn.cmp("slt", unit, stop), all_operands)

    def base(
        self, fn: Function, access: Access, index: Sequence[Int], query: Int, dim: Callable[[Dim], Int]
    ) -> Value:
        """Pointer of an operand at a batch index; query operands also at their first query."""
        number = access.operand
        offset = dim(access.start)
        for i, step in zip(index, access.batch, strict=True):
            offset = fn.add(offset, fn.mul(i, dim(step)))
        if any(access is own for own in (self.spec.q, self.spec.o, self.spec.mask)):
            offset = fn.add(offset, fn.mul(query, dim(access.row)))
        pointer = self.table.field(fn, FIRST_OPERAND + number, "ptr")
        element = self.element
        if access is self.spec.o:
            element = self.o_element
        elif access is self.spec.mask:
            element = self.mask_element
        return fn.gep(pointer, offset, element)

    def stored(self, fn: Function, result: Value) -> Value:
        """A vector of results as it is stored."""
        return narrowed(fn, result, self.o_element)

    def factor(self, fn: Function, total: Value) -> Value:
        """1 / sum of the weights. A query that sees no key has sums of 0: its result is 0, or 0 / 0."""
        one, zero = constant(self.type, 1.0), constant(self.type, 0.0)
        if self.spec.empty_is_zero:
            seen = fn.value(fn.or_(fn.fcmp("ogt", total, 0.0), fn.is_nan(total)))
            return fn.select(seen, fn.fdiv(one, total), zero)
        none = fn.cmp("eq", self.table.dim(fn, self.spec.keys), 0)  # a sum over no keys is 0 all the same
        return fn.select(none, zero, fn.fdiv(one, total))

    # -- one block of queries

    def block(self, vectors: int) -> tuple[str, Value]:
        """The function for so many vectors of queries, and the table of sizes that it is called with."""
        params = [
            ("ptr", "args"),
            ("ptr noalias", "scratch"),
            *(("ptr", name) for name in ("q", "k", "v", "o", "mask")),
            ("i64", "first"),
            ("i64", "count"),
            ("ptr", "sizes"),
        ]
        name = f"{self.name}.block{vectors}"
        fn = self.module.function(name, params, internal=True, noinline=True)
        block = self.block_type(self, fn, vectors)
        block.emit()
        sizes = self.module.table(f"{name}.sizes", "i64", list(block.sizes) or [0])
        return name, sizes
