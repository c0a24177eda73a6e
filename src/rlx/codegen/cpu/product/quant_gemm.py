"""Products with quantised weights: C[m, n] = epilogue(A[m, k] @ W), W = (q - zero) * scale by groups of k, or
q * scale - minimum.

Weights stay in 4, 6 or 8 bits in memory, so a matmul of few rows runs at the speed of reading them. A is f32
and keeps its precision: codes of 4 and 6 bits are looked up as bf16 numbers, which are exact, and each
element of A is the sum of two bf16 numbers, so that the bf16 dot product does the work of f32. Other targets
and 8-bit weights convert to f32. Each group is summed on its own, then scaled and added: the order depends on
nothing but k and the group. Few rows decode weights in registers; for more, a block of a panel is decoded
once into L1, and all row tiles read it there (`quant_block.py`).
"""

from __future__ import annotations

from rlx.codegen.cpu.kernels import KERNEL_ARGS
from rlx.codegen.cpu.primitives import MEMORY
from rlx.codegen.cpu.product.gemm import DimValue, KernelInfo, Size
from rlx.codegen.cpu.product.gemm_cut import Count, Tiles, count_bands, share
from rlx.codegen.cpu.product.gemm_end import Epilogue, Frame, TileEnd, finish_tile
from rlx.codegen.cpu.product.quant_block import LINE, Decoded, add_block, decode_block
from rlx.codegen.cpu.product.quant_bytes import ByteDecoder, byte_decoder, round_rows
from rlx.codegen.cpu.product.quant_decode import Decoder, PairDecoder, Place
from rlx.codegen.native.irtext import Module, constant, vector
from rlx.codegen.native.notation import inline, native, write
from rlx.codegen.native.words import (
    Word,
    byte_at,
    call,
    ceildiv,
    field,
    float32,
    gep,
    i64,
    lanes,
    load,
    loop,
    masked_load,
    noalias,
    prefetch,
    ptr,
    store,
    udiv,
)
from rlx.errors import ShapeError
from rlx.kernel.nests import ContractNest
from rlx.kernel.panels import PANEL_VECTORS, QuantLayout, quantised_of
from rlx.target.cpu import Target

_BLOCK_ROWS = 128  # most rows of A prepared at a time, as long as they fit twice the L2 cache
_FEW_ROWS = 32  # prepared at a time, however long they are; a band has no fewer
_PREPARING = 128  # what preparing an element of A takes, in weights that are decoded
_AHEAD = 8 << 10  # bytes from what is read to what is prefetched: panels follow one another


def quant_layout(
    k: int,
    n: int,
    target: Target,
    bits: int = 4,
    group: int = 32,
    scale: str = "f32",
    zeros: bool = False,
    precision: str = "f32",
    minimums: bool = False,
    block: int = 0,
) -> QuantLayout:
    """The layout that kernels for `target` read; with rows rounded to bytes ("i8"), 8-bit codes in quads."""
    quads = precision == "i8"
    lanes = target.lanes("f32")
    return QuantLayout(k, n, bits, group, lanes, scale, zeros, quads=quads, minimums=minimums, block=block)


GROUPED = {
    "dequantize_groups": "f32",
    "coded_matmul": "i8",
}  # ops that read such weights, their precision of A


def grouped_precision(nest: ContractNest) -> str:
    """In what precision a matmul with quantised weights takes its rows."""
    assert nest.rhs_layout is not None
    return GROUPED[nest.rhs_layout[0]]


def own_groups(nest: ContractNest, target: Target) -> QuantLayout | None:
    """The stated layout of quantised weights, None if kernels for `target` read another one."""
    assert nest.rhs_layout is not None
    stated = dict(nest.rhs_layout[1])
    codes, *factors = stated["layouts"]
    block = next((dict(how)["group"] for how in factors if isinstance(how, tuple)), 0)
    if block:
        one = (("bits", 8), ("group", block), ("minimums", False))
        if not all(isinstance(how, tuple) and how[:-1] == one for how in factors):
            return None
        factors = [own for how in factors for own in how[-1][1]]
    quads = grouped_precision(nest) == "i8"
    found = quantised_of((codes, *factors), stated["group"], target.lanes("f32"), quads, block)
    return found if found is not None and found.minimums == stated["minimums"] else None


def decoder_of(layout: QuantLayout, target: Target, precision: str) -> Decoder:
    """How a target multiplies rows of A with codes."""
    if precision == "i8":
        return byte_decoder(layout, target)
    if layout.bits < 8 and target.has_bf16:
        return PairDecoder(layout, 1 if precision == "bf16" else 2)
    return Decoder(layout)


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
    precision "bf16", A may be rounded to bf16 where that is faster; with "i8", rows are rounded to bytes.

    >>> from rlx.target.cpu import resolve
    >>> target = resolve("x86-64-v3")
    >>> emit_quant_gemm(Module(target), "product", 4, quant_layout(64, 48, target)).scratch_bytes_per_thread
    5760
    """
    shape = (m, layout.k if a_row is None else a_row, layout.n if c_row is None else c_row, a_start)
    return QuantGemm(module, name, shape, layout, c_dtype, precision, operands, dim_value, epilogue).emit()


class QuantGemm:
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
        self.decoder = decoder_of(layout, module.target, precision)
        # Accumulators: per output its total and the sums of a group; and codes, a table and A.
        per_panel = PANEL_VECTORS * (1 + self.decoder.parts)
        self.rows = (module.target.registers - 6) // per_panel
        self.decoded = Decoded(self.decoder)
        self.tall = max(self.rows, self.decoded.rows(module.target.registers))
        self.main = module.function(name, KERNEL_ARGS)
        self.frame = Frame(self.main, 4)
        self.end = TileEnd(name, "float", layout.lanes, MEMORY[c_dtype], self.frame, epilogue, 0)

    def size(self, x: Size) -> Count:
        if isinstance(x, int):
            return x
        if self.dim_value is None:
            raise ShapeError(f"kernel {self.name!r} has the symbolic size {x} but no dim_value to read it by")
        return self.dim_value(self.main, x)

    @property
    def row_bytes(self) -> int:
        """Bytes from one prepared row to the next.

        An odd number of cache lines: rows that are a power of two apart would share a few sets of L1.
        """
        lines = -(-self.decoder.row_bytes(self.padded_k) // LINE)
        return (lines | 1) * LINE

    @property
    def padded_k(self) -> int:
        """k in whole groups and whole vectors."""
        return -(-self.layout.depth // self.layout.lanes) * self.layout.lanes

    def emit(self) -> KernelInfo:
        """Write the kernel."""
        write(self.main, self.kernel, *self.main.args)
        return KernelInfo(self.name, self.rows_bytes + self.stage_bytes + self.decoded.nbytes)

    @property
    def block_rows(self) -> int:
        """Most rows of A that are prepared at a time."""
        m, fit = self.shape[0], 2 * self.module.target.l2_bytes // self.row_bytes
        limit = min(max(fit // _FEW_ROWS * _FEW_ROWS, _FEW_ROWS), _BLOCK_ROWS)
        return min(m, limit) if isinstance(m, int) else limit

    @property
    def rows_bytes(self) -> int:
        """Scratch of prepared rows."""
        return self.block_rows * self.row_bytes

    @property
    def stage_bytes(self) -> int:
        """Scratch of the sums of a block of rows of one panel."""
        return max(self.block_rows, self.rows) * self.layout.columns * 4

    @inline
    def kernel(self, args: ptr, thread: i64, threads: i64, part: i64) -> None:
        """Threads share the panels of all bands of rows; a block of rows goes through all panels of one."""
        layout = self.layout
        m, a_row, c_row, a_start = (self.size(x) for x in self.shape)
        self.frame.share("n", layout.n)
        self.frame.share("c_row", c_row)
        a, b, c = (field(args, operand, ptr) for operand in self.operands)
        a = gep(a, a_start, float32)
        scratch = byte_at(field(args, 1, ptr), thread * field(args, 2, i64))
        self.frame.change("stage", byte_at(scratch, self.rows_bytes))
        bands = self.bands(m, threads)
        start, end = share(bands * layout.panels, thread, threads)
        for band in loop(udiv(start, layout.panels), ceildiv(end, layout.panels)):
            before = band * layout.panels
            first, stop = max(start - before, 0), min(end - before, layout.panels)
            low, high = share(m, band, bands)
            for row in loop(low, high, self.block_rows):
                rows = min(high - row, self.block_rows)
                source = gep(a, row * a_row, float32)
                call(self.preparing(), source, a_row, scratch, rows)
                place = gep(c, row * c_row, self.end.c_element)
                self.block(args, scratch, b, place, c_row, row, rows, first, stop)

    @inline
    def bands(self, m: Count, threads: Count) -> Count:
        """In how many bands rows are cut: threads of one band prepare the same rows, those of different bands
        decode the same weights."""
        if isinstance(m, int) and m < 2 * _FEW_ROWS:
            return 1
        return count_bands(threads, udiv(m, _FEW_ROWS), m * _PREPARING, self.layout.n)

    def preparing(self) -> str:
        """The function that prepares rows."""
        name = f"{self.name}.prepare"
        if isinstance(self.decoder, ByteDecoder):
            return round_rows.written(
                name, decoder=self.decoder, row_bytes=self.row_bytes, padded_k=self.padded_k
            )
        return prepare_rows.written(name, kernel=self)

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

        def run(height: int, j: Count, offset: Count) -> None:
            """Some rows, from `offset` on, of panel j."""
            column = j * layout.columns
            place = gep(gep(c, offset * c_row, element), column, element)
            weights = byte_at(b, j * layout.panel_bytes)
            prepared = byte_at(a, offset * self.row_bytes)
            function = compute_tile.written(f"{self.name}.{height}x1", kernel=self, rows=height)
            call(function, args, self.frame.pointer, prepared, weights, place, row + offset, column)

        def tile(t: Count, j: Count, height: Count, limit: int) -> None:
            """The rows of tile t, which are at most `limit`, of panel j."""
            if limit == 1 or height == limit:
                run(limit, j, tiles.row(self.main, t))
            else:
                tile(t, j, height, limit - 1)

        if rows > self.rows:
            self.by_blocks(args, a, b, c, row, rows, first, stop)
        else:
            for j in loop(first, stop):
                for t in loop(tiles.count):
                    tile(t, j, tiles.height(t), self.rows)

    @inline
    def by_blocks(
        self, args: ptr, a: ptr, b: ptr, c: ptr, row: Count, rows: Count, first: Count, stop: Count
    ) -> None:
        """Panels first..stop of more rows than are computed with weights decoded in registers."""
        layout, decoded = self.layout, self.decoded
        stage = byte_at(a, self.rows_bytes)
        block = byte_at(stage, self.stage_bytes)
        tiles = Tiles.of(self.main, rows, self.tall)
        zero = constant(vector("float", layout.lanes), 0.0)

        def add(
            offset: Count, height: Count, g: Count, groups: Count, limit: int, later: ptr, each: Count
        ) -> None:
            """The products of a tile of at most `limit` rows."""
            if limit == self.lowest or height == limit:
                line = byte_at(a, offset * self.row_bytes)
                factors = gep(byte_at(line, self.decoder.factors_start(self.padded_k)), g, float32)
                function = add_block.written(
                    f"{self.name}.block{limit}", decoded=decoded, row_bytes=self.row_bytes, rows=limit
                )
                at = gep(stage, offset * layout.columns, float32)
                start = self.decoder.element(line, g * layout.group)
                call(function, start, block, factors, at, groups, later, each)
            else:
                add(offset, height, g, groups, limit - 1, later, each)

        for j in loop(first, stop):
            for n in loop(rows * PANEL_VECTORS):
                store(zero, gep(stage, n * layout.lanes, float32))
            for g in loop(0, layout.groups, decoded.groups):
                groups = min(layout.groups - g, decoded.groups)
                panel = byte_at(b, j * layout.panel_bytes)
                call(decode_block.written(f"{self.name}.decode", decoded=decoded), panel, block, g, groups)
                later = byte_at(panel, self.bytes_of(g + groups))  # the next panel follows this one
                each = self.fetched(tiles.count, groups)
                for t in loop(tiles.count):
                    place = byte_at(later, t * groups * each * LINE)
                    add(tiles.row(self.main, t), tiles.height(t), g, groups, self.tall, place, each)
            column = j * layout.columns
            finish = finish_tile.written(f"{self.name}.finish", end=self.end)
            place = gep(c, column, self.end.c_element)
            call(finish, args, self.frame.pointer, place, row, column, rows, PANEL_VECTORS)

    @inline
    def bytes_of(self, groups: Count) -> Count:
        """Bytes that so many groups of a panel take, with their part of the factors of blocks."""
        layout = self.layout
        if not layout.block:
            return groups * layout.block_bytes
        return udiv(groups * layout.block_bytes, layout.block)

    @inline
    def fetched(self, tiles: Count, groups: Count) -> Count:
        """Cache lines of the block that comes next that each group of each tile prefetches: they arrive while
        tiles are computed."""
        lines = -(-self.decoded.groups * self.layout.group_bytes // LINE)
        return ceildiv(lines, tiles * groups)

    @property
    def lowest(self) -> int:
        """Rows of the lowest tile of `by_blocks`: one tile of few rows, or half of the tallest."""
        return min(self.rows + 1, (self.tall + 1) // 2)


@native(internal=True, noinline=True)
def prepare_rows(a: ptr, a_row: i64, to: ptr, rows: i64, *, kernel: QuantGemm) -> None:
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
        if layout.shifted:
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
    kernel: QuantGemm,
    rows: int,
) -> None:
    """Compute `rows` rows of a panel of C from (row, column) on; the pointers point to its operands."""
    layout, decoder, width = kernel.layout, kernel.decoder, PANEL_VECTORS
    zero = constant(vector("float", layout.lanes), 0.0)
    step_bytes = layout.columns * layout.bits * decoder.step // 8
    totals: list[Word] = [Word(zero)] * (rows * width)

    def factors_of(n: int) -> ptr | None:
        """What the row of output n has for each group."""
        place = n // width * kernel.row_bytes + decoder.factors_start(kernel.padded_k)
        return byte_at(a, place) if decoder.row_factors else None

    for g in loop(layout.groups):
        place = Place.of(layout, b, g)
        prepared = decoder.element(a, g * layout.group)
        weights = byte_at(b, kernel.bytes_of(g))
        for line in range(0, layout.group_bytes, LINE):
            prefetch(byte_at(weights, line + _AHEAD))
        sums = [decoder.begin(factors_of(n), g) for n in range(rows * width)]
        for s in loop(layout.group // decoder.step):
            at = decoder.element(prepared, s * decoder.step)
            codes = byte_at(place.codes, s * step_bytes)
            places = [byte_at(codes, j * step_bytes // PANEL_VECTORS) for j in range(PANEL_VECTORS)]
            row_places = [byte_at(at, i * kernel.row_bytes) for i in range(rows)]
            sums = decoder.multiply(row_places, places, sums)

        scales = place.vectors(0)
        zeros = place.vectors(1) if layout.shifted else [None] * width
        of_rows = [decoder.of_row(factors_of(i * width), g) for i in range(rows)]
        totals = [
            decoder.scaled(own, of_rows[n // width], scales[n % width], zeros[n % width], total)
            for n, (own, total) in enumerate(zip(sums, totals, strict=True))
        ]
    kernel.end.through_stage(args, frame, totals, c, row, column, rows)
