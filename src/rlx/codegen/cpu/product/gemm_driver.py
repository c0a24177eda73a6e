"""What a matmul is, and what all its kernels do alike: read sizes, share tiles, walk the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlx.codegen.cpu.kernels import KERNEL_ARGS
from rlx.codegen.cpu.primitives import MEMORY
from rlx.codegen.cpu.product.gemm_cut import Tiles, Units, part_window, share
from rlx.codegen.cpu.product.gemm_end import Epilogue, Frame, TileEnd
from rlx.codegen.cpu.product.gemm_rows import ComputedRows, Prologue, share_rows
from rlx.codegen.cpu.product.microkernel import Kind
from rlx.codegen.native.irtext import Bool, Function, Int, Module, Value
from rlx.codegen.native.irtypes import size_bytes
from rlx.errors import ShapeError, UnsupportedError
from rlx.kernel.quads import QuadPanels
from rlx.records import dataclass

Size = Any
"""An int, or a symbolic size that the caller's `dim_value` turns into a Value."""

DimValue = Callable[[Function, Any], Int]
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


@dataclass(frozen=True)
class Part:
    """What a thread has of one matmul: tiles start..end, counted down the rows of one panel, then of the
    next, as far as they are stored in row tiles low..high."""

    start: Int
    end: Int
    low: Int
    high: Int


class ProductDriver:
    """The outermost loops of a kernel. C is cut into tiles of at most `rows` x `columns`."""

    scratch_bytes: Size

    def __init__(
        self, module: Module, name: str, call: GemmCall, kind: Kind, rows: int, columns: int
    ) -> None:
        self.module, self.name, self.call, self.spec, self.kind = module, name, call, call.spec, kind
        self.element, self.lanes, self.rows, self.columns = kind.element, kind.lanes, rows, columns
        self.c_element = MEMORY[call.spec.c_dtype]
        self.main = module.function(name, KERNEL_ARGS)
        batch_axes = len(call.spec.batch)
        self.frame = Frame(self.main, 10 + batch_axes)
        self.end = TileEnd(
            module, name, kind.accumulator, self.lanes, self.c_element, self.frame, call.epilogue, batch_axes
        )
        self.computed: ComputedRows | None = None
        if call.prologue is not None:
            self.computed = ComputedRows(
                module, name, kind, call.prologue, self.frame, batch_axes, call.spec.k, rows
            )

    def plan(self, panels: Int) -> None:
        """Decide what depends on sizes, and fill the frame."""
        raise NotImplementedError

    def product(self, a: Value, b: Value, c: Value, part: Part) -> None:
        """A part of one matmul."""
        raise NotImplementedError

    def size(self, x: Size) -> Int:
        """A size of the spec as an int or a Value of the driver."""
        if isinstance(x, int):
            return x
        if self.call.dim_value is None:
            raise ShapeError(f"kernel {self.name!r} has the symbolic size {x} but no dim_value to read it by")
        return self.call.dim_value(self.main, x)

    def emit(self) -> KernelInfo:
        """Write the kernel."""
        fn, spec = self.main, self.call.spec
        thread: Int = fn.args[1]
        threads: Int = fn.args[2]
        self.m, self.n, self.k = (self.size(x) for x in (spec.m, spec.n, spec.k))
        self.a_row, self.a_k = (self.size(x) for x in spec.a_strides[-2:])
        b_strides = (0, 1) if spec.b_packed else spec.b_strides[-2:]
        self.b_k, self.b_column = (self.size(x) for x in b_strides)
        self.c_row = self.size(spec.c_strides[-2])
        batch = [self.size(x) for x in spec.batch]
        self.tiles = Tiles.of(fn, self.m, self.rows)
        self.full = fn.udiv(self.n, self.columns)
        self.tail = fn.sub(self.n, fn.mul(self.full, self.columns))
        panels = fn.add(self.full, fn.select(fn.cmp("ne", self.tail, 0), 1, 0))
        self.plan(panels)
        items: Int = 1
        for extent in batch:
            items = fn.mul(items, extent)
        grain = 1 if self.columns % self.lanes else self.lanes
        cut = Units(self.tiles.count, self.full, self.columns // grain, fn.ceildiv(self.tail, grain))
        units = cut.count(fn)
        each, tiles = units, self.tiles.count
        window: tuple[Int, Int] = (0, units)
        if spec.can_be_cut:
            from_panel, to_panel = part_window(fn, fn.args[3], panels)
            window = fn.mul(from_panel, tiles), fn.mul(to_panel, tiles)
            cut = cut.window(fn, from_panel, to_panel)
        start, end = (fn.add(window[0], unit) for unit in cut.share(fn, items, thread, threads))
        # Rows that are computed are shared where that is fair; else every thread computes those it needs. So
        # are rows that meet few weights: threads that share columns write to the same cache lines of C.
        by_rows: Bool = False
        if self.computed is not None or self.few_weights:
            by_rows = share_rows(fn, fn.mul(tiles, items), threads)
            each = fn.select(by_rows, tiles, units)
            low, high = share(fn, fn.mul(tiles, items), thread, threads)
            start, end = fn.select(by_rows, low, start), fn.select(by_rows, high, end)

        def item(index: Int, _: Sequence[Value] = ()) -> None:
            a, b, c = self.batch_item(index, batch)
            before = fn.mul(index, each)
            first, last = fn.smax(fn.sub(start, before), 0), fn.smin(fn.sub(end, before), each)
            part = Part(
                fn.select(by_rows, window[0], first),
                fn.select(by_rows, window[1], last),
                fn.select(by_rows, first, 0),
                fn.select(by_rows, last, tiles),
            )
            self.product(a, b, c, part)

        if batch:
            per = fn.umax(each, 1)
            fn.loop(fn.udiv(start, per), fn.ceildiv(end, per), 1, [], item)
        else:
            item(0)
        return KernelInfo(self.name, self.scratch_bytes)

    @property
    def few_weights(self) -> bool:
        """Whether all panels of packed weights stay in the L2 of every core."""
        spec, room = self.spec, self.module.target.l2_bytes // 4
        return spec.b_packed and int(spec.k) * int(spec.n) * size_bytes(self.element) <= room

    def batch_item(self, index: Int, batch: list[Int]) -> list[Value]:
        """Pointers to A, B and C of one matmul; its place in the batch goes to the frame."""
        fn, spec = self.main, self.call.spec
        bases = [fn.field(fn.args[0], operand, "ptr") for operand in self.call.operands]
        offsets: list[Int] = [self.size(self.call.starts[0]), self.size(self.call.starts[1]), 0]
        rest = index
        for axis in reversed(range(len(batch))):
            outer = fn.udiv(rest, batch[axis]) if axis else 0
            place = fn.sub(rest, fn.mul(outer, batch[axis])) if axis else rest
            self.frame.change(f"batch{axis}", place)
            for n, strides in enumerate((spec.a_strides, spec.b_strides, spec.c_strides)):
                offsets[n] = fn.add(offsets[n], fn.mul(place, self.size(strides[axis])))
            rest = outer
        elements = (self.element, self.element, self.c_element)
        return [fn.gep(b, o, e) for b, o, e in zip(bases, offsets, elements, strict=True)]
