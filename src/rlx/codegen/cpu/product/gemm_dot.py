"""Products with very few columns, or very few rows and a B stored by columns: vectors run along k.

Where n is small, vectors along the columns would be mostly empty. Here both operands are read along k, each
output has one vector of partial sums, and these are added up in a fixed tree. The choice depends only on
sizes known to the compiler, so the bits of a row do not depend on how many rows there are at run time.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from rlx.codegen.cpu.product.gemm_driver import GemmCall, GemmSpec, Part, ProductDriver, Size
from rlx.codegen.cpu.product.microkernel import kind_of
from rlx.codegen.native.irtext import Function, Int, Module, Value, constant, vector
from rlx.kernel.rounding import FEW_ROWS, runs_along_k
from rlx.target.cpu import Target

_COLUMNS = 8  # most columns of a tile


def suits_dot(spec: GemmSpec, target: Target) -> bool:
    """Whether vectors along k serve this matmul best."""
    if spec.b_packed or spec.dtype not in ("f32", "f64"):
        return False
    along_k = spec.a_strides[-1] == 1 and spec.b_strides[-2] == 1
    return along_k and runs_along_k(spec.m, spec.n, spec.k, target.lanes(spec.dtype))


class DotGemm(ProductDriver):
    """The emitter of one kernel."""

    @property
    def scratch_bytes(self) -> Size:
        return 0 if self.computed is None else self.computed.scratch_bytes

    def __init__(self, module: Module, name: str, call: GemmCall) -> None:
        n = call.spec.n
        kind = kind_of(call.spec.dtype, module.target)
        most = min(_COLUMNS, kind.lanes)
        columns = max(1, min(n, most)) if isinstance(n, int) else most
        sums = module.target.registers - 8  # and rows of A and columns of B
        super().__init__(module, name, call, kind, max(1, min(sums // columns, 8)), columns)
        if self.computed is not None:  # all rows, if they are few
            self.computed = replace(self.computed, height=max(self.rows, FEW_ROWS))

    def plan(self, panels: Int) -> None:
        for name in ("n", "k", "a_row", "b_column", "c_row"):
            self.frame.share(name, getattr(self, name))

    def product(self, a: Value, b: Value, c: Value, part: Part) -> None:
        fn, tiles, start, end = self.main, self.tiles, part.start, part.end
        one_panel = isinstance(self.spec.n, int) and self.spec.n <= self.columns
        if self.computed is not None:
            offset = fn.mul(fn.args[1], fn.field(fn.args[0], 2))
            a = fn.gep(fn.field(fn.args[0], 1, "ptr"), offset, "i8")
            if not one_panel:  # few rows meet many columns
                self.computed.compute(fn, a, 0, self.m, 0, self.k)
        count = fn.umax(tiles.count, 1)
        heights = tiles.heights(self.rows)

        def tile(t: Int, column: Int, width: int) -> None:
            row = tiles.row(fn, t)
            height = fn.add(tiles.low, fn.select(fn.cmp("ult", t, tiles.tall), 1, 0))
            if self.computed is not None and one_panel:
                self.computed.compute(fn, a, row, height, 0, self.k)
                a_place = a
            else:
                a_place = fn.gep(a, fn.mul(row, self.a_row), self.element)
            b_place = fn.gep(b, fn.mul(column, self.b_column), self.element)
            c_place = fn.gep(c, fn.add(fn.mul(row, self.c_row), column), self.c_element)
            values = [fn.args[0], self.frame.pointer, a_place, b_place, c_place, row, column]

            def by_height(choices: list[int]) -> None:
                if len(choices) == 1:
                    fn.call(self.tile_function(choices[0], width), values)
                elif choices:
                    matches = fn.cmp("eq", height, choices[0])
                    fn.branch(matches, lambda: by_height(choices[:1]), lambda: by_height(choices[1:]))

            by_height(heights)

        def panel(j: Int, _: list[Value]) -> None:
            before = fn.mul(j, tiles.count)
            t0, t1 = fn.smax(fn.sub(start, before), part.low), fn.smin(fn.sub(end, before), part.high)
            column = fn.mul(j, self.columns)

            def each(width: int, at: Int) -> None:
                fn.loop(t0, t1, 1, [], lambda t, _: tile(t, at, width))

            def rest() -> None:
                fn.loop(column, self.n, 1, [], lambda at, _: each(1, at))

            fn.branch(fn.cmp("ult", j, self.full), lambda: each(self.columns, column), rest)

        fn.loop(fn.udiv(start, count), fn.ceildiv(end, count), 1, [], panel)

    def tile_function(self, rows: int, width: int) -> str:
        """Name of the function for `rows` x `width` outputs."""
        name = f"{self.name}.{rows}x{width}d"
        if self.module.defines(name):
            return name
        pointers = [("ptr", "args"), ("ptr", "frame"), ("ptr", "a"), ("ptr", "b"), ("ptr", "c")]
        params = [*pointers, ("i64", "row"), ("i64", "column")]
        fn = self.module.function(name, params, internal=True, noinline=True)
        _, frame, a, b, c, row, column = fn.args
        k, a_row, b_column, c_row = (
            self.frame.read(fn, frame, field) for field in ("k", "a_row", "b_column", "c_row")
        )
        a_rows = [fn.gep(a, fn.mul(i, a_row), self.element) for i in range(rows)]
        b_columns = [fn.gep(b, fn.mul(j, b_column), self.element) for j in range(width)]
        type_ = vector(self.element, self.lanes)
        whole = fn.mul(fn.udiv(k, self.lanes), self.lanes)

        def step(at: Int, sums: list[Value], mask: Value | None = None) -> list[Value]:
            def load(place: Value) -> Value:
                moved = fn.gep(place, at, self.element)
                return fn.load(type_, moved) if mask is None else fn.masked_load(type_, moved, mask)

            x, y = [load(place) for place in a_rows], [load(place) for place in b_columns]
            return [fn.fma(x[n // width], y[n % width], total) for n, total in enumerate(sums)]

        sums = fn.loop(0, whole, self.lanes, [constant(type_, 0.0)] * (rows * width), step)
        left = fn.sub(k, whole)
        last = functools.partial(step, whole, sums)
        if self.module.target.has_avx512:
            sums = fn.if_value(fn.cmp("ne", left, 0), lambda: last(fn.lanes(left, self.lanes)), lambda: sums)
        outputs = [sum_each(fn, sums[i * width : (i + 1) * width]) for i in range(rows)]
        if not self.module.target.has_avx512:

            def one(at: Int, totals: list[Value]) -> list[Value]:
                y = constant(outputs[0].type, 0.0)
                for j, place in enumerate(b_columns):
                    y = fn.insert(y, fn.load(self.element, fn.gep(place, at, self.element)), j)
                x = [fn.broadcast(fn.gep(place, at, self.element), self.element, y.width) for place in a_rows]
                return [fn.fma(x[i], y, total) for i, total in enumerate(totals)]

            outputs = fn.loop(whole, k, 1, outputs, one)
        mask = fn.lanes(width, outputs[0].width)
        for i, total in enumerate(outputs):
            result = self.end.result(fn, frame, total, fn.add(row, i), column, mask)
            fn.masked_store(result, fn.gep(c, fn.mul(i, c_row), self.c_element), mask)
        return name


def sum_each(fn: Function, vectors: list[Value]) -> Value:
    """The sum over the lanes of each vector, in the lanes of one vector (as many as the next power of two).

    Lane i is added to lane i + half, then halves again; two vectors share the work from the first step on.
    """
    size = vectors[0].width
    parts = [
        *vectors,
        *[constant(vectors[0].type, 0.0)] * ((1 << (len(vectors) - 1).bit_length()) - len(vectors)),
    ]
    length = size  # lanes that still belong to one sum
    while length > 1:
        pairs = list(zip(parts[::2], parts[1::2], strict=True)) if len(parts) > 1 else [(parts[0], None)]
        lanes = 2 * size if len(parts) > 1 else parts[0].width
        low = [i for i in range(lanes) if i % length < length // 2]
        high = [i + length // 2 for i in low]
        parts = [fn.fadd(fn.shuffle(x, y, low), fn.shuffle(x, y, high)) for x, y in pairs]
        length //= 2
    return parts[0]
