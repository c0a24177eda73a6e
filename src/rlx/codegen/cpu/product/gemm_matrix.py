"""Matmuls of bytes and bf16 with packed weights by registers that hold matrices (AMX).

A call has the sums of two row tiles and a panel in six registers; the other two take 64 bytes of k of 16 rows
of A, and of 16 columns of B, whose panels are stored as registers want them. Every row goes through scratch,
where k is padded with zeros to whole registers, and whole registers of rows may be read: so one shape serves
all sizes, and the sums of a row do not depend on how many rows there are. The last k of a panel, if they fill
no register, are copied and zeros put behind them. Sums leave through the stage, where the epilogue finishes
those that exist.

This target was not at hand: nothing here is measured.
"""

from __future__ import annotations

from dataclasses import replace

from rlx.codegen.cpu.product.gemm_cut import Count, Part
from rlx.codegen.cpu.product.gemm_driver import (
    GemmCall,
    GemmSpec,
    KernelInfo,
    ProductDriver,
    Size,
    with_rows_from_memory,
)
from rlx.codegen.cpu.product.gemm_end import TileEnd
from rlx.codegen.cpu.product.matrices import COUNT, LINE, ROWS, STATE_BYTES, Matrices, shapes
from rlx.codegen.cpu.product.microkernel import kind_of
from rlx.codegen.native.irtext import Function, Module, vector
from rlx.codegen.native.irtypes import Value, constant, size_bytes
from rlx.codegen.native.notation import inline, native, write
from rlx.codegen.native.words import (
    alloca,
    builder,
    byte_at,
    call,
    gep,
    i8,
    i64,
    load,
    loop,
    noalias,
    ptr,
    store,
    ugt,
)
from rlx.records import dataclass
from rlx.target.cpu import Target

_TILES = 2  # row tiles of a call, if it has as many
_OF_A, _OF_B = COUNT - 2, COUNT - 1  # registers; those before have the sums


def suits_matrices(spec: GemmSpec, target: Target) -> bool:
    """Whether a matmul is computed in registers that hold matrices; for any number of rows."""
    plain = spec.b_packed and spec.quads is None and spec.b_dtype is None
    return target.has_matrices and plain and spec.dtype in ("i8", "u8", "bf16") and spec.a_strides[-1] == 1


@dataclass(frozen=True)
class BlockOfRows:
    """Row tiles start..stop of a part, of which row0 is the first row in scratch."""

    part: Part
    start: Count
    stop: Count
    row0: Count


class MatrixGemm(ProductDriver):
    """The emitter of one kernel."""

    def __init__(self, module: Module, name: str, call: GemmCall) -> None:
        kind, (_, vectors) = kind_of(call.spec.dtype, module.target), module.target.tile(call.spec.dtype)
        if call.prologue is None:
            call = with_rows_from_memory(call, kind)
        super().__init__(module, name, call, kind, ROWS, vectors * kind.lanes)
        self.vectors, self.item = vectors, size_bytes(kind.element)
        assert self.computed is not None and isinstance(call.spec.k, int)
        self.rows_of_a = replace(self.computed, unit=LINE // self.item)
        self.computed = self.rows_of_a  # which is how threads see that rows are not free
        steps = -(-call.spec.k // kind.group)
        self.whole, self.rest = divmod(steps, ROWS)

    # ---- scratch: rows of A, the stage, the last steps of a panel

    @property
    def stage_bytes(self) -> int:
        return _TILES * ROWS * self.vectors * LINE

    @property
    def scratch_bytes(self) -> Size:
        last_steps = ROWS * self.vectors * LINE if self.rest else 0
        return self.rows_of_a.scratch_bytes + self.stage_bytes + last_steps

    @property
    def block_tiles(self) -> int:
        """Row tiles that meet all panels before the next ones: pairs, where there is room."""
        return max(1, self.rows_of_a.tiles // _TILES * _TILES)

    @inline
    def plan(self, panels: Count) -> None:
        for name in ("n", "c_row"):
            self.frame.share(name, getattr(self, name))
        self.frame.share("a_row", self.rows_of_a.stride)
        self.place_of_rows = self.scratch()
        stage = byte_at(self.place_of_rows, self.rows_of_a.scratch_bytes)
        self.frame.change("stage", stage)
        self.last_steps = byte_at(stage, self.stage_bytes)
        if not self.module.target.code.has_matrices:
            self.frame.change("matrices", alloca(i8, STATE_BYTES))
        table = shapes(*[(ROWS, LINE)] * COUNT)
        self.registers().configure(self.module.table(f"{self.name}.shapes", "i8", list(table)))

    def emit(self) -> KernelInfo:
        info = super().emit()
        write(self.main, lambda: self.registers().release())
        return info

    def registers(self) -> Matrices:
        """The registers, in the kernel itself."""
        return registers_in(self.main, self.end, self.frame.pointer)

    # ---- the nest of loops

    @inline
    def product(self, a: ptr, b: ptr, c: ptr, part: Part) -> None:
        """A part of one matmul: a block of rows meets all panels, then the next."""
        first, stop = part.panels()
        low, high = part.needed_rows(first, stop)
        for tile in loop(low, high, self.block_tiles):
            until = min(tile + self.block_tiles, high)
            row0 = self.tiles.row(self.main, tile)
            count = self.tiles.row(self.main, until) - row0
            self.rows_of_a.compute(self.args, self.place_of_rows, row0, count, 0, self.k)
            rows = BlockOfRows(part, tile, until, row0)
            for j in loop(first, min(stop, self.full)):
                self.panel(b, c, j, self.vectors, rows)
            if stop > self.full:
                self.last_panel(b, c, self.vectors, rows)

    @inline
    def last_panel(self, b: ptr, c: ptr, vectors: int, rows: BlockOfRows) -> None:
        """The narrower panel, which has at most `vectors`."""
        if vectors == 1 or ugt(self.tail, (vectors - 1) * self.lanes):
            self.panel(b, c, self.full, vectors, rows)
        else:
            self.last_panel(b, c, vectors - 1, rows)

    @inline
    def panel(self, b: ptr, c: ptr, j: Count, vectors: int, rows: BlockOfRows) -> None:
        """Own row tiles of a block that meet panel j."""
        top, bottom = rows.part.of_panel(j)
        t0, t1 = max(rows.start, top), min(rows.stop, bottom)
        column, step = j * self.columns, vectors * LINE
        weights = gep(b, column * ((self.whole * ROWS + self.rest) * self.kind.group), self.element)
        if self.rest:
            if t0 < t1:
                function = copy_steps.written(
                    f"rlx.matrix.steps.{self.rest}x{vectors}", count=self.rest, width=step
                )
                call(function, byte_at(weights, self.whole * ROWS * step), self.last_steps)
        line = gep(c, column, self.c_element)
        for t in loop(t0, t1, _TILES):
            row, height = self.tiles.row(self.main, t), self.tiles.height(t)
            a = gep(self.place_of_rows, (row - rows.row0) * self.rows_of_a.stride, self.element)
            place = gep(line, row * self.c_row, self.c_element)
            if t + 1 < t1:
                both = height + self.tiles.height(t + 1)
                self.tile(2, vectors, a, weights, place, row, column, height, both)
            else:
                self.tile(1, vectors, a, weights, place, row, column, height, height)

    @inline
    def tile(self, tiles: int, vectors: int, a: ptr, weights: ptr, *others: Count) -> None:
        """Call the function for so many row tiles and vectors of columns."""
        dtype, size = self.spec.dtype, self.item
        form = MatrixForm(self.end, dtype, tiles, vectors, size, self.whole, self.rest != 0)
        function = compute_matrix.written(f"{self.name}.{tiles}x{vectors}", form=form)
        call(function, self.args, self.frame.pointer, a, weights, self.last_steps, *others)


@native(internal=True, noinline=True)
def copy_steps(source: noalias, to: noalias, *, count: int, width: int) -> None:
    """The last steps of a panel, and zeros in place of those that a register has more."""
    type_ = vector("i8", LINE)
    for at in loop(0, count * width, LINE):
        store(load(type_, byte_at(source, at)), byte_at(to, at))
    for at in loop(count * width, ROWS * width, LINE):
        store(constant(type_, 0), byte_at(to, at))


@dataclass(frozen=True)
class MatrixForm:
    """What the code of a call depends on."""

    end: TileEnd
    dtype: str  # of A
    tiles: int  # of rows
    vectors: int  # of columns
    size: int  # bytes of an element
    whole: int  # registers of k
    rest: bool  # whether there is one more, which is not full

    def add(self, registers: Matrices, sums: int) -> None:
        """Add the products of what was loaded."""
        if self.dtype == "bf16":
            registers.dot_bf16(sums, _OF_A, _OF_B)
        else:
            registers.dot_bytes(sums, _OF_A, _OF_B, signed=self.dtype == "i8")


def registers_in(f: Function, end: TileEnd, frame: Value) -> Matrices:
    """The registers in a function that has the frame."""
    emulated = not f.module.target.code.has_matrices
    return Matrices(end.frame.place(ptr(frame), "matrices") if emulated else None)


@native(internal=True, noinline=True)
def compute_matrix(
    args: ptr,
    frame: ptr,
    a: ptr,
    b: ptr,
    rest: ptr,
    c: ptr,
    row: i64,
    column: i64,
    first: i64,
    rows: i64,
    *,
    form: MatrixForm,
) -> None:
    """Compute `rows` rows of C, of which a first tile has `first`, from (row, column) on."""
    end, vectors = form.end, form.vectors
    (a_row,) = end.frame.named(frame, "a_row")
    registers = registers_in(builder(), end, frame)
    distance, step = a_row * form.size, vectors * LINE
    for number in range(form.tiles * vectors):
        registers.zero(number)
    for k in loop(form.whole):
        multiply(form, registers, byte_at(a, k * LINE), byte_at(b, k * (ROWS * step)), first, distance)
    if form.rest:
        multiply(form, registers, byte_at(a, form.whole * LINE), rest, first, distance)
    # The second tile is stored over the rows that the first one has too much.
    stage = end.frame.place(frame, "stage")
    for i in range(form.tiles):
        line = byte_at(stage, first * (i * step))
        for j in range(vectors):
            registers.store(i * vectors + j, byte_at(line, j * LINE), step)
    end.finish(args, frame, c, row, column, rows, vectors)


@inline
def multiply(form: MatrixForm, registers: Matrices, a: ptr, b: ptr, first: i64, distance: Count) -> None:
    """Add the products of one register of k. The second row tile takes the columns backwards: its first ones
    are still there."""
    vectors, there = form.vectors, -1
    for i in range(form.tiles):
        registers.load(_OF_A, byte_at(a, first * (i * distance)), distance)
        for j in range(vectors) if i == 0 else range(vectors - 1, -1, -1):
            if j != there:
                registers.load(_OF_B, byte_at(b, j * LINE), vectors * LINE)
            there = j
            form.add(registers, i * vectors + j)
