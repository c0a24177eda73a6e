"""Winograd's transforms of 3x3 kernels: F(m, 3) computes m x m outputs from (m + 2) x (m + 2) transformed
inputs.

Products of transformed kernels and images, point by point, replace the window: 2.25 (m = 2) or 4 (m = 4)
times fewer multiplications. Matrices: with x a tile of the image and w the kernel, the outputs are A (G w G'
* B x B') A', where `*` multiplies element by element.
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
from rlx.ir.form import Form, Map
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Op, Sample, declare
from rlx.ir.scalar import Scalar, axes, call, const, load, select
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

    @cached_property
    def panels(self) -> Panels:
        return Panels(self.channels, self.out, self.columns, self.lanes, 1)

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
    """A kernel [O, I, 3, 3] transformed (in f64, rounded once) and packed."""
    matrix = np.array(KERNEL[layout.m], np.float64)
    once = dot_general(cast(w, dtype="f64"), matrix, ((2,), (1,)))  # [O, I, s, a]
    twice = dot_general(once, matrix, ((2,), (1,)))  # [O, I, a, b]
    points = reshape(transpose(twice, (2, 3, 1, 0)), (layout.points, layout.channels, layout.out))
    made: Node = pack_panels(cast(points, dtype=w.dtype), **_panel_attrs(layout))
    return made


def _panel_attrs(layout: WinogradLayout) -> dict[str, int]:
    p = layout.panels
    return {"k": p.k, "n": p.n, "columns": p.columns, "lanes": p.lanes, "group": p.group}


@declare
class unpack_winograd(Op):
    """The kernel [O, I, 3, 3] of transformed panels; a convolution reads the panels directly."""

    name = "unpack_winograd"
    arity = 1
    attrs = {k: Attr(integer) for k in ("m", "out", "channels", "columns", "lanes")}
    reader_side = True

    def infer(self, x: TensorType, **layout: int) -> TensorType:
        want = WinogradLayout(**layout)
        if x.rank < 2:
            raise ShapeError(f"unpack_winograd: {x} holds no points")
        require_shape(x.shape[-2:], want.shape, f"unpack_winograd: {x} is not {list(want.shape)}")
        return x.with_shape((*x.shape[:-2], want.out, want.channels, 3, 3))

    def ref(self, x: np.ndarray, **layout: int) -> np.ndarray:
        want = WinogradLayout(**layout)
        side, restore = want.m + 2, np.array(RESTORE[want.m], np.float64)
        points = want.panels.unpack(x).astype(np.float64)
        grid = points.reshape(*x.shape[:-2], side, side, want.channels, want.out)
        out: np.ndarray = np.einsum("ra,sb,...abio->...oirs", restore, restore, grid).astype(x.dtype)
        return out

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
        p, side, restore = want.panels, want.m + 2, RESTORE[want.m]
        every = axes(x.rank + 2)
        lead, (o, i, r, s) = every[: x.rank - 2], every[x.rank - 2 :]

        def offset(column: Scalar, width: int) -> Scalar:
            return column // width * (p.depth * width) + i * width + column % width

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
                    term = call("mul", const(factor, x.dtype), load(0, [*lead, a * side + b, at], x.dtype))
                    total = term if total is None else call("add", total, term)
            assert total is not None
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
        return [
            Sample((Arg(f"f32[{v.points},{v.panels.elements}]"),), {k: getattr(v, k) for k in self.attrs})
            for v in layouts
        ]
