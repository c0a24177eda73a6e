"""Lines of an image copied into scratch with padding around, so that windows never meet an edge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rlx.codegen.cpu.conv.shape import Geometry, Image
from rlx.codegen.cpu.frame import ArgumentTable
from rlx.codegen.cpu.product.gemm_cut import Count
from rlx.codegen.native.irtext import Value, constant, vector
from rlx.codegen.native.notation import inline, native
from rlx.codegen.native.words import (
    gep,
    i64,
    lanes,
    load,
    loop,
    masked_load,
    masked_store,
    noalias,
    ptr,
    round_up,
    shuffle,
    store,
    udiv,
    ult,
    urem,
)
from rlx.records import dataclass


@dataclass(frozen=True)
class Line:
    """One line to copy: `positions` places of which begin..end hold pixels of x, others padding. The source's
    pixel 0 stands at place `low`; `step` is the number of elements from one of its pixels to the next.
    """

    to: ptr
    source: ptr
    low: Count
    begin: Count
    end: Count
    positions: Count
    step: Count
    at: tuple[Count, ...] = ()  # further arguments of the packer, block, plane and line of x


class Mover(Protocol):
    """How the places of a line are laid out in scratch; what the width of a line counts is up to it."""

    @property
    def element(self) -> str:
        """Type in which pixels are copied."""
        ...

    def elements(self, width: Count) -> Count:
        """Elements of a line in scratch."""
        ...

    def pad(self, to: ptr, width: Count) -> None: ...

    def copy(self, line: Line, width: Count) -> None: ...


@dataclass(frozen=True)
class LinePacker:
    """Writes the function pack(args, to, x, d, h, pixel, lines, width, positions, image, first_block).

    It copies, for every block of channels and plane of the window at output plane `d`, `lines` lines from
    that of output line `h` on, each with `positions` places from the window of output `pixel` on. Only an
    image that is `computed` takes the last two.
    """

    name: str
    table: ArgumentTable
    shape: Geometry
    image: Image
    mover: Mover
    computed: bool = False

    def function(self) -> str:
        """Its name."""
        pack = _pack_computed if self.computed else _pack
        return pack.written(f"{self.name}.lines", packer=self)

    @inline
    def pack(
        self,
        to: ptr,
        x: ptr,
        d: i64,
        h: i64,
        pixel: i64,
        lines: i64,
        width: i64,
        positions: i64,
        more: tuple[i64, ...],
    ) -> None:
        """What the function does; `more` are its last arguments."""
        table, shape, mover = self.table, self.shape, self.mover
        taps, blocks = shape.window[0], -(-shape.per_in // self.image.lanes)
        size = [table.size(s) for s in shape.size]
        low = [table.size(s) for s in shape.low]
        steps = [table.size(s) for s in self.image.axes]
        block_step = table.size(self.image.block)
        elements = mover.elements(width)
        before = low[2] - pixel * shape.strides[2]  # padding before the first pixel of x
        begin = min(max(before, 0), positions)
        end = min(max(before + size[2], begin), positions)
        first_d, first_h = d * shape.strides[0] - low[0], h * shape.strides[1] - low[1]
        for b in loop(blocks):
            for k in loop(taps):
                at_d = first_d + k * shape.dilations[0]
                target = gep(to, (b * taps + k) * lines * elements, mover.element)
                source = b * block_step + at_d * steps[0]
                in_plane = ult(at_d, size[0])
                for r in loop(lines):
                    at_h = first_h + r
                    there = gep(target, r * elements, mover.element)
                    inside = in_plane & ult(at_h, size[1])
                    origin = gep(x, source + at_h * steps[1], mover.element)
                    place = (*more, b, at_d, at_h)
                    if inside:
                        mover.copy(Line(there, origin, before, begin, end, positions, steps[2], place), width)
                    else:
                        mover.pad(there, width)


@native(internal=True, noinline=True)
def _pack(
    args: ptr,
    to: noalias,
    x: noalias,
    d: i64,
    h: i64,
    pixel: i64,
    lines: i64,
    width: i64,
    positions: i64,
    *,
    packer: LinePacker,
) -> None:
    packer.pack(to, x, d, h, pixel, lines, width, positions, ())


@native(internal=True, noinline=True)
def _pack_computed(
    args: ptr,
    to: noalias,
    x: noalias,
    d: i64,
    h: i64,
    pixel: i64,
    lines: i64,
    width: i64,
    positions: i64,
    image: i64,
    first_block: i64,
    *,
    packer: LinePacker,
) -> None:
    packer.pack(to, x, d, h, pixel, lines, width, positions, (image, first_block))


@inline
def store_part(value: Value, place: ptr, mask: Value | None) -> None:
    """Store a vector, or the lanes of a mask."""
    if mask is None:
        store(value, place)
    else:
        masked_store(value, place, mask)


@dataclass(frozen=True)
class PixelMover:
    """Pixels in order, each of `pixel` elements side by side; `width` counts pixels."""

    pixel: int
    lanes: int
    element: str = "float"
    fill: int = 0

    @inline
    def elements(self, width: Count) -> Count:
        return width * self.pixel

    @inline
    def pad(self, to: ptr, width: Count) -> None:
        self.fill_part(to, 0, width * self.pixel)

    @inline
    def copy(self, line: Line, width: Count) -> None:
        first, last = line.begin * self.pixel, line.end * self.pixel
        self.fill_part(line.to, 0, first)
        self.fill_part(line.to, last, line.positions * self.pixel)
        self.move(line, first, last)

    @inline
    def fill_part(self, to: ptr, first: Count, last: Count) -> None:
        """Write padding to elements first..last."""
        padding = constant(vector(self.element, self.lanes), self.fill)

        def fill(i: Count, mask: Value | None) -> None:
            store_part(padding, gep(to, i, self.element), mask)

        self.each_vector(first, last, fill)

    @inline
    def move(self, line: Line, first: Count, last: Count) -> None:
        """Write elements first..last of a line, which x has."""
        source = gep(line.source, (line.begin - line.low) * line.step, self.element)
        type_ = vector(self.element, self.lanes)

        def copy_vector(i: Count, mask: Value | None) -> None:
            place, there = gep(source, i - first, self.element), gep(line.to, i, self.element)
            if mask is None:
                store(load(type_, place), there)
            else:
                masked_store(masked_load(type_, place, mask), there, mask)

        if isinstance(line.step, int) and line.step == self.pixel:
            self.each_vector(first, last, copy_vector)
        else:
            for i in loop(line.begin, line.end):
                place = gep(source, (i - line.begin) * line.step, self.element)
                pixel = load(vector(self.element, self.pixel), place)
                store(pixel, gep(line.to, i * self.pixel, self.element))

    @inline
    def each_vector(self, first: Count, last: Count, run: Callable[[Count, Value | None], None]) -> None:
        """run(element, mask) in whole vectors, the last one masked unless pixels are whole vectors."""
        if self.pixel % self.lanes == 0:
            for i in loop(first, last, self.lanes):
                run(i, None)
        else:
            cut = first + udiv(last - first, self.lanes) * self.lanes
            for i in loop(first, cut, self.lanes):
                run(i, None)
            left = last - cut
            if left > 0:
                run(cut, lanes(left, self.lanes))


@dataclass(frozen=True)
class PhasedMover:
    """Planar pixels in `stride` phases: position j is at [j % stride][j // stride]; `width` counts the
    pixels of a phase.
    """

    stride: int
    lanes: int
    element: str = "float"

    @inline
    def elements(self, width: Count) -> Count:
        return width * self.stride

    @inline
    def pad(self, to: ptr, width: Count) -> None:
        PixelMover(1, self.lanes).pad(to, width * self.stride)

    @inline
    def copy(self, line: Line, width: Count) -> None:
        if self.stride == 1:
            PixelMover(1, self.lanes).copy(line, width)
        else:
            self.split(line, width)

    @inline
    def split(self, line: Line, width: Count) -> None:
        """Copy a line to its phases: whole vectors of all of them where x has those, else single pixels."""

        def place(i: Count) -> ptr:
            """Where position i of the line is."""
            phase = urem(i, self.stride) * width
            return gep(line.to, phase + udiv(i, self.stride), self.element)

        def copy_pixel(i: Count) -> None:
            source = gep(line.source, (i - line.low) * line.step, self.element)
            store(load(self.element, source), place(i))

        block = self.stride * self.lanes
        start = min(round_up(line.begin, self.stride), line.end)
        stop = start
        if isinstance(line.step, int) and line.step == 1:
            stop = start + udiv(line.end - start, block) * block
        for i in loop(0, line.begin):
            store(constant(self.element, 0.0), place(i))
        for i in loop(line.begin, start):
            copy_pixel(i)
        for i in loop(start, stop, block):  # begins all phases
            wide = load(vector(self.element, block), gep(line.source, i - line.low, self.element))
            column = udiv(i, self.stride)
            for phase in range(self.stride):
                part = shuffle(wide, None, range(phase, block, self.stride))
                store(part, gep(line.to, width * phase + column, self.element))
        for i in loop(stop, line.end):
            copy_pixel(i)
        for i in loop(line.end, line.positions):
            store(constant(self.element, 0.0), place(i))
