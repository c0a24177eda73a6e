"""Lines of an image copied into scratch with padding around, so that windows never meet an edge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from rlx.codegen.cpu.conv.shape import Geometry, Image
from rlx.codegen.cpu.frame import ArgumentTable
from rlx.codegen.cpu.product.gemm_cut import both
from rlx.codegen.native.irtext import Function, Int, Module, Value, constant, vector
from rlx.records import dataclass


@dataclass(frozen=True)
class Line:
    """One line to copy: `positions` places of which begin..end hold pixels of x, others padding. The source's
    pixel 0 stands at place `low`; `step` is the number of elements from one of its pixels to the next.
    """

    to: Value
    source: Value
    low: Int
    begin: Int
    end: Int
    positions: Int
    step: Int
    at: tuple[Int, ...] = ()  # further arguments of the packer, block, plane and line of x


class Mover(Protocol):
    """How the places of a line are laid out in scratch; what the width of a line counts is up to it."""

    @property
    def element(self) -> str:
        """Type in which pixels are copied."""
        ...

    def elements(self, fn: Function, width: Int) -> Int:
        """Elements of a line in scratch."""
        ...

    def pad(self, fn: Function, to: Value, width: Int) -> None: ...

    def copy(self, fn: Function, line: Line, width: Int) -> None: ...


def emit_line_packer(
    module: Module,
    name: str,
    table: ArgumentTable,
    shape: Geometry,
    image: Image,
    mover: Mover,
    told: Sequence[str] = (),
) -> str:
    """Name of the function pack(args, to, x, d, h, pixel, lines, width, positions, told...).

    It copies, for every block of channels and plane of the window at output plane `d`, `lines` lines from
    that of output line `h` on, each with `positions` places from the window of output `pixel` on.
    """
    name = f"{name}.lines"
    words = ("d", "h", "pixel", "lines", "width", "positions", *told)
    params = [("ptr", "args"), ("ptr noalias", "to"), ("ptr noalias", "x"), *(("i64", w) for w in words)]
    fn = module.function(name, params, internal=True, noinline=True)
    _, to, x, d, h, pixel, lines, width, positions, *more = fn.args
    taps, blocks = shape.window[0], -(-shape.per_in // image.lanes)
    size = [table.dim(fn, s) for s in shape.size]
    low = [table.dim(fn, s) for s in shape.low]
    steps = [table.dim(fn, s) for s in image.axes]
    block_step = table.dim(fn, image.block)
    elements = mover.elements(fn, width)
    before = fn.sub(low[2], fn.mul(pixel, shape.strides[2]))  # padding before the first pixel of x
    begin = fn.smin(fn.smax(before, 0), positions)
    end = fn.smin(fn.smax(fn.add(before, size[2]), begin), positions)
    first_d, first_h = (
        fn.sub(fn.mul(at, stride), padding)
        for at, stride, padding in zip((d, h), shape.strides, low, strict=False)
    )

    def block(b: Int, _: list[Value]) -> None:
        def plane(k: Int, _: list[Value]) -> None:
            at_d = fn.add(first_d, fn.mul(k, shape.dilations[0]))
            target = fn.gep(to, fn.mul(fn.mul(fn.add(fn.mul(b, taps), k), lines), elements), mover.element)
            source = fn.add(fn.mul(b, block_step), fn.mul(at_d, steps[0]))
            in_plane = fn.cmp("ult", at_d, size[0])

            def line(r: Int, _: list[Value]) -> None:
                at_h = fn.add(first_h, r)
                there = fn.gep(target, fn.mul(r, elements), mover.element)
                inside = both(fn, in_plane, fn.cmp("ult", at_h, size[1]))
                origin = fn.gep(x, fn.add(source, fn.mul(at_h, steps[1])), mover.element)
                place = (*more, b, at_d, at_h)
                found = Line(there, origin, before, begin, end, positions, steps[2], place)
                fn.branch(inside, lambda: mover.copy(fn, found, width), lambda: mover.pad(fn, there, width))

            fn.loop(0, lines, 1, [], line)

        fn.loop(0, taps, 1, [], plane)

    fn.loop(0, blocks, 1, [], block)
    return name


def _pieces(
    fn: Function, lanes: int, first: Int, last: Int, piece: Callable[[Int, Value | None], None], whole: bool
) -> None:
    """piece(element, mask) in whole vectors, the last one masked; with `whole`, nothing remains."""
    if whole:
        fn.loop(first, last, lanes, [], lambda i, _: piece(i, None))
        return
    cut = fn.add(first, fn.mul(fn.udiv(fn.sub(last, first), lanes), lanes))
    fn.loop(first, cut, lanes, [], lambda i, _: piece(i, None))
    left = fn.sub(last, cut)
    fn.branch(fn.cmp("sgt", left, 0), lambda: piece(cut, fn.lanes(left, lanes)))


@dataclass(frozen=True)
class PixelMover:
    """Pixels in order, each of `pixel` elements side by side; `width` counts pixels."""

    pixel: int
    lanes: int
    element: str = "float"
    fill: int = 0

    @property
    def told(self) -> tuple[str, ...]:
        """Further arguments of a packer."""
        return ()

    @property
    def whole(self) -> bool:
        return self.pixel % self.lanes == 0

    def elements(self, fn: Function, width: Int) -> Int:
        return fn.mul(width, self.pixel)

    def pad(self, fn: Function, to: Value, width: Int) -> None:
        self._fill(fn, to, 0, self.elements(fn, width))

    def _fill(self, fn: Function, to: Value, first: Int, last: Int) -> None:
        padding = constant(vector(self.element, self.lanes), self.fill)

        def piece(i: Int, mask: Value | None) -> None:
            place = fn.gep(to, i, self.element)
            fn.store(padding, place) if mask is None else fn.masked_store(padding, place, mask)

        self.pieces(fn, first, last, piece)

    def copy(self, fn: Function, line: Line, width: Int) -> None:
        first, last = fn.mul(line.begin, self.pixel), fn.mul(line.end, self.pixel)
        self._fill(fn, line.to, 0, first)
        self._fill(fn, line.to, last, fn.mul(line.positions, self.pixel))
        self.move(fn, line, first, last)

    def move(self, fn: Function, line: Line, first: Int, last: Int) -> None:
        """Write elements first..last of a line, which x has."""
        source = fn.gep(line.source, fn.mul(fn.sub(line.begin, line.low), line.step), self.element)
        if not (isinstance(line.step, int) and line.step == self.pixel):
            moved = vector(self.element, self.pixel)

            def one(i: Int, _: list[Value]) -> None:
                place = fn.gep(source, fn.mul(fn.sub(i, line.begin), line.step), self.element)
                fn.store(fn.load(moved, place), fn.gep(line.to, fn.mul(i, self.pixel), self.element))

            fn.loop(line.begin, line.end, 1, [], one)
            return
        type_ = vector(self.element, self.lanes)

        def piece(i: Int, mask: Value | None) -> None:
            place, there = fn.gep(source, fn.sub(i, first), self.element), fn.gep(line.to, i, self.element)
            if mask is None:
                fn.store(fn.load(type_, place), there)
            else:
                fn.masked_store(fn.masked_load(type_, place, mask), there, mask)

        self.pieces(fn, first, last, piece)

    def pieces(self, fn: Function, first: Int, last: Int, piece: Callable[[Int, Value | None], None]) -> None:
        """piece(element, mask) in whole vectors, the last one masked."""
        _pieces(fn, self.lanes, first, last, piece, self.whole)


@dataclass(frozen=True)
class PhasedMover:
    """Planar pixels in `stride` phases: position j is at [j % stride][j // stride]; `width` counts the
    pixels of a phase.
    """

    stride: int
    lanes: int
    element: str = "float"

    def elements(self, fn: Function, width: Int) -> Int:
        return fn.mul(width, self.stride)

    def pad(self, fn: Function, to: Value, width: Int) -> None:
        PixelMover(1, self.lanes).pad(fn, to, self.elements(fn, width))

    def copy(self, fn: Function, line: Line, width: Int) -> None:
        if self.stride == 1:
            PixelMover(1, self.lanes).copy(fn, line, width)
            return

        def place(i: Int) -> Value:
            """Where position i of the line is."""
            phase = fn.mul(fn.urem(i, self.stride), width)
            return fn.gep(line.to, fn.add(phase, fn.udiv(i, self.stride)), self.element)

        def zero(i: Int, _: list[Value]) -> None:
            fn.store(constant(self.element, 0.0), place(i))

        def one(i: Int, _: list[Value]) -> None:
            source = fn.gep(line.source, fn.mul(fn.sub(i, line.low), line.step), self.element)
            fn.store(fn.load(self.element, source), place(i))

        def several(i: Int, _: list[Value]) -> None:
            """A vector of each phase from position i on, which begins all phases."""
            wide = fn.load(
                vector(self.element, block), fn.gep(line.source, fn.sub(i, line.low), self.element)
            )
            column = fn.udiv(i, self.stride)
            for phase in range(self.stride):
                part = fn.shuffle(wide, None, range(phase, block, self.stride))
                fn.store(part, fn.gep(line.to, fn.add(fn.mul(width, phase), column), self.element))

        block = self.stride * self.lanes
        start = stop = fn.smin(fn.round_up(line.begin, self.stride), line.end)
        if isinstance(line.step, int) and line.step == 1:
            stop = fn.add(start, fn.mul(fn.udiv(fn.sub(line.end, start), block), block))
        fn.loop(0, line.begin, 1, [], zero)
        fn.loop(line.begin, start, 1, [], one)
        fn.loop(start, stop, block, [], several)
        fn.loop(stop, line.end, 1, [], one)
        fn.loop(line.end, line.positions, 1, [], zero)
