"""The register tile of a convolution: pixels in rows, output channels in lanes, summed over blocks of input
channels and the window by the micro-kernel of all contractions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rlx.codegen.cpu.conv.shape import Geometry
from rlx.codegen.cpu.product.gemm_cut import Count
from rlx.codegen.cpu.product.gemm_end import Frame
from rlx.codegen.cpu.product.microkernel import Kind, Places, accumulate
from rlx.codegen.native.irtext import Value
from rlx.codegen.native.notation import inline, native
from rlx.codegen.native.words import builder, gep, i64, loop, noalias, ptr, store
from rlx.records import dataclass


@dataclass(frozen=True)
class TilePlace:
    """Where the results of a tile go: the place of the first one, in the function that ends the tile."""

    frame: ptr
    channel: Count
    pixel: Count


class TileEnd(Protocol):
    """What becomes of the finished sums of a tile (pixels x vectors, in that order) that are in registers."""

    def finish(self, place: TilePlace, sums: list[Value], pixels: int, masked: bool) -> None: ...


@dataclass(frozen=True)
class ConvTile:
    """Writes the functions of register tiles.

    `x` is the element that the first pixel's window starts with, `w` the panel. x_block, x_d and x_h are the
    elements of x from one block, plane or line of a window to the next.
    """

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
        return _sum_tile.written(name, tile=self, pixels=pixels, vectors=vectors)

    def steps(self, frame: Value) -> list[Count]:
        """Whole blocks of x and the steps through it, as `summing` takes them; the frame has the steps."""
        named = (self.frame.read(builder(), frame, name) for name in ("x_block", "x_d", "x_h"))
        return [self.shape.per_in // self.block, *named]

    def function(self, pixels: int, vectors: int, masked: bool, end: TileEnd) -> str:
        """Name of the function tile(args, frame, x, w, channel, pixel), which sums and ends a tile.

        With `masked`, its last vector holds channels that do not exist.
        """
        name = f"{self.name}.{pixels}x{vectors}" + ("m" if masked else "")
        return _run_tile.written(name, tile=self, pixels=pixels, vectors=vectors, masked=masked, end=end)

    def rows(self, x: ptr, pixels: int) -> Places:
        """Where the elements of x that pixels start with are."""
        starts = [p * self.pixel_step for p in range(pixels)]
        return Places.of(builder(), x, starts, self.kind.group, self.kind.element)

    def columns(self, w: ptr, vectors: int) -> Places:
        """Where the vectors of a panel of weights are."""
        lanes, group = self.kind.lanes, self.kind.group
        starts = [j * lanes * group for j in range(vectors)]
        return Places.of(builder(), w, starts, vectors * lanes * group, self.kind.element)

    @inline
    def sums(
        self, x: ptr, w: ptr, pixels: int, vectors: int, blocks: Count, steps: Sequence[Count]
    ) -> list[Value]:
        """The sums of `pixels` by `vectors` over all channels and the window."""
        f, shape, kind, element = builder(), self.shape, self.kind, self.kind.element
        taps_d, taps_h, taps_w = shape.window
        x_block, x_d, x_h = steps
        width = vectors * kind.lanes

        def add_products(x: ptr, w: ptr, sums: list[Value], depth: int) -> list[Value]:
            rows, columns = self.rows(x, pixels), self.columns(w, vectors)
            return accumulate(f, kind, rows, columns, depth, sums)

        def add_line(x: ptr, w: ptr, sums: list[Value], channels: int) -> list[Value]:
            """Sums with all products of one line of the window."""
            if taps_w == 1 or (channels == self.block and shape.dilations[2] == 1):
                return add_products(x, w, sums, taps_w * channels)
            for k in loop(taps_w):
                there = gep(x, k * (shape.dilations[2] * self.block), element)
                sums = add_products(there, gep(w, k * (channels * width), element), sums, channels)
            return sums

        def add_window(x: ptr, w: ptr, sums: list[Value], channels: int) -> list[Value]:
            """Sums with all products of the window, with one block of channels."""
            per_line = taps_w * channels * width
            for d in loop(taps_d):
                x_plane = gep(x, d * x_d, element)
                w_plane = gep(w, d * (taps_h * per_line), element)
                for h in loop(taps_h):
                    x_line = gep(x_plane, h * x_h, element)
                    sums = add_line(x_line, gep(w_plane, h * per_line, element), sums, channels)
            return sums

        per_block = taps_d * taps_h * taps_w * self.block * width
        sums = [kind.zero] * (pixels * vectors)
        for b in loop(blocks):
            there = gep(x, b * x_block, element)
            sums = add_window(there, gep(w, b * per_block, element), sums, self.block)
        if self.tail:
            there = gep(x, blocks * x_block, element)
            sums = add_window(there, gep(w, blocks * per_block, element), sums, self.tail)
        return sums


@native(internal=True, noinline=True)
def _sum_tile(
    x: noalias,
    w: noalias,
    stage: noalias,
    blocks: i64,
    x_block: i64,
    x_d: i64,
    x_h: i64,
    *,
    tile: ConvTile,
    pixels: int,
    vectors: int,
) -> None:
    """Leave the sums of a tile in `stage`."""
    for n, total in enumerate(tile.sums(x, w, pixels, vectors, blocks, (x_block, x_d, x_h))):
        store(total, gep(stage, n * tile.kind.lanes, tile.kind.accumulator))


@native(internal=True, noinline=True)
def _run_tile(
    args: ptr,
    frame: ptr,
    x: noalias,
    w: noalias,
    channel: i64,
    pixel: i64,
    *,
    tile: ConvTile,
    pixels: int,
    vectors: int,
    masked: bool,
    end: TileEnd,
) -> None:
    """Sum a tile and end it."""
    blocks, *steps = tile.steps(frame)
    sums = tile.sums(x, w, pixels, vectors, blocks, steps)
    end.finish(TilePlace(frame, channel, pixel), sums, pixels, masked)
