"""Winograd's transforms of 3x3 kernels: F(m, 3) computes m x m outputs from (m + 2) x (m + 2) transformed
inputs.

Products of transformed kernels and images, point by point, replace the window: 2.25 (m = 2) or 4 (m = 4)
times fewer multiplications. Matrices: with x a tile of the image and w the kernel, the outputs are A (G w G'
* B x B') A', where `*` multiplies element by element.

Kernels of bytes stay integers: each row of G is multiplied by what makes it whole, and fits 16 bits. Outputs
are then `WHOLE` ** 2 times too large, which is taken off exactly for up to `most_channels` channels; more are
summed in parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from rlx.errors import ShapeError
from rlx.ir.assume import require_shape
from rlx.ir.attr import Attr, integer
from rlx.ir.dim import Dim
from rlx.ir.dtype import I8, I16, I32
from rlx.ir.form import Form, Map
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Op, Sample, declare
from rlx.ir.scalar import Scalar, axes, call, const, convert, load, select
from rlx.ir.types import TensorType
from rlx.ops.contract import dot_general
from rlx.ops.elementwise import cast
from rlx.ops.packing import Panels, pack_panels
from rlx.ops.shape import reshape, transpose
from rlx.records import dataclass

INPUT = {
    2: ((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1)),
    4: (
        (4, 0, -5, 0, 1, 0),
        (0, -4, -4, 1, 1, 0),
        (0, 4, -4, -1, 1, 0),
        (0, -2, -1, 2, 1, 0),
        (0, 2, -1, -2, 1, 0),
        (0, 4, 0, -5, 0, 1),
    ),
}
KERNEL = {
    2: ((1, 0, 0), (1 / 2, 1 / 2, 1 / 2), (1 / 2, -1 / 2, 1 / 2), (0, 0, 1)),
    4: (
        (1 / 4, 0, 0),
        (-1 / 6, -1 / 6, -1 / 6),
        (-1 / 6, 1 / 6, -1 / 6),
        (1 / 24, 1 / 12, 1 / 6),
        (1 / 24, -1 / 12, 1 / 6),
        (0, 0, 1),
    ),
}
OUTPUT = {
    2: ((1, 1, 1, 0), (0, 1, -1, -1)),
    4: ((1, 1, 1, 1, 1, 0), (0, 1, -1, 2, -2, 0), (0, 1, 1, 4, 4, 0), (0, 1, -1, 8, -8, 1)),
}
RESTORE = {  # a left inverse of KERNEL
    2: ((1, 0, 0, 0), (0, 1, -1, 0), (0, 0, 0, 1)),
    4: ((4, 0, 0, 0, 0, 0), (0, -3, 3, 0, 0, 0), (0, 0, 0, 0, 0, 1)),
}
WHOLE = 24  # of F(4, 3): what fractions of KERNEL[4] have in common
INTEGER_ROWS = (4, 6, 6, 24, 24, 1)  # what makes the rows of KERNEL[4] integers
INTEGER_KERNEL = ((1, 0, 0), (-1, -1, -1), (-1, 1, -1), (1, 2, 4), (1, -2, 4), (0, 0, 1))
INTEGER_RESTORE = ((1, 0, 0, 0, 0, 0), (0, -1, 1, 0, 0, 0), (0, 0, 0, 0, 0, 1))  # the second gives the double


def most_channels() -> int:
    """Channels of u8 times i8 whose sums over a window of 3x3 are exact in i32 behind the transforms.

    Sums are computed modulo 2 ** 32, times 576 = 9 * 64. An inverse of 9 takes the 9 off; 64 times the sum
    must fit.

    >>> most_channels()
    114
    """
    return (2**31 // 64 - 1) // (9 * 255 * 128)


@dataclass(frozen=True)
class WinogradLayout:
    """Transformed kernels of [O, I, 3, 3]: for each point, panels of an [I, O] matrix.

    >>> WinogradLayout(2, out=4, channels=3, columns=4, lanes=4).shape
    (16, 12)
    """

    m: int
    out: int
    channels: int
    columns: int
    lanes: int
    group: int = 1  # input channels that one instruction takes

    @cached_property
    def panels(self) -> Panels:
        return Panels(self.channels, self.out, self.columns, self.lanes, self.group)

    @property
    def parts(self) -> int:
        """Parts of the input channels, in whole blocks, that are summed one by one."""
        blocks = -(-self.channels // self.lanes)
        return 1 if self.group == 1 else -(-blocks // (most_channels() // self.lanes))

    @property
    def wide_out(self) -> int:
        """Outputs padded to whole vectors."""
        return -(-self.out // self.lanes) * self.lanes

    @property
    def points(self) -> int:
        return (self.m + 2) ** 2

    @property
    def shape(self) -> tuple[int, int]:
        return self.points, self.panels.elements


def transform_kernel(w: Node, layout: WinogradLayout) -> Node:
    """A kernel [O, I, 3, 3] transformed (in f64, rounded once; bytes exactly, to i16) and packed."""
    exact = w.dtype is I8
    matrix = np.array(INTEGER_KERNEL if exact else KERNEL[layout.m], np.float64)
    once = dot_general(cast(w, dtype="f64"), matrix, ((2,), (1,)))  # [O, I, s, a]
    twice = dot_general(once, matrix, ((2,), (1,)))  # [O, I, a, b]
    points = reshape(transpose(twice, (2, 3, 1, 0)), (layout.points, layout.channels, layout.out))
    made: Node = pack_panels(cast(points, dtype=I16 if exact else w.dtype), **_panel_attrs(layout))
    return made


def _panel_attrs(layout: WinogradLayout) -> dict[str, int]:
    p = layout.panels
    return {"k": p.k, "n": p.n, "columns": p.columns, "lanes": p.lanes, "group": p.group}


@declare
class unpack_winograd(Op):
    """The kernel [O, I, 3, 3] of transformed panels; a convolution reads the panels directly."""

    name = "unpack_winograd"
    arity = 1
    attrs = {
        **{k: Attr(integer) for k in ("m", "out", "channels", "columns", "lanes")},
        "group": Attr(integer, 1),
    }
    reader_side = True

    def infer(self, x: TensorType, **layout: int) -> TensorType:
        want = WinogradLayout(**layout)
        if x.rank < 2:
            raise ShapeError(f"unpack_winograd: {x} holds no points")
        require_shape(x.shape[-2:], want.shape, f"unpack_winograd: {x} is not {list(want.shape)}")
        made = x.with_shape((*x.shape[:-2], want.out, want.channels, 3, 3))
        return made.with_dtype(I8) if x.dtype is I16 else made

    def ref(self, x: np.ndarray, **layout: int) -> np.ndarray:
        want = WinogradLayout(**layout)
        exact = x.dtype == np.int16
        side = want.m + 2
        restore = np.array(INTEGER_RESTORE if exact else RESTORE[want.m], np.float64)
        if exact:
            restore[1] /= 2
        points = want.panels.unpack(x).astype(np.float64)
        grid = points.reshape(*x.shape[:-2], side, side, want.channels, want.out)
        out: np.ndarray = np.einsum("ra,sb,...abio->...oirs", restore, restore, grid)
        return np.floor(out).astype(np.int8) if exact else out.astype(x.dtype)

    def vjp(self, g: Node, y: Node, x: Node, **layout: int) -> list[Node]:
        want = WinogradLayout(**layout)
        restore = np.array(RESTORE[want.m], np.float64)
        lead = g.rank - 4
        once = dot_general(cast(g, dtype="f64"), restore, ((lead + 2,), (0,)))  # [..., o, i, s, a]
        twice = dot_general(once, restore, ((lead + 2,), (0,)))  # [..., o, i, a, b]
        turned = transpose(twice, (*range(lead), *(lead + i for i in (2, 3, 1, 0))))
        points = reshape(turned, (*g.shape[:lead], want.points, want.channels, want.out))
        return [pack_panels(cast(points, dtype=g.dtype), **_panel_attrs(want))]

    def batch(self, flags: Sequence[bool], x: Node, **layout: int) -> Node:
        made: Node = self(x, **layout)
        return made

    def lower(self, x: TensorType, **layout: int) -> Form:
        want = WinogradLayout(**layout)
        exact = x.dtype is I16
        p, side, restore = want.panels, want.m + 2, INTEGER_RESTORE if exact else RESTORE[want.m]
        every = axes(x.rank + 2)
        lead, (o, i, r, s) = every[: x.rank - 2], every[x.rank - 2 :]

        def offset(column: Scalar, width: int) -> Scalar:
            line = i * width if p.group == 1 else i // p.group * (width * p.group) + i % p.group
            return column // width * (p.depth * width) + line + column % width * p.group

        cut = p.full * p.columns
        at = offset(o, p.columns) if p.full else const(0)
        if p.tail:
            narrow = offset(o - cut, p.tail) + p.depth * cut
            at = select(o < cut, at, narrow) if p.full else narrow

        def weight(row: int, column: int) -> Scalar:
            total: Scalar | None = None
            for a, b in np.ndindex(side, side):
                factor = restore[row][a] * restore[column][b]
                if factor:
                    there = load(0, [*lead, a * side + b, at], x.dtype)
                    wide = convert(there, I32) if exact else there
                    term = call("mul", const(factor, wide.dtype), wide)
                    total = term if total is None else call("add", total, term)
            assert total is not None
            if exact:
                total = convert(call("floor_div", total, const(1 << (row == 1) + (column == 1), I32)), I8)
            return total

        def pick(index: Scalar, choices: list[Scalar]) -> Scalar:
            return select(index < 1, choices[0], select(index < 2, choices[1], choices[2]))

        body = pick(r, [pick(s, [weight(j, k) for k in range(3)]) for j in range(3)])
        return Map((*x.shape[:-2], want.out, want.channels, 3, 3), body)

    def cost(self, x: TensorType, **layout: Any) -> Dim:
        return 0

    def samples(self) -> list[Sample]:
        layouts = [
            WinogradLayout(2, 3, 2, 2, 2),
            WinogradLayout(4, 4, 1, 4, 2),
            WinogradLayout(2, 1, 1, 4, 2),
        ]
        integers = [WinogradLayout(4, 3, 4, 2, 2, 2), WinogradLayout(4, 5, 3, 4, 2, 2)]
        return [
            Sample(
                (Arg(f"{kind}[{v.points},{v.panels.elements}]", -60, 60),),
                {k: getattr(v, k) for k in self.attrs},
                grad=kind == "f32",
            )
            for kind, some in (("f32", layouts), ("i16", integers))
            for v in some
        ]
