"""Matmuls: C[..., m, n] = epilogue(A[..., m, k] @ B[..., k, n]) for any sizes, strides and thread
count.

One kernel serves every value of its run-time sizes. It cuts C into column panels and balanced row tiles, and
calls a family of tile functions (rows 1..MR by 1..NV vectors) through a table, so no row is computed in vain.
B is read from weight panels packed at load, in place, or from panels that the kernel packs in scratch when
that pays; an A stored by columns is packed by blocks of row tiles, one that is not stored is computed by
blocks. Threads share the tiles, never a sum: bits
do not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rlx.codegen.cpu.product.gemm_cut import Depth, PanelForm, PanelOfB, TileOfA, both, choose, either
from rlx.codegen.cpu.product.gemm_dot import DotGemm, suits_dot
from rlx.codegen.cpu.product.gemm_driver import (
    DimValue,
    GemmCall,
    GemmSpec,
    KernelInfo,
    Part,
    ProductDriver,
    Size,
)
from rlx.codegen.cpu.product.gemm_end import Epilogue
from rlx.codegen.cpu.product.gemm_rows import Prologue, row_stride
from rlx.codegen.cpu.product.gemm_tile import TileWriter
from rlx.codegen.cpu.product.microkernel import Kind, kind_of, tile_of
from rlx.codegen.cpu.product.packing import emit_panel_packer, emit_tile_packer
from rlx.codegen.native.irtext import Function, Int, Module, Value, vector
from rlx.codegen.native.irtypes import size_bytes
from rlx.errors import UnsupportedError

__all__ = ["DimValue", "Epilogue", "GemmSpec", "KernelInfo", "Size", "emit_gemm"]

_BLOCK_TILES = 16  # row tiles that go through a group of panels before the next rows: A stays in L2
_FEW_BLOCK_TILES = 2  # the same where all of B fits L2: rows of C and what the epilogue reads then stream
_GROUP_PANELS = 4  # panels of B that are packed together, because short pieces of rows are slow to read
_WIDE_GROUP_PANELS = 8  # the same where rows of A are packed again for every group
_BLOCK_DEPTH = 1024  # k that packed panels and tiles hold at a time
_PACK_TILES = 20  # row tiles from which packing panels of B costs less than reading them in place
_PACK_PANELS = 4  # panels from which packing separate rows of A costs less than reading them in place
_TILE_PAD = 16  # elements between packed row tiles, so that they do not share cache sets
_PANELS_AT_ONCE = {1: 4, 2: 2}  # rows -> panels per call where one panel has too few independent chains
_STAYS_IN_L3 = 8  # weights of more than one part in so many are gone from L3 when they are needed again


def emit_gemm(
    module: Module,
    name: str,
    spec: GemmSpec,
    *,
    operands: tuple[int, int, int] = (3, 4, 5),
    starts: tuple[Size, Size] = (0, 0),
    dim_value: DimValue | None = None,
    epilogue: Epilogue | None = None,
    heavy: bool = False,
    prologue: Prologue | None = None,
    beside: tuple[tuple[int, str], ...] = (),
) -> KernelInfo:
    """Write the kernel `name` into the module. `operands` are the argument fields of A, B and C;
    `starts` the elements before the first one of A and B.

    A `heavy` epilogue (more than a few instructions) is written once and runs over each finished tile while
    it is still in L1; a light one is written into every tile function, where it works on registers. In every
    function that the epilogue writes into, `fn.args[0]` is the kernel's argument table. With a `prologue`, A
    is not in memory: its strides are `(0, ..., row_stride(k), 1)`, those of the rows in scratch. `beside` are
    argument fields and LLVM types of matrices stored like C that the epilogue reads: tiles prefetch them
    early.

    >>> from rlx.target.cpu import resolve
    >>> spec = GemmSpec(4, 32, 8, a_strides=(8, 1), b_strides=(32, 1), c_strides=(32, 1))
    >>> emit_gemm(Module(resolve("x86-64-v3")), "product", spec).scratch_bytes_per_thread
    1024
    """
    call = GemmCall(spec, operands, starts, dim_value, epilogue, heavy, prologue, beside)
    emitter = DotGemm if suits_dot(spec, module.target) else _Gemm
    return emitter(module, name, call).emit()


def with_rows_from_memory(call: GemmCall, kind: Kind) -> GemmCall:
    """The same matmul with rows of A that are read as a prologue reads them, to be prepared in scratch."""
    spec, dim_value = call.spec, call.dim_value

    def size(fn: Function, x: Size) -> Int:
        return x if isinstance(x, int) or dim_value is None else dim_value(fn, x)

    def row(fn: Function, number: Int, batch: tuple[Int, ...]) -> Callable[[Int, Value | None], Value]:
        offset = size(fn, call.starts[0])
        for index, step in zip((*batch, number), spec.a_strides[:-1], strict=True):
            offset = fn.add(offset, fn.mul(index, size(fn, step)))
        start = fn.gep(fn.field(fn.args[0], call.operands[0], "ptr"), offset, kind.element)
        type_ = vector(kind.element, lanes)

        def at(k: Int, mask: Value | None) -> Value:
            place = fn.gep(start, k, kind.element)
            return fn.load(type_, place) if mask is None else fn.masked_load(type_, place, mask)

        return at

    lanes = kind.lanes * kind.group
    strides = (*(0 for _ in spec.batch), row_stride(spec.k), 1)
    return replace(call, spec=replace(spec, a_strides=strides), prologue=Prologue(lanes, row))


class _Gemm(ProductDriver):
    """The emitter of one kernel: sizes, the nest of loops, and where A and B are found."""

    def __init__(self, module: Module, name: str, call: GemmCall) -> None:
        spec = call.spec
        grouped, small = spec.b_packed or spec.a_strides[-1] == 1, spec.quads is not None
        kind = kind_of(spec.dtype, module.target, grouped, prepared=True, small=small)
        rows, vectors = tile_of(spec.dtype, module.target, small)
        if kind.group > 1 and spec.a_strides[-1] != 1:
            raise UnsupportedError(
                f"packed {spec.dtype} weights need rows of A that are contiguous: copy A first"
            )
        if kind.prepares_rows and call.prologue is None:
            call = with_rows_from_memory(call, kind)
        super().__init__(module, name, call, kind, rows, vectors * kind.lanes)
        spec = call.spec
        self.vectors, epilogue = vectors, call.epilogue
        self.tile_width = 1 << (self.rows - 1).bit_length()
        self.b_in_place = not spec.b_packed and spec.b_strides[-1] == 1 and self.kind.group == 1
        self.packs_a = spec.a_strides[-2] == 1 and spec.a_strides[-1] != 1
        prepares_a = self.packs_a or self.computed is not None
        self.group_panels = _WIDE_GROUP_PANELS if prepares_a else _GROUP_PANELS
        # Where the target has masks, part of a register can be stored; elsewhere ragged columns are staged.
        maskable = module.target.has_avx512 or (isinstance(spec.n, int) and spec.n % self.lanes == 0)
        sums_fit_c = self.c_element == self.kind.accumulator and (spec.c_holds_sums or epilogue is None)
        shallow = isinstance(spec.k, int) and spec.k <= _BLOCK_DEPTH
        packs = self.packs_a or not spec.b_packed
        self.blocks_k = packs and sums_fit_c and maskable and not shallow
        self.writer = TileWriter(
            module,
            name,
            self.kind,
            self.vectors,
            self.end,
            panel_stride=self.panel_elements if spec.b_packed else self.columns,
            packed_weights=spec.b_packed,
            staged=call.heavy or not maskable,
            masked_b=self.b_in_place,
            resumes=self.blocks_k,
            beside=() if spec.batch else call.beside,
            quads=spec.quads,
        )

    # ---- sizes

    @property
    def padded_k(self) -> int:
        """Rows of packed weights: k in whole groups."""
        return -(-int(self.spec.k) // self.kind.group) * self.kind.group

    @property
    def panel_elements(self) -> int:
        """Elements of a full panel of packed weights."""
        quads = self.spec.quads
        return self.padded_k * self.columns if quads is None else quads.panel_bytes(self.columns)

    @property
    def at_once(self) -> dict[int, int]:
        """Rows -> panels per call. Weights that come from memory are read in one stream: four of them, a
        panel distant, have four fifths of its speed. Sums of an excess are chains, too, and take registers.
        """
        spec, room = self.spec, self.module.target.l3_bytes // _STAYS_IN_L3
        far = spec.b_packed and int(spec.k) * int(spec.n) * size_bytes(self.element) > room
        chains = 2 if self.kind.has_excess else 1
        return {} if far else {rows: n // chains for rows, n in _PANELS_AT_ONCE.items() if n > chains}

    @property
    def group_columns(self) -> int:
        """Columns of the panels that are packed together."""
        n = self.spec.n
        panels = min(self.group_panels, -(-n // self.columns)) if isinstance(n, int) else self.group_panels
        return 0 if self.spec.b_packed else panels * self.columns

    @property
    def scratch_bytes(self) -> Size:
        """Room for a group of panels of B and a block of row tiles of A, where they may have to be packed."""
        depth = (_BLOCK_DEPTH if self.blocks_k else self.spec.k) + self.kind.group - 1
        size = size_bytes(self.element)
        tiles = (depth * self.tile_width + _TILE_PAD) * (_BLOCK_TILES * size) if self.packs_a else 0
        if self.computed is not None:
            tiles = self.computed.scratch_bytes
        return depth * (self.group_columns * size) + tiles

    # ---- the nest of loops

    def plan(self, panels: Int) -> None:
        """Decide what to pack, by run-time sizes where need be, and fill the frame."""
        fn = self.main
        for name in ("n", "a_row", "c_row"):
            self.frame.share(name, getattr(self, name))
        if self.writer.staged:
            self.frame.change("stage", fn.alloca(self.kind.accumulator, self.rows * self.columns))
        if self.packs_a or self.computed is not None or not self.spec.b_packed:
            offset = fn.mul(fn.args[1], fn.field(fn.args[0], 2))
            self.b_scratch = fn.gep(fn.field(fn.args[0], 1, "ptr"), offset, "i8")
        fits_l2 = fn.cmp(
            "ule", fn.mul(self.k, self.n), self.module.target.l2_bytes // size_bytes(self.element)
        )
        self.block_tiles = fn.select(fits_l2, _FEW_BLOCK_TILES, _BLOCK_TILES)
        if self.computed is not None:
            self.block_tiles = fn.umin(self.block_tiles, self.computed.tiles)
        self.pack_b = either(fn, not self.b_in_place, fn.cmp("uge", self.tiles.count, _PACK_TILES))
        enough = both(fn, fn.cmp("uge", panels, _PACK_PANELS), fn.cmp("uge", self.m, self.tile_width))
        self.pack_a = both(fn, self.packs_a, enough)
        if self.packs_a:
            self.frame.change("a_k", choose(fn, self.pack_a, self.tile_width, self.a_k))
            self.a_starts = fn.alloca("i64", _BLOCK_TILES)
        else:
            self.frame.share("a_k", self.a_k)
        if not self.blocks_k:
            self.frame.share("k", self.k)
        else:
            count = fn.umax(fn.ceildiv(self.k, _BLOCK_DEPTH), 1)
            balanced = fn.round_up(fn.ceildiv(self.k, count), self.kind.group)
            self.depth = choose(fn, either(fn, self.pack_a, self.pack_b), balanced, self.k)

    def product(self, a: Value, b: Value, c: Value, part: Part) -> None:
        """A part of one matmul."""
        fn, start, end = self.main, part.start, part.end
        count = fn.umax(self.tiles.count, 1)
        first, stop = fn.udiv(start, count), fn.ceildiv(end, count)
        low, high = part.low, part.high
        if self.computed is not None:  # of one panel, no more rows than are needed
            single, before = fn.cmp("ule", fn.sub(stop, first), 1), fn.mul(first, count)
            low = fn.select(single, fn.smax(low, fn.sub(start, before)), low)
            high = fn.select(single, fn.smin(high, fn.sub(end, before)), high)

        def group(begin: Int, end_panel: Int) -> None:
            def depth_block(depth: Depth) -> None:
                panel_of_b = self.group_of_b(b, begin, end_panel, depth)

                def block(tile: Int, _: list[Value]) -> None:
                    tile_stop = fn.smin(fn.add(tile, self.block_tiles), high)
                    tile_of_a = self.block_of_a(a, tile, tile_stop, depth)

                    def panel(j: Int, form: PanelForm) -> None:
                        before = fn.mul(j, self.tiles.count)
                        t0 = fn.smax(tile, fn.sub(start, before))
                        t1 = fn.smin(tile_stop, fn.sub(end, before))
                        fn.branch(
                            fn.cmp("slt", t0, t1),
                            lambda: self.panel(tile_of_a, panel_of_b(j, form), c, j, form, t0, t1),
                        )

                    self.each_panel(begin, end_panel, panel)

                fn.loop(low, high, self.block_tiles, [], block)

            self.each_depth(depth_block)

        def general() -> None:
            if self.spec.b_packed:
                return group(first, stop)
            step = self.group_panels
            fn.loop(first, stop, step, [], lambda j, _: group(j, fn.smin(fn.add(j, step), stop)))
            return None

        def by_rows(rows: list[int]) -> None:
            if not rows:
                return general()
            skinny = lambda: self.skinny(rows[0], a, b, c, first, stop)  # noqa: E731
            return fn.branch(fn.cmp("eq", self.m, rows[0]), skinny, lambda: by_rows(rows[1:]))

        few = [
            rows
            for rows, panels in self.at_once.items()
            if not isinstance(self.full, int) or panels <= self.full
        ]
        by_rows(few if self.spec.b_packed or self.b_in_place else [])

    def each_depth(self, block: Callable[[Depth], None]) -> None:
        """block(depth) for the blocks of k; a kernel that does not cut k has one."""
        fn, frame = self.main, self.frame
        if not self.blocks_k:
            return block(Depth(0, self.k, fn.round_up(self.k, self.kind.group)))

        def body(k: Int, _: list[Value]) -> None:
            left = fn.sub(self.k, k)
            size = fn.smin(self.depth, left)
            frame.change("k", size)
            frame.change("fresh", fn.select(fn.cmp("eq", k, 0), 1, 0))
            frame.change("done", fn.select(fn.cmp("eq", size, left), 1, 0))
            block(Depth(k, size, fn.round_up(size, self.kind.group)))

        fn.loop(0, fn.umax(self.k, 1), fn.umax(self.depth, 1), [], body)  # k = 0 still stores its zeros
        return None

    def each_panel(self, first: Int, stop: Int, panel: Callable[[Int, PanelForm], None]) -> None:
        """panel(j, form) for panels first..stop; only the last panel of all can be narrow or ragged."""
        fn = self.main
        static = isinstance(self.n, int)
        # With a run-time n the masked family also serves the full panels: less code, same speed.
        whole = PanelForm(self.vectors, not static, last=False)
        fn.loop(first, fn.smin(stop, self.full), 1, [], lambda j, _: panel(j, whole))

        def narrow(vectors: int) -> None:
            wide_enough = vectors == 1 or fn.cmp("ugt", self.tail, (vectors - 1) * self.lanes)
            form = PanelForm(vectors, not static or self.spec.n % self.lanes != 0, last=True)
            fn.branch(wide_enough, lambda: panel(self.full, form), lambda: narrow(vectors - 1))

        fn.branch(fn.cmp("sgt", stop, self.full), lambda: narrow(self.vectors))

    def panel(
        self, tile_of_a: TileOfA, b: Value, c: Value, j: Int, form: PanelForm, t0: Int, t1: Int
    ) -> None:
        """Row tiles t0..t1 of panel j."""
        fn, tiles = self.main, self.tiles
        column = fn.mul(j, self.columns)
        c = fn.gep(c, column, self.c_element)
        heights = tiles.heights(self.rows)
        if not heights:  # a matmul of no rows writes nothing
            return
        names = [self.writer.function(height, form.vectors, masked=form.masked) for height in heights]

        def function(rows: Int) -> Value:
            if len(names) == 1:
                return Value("ptr", f"@{names[0]}")
            table = self.module.table(f"{names[0]}.table", "ptr", names)
            return fn.load("ptr", fn.gep(table, fn.umin(fn.sub(rows, heights[0]), len(names) - 1), "ptr"))

        low, high = function(tiles.low), function(fn.add(tiles.low, 1))

        def tile(t: Int, _: list[Value]) -> None:
            row = tiles.row(fn, t)
            callee = fn.select(fn.cmp("ult", t, tiles.tall), high, low)
            place = fn.gep(c, fn.mul(row, self.c_row), self.c_element)
            later = self.later_weights(b, t0, t, t1) if self.spec.b_packed else None
            self.writer.call(fn, callee, tile_of_a(t, row), b, place, row, column, later)

        fn.loop(t0, t1, 1, [], tile)

    def later_weights(self, panel: Value, first: Int, tile: Int, stop: Int) -> Value:
        """What tiles first..stop of a panel prefetch while they sum: the last few share the next panel, which
        is in L2 when its first tile comes. After the last panel come the weights of the next matmul. A tile
        that has a panel to itself waits for memory anyway, and prefetches nothing.
        """
        fn, steps = self.main, self.padded_k // self.kind.group
        parts = self.writer.step_bytes // self.writer.pace
        part = fn.sub(tile, fn.smax(fn.sub(stop, parts), first))
        offset = fn.add(
            fn.mul(part, steps * self.writer.pace), self.panel_elements * size_bytes(self.element)
        )
        asks = both(fn, fn.cmp("sge", part, 0), fn.cmp("sgt", fn.sub(stop, first), 1))
        there: Value = fn.select(asks, fn.gep(panel, offset, "i8"), panel)
        return there

    def skinny(self, rows: int, a: Value, b: Value, c: Value, first: Int, stop: Int) -> None:
        """A matmul of very few rows: several full panels per call give the chains that one panel lacks."""
        fn, panels = self.main, self.at_once[rows]
        callee = Value("ptr", f"@{self.writer.function(rows, self.vectors, panels)}")
        whole = fn.smax(fn.sub(fn.smin(stop, self.full), first), 0)
        cut = fn.add(first, fn.mul(fn.udiv(whole, panels), panels))
        if self.b_in_place:
            self.frame.change("b_k", self.b_k)

        def depth_block(depth: Depth) -> None:
            whole_a: TileOfA = lambda tile, row: a  # noqa: E731
            if self.computed is not None:
                whole_a = self.block_of_a(a, 0, 1, depth)

            def several(j: Int, _: list[Value]) -> None:
                column = fn.mul(j, self.columns)
                place = fn.gep(c, column, self.c_element)
                self.writer.call(
                    fn, callee, whole_a(0, 0), self.place_in_b(b, j, column, 0), place, 0, column
                )

            fn.loop(first, cut, panels, [], several)
            panel_of_b = self.group_of_b(b, cut, stop, depth)
            self.each_panel(
                cut, stop, lambda j, form: self.panel(whole_a, panel_of_b(j, form), c, j, form, 0, 1)
            )

        self.each_depth(depth_block)

    # ---- where A and B are found

    def block_of_a(self, a: Value, first: Int, stop: Int, depth: Depth) -> TileOfA:
        """How to find the row tiles first..stop of A, packed if that was decided."""
        fn = self.main
        panels = fn.mul(fn.mul(depth.padded, self.group_columns), size_bytes(self.element))
        if self.computed is not None:
            rows, row0 = fn.gep(self.b_scratch, panels, "i8"), self.tiles.row(fn, first)
            count = fn.sub(self.tiles.row(fn, stop), row0)
            self.computed.compute(fn, rows, row0, count, depth.start, depth.size)
            element = self.kind.row_element
            return lambda tile, row: fn.gep(rows, fn.mul(fn.sub(row, row0), self.a_row), element)
        a = fn.gep(a, fn.mul(depth.start, self.a_k), self.element)
        if not self.packs_a:
            return lambda tile, row: fn.gep(a, fn.mul(row, self.a_row), self.element)
        tiles = fn.gep(self.b_scratch, panels, "i8")
        stride = fn.add(fn.mul(depth.size, self.tile_width), _TILE_PAD)
        # The last tiles begin early enough to be read in whole vectors inside the matrix.
        latest = fn.sub(self.m, self.tile_width)

        def pack() -> None:
            def start(tile: Int, _: list[Value]) -> None:
                at = fn.umin(self.tiles.row(fn, tile), latest)
                fn.store(at, fn.gep(self.a_starts, fn.sub(tile, first), "i64"))

            fn.loop(first, stop, 1, [], start)
            packer = emit_tile_packer(self.module, self.kind, self.tile_width)
            fn.call(packer, [a, self.a_k, tiles, stride, depth.size, self.a_starts, fn.sub(stop, first)])

        fn.branch(self.pack_a, pack)

        def place(tile: Int, row: Int) -> Value:
            skipped = fn.sub(row, fn.umin(row, latest))
            packed = fn.gep(tiles, fn.add(fn.mul(fn.sub(tile, first), stride), skipped), self.element)
            found: Value = fn.select(self.pack_a, packed, fn.gep(a, row, self.element))
            return found

        return place

    def place_in_b(self, b: Value, j: Int, column: Int, k: Int) -> Value:
        """Where panel j, which starts at `column`, is in packed weights or, from k on, in the matrix."""
        fn = self.main
        if self.spec.quads is not None:
            return fn.gep(b, fn.mul(j, self.panel_elements), self.element)
        if self.spec.b_packed:
            return fn.gep(b, fn.mul(column, self.padded_k), self.element)
        return fn.gep(b, fn.add(fn.mul(column, self.b_column), fn.mul(k, self.b_k)), self.element)

    def group_of_b(self, b: Value, first: Int, stop: Int, depth: Depth) -> PanelOfB:
        """How to find the panels first..stop of B, packed where they must be or where that was decided."""
        fn = self.main
        if self.spec.b_packed:
            return lambda j, form: self.place_in_b(b, j, fn.mul(j, self.columns), 0)

        def pack(j: Int, count: Int, vectors: int, to: Value) -> None:
            packer = emit_panel_packer(self.module, self.kind, vectors, self.b_k, self.b_column)
            column = fn.mul(j, self.columns)
            source = self.place_in_b(b, j, column, depth.start)
            fn.call(packer, [source, self.b_k, self.b_column, to, depth.size, fn.sub(self.n, column), count])

        whole = fn.smax(fn.sub(fn.smin(stop, self.full), first), 0)
        some = both(fn, self.pack_b, fn.cmp("ne", whole, 0))
        fn.branch(some, lambda: pack(first, whole, self.vectors, self.b_scratch))

        def place(j: Int, form: PanelForm) -> Value:
            ragged = form.last and form.masked and not self.module.target.has_avx512
            packed = either(fn, self.pack_b, ragged)
            offset = fn.mul(fn.mul(fn.sub(j, first), self.columns), depth.padded)
            panel = fn.gep(self.b_scratch, offset, self.element)
            if form.last:
                fn.branch(packed, lambda: pack(j, 1, form.vectors, panel))
            self.frame.change("b_k", choose(fn, packed, form.vectors * self.lanes, self.b_k))
            in_place = self.place_in_b(b, j, fn.mul(j, self.columns), depth.start)
            found: Value = fn.select(packed, panel, in_place)
            return found

        return place
