"""The register tile of a convolution: pixels in rows, output channels in lanes, summed over blocks of input
channels and the window by the micro-kernel of all contractions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rlx.codegen.cpu.conv.shape import Geometry
from rlx.codegen.cpu.product.gemm_end import Frame
from rlx.codegen.cpu.product.microkernel import Kind, Places, accumulate
from rlx.codegen.native.irtext import Function, Int, Module, Value
from rlx.records import dataclass

TILE = [
    ("ptr", "args"),
    ("ptr", "frame"),
    ("ptr noalias", "x"),
    ("ptr noalias", "w"),
    ("i64", "channel"),
    ("i64", "pixel"),
]
"""Parameters of the function that sums a tile and ends it."""


@dataclass(frozen=True)
class TilePlace:
    """Where the results of a tile go: the place of the first one, in the function that ends the tile."""

    fn: Function
    frame: Value
    channel: Int
    pixel: Int


class TileEnd(Protocol):
    """What becomes of the finished sums of a tile (pixels x vectors, in that order) that are in registers."""

    def finish(self, place: TilePlace, sums: list[Value], pixels: int, masked: bool) -> None: ...


@dataclass(frozen=True)
class ConvTile:
    """Writes the functions of register tiles.

    `x` is the element that the first pixel's window starts with, `w` the panel. x_block, x_d and x_h are the
    elements of x from one block, plane or line of a window to the next.
    """

    module: Module
    name: str
    kind: Kind
    shape: Geometry
    block: int  # channels in a block of x, which are adjacent
    pixel_step: int  # elements from the window of one pixel to that of the next
    frame: Frame

    @property
    def tail(self) -> int:
        """Channels of a last block that is not full, in whole groups; weights of the rest are 0."""
        group = self.kind.group
        return -(-(self.shape.per_in % self.block) // group) * group

    def summing(self, pixels: int, vectors: int) -> str:
        """Name of the function that leaves the sums of a tile in `stage`, where another one ends them.

        All kernels of a module with equal windows share it.
        """
        shape = self.shape
        taps = "x".join(map(str, shape.window))
        name = f"sums.{self.kind.element}.{pixels}x{vectors}.{taps}.{shape.dilations[2]}"
        name += f".{self.block}.{self.pixel_step}.{self.tail}"
        if self.module.defines(name):
            return name
        pointers = [("ptr noalias", "x"), ("ptr noalias", "w"), ("ptr noalias", "stage")]
        words = [("i64", word) for word in ("blocks", "x_block", "x_d", "x_h")]
        fn = self.module.function(name, [*pointers, *words], internal=True, noinline=True)
        x, w, stage, blocks, *steps = fn.args
        for n, total in enumerate(self._sums(fn, x, w, pixels, vectors, blocks, steps)):
            fn.store(total, fn.gep(stage, n * self.kind.lanes, self.kind.accumulator))
        return name

    def steps(self, fn: Function, frame: Value) -> list[Int]:
        """Whole blocks of x and the steps through it, as `summing` takes them; the frame has the steps."""
        named = (self.frame.read(fn, frame, f) for f in ("x_block", "x_d", "x_h"))
        return [self.shape.per_in // self.block, *named]

    def function(self, pixels: int, vectors: int, masked: bool, end: TileEnd) -> str:
        """Name of the function tile(args, frame, x, w, channel, pixel), which sums and ends a tile.

        With `masked`, its last vector holds channels that do not exist.
        """
        name = f"{self.name}.{pixels}x{vectors}" + ("m" if masked else "")
        if self.module.defines(name):
            return name
        fn = self.module.function(name, TILE, internal=True, noinline=True)
        _, frame, x, w, channel, pixel = fn.args
        blocks, *steps = self.steps(fn, frame)
        sums = self._sums(fn, x, w, pixels, vectors, blocks, steps)
        end.finish(TilePlace(fn, frame, channel, pixel), sums, pixels, masked)
        return name

    def _sums(
        self, fn: Function, x: Value, w: Value, pixels: int, vectors: int, blocks: Int, steps: Sequence[Int]
    ) -> list[Value]:
        shape = self.shape
        taps_d, taps_h, taps_w = shape.window
        x_block, x_d, x_h = steps
        kind, element, tail = self.kind, self.kind.element, self.tail
        width = vectors * kind.lanes

        def line(x: Value, w: Value, sums: list[Value], channels: int) -> list[Value]:
            """All products of one line of the window."""

            def part(x: Value, w: Value, sums: list[Value], depth: int) -> list[Value]:
                starts = [j * kind.lanes * kind.group for j in range(vectors)]
                rows = Places.of(fn, x, [p * self.pixel_step for p in range(pixels)], kind.group, element)
                columns = Places.of(fn, w, starts, width * kind.group, element)
                return accumulate(fn, kind, rows, columns, depth, sums)

            if taps_w == 1 or (channels == self.block and shape.dilations[2] == 1):
                return part(x, w, sums, taps_w * channels)

            def tap(k: Int, sums: list[Value]) -> list[Value]:
                there = fn.gep(x, fn.mul(k, shape.dilations[2] * self.block), element)
                return part(there, fn.gep(w, fn.mul(k, channels * width), element), sums, channels)

            return fn.loop(0, taps_w, 1, sums, tap)

        def window(x: Value, w: Value, sums: list[Value], channels: int) -> list[Value]:
            per_line = taps_w * channels * width

            def plane(d: Int, sums: list[Value]) -> list[Value]:
                x_plane = fn.gep(x, fn.mul(d, x_d), element)
                w_plane = fn.gep(w, fn.mul(d, taps_h * per_line), element)

                def lines(h: Int, sums: list[Value]) -> list[Value]:
                    x_line = fn.gep(x_plane, fn.mul(h, x_h), element)
                    return line(x_line, fn.gep(w_plane, fn.mul(h, per_line), element), sums, channels)

                return fn.loop(0, taps_h, 1, sums, lines)

            return fn.loop(0, taps_d, 1, sums, plane)

        per_block = taps_d * taps_h * taps_w * self.block * width

        def block(b: Int, sums: list[Value]) -> list[Value]:
            there = fn.gep(x, fn.mul(b, x_block), element)
            return window(there, fn.gep(w, fn.mul(b, per_block), element), sums, self.block)

        sums = fn.loop(0, blocks, 1, [kind.zero] * (pixels * vectors), block)
        if tail:
            there = fn.gep(x, fn.mul(blocks, x_block), element)
            sums = window(there, fn.gep(w, fn.mul(blocks, per_block), element), sums, tail)
        return sums
