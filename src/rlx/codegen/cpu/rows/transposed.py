"""Squares that are read along one axis and written along another: they are transposed in registers."""

from __future__ import annotations

from rlx.codegen.cpu.expression import Lane
from rlx.codegen.cpu.frame import EmittedKernel, KernelFrame
from rlx.codegen.cpu.primitives import from_memory, memory_type
from rlx.codegen.cpu.rows.collapse import bodies
from rlx.codegen.cpu.rows.nest_base import NestEmitter
from rlx.codegen.native.irtypes import Value, vector
from rlx.codegen.native.notation import inline
from rlx.codegen.native.words import (
    Index,
    Word,
    bitcast,
    ceildiv,
    gep,
    i64,
    lanes,
    load,
    loop,
    masked_load,
    select,
    transpose,
)
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


class SquareReader(NestEmitter):
    """Squares of lanes that are read along one axis, and turned to run along the last one."""

    @inline
    def read(self, e: Scalar, axes: list[Word]) -> list[Value]:
        """`width` vectors along the read axis, one per column, transposed to one per row."""
        loaded = []
        for j in range(self.lanes):
            place = gep(self.operands[e.data].pointer, self.offset(e, axes, j), memory_type(e.dtype))
            loaded.append(load(self.moved_type(e), place))
        return self.turn(e, loaded)

    @inline
    def read_some(self, e: Scalar, axes: list[Word], rows: Value, columns: Index) -> list[Value]:
        """The same where only `columns` columns exist, and of them the rows of a mask."""
        loaded = []
        for j in range(self.lanes):
            # a column that does not exist has a valid address and an empty mask: suppressed faults are slow
            offset, exists = self.offset(e, axes, j), columns > j
            offset = select(exists, offset, 0)
            place = gep(self.operands[e.data].pointer, offset, memory_type(e.dtype))
            loaded.append(masked_load(self.moved_type(e), place, select(exists, rows, False)))
        return self.turn(e, loaded)

    @inline
    def offset(self, e: Scalar, axes: list[Word], column: int) -> i64:
        """Where in its operand the first element of a column is."""
        return i64(self.point([*axes[:-1], axes[-1] + column], None)(e.args[0]))

    def moved_type(self, e: Scalar) -> str:
        """How a vector is moved: halves as integers. LLVM would convert shuffled lanes by library calls."""
        element = memory_type(e.dtype)
        return vector("i16" if element in ("half", "bfloat") else element, self.lanes)

    def turn(self, e: Scalar, columns: list[Word]) -> list[Value]:
        """Vectors of columns as vectors of rows, in registers."""
        type_ = vector(memory_type(e.dtype), self.lanes)
        return [from_memory(self.fn, v, e.dtype) for v in [bitcast(v, type_) for v in transpose(columns)]]


class TransposedNest(SquareReader):
    """A map. Lanes run along the last axis; loads that are contiguous along `axis` come transposed."""

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

    @inline
    def emit(self) -> EmittedKernel:
        others = [i for i in range(self.last) if i != self.axis]
        squares = [ceildiv(self.sizes[i], self.lanes) for i in (self.axis, self.last)]
        space = [*(self.sizes[i] for i in others), *squares]
        low, high = self.share(space)
        for r in loop(low, high):
            *outer, block, column = self.indices(r, space)
            corner = {self.axis: block * self.lanes, self.last: column * self.lanes}
            corner = {**corner, **dict(zip(others, outer, strict=True))}
            self.square([corner[i] for i in range(self.last + 1)])
        return self.frame.finish()

    @inline
    def square(self, axes: list[Word]) -> None:
        rows_left = self.sizes[self.axis] - axes[self.axis]
        columns_left = self.sizes[self.last] - axes[self.last]
        if (rows_left >= self.lanes) & (columns_left >= self.lanes):
            self.whole(axes)
        else:
            self.ragged(axes, rows_left, columns_left)

    def whole(self, axes: list[Word]) -> None:
        blocks = {e: self.read(e, axes) for e in self.turned}
        for r in range(self.lanes):
            self.store_row(axes, r, {e: b[r] for e, b in blocks.items()}, None)

    @inline
    def ragged(self, axes: list[Word], rows_left: Index, columns_left: Index) -> None:
        rows, columns = lanes(min(rows_left, self.lanes), self.lanes), lanes(columns_left, self.lanes)
        blocks = {e: self.read_some(e, axes, rows, columns_left) for e in self.turned}
        for r in range(self.lanes):
            if rows_left > r:
                self.store_row(axes, r, {e: b[r] for e, b in blocks.items()}, columns)

    @inline
    def store_row(self, axes: list[Word], r: int, known: dict[Scalar, Value], mask: Value | None) -> None:
        here = [a + r if number == self.axis else a for number, a in enumerate(axes)]
        at = self.point(here, Lane(self.last, here[self.last], self.lanes, mask))
        at.memo = dict(known)
        for number, output in enumerate(self.nest.stores):
            self.write(at, output, number, here, 1)
