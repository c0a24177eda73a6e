"""The functions a GEMM driver calls for each register tile: accumulate over k, apply the epilogue, store.

They are written on first use, one per (rows, vectors, panels, ragged or not). Sizes known to the compiler are
constants in them; the others come through a `Frame` on the driver's stack.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlx.backend.cpu.irtext import Function, Int, Module, Value, vector
from rlx.backend.cpu.irtypes import size_bytes
from rlx.backend.cpu.microkernel import Kind, Places, accumulate

Epilogue = Callable[[Function, Value, Int, Int, "Value | None", "tuple[Int, ...]"], Value]
"""epilogue(fn, sums, row, column, mask, batch) -> what to store. `sums` are the finished products of one row
and consecutive columns from `column` on; lanes off the mask (None: all are on) do not exist and must not be
loaded.
"""


class Frame:
    """Sizes that a kernel shares with its internal functions: known ints stay ints, the rest lies on its
    stack.
    """

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
class TileWriter:
    """Writes the tile functions of one kernel.

    The frame holds n, k, a_row, a_k, b_k, c_row, the batch indices, and as the flags ask `stage`, `fresh`,
    `done`.
    """

    module: Module
    name: str
    kind: Kind
    vectors: int  # of a full panel
    c_element: str
    frame: Frame
    epilogue: Epilogue | None
    batch_axes: int
    panel_stride: int  # elements from one panel of B to the next, where a tile spans several
    packed_weights: bool
    staged: bool  # sums go through a tile in L1, where one function finishes them
    masked_b: bool  # B is read in place up to the last column of the matrix
    resumes: bool  # k comes in blocks, between which C holds the sums

    @property
    def lanes(self) -> int:
        return self.kind.lanes

    def call(
        self, main: Function, callee: Value, a: Value, b: Value, c: Value, row: Int, column: Int
    ) -> None:
        """Compute the tile of C whose first element is (row, column); the pointers point to its operands."""
        main.call(callee, [main.args[0], self.frame.pointer, a, b, c, row, column])

    def function(self, rows: int, vectors: int, panels: int = 1, masked: bool = False) -> str:
        """Name of the function for `rows` x (vectors * panels) accumulators."""
        name = (
            f"{self.name}.{rows}x{vectors}" + (f"x{panels}" if panels > 1 else "") + ("m" if masked else "")
        )
        if self.module.defines(name):
            return name
        params = [
            ("ptr", "args"),
            ("ptr", "frame"),
            ("ptr noalias", "a"),
            ("ptr noalias", "b"),
            ("ptr", "c"),
            ("i64", "row"),
            ("i64", "column"),
        ]
        fn = self.module.function(name, params, internal=True, noinline=True)
        _, frame, a, b, c, row, column = fn.args
        kind, element, width = self.kind, self.kind.element, panels * vectors
        a_row, a_k, k, c_row = (self.frame.read(fn, frame, field) for field in ("a_row", "a_k", "k", "c_row"))
        b_k = vectors * self.lanes if self.packed_weights else self.frame.read(fn, frame, "b_k")
        a_places = Places.of(fn, a, [fn.mul(i, a_row) for i in range(rows)], fn.mul(a_k, kind.group), element)
        columns = [
            p * self.panel_stride + j * self.lanes * kind.group for p in range(panels) for j in range(vectors)
        ]
        b_places = Places.of(fn, b, columns, fn.mul(b_k, kind.group), element)
        ragged = (
            masked and self.module.target.has_avx512
        )  # else B is packed and the stage takes whole vectors
        mask = self._last_mask(fn, frame, column, width) if ragged else None
        places = [fn.gep(c, fn.mul(i, c_row), self.c_element) for i in range(rows)]
        tile = _Tile(fn, places, width, self.lanes, self.c_element, mask)

        start = [kind.zero] * (rows * width)
        if self.resumes:
            fresh = fn.cmp("ne", self.frame.read(fn, frame, "fresh"), 0)
            start = fn.if_value(fresh, lambda: start, tile.load)
        sums = accumulate(fn, kind, a_places, b_places, k, start, mask if self.masked_b else None)

        def end() -> None:
            if self.staged:
                stage = self.frame.read_pointer(fn, frame, "stage")
                for n, total in enumerate(sums):
                    fn.store(total, fn.gep(stage, n * self.lanes, kind.accumulator))
                fn.call(self._finisher(), [fn.args[0], frame, c, row, column, rows, width])
            else:
                tile.store(
                    [
                        self._finish(
                            fn, frame, total, fn.add(row, i), fn.add(column, j * self.lanes), tile.mask_of(j)
                        )
                        for (i, j), total in zip(tile.cells, sums, strict=True)
                    ]
                )

        done = fn.cmp("ne", self.frame.read(fn, frame, "done"), 0) if self.resumes else True
        fn.branch(done, end, lambda: tile.store(sums))
        return name

    def _last_mask(self, fn: Function, frame: Value, column: Int, width: int) -> Value:
        """Mask of the last of `width` vectors from `column` on."""
        n = self.frame.read(fn, frame, "n")
        return fn.lanes(fn.sub(n, fn.add(column, (width - 1) * self.lanes)), self.lanes)

    def _finish(
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

    def _finisher(self) -> str:
        """Name of the function that finishes a tile of sums which another function left in the stage."""
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
        sums_type = vector(self.kind.accumulator, self.lanes)

        def line(i: Int, _: list[Value]) -> None:
            sums = fn.gep(stage, fn.mul(fn.mul(i, vectors), self.lanes), self.kind.accumulator)
            places = fn.gep(c, fn.mul(i, c_row), self.c_element)

            def one(j: Int, _: list[Value]) -> None:
                first = fn.mul(j, self.lanes)
                total = fn.load(sums_type, fn.gep(sums, first, self.kind.accumulator))
                place = fn.gep(places, first, self.c_element)
                at = fn.add(column, first)
                left = fn.sub(n, at)

                def end(mask: Value | None) -> None:
                    result = self._finish(fn, frame, total, fn.add(row, i), at, mask)
                    fn.store(result, place) if mask is None else fn.masked_store(result, place, mask)

                if isinstance(n, int) and n % self.lanes == 0:
                    end(None)
                elif self.module.target.has_avx512:
                    end(fn.lanes(left, self.lanes))
                else:
                    whole = fn.cmp("uge", left, self.lanes)
                    fn.branch(whole, lambda: end(None), lambda: end(fn.lanes(left, self.lanes)))

            fn.loop(0, vectors, 1, [], one)

        fn.loop(0, rows, 1, [], line)
        return name


@dataclass(frozen=True)
class _Tile:
    """The vectors of C that one call covers; the mask, if any, belongs to the last of each row."""

    fn: Function
    rows: list[Value]
    width: int
    lanes: int
    element: str
    mask: Value | None

    @property
    def cells(self) -> list[tuple[int, int]]:
        return [(i, j) for i in range(len(self.rows)) for j in range(self.width)]

    def mask_of(self, j: int) -> Value | None:
        return self.mask if j == self.width - 1 else None

    def place(self, i: int, j: int) -> Value:
        return self.fn.gep(self.rows[i], j * self.lanes, self.element)

    def load(self) -> list[Value]:
        fn, type_ = self.fn, vector(self.element, self.lanes)
        masks = {j: self.mask_of(j) for j in range(self.width)}
        return [
            fn.load(type_, self.place(i, j))
            if (mask := masks[j]) is None
            else fn.masked_load(type_, self.place(i, j), mask)
            for i, j in self.cells
        ]

    def store(self, values: list[Value]) -> None:
        for (i, j), value in zip(self.cells, values, strict=True):
            mask = self.mask_of(j)
            if mask is None:
                self.fn.store(value, self.place(i, j))
            else:
                self.fn.masked_store(value, self.place(i, j), mask)
