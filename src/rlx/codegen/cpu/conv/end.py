"""The end of a convolution tile: epilogue and store, into a blocked image (lanes are channels, straight from
registers) or a planar one (turned through the stack, lanes are pixels)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from functools import cached_property
from typing import TypeAlias

from rlx.codegen.cpu.conv.shape import Image, static
from rlx.codegen.cpu.conv.tile import TilePlace
from rlx.codegen.cpu.expression import Expression, Lane
from rlx.codegen.cpu.frame import ArgumentTable, unflatten
from rlx.codegen.cpu.primitives import memory_type, to_memory
from rlx.codegen.cpu.product.gemm_cut import Count
from rlx.codegen.cpu.product.gemm_end import Frame
from rlx.codegen.cpu.rows.collapse import accesses, flatten_loads
from rlx.codegen.native.irtext import Value, vector
from rlx.codegen.native.notation import inline, native
from rlx.codegen.native.words import (
    alloca,
    builder,
    call,
    gep,
    i64,
    iota,
    lanes,
    load,
    loop,
    masked_store,
    noalias,
    ptr,
    scatter,
    select,
    splat,
    store,
    transpose,
    udiv,
)
from rlx.ir.dim import Dim, known_eq
from rlx.ir.types import Shape
from rlx.kernel.nests import Nest, Store
from rlx.kernel.scalar import PRIMITIVES, Scalar, axis, const, rebuild, replace_axes
from rlx.records import dataclass

_Result: TypeAlias = tuple[Value, Value]  # what to store, and where


@dataclass(frozen=True)
class Epilogue:
    """The expression that a kernel stores, over (image, channel..., three axes)."""

    table: ArgumentTable
    body: Scalar
    space: Shape
    first_axis: int  # of the three

    @staticmethod
    def planar(table: ArgumentTable, store: Store, out: Shape, axes3: Shape) -> Epilogue:
        """Over (image, channel, axes)."""
        rank = len(out) - 2
        point = [axis(0), axis(1), *(axis(5 - rank + i) for i in range(rank))]
        return Epilogue._flat(table, replace_axes(store.body, point), (*out[:2], *axes3), 2)

    @staticmethod
    def blocked(table: ArgumentTable, store: Store, out: Shape, axes3: Shape, lanes: int) -> Epilogue:
        """Over (image, block of channels, lane, axes)."""
        rank = len(out) - 2
        whole = axis(1) * lanes + axis(2)
        point = [axis(0), whole, *(axis(6 - rank + i) for i in range(rank))]

        def split(e: Scalar, args: tuple[Scalar, ...]) -> Scalar | None:
            """Blocks and lanes of what was (block * lanes + lane) before."""
            if e.prim in ("floor_div", "mod") and args[0] == whole and args[1] == const(lanes):
                return axis(1) if e.prim == "floor_div" else axis(2)
            return None

        body = rebuild(replace_axes(store.body, point), split)
        blocks = -(-static(out[1]) // lanes)
        return Epilogue._flat(table, body, (out[0], blocks, lanes, *axes3), 3)

    @staticmethod
    def _flat(table: ArgumentTable, body: Scalar, space: Shape, first_axis: int) -> Epilogue:
        nest = Nest(space, len(space), (), (Store(body, True, (0,) * len(space)),))
        flat = flatten_loads(nest, [slot.steps for slot in table.inputs])
        return Epilogue(table, flat.stores[0].body, space, first_axis)

    @cached_property
    def sees_one_axis(self) -> bool:
        """Whether all loads take the three axes as one run of pixels."""
        found = accesses(Nest(self.space, len(self.space), (), (Store(self.body, True, ()),)))
        inner = self.first_axis + 2
        if any(i in found.other for i in range(self.first_axis, inner + 1)):
            return False
        product: Dim = self.space[inner]
        for i in (inner - 1, self.first_axis):
            for steps in found.steps:
                if steps and self.space[i] != 1 and known_eq(steps[i], steps[inner] * product) is not True:
                    return False
            product = product * self.space[i]
        return True

    @cached_property
    def fixed(self) -> list[Scalar]:
        """Sub-expressions that are the same for all pixels of a tile."""
        free: dict[Scalar, bool] = {}
        out = []
        for e in self.body.walk():
            own = e.prim == "acc" or (e.prim == "axis" and e.data >= self.first_axis)
            free[e] = own or any(free[a] for a in e.args)
            if not free[e] and e.prim not in ("const", "axis"):
                out.append(e)
        return out

    @cached_property
    def length(self) -> int:
        """Operations per vector of sums."""
        fixed = set(self.fixed)
        return sum(
            PRIMITIVES[e.prim].cost for e in self.body.walk() if e.prim in PRIMITIVES and e not in fixed
        )

    def at(self, axes: list[Count], lane: Lane, sums: Value | None, known: Expression | None) -> Expression:
        """The expression at a point, in the function that is being written."""
        f = builder()
        made = Expression(f, self.table.dim, self.table.operands(f), axes, lane)
        if sums is not None:
            made.accs = [sums]
        if known is not None:
            made.memo = dict(known.memo)
        return made

    def common(self, axes: list[Count], lane: Lane) -> Expression:
        """What is the same for all pixels of a tile, computed."""
        made = self.at(axes, lane, None, None)
        for e in self.fixed:
            made(e)
        return made

    def value(self, at: Expression) -> Value:
        return to_memory(at.fn, at.vector(self.body), self.table.outputs[0].dtype)


Line: TypeAlias = tuple[Count, Count, Count]  # image, d, h


@dataclass(frozen=True)
class ConvEnd:
    """What both ends share. The frame holds the indices `image`, and of the line `d` and `h`, unless `flat`:
    then the pixels of all lines are one run.
    """

    name: str
    table: ArgumentTable
    frame: Frame
    epilogue: Epilogue
    out: Image
    channels: int
    lanes: int
    flat: bool
    sums: str = "float"  # type of an element of the sums
    element: str = field(default="", init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "element", memory_type(self.table.outputs[0].dtype))

    def line(self, frame: Value) -> Line:
        """(image, d, h) of the frame. A loop reads them once, before it stores anything."""
        f = builder()
        image = self.frame.read(f, frame, "image")
        if self.flat:
            return image, 0, 0
        return image, self.frame.read(f, frame, "d"), self.frame.read(f, frame, "h")

    @property
    def pixel_step(self) -> Count:
        """Elements from one pixel of a line to the next."""
        return self.table.size(self.out.axes[2])

    @inline
    def place(self, line: Line, block: Count, pixel: Count) -> ptr:
        """Address of a pixel of a block of channels."""
        table, out = self.table, self.out
        image, d, h = line
        offset = 0
        for index, step in zip((image, block, d, h), (out.batch, out.block, *out.axes), strict=False):
            offset += index * table.size(step)
        offset += pixel * self.pixel_step
        return gep(table.start(len(table.inputs)), offset, self.element)


class BlockedEnd(ConvEnd):
    """Lanes are channels. A tile ends straight from registers, or from a stage that holds its sums."""

    @inline
    def finish(self, place: TilePlace, sums: list[Value], pixels: int, masked: bool) -> None:
        vectors = len(sums) // pixels
        results = []
        for j in range(vectors):
            end = self.vector_end(place, j, masked and j == vectors - 1)
            results += [end(p, sums[p * vectors + j]) for p in range(pixels)]
        for value, there in results:
            store(value, there)

    def finisher(self, vectors: int, masked: bool) -> str:
        """Name of the function that ends a tile of any number of pixels in the stage."""
        name = f"{self.name}.finish{vectors}" + ("m" if masked else "")
        return _finish_blocked.written(name, end=self, vectors=vectors, masked=masked)

    @inline
    def vector_end(self, tile: TilePlace, j: int, masked: bool) -> Callable[[Count, Value], _Result]:
        """What ends vector j of a pixel: (pixel of the tile, sums) -> what to store, and where."""
        pixel = tile.pixel
        image, d, h = line = self.line(tile.frame)
        block = udiv(tile.channel, self.lanes) + j
        mask = lanes(self.channels - block * self.lanes, self.lanes) if masked else None
        lane = Lane(2, 0, self.lanes, mask)
        common = self.epilogue.common([image, block, 0, d, h, pixel], lane)
        start = self.place(line, block, pixel)

        def end(p: Count, sums: Value) -> _Result:
            place = [d, h, pixel + p]
            if self.flat and not self.epilogue.sees_one_axis:
                sizes = [self.table.size(s) for s in self.epilogue.space[3:]]
                place = unflatten(builder(), pixel + p, sizes)
            value = self.epilogue.value(self.epilogue.at([image, block, 0, *place], lane, sums, common))
            if mask is not None:
                value = select(mask, value, 0)
            return value, gep(start, p * self.lanes, self.element)

        return end


@native(internal=True, noinline=True)
def _finish_blocked(
    args: ptr,
    frame: ptr,
    stage: ptr,
    channel: i64,
    pixel: i64,
    pixels: i64,
    *,
    end: BlockedEnd,
    vectors: int,
    masked: bool,
) -> None:
    """End a tile whose sums are in the stage, [pixel][vector][lane]."""
    tile = TilePlace(frame, channel, pixel)
    ends = [end.vector_end(tile, j, masked and j == vectors - 1) for j in range(vectors)]
    type_ = vector(end.sums, end.lanes)
    for p in loop(pixels):
        for j, finish in enumerate(ends):
            at = (p * vectors + j) * end.lanes
            value, there = finish(p, load(type_, gep(stage, at, end.sums)))
            store(value, there)


class PlanarStore(ConvEnd):
    """Lanes are pixels of one line of one channel."""

    @inline
    def store_pixels(self, channel: Count, pixel: Count, line: Line, sums: Value, mask: Value | None) -> None:
        """The epilogue of one vector of pixels of a line, and its store."""
        image, d, h = line
        lane = Lane(4, pixel, self.lanes, mask)
        value = self.epilogue.value(self.epilogue.at([image, channel, d, h, pixel], lane, sums, None))
        place, step = self.place(line, channel, pixel), self.pixel_step
        if not (isinstance(step, int) and step == 1):
            scatter(value, place, iota(self.lanes) * splat(step, self.lanes, "i64"), mask)
        elif mask is None:
            store(value, place)
        else:
            masked_store(value, place, mask)

    @inline
    def store_row(self, tile: TilePlace, sums: Sequence[Value], masked: bool, below: int = 0) -> None:
        """Consecutive vectors of pixels, `below` the frame's line; with `masked`, the last one ends it."""
        image, d, h = self.line(tile.frame)
        line = image, d, h + below
        for j, total in enumerate(sums):
            at, mask = tile.pixel + j * self.lanes, None
            if masked and j == len(sums) - 1:
                mask = lanes(self.table.size(self.epilogue.space[4]) - at, self.lanes)
            self.store_pixels(tile.channel, at, line, total, mask)


class PlanarEnd(PlanarStore):
    """Lanes are pixels: sums are turned in the stage, whose rows past the tile's pixels are read, but not
    used.
    """

    def finisher(self, vectors: int, masked: bool) -> str:
        """Name of the function that ends a tile in the stage; the frame's `channel_end` is the mask."""
        return _finish_planar.written(f"{self.name}.finish{vectors}", end=self, vectors=vectors)


@native(internal=True, noinline=True)
def _finish_planar(
    args: ptr,
    frame: ptr,
    stage: ptr,
    channel: i64,
    pixel: i64,
    pixels: i64,
    *,
    end: PlanarEnd,
    vectors: int,
) -> None:
    """Turn the sums of a tile in the stage, [pixel][vector][lane], and end them."""
    side, width, type_ = end.lanes, vectors * end.lanes, vector(end.sums, end.lanes)
    turned = alloca(end.sums, width * side)
    channel_end: Count = end.frame.read(builder(), frame, "channel_end")
    count = min(channel_end - channel, width)
    line = end.line(frame)
    for first in loop(0, pixels, side):
        base = pixel + first
        mask = lanes(pixels - first, side)
        for j in range(vectors):
            rows = gep(stage, first * width + j * side, end.sums)
            turn = _turn_square.written(f"rlx_turn_square_{end.sums}_{side}", side=side, element=end.sums)
            call(turn, rows, width, gep(turned, j * side**2, end.sums))
        for c in loop(count):
            read = load(type_, gep(turned, c * side, end.sums))
            sums = select(mask, read, 0)  # lanes without a pixel: garbage may be slow to multiply
            end.store_pixels(channel + c, base, line, sums, mask)


@native(internal=True, noinline=True)
def _turn_square(rows: noalias, step: i64, target: noalias, *, side: int, element: str) -> None:
    """target[c][r] = rows[r * step + c] for a square of lanes.

    The kernels of a module share it: in registers it is long.
    """
    places = [gep(rows, step * r, element) for r in range(side)]
    for c, column in enumerate(transpose([load(vector(element, side), place) for place in places])):
        store(column, gep(target, c * side, element))
