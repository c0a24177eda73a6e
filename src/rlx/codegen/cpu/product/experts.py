"""Products whose matrix is chosen for each row (`rlx.ops.nn.experts`).

Threads share the columns of the result. Each sorts the numbers of all rows by their expert, then takes the
rows of one expert through its columns, tile by tile: a tile reads what it needs of a matrix once for several
rows. Lanes run along the sums, in which matrices are stored: no matrix is packed, and those that nobody
chooses are not touched.

Each output is one chain of fused multiply-adds per lane, then the sum of the lanes: tiles of any height give
the same bits. Codes become numbers in f32 before they are multiplied, in the tile or, where more rows than
one tile need them, in scratch; both are the same numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from rlx.codegen.cpu.expression import ERROR_INDEX
from rlx.codegen.cpu.frame import EmittedKernel, KernelFrame, kernel
from rlx.codegen.cpu.primitives import MEMORY
from rlx.codegen.cpu.product.quant_decode import look_up
from rlx.codegen.native.irtext import lanes_of
from rlx.codegen.native.irtypes import vector
from rlx.codegen.native.notation import inline, native
from rlx.codegen.native.words import (
    Int,
    Word,
    at,
    bitcast,
    builder,
    byte_at,
    call,
    ceildiv,
    fma,
    fpext,
    fptrunc,
    gather,
    gep,
    i32,
    i64,
    iota,
    lanes,
    load,
    loop,
    lshr,
    masked_load,
    ptr,
    reduce_add,
    select,
    sext,
    sitofp,
    splat,
    store,
    udiv,
    ult,
    urem,
    zext,
)
from rlx.errors import UnsupportedError
from rlx.ir.dim import Dim
from rlx.kernel.nibbles import E2M1_DOUBLED, RUN, UNIT

if TYPE_CHECKING:
    from rlx.kernel.form import Template

COLUMNS = 4  # of a tile
X, CHOICE, WEIGHTS, SCALES, ZEROS = range(5)
FLOATS = ("f64", "f32", "bf16", "f16")


@kernel
def emit_expert_matmul(frame: KernelFrame, form: Template) -> EmittedKernel:
    """Write the kernel."""
    return _Experts(frame, form).emit()


class _Experts:
    """A kernel under construction."""

    def __init__(self, frame: KernelFrame, form: Template) -> None:
        self.frame, config, target = frame, dict(form.config), frame.module.target
        self.coding, self.group = str(config.get("coding", "")), int(config.get("group", UNIT))
        x, weights = frame.inputs[X], frame.inputs[WEIGHTS]
        if x.dtype.name not in FLOATS or not (self.coding or weights.dtype.name in FLOATS):
            raise UnsupportedError(f"products of {x.dtype} and {weights.dtype} by expert have no kernel")
        if self.coding and weights.steps[2] != 1:
            raise UnsupportedError("the codes of a matrix are not side by side")
        self.element = "double" if x.dtype.name == "f64" else "float"  # what sums are made of
        self.lanes = target.lanes("f64" if self.element == "double" else "f32")
        self.wide = vector(self.element, self.lanes)
        self.heights = (4, 1) if target.registers >= 32 else (2, 1)  # rows of a tile
        self.tokens, self.chosen, self.size = x.shape
        self.experts, self.columns = weights.shape[:2]

    def dim(self, d: Dim) -> Int:
        return cast("Int", self.frame.dim(builder(), d))

    @inline
    def place(self, operand: int, *index: Int) -> ptr:
        """Where an element of an operand is."""
        slot, flat = self.frame.inputs[operand], i64(0)
        for i, step in zip(index, slot.steps, strict=False):
            flat += i * self.dim(step)
        return gep(self.frame.start(operand), flat, MEMORY[slot.dtype.name])

    @inline
    def expert_of(self, row: Int) -> i64:
        """The number that a row chose."""
        slot, chosen = self.frame.inputs[CHOICE], self.dim(self.chosen)
        element = MEMORY[slot.dtype.name]
        found = load(element, self.place(CHOICE, udiv(row, chosen), urem(row, chosen)))
        if element == "i64":
            return cast("i64", found)
        return sext(found, i64) if slot.dtype.is_signed else zext(found, i64)

    # -- the kernel: rows by expert

    @inline
    def emit(self) -> EmittedKernel:
        frame = self.frame
        rows, experts, columns = (
            self.dim(d) for d in (self.tokens * self.chosen, self.experts, self.columns)
        )
        low, high = cast("tuple[Int, Int]", frame.share(ceildiv(columns, COLUMNS)))
        starts = ptr(frame.scratch())  # where the rows of each expert begin, then the rows themselves
        order = at(starts, experts + 1)
        decoded = at(order, rows)
        if low < high:
            for e in loop(experts + 1):
                starts[e] = i64(0)
            for row in loop(rows):
                chosen = self.expert_of(row)
                if ult(chosen, experts):
                    starts[chosen] = starts[chosen] + 1
                else:
                    store(i64(ERROR_INDEX), frame.error)
            before = i64(0)
            for e in loop(experts):
                count = starts[e]
                starts[e] = before
                before += count
            for row in loop(rows):
                chosen = self.expert_of(row)
                if ult(chosen, experts):
                    order[starts[chosen]] = row
                    starts[chosen] = starts[chosen] + 1
            begin = i64(0)  # now starts[e] is where the rows of expert e end
            for e in loop(experts):
                end = starts[e]
                if begin < end:
                    for j in loop(low, high):
                        self.tiles(order, decoded, e, begin, end, j * COLUMNS)
                begin = end
        room = 4 * COLUMNS * self.size if self.coding else 0
        return frame.finish(8 * (self.experts + 1 + self.tokens * self.chosen) + room + 64)

    @inline
    def tiles(self, order: ptr, decoded: ptr, e: Int, begin: Int, end: Int, column: Int) -> None:
        """All rows of an expert in one tile of columns."""
        if column + COLUMNS <= self.dim(self.columns):
            if self.coding:
                if end - begin > self.heights[0]:
                    name = _decode.written(f"{self.frame.name}.decode", kernel=self)
                    call(name, self.frame.args, decoded, e, column)
                    self.rows(order, decoded, e, begin, end, column, COLUMNS, True)
                else:
                    self.rows(order, decoded, e, begin, end, column, COLUMNS, False)
            else:
                self.rows(order, decoded, e, begin, end, column, COLUMNS, False)
        else:
            for last in loop(column, self.dim(self.columns)):
                self.rows(order, decoded, e, begin, end, last, 1, False)

    @inline
    def rows(
        self, order: ptr, decoded: ptr, e: Int, begin: Int, end: Int, column: Int, columns: int, ready: bool
    ) -> None:
        row = i64(begin)
        for height in self.heights:
            name = _tile.written(
                f"{self.frame.name}.{height}x{columns}{'ready' * ready}",
                kernel=self,
                height=height,
                columns=columns,
                ready=ready,
            )
            while row + height <= end:
                call(name, self.frame.args, at(order, row), decoded, e, column)
                row += height

    # -- numbers of a matrix, vector by vector

    @property
    def span(self) -> int:
        """Numbers that one step of a sum takes."""
        return {"": self.lanes, "i8": UNIT}.get(self.coding, RUN)

    @inline
    def floats(self, base: ptr, step: Int, first: Int, element: str, count: Int) -> Word:
        """A vector of elements from `first` on, of which there are `count`; 0 beyond."""
        type_, start = vector(element, self.lanes), gep(base, first * step, element)
        if step != 1:
            places = iota(self.lanes) * splat(step, self.lanes, "i64")
            found = gather(start, places, element, lanes(count, self.lanes))
        elif count == self.lanes:
            found = load(type_, start)
        else:
            found = masked_load(type_, start, lanes(count, self.lanes))
        return found if element == self.element else fpext(found, self.element)

    @inline
    def numbers(self, e: Int, column: Int, step: Int) -> list[Word]:
        """The vectors of one step of a column of codes, as f32."""
        made = []
        start = self.place(WEIGHTS, e, column)
        for part in range(self.span // UNIT):
            factors = [
                self.factor(operand, e, column, udiv(step * self.span + part * UNIT, self.group))
                for operand in range(SCALES, len(self.frame.inputs))
            ]
            for first in range(0, UNIT, self.lanes):
                level = self.level(byte_at(start, step * UNIT + first), part)
                if len(factors) == 2:
                    level = level - factors[1]
                made.append(level * factors[0])
        return made

    @inline
    def factor(self, operand: int, e: Int, column: Int, group: Int) -> Word:
        """A scale or zero point in all lanes."""
        element = MEMORY[self.frame.inputs[operand].dtype.name]
        found = load(element, self.place(operand, e, column, group))
        return splat(found if element == "float" else fpext(found, "float"), self.lanes)

    @inline
    def level(self, place: ptr, part: int) -> Word:
        """A vector of codes: of bytes, or of their lower or upper halves."""
        found = load(vector("i8", self.lanes), place)
        words = vector("i32", self.lanes)
        if self.coding == "i8":
            return sitofp(sext(found, i32), "float")
        wide = zext(found, i32)
        code = lshr(wide, 4) if part else wide & 15
        if self.coding == "i4":
            return sitofp(code - 8, "float")
        if builder().module.target.has_avx512 and self.lanes == 16:
            table = lanes_of(self.wide, [float(n) for n in E2M1_DOUBLED])
            return Word(look_up("llvm.x86.avx512.permvar.sf.512", "avx512f", table, code))
        size = code & 7  # 0 to 4, 6, 8 and 12
        size = size + select(size > 4, size - 4, 0) + select(size == 7, size - 5, 0)
        sign = (code & 8) << 28
        return bitcast(bitcast(sitofp(size, "float"), words) | sign, self.wide)


@native(internal=True, noinline=True)
def _decode(args: ptr, decoded: ptr, e: i64, column: i64, *, kernel: _Experts) -> None:
    """Columns of a tile as f32 in scratch, one after the other."""
    size = kernel.dim(kernel.size)
    for j in loop(COLUMNS):
        to = gep(decoded, j * size, "float")
        for step in loop(udiv(size, kernel.span)):
            for v, numbers in enumerate(kernel.numbers(e, column + j, step)):
                store(numbers, gep(to, step * kernel.span + v * kernel.lanes, "float"))


@native(internal=True, noinline=True)
def _tile(
    args: ptr,
    order: ptr,
    decoded: ptr,
    e: i64,
    column: i64,
    *,
    kernel: _Experts,
    height: int,
    columns: int,
    ready: bool,
) -> None:
    """Some rows of an expert times some columns of its matrix."""
    tile = _Tile(kernel, height, columns, ready)
    tile.begin(order, decoded, e, column)
    tile.run()
    tile.finish()


class _Tile:
    """The function for so many rows and columns; `ready` where the columns are numbers in scratch."""

    def __init__(self, kernel: _Experts, height: int, columns: int, ready: bool) -> None:
        self.kernel, self.height, self.columns, self.ready = kernel, height, columns, ready
        self.x_element = MEMORY[kernel.frame.inputs[X].dtype.name]
        self.coded = bool(kernel.coding) and not ready

    @inline
    def begin(self, order: ptr, decoded: ptr, e: i64, column: i64) -> None:
        kernel, chosen = self.kernel, self.kernel.dim(self.kernel.chosen)
        self.e, self.column = e, column
        self.order = [order[i] for i in range(self.height)]
        self.xs = [kernel.place(X, udiv(row, chosen), urem(row, chosen)) for row in self.order]
        size = kernel.dim(kernel.size)
        if self.ready:
            self.ws = [gep(decoded, j * size, "float") for j in range(self.columns)]
        elif not self.coded:
            self.ws = [kernel.place(WEIGHTS, e, column + j) for j in range(self.columns)]

    @inline
    def run(self) -> None:
        kernel, size = self.kernel, self.kernel.dim(self.kernel.size)
        span = kernel.span if self.coded else kernel.lanes
        zero = splat(0.0, kernel.lanes, kernel.element)
        sums = [[zero] * self.columns for _ in range(self.height)]
        for step in loop(udiv(size, span)):
            sums = self.added(sums, step, span, kernel.lanes)
        rest = urem(size, span)
        if rest > 0:
            sums = self.added(sums, udiv(size, span), span, rest)
        self.sums = sums

    @inline
    def added(self, sums: list[list[Word]], step: Int, span: int, count: Int) -> list[list[Word]]:
        """The sums after one step, whose last vector has `count` numbers."""
        kernel = self.kernel
        stride = kernel.dim(kernel.frame.inputs[X].steps[2])
        if self.coded:
            ws = [kernel.numbers(self.e, self.column + j, step) for j in range(self.columns)]
        else:
            slot = kernel.frame.inputs[WEIGHTS]
            element = "float" if self.ready else MEMORY[slot.dtype.name]
            along = 1 if self.ready else kernel.dim(slot.steps[2])
            ws = [[kernel.floats(w, along, step * span, element, count)] for w in self.ws]
        for v in range(span // kernel.lanes):
            first = step * span + v * kernel.lanes
            made = []
            for x, line in zip(self.xs, sums, strict=True):
                own = kernel.floats(x, stride, first, self.x_element, count)
                made.append([fma(own, w[v], total) for w, total in zip(ws, line, strict=True)])
            sums = made
        return sums

    @inline
    def finish(self) -> None:
        kernel = self.kernel
        frame, element = kernel.frame, MEMORY[kernel.frame.outputs[0].dtype.name]
        out = frame.start(len(frame.inputs))
        for row, line in zip(self.order, self.sums, strict=True):
            to = gep(out, row * kernel.dim(kernel.columns) + self.column, element)
            for j, total in enumerate(line):
                found = reduce_add(total)
                store(found if element == kernel.element else fptrunc(found, element), gep(to, j, element))
