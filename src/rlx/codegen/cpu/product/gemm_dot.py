"""Products with very few columns, or very few rows and a B stored by columns: vectors run along k.

Where n is small, vectors along the columns would be mostly empty. Here both operands are read along k, each
output has one vector of partial sums, and these are added up in a fixed tree. The choice depends only on
sizes known to the compiler, so the bits of a row do not depend on how many rows there are at run time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rlx.codegen.cpu.product.gemm_cut import Count, Part
from rlx.codegen.cpu.product.gemm_driver import GemmCall, GemmSpec, ProductDriver, Size
from rlx.codegen.cpu.product.microkernel import kind_of
from rlx.codegen.native.irtext import Module, Value, constant, vector
from rlx.codegen.native.notation import inline, native
from rlx.codegen.native.words import (
    Word,
    broadcast,
    call,
    fma,
    gep,
    i64,
    insert,
    lanes,
    load,
    loop,
    masked_load,
    masked_store,
    ptr,
    shuffle,
    udiv,
    ult,
)
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

    def plan(self, panels: Count) -> None:
        for name in ("n", "k", "a_row", "b_column", "c_row"):
            self.frame.share(name, getattr(self, name))

    @inline
    def product(self, a: ptr, b: ptr, c: ptr, part: Part) -> None:
        tiles = self.tiles
        one_panel = isinstance(self.spec.n, int) and self.spec.n <= self.columns
        if self.computed is not None:
            a = self.scratch()
            if not one_panel:  # few rows meet many columns
                self.computed.compute(self.args, a, 0, self.m, 0, self.k)
        heights = tiles.heights(self.rows)

        def tile(t: Count, column: Count, width: int) -> None:
            row, height = tiles.row(self.main, t), tiles.height(t)
            a_place = a
            if self.computed is not None and one_panel:
                self.computed.compute(self.args, a, row, height, 0, self.k)
            else:
                a_place = gep(a, row * self.a_row, self.element)
            b_place = gep(b, column * self.b_column, self.element)
            c_place = gep(c, row * self.c_row + column, self.c_element)

            def by_height(choices: list[int]) -> None:
                if len(choices) == 1:
                    name = f"{self.name}.{choices[0]}x{width}d"
                    function = compute_dots.written(name, kernel=self, rows=choices[0], width=width)
                    call(function, self.args, self.frame.pointer, a_place, b_place, c_place, row, column)
                elif choices:
                    if height == choices[0]:
                        by_height(choices[:1])
                    else:
                        by_height(choices[1:])

            by_height(heights)

        first, stop = part.panels()
        for j in loop(first, stop):
            top, bottom = part.of_panel(j)
            t0, t1 = max(top, part.low), min(bottom, part.high)
            column = j * self.columns
            if ult(j, self.full):
                for t in loop(t0, t1):
                    tile(t, column, self.columns)
            else:
                for one in loop(column, self.n):
                    for t in loop(t0, t1):
                        tile(t, one, 1)


@native(internal=True, noinline=True)
def compute_dots(
    args: ptr,
    frame: ptr,
    a: ptr,
    b: ptr,
    c: ptr,
    row: i64,
    column: i64,
    *,
    kernel: DotGemm,
    rows: int,
    width: int,
) -> None:
    """Compute `rows` x `width` elements of C from (row, column) on; the pointers point to its operands."""
    element, size, masks = kernel.element, kernel.lanes, kernel.module.target.has_avx512
    k, a_row, b_column, c_row = kernel.frame.named(frame, "k", "a_row", "b_column", "c_row")
    a_rows = [gep(a, i * a_row, element) for i in range(rows)]
    b_columns = [gep(b, j * b_column, element) for j in range(width)]
    type_ = vector(element, size)

    def added(at: Count, sums: list[Value], mask: Value | None) -> list[Value]:
        """The sums with what a vector of k adds to each."""

        def read(line: ptr) -> Value:
            place = gep(line, at, element)
            return load(type_, place) if mask is None else masked_load(type_, place, mask)

        x = [read(line) for line in (*a_rows, *b_columns)]
        return [fma(x[n // width], x[rows + n % width], total) for n, total in enumerate(sums)]

    whole = udiv(k, size) * size
    sums: list[Value] = [constant(type_, 0.0)] * (rows * width)
    for at in loop(0, whole, size):
        sums = added(at, sums, None)
    left = k - whole
    if masks:
        sums = added(whole, sums, lanes(left, size)) if left != 0 else sums
    outputs = [sum_each(sums[i * width : (i + 1) * width]) for i in range(rows)]
    if not masks:
        for at in loop(whole, k):
            y = constant(outputs[0].type, 0.0)
            for j, place in enumerate(b_columns):
                y = insert(y, load(element, gep(place, at, element)), j)
            x = [broadcast(gep(place, at, element), element, y.width) for place in a_rows]
            outputs = [fma(x[i], y, total) for i, total in enumerate(outputs)]
    mask = lanes(width, outputs[0].width)
    for i, total in enumerate(outputs):
        result = kernel.end.result(frame, total, row + i, column, mask)
        masked_store(result, gep(c, i * c_row, kernel.c_element), mask)


@inline
def sum_each(vectors: list[Value]) -> Value:
    """The sum of the lanes of each vector, in the lanes of one vector (as many as the next power of two)."""
    missing = (1 << (len(vectors) - 1).bit_length()) - len(vectors)
    zeros = [Word(constant(vectors[0].type, 0.0))] * missing
    return combine_each(lambda a, b: a + b, [*map(Word, vectors), *zeros])


@inline
def combine_each(combine: Callable[[Word, Word], Word], parts: list[Word]) -> Word:
    """The lanes of each vector combined, in the lanes of one vector; the vectors are a power of two.

    Lane i goes with lane i + half, then halves again; two vectors share the work from the first step on.
    """
    size = parts[0].width
    for halvings in range(size.bit_length() - 1):
        length = size >> halvings  # lanes that still belong together
        pairs = list(zip(parts[::2], parts[1::2], strict=True)) if len(parts) > 1 else [(parts[0], None)]
        width = 2 * size if len(parts) > 1 else parts[0].width
        low = [i for i in range(width) if i % length < length // 2]
        high = [i + length // 2 for i in low]
        parts = [combine(shuffle(x, y, low), shuffle(x, y, high)) for x, y in pairs]
    return parts[0]
