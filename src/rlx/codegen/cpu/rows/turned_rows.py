"""Rows whose elements are apart, while those of neighbouring rows are side by side: pixels of planar images.

Such an operand is copied to scratch some rows at a time, in squares that are transposed in registers. So each
cache line is read once, and whole, though lines may be a power of two apart and meet in few sets of a cache.
The passes over a row read its copy.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.codegen.cpu.expression import LINE_BYTES, Lane
from rlx.codegen.cpu.primitives import register_type
from rlx.codegen.cpu.rows.collapse import bodies
from rlx.codegen.cpu.rows.transposed import SquareReader, load_steps
from rlx.codegen.native.irtypes import Value, size_bytes, vector
from rlx.codegen.native.notation import inline
from rlx.codegen.native.words import (
    Index,
    Word,
    byte_at,
    ceildiv,
    gep,
    lanes,
    load,
    loop,
    masked_load,
    ptr,
    store,
    ult,
)
from rlx.kernel.nests import Nest
from rlx.kernel.scalar import Scalar
from rlx.records import dataclass


def turned_loads(nest: Nest, lanes: int) -> tuple[Scalar, ...]:
    """What a nest reads in such rows; nothing where rows, or a row, would not fill squares."""
    rank, across = len(nest.space), nest.outer - 1
    if across < 0 or nest.outer != rank - 1 or not isinstance(nest.space[-1], int):
        return ()
    if any(isinstance(d, int) and d < lanes for d in nest.space[across:]):
        return ()
    found = dict.fromkeys(e for body in bodies(nest) for e in body.walk() if e.prim == "at")
    steps = {e: load_steps(e, rank) for e in found}
    return tuple(e for e, s in steps.items() if s is not None and s[across] == 1 and s[-1] not in (0, 1))


@dataclass(frozen=True)
class TurnedRows:
    """Copies of some rows of each of some loads, in scratch."""

    reader: SquareReader
    loads: tuple[Scalar, ...]

    @staticmethod
    def of(reader: SquareReader) -> TurnedRows:
        """All of a nest, if they fit L2."""
        made = TurnedRows(reader, turned_loads(reader.nest, reader.lanes))
        return made if made.nbytes <= reader.frame.module.target.l2_bytes // 2 else TurnedRows(reader, ())

    @property
    def element_bytes(self) -> int:
        """Of the widest element."""
        return max((size_bytes(register_type(e.dtype)) for e in self.loads), default=1)

    @property
    def rows(self) -> int:
        """Rows at a time: whole cache lines."""
        return max(LINE_BYTES // self.element_bytes, self.reader.lanes)

    @property
    def extent(self) -> int:
        """Elements of a row."""
        extent = self.reader.nest.space[-1]
        return extent if isinstance(extent, int) else 0  # then nothing is copied

    @property
    def row_bytes(self) -> int:
        """A row, and the lanes after its end."""
        return self.extent * self.element_bytes + LINE_BYTES

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        return self.row_bytes * self.rows * len(self.loads)

    @inline
    def place(self, scratch: ptr, e: Scalar, row: Index, i: Value | int) -> ptr:
        """Where an element of a row is."""
        number = row + self.loads.index(e) * self.rows
        return gep(byte_at(scratch, number * self.row_bytes), i, register_type(e.dtype))

    @inline
    def read(self, scratch: ptr, e: Scalar, row: Index, lane: Lane) -> Value:
        """One vector of a row."""
        place, type_ = self.place(scratch, e, row, lane.base), vector(register_type(e.dtype), lane.width)
        return load(type_, place) if lane.mask is None else masked_load(type_, place, lane.mask)

    @inline
    def blocks(self) -> Index:
        """How often so many rows are copied."""
        return ceildiv(self.reader.sizes[self.reader.nest.outer - 1], self.rows)

    @inline
    def fill(self, scratch: ptr, outer: Sequence[Index], first: Index, count: Index) -> None:
        """Copy `count` rows from `first` on."""
        reader, extent, width = self.reader, self.extent, self.reader.lanes

        def square(e: Scalar, low: int, i: Index) -> None:
            axes = [*map(Word, outer), Word(first + low), Word(i)]

            def put(turned: Sequence[Value]) -> None:
                for r, value in enumerate(turned):
                    store(value, self.place(scratch, e, low + r, i))

            if (count >= low + width) & (extent - i >= width):
                put(reader.read(e, axes))
            else:
                rows = lanes(min(max(count - low, 0), width), width)
                put(reader.read_some(e, axes, rows, extent - i))

        for e in self.loads:
            for i in loop(0, extent, width):
                for low in range(0, self.rows, width):
                    if ult(low, count):
                        square(e, low, i)
