"""Slices whose place is computed: dynamic_slice and dynamic_update_slice.

Start indices are scalar operands. As in XLA a start is clamped so that the slice is inside: nothing is read
or written outside, and no start is an error. Negative starts do not count from the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlx.errors import ShapeError, TypeMismatchError, current_where
from rlx.ir.assume import require_at_least, require_equal
from rlx.ir.attr import Attr, AttrValue, dims, ints
from rlx.ir.dim import Constraint, Dim, known_eq, known_le
from rlx.ir.dtype import I64
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Op, Sample, declare
from rlx.ir.operand import Operand, Tensor, of_one
from rlx.ir.types import Shape, TensorType
from rlx.kernel.form import Form, Map, Scatter
from rlx.kernel.scalar import Scalar, call, const, load, size
from rlx.kernel.scalar import axes as space_axes
from rlx.ops.array.gather import gather
from rlx.ops.array.scatter import scatter
from rlx.ops.array.shape import broadcast_to, reshape, slice_axis
from rlx.ops.math.elementwise import cast, maximum, minimum
from rlx.ops.math.stats import dim_value
from rlx.ops.rules import (
    check_axes,
    lift_all,
    normal_axis,
    op_call,
    same_dtype,
    shape_of,
    shift,
)


def _check(
    name: str, x: TensorType, moved: Sequence[int], sizes: Shape, starts: Sequence[TensorType]
) -> None:
    check_axes(name, moved, x.rank)
    if not len(moved) == len(sizes) == len(starts):
        raise ShapeError(f"{name}: {len(moved)} axes of {x} need as many sizes and starts")
    for t in starts:
        if t.rank or t.dtype is not I64:
            raise TypeMismatchError(f"{name}: a start is {t}; it must be a scalar i64[] for each axis")
    for a, n in zip(moved, sizes, strict=True):
        require_at_least(x.shape[a], n, f"{name}: a slice of {n} does not fit axis {a} of {x}")


def _offsets(x: TensorType, moved: Sequence[int], sizes: Shape, first: int) -> dict[int, Scalar]:
    """The clamped start of each moved axis; starts are operands from number `first` on."""
    out = {}
    for k, (a, n) in enumerate(zip(moved, sizes, strict=True)):
        room = size(x.shape[a] - n)
        out[a] = call("minimum", call("maximum", load(first + k, (), I64), const(0)), room)
    return out


def _box(
    shape: Sequence[int], moved: Sequence[int], sizes: Sequence[int], starts: Sequence[np.ndarray]
) -> Tensor:
    """The same as NumPy slices."""
    out = [slice(0, n) for n in shape]
    for a, n, s in zip(moved, sizes, starts, strict=True):
        low = min(max(int(s), 0), shape[a] - n)
        out[a] = slice(low, low + n)
    return tuple(out)


def _places(start: Node, extent: Dim, n: Dim) -> Node:
    """Positions [batch, n] of slices whose starts differ by batch: clamped start + 0, 1, ..."""
    room = op_call("dim_value", dim=extent - n, dtype=I64)
    low = reshape(minimum(maximum(start, 0), room), (start.shape[0], 1))
    made: Node = low + op_call("iota", shape=(n,), axis=0)
    return made


@declare
class _dynamic_slice(Op):
    """`sizes` elements along `axes` (the other axes whole) from starts given as scalar operands, clamped."""

    name = "dynamic_slice"
    attrs = {"axes": Attr(ints), "sizes": Attr(dims)}

    def infer(self, x: TensorType, *starts: TensorType, axes: Sequence[int], sizes: Shape) -> TensorType:
        _check(self.name, x, axes, sizes, starts)
        given = dict(zip(axes, sizes, strict=True))
        return x.with_shape(tuple(given.get(i, d) for i, d in enumerate(x.shape)))

    def ref(
        self, x: np.ndarray, *starts: np.ndarray, axes: Sequence[int], sizes: Sequence[int]
    ) -> np.ndarray:
        return np.asarray(x[_box(x.shape, axes, sizes, starts)])

    def vjp(
        self, g: Node, y: Node, x: Node, *starts: Node, axes: Sequence[int], sizes: Shape
    ) -> list[Node | None]:
        zeros = broadcast_to(g.graph.constant(np.zeros((), g.dtype.np)), x.shape)
        return [_dynamic_update_slice(zeros, g, *starts, axes=axes), *(None for _ in starts)]

    def batch(self, flags: Sequence[bool], x: Node, *starts: Node, axes: Sequence[int], sizes: Shape) -> Node:
        if not any(flags[1:]):
            made: Node = _dynamic_slice(x, *starts, axes=shift(axes), sizes=sizes)
            return made
        x, *starts_ = lift_all(flags, (x, *starts))
        for a, n, start in zip(axes, sizes, starts_, strict=True):
            x = gather(x, _places(start, x.shape[a + 1], n), a + 1, batch_dims=1)
        return x

    def lower(self, x: TensorType, *starts: TensorType, axes: Sequence[int], sizes: Shape) -> Form:
        out = self.infer(x, *starts, axes=axes, sizes=sizes)
        offsets = _offsets(x, axes, sizes, 1)
        at = [i + offsets[a] if a in offsets else i for a, i in enumerate(space_axes(x.rank))]
        return Map(out.shape, load(0, at, x.dtype))

    def cost(self, x: TensorType, *starts: TensorType, axes: Sequence[int], sizes: Shape) -> Dim:
        return 0

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg("f32[5,4]"), np.array(1), np.array(2)), {"axes": (0, 1), "sizes": (3, 2)}),
            Sample((Arg("f32[2,7]"), np.array(100)), {"axes": (1,), "sizes": (3,)}),
            Sample((Arg("f32[2,7]"), np.array(-2)), {"axes": (1,), "sizes": (7,)}),
            Sample((Arg("f32[6]"), np.array(3)), {"axes": (0,), "sizes": (0,)}),
            Sample((Arg("f32[3]"),), {"axes": (), "sizes": ()}),
            Sample((Arg("f32[n,m]"), np.array(2)), {"axes": (1,), "sizes": (1,)}, grad=False),
        ]


@declare
class _dynamic_update_slice(Op):
    """x with a slice along `axes` replaced by `update` at clamped starts; in place where x dies here."""

    family = "update"
    name = "dynamic_update_slice"
    attrs = {"axes": Attr(ints)}

    def _sizes(self, update: TensorType | Node, moved: Sequence[int]) -> Shape:
        return tuple(update.shape[a] for a in moved)

    def infer(
        self, x: TensorType, update: TensorType, *starts: TensorType, axes: Sequence[int]
    ) -> TensorType:
        same_dtype(self.name, (x, update))
        if x.rank != update.rank:
            raise ShapeError(f"{self.name}: {x} and its update {update} must have the same rank")
        check_axes(self.name, axes, x.rank)
        _check(self.name, x, axes, self._sizes(update, axes), starts)
        for i, (d, n) in enumerate(zip(x.shape, update.shape, strict=True)):
            if i not in axes:
                require_equal(d, n, f"{self.name}: {x} and {update} differ on axis {i}, which has no start")
        return x

    def ref(self, x: np.ndarray, update: np.ndarray, *starts: np.ndarray, axes: Sequence[int]) -> np.ndarray:
        out = np.array(x)
        out[_box(x.shape, axes, [update.shape[a] for a in axes], starts)] = update
        return out

    def vjp(
        self, g: Node, y: Node, x: Node, update: Node, *starts: Node, axes: Sequence[int]
    ) -> list[Node | None]:
        zeros = broadcast_to(g.graph.constant(np.zeros((), g.dtype.np)), update.shape)
        kept = _dynamic_update_slice(g, zeros, *starts, axes=axes)
        written = _dynamic_slice(g, *starts, axes=axes, sizes=self._sizes(update, axes))
        return [kept, written, *(None for _ in starts)]

    def batch(self, flags: Sequence[bool], x: Node, update: Node, *starts: Node, axes: Sequence[int]) -> Node:
        if not any(flags[2:]):
            x, update = lift_all(flags[:2], (x, update))
            made: Node = _dynamic_update_slice(x, update, *starts, axes=shift(axes))
            return made
        x, update, *starts_ = lift_all(flags, (x, update, *starts))
        return self._write(x, update, starts_, shift(axes))

    def _write(self, x: Node, update: Node, starts: Sequence[Node], moved: Sequence[int]) -> Node:
        """Every batch at its own starts: the first axis by scatter, the others inside what it replaces."""
        if not moved:
            return update
        a, places = moved[0], _places(starts[0], x.shape[moved[0]], update.shape[moved[0]])
        if len(moved) > 1:
            update = self._write(gather(x, places, a, batch_dims=1), update, starts[1:], moved[1:])
        made: Node = scatter(x, places, update, a, batch_dims=1)
        return made

    def lower(self, x: TensorType, update: TensorType, *starts: TensorType, axes: Sequence[int]) -> Form:
        offsets = _offsets(x, axes, self._sizes(update, axes), 2)
        at = space_axes(x.rank)
        index = tuple(i + offsets[a] if a in offsets else i for a, i in enumerate(at))
        return Scatter(0, x.shape, update.shape, index, load(1, at, x.dtype), "set", is_box=x.rank > 0)

    def cost(self, x: TensorType, update: TensorType, *starts: TensorType, axes: Sequence[int]) -> Dim:
        return 0

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg("f32[5,4]"), Arg("f32[3,2]"), np.array(1), np.array(2)), {"axes": (0, 1)}),
            Sample((Arg("f32[2,7]"), Arg("f32[2,3]"), np.array(6)), {"axes": (1,)}),
            Sample((Arg("f32[4]"), Arg("f32[0]"), np.array(1)), {"axes": (0,)}),
            Sample((Arg("f32[3]"), Arg("f32[3]"), np.array(-1)), {"axes": (0,)}),
            Sample((Arg("i32[3,2]"), Arg("i32[3,1]"), np.array(1)), {"axes": (1,)}, grad=False),
            Sample((Arg("f32[n,m]"), Arg("f32[n,2]"), np.array(2)), {"axes": (1,)}, grad=False),
        ]


def _start(value: Operand) -> Operand:
    """A start as an i64 scalar: a node is cast, a number becomes an array."""
    if isinstance(value, Node):
        return value if value.dtype is I64 else cast(value, dtype=I64)
    array = np.asarray(value)
    return array.astype(np.int64) if array.dtype.kind in "iu" else array


def _by_axis(
    name: str, x: Operand, given: Sequence[int] | None, *columns: Operand | Sequence[Dim]
) -> list[tuple[AttrValue, ...]]:
    """Rows (axis, start, ...) in order of axes."""
    rank = len(shape_of(x))
    moved = list(range(rank)) if given is None else [normal_axis(name, a, rank) for a in given]
    lists = [list(c) if isinstance(c, (list, tuple, np.ndarray)) else [c] for c in columns]
    for items in lists:
        if len(items) != len(moved):
            raise ShapeError(f"{name}: {len(moved)} axes need as many starts and sizes, got {len(items)}")
    return sorted(zip(moved, *lists, strict=True), key=lambda row: row[0])


@of_one
def dynamic_slice(
    x: Operand, starts: Operand, sizes: Sequence[Dim], axes: Sequence[int] | None = None
) -> Tensor:
    """A slice of given sizes at computed starts, one per axis of `axes` (all by default).

    Starts are integers or scalar nodes; they are clamped so that the slice is inside x.

    >>> dynamic_slice(np.arange(6), [3], [2]), dynamic_slice(np.arange(6), [99], [2])
    (array([3, 4]), array([4, 5]))
    """
    rows = _by_axis("dynamic_slice", x, axes, starts, sizes)
    moved, ordered = tuple(row[0] for row in rows), tuple(row[2] for row in rows)
    return _dynamic_slice(x, *(_start(row[1]) for row in rows), axes=moved, sizes=ordered)


@of_one
def dynamic_update_slice(
    x: Operand, update: Operand, starts: Operand, axes: Sequence[int] | None = None
) -> Tensor:
    """x with a slice replaced by `update` at computed starts, one per axis of `axes` (all by default).

    Starts are clamped as in `dynamic_slice`. On a state this is an append in place.

    >>> dynamic_update_slice(np.zeros(4), np.array([1.0, 2.0]), [1])
    array([0., 1., 2., 0.])
    """
    rows = _by_axis("dynamic_update_slice", x, axes, starts)
    have, new = shape_of(x), shape_of(update)
    if len(have) == len(new):  # a whole axis has only one place
        rows = [row for row in rows if known_eq(have[row[0]], new[row[0]]) is not True]
    return _dynamic_update_slice(x, update, *(_start(s) for _, s in rows), axes=tuple(a for a, _ in rows))


def append(cache: Operand, rows: Operand, at: Dim, axis: int = 0) -> tuple[Tensor, Tensor]:
    """A cache with `rows` written at position `at` of an axis, and the part up to their end, which is filled.

    On a state the rows are written in place, and the filled part is a view: both cost no more than the rows.
    That they fit is proved, or becomes a guard.

    >>> full, filled = append(np.zeros(5), np.array([1.0, 2.0]), 1)
    >>> full, filled
    (array([0., 1., 2., 0., 0.]), array([0., 1., 2.]))
    """
    have, new = shape_of(cache), shape_of(rows)
    axis = normal_axis("append", axis, len(have))
    end = at + new[axis]
    fits = known_le(end, have[axis])
    if fits is False:
        raise ShapeError(f"append: {new[axis]} rows at {at} do not fit axis {axis} of size {have[axis]}")
    graph = cache.graph if isinstance(cache, Node) else None
    if fits is None and graph is not None:
        graph.assume(Constraint("min", have[axis], end, current_where()))
    if isinstance(at, int) or graph is None:
        start: Operand = at
    else:
        with graph.building():
            start = dim_value(at)
    updated = dynamic_update_slice(cache, rows, [start], axes=(axis,))
    return updated, slice_axis(updated, axis, 0, end)


__all__ = ["append", "dynamic_slice", "dynamic_update_slice"]
