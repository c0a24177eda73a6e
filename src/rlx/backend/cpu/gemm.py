"""Matrix products: C[..., m, n] = epilogue(A[..., m, k] @ B[..., k, n]) for any sizes, strides and thread count.

One kernel serves every value of its run-time sizes. It cuts C into column panels and balanced row tiles, and calls a
family of micro-kernels (rows 1..MR by 1..NV vectors) through a table, so no row is computed in vain. B is read from
weight panels packed at load, in place, or from a panel that the kernel packs in scratch when that pays. Sizes known
to the compiler are constants in the code; the others travel in a small table on the stack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlx.backend.cpu.irtext import Bool, Function, Int, Module, Value, vector
from rlx.backend.cpu.irtypes import size_bytes
from rlx.backend.cpu.microkernel import LLVM_TYPES, Kind, Places, accumulate, kind_of
from rlx.backend.cpu.packing import emit_strip_packer
from rlx.errors import ShapeError, UnsupportedError

Size = Any
"""An int, or a symbolic size that the caller's `dim_value` turns into a Value."""

DimValue = Callable[[Function, Any], Int]
"""Value of a symbolic size inside a function whose args[0] is the kernel's argument table."""

Epilogue = Callable[[Function, Value, Int, Int, "Value | None", "tuple[Int, ...]"], Value]
"""epilogue(fn, sums, row, column, mask, batch) -> what to store. `sums` are the finished products of one row and
consecutive columns from `column` on; lanes off the mask (None: all are on) do not exist and must not be loaded."""

_BLOCK_TILES = 16  # row tiles that go through all panels before the next rows: A stays in L2
_PACK_TILES = 4  # row tiles from which packing a panel of B costs less than reading it in place
_PANELS_AT_ONCE = {1: 4, 2: 2}  # rows -> panels per call where one panel has too few independent chains


@dataclass(frozen=True)
class GemmSpec:
    """One matrix product. Strides count elements per (batch axes ..., row, column).

    With `b_packed`, B is what `packing.pack_weights` made from a [k, n] matrix of static size, and `b_strides` holds
    the batch axes only. C must be contiguous along its columns.
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
            raise UnsupportedError("a product whose columns are not contiguous in C: swap A and B, or copy C after")
        if self.b_packed and not (isinstance(self.k, int) and isinstance(self.n, int)):
            raise ShapeError(f"packed weights need a static size, not {self.k} x {self.n}: pass them unpacked")


@dataclass(frozen=True)
class KernelInfo:
    """What a caller must know to run an emitted kernel."""

    name: str
    scratch_bytes_per_thread: Size


def share(fn: Function, total: Int, thread: Int, threads: Int) -> tuple[Int, Int]:
    """The contiguous part of range(total) that belongs to one thread."""
    return fn.udiv(fn.mul(total, thread), threads), fn.udiv(fn.mul(total, fn.add(thread, 1)), threads)


class Frame:
    """Sizes that a kernel shares with its internal functions: known ints stay ints, the rest lies on its stack."""

    def __init__(self, fn: Function, capacity: int) -> None:
        self._fn, self._slots, self._known = fn, dict[str, int](), dict[str, int]()
        self._capacity = capacity
        self.pointer = fn.alloca("i64", capacity)

    def share(self, name: str, x: Int) -> None:
        """Give `x` a name that the internal functions can read."""
        if isinstance(x, int):
            self._known[name] = x
        else:
            self.change(name, x)

    def change(self, name: str, x: Int) -> None:
        """Give a name that varies during the run its next value."""
        self._fn.store(x, self._fn.gep(self.pointer, self._slot(name), "i64"), 8)

    def read(self, fn: Function, frame: Value, name: str) -> Int:
        """The named size inside an internal function that got the frame's pointer."""
        return self._known[name] if name in self._known else fn.field(frame, self._slot(name))

    def read_pointer(self, fn: Function, frame: Value, name: str) -> Value:
        return fn.field(frame, self._slot(name), "ptr")

    def _slot(self, name: str) -> int:
        slot = self._slots.setdefault(name, len(self._slots))
        assert slot < self._capacity
        return slot


@dataclass(frozen=True)
class Tiles:
    """A balanced cut of m rows into `count` tiles: the first `tall` of low + 1 rows, the others of low rows."""

    count: Int
    low: Int
    tall: Int

    @staticmethod
    def of(fn: Function, m: Int, height: int) -> Tiles:
        count = fn.ceildiv(m, height)
        low = fn.udiv(m, fn.umax(count, 1))
        return Tiles(count, low, fn.sub(m, fn.mul(low, count)))

    def row(self, fn: Function, tile: Int) -> Int:
        """First row of a tile."""
        return fn.add(fn.mul(tile, self.low), fn.umin(tile, self.tall))

    def heights(self, limit: int) -> list[int]:
        """Every height that a tile may have."""
        if isinstance(self.low, int) and isinstance(self.tall, int):
            return [h for h in (self.low, self.low + 1) if h and (h == self.low or self.tall)]
        return list(range(1, limit + 1))


def emit_gemm(
    module: Module,
    name: str,
    spec: GemmSpec,
    *,
    operands: tuple[int, int, int] = (3, 4, 5),
    dim_value: DimValue | None = None,
    epilogue: Epilogue | None = None,
    heavy: bool = False,
) -> KernelInfo:
    """Write the kernel `name` into the module. `operands` are the argument fields of A, B and C.

    A `heavy` epilogue (more than a few instructions) is written once and runs over each finished tile while it is
    still in L1; a light one is written into every micro-kernel, where it works on registers. In every function that
    the epilogue writes into, `fn.args[0]` is the kernel's argument table.

    >>> from rlx.backend.cpu.target import resolve
    >>> spec = GemmSpec(4, 32, 8, a_strides=(8, 1), b_strides=(32, 1), c_strides=(32, 1))
    >>> emit_gemm(Module(resolve("x86-64-v3")), "product", spec).scratch_bytes_per_thread
    512
    """
    return _Gemm(module, name, spec, operands, dim_value, epilogue, heavy).emit()


class _Gemm:
    """The emitter of one kernel; `emit` writes the driver, which writes micro-kernels as it needs them."""

    def __init__(
        self,
        module: Module,
        name: str,
        spec: GemmSpec,
        operands: tuple[int, int, int],
        dim_value: DimValue | None,
        epilogue: Epilogue | None,
        heavy: bool,
    ) -> None:
        self.module, self.name, self.spec, self.operands = module, name, spec, operands
        self.kind: Kind = kind_of(spec.dtype, module.target)
        self.rows, self.vectors = module.target.tile(spec.dtype)
        self.lanes = self.kind.lanes
        self.columns = self.vectors * self.lanes
        self.epilogue, self.dim_value = epilogue, dim_value
        self.c_element = LLVM_TYPES[spec.c_dtype]
        # Registers can be stored in part where the target has masks; elsewhere ragged columns go through a tile.
        whole = isinstance(spec.n, int) and spec.n % self.lanes == 0
        self.staged = heavy or not (module.target.has_avx512 or whole)
        self.in_place = not spec.b_packed and spec.b_strides[-1] == 1 and self.kind.group == 1
        self.main = module.function(name, [("ptr", "args"), ("i64", "thread"), ("i64", "threads")])
        self.frame = Frame(self.main, 8 + len(spec.batch))

    # ---- sizes

    def size(self, x: Size) -> Int:
        """A size of the spec as an int or a Value of the driver."""
        if isinstance(x, int):
            return x
        if self.dim_value is None:
            raise ShapeError(f"kernel {self.name!r} has the symbolic size {x} but no dim_value to read it by")
        return self.dim_value(self.main, x)

    @property
    def scratch_bytes(self) -> Size:
        """One panel of B, unless every panel can be read where it lies."""
        return 0 if self.spec.b_packed else self.spec.k * (self.columns * size_bytes(self.kind.element))

    # ---- the driver

    def emit(self) -> KernelInfo:
        fn, spec = self.main, self.spec
        args, thread, threads = fn.args
        self.m, self.n, self.k = (self.size(x) for x in (spec.m, spec.n, spec.k))
        self.a_row, self.a_k = (self.size(x) for x in spec.a_strides[-2:])
        self.c_row = self.size(spec.c_strides[-2])
        self.b_k, self.b_column = (0, 1) if spec.b_packed else (self.size(x) for x in spec.b_strides[-2:])
        batch = [self.size(x) for x in spec.batch]
        for name in ("n", "k", "a_row", "a_k", "c_row"):
            self.frame.share(name, getattr(self, name))
        if self.staged:
            self.frame.change("stage", fn.alloca(self.kind.accumulator, self.rows * self.columns))
        if self.scratch_bytes != 0:
            offset = fn.mul(thread, fn.field(args, 2))
            self.scratch = fn.gep(fn.field(args, 1, "ptr"), offset, "i8")

        self.full = fn.udiv(self.n, self.columns)
        self.tail = fn.sub(self.n, fn.mul(self.full, self.columns))
        panels = fn.add(self.full, fn.select(fn.cmp("ne", self.tail, 0), 1, 0))
        self.tiles = Tiles.of(fn, self.m, self.rows)
        units = fn.mul(panels, self.tiles.count)
        items: Int = 1
        for extent in batch:
            items = fn.mul(items, extent)
        start, end = share(fn, fn.mul(units, items), thread, threads)

        def item(index: Int, _: Sequence[Value] = ()) -> None:
            places = self.batch_item(index, batch)
            before = fn.mul(index, units)
            self.product(*places, fn.smax(fn.sub(start, before), 0), fn.smin(fn.sub(end, before), units))

        if batch:
            per = fn.umax(units, 1)
            fn.loop(fn.udiv(start, per), fn.ceildiv(end, per), 1, [], item)
        else:
            item(0)
        return KernelInfo(self.name, self.scratch_bytes)

    def batch_item(self, index: Int, batch: list[Int]) -> list[Value]:
        """Pointers to A, B and C of one product of the batch; its indices go to the frame for the epilogue."""
        fn, spec = self.main, self.spec
        bases = [fn.field(fn.args[0], operand, "ptr") for operand in self.operands]
        elements = (self.kind.element, self.kind.element, self.c_element)
        offsets: list[Int] = [0, 0, 0]
        rest = index
        for axis in reversed(range(len(batch))):
            outer = fn.udiv(rest, batch[axis]) if axis else 0
            place = fn.sub(rest, fn.mul(outer, batch[axis])) if axis else rest
            self.frame.change(f"batch{axis}", place)
            for n, strides in enumerate((spec.a_strides, spec.b_strides, spec.c_strides)):
                offsets[n] = fn.add(offsets[n], fn.mul(place, self.size(strides[axis])))
            rest = outer
        return [fn.gep(b, o, e) for b, o, e in zip(bases, offsets, elements, strict=True)]

    def product(self, a: Value, b: Value, c: Value, start: Int, end: Int) -> None:
        """Tiles start..end of one product, counted down the rows of one panel, then of the next."""
        fn = self.main
        count = fn.umax(self.tiles.count, 1)
        first, last = fn.udiv(start, count), fn.ceildiv(end, count)

        def general() -> None:
            def block(tile: Int, _: list[Value]) -> None:
                stop = fn.smin(fn.add(tile, _BLOCK_TILES), self.tiles.count)

                def panel(j: Int, vectors: int, masked: bool) -> None:
                    before = fn.mul(j, self.tiles.count)
                    t0 = fn.smax(tile, fn.sub(start, before))
                    t1 = fn.smin(stop, fn.sub(end, before))
                    fn.branch(fn.cmp("slt", t0, t1), lambda: self.panel(a, b, c, j, vectors, masked, t0, t1))

                self.each_panel(first, last, panel)

            fn.loop(0, self.tiles.count, _BLOCK_TILES, [], block)

        def choose(rows: list[int]) -> None:
            if not rows:
                return general()
            chosen = fn.cmp("eq", self.m, rows[0])
            fn.branch(chosen, lambda: self.skinny(rows[0], a, b, c, first, last), lambda: choose(rows[1:]))

        known_n = isinstance(self.full, int)
        few = {rows: panels for rows, panels in _PANELS_AT_ONCE.items() if not known_n or panels <= self.full}
        choose(list(few) if self.spec.b_packed or self.in_place else [])

    def each_panel(self, first: Int, last: Int, panel: Callable[[Int, int, bool], None]) -> None:
        """panel(j, vectors, masked) for panels first..last; only the last panel of all can be narrow or masked."""
        fn = self.main
        static = isinstance(self.n, int)
        # With a run-time n the masked family of full width also serves the full panels: less code, same speed.
        fn.loop(first, fn.smin(last, self.full), 1, [], lambda j, _: panel(j, self.vectors, not static))

        def narrow(vectors: int) -> None:
            wide_enough = vectors == 1 or fn.cmp("ugt", self.tail, (vectors - 1) * self.lanes)
            masked = not static or self.tail % self.lanes != 0
            fn.branch(wide_enough, lambda: panel(self.full, vectors, masked), lambda: narrow(vectors - 1))

        fn.branch(fn.cmp("sgt", last, self.full), lambda: narrow(self.vectors))

    def panel(self, a: Value, b: Value, c: Value, j: Int, vectors: int, masked: bool, t0: Int, t1: Int) -> None:
        """Row tiles t0..t1 of panel j."""
        fn, tiles = self.main, self.tiles
        column = fn.mul(j, self.columns)
        b = self.panel_of_b(b, column, vectors, masked)
        c = fn.gep(c, column, self.c_element)
        heights = tiles.heights(self.rows)
        names = [self.micro_kernel(h, vectors, masked=masked) for h in heights]

        def function(rows: Int) -> Value:
            if len(names) == 1:
                return Value("ptr", f"@{names[0]}")
            table = self.module.table(f"{names[0]}.table", "ptr", names)
            return fn.load("ptr", fn.gep(table, fn.umin(fn.sub(rows, heights[0]), len(names) - 1), "ptr"))

        low, high = function(tiles.low), function(fn.add(tiles.low, 1))

        def tile(t: Int, _: list[Value]) -> None:
            row = tiles.row(fn, t)
            callee = fn.select(fn.cmp("ult", t, tiles.tall), high, low)
            place = fn.gep(a, fn.mul(row, self.a_row), self.kind.element)
            self.call_micro(callee, place, b, fn.gep(c, fn.mul(row, self.c_row), self.c_element), row, column)

        fn.loop(t0, t1, 1, [], tile)

    def skinny(self, rows: int, a: Value, b: Value, c: Value, first: Int, last: Int) -> None:
        """A product of very few rows: several full panels per call give the chains that one panel lacks."""
        fn, panels = self.main, _PANELS_AT_ONCE[rows]
        name = self.micro_kernel(rows, self.vectors, panels)
        whole = fn.smax(fn.sub(fn.smin(last, self.full), first), 0)
        cut = fn.add(first, fn.mul(fn.udiv(whole, panels), panels))
        if self.in_place:
            self.frame.change("b_k", self.b_k)

        def group(j: Int, _: list[Value]) -> None:
            column = fn.mul(j, self.columns)
            place = self.place_in_b(b, column)
            self.call_micro(Value("ptr", f"@{name}"), a, place, fn.gep(c, column, self.c_element), 0, column)

        fn.loop(first, cut, panels, [], group)
        self.each_panel(cut, last, lambda j, vectors, masked: self.panel(a, b, c, j, vectors, masked, 0, 1))

    # ---- B

    def place_in_b(self, b: Value, column: Int) -> Value:
        """Where the panel that starts at `column` lies in packed weights or in the matrix."""
        fn = self.main
        stride = self.padded_k if self.spec.b_packed else self.b_column
        return fn.gep(b, fn.mul(column, stride), self.kind.element)

    @property
    def padded_k(self) -> int:
        return -(-self.spec.k // self.kind.group) * self.kind.group

    def panel_of_b(self, b: Value, column: Int, vectors: int, masked: bool) -> Value:
        """Address of a panel of B, packed first where it must be or where that pays."""
        fn = self.main
        place = self.place_in_b(b, column)
        if self.spec.b_packed:
            return place
        many: Bool = fn.cmp("uge", self.tiles.count, _PACK_TILES)
        must = not self.in_place or (masked and not self.module.target.has_avx512)
        packed = fn.or_(many, must)

        def pack() -> None:
            packer = emit_strip_packer(self.module, self.kind, self.b_k, self.b_column)
            for j in range(vectors):
                source = fn.gep(place, fn.mul(j * self.lanes, self.b_column), self.kind.element)
                target = fn.gep(self.scratch, j * self.lanes, self.kind.element)
                left = fn.sub(self.n, fn.add(column, j * self.lanes))
                fn.call(packer, [source, self.b_k, self.b_column, target, vectors * self.lanes, self.k, left])

        fn.branch(packed, pack)
        self.frame.change("b_k", fn.select(packed, vectors * self.lanes, self.b_k))
        return fn.select(packed, self.scratch, place)

    # ---- micro-kernels

    def call_micro(self, callee: Value, a: Value, b: Value, c: Value, row: Int, column: Int) -> None:
        self.main.call(callee, [self.main.args[0], self.frame.pointer, a, b, c, row, column])

    def micro_kernel(self, rows: int, vectors: int, panels: int = 1, masked: bool = False) -> str:
        """Name of the function that computes `rows` x (vectors * panels) accumulators of C; written on first use."""
        name = f"{self.name}.{rows}x{vectors}" + (f"x{panels}" if panels > 1 else "") + ("m" if masked else "")
        if self.module.defines(name):
            return name
        params = [("ptr", "args"), ("ptr", "frame"), ("ptr noalias", "a"), ("ptr noalias", "b"), ("ptr", "c"),
                  ("i64", "row"), ("i64", "column")]  # fmt: skip
        fn = self.module.function(name, params, internal=True, noinline=True)
        _, frame, a, b, c, row, column = fn.args
        kind, element = self.kind, self.kind.element
        a_row, a_k, k = (self.frame.read(fn, frame, field) for field in ("a_row", "a_k", "k"))
        b_k = vectors * self.lanes if self.spec.b_packed else self.frame.read(fn, frame, "b_k")
        panel_stride = self.padded_k * self.columns if self.spec.b_packed else self.columns
        a_places = Places.of(fn, a, [fn.mul(i, a_row) for i in range(rows)], fn.mul(a_k, kind.group), element)
        b_offsets = [p * panel_stride + j * self.lanes * kind.group for p in range(panels) for j in range(vectors)]
        b_places = Places.of(fn, b, b_offsets, fn.mul(b_k, kind.group), element)
        width = panels * vectors
        mask = self.last_mask(fn, frame, column, width) if masked and not self.staged else None
        b_mask = mask if self.in_place else None
        sums = accumulate(fn, kind, a_places, b_places, k, [kind.zero] * (rows * width), b_mask)
        if self.staged:
            stage = self.frame.read_pointer(fn, frame, "stage")
            for n, total in enumerate(sums):
                fn.store(total, fn.gep(stage, n * self.lanes, kind.accumulator))
            fn.call(self.finisher(), [fn.args[0], frame, c, row, column, rows, width])
        else:
            c_row = self.frame.read(fn, frame, "c_row")
            for n, total in enumerate(sums):
                i, j = divmod(n, width)
                place = fn.gep(fn.gep(c, fn.mul(i, c_row), self.c_element), j * self.lanes, self.c_element)
                at = fn.add(row, i), fn.add(column, j * self.lanes)
                self.finish(fn, frame, total, place, *at, mask if j == width - 1 else None)
        return name

    def last_mask(self, fn: Function, frame: Value, column: Int, width: int) -> Value:
        """Mask of the last of `width` vectors from `column` on."""
        n = self.frame.read(fn, frame, "n")
        return fn.lanes(fn.sub(n, fn.add(column, (width - 1) * self.lanes)), self.lanes)

    # ---- endings

    def finish(
        self, fn: Function, frame: Value, total: Value, place: Value, row: Int, column: Int, mask: Value | None
    ) -> None:
        """Apply the epilogue to one vector of sums and store it."""
        if self.epilogue is not None:
            batch = tuple(self.frame.read(fn, frame, f"batch{axis}") for axis in range(len(self.spec.batch)))
            total = self.epilogue(fn, total, row, column, mask, batch)
        if total.element != self.c_element:
            narrow = size_bytes(total.type) > size_bytes(self.c_element)
            total = (fn.fptrunc if narrow else fn.fpext)(total, self.c_element)
        if mask is None:
            fn.store(total, place)
        else:
            fn.masked_store(total, place, mask)

    def finisher(self) -> str:
        """Name of the function that finishes a tile of sums which a micro-kernel left in the stage."""
        name = f"{self.name}.finish"
        if self.module.defines(name):
            return name
        params = [("ptr", "args"), ("ptr", "frame"), ("ptr", "c"), ("i64", "row"), ("i64", "column"), ("i64", "rows"),
                  ("i64", "vectors")]  # fmt: skip
        fn = self.module.function(name, params, internal=True, noinline=True)
        _, frame, c, row, column, rows, vectors = fn.args
        stage = self.frame.read_pointer(fn, frame, "stage")
        n, c_row = (self.frame.read(fn, frame, field) for field in ("n", "c_row"))
        sums_type = vector(self.kind.accumulator, self.lanes)

        def line(i: Int, _: list[Value]) -> None:
            sums = fn.gep(stage, fn.mul(fn.mul(i, vectors), self.lanes), self.kind.accumulator)
            places = fn.gep(c, fn.mul(i, c_row), self.c_element)

            def one(j: Int, _: list[Value]) -> None:
                first = fn.mul(j, self.lanes)
                total = fn.load(sums_type, fn.gep(sums, first, self.kind.accumulator))
                place = fn.gep(places, first, self.c_element)
                at = fn.add(column, first)
                left = fn.sub(n, at)

                def end(mask: Value | None) -> None:
                    self.finish(fn, frame, total, place, fn.add(row, i), at, mask)

                if isinstance(n, int) and n % self.lanes == 0:
                    end(None)
                elif self.module.target.has_avx512:
                    end(fn.lanes(left, self.lanes))
                else:
                    whole = fn.cmp("uge", left, self.lanes)
                    fn.branch(whole, lambda: end(None), lambda: end(fn.lanes(left, self.lanes)))

            fn.loop(0, vectors, 1, [], one)

        fn.loop(0, rows, 1, [], line)
        return name
