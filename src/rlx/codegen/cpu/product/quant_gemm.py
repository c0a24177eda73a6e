"""Products with quantised weights: C[m, n] = epilogue(A[m, k] @ W), W = (q - zero) * scale by groups of k.

Weights stay in 4 or 8 bits in memory, so a matmul of few rows runs at the speed of reading them. A is f32
and keeps its precision: 4-bit weights are looked up as bf16 numbers, which are exact, and each element of A
is the sum of two bf16 numbers, so that the bf16 dot product does the work of f32. Other targets and 8-bit
weights convert to f32. Each group is summed on its own, then scaled and added: the order depends on nothing
but k and the group.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlx.codegen.cpu.kernels import KERNEL_ARGS
from rlx.codegen.cpu.primitives import MEMORY
from rlx.codegen.cpu.product.gemm import DimValue, KernelInfo, Size
from rlx.codegen.cpu.product.gemm_cut import Count, Tiles, share
from rlx.codegen.cpu.product.gemm_end import Epilogue, Frame, TileEnd
from rlx.codegen.native import twins
from rlx.codegen.native.irtext import Module, Value, constant, lanes_of, vector
from rlx.codegen.native.notation import inline, native, write
from rlx.codegen.native.words import (
    Word,
    alloca,
    bitcast,
    broadcast,
    builder,
    byte_at,
    call,
    field,
    float32,
    fma,
    fpext,
    fptrunc,
    gep,
    i32,
    i64,
    lanes,
    load,
    loop,
    lshr,
    masked_load,
    noalias,
    ptr,
    select,
    sext,
    shuffle,
    sitofp,
    splat,
    store,
    udiv,
)
from rlx.errors import ShapeError
from rlx.kernel.nests import ContractNest
from rlx.kernel.panels import PANEL_VECTORS, QuantLayout, quantised_of
from rlx.records import dataclass
from rlx.target.cpu import Target

_BLOCK_ROWS = 32  # rows of A prepared at a time
_PANELS_AT_ONCE = 4  # most panels per call: few rows need several for enough independent sums


def quant_layout(
    k: int, n: int, target: Target, bits: int = 4, group: int = 32, scale: str = "f32", zeros: bool = False
) -> QuantLayout:
    """The layout that kernels for `target` read."""
    return QuantLayout(k, n, bits, group, target.lanes("f32"), scale, zeros)


def own_groups(nest: ContractNest, target: Target) -> QuantLayout | None:
    """The stated layout of quantised weights, None if kernels for `target` read another one."""
    assert nest.rhs_layout is not None
    stated = dict(nest.rhs_layout[1])
    return quantised_of(stated["layouts"], stated["group"], target.lanes("f32"))


def emit_quant_gemm(
    module: Module,
    name: str,
    m: Size,
    layout: QuantLayout,
    *,
    a_start: Size = 0,
    a_row: Size | None = None,
    c_row: Size | None = None,
    c_dtype: str = "f32",
    precision: str = "f32",
    operands: tuple[int, int, int] = (3, 4, 5),
    dim_value: DimValue | None = None,
    epilogue: Epilogue | None = None,
) -> KernelInfo:
    """Write the kernel of A [m, k] times packed weights into the module.

    A is f32, begins `a_start` elements after its operand's, and its rows are `a_row` elements apart.

    `operands` are the argument fields of A, the weights and C; the epilogue is that of `gemm.emit_gemm`. With
    precision "bf16", A may be rounded to bf16 where that is faster.

    >>> from rlx.target.cpu import resolve
    >>> target = resolve("x86-64-v3")
    >>> emit_quant_gemm(Module(target), "product", 4, quant_layout(64, 48, target)).scratch_bytes_per_thread
    1024
    """
    shape = (m, layout.k if a_row is None else a_row, layout.n if c_row is None else c_row, a_start)
    return _QuantGemm(module, name, shape, layout, c_dtype, precision, operands, dim_value, epilogue).emit()


@dataclass(frozen=True)
class Decoder:
    """Multiplies prepared rows of A with the codes of a group; this one converts codes to f32."""

    layout: QuantLayout
    parts: int = 1  # of an element of A, each with a sum of its own

    @property
    def step(self) -> int:
        """k taken at once."""
        return 8 if self.layout.bits == 4 else 1

    @inline
    def codes(self, place: ptr) -> list[Value]:
        """One vector of codes for each k of a step, as f32."""
        width = self.layout.lanes
        if self.layout.bits == 8:
            return [sitofp(sext(load(vector("i8", width), place), i32), "float")]
        word, floats = load(vector("i32", width), place), vector("float", width)
        nibbles = [lshr(word, 4 * (k // 2) + 16 * (k % 2)) for k in range(8)]
        if builder().module.target.has_avx512:  # the table takes the low four bits
            table = lanes_of(floats, [float(i - 8) for i in range(16)])
            name = "llvm.x86.avx512.permvar.sf.512"
            return [look_up(name, "avx512f", table, nibble) for nibble in nibbles]
        return [sitofp(nibble & 15, "float") - 8.0 for nibble in nibbles]

    @inline
    def multiply(
        self, rows: Sequence[ptr], places: Sequence[ptr], sums: list[list[Value]]
    ) -> list[list[Value]]:
        """The sums after one step; `rows` point to prepared A, `places` to the codes of each vector."""
        columns: list[list[list[Value]]] = []
        for j, place in enumerate(places):
            column = sums[j :: len(places)]
            for k, code in enumerate(self.codes(place)):
                column = [
                    [fma(broadcast(gep(row, k, float32), "float", self.layout.lanes), code, total)]
                    for row, (total,) in zip(rows, column, strict=True)
                ]
            columns.append(column)
        return [own for line in zip(*columns, strict=True) for own in line]

    def total(self, sums: list[Value]) -> Value:
        """The sum of a group for one output."""
        return sums[0]

    @inline
    def prepare(self, x: Value, place: ptr) -> None:
        """Store one vector of A as `multiply` reads it."""
        store(x, place)


class PairDecoder(Decoder):
    """4-bit codes looked up as bf16 pairs; A is a high and (if there are two parts) a low bf16 part."""

    @inline
    def multiply(
        self, rows: Sequence[ptr], places: Sequence[ptr], sums: list[list[Value]]
    ) -> list[list[Value]]:
        f, width = builder(), self.layout.lanes
        halves, pairs = vector("i16", 2 * width), vector("bfloat", 2 * width)
        # The bf16 numbers -8..7, twice: the look-up takes five bits, of which the fifth is another code's.
        table = lanes_of(halves, [_bf16_bits(i % 16 - 8) for i in range(32)])

        def part_of_a(row: ptr, number: int) -> Value:
            return bitcast(splat(load(i32, gep(row, number, i32)), width), pairs)

        columns: list[list[list[Value]]] = []
        for j, place in enumerate(places):
            column = sums[j :: len(places)]
            word = bitcast(load(vector("i32", width), place), halves)
            for pair in range(4):
                found = look_up("llvm.x86.avx512.permvar.hi.512", "avx512bw", table, lshr(word, 4 * pair))
                code = bitcast(found, pairs)
                column = [
                    [f.dot_bf16(total, part_of_a(row, 2 * pair + n), code) for n, total in enumerate(own)]
                    for row, own in zip(rows, column, strict=True)
                ]
            columns.append(column)
        return [own for line in zip(*columns, strict=True) for own in line]

    @inline
    def total(self, sums: list[Value]) -> Value:
        return sums[0] if self.parts == 1 else Word(sums[0]) + sums[1]

    @inline
    def prepare(self, x: Value, place: ptr) -> None:
        high = fptrunc(x, "bfloat", exact=False)
        rest = Word(x) - fpext(high, "float")
        # The rest of an infinity is NaN and must not count.
        low = fptrunc(select(rest == rest, rest, constant(x.type, 0.0)), "bfloat", exact=False)
        words = vector("i32", x.width // 2)
        mixed = [i // 2 + i % 2 * (x.width // 2) for i in range(x.width)]
        store(shuffle(bitcast(high, words), bitcast(low, words), mixed), place)


def look_up(name: str, feature: str, table: Value, index: Value) -> Value:
    """Elements of a vector by their numbers."""
    return builder().intrinsic(name, table.type, table, index, feature=feature, twin=twins.look_up)


def _bf16_bits(value: int) -> int:
    return int(np.float32(value).view(np.uint32)) >> 16


class _QuantGemm:
    """The emitter of one kernel."""

    def __init__(
        self,
        module: Module,
        name: str,
        shape: tuple[Size, Size, Size, Size],
        layout: QuantLayout,
        c_dtype: str,
        precision: str,
        operands: tuple[int, int, int],
        dim_value: DimValue | None,
        epilogue: Epilogue | None,
    ) -> None:
        self.module, self.name, self.layout, self.operands, self.dim_value = (
            module,
            name,
            layout,
            operands,
            dim_value,
        )
        self.shape = shape  # m, row stride of A, row stride of C, start of A
        self.parts = (1 if precision == "bf16" else 2) if layout.bits == 4 and module.target.has_bf16 else 0
        # Accumulators: per output its total and the sums of a group; and codes, a table and A.
        per_panel = PANEL_VECTORS * (1 + max(self.parts, 1))
        self.rows = (module.target.registers - 6) // per_panel
        self.main = module.function(name, KERNEL_ARGS)
        self.frame = Frame(self.main, 4)
        self.end = TileEnd(name, "float", layout.lanes, MEMORY[c_dtype], self.frame, epilogue, 0)

    @property
    def decoder(self) -> Decoder:
        return PairDecoder(self.layout, self.parts) if self.parts else Decoder(self.layout)

    def size(self, x: Size) -> Count:
        if isinstance(x, int):
            return x
        if self.dim_value is None:
            raise ShapeError(f"kernel {self.name!r} has the symbolic size {x} but no dim_value to read it by")
        return self.dim_value(self.main, x)

    def panels_at_once(self, rows: int) -> int:
        """Panels that one call takes: as many as the registers of the tallest tile hold."""
        return min(self.rows // rows, _PANELS_AT_ONCE)

    @property
    def row_bytes(self) -> int:
        """Bytes of a prepared row: its elements, then one sum per group where the weights have zeros."""
        return 4 * (self.padded_k + (self.layout.groups if self.layout.zeros else 0))

    @property
    def padded_k(self) -> int:
        """k in whole groups and whole vectors."""
        return -(-self.layout.depth // self.layout.lanes) * self.layout.lanes

    def emit(self) -> KernelInfo:
        """Write the kernel."""
        write(self.main, self.kernel, *self.main.args)
        m = self.shape[0]
        known = min(m, _BLOCK_ROWS) if isinstance(m, int) else _BLOCK_ROWS
        return KernelInfo(self.name, known * self.row_bytes)

    @inline
    def kernel(self, args: ptr, thread: i64, threads: i64, part: i64) -> None:
        """Threads share the panels; each takes a block of rows through all of its own."""
        layout = self.layout
        m, a_row, c_row, a_start = (self.size(x) for x in self.shape)
        self.frame.share("n", layout.n)
        self.frame.share("c_row", c_row)
        self.frame.change("stage", alloca(float32, self.rows * layout.columns))
        a, b, c = (field(args, operand, ptr) for operand in self.operands)
        a = gep(a, a_start, float32)
        scratch = byte_at(field(args, 1, ptr), thread * field(args, 2, i64))
        first, stop = share(layout.panels, thread, threads)
        if first < stop:
            for row in loop(0, m, _BLOCK_ROWS):
                rows = min(m - row, _BLOCK_ROWS)
                source = gep(a, row * a_row, float32)
                call(prepare_rows.written(f"{self.name}.prepare", kernel=self), source, a_row, scratch, rows)
                place = gep(c, row * c_row, self.end.c_element)
                self.block(args, scratch, b, place, c_row, row, rows, first, stop)

    @inline
    def block(
        self,
        args: ptr,
        a: ptr,
        b: ptr,
        c: ptr,
        c_row: Count,
        row: Count,
        rows: Count,
        first: Count,
        stop: Count,
    ) -> None:
        """All panels first..stop of a block of prepared rows."""
        layout, element = self.layout, self.end.c_element
        tiles = Tiles.of(self.main, rows, self.rows)

        def run(height: int, panels: int, j: Count, offset: Count) -> None:
            """Some rows, from `offset` on, of some panels, from j on."""
            column = j * layout.columns
            place = gep(gep(c, offset * c_row, element), column, element)
            weights = byte_at(b, j * layout.panel_bytes)
            prepared = byte_at(a, offset * self.row_bytes)
            function = compute_tile.written(
                f"{self.name}.{height}x{panels}", kernel=self, rows=height, panels=panels
            )
            call(function, args, self.frame.pointer, prepared, weights, place, row + offset, column)

        def tile(t: Count, j: Count, height: Count, limit: int) -> None:
            """The rows of tile t, which are at most `limit`, of panel j."""
            if limit == 1 or height == limit:
                run(limit, 1, j, tiles.row(self.main, t))
            else:
                tile(t, j, height, limit - 1)

        def one_by_one(begin: Count) -> None:
            for j in loop(begin, stop):
                for t in loop(tiles.count):
                    tile(t, j, tiles.height(t), self.rows)

        def few(choices: list[int]) -> None:
            """Several panels at once while the rows are few, then the panels that are left."""
            if not choices:
                one_by_one(first)
            elif rows == choices[0]:
                panels = self.panels_at_once(choices[0])
                cut = first + udiv(stop - first, panels) * panels
                for j in loop(first, cut, panels):
                    run(choices[0], panels, j, 0)
                one_by_one(cut)
            else:
                few(choices[1:])

        few([height for height in range(1, self.rows) if self.panels_at_once(height) > 1])


@native(internal=True, noinline=True)
def prepare_rows(a: ptr, a_row: i64, to: ptr, rows: i64, *, kernel: _QuantGemm) -> None:
    """Copy rows of A into scratch, padded to whole groups."""
    layout, decoder = kernel.layout, kernel.decoder
    width, type_ = layout.lanes, vector("float", layout.lanes)
    whole = layout.k // width * width
    for i in loop(rows):
        source = gep(a, i * a_row, float32)
        target = byte_at(to, i * kernel.row_bytes)
        for k in loop(0, whole, width):
            decoder.prepare(load(type_, gep(source, k, float32)), gep(target, k, float32))
        for k in range(whole, kernel.padded_k, width):  # zeros past k
            x = constant(type_, 0.0)
            if k < layout.k:
                x = masked_load(type_, gep(source, k, float32), lanes(layout.k - k, width))
            decoder.prepare(x, gep(target, k, float32))
        if layout.zeros:
            sum_groups(layout, source, gep(target, kernel.padded_k, float32))


@inline
def sum_groups(layout: QuantLayout, source: ptr, sums: ptr) -> None:
    """The sum of every group of a row of A."""
    for g in loop(layout.groups):
        first = g * layout.group
        stop = min(first + layout.group, layout.k)
        total = float32(0.0)
        for k in loop(first, stop):
            total += load(float32, gep(source, k, float32))
        store(total, gep(sums, g, float32))


@native(internal=True, noinline=True)
def compute_tile(
    args: ptr,
    frame: ptr,
    a: noalias,
    b: noalias,
    c: ptr,
    row: i64,
    column: i64,
    *,
    kernel: _QuantGemm,
    rows: int,
    panels: int,
) -> None:
    """Compute `rows` rows of some panels of C from (row, column) on; the pointers point to its operands."""
    layout, decoder, width = kernel.layout, kernel.decoder, panels * PANEL_VECTORS
    zero = constant(vector("float", layout.lanes), 0.0)
    step_bytes = layout.columns * layout.bits * decoder.step // 8
    totals: list[Value] = [zero] * (rows * width)
    for g in loop(layout.groups):
        weights = byte_at(b, g * layout.group_bytes)
        prepared = gep(a, g * layout.group, float32)
        starts = [byte_at(weights, p * layout.panel_bytes) for p in range(panels)]
        sums = [[zero] * decoder.parts] * (rows * width)
        for s in loop(layout.group // decoder.step):
            at = gep(prepared, s * decoder.step, float32)
            offset = s * step_bytes + layout.codes_start
            places = [
                byte_at(byte_at(start, offset), j * step_bytes // PANEL_VECTORS)
                for start in starts
                for j in range(PANEL_VECTORS)
            ]
            row_places = [byte_at(at, i * kernel.row_bytes) for i in range(rows)]
            sums = decoder.multiply(row_places, places, sums)

        def scaled(n: int, g: Count, start: ptr, j: int, own: list[Value], total: Value) -> Value:
            """The total of output n with the sums of the group."""
            found = decoder.total(own)
            if layout.zeros:
                whole = byte_at(a, n // width * kernel.row_bytes + 4 * kernel.padded_k)
                of_a = broadcast(gep(whole, g, float32), "float", layout.lanes)
                center = factor(layout, start, j, layout.factors_bytes)
                found = fma(-center, of_a, found)
            return fma(factor(layout, start, j, 0), found, total)

        at_columns = [(start, j) for start in starts for j in range(PANEL_VECTORS)] * rows
        totals = [
            scaled(n, g, start, j, own, total)
            for n, ((start, j), own, total) in enumerate(zip(at_columns, sums, totals, strict=True))
        ]
    kernel.end.through_stage(args, frame, totals, c, row, column, rows)


@inline
def factor(layout: QuantLayout, start: ptr, j: int, offset: int) -> Word:
    """Scales (or zeros, at their offset) of one vector of a group, as f32."""
    element = MEMORY[layout.scale]
    place = byte_at(start, offset + j * layout.factors_bytes // PANEL_VECTORS)
    loaded = load(vector(element, layout.lanes), place)
    return fpext(loaded, "float") if element == "half" else loaded
