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

from rlx.codegen.cpu.product.gemm_cut import Count, Depth, PanelForm, PanelOfB, Part, RowBlock, TileOfA
from rlx.codegen.cpu.product.gemm_dot import DotGemm, suits_dot
from rlx.codegen.cpu.product.gemm_driver import (
    DimValue,
    GemmCall,
    GemmSpec,
    GivenSize,
    KernelInfo,
    ProductDriver,
    Size,
    with_rows_from_memory,
)
from rlx.codegen.cpu.product.gemm_end import Epilogue
from rlx.codegen.cpu.product.gemm_matrix import MatrixGemm, suits_matrices
from rlx.codegen.cpu.product.gemm_rows import Prologue
from rlx.codegen.cpu.product.gemm_tile import LINE, LONG, TileWriter
from rlx.codegen.cpu.product.microkernel import kind_of, tile_of
from rlx.codegen.cpu.product.packing import panel_packer, panel_widener, tile_packer
from rlx.codegen.native.irtext import Module, Value
from rlx.codegen.native.irtypes import size_bytes
from rlx.codegen.native.notation import inline
from rlx.codegen.native.words import (
    alloca,
    byte_at,
    call,
    ceildiv,
    gep,
    i64,
    load,
    loop,
    ptr,
    round_up,
    select,
    udiv,
    uge,
    ugt,
    ule,
    ult,
    umax,
    umin,
)
from rlx.errors import UnsupportedError
from rlx.records import dataclass
from rlx.target.cpu import Target

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
_WIDEN_TILES = 8  # row tiles from which a panel of 16-bit weights is widened once, not in every tile
_WIDEN_TILES_IN_STEPS = 3  # the same where widening takes more than an instruction or two
_STAYS_IN_L3 = 8  # weights of more than one part in so many are gone from L3 when they are needed again
_STAYS_IN_L2 = 2  # the same of L2, in a program whose weights do not stay in L3
_AHEAD = 4096  # bytes from the 16-bit weights that few rows read to those that they prefetch


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
    given: GivenSize | None = None,
) -> KernelInfo:
    """Write the kernel `name` into the module. `operands` are the argument fields of A, B and C;
    `starts` the elements before the first one of A and B.

    A `heavy` epilogue (more than a few instructions) is written once and runs over each finished tile while
    it is still in L1; a light one is written into every tile function, where it works on registers. In every
    function that the epilogue writes into, `fn.args[0]` is the kernel's argument table. With a `prologue`, A
    is not in memory: its strides are `(0, ..., row_stride(k), 1)`, those of the rows in scratch. `beside` are
    argument fields and LLVM types of matrices stored like C that the epilogue reads: tiles prefetch them
    early. With `given`, n, k and the distances of rows are read at run time though they are known
    (`shared_facts`).

    >>> from rlx.target.cpu import resolve
    >>> spec = GemmSpec(4, 32, 8, a_strides=(8, 1), b_strides=(32, 1), c_strides=(32, 1))
    >>> emit_gemm(Module(resolve("x86-64-v3")), "product", spec).scratch_bytes_per_thread
    1024
    """
    call = GemmCall(spec, operands, starts, dim_value, epilogue, heavy, prologue, beside, given)
    if suits_matrices(spec, module.target):
        return MatrixGemm(module, name, call).emit()
    emitter = DotGemm if suits_dot(spec, module.target) else _Gemm
    return emitter(module, name, call).emit()


def shared_facts(spec: GemmSpec, target: Target) -> tuple[bool, ...] | None:
    """What the code of a matmul depends on where its widths are `given` at run time; None where they cannot
    be. Matmuls of equal facts share their code. Bits are the same: the order of a sum is that of k."""
    known = all(isinstance(x, int) for x in spec.widths.values())
    plain = spec.b_packed and spec.quads is None and spec.b_dtype is None and not spec.batch
    kind = kind_of(spec.dtype, target, prepared=True)
    if not known or not plain or spec.a_strides[-1] != 1 or kind.group != 1 or kind.prepares_rows:
        return None
    return (int(spec.n) % kind.lanes == 0,)


@dataclass(frozen=True)
class Rows:
    """A part, and row tiles low..high, which hold all of it."""

    part: Part
    low: Count
    high: Count


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
            name,
            self.stored,
            self.vectors,
            self.end,
            panel_stride=None if call.given else self.panel_elements if spec.b_packed else self.columns,
            packed_weights=spec.b_packed,
            staged=call.heavy or not maskable,
            masked_b=self.b_in_place,
            resumes=self.blocks_k,
            deep=call.given is not None or (isinstance(spec.k, int) and spec.k >= LONG),
            beside=() if spec.batch else call.beside,
            quads=spec.quads,
        )
        self.wide_writer = replace(self.writer, name=f"{name}.wide", kind=self.kind)

    # ---- sizes

    @property
    def widens(self) -> bool:
        """Whether panels of 16-bit weights are widened once for many rows: where they stay in L2."""
        wide = self.panel_elements * size_bytes(self.element) if self.spec.b_dtype is not None else 0
        return 0 < wide <= self.module.target.l2_bytes // 2

    @property
    def least_tiles(self) -> int:
        """Row tiles from which a panel is worth what is done to it first."""
        if self.widens:
            return self.widen_tiles
        return super().least_tiles if self.spec.b_packed else _PACK_TILES

    @property
    def widen_tiles(self) -> int:
        """Row tiles from which panels are widened."""
        in_steps = self.spec.b_dtype == "f16" and not self.module.target.converts_f16
        return _WIDEN_TILES_IN_STEPS if in_steps else _WIDEN_TILES

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
        """Rows -> panels per call of weights that are `near`. Those that come from memory are read in one
        stream: four of them, a panel distant, have four fifths of its speed. Sums of an excess are chains,
        too, and take registers; so do products of widened weights that are not added at once.
        """
        apart = self.spec.b_dtype is not None and not self.module.target.has_fma
        chains = 2 if self.kind.has_excess or apart else 1
        return {rows: n // chains for rows, n in _PANELS_AT_ONCE.items() if n > chains}

    @property
    def near(self) -> Count:
        """Whether B comes from the caches: packed weights stay there until they are needed again."""
        if not self.spec.b_packed:
            return True
        target = self.module.target
        if self.module.weights_stay:
            return self.weights_fit(target.l3_bytes // _STAYS_IN_L3)
        return self.weights_fit(target.l2_bytes // _STAYS_IN_L2)

    @property
    def group_columns(self) -> int:
        """Columns of the panels that are packed together."""
        if self.widens:
            return self.columns
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

    @inline
    def plan(self, panels: Count) -> None:
        """Decide what to pack, by run-time sizes where need be, and fill the frame."""
        for name in ("n", "a_row", "c_row"):
            self.frame.share(name, getattr(self, name))
        if self.writer.staged:
            self.frame.change("stage", alloca(self.kind.accumulator, self.rows * self.columns))
        if self.packs_a or self.computed is not None or not self.spec.b_packed or self.widens:
            self.b_scratch = self.scratch()
        fits_l2 = ule(self.k * self.n, self.module.target.l2_bytes // size_bytes(self.element))
        self.block_tiles = select(fits_l2, _FEW_BLOCK_TILES, _BLOCK_TILES)
        self.most_tiles: Count = _BLOCK_TILES
        if self.computed is not None:
            self.block_tiles = umin(self.block_tiles, self.computed.tiles)
            self.most_tiles = min(_BLOCK_TILES, self.computed.tiles)
        self.pack_b = False
        if not self.spec.b_packed:
            self.pack_b = (not self.b_in_place) | uge(self.tiles.count, _PACK_TILES)
        enough = uge(panels, _PACK_PANELS) & uge(self.m, self.tile_width)
        self.pack_a = self.packs_a & enough
        if self.packs_a:
            self.frame.change("a_k", select(self.pack_a, self.tile_width, self.a_k))
            self.a_starts = alloca(i64, _BLOCK_TILES)
        else:
            self.frame.share("a_k", self.a_k)
        if not self.blocks_k:
            self.frame.share("k", self.k)
        else:
            count = umax(ceildiv(self.k, _BLOCK_DEPTH), 1)
            balanced = round_up(ceildiv(self.k, count), self.kind.group)
            self.depth = select(self.pack_a | self.pack_b, balanced, self.k)

    @inline
    def product(self, a: ptr, b: ptr, c: ptr, part: Part) -> None:
        """A part of one matmul."""
        first, stop = part.panels()
        low, high = (part.low, part.high) if self.computed is None else part.needed_rows(first, stop)
        own = Rows(part, low, high)

        near = self.near
        prefetched = self.spec.b_dtype is not None and near is not True

        def by_rows(few: list[int]) -> None:
            """Very few rows have code of their own."""
            if few:
                if near & (self.m == few[0]):
                    self.skinny(few[0], a, b, c, first, stop)
                elif prefetched and self.m == few[0]:
                    self.skinny(few[0], a, b, c, first, stop, far=True)
                else:
                    by_rows(few[1:])
            elif self.widens:
                if uge(self.tiles.count, self.widen_tiles):
                    self.group(a, b, c, first, stop, own, wide=True)
                else:
                    self.group(a, b, c, first, stop, own)
            elif self.spec.b_packed:
                self.group(a, b, c, first, stop, own)
            else:
                for j in loop(first, stop, self.group_panels):
                    self.group(a, b, c, j, min(j + self.group_panels, stop), own)

        few = [
            rows
            for rows, panels in self.at_once.items()
            if not isinstance(self.full, int) or panels <= self.full
        ]
        own_code = near is not False or prefetched
        by_rows(few if own_code and (self.spec.b_packed or self.b_in_place) else [])

    @inline
    def group(self, a: ptr, b: ptr, c: ptr, first: Count, stop: Count, own: Rows, wide: bool = False) -> None:
        """Own rows of panels first..stop: block by block of k, then of row tiles. `wide`: panels are widened
        first.
        """
        block_tiles = self.most_tiles if wide else self.block_tiles

        def block(depth: Depth) -> None:
            panel_of_b = self.group_of_b(b, first, stop, depth)

            def panel(j: Count, form: PanelForm, rows: RowBlock) -> None:
                top, bottom = own.part.of_panel(j)
                t0, t1 = max(rows.start, top), min(rows.stop, bottom)
                if t0 < t1:
                    stored = panel_of_b(j, form)
                    if wide:
                        count = depth.size * form.vectors
                        call(panel_widener(self.stored), stored, self.b_scratch, count)
                        self.panel(rows.tile_of_a, self.b_scratch, c, j, form, t0, t1, stored)
                    else:
                        self.panel(rows.tile_of_a, stored, c, j, form, t0, t1)

            for tile in loop(own.low, own.high, block_tiles):
                tile_stop = min(tile + block_tiles, own.high)
                rows = RowBlock(tile, tile_stop, self.block_of_a(a, tile, tile_stop, depth))
                self.each_panel(first, stop, rows, panel)

        self.each_depth(block)

    @inline
    def each_depth(self, block: Callable[[Depth], None]) -> None:
        """block(depth) for the blocks of k; a kernel that does not cut k has one."""
        group = self.kind.group
        if not self.blocks_k:
            block(Depth(0, self.k, round_up(self.k, group)))
        else:
            for k in loop(0, umax(self.k, 1), umax(self.depth, 1)):  # k = 0 still stores its zeros
                left = self.k - k
                size = min(self.depth, left)
                self.frame.change("k", size)
                self.frame.change("fresh", select(k == 0, 1, 0))
                self.frame.change("done", select(size == left, 1, 0))
                block(Depth(k, size, round_up(size, group)))

    @inline
    def each_panel(
        self, first: Count, stop: Count, rows: RowBlock, panel: Callable[[Count, PanelForm, RowBlock], None]
    ) -> None:
        """panel(j, form, rows) for panels first..stop; only the last of all can be narrow or ragged."""
        static = isinstance(self.spec.n, int)
        # With a run-time n the masked family also serves the full panels: less code, same speed.
        whole = PanelForm(self.vectors, not static, last=False)
        for j in loop(first, min(stop, self.full)):
            panel(j, whole, rows)

        def narrow(vectors: int) -> None:
            form = PanelForm(vectors, not static or self.spec.n % self.lanes != 0, last=True)
            if vectors == 1 or ugt(self.tail, (vectors - 1) * self.lanes):
                panel(self.full, form, rows)
            else:
                narrow(vectors - 1)

        if stop > self.full:
            narrow(self.vectors)

    @inline
    def panel(
        self,
        tile_of_a: TileOfA,
        b: ptr,
        c: ptr,
        j: Count,
        form: PanelForm,
        t0: Count,
        t1: Count,
        stored: ptr | None = None,
    ) -> None:
        """Row tiles t0..t1 of panel j; one that was widened is `stored` elsewhere."""
        tiles, column = self.tiles, j * self.columns
        line = gep(c, column, self.c_element)
        heights, writer, source = tiles.heights(self.rows), self.writer, b
        if stored is not None:
            writer, source = self.wide_writer, stored
            least = (self.rows * (self.widen_tiles - 1) + 1) // self.widen_tiles  # of balanced tiles
            heights = [height for height in heights if height >= least]
        if heights:  # a matmul of no rows writes nothing
            names = [writer.function(height, form.vectors, masked=form.masked) for height in heights]
            low = self.tile_function(names, tiles.low - heights[0])
            high = self.tile_function(names, tiles.low + 1 - heights[0])
            for t in loop(t0, t1):
                row = tiles.row(self.main, t)
                function = select(ult(t, tiles.tall), high, low)
                place = gep(line, row * self.c_row, self.c_element)
                later = b
                if self.spec.b_packed:
                    ahead = self.later_weights(source, t0, t, t1, writer.pace)
                    later = ahead if stored is None else select(ahead == source, b, ahead)
                self.tile(function, tile_of_a(t, row), b, place, row, column, later)

    @inline
    def tile_function(self, names: list[str], number: Count) -> ptr:
        """One of the functions, by a number known at run time."""
        if len(names) == 1:
            return ptr(Value("ptr", f"@{names[0]}"))
        table = self.module.table(f"{names[0]}.table", "ptr", names)
        return load(ptr, gep(table, umin(number, len(names) - 1), ptr))

    @inline
    def tile(self, function: ptr, a: ptr, b: ptr, c: ptr, row: Count, column: Count, later: ptr) -> None:
        """Compute the tile of C at (row, column), and prefetch `later` weights, if they are not `b`."""
        call(function, self.args, self.frame.pointer, a, b, c, row, column, later)

    @inline
    def later_weights(self, panel: ptr, first: Count, tile: Count, stop: Count, pace: int) -> ptr:
        """What tiles first..stop of a panel prefetch while they sum: the last few share the next panel, which
        is in L2 when its first tile comes. After the last panel come the weights of the next matmul. A tile
        that has a panel to itself waits for memory anyway, and prefetches nothing.
        """
        if self.call.given is None:
            steps, elements = self.padded_k // self.kind.group, self.panel_elements
        else:
            steps, elements = self.k, self.k * self.columns
        parts = self.writer.step_bytes // pace
        if self.spec.b_dtype is not None:  # a step may read a line and a half
            parts = -(-self.writer.step_bytes // pace)
        part = tile - max(stop - parts, first)
        offset = part * (steps * pace) + elements * size_bytes(self.stored.element)
        asks = (part >= 0) & (stop - first > 1)
        return select(asks, byte_at(panel, offset), panel)

    @inline
    def skinny(self, rows: int, a: ptr, b: ptr, c: ptr, first: Count, stop: Count, far: bool = False) -> None:
        """A matmul of very few rows: several full panels per call give the chains that one panel lacks.

        `far` weights of 16 bits are prefetched: widening takes so many instructions that a processor does not
        look far enough ahead. Where a step reads less than a cache line, two panels keep up with memory.
        """
        panels = self.at_once[rows]
        if far:
            panels = min(panels, 2 if self.writer.step_bytes < LINE else 1)
        name = self.writer.function(rows, self.vectors, panels, ahead=_AHEAD if far else 0)
        function = ptr(Value("ptr", f"@{name}"))
        whole = max(min(stop, self.full) - first, 0)
        cut = first + udiv(whole, panels) * panels
        if self.b_in_place:
            self.frame.change("b_k", self.b_k)

        def block(depth: Depth) -> None:
            tile_of_a: TileOfA = lambda tile, row: a  # noqa: E731
            if self.computed is not None:
                tile_of_a = self.block_of_a(a, 0, 1, depth)
            for j in loop(first, cut, panels):
                column = j * self.columns
                place, rows_of_a = gep(c, column, self.c_element), tile_of_a(0, 0)
                weights = self.place_in_b(b, j, column, 0)
                self.tile(function, rows_of_a, weights, place, 0, column, weights)
            panel_of_b = self.group_of_b(b, cut, stop, depth)

            def panel(j: Count, form: PanelForm, rows: RowBlock) -> None:
                self.panel(rows.tile_of_a, panel_of_b(j, form), c, j, form, rows.start, rows.stop)

            self.each_panel(cut, stop, RowBlock(0, 1, tile_of_a), panel)

        self.each_depth(block)

    # ---- where A and B are found

    @inline
    def block_of_a(self, a: ptr, first: Count, stop: Count, depth: Depth) -> TileOfA:
        """How to find the row tiles first..stop of A, packed if that was decided."""
        f, row_of, computed = self.main, self.tiles.row, self.computed
        panels = depth.padded * self.group_columns * size_bytes(self.element)
        if computed is not None:
            rows, row0 = byte_at(self.b_scratch, panels), row_of(f, first)
            computed.compute(self.args, rows, row0, row_of(f, stop) - row0, depth.start, depth.size)
            element = self.kind.row_element
            return lambda tile, row: gep(rows, (row - row0) * self.a_row, element)
        start = gep(a, depth.start * self.a_k, self.element)
        if not self.packs_a:
            return lambda tile, row: gep(start, row * self.a_row, self.element)
        tiles = byte_at(self.b_scratch, panels)
        stride = depth.size * self.tile_width + _TILE_PAD
        # The last tiles begin early enough to be read in whole vectors inside the matrix.
        latest = self.m - self.tile_width
        if self.pack_a:
            for tile in loop(first, stop):
                begin = umin(row_of(f, tile), latest)
                self.a_starts[tile - first] = begin
            packer = tile_packer(self.kind, self.tile_width)
            call(packer, start, self.a_k, tiles, stride, depth.size, self.a_starts, stop - first)

        def place(tile: Count, row: Count) -> ptr:
            skipped = row - umin(row, latest)
            packed = gep(tiles, (tile - first) * stride + skipped, self.element)
            return select(self.pack_a, packed, gep(start, row, self.element))

        return place

    @inline
    def place_in_b(self, b: ptr, j: Count, column: Count, k: Count, vectors: int | None = None) -> ptr:
        """Where panel j, which starts at `column` and is `vectors` wide (None: full), is from k on: in packed
        weights, or in the matrix.
        """
        if self.spec.quads is not None:
            return gep(b, j * self.panel_elements, self.element)
        if self.spec.b_packed:
            width = self.vectors if vectors is None else vectors
            depth = self.padded_k if self.call.given is None else self.k
            return gep(b, column * depth + k * (width * self.lanes), self.stored.element)
        return gep(b, column * self.b_column + k * self.b_k, self.element)

    @inline
    def group_of_b(self, b: ptr, first: Count, stop: Count, depth: Depth) -> PanelOfB:
        """How to find the panels first..stop of B, packed where they must be or where that was decided."""
        if self.spec.b_packed:
            return lambda j, form: self.place_in_b(b, j, j * self.columns, depth.start, form.vectors)

        def pack(j: Count, count: Count, vectors: int, to: ptr) -> None:
            packer = panel_packer(self.kind, vectors, self.b_k, self.b_column)
            column = j * self.columns
            source = self.place_in_b(b, j, column, depth.start)
            call(packer, source, self.b_k, self.b_column, to, depth.size, self.n - column, count)

        whole = max(min(stop, self.full) - first, 0)
        if self.pack_b & (whole != 0):
            pack(first, whole, self.vectors, self.b_scratch)

        def place(j: Count, form: PanelForm) -> ptr:
            ragged = form.last and form.masked and not self.module.target.has_avx512
            packed = self.pack_b | ragged
            panel = gep(self.b_scratch, (j - first) * self.columns * depth.padded, self.element)
            if form.last:
                if packed:
                    pack(j, 1, form.vectors, panel)
            self.frame.change("b_k", select(packed, form.vectors * self.lanes, self.b_k))
            in_place = self.place_in_b(b, j, j * self.columns, depth.start)
            return select(packed, panel, in_place)

        return place
