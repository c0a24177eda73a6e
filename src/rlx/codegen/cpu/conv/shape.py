"""What convolution kernels know of their operands: a geometry over three axes, and how
images are stored in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.codegen.cpu.frame import Count as Count
from rlx.codegen.cpu.frame import Slot
from rlx.codegen.cpu.product.microkernel import Kind, kind_of
from rlx.ir.dim import Dim
from rlx.ir.types import Shape
from rlx.kernel.nests import ConvNest
from rlx.kernel.panels import KernelPanels, blocks_of, groups_of
from rlx.records import dataclass
from rlx.target.cpu import Target

VECTORS = 2  # registers of output channels in a tile
CHAINS = 8  # sums that keep two multiply-adds of four cycles busy


def static(d: Dim) -> int:
    """A size that is known when the kernel is written."""
    assert isinstance(d, int)
    return d


def as_signed(fill: int) -> int:
    """A byte as the signed number with the same bits."""
    return fill - 256 if fill > 127 else fill


def tile_pixels(target: Target, kind: Kind, vectors: int = VECTORS) -> int:
    """Pixels of a register tile: accumulators, one vector of each weight and one of x fill the registers."""
    spare = vectors + (1 if target.has_fma and kind.adds_at_once else 2)
    spare += target.web  # engines keep a register for themselves
    if kind.has_excess:  # sums of what is added too much, and the factor
        spare += vectors + 1
    return (target.registers - spare) // vectors


def takes_two_tiles(target: Target, kind: Kind, vectors: int) -> bool:
    """Whether a panel that is not full sums two tiles of pixels at a time: one alone has too few sums to hide
    how long an addition takes.
    """
    pixels = tile_pixels(target, kind)
    return pixels * vectors < CHAINS <= 2 * pixels * vectors and 2 * pixels <= tile_pixels(
        target, kind, vectors
    )


def reads_depthwise(nest: ConvNest) -> bool:
    """Whether packed weights are panels across groups of one channel, which a separate kernel reads."""
    if nest.w_layout is None or nest.w_layout[0] != "read_as":
        return False
    return groups_of(dict(nest.w_layout[1])["layout"]) != nest.form.groups


def kernel_panels(nest: ConvNest, inputs: Sequence[Slot], target: Target) -> KernelPanels:
    """The panels in which kernels for `target` read the packed weights of a convolution."""
    lanes, shape = target.lanes("f32"), tuple(static(d) for d in nest.form.w)
    if reads_depthwise(nest):
        return KernelPanels(shape, 1, lanes, lanes, 1)
    blocks = None if nest.x_layout is None else blocks_of(nest.x_layout)
    dtype = inputs[nest.x].dtype if nest.prologue is None else nest.prologue.body.dtype
    block = 1 if blocks is None else blocks.lanes
    group = kind_of(dtype.name, target).group
    return KernelPanels(shape, nest.form.groups, VECTORS * lanes, lanes, block, group)


@dataclass(frozen=True)
class Geometry:
    """A convolution over exactly three axes: those that the form lacks come first and have size 1."""

    images: Dim
    groups: int
    per_in: int
    per_out: int
    size: Shape  # of x
    out: Shape
    window: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    low: Shape  # padding before the first element
    padded: bool  # whether any window may reach outside of x

    @staticmethod
    def of(nest: ConvNest) -> Geometry:
        form = nest.form
        more = 3 - len(form.strides)
        per_out, per_in, *window = (static(d) for d in form.w)
        return Geometry(
            form.x[0],
            form.groups,
            per_in,
            per_out // form.groups,
            (*(1,) * more, *form.x[2:]),
            (*(1,) * more, *form.out[2:]),
            (*(1,) * more, *window),
            (*(1,) * more, *form.strides),
            (*(1,) * more, *form.dilations),
            (*(0,) * more, *(low for low, _ in form.padding)),
            any(p != (0, 0) for p in form.padding),
        )

    @property
    def reach(self) -> tuple[int, ...]:
        """Elements from the first to the last of a window, per axis."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.window, self.dilations, strict=True))

    @property
    def depth(self) -> int:
        """Products of one output."""
        d, h, w = self.window
        return self.per_in * d * h * w

    @property
    def moves_by_one(self) -> bool:
        """One-element windows side by side: pixels in are pixels out."""
        return self.window == self.strides == (1, 1, 1) and not self.padded


@dataclass(frozen=True)
class Image:
    """Strides of an image in elements. Planar: `lanes` is 1 and a block is one channel; blocked: a block is
    `lanes` channels, which are adjacent in each pixel.
    """

    batch: Dim
    block: Dim
    axes: Shape
    lanes: int
    dense: bool  # pixels follow each other without gaps

    @staticmethod
    def planar(steps: Shape, shape: Shape) -> Image:
        """An image [N, C, axes] with these strides."""
        return Image._of(steps, shape, 1)

    @staticmethod
    def blocked(slot: Slot) -> Image:
        """An image [N, C/lanes, axes, lanes]."""
        return Image._of(slot.steps[:-1], slot.shape[:-1], static(slot.shape[-1]))

    @staticmethod
    def _of(steps: Shape, shape: Shape, lanes: int) -> Image:
        batch, block, *axes = steps
        step = axes[-1]
        dense = lanes == 1 or step == lanes
        for stride, extent in zip(reversed(axes), reversed(shape[2:]), strict=True):
            dense = dense and (stride == step or extent == 1)
            step = step * extent
        return Image(batch, block, (*(0,) * (3 - len(axes)), *axes), lanes, dense)
