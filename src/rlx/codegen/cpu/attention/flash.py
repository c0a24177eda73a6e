"""Attention in flash style: online softmax over blocks of keys, no matrix of scores beyond a tile.

Lanes are queries. A block of one to three vectors of queries is packed once as Q^T; for each block of keys
    S^T = K Q^T              keys are rows, read in place by broadcast
    P^T = exp2(S^T - max)    maximum and sum run down the rows: no horizontal step
    O^T = alpha O^T + V^T P^T
and O^T is transposed and divided by the sum at the end. Neither K nor V is copied. Every output has one order
of operations, set by the block of keys alone. A few queries are served one by one (`row.py`).

Operands of bf16 are multiplied in pairs (`pairs.py`) where the target can, other narrow ones are
widened block by block (`wide.py`); scores, softmax and sums are f32 in any case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from rlx.codegen.cpu.attention.block import LOG2E, Block, Scaling, narrowed, tile_rows
from rlx.codegen.cpu.attention.mask import BlockMask
from rlx.codegen.cpu.attention.pairs import PairBlock
from rlx.codegen.cpu.attention.row import FEW, Row
from rlx.codegen.cpu.attention.row_pairs import PairRow
from rlx.codegen.cpu.attention.wide import WideBlock
from rlx.codegen.cpu.frame import FIRST_OPERAND, EmittedKernel, KernelFrame, kernel, unflatten
from rlx.codegen.cpu.primitives import MEMORY
from rlx.codegen.native import vmath
from rlx.codegen.native.irtypes import Value, size_bytes, vector
from rlx.codegen.native.notation import inline, native
from rlx.codegen.native.words import (
    Int,
    Word,
    builder,
    byte_at,
    call,
    ceildiv,
    gep,
    i64,
    is_nan,
    load,
    loop,
    noalias,
    prefetch,
    ptr,
    select,
    splat,
    store,
    udiv,
)
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
    sink: Access | None = None  # a score for each head, which takes a share of the weights


@kernel
def emit_attention(frame: KernelFrame, spec: AttentionSpec) -> EmittedKernel:
    """Write the kernel: every thread takes blocks of queries of any head."""
    return Attention(frame, spec).emit()


class Attention:
    """A kernel under construction."""

    def __init__(self, frame: KernelFrame, spec: AttentionSpec) -> None:
        self.frame, self.module, self.name, self.spec = frame, frame.module, frame.name, spec
        target, dtype = frame.module.target, frame.inputs[spec.q.operand].dtype.name
        self.lanes = target.lanes("f32")
        self.type = vector("float", self.lanes)
        self.tile_rows = tile_rows(target)
        self.most = max(self.tile_rows)  # vectors of queries of one block
        self.width = self.lanes * self.most  # queries that scratch has room for
        self.element, self.o_element = MEMORY[dtype], MEMORY[frame.outputs[0].dtype.name]
        self.mask_element = "i8" if spec.mask_kind == "bool" else "float"
        in_rows = all(a.column == 1 for a in (spec.q, spec.k, spec.v))
        in_pairs = dtype == "bf16" and target.has_bf16 and in_rows
        self.scaling = Scaling.of(spec, in_pairs)
        self.block_type = PairBlock if in_pairs else Block if dtype == "f32" else WideBlock
        self.row_type = PairRow if in_pairs else Row
        rows = sum(self.block_type.parts(spec, self.width)) + BlockMask.rows(spec)
        self.scratch_floats = rows * self.width  # before the sink of the head that is computed

    def dim(self, d: Dim) -> Int:
        """A size, in the function that is being written."""
        return cast("Int", self.frame.dim(builder(), d))

    @inline
    def emit(self) -> EmittedKernel:
        spec, frame = self.spec, self.frame
        queries = self.dim(spec.queries)
        blocks = ceildiv(queries, self.width)
        batch = [self.dim(d) for d in spec.batch]
        units = blocks
        for n in batch:
            units *= n
        always = isinstance(spec.queries, int) and spec.queries <= FEW
        never = isinstance(spec.queries, int) and spec.queries > FEW
        row = None if never or not Row.serves(self) else self.row()
        scratch = ptr(frame.scratch())
        low, high = cast("tuple[Int, Int]", frame.share(units))
        for unit in loop(low, high):
            *index, block = self.unflatten(unit, [*batch, blocks])
            first = block * self.width
            count = min(queries - first, self.width)
            places = [self.base(a, index, first) for a in (spec.q, spec.k, spec.v, spec.o)]
            places.append(self.base(spec.mask, index, first) if spec.mask else ptr(0))
            if spec.sink is not None:
                own = load("float", self.base(spec.sink, index, 0))
                store(splat(own, self.lanes), gep(scratch, self.scratch_floats, "float"))
            if row is None or not always:
                self.ask(unit + blocks, high, [*batch, blocks])
            vectors = ceildiv(count, self.lanes)
            if row is not None and (always or queries <= FEW):
                self.one_by_one(row, scratch, places, first, count)
            else:
                self.in_blocks(self.most, vectors, scratch, places, first, count)
        sink = 4 * self.lanes if spec.sink is not None else 0
        return frame.finish(self.scratch_floats * 4 + sink + 64)

    @inline
    def one_by_one(self, row: str, scratch: ptr, places: list[ptr], first: Int, count: Int) -> None:
        """Few queries: call the function for one query on each."""
        spec, args = self.spec, self.frame.fn.args[0]
        q, k, v, o, mask = places
        for i in loop(count):
            own_q = gep(q, i * self.dim(spec.q.row), self.element)
            own_o = gep(o, i * self.dim(spec.o.row), self.o_element)
            own = gep(mask, i * self.dim(spec.mask.row), self.mask_element) if spec.mask else mask
            call(row, args, scratch, own_q, k, v, own_o, own, first + i)

    @inline
    def in_blocks(
        self, n: int, vectors: Int, scratch: ptr, places: list[ptr], first: Int, count: Int
    ) -> None:
        """Call the function for this number of vectors of queries, which is at most n."""
        if n == 1 or vectors == n:
            name, sizes = self.block(n)
            call(name, self.frame.fn.args[0], scratch, *places, first, count, sizes)
        else:
            self.in_blocks(n - 1, vectors, scratch, places, first, count)

    def unflatten(self, unit: Int, extents: list[Int]) -> list[Int]:
        return cast("list[Int]", unflatten(builder(), unit, extents))

    @inline
    def ask(self, unit: Int, stop: Int, extents: list[Int]) -> None:
        """Prefetch a unit's part of the operands of a later head: its queries, and an equal part of the keys
        and values. The processor does not predict short pieces of distant rows.
        """
        spec, blocks = self.spec, extents[-1]
        if unit < stop:
            *index, block = self.unflatten(unit, extents)
            for access, count, columns in (
                (spec.q, spec.queries, spec.depth),
                (spec.k, spec.keys, spec.depth),
                (spec.v, spec.keys, spec.value_depth),
            ):
                total = self.dim(count)
                low, high = (udiv(total * b, blocks) for b in (block, block + 1))
                if access.column == 1:
                    start = self.base(access, index, 0)
                    for i in loop(low, high):
                        row = gep(start, i * self.dim(access.row), self.element)
                        for byte in range(0, columns * size_bytes(self.element), 64):
                            prefetch(byte_at(row, byte), locality=2)

    @inline
    def base(self, access: Access, index: Sequence[Int], query: Int) -> ptr:
        """Pointer of an operand at a batch index; query operands also at their first query."""
        offset = self.dim(access.start)
        for i, step in zip(index, access.batch, strict=True):
            offset += i * self.dim(step)
        if any(access is own for own in (self.spec.q, self.spec.o, self.spec.mask)):
            offset += query * self.dim(access.row)
        pointer = self.frame.field(builder(), FIRST_OPERAND + access.operand, "ptr")
        element = self.element
        if access is self.spec.o:
            element = self.o_element
        elif access is self.spec.sink:
            element = "float"
        elif access is self.spec.mask:
            element = self.mask_element
        return gep(pointer, offset, element)

    def stored(self, result: Word) -> Word:
        """A vector of results as it is stored."""
        return narrowed(result, self.o_element)

    @inline
    def factor(self, total: Word, sink: Word | None = None) -> Word:
        """1 / sum of the weights. A query that sees no key has sums of 0: its result is 0, or 0 / 0.

        The weight of a sink joins the sum. Far above the largest score it is infinite, and the result 0.
        """
        one = splat(1.0, self.lanes)
        whole = total if sink is None else total + sink
        if self.spec.empty_is_zero:
            return select((total > 0.0) | is_nan(total), one / whole, 0.0)
        none = self.dim(self.spec.keys) == 0  # without keys the result is 0
        return select(none, splat(0.0, self.lanes), one / whole)

    @inline
    def share(self, total: Word, top: Word, scratch: ptr) -> Word:
        """What weighted sums are multiplied with; `top` is the largest score. A sink may be above it."""
        if self.spec.sink is None:
            return self.factor(total)
        after = self.scaling.after
        sink = load(self.type, gep(scratch, self.scratch_floats, "float")) * (LOG2E / after)
        return self.factor(total, Word(vmath.apply(builder(), "exp2", (sink - top) * after)))

    # -- one query, one block of queries

    def row(self) -> str:
        """The function for one query."""
        return _attend_row.written(f"{self.name}.row", kernel=self)

    def block(self, vectors: int) -> tuple[str, Value]:
        """The function for so many vectors of queries, and the table of sizes that it is called with."""
        found: dict[int, i64] = {}
        name = _attend_block.written(f"{self.name}.block{vectors}", kernel=self, vectors=vectors, found=found)
        return name, self.module.table(f"{name}.sizes", "i64", list(found) or [0])


@native(internal=True, noinline=True)
def _attend_row(
    args: ptr,
    scratch: noalias,
    q: ptr,
    k: ptr,
    v: ptr,
    o: ptr,
    mask: ptr,
    query: i64,
    *,
    kernel: Attention,
) -> None:
    kernel.row_type(kernel, scratch, q, k, v, o, mask, query).emit()


@native(internal=True, noinline=True)
def _attend_block(
    args: ptr,
    scratch: noalias,
    q: ptr,
    k: ptr,
    v: ptr,
    o: ptr,
    mask: ptr,
    first: i64,
    count: i64,
    sizes: ptr,
    *,
    kernel: Attention,
    vectors: int,
    found: dict[int, i64],
) -> None:
    """One block of queries. `found` gets the sizes that it reads from a table."""
    block = kernel.block_type(kernel, builder(), vectors)
    block.emit()
    found.update(block.sizes)
