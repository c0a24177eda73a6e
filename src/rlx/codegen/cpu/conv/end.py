"""The end of a convolution tile: epilogue and store, into a blocked image (lanes are channels, straight from
registers) or a planar one (turned through the stack, lanes are pixels)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field, replace
from functools import cached_property
from typing import TypeAlias

from rlx.codegen.cpu.conv.shape import Image, static
from rlx.codegen.cpu.conv.tile import TilePlace
from rlx.codegen.cpu.expression import Expression, Lane
from rlx.codegen.cpu.frame import ArgumentTable, unflatten
from rlx.codegen.cpu.primitives import memory_type, to_memory
from rlx.codegen.cpu.product.gemm_end import Frame
from rlx.codegen.cpu.rows.collapse import accesses, flatten_loads
from rlx.codegen.native.irtext import Function, Int, Module, Value, constant, vector
from rlx.ir.dim import Dim, known_eq
from rlx.ir.types import Shape
from rlx.kernel.nests import Nest, Store
from rlx.kernel.scalar import PRIMITIVES, Scalar, axis, const, rebuild, replace_axes
from rlx.records import dataclass

FINISHER = [
    ("ptr", "args"),
    ("ptr", "frame"),
    ("ptr", "stage"),
    ("i64", "channel"),
    ("i64", "pixel"),
    ("i64", "pixels"),
]
"""Parameters of the function that ends a tile whose sums are in a stage, [pixel][vector][lane]."""


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

    def at(
        self, fn: Function, axes: list[Int], lane: Lane, sums: Value | None, known: Expression | None
    ) -> Expression:
        made = Expression(fn, self.table.dim, self.table.operands(fn), axes, lane)
        if sums is not None:
            made.accs = [sums]
        if known is not None:
            made.memo = dict(known.memo)
        return made

    def value(self, at: Expression) -> Value:
        return to_memory(at.fn, at.vector(self.body), self.table.outputs[0].dtype)


Line: TypeAlias = tuple[Int, Int, Int]  # image, d, h


@dataclass(frozen=True)
class ConvEnd:
    """What both ends share. The frame holds the indices `image`, and of the line `d` and `h`, unless `flat`:
    then the pixels of all lines are one run.
    """

    module: Module
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

    def line(self, fn: Function, frame: Value) -> Line:
        """(image, d, h) of the frame. A loop reads them once, before it stores anything."""
        image = self.frame.read(fn, frame, "image")
        if self.flat:
            return image, 0, 0
        return image, self.frame.read(fn, frame, "d"), self.frame.read(fn, frame, "h")

    def pixel_step(self, fn: Function) -> Int:
        return self.table.dim(fn, self.out.axes[2])

    def place(self, fn: Function, line: Line, block: Int, pixel: Int) -> Value:
        """Address of a pixel of a block of channels."""
        image, d, h = line
        offset: Int = 0
        for index, step in zip(
            (image, block, d, h), (self.out.batch, self.out.block, *self.out.axes), strict=False
        ):
            offset = fn.add(offset, fn.mul(index, self.table.dim(fn, step)))
        offset = fn.add(offset, fn.mul(pixel, self.pixel_step(fn)))
        pointer = self.table.operand(fn, len(self.table.inputs)).pointer
        return fn.gep(pointer, offset, self.element)


class BlockedEnd(ConvEnd):
    """Lanes are channels. A tile ends straight from registers, or from a stage that holds its sums."""

    def finish(self, place: TilePlace, sums: list[Value], pixels: int, masked: bool) -> None:
        vectors = len(sums) // pixels
        results: list[tuple[Value, Value]] = []
        for j in range(vectors):
            end = self._vector(place, j, masked and j == vectors - 1)
            results += [end(p, sums[p * vectors + j]) for p in range(pixels)]
        for value, there in results:
            place.fn.store(value, there)

    def finisher(self, vectors: int, masked: bool) -> str:
        """Name of the function that ends a tile of any number of pixels in the stage."""
        name = f"{self.name}.finish{vectors}" + ("m" if masked else "")
        if self.module.defines(name):
            return name
        fn = self.module.function(name, FINISHER, internal=True, noinline=True)
        _, frame, stage, channel, pixel, pixels = fn.args
        place = TilePlace(fn, frame, channel, pixel)
        ends = [self._vector(place, j, masked and j == vectors - 1) for j in range(vectors)]
        type_ = vector(self.sums, self.lanes)

        def one(p: Int, _: list[Value]) -> None:
            for j, end in enumerate(ends):
                at = fn.mul(fn.add(fn.mul(p, vectors), j), self.lanes)
                value, there = end(p, fn.load(type_, fn.gep(stage, at, self.sums)))
                fn.store(value, there)

        fn.loop(0, pixels, 1, [], one)
        return name

    def _vector(self, tile: TilePlace, j: int, masked: bool) -> Callable[[Int, Value], tuple[Value, Value]]:
        """What ends vector j of a pixel: (pixel of the tile, sums) -> what to store, and where."""
        fn, frame, channel, pixel = tile.fn, tile.frame, tile.channel, tile.pixel
        image, d, h = line = self.line(fn, frame)
        block = fn.add(fn.udiv(channel, self.lanes), j)
        mask = None
        if masked:
            mask = fn.lanes(fn.sub(self.channels, fn.mul(block, self.lanes)), self.lanes)
        lane = Lane(2, 0, self.lanes, mask)
        common = self.epilogue.at(fn, [image, block, 0, d, h, pixel], lane, None, None)
        for e in self.epilogue.fixed:
            common(e)
        start = self.place(fn, line, block, pixel)

        def end(p: Int, sums: Value) -> tuple[Value, Value]:
            place = [d, h, fn.add(pixel, p)]
            if self.flat and not self.epilogue.sees_one_axis:
                sizes = [self.table.dim(fn, s) for s in self.epilogue.space[3:]]
                place = unflatten(fn, fn.add(pixel, p), sizes)
            value = self.epilogue.value(self.epilogue.at(fn, [image, block, 0, *place], lane, sums, common))
            if mask is not None:
                value = fn.select(mask, value, constant(value.type, 0))
            return value, fn.gep(start, fn.mul(p, self.lanes), self.element)

        return end


class PlanarStore(ConvEnd):
    """Lanes are pixels of one line of one channel."""

    def store_pixels(self, tile: TilePlace, line: Line, sums: Value, mask: Value | None) -> None:
        """The epilogue of one vector of pixels of a line, and its store."""
        fn, channel, pixel = tile.fn, tile.channel, tile.pixel
        image, d, h = line
        lane = Lane(4, pixel, self.lanes, mask)
        value = self.epilogue.value(self.epilogue.at(fn, [image, channel, d, h, pixel], lane, sums, None))
        place, step = self.place(fn, line, channel, pixel), self.pixel_step(fn)
        if not (isinstance(step, int) and step == 1):
            index = fn.mul(fn.iota(self.lanes), fn.splat(step, self.lanes, "i64"))
            fn.scatter(value, place, fn.value(index), mask)
        elif mask is None:
            fn.store(value, place)
        else:
            fn.masked_store(value, place, mask)

    def store_row(self, tile: TilePlace, sums: list[Value], masked: bool, below: int = 0) -> None:
        """Consecutive vectors of pixels, `below` the frame's line; with `masked`, the last one ends it."""
        fn = tile.fn
        image, d, h = self.line(fn, tile.frame)
        line = image, d, fn.add(h, below)
        for j, total in enumerate(sums):
            at, mask = fn.add(tile.pixel, j * self.lanes), None
            if masked and j == len(sums) - 1:
                mask = fn.lanes(fn.sub(self.table.dim(fn, self.epilogue.space[4]), at), self.lanes)
            self.store_pixels(replace(tile, pixel=at), line, total, mask)


class PlanarEnd(PlanarStore):
    """Lanes are pixels: sums are turned in the stage, whose rows past the tile's pixels are read, but not
    used.
    """

    def finisher(self, vectors: int, masked: bool) -> str:
        """Name of the function that ends a tile in the stage; the frame's `channel_end` is the mask."""
        name = f"{self.name}.finish{vectors}"
        if self.module.defines(name):
            return name
        fn = self.module.function(name, FINISHER, internal=True, noinline=True)
        _, frame, stage, channel, pixel, pixels = fn.args
        lanes, width, type_ = self.lanes, vectors * self.lanes, vector(self.sums, self.lanes)
        turned = fn.alloca(self.sums, width * lanes)
        count = fn.smin(fn.sub(self.frame.read(fn, frame, "channel_end"), channel), width)
        line = self.line(fn, frame)

        def block(first: Int, _: list[Value]) -> None:
            base = fn.add(pixel, first)
            mask = fn.lanes(fn.sub(pixels, first), lanes)
            for j in range(vectors):
                rows = fn.gep(stage, fn.add(fn.mul(first, width), j * lanes), self.sums)
                fn.call(
                    turn_square(self.module, lanes, self.sums),
                    [rows, width, fn.gep(turned, j * lanes**2, self.sums)],
                )

            def pixels_of(c: Int, _: list[Value]) -> None:
                read = fn.load(type_, fn.gep(turned, fn.mul(c, lanes), self.sums))
                sums = fn.select(mask, read, constant(type_, 0))  # a product of what is no pixel may be slow
                self.store_pixels(TilePlace(fn, frame, fn.add(channel, c), base), line, sums, mask)

            fn.loop(0, count, 1, [], pixels_of)

        fn.loop(0, pixels, lanes, [], block)
        return name


def turn_square(module: Module, lanes: int, element: str) -> str:
    """Name of the function turn(rows, step, target): target[c][r] = rows[r * step + c] for a square of lanes.

    The kernels of a module share it: in registers it is long.
    """
    name = f"rlx_turn_square_{element}_{lanes}"
    if not module.defines(name):
        params = [("ptr noalias", "rows"), ("i64", "step"), ("ptr noalias", "target")]
        fn = module.function(name, params, internal=True, noinline=True)
        rows, step, target = fn.args
        places = [fn.gep(rows, fn.mul(step, r), element) for r in range(lanes)]
        for c, one in enumerate(fn.transpose([fn.load(vector(element, lanes), p) for p in places])):
            fn.store(one, fn.gep(target, c * lanes, element))
    return name
