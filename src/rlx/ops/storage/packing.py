"""Weight panels: the layout in which contraction kernels read a constant right operand.

A matrix [k, n] becomes panels of `columns` columns, one after the other. A panel is
[k / group][columns][group], read front to back by a kernel; the last one is narrower, in whole vectors of
`lanes`, padded with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from rlx.errors import ShapeError
from rlx.ir.assume import require_equal
from rlx.ir.attr import Attr, positive, whole
from rlx.ir.dim import Dim
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Op, Sample, declare
from rlx.ir.types import TensorType
from rlx.kernel.form import Form, Map
from rlx.kernel.scalar import Scalar, axes, const, in_range, load, load_or, select
from rlx.records import dataclass


@dataclass(frozen=True)
class Panels:
    """Where the elements of a packed [k, n] matrix lie.

    >>> Panels(3, 50, 32, 16, 1).elements
    192
    """

    k: int
    n: int
    columns: int
    lanes: int
    group: int

    @property
    def full(self) -> int:
        """Panels with every column in use."""
        return self.n // self.columns

    @property
    def tail(self) -> int:
        """Padded columns of the last, narrower panel; 0 when there is none."""
        return -(-(self.n % self.columns) // self.lanes) * self.lanes

    @property
    def depth(self) -> int:
        """k padded to whole groups."""
        return -(-self.k // self.group) * self.group

    @property
    def elements(self) -> int:
        return self.depth * (self.full * self.columns + self.tail)

    def pack(self, w: np.ndarray) -> np.ndarray:
        """[..., k, n] -> [..., elements]. Elements move once: fresh memory is dear."""
        lead = w.shape[:-2]
        whole = self.depth == self.k and self.n == self.full * self.columns + self.tail
        out = (np.empty if whole else np.zeros)((*lead, self.elements), w.dtype)
        cut, groups = self.full * self.columns, self.depth // self.group
        wide = out[..., : self.depth * cut].reshape(*lead, self.full, groups, self.columns, self.group)
        self._interleave(wide, w[..., :cut].reshape(*lead, self.k, self.full, self.columns))
        narrow = out[..., self.depth * cut :].reshape(*lead, 1, groups, self.tail, self.group)
        self._interleave(narrow[..., : self.n - cut, :], w[..., cut:].reshape(*lead, self.k, 1, self.n - cut))
        return out

    def _interleave(self, to: np.ndarray, rows: np.ndarray) -> None:
        """Columns of rows [..., k, panels, width] to panels [..., panels, depth / group, width, group]."""
        for first in range(self.group):  # rows of a group lie side by side
            some = rows[..., first :: self.group, :, :]
            to[..., : some.shape[-3], :, first] = np.moveaxis(some, -3, -2)

    def each(self, packed: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
        """Panel by panel of [..., elements]: its first column, the column after its last one, and where they
        lie, as [..., depth / group, columns, group]."""
        lead, groups = packed.shape[:-1], self.depth // self.group
        for first in range(0, self.n, self.columns):
            width = self.columns if first + self.columns <= self.n else self.tail
            stop = min(first + width, self.n)
            panel = packed[..., self.depth * first : self.depth * (first + width)]
            yield first, stop, panel.reshape(*lead, groups, width, self.group)[..., : stop - first, :]

    def element(self, at: Scalar, read: Callable[[Scalar, Scalar, Scalar], Scalar]) -> Scalar:
        """What lies at an offset; `read` gives the element (k, n) of the matrix where a condition holds."""
        cut = self.depth * self.full * self.columns

        def place(offset: Scalar, width: int, first: int) -> Scalar:
            size = max(self.depth * width, 1)
            panel, inside = offset // size, offset % size
            row = max(width * self.group, 1)
            k = inside // row * self.group + inside % row % self.group
            n = panel * width + inside % row // self.group + first
            return read(k, n, in_range(k, self.k) & in_range(n, self.n))

        if not self.tail:
            return place(at, self.columns, 0)
        narrow = place(at - cut if self.full else at, self.tail, self.full * self.columns)
        return select(at < cut, place(at, self.columns, 0), narrow) if self.full else narrow

    def unpack(self, packed: np.ndarray) -> np.ndarray:
        """[..., elements] -> [..., k, n]."""
        lead = packed.shape[:-1]
        cut = self.depth * self.full * self.columns
        blocks = []
        for part, width in ((packed[..., :cut], self.columns), (packed[..., cut:], self.tail)):
            if part.shape[-1]:
                split = part.reshape(*lead, -1, self.depth // self.group, width, self.group)
                order = (*range(len(lead)), *(len(lead) + i for i in (1, 3, 0, 2)))
                blocks.append(split.transpose(order).reshape(*lead, self.depth, -1))
        if not blocks:
            return np.zeros((*lead, self.k, self.n), packed.dtype)
        return np.concatenate(blocks, axis=-1)[..., : self.k, : self.n]


_LAYOUT = {
    **{name: Attr(whole) for name in ("k", "n")},
    **{name: Attr(positive) for name in ("columns", "lanes", "group")},
}


class Packing(Op):
    """A weight in another order: leading axes are a batch as they are, and nothing is computed in a run."""

    arity = 1
    storage = True

    def batch(self, flags: Sequence[bool], x: Node, **layout: Any) -> Node:
        made: Node = self(x, **layout)
        return made

    def cost(self, x: TensorType, **layout: Any) -> Dim:
        return 0


class _PanelPacking(Packing):
    attrs = _LAYOUT

    def _sample(self, shape: str, layout: Panels, smooth: bool = True) -> Sample:
        return Sample((Arg(f"f32{shape}"),), vars(layout) | {}, grad=smooth)


@declare
class pack_panels(_PanelPacking):
    """A weight matrix [..., k, n] in panels, flat."""

    name = "pack_panels"

    def infer(self, x: TensorType, **layout: int) -> TensorType:
        panels = Panels(**layout)
        if x.rank < 2:
            raise ShapeError(f"pack_panels: {x} is not a matrix")
        require_equal(x.shape[-2], panels.k, f"pack_panels: {x} is not [{panels.k},{panels.n}]")
        require_equal(x.shape[-1], panels.n, f"pack_panels: {x} is not [{panels.k},{panels.n}]")
        return x.with_shape((*x.shape[:-2], panels.elements))

    def ref(self, x: np.ndarray, **layout: int) -> np.ndarray:
        return Panels(**layout).pack(x)

    def vjp(self, g: Node, y: Node, x: Node, **layout: int) -> list[Node]:
        return [unpack_panels(g, **layout)]

    def lower(self, x: TensorType, **layout: int) -> Form:
        p = Panels(**layout)
        *lead, at = axes(x.rank - 1)

        def read(k: Scalar, n: Scalar, exists: Scalar) -> Scalar:
            return load_or(0, [*lead, k, n], exists, const(0, x.dtype))

        return Map((*x.shape[:-2], p.elements), p.element(at, read))

    def samples(self) -> list[Sample]:
        return [
            self._sample("[3,10]", Panels(3, 10, 4, 2, 1)),
            self._sample("[2,5,8]", Panels(5, 8, 4, 4, 2)),
            self._sample("[3,2]", Panels(3, 2, 4, 2, 1)),
            self._sample("[0,4]", Panels(0, 4, 4, 2, 1), smooth=False),
            self._sample("[n,3,5]", Panels(3, 5, 4, 1, 1), smooth=False),
        ]


@declare
class unpack_panels(_PanelPacking):
    """The matrix [..., k, n] that lies in panels; a contraction reads the panels directly."""

    name = "unpack_panels"
    reader_side = True

    def infer(self, x: TensorType, **layout: int) -> TensorType:
        panels = Panels(**layout)
        if x.rank < 1:
            raise ShapeError(f"unpack_panels: {x} does not hold panels")
        require_equal(
            x.shape[-1], panels.elements, f"unpack_panels: {x} does not hold {panels.elements} elements"
        )
        return x.with_shape((*x.shape[:-1], panels.k, panels.n))

    def ref(self, x: np.ndarray, **layout: int) -> np.ndarray:
        return Panels(**layout).unpack(x)

    def vjp(self, g: Node, y: Node, x: Node, **layout: int) -> list[Node]:
        return [pack_panels(g, **layout)]

    def lower(self, x: TensorType, **layout: int) -> Form:
        p = Panels(**layout)
        *lead, k, n = axes(x.rank + 1)

        def offset(column: Scalar, width: int) -> Scalar:
            panel = column // width * (p.depth * width)
            return panel + k // p.group * (width * p.group) + column % width * p.group + k % p.group

        cut = p.full * p.columns
        at = offset(n, p.columns) if p.full else const(0)
        if p.tail:
            narrow = offset(n - cut, p.tail) + p.depth * cut
            at = select(n < cut, at, narrow) if p.full else narrow
        return Map((*x.shape[:-1], p.k, p.n), load(0, [*lead, at], x.dtype))

    def samples(self) -> list[Sample]:
        return [
            self._sample("[30]", Panels(3, 10, 4, 2, 1)),
            self._sample("[2,48]", Panels(5, 8, 4, 4, 2)),
            self._sample("[6]", Panels(3, 2, 4, 2, 1)),
            self._sample("[n,15]", Panels(3, 5, 4, 1, 1), smooth=False),
        ]
