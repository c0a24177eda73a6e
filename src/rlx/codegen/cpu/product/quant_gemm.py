"""Products with quantised weights: C[m, n] = epilogue(A[m, k] @ W), W = (q - zero) * scale by groups of k.

Weights stay in 4 or 8 bits in memory, so a matmul of few rows runs at the speed of reading them. A is f32
and keeps its precision: 4-bit weights are looked up as bf16 numbers, which are exact, and each element of A
is the sum of two bf16 numbers, so that the bf16 dot product does the work of f32. Other targets and 8-bit
weights convert to f32. Each group is summed on its own, then scaled and added: the order depends on nothing
but k and the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rlx.codegen.cpu.kernels import KERNEL_ARGS
from rlx.codegen.cpu.primitives import MEMORY
from rlx.codegen.cpu.product.gemm import DimValue, KernelInfo, Size
from rlx.codegen.cpu.product.gemm_cut import Tiles, share
from rlx.codegen.cpu.product.gemm_end import Epilogue, Frame, TileEnd
from rlx.codegen.cpu.product.gemm_tile import TILE_PARAMS
from rlx.codegen.native import twins
from rlx.codegen.native.irtext import Function, Int, Module, Value, constant, lanes_of, vector
from rlx.errors import ShapeError
from rlx.kernel.nests import ContractNest
from rlx.kernel.panels import PANEL_VECTORS, QuantLayout, quantised_of
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


class _Decoder:
    """Multiplies prepared rows of A with the codes of a group; this one converts codes to f32."""

    def __init__(self, fn: Function, layout: QuantLayout) -> None:
        self.fn, self.layout = fn, layout
        self.sums = 1  # accumulators per output
        self.words = vector("i32", layout.lanes)
        self.floats = vector("float", layout.lanes)

    @property
    def step(self) -> int:
        """k taken at once."""
        return 8 if self.layout.bits == 4 else 1

    def codes(self, place: Value) -> list[Value]:
        """One vector of codes for each k of a step, as f32."""
        fn = self.fn
        if self.layout.bits == 8:
            loaded = fn.load(vector("i8", self.layout.lanes), place)
            return [fn.sitofp(fn.sext(loaded, "i32"), "float")]
        word = fn.load(self.words, place)
        nibbles = [fn.value(fn.lshr(word, 4 * (k // 2) + 16 * (k % 2))) for k in range(8)]
        if fn.module.target.has_avx512:  # the table takes the low four bits
            table = lanes_of(self.floats, [float(i - 8) for i in range(16)])
            name, twin = "llvm.x86.avx512.permvar.sf.512", twins.look_up
            return [
                fn.intrinsic(name, self.floats, table, nibble, feature="avx512f", twin=twin)
                for nibble in nibbles
            ]
        return [fn.fsub(fn.sitofp(fn.value(fn.and_(nibble, 15)), "float"), 8.0) for nibble in nibbles]

    def multiply(self, rows: Sequence[Value], places: Sequence[Value], sums: list[Value]) -> list[Value]:
        """Add one step to the sums; `rows` point to prepared A, `places` to the codes of each vector."""
        fn = self.fn
        for j, place in enumerate(places):
            for k, code in enumerate(self.codes(place)):
                for i, row in enumerate(rows):
                    n = i * len(places) + j
                    a = fn.broadcast(fn.gep(row, k, "float"), "float", self.layout.lanes)
                    sums[n] = fn.fma(a, code, sums[n])
        return sums

    def total(self, sums: list[Value], n: int) -> Value:
        """The sum of a group for output n."""
        return sums[n]

    def prepare(self, x: Value, place: Value) -> None:
        """Store one vector of A as `multiply` reads it."""
        self.fn.store(x, place)


class _PairDecoder(_Decoder):
    """4-bit codes looked up as bf16 pairs; A is a high and (if there are two parts) a low bf16 part."""

    def __init__(self, fn: Function, layout: QuantLayout, parts: int) -> None:
        super().__init__(fn, layout)
        self.sums = parts

    def multiply(self, rows: Sequence[Value], places: Sequence[Value], sums: list[Value]) -> list[Value]:
        fn, lanes = self.fn, self.layout.lanes
        halves, pairs = vector("i16", 2 * lanes), vector("bfloat", 2 * lanes)
        # The bf16 numbers -8..7, twice: the look-up takes five bits, of which the fifth is another code's.
        table = lanes_of(halves, [_bf16_bits(i % 16 - 8) for i in range(32)])
        for j, place in enumerate(places):
            word = fn.bitcast(fn.load(self.words, place), halves)
            for pair in range(4):
                index = fn.value(fn.lshr(word, 4 * pair))
                name, twin = "llvm.x86.avx512.permvar.hi.512", twins.look_up
                found = fn.intrinsic(name, halves, table, index, feature="avx512bw", twin=twin)
                code = fn.bitcast(found, pairs)
                for i, row in enumerate(rows):
                    for part in range(self.sums):
                        n = self.sums * (i * len(places) + j) + part
                        a = fn.splat(fn.load("i32", fn.gep(row, 2 * pair + part, "i32")), lanes)
                        sums[n] = fn.dot_bf16(sums[n], fn.bitcast(a, pairs), code)
        return sums

    def total(self, sums: list[Value], n: int) -> Value:
        if self.sums == 1:
            return sums[n]
        return self.fn.fadd(sums[2 * n], sums[2 * n + 1])

    def prepare(self, x: Value, place: Value) -> None:
        fn = self.fn
        high = fn.fptrunc(x, "bfloat", exact=False)
        rest = fn.fsub(x, fn.fpext(high, "float"))
        finite = fn.fcmp("oeq", rest, rest)  # the rest of an infinity is NaN and must not count
        low = fn.fptrunc(fn.select(finite, rest, constant(x.type, 0.0)), "bfloat", exact=False)
        words = vector("i32", x.width // 2)
        mixed = [i // 2 + i % 2 * (x.width // 2) for i in range(x.width)]
        fn.store(fn.shuffle(fn.bitcast(high, words), fn.bitcast(low, words), mixed), place)


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
        self.end = TileEnd(module, name, "float", layout.lanes, MEMORY[c_dtype], self.frame, epilogue, 0)

    def decoder(self, fn: Function) -> _Decoder:
        return _PairDecoder(fn, self.layout, self.parts) if self.parts else _Decoder(fn, self.layout)

    def size(self, x: Size) -> Int:
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
        fn, layout = self.main, self.layout
        args, thread, threads, _ = fn.args
        m, a_row, c_row, a_start = (self.size(x) for x in self.shape)
        self.frame.share("n", layout.n)
        self.frame.share("c_row", c_row)
        self.frame.change("stage", fn.alloca("float", self.rows * layout.columns))
        a, b, c = (fn.field(args, operand, "ptr") for operand in self.operands)
        a = fn.gep(a, a_start, "float")
        scratch = fn.gep(fn.field(args, 1, "ptr"), fn.mul(thread, fn.field(args, 2)), "i8")
        first, stop = share(fn, layout.panels, thread, threads)

        def block(row: Int, _: list[Value]) -> None:
            rows = fn.smin(fn.sub(m, row), _BLOCK_ROWS)
            source = fn.gep(a, fn.mul(row, a_row), "float")
            fn.call(self.preparer(), [source, a_row, scratch, rows])
            place = fn.gep(c, fn.mul(row, c_row), self.end.c_element)
            self.block(scratch, b, place, c_row, row, rows, first, stop)

        busy = fn.cmp("slt", first, stop)
        fn.branch(busy, lambda: fn.loop(0, m, _BLOCK_ROWS, [], block))
        known = min(m, _BLOCK_ROWS) if isinstance(m, int) else _BLOCK_ROWS
        return KernelInfo(self.name, known * self.row_bytes)

    def block(
        self, a: Value, b: Value, c: Value, c_row: Int, row: Int, rows: Int, first: Int, stop: Int
    ) -> None:
        """All panels first..stop of a block of prepared rows."""
        fn, layout = self.main, self.layout
        tiles = Tiles.of(fn, rows, self.rows)

        def run(tile_rows: int, panels: int, j: Int, offset: Int) -> None:
            column = fn.mul(j, layout.columns)
            place = fn.gep(fn.gep(c, fn.mul(offset, c_row), self.end.c_element), column, self.end.c_element)
            weights = fn.gep(b, fn.mul(j, layout.panel_bytes), "i8")
            prepared = fn.gep(a, fn.mul(offset, self.row_bytes), "i8")
            callee = self.tile(tile_rows, panels)
            fn.call(
                callee,
                [fn.args[0], self.frame.pointer, prepared, weights, place, fn.add(row, offset), column],
            )

        def panel(j: Int, _: list[Value]) -> None:
            def one(t: Int, _: list[Value]) -> None:
                height = fn.add(tiles.low, fn.select(fn.cmp("ult", t, tiles.tall), 1, 0))
                by_height(self.rows, height, lambda h: run(h, 1, j, tiles.row(fn, t)))

            fn.loop(0, tiles.count, 1, [], one)

        def by_height(limit: int, height: Int, work: Callable[[int], None]) -> None:
            if limit == 1:
                return work(1)
            matches = fn.cmp("eq", height, limit)
            return fn.branch(matches, lambda: work(limit), lambda: by_height(limit - 1, height, work))

        def few(choices: list[int], begin: Int) -> None:
            """Several panels at once while the rows are few, then the panels that are left."""
            if not choices:
                fn.loop(begin, stop, 1, [], panel)
                return
            height, panels = choices[0], self.panels_at_once(choices[0])

            def several() -> None:
                cut = fn.add(begin, fn.mul(fn.udiv(fn.sub(stop, begin), panels), panels))
                fn.loop(begin, cut, panels, [], lambda j, _: run(height, panels, j, 0))
                fn.loop(cut, stop, 1, [], panel)

            fn.branch(fn.cmp("eq", rows, height), several, lambda: few(choices[1:], begin))

        few([height for height in range(1, self.rows) if self.panels_at_once(height) > 1], first)

    def preparer(self) -> str:
        """Name of the function that copies rows of A into scratch, padded to whole groups."""
        name = f"{self.name}.prepare"
        if self.module.defines(name):
            return name
        layout = self.layout
        params = [("ptr", "a"), ("i64", "a_row"), ("ptr", "to"), ("i64", "rows")]
        fn = self.module.function(name, params, internal=True, noinline=True)
        a, a_row, to, rows = fn.args
        decoder = self.decoder(fn)
        whole = layout.k // layout.lanes * layout.lanes
        type_ = vector("float", layout.lanes)

        def one(i: Int, _: list[Value]) -> None:
            source = fn.gep(a, fn.mul(i, a_row), "float")
            target = fn.gep(to, fn.mul(i, self.row_bytes), "i8")

            def copy(k: Int, _: list[Value]) -> None:
                decoder.prepare(fn.load(type_, fn.gep(source, k, "float")), fn.gep(target, k, "float"))

            fn.loop(0, whole, layout.lanes, [], copy)
            for k in range(whole, self.padded_k, layout.lanes):  # zeros past k
                there = max(layout.k - k, 0)
                x = fn.masked_load(type_, fn.gep(source, k, "float"), fn.lanes(there, layout.lanes))
                decoder.prepare(x if there else constant(type_, 0.0), fn.gep(target, k, "float"))
            if layout.zeros:
                self.group_sums(fn, source, fn.gep(target, self.padded_k, "float"))

        fn.loop(0, rows, 1, [], one)
        return name

    def group_sums(self, fn: Function, source: Value, sums: Value) -> None:
        """The sum of every group of a row of A."""
        layout = self.layout

        def one(g: Int, _: list[Value]) -> None:
            first = fn.mul(g, layout.group)
            stop = fn.smin(fn.add(first, layout.group), layout.k)
            add = lambda k, total: [fn.fadd(total[0], fn.load("float", fn.gep(source, k, "float")))]  # noqa: E731
            (total,) = fn.loop(first, stop, 1, [constant("float", 0.0)], add)
            fn.store(total, fn.gep(sums, g, "float"))

        fn.loop(0, layout.groups, 1, [], one)

    def tile(self, rows: int, panels: int) -> str:
        """Name of the function for `rows` x (panels) outputs."""
        name = f"{self.name}.{rows}x{panels}"
        if self.module.defines(name):
            return name
        fn = self.module.function(name, TILE_PARAMS, internal=True, noinline=True)
        _, frame, a, b, c, row, column = fn.args
        layout, decoder = self.layout, self.decoder(fn)
        vectors = panels * PANEL_VECTORS
        outputs = rows * vectors
        zero = constant(vector("float", layout.lanes), 0.0)
        step_bytes = layout.columns * layout.bits * decoder.step // 8

        def group(g: Int, totals: list[Value]) -> list[Value]:
            weights = fn.gep(b, fn.mul(g, layout.group_bytes), "i8")
            prepared = fn.gep(a, fn.mul(g, layout.group), "float")
            panel_starts = [fn.gep(weights, p * layout.panel_bytes, "i8") for p in range(panels)]

            def step(s: Int, sums: list[Value]) -> list[Value]:
                at = fn.gep(prepared, fn.mul(s, decoder.step), "float")
                offset = fn.add(fn.mul(s, step_bytes), layout.codes_start)
                places = [
                    fn.gep(fn.gep(start, offset, "i8"), j * step_bytes // PANEL_VECTORS, "i8")
                    for start in panel_starts
                    for j in range(PANEL_VECTORS)
                ]
                row_places = [fn.gep(at, i * self.row_bytes, "i8") for i in range(rows)]
                return decoder.multiply(row_places, places, list(sums))

            sums = fn.loop(0, layout.group // decoder.step, 1, [zero] * (outputs * decoder.sums), step)
            out = []
            for n, total in enumerate(totals):
                i, j = divmod(n, vectors)
                start = panel_starts[j // PANEL_VECTORS]
                found = decoder.total(sums, n)
                if layout.zeros:
                    whole = fn.gep(a, i * self.row_bytes + 4 * self.padded_k, "i8")
                    of_a = fn.broadcast(fn.gep(whole, g, "float"), "float", layout.lanes)
                    center = self.factor(fn, start, j % PANEL_VECTORS, layout.factors_bytes)
                    found = fn.fma(fn.fneg(center), of_a, found)
                out.append(fn.fma(self.factor(fn, start, j % PANEL_VECTORS, 0), found, total))
            return out

        totals = fn.loop(0, layout.groups, 1, [zero] * outputs, group)
        self.end.through_stage(fn, frame, totals, c, row, column, rows)
        return name

    def factor(self, fn: Function, start: Value, j: int, offset: int) -> Value:
        """Scales (or zeros, at their offset) of one vector of a group, as f32."""
        layout = self.layout
        element = MEMORY[layout.scale]
        place = fn.gep(start, offset + j * layout.factors_bytes // PANEL_VECTORS, "i8")
        loaded = fn.load(vector(element, layout.lanes), place)
        return fn.fpext(loaded, "float") if element == "half" else loaded
