"""Python indexing of nodes: x[1], x[2:, ::-1], x[..., None], x[i] with an integer node or array."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np

from rlx.errors import DTypeError, ShapeError, TypeMismatchError
from rlx.ir.dim import Dim, Expr, ceildiv, dim_max, dim_min, known_le
from rlx.ir.dtype import dtype
from rlx.ir.graph import Node
from rlx.ir.operand import Operand
from rlx.ops.array.gather import gather
from rlx.ops.array.shape import reshape, transpose
from rlx.ops.rules import ensure, op_call, rank_of
from rlx.records import dataclass


@dataclass(frozen=True)
class _Part:
    """What an index says about one axis: which elements are cut out, and what then becomes of the axis."""

    start: Dim
    count: Dim
    step: int = 1
    keep: bool = True
    pick: Operand | None = None  # integer node or array: gathered along the axis


def getitem(node: Node, index: object) -> Node:
    """node[index] as NumPy means it.

    Understood are integers, slices (any step), None, Ellipsis, and integer nodes or arrays (one of rank 1 or
    more, any number of rank 0). Boolean masks give shapes that depend on data: use `where` or `compress`.

    >>> from rlx import Graph
    >>> x = Graph().input("x", (4, "n", 3), "f32")
    >>> str(x[1, ..., ::-2].type), str(x[[0, 2], None].type)
    ('f32[n,2]', 'f32[2,1,n,3]')
    """
    items = _spread(node, index if isinstance(index, tuple) else (index,))
    parts = [_part(node, axis, item) for axis, item in enumerate(i for i in items if i is not None)]
    x = _cut(node, parts)
    for axis, part in reversed([*enumerate(parts)]):
        if part.pick is not None:
            x = gather(x, part.pick, axis)  # the last axis first: earlier ones keep their numbers
    return _arrange(x, items, parts)


def _is_array(item: object) -> bool:
    return isinstance(item, (Node, np.ndarray, list)) or (isinstance(item, np.generic) and np.ndim(item) > 0)


def _spread(node: Node, items: tuple[Any, ...]) -> list[Any]:
    """One item per axis, with None for new axes; Ellipsis and missing items are full slices."""
    ellipses = [i for i, item in enumerate(items) if item is Ellipsis]
    if len(ellipses) > 1:
        raise ShapeError(f"indexing {node.type}: an index can have only one '...'")
    used = sum(item is not None and item is not Ellipsis for item in items)
    if used > node.rank:
        raise ShapeError(f"indexing {node.type}: {used} indices are too many for {node.rank} axes")
    at = ellipses[0] if ellipses else len(items)
    rest = [slice(None)] * (node.rank - used)
    return [*items[:at], *rest, *items[at + 1 :]]


def _part(node: Node, axis: int, item: Any) -> _Part:
    extent = node.shape[axis]
    if isinstance(item, slice):
        return _slice_part(node, axis, item)
    if isinstance(item, (bool, np.bool_)) or _is_mask(item):
        raise DTypeError(
            f"indexing {node.type}: a boolean mask makes a shape that depends on data; "
            "use rlx.ops.where to keep the shape, or rlx.ops.compress"
        )
    if _is_array(item):
        pick = item if isinstance(item, Node) else np.asarray(item)
        if isinstance(pick, np.ndarray) and pick.size == 0:
            pick = pick.astype(np.int64)
        if not dtype(pick.dtype).is_int:
            raise DTypeError(f"indexing {node.type}: index arrays must hold integers, not {pick.dtype}")
        return _Part(0, extent, pick=pick)
    i = _bound(node, item)
    negative = known_le(i, -1) is True
    place = extent + i if negative else i
    needed = -i if negative else i + 1
    what = f"indexing {node.type}: index {i} is out of range for axis {axis} of size {extent}"
    ensure(node, "min", extent, needed, what)
    return _Part(place, 1, keep=False)


def _is_mask(item: object) -> bool:
    if isinstance(item, Node):
        return item.dtype.is_bool
    return isinstance(item, (np.ndarray, list)) and np.asarray(item).dtype.kind == "b"


def _bound(node: Node, value: Expr | SupportsIndex) -> Dim:
    if isinstance(value, Expr):
        return value
    try:
        return operator.index(value)
    except TypeError:
        raise TypeMismatchError(
            f"indexing {node.type}: {type(value).__name__} is not an index; use integers, slices, None, "
            "'...' or an integer node (rlx.ops.dynamic_slice cuts at computed places)"
        ) from None


def _slice_part(node: Node, axis: int, item: slice) -> _Part:
    """start, count and step after Python's clamping; symbolic sizes stay exact."""
    extent = node.shape[axis]
    step = 1 if item.step is None else _bound(node, item.step)
    if not isinstance(step, int) or step == 0:
        raise ShapeError(
            f"indexing {node.type}: the step of a slice must be a number that is not 0, got {step}"
        )
    first: Dim = 0 if step > 0 else -1  # bounds of positions: a slice that goes down may stop before 0
    last = extent + first
    start = (first if step > 0 else last) if item.start is None else _bound(node, item.start)
    stop = (last if step > 0 else first) if item.stop is None else _bound(node, item.stop)
    if item.start is not None:
        start = _clamp(start, extent, first, last)
    if item.stop is not None:
        stop = _clamp(stop, extent, first, last)
    distance = stop - start if step > 0 else start - stop
    return _Part(start, dim_max(ceildiv(distance, abs(step)), 0), step)


def _clamp(bound: Dim, extent: Dim, low: Dim, high: Dim) -> Dim:
    if known_le(bound, -1) is True:
        return dim_max(extent + bound, low)
    return dim_min(bound, high)


def _cut(x: Node, parts: Sequence[_Part]) -> Node:
    """One strided slice for all axes; none where everything is kept."""
    if all(p.start == 0 and p.step == 1 and p.count == d for p, d in zip(parts, x.shape, strict=True)):
        return x
    made: Node = op_call(
        "slice",
        x,
        starts=tuple(p.start for p in parts),
        sizes=tuple(p.count for p in parts),
        steps=tuple(p.step for p in parts),
    )
    return made


def _arrange(x: Node, items: Sequence[object], parts: Sequence[_Part]) -> Node:
    """Drop axes of integers, insert new ones, and put gathered axes where NumPy puts them."""
    shape: list[Dim] = []
    picked: list[int] = []  # axes of the result that come from an index array
    advanced: list[int] = []  # places in the index that NumPy treats as advanced
    source = iter(x.shape)
    rest = iter(parts)
    for place, item in enumerate(items):
        if item is None:
            shape.append(1)
            continue
        part = next(rest)
        if part.pick is not None:
            rank = rank_of(part.pick)
            if rank and picked:
                raise ShapeError("indexing: two index arrays; use rlx.ops.gather_nd for several axes at once")
            picked += range(len(shape), len(shape) + rank)
            shape += [next(source) for _ in range(rank)]
            advanced.append(place)
            continue
        extent = next(source)
        if part.keep:
            shape.append(extent)
        else:
            advanced.append(place)
    out: Node = x if tuple(shape) == x.shape else reshape(x, tuple(shape))
    apart = advanced and advanced[-1] - advanced[0] + 1 != len(advanced)
    if picked and apart:  # NumPy: advanced indices with something between them put their axes first
        out = transpose(out, (*picked, *(i for i in range(len(shape)) if i not in picked)))
    return out


__all__ = ["getitem"]
