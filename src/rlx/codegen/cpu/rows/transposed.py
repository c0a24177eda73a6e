"""Maps that read along one axis and write along another: square blocks are transposed in registers."""

from __future__ import annotations

from functools import partial

from rlx.codegen.cpu.expression import Expression, Lane
from rlx.codegen.cpu.frame import EmittedKernel, KernelFrame
from rlx.codegen.cpu.primitives import from_memory, memory_type
from rlx.codegen.cpu.rows.collapse import bodies
from rlx.codegen.cpu.rows.nest_base import NestEmitter
from rlx.codegen.native.irtext import Int
from rlx.codegen.native.irtypes import Value, constant, vector
from rlx.ir.types import Shape
from rlx.kernel.affine import affine, to_dim
from rlx.kernel.nests import Nest
from rlx.kernel.scalar import Scalar


def load_steps(e: Scalar, rank: int) -> Shape | None:
    """Element steps of a flat load per axis, where they are sizes."""
    parts = affine(e.args[0], rank)
    steps = None if parts is None else [to_dim(c) for c in parts[0]]
    if steps is None or any(s is None for s in steps):
        return None
    return tuple(s for s in steps if s is not None)


def read_axis(nest: Nest) -> int | None:
    """The axis along which loads are contiguous where the stores' axis is not; None: plain order is fine."""
    rank = len(nest.space)
    if rank < 2 or nest.stats or any(s.strides[-1] != 1 for s in nest.stores):
        return None
    found: set[int | None] = set()
    for body in bodies(nest):
        for e in body.walk():
            if e.prim != "at":
                continue
            steps = load_steps(e, rank)
            if steps is None or steps[-1] in (0, 1):
                continue
            along = [a for a in range(rank - 1) if steps[a] == 1]
            found.add(along[0] if along else None)
    return found.pop() if len(found) == 1 else None


class TransposedNest(NestEmitter):
    """Lanes run along the last axis; loads that are contiguous along `axis` come as transposed blocks."""

    def __init__(self, frame: KernelFrame, nest: Nest, axis: int) -> None:
        super().__init__(frame, nest)
        self.axis, self.last = axis, len(nest.space) - 1
        self.turned = [
            e
            for body in bodies(nest)
            for e in body.walk()
            if e.prim == "at" and (steps := load_steps(e, len(nest.space))) and steps[-1] not in (0, 1)
        ]
        self.turned = list(dict.fromkeys(self.turned))

    def emit(self) -> EmittedKernel:
        fn, width = self.fn, self.lanes
        others = [i for i in range(self.last) if i != self.axis]
        sizes = [self.sizes[i] for i in others]
        blocks = fn.ceildiv(self.sizes[self.axis], width)
        across = fn.ceildiv(self.sizes[self.last], width)

        def unit(index: list[Int]) -> None:
            *outer, block, column = index
            axes: list[Int] = [0] * (self.last + 1)
            for i, value in zip(others, outer, strict=True):
                axes[i] = value
            axes[self.axis], axes[self.last] = fn.mul(block, width), fn.mul(column, width)
            self.square(axes)

        self.rows([*sizes, blocks, across], unit)
        return self.frame.finish()

    def square(self, axes: list[Int]) -> None:
        fn, width = self.fn, self.lanes
        rows_left = fn.sub(self.sizes[self.axis], axes[self.axis])
        columns_left = fn.sub(self.sizes[self.last], axes[self.last])
        full = fn.value(
            fn.and_(
                fn.value(fn.cmp("sge", rows_left, width), "i1"),
                fn.value(fn.cmp("sge", columns_left, width), "i1"),
            )
        )
        fn.branch(full, lambda: self.whole(axes), lambda: self.ragged(axes, rows_left, columns_left))

    def read(self, e: Scalar, axes: list[Int], rows: Value | None, columns: Int | None) -> list[Value]:
        """`width` vectors along the read axis, one per column, transposed to one per row."""
        fn, width = self.fn, self.lanes
        element = memory_type(e.dtype)
        # Halves move as integers: LLVM would convert shuffled lanes by library calls.
        type_ = vector("i16" if element in ("half", "bfloat") else element, width)
        loaded = []
        for j in range(width):
            here = [*axes[:-1], fn.add(axes[self.last], j)]
            offset = self.point(here, None)(e.args[0])
            if rows is None or columns is None:
                loaded.append(fn.load(type_, fn.gep(self.operands[e.data].pointer, offset, element)))
                continue
            # a column that does not exist reads nothing, at an address that does: suppressed faults are slow
            exists = fn.value(fn.cmp("sgt", columns, j), "i1")
            offset = fn.select(exists, offset, constant("i64", 0))
            place = fn.gep(self.operands[e.data].pointer, offset, element)
            loaded.append(fn.masked_load(type_, place, fn.select(exists, rows, constant(rows.type, False))))
        turned = [fn.bitcast(v, vector(element, width)) for v in fn.transpose(loaded)]
        return [from_memory(fn, v, e.dtype) for v in turned]

    def whole(self, axes: list[Int]) -> None:
        blocks = {e: self.read(e, axes, None, None) for e in self.turned}
        for r in range(self.lanes):
            self.store_row(axes, r, {e: b[r] for e, b in blocks.items()}, None)

    def ragged(self, axes: list[Int], rows_left: Int, columns_left: Int) -> None:
        fn = self.fn
        rows, columns = (
            fn.lanes(fn.smin(rows_left, self.lanes), self.lanes),
            fn.lanes(columns_left, self.lanes),
        )
        blocks = {e: self.read(e, axes, rows, columns_left) for e in self.turned}
        for r in range(self.lanes):
            known = {e: b[r] for e, b in blocks.items()}
            fn.branch(fn.cmp("sgt", rows_left, r), partial(self.store_row, axes, r, known, columns))

    def store_row(self, axes: list[Int], r: int, known: dict[Scalar, Value], mask: Value | None) -> None:
        here = list(axes)
        here[self.axis] = self.fn.add(axes[self.axis], r)
        at: Expression = self.point(here, Lane(self.last, here[self.last], self.lanes, mask))
        at.memo = dict(known)
        for number, store in enumerate(self.nest.stores):
            self.write(at, store, number, here, 1)
