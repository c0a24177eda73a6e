"""Images that a convolution computes as it reads them: its prologue, evaluated where lines are packed.

The packer of lines writes computed pixels where it would copy stored ones, and padding around them. Lanes are
the channels of a block, or the pixels of a planar line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from rlx.codegen.cpu.conv.lines import Line, PixelMover, store_part
from rlx.codegen.cpu.conv.shape import Geometry, Image, reads_depthwise
from rlx.codegen.cpu.expression import Lane
from rlx.codegen.cpu.frame import ArgumentTable, Slot
from rlx.codegen.cpu.primitives import to_memory
from rlx.codegen.cpu.product.gemm_cut import Count
from rlx.codegen.cpu.prologue import Line as PrologueLine
from rlx.codegen.cpu.prologue import flat_source, runs_along
from rlx.codegen.cpu.rows.collapse import accesses
from rlx.codegen.native.irtext import Value
from rlx.codegen.native.notation import inline
from rlx.codegen.native.words import builder, gep, udiv, urem
from rlx.ir.dim import Dim, known_eq
from rlx.ir.dtype import DType
from rlx.kernel.nests import ConvNest, Nest
from rlx.records import dataclass


def no_image_prologue(nest: ConvNest, inputs: Sequence[Slot]) -> str | None:
    """Why this backend does not compute the image of a convolution as it reads it, if so."""
    assert nest.prologue is not None
    if nest.w_layout is None:
        return "a convolution of planes with few channels, or a product of planes, reads them from memory"
    if nest.w_layout[0] == "unpack_winograd":
        return "a Winograd convolution would compute each pixel for all tiles that overlap there"
    if reads_depthwise(nest):
        return "a depthwise convolution reads its image from memory"
    flat = flat_source(nest.prologue.body, nest.prologue.shape, inputs)
    if not runs_along(flat, len(flat.space) - 1, inputs):
        return "a prologue reads elements that lie side by side in its image"
    return None


@dataclass(frozen=True)
class ImageSource:
    """The expression of an image over (image, block, axes, lane), or (image, channel, axes) if planar."""

    table: ArgumentTable
    nest: Nest
    dtype: DType
    blocked: bool

    @staticmethod
    def of(nest: ConvNest, table: ArgumentTable) -> ImageSource:
        assert nest.prologue is not None
        body, shape = nest.prologue.body, nest.prologue.shape
        return ImageSource(table, flat_source(body, shape, table.inputs), body.dtype, nest.x_blocked)

    @property
    def image(self) -> Image:
        """What kernels want to know of an image; this one has no place in memory."""
        lanes = self.nest.space[-1] if self.blocked else 1
        assert isinstance(lanes, int)
        return Image(0, 0, (0, 0, 0), lanes, True)

    @property
    def pixel_axes(self) -> range:
        """The axes of pixels."""
        return range(2, len(self.nest.space) - self.blocked)

    @cached_property
    def sees_one_axis(self) -> bool:
        """Whether all loads take pixels as one run."""
        found, axes = accesses(self.nest), self.pixel_axes
        if any(i in found.other for i in axes):
            return False
        product: Dim = self.nest.space[axes[-1]]
        for i in reversed(axes[:-1]):
            for steps in found.steps:
                if self.nest.space[i] != 1 and known_eq(steps[i], steps[axes[-1]] * product) is not True:
                    return False
            product = product * self.nest.space[i]
        return True

    def point(self, image: Count, block: Count, line: Sequence[Count], pixel: Count) -> list[Count]:
        """Indices of all axes at a pixel of a line (plane, line)."""
        axes: list[Count] = [image, block, *[0] * (len(self.nest.space) - 2)]
        pixels = self.pixel_axes
        for i, index in zip(reversed(pixels[:-1]), reversed(line), strict=False):
            axes[i] = index
        axes[pixels[-1]] = pixel
        return axes


@dataclass(frozen=True, kw_only=True)
class SourceMover(PixelMover):
    """Writes pixels that it computes."""

    source: ImageSource

    @inline
    def move(self, line: Line, first: Count, last: Count) -> None:
        f, source = builder(), self.source
        moving, last_axis = source.pixel_axes[-1], len(source.nest.space) - 1
        body = PrologueLine.of(source.nest, [moving, last_axis])
        image, first_block, block, *place = line.at
        begun = body.begin(f, source.table, source.point(image, first_block + block, place, 0))

        def compute(i: Count, mask: Value | None) -> None:
            """At element i of the line in scratch."""
            pixel = udiv(i, self.pixel) - line.low
            axes = [*begun.axes[:moving], pixel, *begun.axes[moving + 1 :]]
            lane = Lane(last_axis, urem(i, self.pixel) if source.blocked else pixel, self.lanes, mask)
            here = replace(begun, axes=axes, lane=lane, memo=dict(begun.memo))
            value = to_memory(f, here.vector(body.body), source.dtype)
            store_part(value, gep(line.to, i, self.element), mask)

        self.each_vector(first, last, compute)


def as_one_line(shape: Geometry) -> Geometry:
    """A convolution whose windows are single pixels, over all pixels of an image as one line."""
    pixels: Dim = 1
    for extent in shape.size:
        pixels = pixels * extent
    return replace(shape, size=(1, 1, pixels), out=(1, 1, pixels))
