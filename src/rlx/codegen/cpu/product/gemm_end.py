"""The end of a tile: what becomes of finished sums, and what a driver shares with the functions it calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.codegen.native.irtext import Function, Int, Module, Value, vector
from rlx.codegen.native.irtypes import size_bytes
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

    def read_pointer(self, fn: Function, frame: Value, name: str) -> Value:
        return fn.field(frame, self._slot(name), "ptr")

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

    module: Module
    name: str
    accumulator: str
    lanes: int
    c_element: str
    frame: Frame
    epilogue: Epilogue | None
    batch_axes: int

    def result(
        self, fn: Function, frame: Value, sums: Value, row: Int, column: Int, mask: Value | None
    ) -> Value:
        """One vector of sums as it is stored."""
        if self.epilogue is not None:
            batch = tuple(self.frame.read(fn, frame, f"batch{axis}") for axis in range(self.batch_axes))
            sums = self.epilogue(fn, sums, row, column, mask, batch)
        if sums.element == self.c_element:
            return sums
        if sums.element == "i32":
            sums = fn.sitofp(sums, "float")
        narrow = size_bytes(sums.type) > size_bytes(self.c_element)
        return (fn.fptrunc if narrow else fn.fpext)(sums, self.c_element)

    def through_stage(
        self, fn: Function, frame: Value, sums: Sequence[Value], c: Value, row: Int, column: Int, rows: int
    ) -> None:
        """Finish a tile of sums, in row order, whose first element of C is (row, column) at `c`."""
        stage = self.frame.read_pointer(fn, frame, "stage")
        for n, total in enumerate(sums):
            fn.store(total, fn.gep(stage, n * self.lanes, self.accumulator))
        fn.call(self._finisher(), [fn.args[0], frame, c, row, column, rows, len(sums) // rows])

    def _finisher(self) -> str:
        """Name of the function that finishes a tile of sums in the stage; columns past n are left alone."""
        name = f"{self.name}.finish"
        if self.module.defines(name):
            return name
        params = [
            ("ptr", "args"),
            ("ptr", "frame"),
            ("ptr", "c"),
            ("i64", "row"),
            ("i64", "column"),
            ("i64", "rows"),
            ("i64", "vectors"),
        ]
        fn = self.module.function(name, params, internal=True, noinline=True)
        _, frame, c, row, column, rows, vectors = fn.args
        stage = self.frame.read_pointer(fn, frame, "stage")
        n, c_row = (self.frame.read(fn, frame, field) for field in ("n", "c_row"))
        existing = fn.umin(vectors, fn.ceildiv(fn.sub(n, column), self.lanes))
        sums_type = vector(self.accumulator, self.lanes)

        def line(i: Int, _: list[Value]) -> None:
            sums = fn.gep(stage, fn.mul(fn.mul(i, vectors), self.lanes), self.accumulator)
            places = fn.gep(c, fn.mul(i, c_row), self.c_element)

            def one(j: Int, _: list[Value]) -> None:
                first = fn.mul(j, self.lanes)
                total = fn.load(sums_type, fn.gep(sums, first, self.accumulator))
                place = fn.gep(places, first, self.c_element)
                at = fn.add(column, first)
                left = fn.sub(n, at)

                def end(mask: Value | None) -> None:
                    result = self.result(fn, frame, total, fn.add(row, i), at, mask)
                    fn.store(result, place) if mask is None else fn.masked_store(result, place, mask)

                if isinstance(n, int) and n % self.lanes == 0:
                    end(None)
                elif self.module.target.has_avx512:
                    end(fn.lanes(left, self.lanes))
                else:
                    whole = fn.cmp("uge", left, self.lanes)
                    fn.branch(whole, lambda: end(None), lambda: end(fn.lanes(left, self.lanes)))

            fn.loop(0, existing, 1, [], one)

        fn.loop(0, rows, 1, [], line)
        return name
