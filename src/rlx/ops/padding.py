"""Padding with a constant (the MIR op of `shape`) or with the tensor's own elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.errors import AttributeError_, ShapeError
from rlx.ir.attr import Attr, dim_pairs, one_of
from rlx.ir.dim import Dim, known_le
from rlx.ir.graph import Node, require_at_least
from rlx.ir.op import Arg, Level, Op, Sample, declare
from rlx.ir.types import TensorType
from rlx.ops.rules import op_call, shape_of
from rlx.ops.shape import broadcast_to, concat, flip, slice_axis

MODES = ("reflect", "symmetric", "edge", "wrap")
Pairs = Sequence[tuple[Dim, Dim]]


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
    while low != 0 or high != 0:
        a, b = (_round(amount, period, mode) for amount in (low, high))
        x = concat([*_front(x, axis, inner, a, mode), x, *_back(x, axis, inner, b, mode)], axis)
        low, high = low - a, high - b
    return x


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


def pad(x: Any, padding: Any, mode: str = "constant", value: Any = 0) -> Any:
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
        raise AttributeError_(f"pad: mode {mode!r} is none of 'constant', {', '.join(map(repr, MODES))}")
    return _extend(x, padding=pairs, mode=mode)


__all__ = ["pad"]
