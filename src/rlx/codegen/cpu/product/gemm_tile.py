"""The functions a GEMM driver calls for each register tile: accumulate over k, apply the epilogue, store.

They are written on first use, one per (rows, vectors, panels, ragged or not). Sizes known to the compiler are
constants in them; the others come through a `Frame` on the driver's stack.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.codegen.cpu.product.gemm_end import Frame, TileEnd
from rlx.codegen.cpu.product.microkernel import Kind, Places, accumulate
from rlx.codegen.native.irtext import Function, Int, Module, Value, vector
from rlx.codegen.native.irtypes import size_bytes
from rlx.kernel.quads import GROUP, QuadPanels
from rlx.records import dataclass

LINE = 64  # bytes of a cache line
LONG = 128  # k from which a tile takes as long as lines of C take to come from memory

TILE_PARAMS = (
    ("ptr", "args"),
    ("ptr", "frame"),
    ("ptr noalias", "a"),
    ("ptr noalias", "b"),
    ("ptr", "c"),
    ("i64", "row"),
    ("i64", "column"),
)


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
    end: TileEnd
    panel_stride: int  # elements from one panel of B to the next, where a tile spans several
    packed_weights: bool
    staged: bool  # sums go through a tile in L1, where one function finishes them
    masked_b: bool  # B is read in place up to the last column of the matrix
    resumes: bool  # k comes in blocks, between which C holds the sums
    beside: tuple[tuple[int, str], ...] = ()  # matrices like C that the epilogue reads: field, element type
    quads: QuadPanels | None = None  # what the panels of B are

    @property
    def lanes(self) -> int:
        return self.kind.lanes

    @property
    def frame(self) -> Frame:
        return self.end.frame

    def call(
        self,
        main: Function,
        callee: Value,
        a: Value,
        b: Value,
        c: Value,
        row: Int,
        column: Int,
        later: Value | None = None,
    ) -> None:
        """Compute the tile of C whose first element is (row, column); the pointers point to its operands, and
        to packed weights to prefetch meanwhile, `pace` bytes per step; `b` itself where there are none.
        """
        main.call(callee, [main.args[0], self.frame.pointer, a, b, c, row, column, later or b])

    @property
    def step_bytes(self) -> int:
        """Bytes of a full panel that one step reads."""
        return self.vectors * self.lanes * self.kind.group * size_bytes(self.kind.element)

    @property
    def pace(self) -> int:
        """Bytes of later weights that a step prefetches: a cache line, if it reads as much."""
        return min(self.step_bytes, LINE)

    def function(self, rows: int, vectors: int, panels: int = 1, masked: bool = False) -> str:
        """Name of the function for `rows` x (vectors * panels) accumulators."""
        name = (
            f"{self.name}.{rows}x{vectors}" + (f"x{panels}" if panels > 1 else "") + ("m" if masked else "")
        )
        if self.module.defines(name):
            return name
        fn = self.module.function(name, [*TILE_PARAMS, ("ptr", "later")], internal=True, noinline=True)
        _, frame, a, b, c, row, column, later = fn.args
        kind, element, width = self.kind, self.kind.element, panels * vectors
        a_row, a_k, k, c_row = (self.frame.read(fn, frame, field) for field in ("a_row", "a_k", "k", "c_row"))
        b_k = vectors * self.lanes if self.packed_weights else self.frame.read(fn, frame, "b_k")
        steps = [fn.mul(i, a_row) for i in range(rows)]
        a_places = Places.of(fn, a, steps, fn.mul(a_k, kind.group), kind.row_element)
        columns = [
            p * self.panel_stride + j * self.lanes * kind.group for p in range(panels) for j in range(vectors)
        ]
        b_places = Places.of(fn, b, columns, fn.mul(b_k, kind.group), element)
        # Without masks in registers, B is packed and the stage takes whole vectors.
        ragged = masked and self.module.target.has_avx512
        mask = self._last_mask(fn, frame, column, width) if ragged else None
        places = [fn.gep(c, fn.mul(i, c_row), self.end.c_element) for i in range(rows)]
        tile = _Tile(fn, places, width, self.lanes, self.end.c_element, mask)

        if isinstance(k, int) and k >= LONG and not self.resumes:
            tile.ask(self._read_beside(fn, row, column, c_row, rows))
        panel_places = (
            [fn.gep(b, p * self.panel_stride, element) for p in range(panels)] if self.quads else []
        )
        start = [kind.zero] * (rows * width)
        if self.quads is not None and kind.prepares_rows:
            start = [x for place in panel_places for x in self._starts(fn, self.quads, place, vectors)] * rows
        if self.resumes:
            fresh = fn.cmp("ne", self.frame.read(fn, frame, "fresh"), 0)
            start = fn.if_value(fresh, lambda: start, tile.load)
        pace = fn.select(fn.cmp("eq", later, b), 0, self.pace)

        def ask_for_later(step: Int) -> None:
            fn.prefetch(fn.gep(later, fn.mul(step, pace), "i8"), locality=2)

        meanwhile = ask_for_later if self.packed_weights and panels == 1 else None
        sums = accumulate(fn, kind, a_places, b_places, k, start, mask if self.masked_b else None, meanwhile)
        if self.quads is not None and self.quads.room:
            sums = self._room(fn, self.quads, panel_places, vectors, (a, steps), sums)

        def finish() -> None:
            if self.staged:
                return self.end.through_stage(fn, frame, sums, c, row, column, rows)
            at = [(fn.add(row, i), fn.add(column, j * self.lanes), tile.mask_of(j)) for i, j in tile.cells]
            return tile.store(
                [self.end.result(fn, frame, x, *where) for x, where in zip(sums, at, strict=True)]
            )

        done = fn.cmp("ne", self.frame.read(fn, frame, "done"), 0) if self.resumes else True
        fn.branch(done, finish, lambda: tile.store(sums))
        return name

    def _starts(self, fn: Function, quads: QuadPanels, panel: Value, vectors: int) -> list[Value]:
        """What the sums of a panel of quads begin with where A is signed."""
        type_, at = vector("i32", self.lanes), quads.starts_at(vectors * self.lanes)
        return [fn.load(type_, fn.gep(panel, at + j * self.lanes * 4, "i8"), 1) for j in range(vectors)]

    def _room(
        self,
        fn: Function,
        quads: QuadPanels,
        panels: list[Value],
        vectors: int,
        rows: tuple[Value, list[Int]],
        sums: list[Value],
    ) -> list[Value]:
        """The sums with what waits after the steps of each panel; every panel has its own k for that."""
        kind, columns, out = self.kind, vectors * self.lanes, list(sums)
        a, distances = rows
        for p, panel in enumerate(panels):
            own = [n for n in range(len(sums)) if n // vectors % len(panels) == p]
            weights = fn.gep(panel, quads.room_at(columns), "i8")
            places = fn.gep(panel, quads.places_at(columns), "i8")

            def step(
                s: Int, totals: Sequence[Value], weights: Value = weights, places: Value = places
            ) -> list[Value]:
                k = fn.zext(fn.load("i32", fn.gep(places, s, "i32"), 1), "i64")
                at = fn.gep(a, fn.umin(k, quads.k - GROUP), "i8")
                there = fn.gep(weights, fn.mul(s, columns * GROUP), "i8")
                b = [
                    kind.read_b(fn, fn.gep(there, j * self.lanes * GROUP, "i8"), None) for j in range(vectors)
                ]
                made = []
                for i, distance in enumerate(distances):
                    x = kind.read_a(fn, fn.gep(at, distance, "i8"), GROUP)
                    made += [kind.multiply_add(fn, x, b[j], totals[i * vectors + j]) for j in range(vectors)]
                return made

            found = fn.zext(fn.load("i32", fn.gep(panel, quads.count_at(columns), "i8"), 1), "i64")
            last = fn.loop(0, fn.umin(found, quads.room), 1, [out[n] for n in own], step)
            for n, total in zip(own, last, strict=True):
                out[n] = total
        return out

    def _read_beside(
        self, fn: Function, row: Int, column: Int, c_row: Int, rows: int
    ) -> list[tuple[Value, str]]:
        """Rows of what the epilogue reads for a tile, and their type."""
        out = []
        for field, element in self.beside:
            start = fn.gep(fn.field(fn.args[0], field, "ptr"), fn.add(fn.mul(row, c_row), column), element)
            out += [(fn.gep(start, fn.mul(i, c_row), element), element) for i in range(rows)]
        return out

    def _last_mask(self, fn: Function, frame: Value, column: Int, width: int) -> Value:
        """Mask of the last of `width` vectors from `column` on."""
        n = self.frame.read(fn, frame, "n")
        return fn.lanes(fn.sub(n, fn.add(column, (width - 1) * self.lanes)), self.lanes)


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

    def ask(self, beside: list[tuple[Value, str]]) -> None:
        """Prefetch lines of C, and of what the epilogue reads, while the sums are computed."""
        for row, element in (*((row, self.element) for row in self.rows), *beside):
            for byte in range(0, self.width * self.lanes * size_bytes(element), LINE):
                self.fn.prefetch(self.fn.gep(row, byte, "i8"), locality=2)

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
