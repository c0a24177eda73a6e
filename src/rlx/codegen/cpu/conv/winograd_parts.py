"""The functions that a Winograd kernel calls: both transforms, and products of a register tile of tiles."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from rlx.codegen.cpu.conv.end import Epilogue
from rlx.codegen.cpu.conv.shape import Image
from rlx.codegen.cpu.conv.winograd_direct import is_spoilt
from rlx.codegen.cpu.conv.winograd_numbers import Grid, Integers, Reals
from rlx.codegen.cpu.expression import Lane
from rlx.codegen.cpu.frame import ArgumentTable
from rlx.codegen.cpu.primitives import memory_type
from rlx.codegen.cpu.product.gemm_cut import Count
from rlx.codegen.cpu.product.microkernel import Kind, Places, accumulate
from rlx.codegen.native.irtext import constant, vector
from rlx.codegen.native.notation import inline, native
from rlx.codegen.native.words import (
    alloca,
    builder,
    gep,
    i64,
    load,
    loop,
    noalias,
    ptr,
    select,
    store,
    udiv,
    ult,
    urem,
    zext,
)
from rlx.codegen.native.words import lanes as first_lanes
from rlx.ir.types import Shape
from rlx.records import dataclass

Numbers = Reals | Integers
Place = tuple[Count, Count, Count]  # of a tile: image, row, column


@inline
def _next_tile(place: Place, tiles_h: i64, tiles_w: i64) -> Place:
    """The place of the tile after one, in row-major order."""
    image, row, column = place
    column += 1
    wraps = column == tiles_w
    row += zext(wraps, i64)
    column = select(wraps, 0, column)
    wraps = row == tiles_h
    image += zext(wraps, i64)
    return image, select(wraps, 0, row), column


def input_transform(numbers: Numbers, m: int, lanes: int, fill: int = 0) -> str:
    """Name of the function that writes transformed tiles as [point][block][tile][lanes]; `fill` is what
    surrounds an image.
    """
    name = f"winograd.input{m}.{numbers.name}.{fill}"
    return _input_transform.written(name, numbers=numbers, m=m, lanes=lanes, fill=fill)


@native(internal=True, noinline=True)
def _input_transform(
    x: noalias,
    batch: i64,
    block: i64,
    line: i64,
    height: i64,
    width: i64,
    low_h: i64,
    low_w: i64,
    to: noalias,
    step: i64,
    blocks: i64,
    tiles: i64,
    image: i64,
    row: i64,
    column: i64,
    tiles_h: i64,
    tiles_w: i64,
    *,
    numbers: Numbers,
    m: int,
    lanes: int,
    fill: int,
) -> None:
    side, type_ = m + 2, vector(numbers.image, lanes)
    edge = alloca(numbers.image, side * side * lanes)

    def copy_edge(source: ptr, top: i64, left: i64) -> None:
        """Copy a tile that reaches past an edge, with `fill` there."""
        for i in range(side):
            in_line = ult(top + i, height)
            for j in range(side):
                inside = in_line & ult(left + j, width)
                place = gep(source, line * i + j * lanes, numbers.image)
                pixel = load(type_, place) if inside else constant(type_, fill)
                store(pixel, gep(edge, (i * side + j) * lanes, numbers.image))

    for b in loop(blocks):
        plane = b * block
        target = gep(to, b * tiles * lanes, numbers.point)
        place = (image, row, column)
        for t in loop(tiles):
            at_image, at_row, at_column = place
            top, left = at_row * m - low_h, at_column * m - low_w
            start = plane + (at_image * batch + (top * line + left * lanes))
            source = gep(x, start, numbers.image)
            tests = (top >= 0, left >= 0, top + side <= height, left + side <= width)
            if tests[0] & tests[1] & tests[2] & tests[3]:
                begin, stride = source, line
            else:
                copy_edge(source, top, left)
                begin, stride = edge, i64(side * lanes)
            lines = [gep(begin, stride * i, numbers.image) for i in range(side)]
            grid = [
                [numbers.read(gep(p, j * lanes, numbers.image), lanes) for j in range(side)] for p in lines
            ]
            there = gep(target, t * lanes, numbers.point)
            for k, value in enumerate(v for r in numbers.into(m, grid) for v in r):
                store(value, gep(there, step * k, numbers.point))
            place = _next_tile(place, tiles_h, tiles_w)


def products(kind: Kind, pixels: int, vectors: int) -> str:
    """Name of the function that sums one register tile over all input channels."""
    name = f"winograd.{kind.element}.{pixels}x{vectors}"
    return _products.written(name, kind=kind, pixels=pixels, vectors=vectors)


@native(internal=True, noinline=True)
def _products(
    x: noalias,
    w: noalias,
    y: noalias,
    blocks: i64,
    step: i64,
    *,
    kind: Kind,
    pixels: int,
    vectors: int,
) -> None:
    """`step` is the number of elements from one block of channels to the next, in x and in y."""
    f, lanes, width = builder(), kind.lanes, vectors * kind.lanes * kind.group
    starts, vector_starts = range(0, pixels * lanes, lanes), range(0, width, lanes * kind.group)
    sums = [kind.zero] * (pixels * vectors)
    for b in loop(blocks):
        there = gep(x, b * step, kind.element)
        rows = Places.of(f, there, list(starts), kind.group, kind.element)
        panel = gep(w, b * (lanes * vectors * lanes), kind.element)
        columns = Places.of(f, panel, list(vector_starts), width, kind.element)
        sums = accumulate(f, kind, rows, columns, lanes, sums)
    for total, (start, j) in zip(sums, itertools.product(starts, range(vectors)), strict=True):
        there = gep(y, step * j, kind.accumulator)
        store(total, gep(there, start, kind.accumulator))


@inline
def _sums_of(numbers: Numbers, at: ptr, step: i64, side: int, type_: str) -> Grid:
    """The sums of a tile at all points."""
    places = [gep(at, step * n, numbers.sums) for n in range(side * side)]
    return [[load(type_, p) for p in places[i * side : (i + 1) * side]] for i in range(side)]


def part(numbers: Numbers, m: int, lanes: int, adds: bool) -> str:
    """Name of the function that computes the outputs of some input channels, stored as
    [block][tile][pixel][lanes], or added to what is there.
    """
    name = f"winograd.part{m}.{numbers.name}" + (".add" if adds else "")
    return _part.written(name, numbers=numbers, m=m, lanes=lanes, adds=adds)


@native(internal=True, noinline=True)
def _part(
    sums: noalias,
    to: noalias,
    step: i64,
    first: i64,
    last: i64,
    tiles: i64,
    *,
    numbers: Numbers,
    m: int,
    lanes: int,
    adds: bool,
) -> None:
    type_ = vector(numbers.sums, lanes)
    for number in loop(first * tiles, last * tiles):
        at = gep(sums, number * lanes, numbers.sums)
        there = gep(to, number * (m * m * lanes), numbers.sums)
        results = numbers.out(m, _sums_of(numbers, at, step, m + 2, type_))
        for n, value in enumerate(v for r in results for v in r):
            place = gep(there, n * lanes, numbers.sums)
            store(value + load(type_, place) if adds else value, place)


@dataclass(frozen=True)
class OutputTransform:
    """Writes the function that turns sums into outputs and stores them behind the epilogue.

    Lanes after the last of `channels` are stored as zeros. With `in_parts`, outputs of the input channels
    before are added. repair(place, stage) computes the sums of the tile at `place` (image, block, plane,
    first line and pixel) without transforms, where those hold Inf or NaN. With `in_planes`, all tiles are of
    one plane, and what is said to be the image is the number of that plane among those of all images.
    """

    name: str
    table: ArgumentTable
    epilogue: Epilogue
    y: Image
    m: int
    lanes: int
    out: Shape
    channels: int
    numbers: Numbers
    in_parts: bool
    repair: Callable[[Sequence[Count], ptr], None]
    in_planes: bool = False

    def function(self) -> str:
        """Its name."""
        return _output_transform.written(f"{self.name}.output", of=self)


@native(internal=True, noinline=True)
def _output_transform(
    args: ptr,
    sums: noalias,
    before: ptr,
    step: i64,
    first: i64,
    last: i64,
    tiles: i64,
    image: i64,
    row: i64,
    column: i64,
    tiles_h: i64,
    tiles_w: i64,
    *,
    of: OutputTransform,
) -> None:
    table, m, lanes, numbers = of.table, of.m, of.lanes, of.numbers
    type_, element = vector(numbers.sums, lanes), memory_type(table.outputs[0].dtype)
    height, width = table.size(of.out[1]), table.size(of.out[2])
    y_batch, y_block, y_line = (table.size(s) for s in (of.y.batch, of.y.block, of.y.axes[1]))
    y = table.start(len(table.inputs))
    stage = alloca(numbers.sums, m * m * lanes)
    plane: Count = 0
    if of.in_planes:
        planes = table.size(of.out[0])
        image, plane = udiv(image, planes), urem(image, planes)
        y = gep(y, plane * table.size(of.y.axes[0]), element)

    def store_tile(image: Count, b: Count, top: i64, left: i64, lane: Lane) -> None:
        """Store the pixels of a tile that exist, from sums in the stage."""
        common = of.epilogue.common([image, b, 0, plane, top, left], lane)
        start = image * y_batch + b * y_block
        origin = gep(y, start + (top * y_line + left * lanes), element)
        lines, pixels = min(height - top, m), min(width - left, m)
        for i in loop(lines):
            there = gep(origin, i * y_line, element)
            for j in loop(pixels):
                total = load(type_, gep(stage, (i * m + j) * lanes, numbers.sums))
                point = [image, b, 0, plane, top + i, left + j]
                result = of.epilogue.value(of.epilogue.at(point, lane, total, common))
                if lane.mask is not None:
                    result = select(lane.mask, result, 0)
                store(result, gep(there, j * lanes, element))

    for b in loop(first, last):
        source = gep(sums, b * tiles * lanes, numbers.sums)
        mask = first_lanes(of.channels - b * lanes, lanes) if of.channels % lanes else None
        place = (image, row, column)
        for t in loop(tiles):
            at_image, at_row, at_column = place
            grid = _sums_of(numbers, gep(source, t * lanes, numbers.sums), step, m + 2, type_)
            earlier = gep(before, (b * tiles + t) * (m * m * lanes), numbers.sums)
            for n, value in enumerate(v for r in numbers.out(m, grid) for v in r):
                if of.in_parts:
                    value = value + load(type_, gep(earlier, n * lanes, numbers.sums))
                store(value, gep(stage, n * lanes, numbers.sums))
            top, left = at_row * m, at_column * m
            if isinstance(numbers, Reals):
                if is_spoilt(grid):
                    of.repair((at_image, b, plane, top, left), stage)
            store_tile(at_image, b, top, left, Lane(2, 0, lanes, mask))
            place = _next_tile(place, tiles_h, tiles_w)
