"""What a matmul is, and what all its kernels do alike: read sizes, share tiles, walk the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rlx.codegen.cpu.frame import product
from rlx.codegen.cpu.kernels import KERNEL_ARGS
from rlx.codegen.cpu.primitives import MEMORY
from rlx.codegen.cpu.product.gemm_cut import (
    Count,
    Cut,
    PanelCosts,
    Part,
    Tiles,
    count_bands,
    part_window,
    share,
)
from rlx.codegen.cpu.product.gemm_end import Epilogue, Frame, TileEnd
from rlx.codegen.cpu.product.gemm_rows import ComputedRows, Prologue, row_stride, share_rows
from rlx.codegen.cpu.product.microkernel import HalfWeights, Kind
from rlx.codegen.native.irtext import Function, Int, Module, Value, vector
from rlx.codegen.native.irtypes import size_bytes
from rlx.codegen.native.notation import inline, write
from rlx.codegen.native.words import (
    ceildiv,
    field,
    gep,
    i8,
    i64,
    load,
    loop,
    masked_load,
    ptr,
    select,
    udiv,
    ule,
    umax,
)
from rlx.errors import ShapeError, UnsupportedError
from rlx.kernel.quads import QuadPanels
from rlx.records import dataclass

Size = Count
"""An int, or a symbolic size that the caller's `dim_value` turns into a Value."""

GivenSize = Callable[[Function, str], Int]
"""A width, by its name, as a Value that is read at run time though it is known."""

_LEAST_TILES = 4  # row tiles of a band
_COMPUTING = 4  # what computing an element takes, in those that are read

DimValue = Callable[[Function, Size], Int]
"""Value of a symbolic size inside a function whose args[0] is the kernel's argument table."""


@dataclass(frozen=True)
class GemmSpec:
    """One matmul. Strides count elements per (batch axes ..., row, column).

    With `b_packed`, B is what `packing.pack_weights` packed from a [k, n] matrix of static size, or such
    `quads`, and `b_strides` holds the batch axes only. C must be contiguous along its columns. `c_holds_sums`
    says that C may hold unfinished sums while the kernel runs: neither the epilogue nor another thread reads
    it; very deep matmuls are then faster.
    """

    m: Size
    n: Size
    k: Size
    a_strides: tuple[Size, ...]
    b_strides: tuple[Size, ...]
    c_strides: tuple[Size, ...]
    batch: tuple[Size, ...] = ()
    dtype: str = "f32"
    c_dtype: str = "f32"
    b_packed: bool = False
    c_holds_sums: bool = False
    quads: QuadPanels | None = None
    b_dtype: str | None = None  # of packed weights in 16 bits, which are widened to `dtype`

    @property
    def widths(self) -> dict[str, Size]:
        """What kernels that share their code may differ in: the first fields of sizes that they read."""
        return {"n": self.n, "k": self.k, "a_row": self.a_strides[-2], "c_row": self.c_strides[-2]}

    @property
    def can_be_cut(self) -> bool:
        """Whether the kernel computes any range of panels of packed weights, if `part` says so."""
        return self.b_packed and not self.batch

    def __post_init__(self) -> None:
        rank = len(self.batch) + 2
        for operand, strides, wanted in (
            ("A", self.a_strides, rank),
            ("B", self.b_strides, rank - 2 if self.b_packed else rank),
            ("C", self.c_strides, rank),
        ):
            if len(strides) != wanted:
                raise ShapeError(f"operand {operand} of a product needs {wanted} strides, not {len(strides)}")
        if self.c_strides[-1] != 1:
            raise UnsupportedError(
                "a product whose columns are not contiguous in C: swap A and B, or copy C after"
            )
        if self.b_packed and not (isinstance(self.k, int) and isinstance(self.n, int)):
            raise ShapeError(
                f"packed weights need a static size, not {self.k} x {self.n}: pass them unpacked"
            )


@dataclass(frozen=True)
class KernelInfo:
    """What a caller must know to run an emitted kernel."""

    name: str
    scratch_bytes_per_thread: Size


@dataclass(frozen=True)
class GemmCall:
    """A matmul and how its kernel is to be written; see `gemm.emit_gemm`."""

    spec: GemmSpec
    operands: tuple[int, int, int]
    starts: tuple[Size, Size]
    dim_value: DimValue | None
    epilogue: Epilogue | None
    heavy: bool
    prologue: Prologue | None = None
    beside: tuple[tuple[int, str], ...] = ()
    given: GivenSize | None = None

    def size(self, fn: Function, x: Size) -> Count:
        """A size of the spec as an int, or as a Value inside `fn`."""
        if isinstance(x, int):
            return x
        if self.dim_value is None:
            raise ShapeError(f"kernel {fn.name!r} has the symbolic size {x} but no dim_value to read it by")
        return self.dim_value(fn, x)


def with_rows_from_memory(call: GemmCall, kind: Kind) -> GemmCall:
    """The same matmul with rows of A that are read as a prologue reads them, to be prepared in scratch."""
    spec = call.spec
    strides = (*(0 for _ in spec.batch), row_stride(spec.k), 1)
    prologue = Prologue(
        kind.lanes * kind.group, lambda fn, number, batch: row_in_memory(fn, call, kind, number, batch)
    )
    return replace(call, spec=replace(spec, a_strides=strides), prologue=prologue)


@inline
def row_in_memory(
    f: Function, call: GemmCall, kind: Kind, number: Count, batch: tuple[Count, ...]
) -> Callable[[Count, Value | None], Value]:
    """How to read vectors of a row of A that is in memory."""
    offset = call.size(f, call.starts[0])
    for index, step in zip((*batch, number), call.spec.a_strides[:-1], strict=True):
        offset += index * call.size(f, step)
    start = gep(field(f.args[0], call.operands[0], ptr), offset, kind.element)
    type_ = vector(kind.element, kind.lanes * kind.group)

    def at(k: Count, mask: Value | None) -> Value:
        place = gep(start, k, kind.element)
        return load(type_, place) if mask is None else masked_load(type_, place, mask)

    return at


class ProductDriver:
    """The outermost loops of a kernel. C is cut into tiles of at most `rows` x `columns`."""

    scratch_bytes: Size

    def __init__(
        self, module: Module, name: str, call: GemmCall, kind: Kind, rows: int, columns: int
    ) -> None:
        self.module, self.name, self.call, self.spec, self.kind = module, name, call, call.spec, kind
        self.element, self.lanes, self.rows, self.columns = kind.element, kind.lanes, rows, columns
        self.stored = kind  # how B is read where it is stored
        if call.spec.b_dtype is not None:
            self.stored = HalfWeights(MEMORY[call.spec.b_dtype], kind.accumulator, 1, kind.lanes)
        self.c_element = MEMORY[call.spec.c_dtype]
        self.main = module.function(name, KERNEL_ARGS)
        batch_axes = len(call.spec.batch)
        self.frame = Frame(self.main, 10 + batch_axes)
        self.end = TileEnd(
            name,
            kind.accumulator,
            self.lanes,
            self.c_element,
            self.frame,
            call.epilogue,
            batch_axes,
            isinstance(call.spec.n, int) and call.spec.n % self.lanes == 0,
        )
        self.computed: ComputedRows | None = None
        if call.prologue is not None:
            self.computed = ComputedRows(
                module, name, kind, call.prologue, self.frame, batch_axes, call.spec.k, rows
            )

    def plan(self, panels: Count) -> None:
        """Decide what depends on sizes, and fill the frame."""
        raise NotImplementedError

    def product(self, a: ptr, b: ptr, c: ptr, part: Part) -> None:
        """A part of one matmul."""
        raise NotImplementedError

    def size(self, x: Size) -> Count:
        """A size of the spec as an int or a Value of the driver."""
        return self.call.size(self.main, x)

    def width(self, name: str) -> Count:
        """A size in which kernels may differ that share this code."""
        given = self.call.given
        return self.size(self.spec.widths[name]) if given is None else given(self.main, name)

    def emit(self) -> KernelInfo:
        """Write the kernel."""
        write(self.main, self.kernel, *self.main.args)
        return KernelInfo(self.name, self.scratch_bytes)

    @inline
    def kernel(self, args: ptr, thread: Count, threads: Count, part: Count) -> None:
        """Cut C into tiles, and compute those of this thread, one matmul of the batch after the other."""
        spec = self.spec
        self.args, self.thread = args, thread
        self.m, self.n, self.k = self.size(spec.m), self.width("n"), self.width("k")
        self.a_row, self.a_k = self.width("a_row"), self.size(spec.a_strides[-1])
        b_strides = (0, 1) if spec.b_packed else spec.b_strides[-2:]
        self.b_k, self.b_column = (self.size(x) for x in b_strides)
        self.c_row = self.width("c_row")
        batch = [self.size(x) for x in spec.batch]
        self.tiles = Tiles.of(self.main, self.m, self.rows)
        self.full = udiv(self.n, self.columns)
        self.tail = self.n - self.full * self.columns
        panels = self.full + select(self.tail != 0, 1, 0)
        self.plan(panels)
        items = product(batch)
        grain = 1 if self.columns % self.lanes else self.lanes
        columns = PanelCosts(self.full, self.columns // grain, ceildiv(self.tail, grain))
        from_panel, to_panel = 0, panels
        if spec.can_be_cut:
            from_panel, to_panel = part_window(part, panels)
            columns = columns.window(from_panel, to_panel)
        tiles = self.tiles.count
        cut = self.cut(columns, items, threads)
        each = cut.weight()
        start, end = share(each * items, thread, threads)
        # Rows that are computed are shared where that is fair; else every thread computes those it needs. So
        # are rows that meet few weights: threads that share columns write to the same cache lines of C.
        by_rows = False
        few_weights = self.few_weights
        if self.computed is not None or few_weights is not False:
            by_rows = share_rows(tiles * items, threads)
            if self.computed is None:
                by_rows = few_weights & by_rows
            each = select(by_rows, tiles, each)
            low, high = share(tiles * items, thread, threads)
            start, end = select(by_rows, low, start), select(by_rows, high, end)

        def item(index: Count) -> None:
            a, b, c = self.batch_item(index, batch)
            before = index * each
            first, last = max(start - before, 0), min(end - before, each)
            low_band, high_band = cut.bands_of(first, last)
            for band in loop(select(by_rows, 0, low_band), select(by_rows, 1, high_band)):
                own = cut.part(band, first, last)
                rows = last - first
                own = Part(
                    select(by_rows, from_panel * rows, from_panel * (own.high - own.low) + own.start),
                    select(by_rows, to_panel * rows, from_panel * (own.high - own.low) + own.end),
                    select(by_rows, first, own.low),
                    select(by_rows, last, own.high),
                )
                if own.start < own.end:
                    self.product(a, b, c, own)

        if batch:
            per = umax(each, 1)
            for index in loop(udiv(start, per), ceildiv(end, per)):
                item(index)
        else:
            item(0)

    @inline
    def cut(self, columns: PanelCosts, items: Count, threads: Count) -> Cut:
        """How threads share the tiles of all matmuls."""
        tiles = self.tiles.count
        if isinstance(tiles, int) and tiles < 2 * self.least_tiles:
            return Cut(tiles, columns)
        own = udiv(threads, umax(items, 1)) if self.spec.batch else threads
        own = umax(own, 1)
        a, b = self.cost_of_reading
        bands = count_bands(own, udiv(tiles, self.least_tiles), self.m * a, self.n * b)
        return Cut(tiles, columns, bands, own)

    @property
    def least_tiles(self) -> int:
        """Row tiles that a panel of B should meet."""
        return _LEAST_TILES

    @property
    def cost_of_reading(self) -> tuple[int, int]:
        """What an element of A and of B costs every thread that reads it, in bytes of memory."""
        size = size_bytes(self.element)
        of_a = _COMPUTING * size if self.computed is not None else size
        return of_a, size_bytes(self.stored.element)

    @property
    def few_weights(self) -> Count:
        """Whether all panels of packed weights stay in the L2 of every core."""
        return self.weights_fit(self.module.target.l2_bytes // 4) if self.spec.b_packed else False

    @inline
    def weights_fit(self, room: int) -> Count:
        """Whether B takes no more bytes than `room`."""
        return ule(self.k * self.n, room // size_bytes(self.stored.element))

    @inline
    def scratch(self) -> ptr:
        """This thread's scratch."""
        offset = self.thread * field(self.args, 2, i64)
        return gep(field(self.args, 1, ptr), offset, i8)

    @inline
    def batch_item(self, index: Count, batch: list[Count]) -> list[ptr]:
        """Pointers to A, B and C of one matmul; its place in the batch goes to the frame."""
        spec = self.spec
        bases = [field(self.args, operand, ptr) for operand in self.call.operands]
        offsets = [self.size(self.call.starts[0]), self.size(self.call.starts[1]), 0]
        strides = (spec.a_strides, spec.b_strides, spec.c_strides)
        rest = index
        for axis in reversed(range(len(batch))):
            outer = udiv(rest, batch[axis]) if axis else 0
            place = rest - outer * batch[axis] if axis else rest
            self.frame.change(f"batch{axis}", place)
            offsets = [o + place * self.size(own[axis]) for o, own in zip(offsets, strides, strict=True)]
            rest = outer
        elements = (self.element, self.stored.element, self.c_element)
        return [gep(b, o, e) for b, o, e in zip(bases, offsets, elements, strict=True)]
