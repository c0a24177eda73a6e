"""The register tile of a convolution: pixels in rows, output channels in lanes, summed over blocks of input
channels and the window by the micro-kernel of all contractions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rlx.codegen.cpu.conv.shape import Geometry
from rlx.codegen.cpu.conv.skip import Taps
from rlx.codegen.cpu.product.gemm_cut import Count
from rlx.codegen.cpu.product.gemm_end import Frame
from rlx.codegen.cpu.product.gemm_tile import LINE
from rlx.codegen.cpu.product.microkernel import Kind, Places, add_steps, with_excess, without_excess
from rlx.codegen.native.irtext import Value, vector
from rlx.codegen.native.irtypes import size_bytes
from rlx.codegen.native.notation import inline, native
from rlx.codegen.native.words import builder, byte_at, gep, i64, load, loop, noalias, prefetch, ptr, store
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
class Part:
    """Some taps of a window, and the vectors with which the sums of every pixel start."""

    taps: Taps
    start: list[Value]

    @staticmethod
    def of(tile: ConvTile, taps: Taps, start: ptr, vectors: int) -> Part:
        kind = tile.kind
        places = [gep(start, n * kind.lanes, kind.accumulator) for n in range(vectors)]
        return Part(taps, [load(vector(kind.accumulator, kind.lanes), place) for place in places])


@dataclass(frozen=True)
class ConvTile:
    """Writes the functions of register tiles.

    `x` is the element that the first pixel's window starts with, `w` the panel. x_block, x_d and x_h are the
    elements of x from one block, plane or line of a window to the next. Every step prefetches the line that
    is `ahead` bytes after its weights. A tile that `skips` also takes which planes and lines of its window
    are summed (`skip.Taps`), and with what the sums of a pixel start.
    """

    name: str
    kind: Kind
    shape: Geometry
    block: int  # channels in a block of x, which are adjacent
    pixel_step: int  # elements from the window of one pixel to that of the next
    frame: Frame
    skips: bool = False

    @property
    def tail(self) -> int:
        """Channels of a last block that is not full, in whole groups; weights of the rest are 0."""
        group = self.kind.group
        return -(-(self.shape.per_in % self.block) // group) * group

    def step_lines(self, vectors: int) -> int:
        """Cache lines of a panel that a step reads; 1 if it is less."""
        step = vectors * self.kind.lanes * self.kind.group * size_bytes(self.kind.element)
        return max(step // LINE, 1)

    def summing(self, pixels: int, vectors: int) -> str:
        """Name of the function that leaves the sums of a tile in `stage`, where another one ends them.

        All kernels of a module with equal windows share it.
        """
        shape = self.shape
        taps = "x".join(map(str, shape.window))
        name = f"sums.{self.kind.element}.{pixels}x{vectors}.{taps}.{shape.dilations[2]}"
        name += f".{self.block}.{self.pixel_step}.{self.tail}"
        if self.skips:
            return _sum_part_of_tile.written(name + ".part", tile=self, pixels=pixels, vectors=vectors)
        return _sum_tile.written(name, tile=self, pixels=pixels, vectors=vectors)

    def steps(self, frame: Value) -> list[Count]:
        """Whole blocks of x and the steps through it, as `summing` takes them; the frame has the steps."""
        return [self.shape.per_in // self.block, *self.frame.named(frame, "x_block", "x_d", "x_h")]

    def padding_sums(self, vectors: int) -> str:
        """Name of the function that stores what taps outside of some planes and lines add where x is 0."""
        taps = "x".join(map(str, self.shape.window))
        name = f"padding.{self.kind.element}.{vectors}.{taps}.{self.block}.{self.tail}"
        return _sum_padding.written(name, tile=self, vectors=vectors)

    @inline
    def part(self, frame: ptr, vectors: int) -> Part:
        """What a tile that skips taps sums, from the frame."""
        first_d, last_d, first_h, last_h = self.frame.named(frame, *Taps.NAMES)
        taps = Taps((first_d, last_d), (first_h, last_h))
        return Part.of(self, taps, self.frame.place(frame, "start"), vectors)

    def function(self, pixels: int, vectors: int, masked: bool, end: TileEnd) -> str:
        """Name of the function tile(args, frame, x, w, ahead, channel, pixel), which sums and ends a tile.

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
        self,
        x: ptr,
        w: ptr,
        ahead: Count,
        pixels: int,
        vectors: int,
        blocks: Count,
        steps: Sequence[Count],
        part: Part | None = None,
    ) -> list[Value]:
        """The sums of `pixels` by `vectors` over all channels and the window, or part of it."""
        f, shape, kind, element = builder(), self.shape, self.kind, self.kind.element
        taps_d, taps_h, taps_w = shape.window
        within = Taps((0, taps_d), (0, taps_h)) if part is None else part.taps
        x_block, x_d, x_h = steps
        width = vectors * kind.lanes

        def add_products(x: ptr, w: ptr, sums: list[Value], depth: int) -> list[Value]:
            rows, columns = self.rows(x, pixels), self.columns(w, vectors)

            def ask_ahead(k: Count) -> None:
                prefetch(byte_at(gep(w, k * (width * kind.group), element), ahead), locality=2)

            meanwhile = None if f.module.target.web else ask_ahead  # engines do not prefetch
            return add_steps(f, kind, rows, columns, depth, sums, meanwhile=meanwhile)

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
            for d in loop(*within.planes):
                x_plane = gep(x, d * x_d, element)
                w_plane = gep(w, d * (taps_h * per_line), element)
                for h in loop(*within.lines):
                    x_line = gep(x_plane, h * x_h, element)
                    sums = add_line(x_line, gep(w_plane, h * per_line, element), sums, channels)
            return sums

        per_block = taps_d * taps_h * taps_w * self.block * width
        start = ([kind.zero] * vectors if part is None else part.start) * pixels
        sums = with_excess(kind, start, vectors)
        for b in loop(blocks):
            there = gep(x, b * x_block, element)
            sums = add_window(there, gep(w, b * per_block, element), sums, self.block)
        if self.tail:
            there = gep(x, blocks * x_block, element)
            sums = add_window(there, gep(w, blocks * per_block, element), sums, self.tail)
        return without_excess(kind, sums, vectors)


@native(internal=True, noinline=True)
def _sum_tile(
    x: noalias,
    w: noalias,
    ahead: i64,
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
    for n, total in enumerate(tile.sums(x, w, ahead, pixels, vectors, blocks, (x_block, x_d, x_h))):
        store(total, gep(stage, n * tile.kind.lanes, tile.kind.accumulator))


@native(internal=True, noinline=True)
def _sum_part_of_tile(
    x: noalias,
    w: noalias,
    ahead: i64,
    stage: noalias,
    blocks: i64,
    x_block: i64,
    x_d: i64,
    x_h: i64,
    first_d: i64,
    last_d: i64,
    first_h: i64,
    last_h: i64,
    start: noalias,
    *,
    tile: ConvTile,
    pixels: int,
    vectors: int,
) -> None:
    """Leave the sums of a tile in `stage`, over some planes and lines of its window."""
    part = Part.of(tile, Taps((first_d, last_d), (first_h, last_h)), start, vectors)
    for n, total in enumerate(tile.sums(x, w, ahead, pixels, vectors, blocks, (x_block, x_d, x_h), part)):
        store(total, gep(stage, n * tile.kind.lanes, tile.kind.accumulator))


@native(internal=True, noinline=True)
def _sum_padding(
    w: noalias,
    to: noalias,
    blocks: i64,
    first_d: i64,
    last_d: i64,
    first_h: i64,
    last_h: i64,
    *,
    tile: ConvTile,
    vectors: int,
) -> None:
    """Store the sums of products of 0 with weights of the taps outside of some planes and lines."""
    f, kind = builder(), tile.kind
    taps_d, taps_h, taps_w = tile.shape.window
    width = vectors * kind.lanes

    def add_window(w: ptr, sums: list[Value], channels: int) -> list[Value]:
        for d in loop(taps_d):
            for h in loop(taps_h):
                inside = (d >= first_d) & (d < last_d) & (h >= first_h) & (h < last_h)
                if not inside:
                    line = gep(w, (d * taps_h + h) * (taps_w * channels * width), kind.element)
                    for row in loop(taps_w * channels):
                        weights = [kind.read_b(f, p, None) for p in tile.columns(line, vectors).at(f, row)]
                        sums = [
                            kind.multiply_add(f, kind.zero, weight, total)
                            for weight, total in zip(weights, sums, strict=True)
                        ]
        return sums

    per_block = taps_d * taps_h * taps_w * tile.block * width
    sums = [kind.zero] * vectors
    for b in loop(blocks):
        sums = add_window(gep(w, b * per_block, kind.element), sums, tile.block)
    if tile.tail:
        sums = add_window(gep(w, blocks * per_block, kind.element), sums, tile.tail)
    for n, total in enumerate(sums):
        store(total, gep(to, n * kind.lanes, kind.accumulator))


@native(internal=True, noinline=True)
def _run_tile(
    args: ptr,
    frame: ptr,
    x: noalias,
    w: noalias,
    ahead: i64,
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
    part = tile.part(frame, vectors) if tile.skips else None
    sums = tile.sums(x, w, ahead, pixels, vectors, blocks, steps, part)
    end.finish(TilePlace(frame, channel, pixel), sums, pixels, masked)
