"""Rows of a table that a matmul reads as columns (`rlx.ops.storage.columns`).

Elements of a column are a row of a panel apart, so each is read for itself. Threads share pieces of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from rlx.codegen.cpu.expression import ERROR_INDEX
from rlx.codegen.cpu.frame import EmittedKernel, KernelFrame, kernel, product, unflatten
from rlx.codegen.cpu.primitives import MEMORY
from rlx.codegen.cpu.product.packing import own_panels
from rlx.codegen.cpu.product.quant_decode import Place
from rlx.codegen.native.notation import inline
from rlx.codegen.native.words import (
    Int,
    builder,
    byte_at,
    float32,
    fpext,
    gep,
    i8,
    i32,
    i64,
    load,
    loop,
    lshr,
    ptr,
    select,
    sext,
    sitofp,
    store,
    udiv,
    ult,
    umin,
    urem,
    zext,
)
from rlx.errors import UnsupportedError
from rlx.kernel.layout import Layout
from rlx.kernel.panels import PANEL_VECTORS, Panels, QuantLayout, quantised_of
from rlx.records import dataclass
from rlx.target.cpu import Target

if TYPE_CHECKING:
    from rlx.kernel.form import Template

PIECE = 32  # elements of a row that a thread takes at a time
STORED, INDICES = range(2)


@kernel
def emit_gather_stored(frame: KernelFrame, form: Template) -> EmittedKernel:
    """Write the kernel."""
    config = dict(form.config)
    stored = frame.inputs[STORED].dtype.name
    source = source_of(config["layouts"], config["group"], config["block"], stored, frame.module.target)
    sizes = frame.sizes(frame.inputs[INDICES].shape)
    pieces = -(-source.k // source.piece)
    low, high = cast("tuple[Int, Int]", frame.share(product(sizes) * pieces))
    result = frame.result(0)
    for unit in loop(low, high):
        row, first = udiv(unit, pieces), urem(unit, pieces) * source.piece
        place = gep(result, row * source.k + first, float32)
        chosen = index_of(frame, row, sizes)
        found = select(chosen < 0, chosen + source.n, chosen)
        if ult(found, source.n):
            source.copy(frame.start(STORED), found, first, place)
        else:
            store(i64(ERROR_INDEX), frame.error)
    return frame.finish()


@inline
def index_of(frame: KernelFrame, row: Int, sizes: Sequence[Int]) -> i64:
    """The number that a row has as its index."""
    slot, flat = frame.inputs[INDICES], i64(0)
    for i, step in zip(unflatten(builder(), row, sizes), slot.steps, strict=True):
        flat += i * frame.size(step)
    element = MEMORY[slot.dtype.name]
    found = load(element, gep(frame.start(INDICES), flat, element))
    if element == "i64":
        return cast("i64", found)
    return sext(found, i64) if slot.dtype.is_signed else zext(found, i64)


def source_of(
    layouts: tuple[Layout, ...], group: int, block: int, stored: str, target: Target
) -> PlainColumns | CodedColumns:
    """How columns are read from the panels of matmuls of f32, or of rounded rows."""
    if len(layouts) == 1:
        panels = own_panels(layouts[0], target, "f32")
        if panels is not None and stored in ("f32", "f16", "bf16"):
            return PlainColumns(panels, MEMORY[stored])
    else:
        lanes = target.lanes("f32")
        both = [quantised_of(layouts, group, lanes, quads, block) for quads in (False, True)]
        coded = both[0] or both[1]
        if coded is not None:
            return CodedColumns(coded)
    named = ", ".join(str(own) for own in layouts)
    raise UnsupportedError(f"kernels for {target.name} cannot read the layout {named}")


@dataclass(frozen=True)
class PlainColumns:
    """Columns of panels of numbers; panels of f32 take k one by one."""

    panels: Panels
    element: str

    @property
    def piece(self) -> int:
        return PIECE

    @property
    def k(self) -> int:
        return self.panels.k

    @property
    def n(self) -> int:
        return self.panels.n

    @inline
    def copy(self, start: ptr, column: i64, first: Int, to: ptr) -> None:
        """A piece of a column from row `first` on; the last panel is narrower."""
        panels = self.panels
        number = udiv(column, panels.columns)
        before = number * panels.columns
        width = select(ult(number, panels.full), panels.columns, panels.tail)
        panel = gep(start, before * panels.k + (column - before), self.element)
        for i in loop(umin(i64(panels.k) - first, self.piece)):
            found = load(self.element, gep(panel, (first + i) * width, self.element))
            wide = found if self.element == "float" else fpext(found, "float")
            store(wide, gep(to, i, float32))


@dataclass(frozen=True)
class CodedColumns:
    """Columns of panels of codes; a piece is a group."""

    layout: QuantLayout

    @property
    def k(self) -> int:
        return self.layout.k

    @property
    def n(self) -> int:
        return self.layout.n

    @property
    def piece(self) -> int:
        return self.layout.group

    @inline
    def copy(self, start: ptr, column: i64, first: Int, to: ptr) -> None:
        """The numbers (code - zero) * scale, or code * scale - minimum, of a group of a column, as f32."""
        layout, wider = self.layout, zext if self.layout.minimums else sext
        number = udiv(column, layout.columns)
        place = column - number * layout.columns
        group = Place.of(layout, byte_at(start, number * layout.panel_bytes), udiv(first, layout.group))
        scale, *second = [group.factors(i, place, 1) for i in range(1 + layout.shifted)]
        codes = group.codes
        for i in loop(umin(i64(layout.k) - first, layout.group)):
            if layout.quads:  # four k are next to each other
                byte = lshr(i, 2) * (4 * layout.columns) + place * 4 + (i & 3)
                code = wider(load(i8, gep(codes, byte, i8)), i32)
            elif layout.bits == 8:
                code = wider(load(i8, gep(codes, i * layout.columns + place, i8)), i32)
            elif layout.bits == 6:
                code = self.six_bits(codes, place, i)
            else:  # a word has eight k, the even ones in its low half
                word = load(i32, gep(codes, lshr(i, 3) * layout.columns + place, i32))
                inside = (lshr(i, 1) & 3) * 4 + (i & 1) * 16
                code = lshr(word, builder().trunc(inside, "i32")) & 15
                code = code if layout.minimums else code - 8
            level = sitofp(code, "float")
            if layout.minimums:
                level = level * scale - second[0]
            else:
                level = (level - second[0] if second else level) * scale
            store(level, gep(to, i, float32))

    @inline
    def six_bits(self, codes: ptr, place: i64, i: Int) -> i32:
        """Code i of a column in a group: a quad of its set has it, or all three have two of its bits."""
        width = self.layout.lanes
        number = lshr(i, 4) * PANEL_VECTORS + udiv(place, width)
        byte = number * (12 * width) + urem(place, width) * 4 + ((i & 1) * 2 + (lshr(i, 1) & 1))
        quad = lshr(i, 2) & 3

        def of_vector(number: Int) -> i32:
            return zext(load(i8, gep(codes, byte + number * (4 * width), i8)), i32)

        left_over = [lshr(of_vector(i64(v)), 6) << 2 * v for v in range(3)]
        found = select(
            ult(quad, 3), of_vector(umin(quad, 2)) & 63, left_over[0] | left_over[1] | left_over[2]
        )
        return found if self.layout.minimums else found - 32
