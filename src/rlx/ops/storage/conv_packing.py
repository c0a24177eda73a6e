"""Layouts that convolution kernels read and write: kernels packed in panels, images of blocked channels.

A packed kernel holds, for each group, panels of output channels (see `Panels`) whose rows are the products of
one output in the order a kernel sums them: blocks of input channels, window elements, channels of the block.
With one channel per block that is for a planar image read line by line; with one vector, a blocked image.
Narrow dtypes are multiplied in groups of neighbouring channels; a block that is not full ends with zeros.

A blocked image [N, C/lanes, axes, lanes] keeps the channels of one pixel side by side, zeros past C.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from rlx.errors import ShapeError
from rlx.ir.assume import require_shape
from rlx.ir.attr import Attr, ints, positive
from rlx.ir.dim import Dim, ceildiv
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Op, Sample, declare
from rlx.ir.types import TensorType
from rlx.kernel.form import Form, Map
from rlx.kernel.scalar import Scalar, axes, const, in_range, load, load_or, select
from rlx.ops.array.shape import reshape
from rlx.ops.storage.packing import Packing, Panels
from rlx.records import dataclass


@dataclass(frozen=True)
class KernelLayout:
    """Where the elements of a packed kernel [O, I, window] lie; I counts the channels of one group.

    >>> KernelLayout((4, 3, 5), groups=2, columns=4, lanes=2, block=1).elements
    60
    """

    shape: tuple[int, ...]
    groups: int
    columns: int
    lanes: int
    block: int
    group: int = 1

    @cached_property
    def panels(self) -> Panels:
        """The panels of one group."""
        rows = (self.whole + self.tail) * self.taps
        return Panels(rows, self.shape[0] // self.groups, self.columns, self.lanes, self.group)

    @property
    def whole(self) -> int:
        """Channels in full blocks."""
        return self.shape[1] // self.block * self.block

    @property
    def tail(self) -> int:
        """Channels of the last block if it is not full, in whole groups."""
        return -(-(self.shape[1] - self.whole) // self.group) * self.group

    @property
    def taps(self) -> int:
        return prod(self.shape[2:])

    @property
    def elements(self) -> int:
        return self.groups * self.panels.elements

    def pack(self, w: np.ndarray) -> np.ndarray:
        """[..., O, I, window] -> [..., elements]."""
        lead = w.shape[: w.ndim - len(self.shape)]
        per_out, channels = self.shape[0] // self.groups, self.shape[1]
        flat = np.zeros((prod(lead) * self.groups, per_out, self.whole + self.tail, self.taps), w.dtype)
        flat[:, :, :channels] = w.reshape(-1, per_out, channels, self.taps)
        matrix = np.zeros((flat.shape[0], self.panels.k, per_out), w.dtype)
        for i in range(0, channels, self.block):
            part = flat[:, :, i : i + self.block]
            rows = slice(i * self.taps, (i + part.shape[2]) * self.taps)
            matrix[:, rows] = part.transpose(0, 3, 2, 1).reshape(flat.shape[0], -1, per_out)
        return self.panels.pack(matrix).reshape(*lead, self.elements)

    def unpack(self, packed: np.ndarray) -> np.ndarray:
        """[..., elements] -> [..., O, I, window]."""
        lead = packed.shape[:-1]
        per_out, channels = self.shape[0] // self.groups, self.shape[1]
        matrix = self.panels.unpack(packed.reshape(prod(lead) * self.groups, self.panels.elements))
        padded = self.whole + self.tail
        out = np.zeros((len(matrix), per_out, padded, self.taps), packed.dtype)
        for i in range(0, channels, self.block):
            width = min(self.block, padded - i)
            part = matrix[:, i * self.taps : (i + width) * self.taps]
            out[:, :, i : i + width] = part.reshape(-1, self.taps, width, per_out).transpose(0, 3, 2, 1)
        return out[:, :, :channels].reshape(*lead, *self.shape)

    def row_of(self, channel: Scalar, tap: Scalar) -> Scalar:
        """Row of a panel that holds (channel, window element)."""
        size, whole, tail = self.block * self.taps, self.whole, self.tail
        row = channel // self.block * size + tap * self.block + channel % self.block
        if not tail:
            return row
        last = tap * tail + (channel - whole) + whole * self.taps
        return select(channel < whole, row, last) if whole else last

    def channel_and_tap(self, row: Scalar) -> tuple[Scalar, Scalar]:
        """The inverse of `row_of`."""
        size, whole, tail = self.block * self.taps, self.whole, self.tail
        inside = row % size
        channel, tap = row // size * self.block + inside % self.block, inside // self.block
        if not tail:
            return channel, tap
        rest = row - whole * self.taps
        if not whole:
            return rest % tail, rest // tail
        first = row < whole * self.taps
        return select(first, channel, rest % tail + whole), select(first, tap, rest // tail)


_KERNEL = {
    "shape": Attr(ints),
    **{k: Attr(positive) for k in ("groups", "columns", "lanes", "block")},
    "group": Attr(positive, 1),
}


def _flat_tap(taps: Sequence[Scalar], window: Sequence[int]) -> Scalar:
    out: Scalar = const(0)
    for tap, extent in zip(taps, window, strict=True):
        out = out * extent + tap
    return out


class _KernelPacking(Packing):
    attrs = _KERNEL

    def layouts(self) -> list[KernelLayout]:
        return [
            KernelLayout((4, 3, 3), 1, 4, 2, 1),
            KernelLayout((6, 2, 3, 2), 2, 4, 4, 2),
            KernelLayout((10, 5, 2), 1, 4, 2, 2),
            KernelLayout((3, 1, 2, 1, 2), 3, 2, 2, 1),
            KernelLayout((2, 3, 1), 1, 4, 2, 4),
            KernelLayout((5, 7, 2), 1, 4, 2, 4, 2),
            KernelLayout((4, 3, 2, 1), 1, 2, 2, 4, 4),
            KernelLayout((6, 8, 1), 3, 4, 2, 8, 4),
        ]


@declare
class pack_kernel(_KernelPacking):
    """A convolution kernel [O, I, window] in panels, flat."""

    name = "pack_kernel"

    def infer(self, x: TensorType, **layout: Any) -> TensorType:
        k = KernelLayout(**layout)
        lead = max(x.rank - len(k.shape), 0)
        require_shape(x.shape[lead:], k.shape, f"pack_kernel: {x} is not a kernel {list(k.shape)}")
        return x.with_shape((*x.shape[:lead], k.elements))

    def ref(self, x: np.ndarray, **layout: Any) -> np.ndarray:
        return KernelLayout(**layout).pack(x)

    def vjp(self, g: Node, y: Node, x: Node, **layout: Any) -> list[Node]:
        return [unpack_kernel(g, **layout)]

    def lower(self, x: TensorType, **layout: Any) -> Form:
        k = KernelLayout(**layout)
        p = k.panels
        *lead, at = axes(x.rank - len(k.shape) + 1)
        per_group = max(p.elements, 1)
        group, inside = at // per_group, at % per_group
        cut = p.depth * p.full * p.columns

        def place(offset: Scalar, width: int, first: int) -> Scalar:
            panel, within = offset // max(p.depth * width, 1), offset % max(p.depth * width, 1)
            unit, beside = within // (max(width, 1) * k.group), within % (max(width, 1) * k.group)
            o = panel * width + beside // k.group + first
            channel, tap = k.channel_and_tap(unit * k.group + beside % k.group)
            index: list[Scalar] = []
            for extent in reversed(k.shape[2:]):
                index.insert(0, tap % extent)
                tap = tap // extent
            exists = in_range(o, p.n)
            if k.whole + k.tail != k.shape[1]:
                exists = exists & in_range(channel, k.shape[1])
            return load_or(0, [*lead, group * p.n + o, channel, *index], exists, const(0, x.dtype))

        wide = place(inside, p.columns, 0)
        body = wide if not p.tail else place(inside, p.tail, p.full * p.columns)
        if p.tail and p.full:
            body = select(inside < cut, wide, place(inside - cut, p.tail, p.full * p.columns))
        return Map((*x.shape[: len(lead)], k.elements), body)

    def samples(self) -> list[Sample]:
        return [Sample((Arg(f"f32[{','.join(map(str, k.shape))}]"),), _attrs(k)) for k in self.layouts()]


@declare
class unpack_kernel(_KernelPacking):
    """The kernel [O, I, window] that lies in panels; a convolution reads the panels directly."""

    name = "unpack_kernel"
    reader_side = True

    def infer(self, x: TensorType, **layout: Any) -> TensorType:
        k = KernelLayout(**layout)
        if x.rank < 1:
            raise ShapeError(f"unpack_kernel: {x} does not hold panels")
        require_shape(x.shape[-1:], (k.elements,), f"unpack_kernel: {x} does not hold {k.elements} elements")
        return x.with_shape((*x.shape[:-1], *k.shape))

    def ref(self, x: np.ndarray, **layout: Any) -> np.ndarray:
        return KernelLayout(**layout).unpack(x)

    def vjp(self, g: Node, y: Node, x: Node, **layout: Any) -> list[Node]:
        return [pack_kernel(g, **layout)]

    def lower(self, x: TensorType, **layout: Any) -> Form:
        k = KernelLayout(**layout)
        p = k.panels
        every = axes(x.rank - 1 + len(k.shape))
        lead, (o, channel, *taps) = every[: x.rank - 1], every[x.rank - 1 :]
        row, column = k.row_of(channel, _flat_tap(taps, k.shape[2:])), o % max(p.n, 1)

        def offset(column: Scalar, width: int) -> Scalar:
            inside = row // k.group * (k.group * width) + column % width * k.group + row % k.group
            return column // width * (p.depth * width) + inside

        cut = p.full * p.columns
        at = offset(column, p.columns) if p.full else const(0)
        if p.tail:
            narrow = offset(column - cut, p.tail) + p.depth * cut
            at = select(column < cut, at, narrow) if p.full else narrow
        index = [*lead, o // max(p.n, 1) * p.elements + at]
        return Map((*x.shape[:-1], *k.shape), load(0, index, x.dtype))

    def samples(self) -> list[Sample]:
        return [Sample((Arg(f"f32[{k.elements}]"),), _attrs(k)) for k in self.layouts()]


def _attrs(k: KernelLayout) -> dict[str, Any]:
    return {name: getattr(k, name) for name in _KERNEL}


class _Blocking(Op):
    arity = 1
    storage = True

    def cost(self, x: TensorType, **layout: int) -> Dim:
        return 0

    def batch(self, flags: Sequence[bool], x: Node, **layout: int) -> Node:
        made: Node = self(reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:])), **layout)
        out: Node = reshape(made, (*x.shape[:2], *made.shape[1:]))
        return out


@declare
class block_channels(_Blocking):
    """[N, C, axes] -> [N, C/lanes, axes, lanes]; channels past C are zero."""

    name = "block_channels"
    attrs = {"lanes": Attr(positive)}
    writer_side = True

    def infer(self, x: TensorType, *, lanes: int) -> TensorType:
        if x.rank < 2:
            raise ShapeError(f"block_channels: {x} is not [batch, channels, axes]")
        return x.with_shape((x.shape[0], ceildiv(x.shape[1], lanes), *x.shape[2:], lanes))

    def ref(self, x: np.ndarray, *, lanes: int) -> np.ndarray:
        blocks = -(-x.shape[1] // lanes)
        padded = np.zeros((x.shape[0], blocks * lanes, *x.shape[2:]), x.dtype)
        padded[:, : x.shape[1]] = x
        split = padded.reshape(x.shape[0], blocks, lanes, *x.shape[2:])
        return np.ascontiguousarray(np.moveaxis(split, 2, -1))

    def vjp(self, g: Node, y: Node, x: Node, *, lanes: int) -> list[Node]:
        return [unblock_channels(g, channels=x.shape[1])]

    def lower(self, x: TensorType, *, lanes: int) -> Form:
        n, block, *place, lane = axes(x.rank + 1)
        channel = block * lanes + lane
        whole = isinstance(x.shape[1], int) and x.shape[1] % lanes == 0
        index = [n, channel, *place]
        body = load(0, index, x.dtype) if whole else _padded(x, index, channel)
        return Map(self.infer(x, lanes=lanes).shape, body)

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg("f32[2,8,3]"),), {"lanes": 4}),
            Sample((Arg("f32[1,5,2,3]"),), {"lanes": 4}),
            Sample((Arg("f32[0,3,2]"),), {"lanes": 2}, grad=False),
            Sample((Arg("f32[n,3,m]"),), {"lanes": 2}, grad=False),
        ]


def _padded(x: TensorType, index: list[Scalar], channel: Scalar) -> Scalar:
    return load_or(0, index, in_range(channel, x.shape[1]), const(0, x.dtype))


@declare
class unblock_channels(_Blocking):
    """[N, C/lanes, axes, lanes] -> [N, channels, axes]; a kernel reads the blocks directly."""

    name = "unblock_channels"
    attrs = {"channels": Attr(positive)}
    reader_side = True

    def infer(self, x: TensorType, *, channels: int) -> TensorType:
        if x.rank < 3 or not isinstance(x.shape[-1], int):
            raise ShapeError(f"unblock_channels: {x} is not [batch, blocks, axes, lanes]")
        what = f"unblock_channels: {x} does not hold {channels} channels"
        require_shape((x.shape[1],), (-(-channels // x.shape[-1]),), what)
        return x.with_shape((x.shape[0], channels, *x.shape[2:-1]))

    def ref(self, x: np.ndarray, *, channels: int) -> np.ndarray:
        moved = np.moveaxis(x, -1, 2)
        return moved.reshape(x.shape[0], x.shape[1] * x.shape[-1], *x.shape[2:-1])[:, :channels]

    def vjp(self, g: Node, y: Node, x: Node, *, channels: int) -> list[Node]:
        return [block_channels(g, lanes=x.shape[-1])]

    def lower(self, x: TensorType, *, channels: int) -> Form:
        lanes = x.shape[-1]
        assert isinstance(lanes, int)
        n, c, *place = axes(x.rank - 1)
        body = load(0, [n, c // lanes, *place, c % lanes], x.dtype)
        return Map(self.infer(x, channels=channels).shape, body)

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg("f32[2,2,3,4]"),), {"channels": 8}),
            Sample((Arg("f32[1,2,2,3,4]"),), {"channels": 5}),
            Sample((Arg("f32[0,2,2,2]"),), {"channels": 3}, grad=False),
            Sample((Arg("f32[n,2,m,2]"),), {"channels": 3}, grad=False),
        ]
