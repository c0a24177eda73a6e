"""Tensors in the layouts that kernels read: `store_as` moves elements there, `read_as` says what they mean.

The layout is an attribute of both. What it may be is said in `rlx.kernel.layout`, which layouts kernels read
in `rlx.kernel.panels`. Tensors that share a storage of bytes are stored one after the other, each into what
the one before gave.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from rlx.errors import DTypeError, ShapeError
from rlx.ir.assume import require_shape
from rlx.ir.attr import Attr
from rlx.ir.dim import Dim
from rlx.ir.dtype import U8
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Op, Sample, declare
from rlx.ir.types import Shape, TensorType
from rlx.kernel.form import Form, Map, Template
from rlx.kernel.layout import Layout
from rlx.kernel.layout import layout as layout_kind
from rlx.kernel.panels import ChannelBlocks, KernelPanels, Panels, QuantLayout
from rlx.kernel.scalar import Scalar, axes, const, load, load_or
from rlx.ops.rules import lift_all


class Packing(Op):
    """A weight in another order: leading axes are a batch as they are, and nothing is computed in a run."""

    arity: ClassVar[int | None] = 1
    storage = True

    def batch(self, flags: Sequence[bool], x: Node, **layout: object) -> Node:
        made: Node = self(x, **layout)
        return made

    def cost(self, *types: TensorType, **layout: object) -> Dim:
        return 0


class _Stored(Packing):
    attrs = {"layout": Attr(layout_kind)}

    def fitting(self, x: TensorType, sizes: Sequence[int | None], layout: Layout) -> Shape:
        """The shape of x, whose last sizes are proved or assumed to be those of the layout."""
        what = f"{self.name}: {x} has not the sizes of the layout {layout}"
        if x.rank < len(sizes):
            raise ShapeError(what)
        lead, own = x.shape[: x.rank - len(sizes)], x.shape[x.rank - len(sizes) :]
        wanted = [d if n is None else n for d, n in zip(own, sizes, strict=True)]
        require_shape(own, wanted, what)
        return (*lead, *wanted)


@declare
class store_as(_Stored):
    """A tensor as a layout says; axes in front of those of the layout are kept, padding is zero.

    A second operand is a storage of bytes, which keeps what other layouts put there.
    """

    name = "store_as"
    arity = None
    lossless = True
    writer_side = True

    def infer(self, x: TensorType, *into: TensorType, layout: Layout) -> TensorType:
        made = layout.stored_shape(self.fitting(x, layout.sizes, layout))
        assert made is not None
        if layout.packed is None:
            if into:
                raise ShapeError(f"{self.name}: the layout {layout} has no room for other tensors")
            return x.with_shape(made)
        if x.dtype is not layout.packed.dtype or len(into) > 1:
            raise DTypeError(f"{self.name}: {x} has not the elements of the layout {layout}")
        for t in into:
            if t.dtype is not U8 or t.rank != len(made):
                raise DTypeError(f"{self.name}: {t} does not hold the bytes of the layout {layout}")
            require_shape(t.shape, made, f"{self.name}: {t} does not hold the bytes of the layout {layout}")
        return TensorType(U8, made)

    def ref(self, x: np.ndarray, *into: np.ndarray, layout: Layout) -> np.ndarray:
        return layout.pack(x, *into)

    def store_in(self, place: np.ndarray, x: np.ndarray, *, layout: Layout) -> None:
        layout.pack_in(place, x)

    def store_step(self, axis: int, *, layout: Layout) -> int | None:
        """Of what parts along an axis must be multiples for `store_part`; None where it takes none."""
        return layout.slab_step(axis)

    def store_part(self, place: np.ndarray, x: np.ndarray, axis: int, first: int, *, layout: Layout) -> None:
        """Store a part of the operand, elements from `first` on along an axis."""
        layout.pack_slab(place, x, axis, first)

    def batch(self, flags: Sequence[bool], *operands: Node, **layout: object) -> Node:
        made: Node = self(*lift_all(flags, operands), **layout)
        return made

    def vjp(self, g: Node, y: Node, x: Node, *, layout: Layout) -> list[Node]:
        return [read_as(g, layout=layout)]

    def lower(self, x: TensorType, *into: TensorType, layout: Layout) -> Form:
        if layout.packed is not None:
            return Template(self.name, (("layout", layout),))
        space = self.infer(x, layout=layout).shape
        at = axes(len(space))
        lead, stored = at[: x.rank - len(layout.shape)], at[x.rank - len(layout.shape) :]
        offset: Scalar = const(0)
        for i, n in zip(stored, layout.stored, strict=True):
            offset = offset if n is None else offset * n + i

        def read(index: list[Scalar], exists: Scalar) -> Scalar:
            kept = (i for i, n in zip(stored, layout.stored, strict=True) if n is None)
            found = iter(index)
            whole = [next(kept) if n is None else next(found) for n in layout.sizes]
            return load_or(0, [*lead, *whole], exists, const(0, x.dtype))

        return Map(space, layout.element(offset, read))

    def samples(self) -> list[Sample]:
        plain = [_sample(shape, layout, smooth) for shape, layout, smooth in _LAYOUTS]
        codes, scales = _CODES.layouts
        bytes_, factors = Arg("i8[2,9,3]", -8, 7), Arg("f32[2,3]")
        stored = Arg(f"u8[{_CODES.nbytes}]", 0, 255)
        return [
            *plain,
            Sample((bytes_,), {"layout": codes}, grad=False),
            Sample((Arg("i8[18,3]", -32, 31),), {"layout": _SIX_BITS.codes}, grad=False),
            Sample((factors, stored), {"layout": scales}, grad=False),
        ]


@declare
class read_as(_Stored):
    """The tensor that is stored as a layout says; a kernel reads the storage directly."""

    name = "read_as"
    reader_side = True

    def infer(self, x: TensorType, *, layout: Layout) -> TensorType:
        made = layout.read_shape(self.fitting(x, layout.stored, layout))
        assert made is not None
        if layout.packed is None:
            return x.with_shape(made)
        if x.dtype is not U8:
            raise DTypeError(f"{self.name}: {x} does not hold the bytes of the layout {layout}")
        return TensorType(layout.packed.dtype, made)

    def ref(self, x: np.ndarray, *, layout: Layout) -> np.ndarray:
        return layout.unpack(x)

    def vjp(self, g: Node, y: Node, x: Node, *, layout: Layout) -> list[Node]:
        return [store_as(g, layout=layout)]

    def lower(self, x: TensorType, *, layout: Layout) -> Form:
        if layout.packed is not None:
            return Template(self.name, (("layout", layout),))
        space = self.infer(x, layout=layout).shape
        if not layout.boxes:
            return Map(space, const(0, x.dtype))
        at = axes(len(space))
        lead, own = at[: x.rank - len(layout.stored)], at[x.rank - len(layout.stored) :]
        known = [i for i, n in zip(own, layout.sizes, strict=True) if n is not None]
        kept = (i for i, n in zip(own, layout.sizes, strict=True) if n is None)
        offset = layout.offset(known)
        index, step = [], layout.elements
        for n in layout.stored:
            if n is None:
                index.append(next(kept))
            else:
                step //= n
                index.append(offset // step)
                offset = offset % step
        return Map(space, load(0, [*lead, *index], x.dtype))

    def samples(self) -> list[Sample]:
        out = []
        for shape, layout, smooth in _LAYOUTS:
            stored = layout.stored_shape(shape)
            assert stored is not None
            out.append(_sample(stored, layout, smooth))
        for layout in _CODES.layouts:
            out.append(Sample((Arg(f"u8[2,{_CODES.nbytes}]", 0, 63),), {"layout": layout}, grad=False))
        six = Arg(f"u8[{_SIX_BITS.nbytes}]", 0, 255)
        return [*out, Sample((six,), {"layout": _SIX_BITS.codes}, grad=False)]


_CODES = QuantLayout(9, 3, bits=4, group=8, lanes=4)
_SIX_BITS = QuantLayout(18, 3, bits=6, group=16, lanes=4)


def _sample(shape: Sequence[Any], layout: Layout, smooth: bool) -> Sample:
    return Sample((Arg(f"f32[{','.join(map(str, shape))}]"),), {"layout": layout}, grad=smooth)


_LAYOUTS: list[tuple[tuple[Any, ...], Layout, bool]] = [  # shape, layout, whether its gradient is tested
    ((3, 10), Panels(3, 10, 4, 2, 1).layout, True),
    ((2, 5, 8), Panels(5, 8, 4, 4, 2).layout, True),
    ((3, 2), Panels(3, 2, 4, 2, 1).layout, True),
    ((0, 4), Panels(0, 4, 4, 2, 1).layout, False),
    (("n", 3, 5), Panels(3, 5, 4, 1, 1).layout, False),
    ((4, 3, 3), KernelPanels((4, 3, 3), 1, 4, 2, 1).layout, True),
    ((6, 2, 3, 2), KernelPanels((6, 2, 3, 2), 2, 4, 4, 2).layout, True),
    ((10, 5, 2), KernelPanels((10, 5, 2), 1, 4, 2, 2).layout, True),
    ((3, 1, 2, 1, 2), KernelPanels((3, 1, 2, 1, 2), 3, 2, 2, 1).layout, True),
    ((2, 3, 1), KernelPanels((2, 3, 1), 1, 4, 2, 4).layout, True),
    ((5, 7, 2), KernelPanels((5, 7, 2), 1, 4, 2, 4, 2).layout, True),
    ((4, 3, 2, 1), KernelPanels((4, 3, 2, 1), 1, 2, 2, 4, 4).layout, True),
    ((6, 8, 1), KernelPanels((6, 8, 1), 3, 4, 2, 8, 4).layout, True),
    ((2, 8, 3), ChannelBlocks(3, 8, 4).layout, True),
    ((1, 5, 2, 3), ChannelBlocks(4, 5, 4).layout, True),
    ((0, 3, 2), ChannelBlocks(3, 3, 2).layout, False),
    (("n", 3, "m"), ChannelBlocks(3, 3, 2).layout, False),
]


def to_blocks(image: Any, lanes: int) -> Any:
    """An image [N, C, axes] as [N, C / lanes, axes, lanes], zeros after the last channel.

    >>> to_blocks(np.ones((1, 5, 2)), 4).shape
    (1, 2, 2, 4)
    """
    return store_as(image, layout=ChannelBlocks(len(image.shape), int(image.shape[1]), lanes).layout)


def from_blocks(blocks: Any, channels: int) -> Any:
    """The image [N, channels, axes] that blocks [N, channels / lanes, axes, lanes] hold.

    >>> from_blocks(to_blocks(np.ones((1, 5, 2)), 4), 5).shape
    (1, 5, 2)
    """
    lanes = int(blocks.shape[-1])
    return read_as(blocks, layout=ChannelBlocks(len(blocks.shape) - 1, channels, lanes).layout)
