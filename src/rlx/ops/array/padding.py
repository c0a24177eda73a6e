"""Padding with a constant, or with the tensor's own elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.errors import OpAttributeError, ShapeError
from rlx.ir.assume import require_at_least
from rlx.ir.attr import Attr, dim_pairs, ints, number, one_of
from rlx.ir.dim import Dim, known_le
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Level, Op, Sample, declare
from rlx.ir.operand import Operand, Tensor, of_one
from rlx.ir.types import TensorType
from rlx.kernel.form import Form, Map
from rlx.kernel.scalar import TRUE, Scalar, axes, const, in_range, load_or, size
from rlx.ops.array.shape import broadcast_to, concat, flip, slice_axis
from rlx.ops.array.window import PaddingLike
from rlx.ops.rules import op_call, shape_of, with_gaps

MOST_ROUNDS = 16
"""How often an axis is gone round by copies of it."""
MODES = ("reflect", "symmetric", "edge", "wrap")
Pairs = Sequence[tuple[Dim, Dim]]


@declare
class _pad(Op):
    """Pad each axis with a constant: (low, high), negative amounts crop; `interior` is a gap in between."""

    name = "pad"
    arity = 1
    attrs = {"padding": Attr(dim_pairs), "interior": Attr(ints, ()), "value": Attr(number, 0)}

    def _interior(self, interior: Sequence[int], rank: int) -> tuple[int, ...]:
        return tuple(interior) or (0,) * rank

    def infer(
        self, x: TensorType, *, padding: Sequence[tuple[Dim, Dim]], interior: Sequence[int], value: float
    ) -> TensorType:
        gaps = self._interior(interior, x.rank)
        if len(padding) != x.rank or len(gaps) != x.rank or any(len(p) != 2 for p in padding):
            raise ShapeError(f"pad: {x} needs {x.rank} (low, high) pairs, got {tuple(padding)}")
        out = []
        for d, (low, high), gap in zip(x.shape, padding, gaps, strict=True):
            if gap < 0:
                raise ShapeError(f"pad: interior padding {gap} of {x} is negative")
            n = low + high + with_gaps(d, gap)
            if known_le(n, -1) is True:
                raise ShapeError(f"pad: {tuple(padding)} crops more than {x} has")
            out.append(n)
        return x.with_shape(tuple(out))

    def ref(
        self, x: np.ndarray, *, padding: Sequence[tuple[int, int]], interior: Sequence[int], value: float
    ) -> np.ndarray:
        gaps = self._interior(interior, x.ndim)
        shape = [
            lo + hi + (n + max(n - 1, 0) * g) for n, (lo, hi), g in zip(x.shape, padding, gaps, strict=True)
        ]
        out = np.full(shape, value, x.dtype)
        source, target = [], []
        for n, (lo, _), g, total in zip(x.shape, padding, gaps, shape, strict=True):
            at = lo + np.arange(n) * (g + 1)
            inside = (at >= 0) & (at < total)
            source.append(np.arange(n)[inside])
            target.append(at[inside])
        out[np.ix_(*target)] = x[np.ix_(*source)]
        return out

    def vjp(
        self,
        g: Node,
        y: Node,
        x: Node,
        *,
        padding: Sequence[tuple[Dim, Dim]],
        interior: Sequence[int],
        value: float,
    ) -> list[Node]:
        gaps = self._interior(interior, x.rank)
        cropped = [
            (-lo if known_le(0, -lo) is True else 0, -hi if known_le(0, -hi) is True else 0)
            for lo, hi in padding
        ]
        if any(c != (0, 0) for c in cropped):  # what was cropped away gets a zero gradient
            g = op_call("pad", g, padding=tuple(cropped))
        starts = tuple(lo + c[0] for (lo, _), c in zip(padding, cropped, strict=True))
        made: Node = op_call("slice", g, starts=starts, sizes=x.shape, steps=tuple(k + 1 for k in gaps))
        return [made]

    def batch(
        self,
        flags: Sequence[bool],
        x: Node,
        *,
        padding: Sequence[tuple[Dim, Dim]],
        interior: Sequence[int],
        value: float,
    ) -> Node:
        gaps = self._interior(interior, x.rank - 1)
        made: Node = _pad(x, padding=((0, 0), *padding), interior=(0, *gaps), value=value)
        return made

    def lower(
        self, x: TensorType, *, padding: Sequence[tuple[Dim, Dim]], interior: Sequence[int], value: float
    ) -> Form:
        out = self.infer(x, padding=padding, interior=interior, value=value)
        index: list[Scalar] = []
        guard = TRUE
        for i, d, (low, _), gap in zip(
            axes(x.rank), x.shape, padding, self._interior(interior, x.rank), strict=True
        ):
            at = i - size(low)
            if gap:
                guard = guard & (at % (gap + 1) <= 0) & (at >= 0)
                at = at // (gap + 1)
            if (low, gap) != (0, 0) or out.shape[len(index)] != d:
                guard = guard & in_range(at, d)
            index.append(at)
        return Map(out.shape, load_or(0, index, guard, const(value, x.dtype)))

    def cost(
        self, x: TensorType, *, padding: Sequence[tuple[Dim, Dim]], interior: Sequence[int], value: float
    ) -> Dim:
        return 0

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg("f32[2,3]"),), {"padding": ((1, 2), (0, 1))}),
            Sample((Arg("f32[4]"),), {"padding": ((-1, 2),), "value": 1.5}),
            Sample((Arg("f32[3]"),), {"padding": ((1, 1),), "interior": (2,)}),
            Sample((Arg("f32[0]"),), {"padding": ((1, 2),)}, grad=False),
            Sample((Arg("i32[2]"),), {"padding": ((1, 0),), "value": 7}, grad=False),
            Sample((Arg("f32[n,2]"),), {"padding": ((1, 1), (0, 0))}, grad=False),
        ]


def cropped(amount: Dim) -> Dim:
    """How many elements a negative amount takes away."""
    return -amount if known_le(amount, -1) is True else 0


@declare
class _extend(Op):
    """Pad with elements of x itself, as numpy.pad does; negative amounts crop first.

    A static axis is gone round as often as needed; a symbolic one must hold enough for one round.
    """

    name = "extend"
    level = Level.HIR
    arity = 1
    attrs = {"padding": Attr(dim_pairs), "mode": Attr(one_of(*MODES))}

    def infer(self, x: TensorType, *, padding: Pairs, mode: str) -> TensorType:
        if len(padding) != x.rank or any(len(p) != 2 for p in padding):
            raise ShapeError(f"pad: {x} needs {x.rank} (low, high) pairs, got {tuple(padding)}")
        for axis, (d, (low, high)) in enumerate(zip(x.shape, padding, strict=True)):
            inner = d - cropped(low) - cropped(high)
            require_at_least(inner, 0, f"pad: ({low}, {high}) crops more than axis {axis} of {x} has")
            for amount in (low, high):
                if amount != 0 and not cropped(amount):
                    many = isinstance(inner, int) and isinstance(amount, int)
                    need = 1 if many or mode == "edge" else amount + (mode == "reflect")
                    what = f"pad: mode {mode!r} needs at least {need} elements on axis {axis} of {x}"
                    require_at_least(inner, need, what)
        return x.with_shape(tuple(d + low + high for d, (low, high) in zip(x.shape, padding, strict=True)))

    def ref(self, x: np.ndarray, *, padding: Sequence[tuple[int, int]], mode: Any) -> np.ndarray:
        box = tuple(
            slice(max(-low, 0), n - max(-high, 0)) for n, (low, high) in zip(x.shape, padding, strict=True)
        )
        if not padding:
            return x
        return np.pad(x[box], [(max(low, 0), max(high, 0)) for low, high in padding], mode)

    def expand(self, x: Node, *, padding: Pairs, mode: str) -> Node:
        for axis, (low, high) in enumerate(padding):
            start, inner = cropped(low), x.shape[axis] - cropped(low) - cropped(high)
            if inner != x.shape[axis]:
                x = slice_axis(x, axis, start, inner)
            x = _extend_axis(x, axis, low + start, high + cropped(high), mode)
        return x

    def samples(self) -> list[Sample]:
        out = []
        for mode in MODES:
            out += [
                Sample((Arg("f32[4,3]"),), {"padding": ((2, 1), (0, 2)), "mode": mode}),
                Sample((Arg("f32[3]"),), {"padding": ((7, 9),), "mode": mode}),
                Sample((Arg("f32[2,1]"),), {"padding": ((0, 0), (3, 2)), "mode": mode}),
                Sample((Arg("f32[2,3]"),), {"padding": ((1, 0), (70, 4)), "mode": mode}),
                Sample((Arg("f32[6]"),), {"padding": ((-2, 3),), "mode": mode}),
                Sample((Arg("f32[0,2]"),), {"padding": ((0, 0), (1, 1)), "mode": mode}, grad=False),
                Sample((Arg("f32[]"),), {"padding": (), "mode": mode}),
                Sample((Arg("i32[n,m]"),), {"padding": ((2, 1), (0, 2)), "mode": mode}, grad=False),
            ]
        return out


def _extend_axis(x: Node, axis: int, low: Dim, high: Dim, mode: str) -> Node:
    """Pad one axis; a round takes at most a period, after which the ends are mirror or wrap points again."""
    inner = x.shape[axis]
    if mode == "reflect" and inner == 1:
        mode = "edge"
    period = inner - 1 if mode == "reflect" else inner
    if mode != "edge" and all(isinstance(n, int) for n in (inner, low, high)):
        if max(low, high) > MOST_ROUNDS * period > 0:
            return _many_rounds(x, axis, low, high, mode)
    while low != 0 or high != 0:
        a, b = (_round(amount, period, mode) for amount in (low, high))
        x = concat([*_front(x, axis, inner, a, mode), x, *_back(x, axis, inner, b, mode)], axis)
        low, high = low - a, high - b
    return x


def _many_rounds(x: Node, axis: int, low: Dim, high: Dim, mode: str) -> Node:
    """Pad by elements whose places are computed."""
    inner = x.shape[axis]
    place = op_call("iota", shape=(low + inner + high,), axis=0, dtype="i64") - low
    if mode == "wrap":
        place = place % inner
    else:
        apart = 0 if mode == "reflect" else 1  # of the last element and its image
        turn = 2 * (inner - 1 + apart)
        there = place % turn
        place = op_call("minimum", there, turn - apart - there)
    made: Node = op_call("gather", x, place, axis=axis)
    return made


def _round(amount: Dim, period: Dim, mode: str) -> Dim:
    if mode != "edge" and isinstance(amount, int) and isinstance(period, int):
        return min(amount, period)
    return amount


def _front(x: Node, axis: int, inner: Dim, n: Dim, mode: str) -> list[Node]:
    if n == 0:
        return []
    if mode == "edge":
        return [_repeated(slice_axis(x, axis, 0, 1), axis, n)]
    if mode == "wrap":
        return [slice_axis(x, axis, inner - n, n)]
    return [flip(slice_axis(x, axis, 1 if mode == "reflect" else 0, n), axis)]


def _back(x: Node, axis: int, inner: Dim, n: Dim, mode: str) -> list[Node]:
    end = x.shape[axis]
    if n == 0:
        return []
    if mode == "edge":
        return [_repeated(slice_axis(x, axis, end - 1, 1), axis, n)]
    if mode == "wrap":
        return [slice_axis(x, axis, end - inner, n)]
    return [flip(slice_axis(x, axis, end - n - (mode == "reflect"), n), axis)]


def _repeated(x: Node, axis: int, n: Dim) -> Node:
    made: Node = broadcast_to(x, tuple(n if i == axis else d for i, d in enumerate(x.shape)))
    return made


@of_one
def pad(x: Operand, padding: PaddingLike, mode: str = "constant", value: object = 0) -> Tensor:
    """Pad each axis by (low, high) elements, as numpy.pad: constant, reflect, symmetric, edge or wrap.

    `padding` is one number for all sides, a pair for all axes, or a pair for each axis; negative ones crop.

    >>> pad(np.array([1, 2, 3]), (1, 2), value=9), pad(np.array([1, 2, 3]), 2, mode="reflect")
    (array([9, 1, 2, 3, 9, 9]), array([3, 2, 1, 2, 3, 2, 1]))
    """
    rank = len(shape_of(x))
    amounts = tuple(padding) if isinstance(padding, (tuple, list, np.ndarray)) else (padding, padding)
    if rank and not any(isinstance(p, (tuple, list, np.ndarray)) for p in amounts):
        amounts = (amounts,) * rank
    pairs = tuple((p[0], p[-1]) for p in (tuple(a) for a in amounts)) if rank else ()
    if mode == "constant":
        return op_call("pad", x, padding=pairs, value=value)
    if mode not in MODES:
        raise OpAttributeError(f"pad: unknown mode {mode!r}; use 'constant', {', '.join(map(repr, MODES))}")
    return _extend(x, padding=pairs, mode=mode)


__all__ = ["pad"]
