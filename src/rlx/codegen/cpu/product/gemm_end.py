"""The end of a tile: what becomes of finished sums, and what a driver shares with the functions it calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.codegen.cpu.product.gemm_cut import Count
from rlx.codegen.native.irtext import Function, Int, Value, vector
from rlx.codegen.native.irtypes import size_bytes
from rlx.codegen.native.notation import inline, native
from rlx.codegen.native.words import (
    builder,
    call,
    ceildiv,
    field,
    fpext,
    fptrunc,
    gep,
    i64,
    lanes,
    load,
    loop,
    masked_store,
    ptr,
    sitofp,
    store,
    uge,
    umin,
)
from rlx.records import dataclass

Epilogue = Callable[[Function, Value, Int, Int, "Value | None", "tuple[Int, ...]"], Value]
"""epilogue(fn, sums, row, column, mask, batch) -> what to store. `sums` are the finished products of one row
and consecutive columns from `column` on; lanes off the mask (None: all are on) do not exist and must not be
loaded.
"""


class Frame:
    """Sizes that a kernel shares with its functions: known ints stay ints, others are on its stack."""

    def __init__(self, fn: Function, capacity: int) -> None:
        self._fn, self._capacity = fn, capacity
        self._slots: dict[str, int] = {}
        self._known: dict[str, int] = {}
        self.pointer = fn.alloca("i64", capacity)

    def share(self, name: str, x: Int) -> None:
        """Give `x` a name that the internal functions can read."""
        if isinstance(x, int):
            self._known[name] = x
        else:
            self.change(name, x)

    def change(self, name: str, x: Int) -> None:
        """Give a name that varies during the run its next value."""
        self._fn.store(x, self._fn.gep(self.pointer, self._slot(name), "i64"), 8)

    def read(self, fn: Function, frame: Value, name: str) -> Int:
        """The named size inside an internal function that got the frame's pointer."""
        return self._known[name] if name in self._known else fn.field(frame, self._slot(name))

    def named(self, frame: Value, *names: str) -> list[Count]:
        """The named sizes inside the internal function that is being written."""
        return [self.read(builder(), frame, name) for name in names]

    @inline
    def place(self, frame: ptr, name: str) -> ptr:
        """The named pointer inside an internal function."""
        return field(frame, self._slot(name), ptr)

    def _slot(self, name: str) -> int:
        slot = self._slots.setdefault(name, len(self._slots))
        assert slot < self._capacity
        return slot


@dataclass(frozen=True)
class TileEnd:
    """Applies the epilogue to sums and stores them. The frame holds n, c_row, the batch indices and `stage`.

    Epilogues are written into the function that has the sums, or once into a function that finishes a whole
    tile left in the stage, which is still in L1.
    """

    name: str
    accumulator: str
    lanes: int
    c_element: str
    frame: Frame
    epilogue: Epilogue | None
    batch_axes: int
    whole_vectors: bool = False  # whether n is known to be a multiple of the lanes

    def result(self, frame: ptr, sums: Value, row: Count, column: Count, mask: Value | None) -> Value:
        """One vector of sums as it is stored."""
        if self.epilogue is not None:
            batch = self.frame.named(frame, *(f"batch{axis}" for axis in range(self.batch_axes)))
            sums = self.epilogue(builder(), sums, row, column, mask, tuple(batch))
        if sums.element == self.c_element:
            return sums
        if sums.element == "i32":
            sums = sitofp(sums, "float")
        narrow = size_bytes(sums.type) > size_bytes(self.c_element)
        return fptrunc(sums, self.c_element) if narrow else fpext(sums, self.c_element)

    @inline
    def through_stage(
        self, args: ptr, frame: ptr, sums: Sequence[Value], c: ptr, row: i64, column: i64, rows: int
    ) -> None:
        """Finish a tile of sums, in row order, whose first element of C is (row, column) at `c`."""
        stage = self.frame.place(frame, "stage")
        for n, total in enumerate(sums):
            store(total, gep(stage, n * self.lanes, self.accumulator))
        self.finish(args, frame, c, row, column, rows, len(sums) // rows)

    @inline
    def finish(self, args: ptr, frame: ptr, c: ptr, row: i64, column: i64, rows: Count, vectors: int) -> None:
        """Finish a tile of sums that is in the stage."""
        finish = finish_tile.written(f"{self.name}.finish", end=self)
        call(finish, args, frame, c, row, column, rows, vectors)


@native(internal=True, noinline=True)
def finish_tile(
    args: ptr, frame: ptr, c: ptr, row: i64, column: i64, rows: i64, vectors: i64, *, end: TileEnd
) -> None:
    """Finish a tile of sums in the stage; columns past n are left alone."""
    width, sums_type = end.lanes, vector(end.accumulator, end.lanes)
    stage = end.frame.place(frame, "stage")
    n, c_row = end.frame.named(frame, "n", "c_row")

    def finish(total: Value, place: ptr, i: Count, at: Count, mask: Value | None) -> None:
        result = end.result(frame, total, row + i, at, mask)
        if mask is None:
            store(result, place)
        else:
            masked_store(result, place, mask)

    existing = umin(vectors, ceildiv(n - column, width))
    for i in loop(rows):
        sums = gep(stage, i * vectors * width, end.accumulator)
        line = gep(c, i * c_row, end.c_element)
        for j in loop(existing):
            first = j * width
            total = load(sums_type, gep(sums, first, end.accumulator))
            place = gep(line, first, end.c_element)
            at = column + first
            left = n - at
            if end.whole_vectors or (isinstance(n, int) and n % width == 0):
                finish(total, place, i, at, None)
            elif builder().module.target.has_avx512:
                finish(total, place, i, at, lanes(left, width))
            elif uge(left, width):
                finish(total, place, i, at, None)
            else:
                finish(total, place, i, at, lanes(left, width))
