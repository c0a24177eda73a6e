"""Slice: at places that are known, that move with the steps of a loop, or that only the data know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from rlx import ops
from rlx.errors import ModelImportError, ShapeError, current_where
from rlx.frontend.onnx.call import Call
from rlx.frontend.onnx.registry import onnx_op
from rlx.frontend.onnx.sizes.arithmetic import UNKNOWN, Quotient, Unknown
from rlx.frontend.onnx.value import Outputs
from rlx.ir.dim import Constraint, Dim, Expr, ceildiv, dim_max, dim_min, known_le
from rlx.ir.graph import Node
from rlx.ir.op import get_op
from rlx.ops.rules import normal_axis

FAR = 10**9
"""Exporters write ends of this size or more for «to the end»; no axis is as long."""


def slice_range(n: Call, start: Dim, end: Dim, step: int, d: Dim) -> tuple[Dim, Dim]:
    """(first, count) of Python's slice rule for an axis of size d."""
    if step > 0:
        first = _bounded(n, start, d, 0, d)
        last = d if isinstance(end, int) and end >= FAR else _bounded(n, end, d, 0, d)
        span = last - first
    else:
        first = d - 1 if isinstance(start, int) and start >= FAR else _bounded(n, start, d, -1, d - 1)
        last = -1 if isinstance(end, int) and end <= -FAR else _bounded(n, end, d, -1, d - 1)
        span = first - last
    return first, dim_max(ceildiv(span, abs(step)), 0)


def _bounded(n: Call, at: Dim, d: Dim, low: Dim, high: Dim) -> Dim:
    """A place counted from the end if negative, kept within bounds. Where sizes decide its sign, it is
    assumed to count from the end if it is a size subtracted (the -n of x[-n:]), else from the start: runs
    with other sizes are refused. Of the step of a loop nothing is assumed: each has its own sign."""
    if n.importer.known.is_step(at) and known_le(0, at) is not True and known_le(at, -1) is not True:
        raise ModelImportError(f"its place {at} counts from the end in some steps of the loop around it")
    if known_le(at, 0) is True and at != 0:
        if known_le(at, -1) is None:
            if isinstance(at, Expr) and any(c > 0 for _, c in at.terms):  # a difference that may well be 0
                return dim_max(at + d * dim_min(-at, 1), low)
            n.graph.assume(Constraint("min", -at, 1, current_where()))
        return d - dim_min(-at, d - low)
    if known_le(0, at) is None:
        n.graph.assume(Constraint("min", at, 0, current_where()))
    return dim_min(at, high)


@onnx_op("Slice")
def slice_by_attributes(n: Call) -> Outputs:
    starts, ends = n.attr("starts"), n.attr("ends")
    axes = n.attr("axes", None)
    return sliced(n, starts, ends, range(len(starts)) if axes is None else axes, [1] * len(starts))


@onnx_op("Slice", since=10)
def slice_(n: Call) -> Outputs:
    starts, ends = _places(n, 1), _places(n, 2)
    axes = n.ints(3) if n.value(3) is not None else tuple(range(len(starts)))
    steps = n.ints(4) if n.value(4) is not None else (1,) * len(starts)
    return sliced(n, starts, ends, axes, steps)


Place: TypeAlias = Dim | Unknown | Quotient
"""Where a slice begins or ends: a number, a size, or what only the data say."""


def _places(n: Call, i: int) -> list[Place]:
    """Places of a slice, as far as they are known."""
    found = n.partial(n[i])
    if found is None:
        count = n[i].tensor.numel
        if not isinstance(count, int):
            n.demand(n[i], f"the number of places in its input {i}")
        assert isinstance(count, int)
        return [UNKNOWN] * count
    return [x if isinstance(x, (Expr, Unknown, Quotient)) else int(x) for x in found.reshape(-1)]


def sliced(
    n: Call, starts: Sequence[Place], ends: Sequence[Place], axes: Sequence[int], steps: Sequence[int]
) -> Node:
    """ONNX Slice of some axes: what is known first, then what moves, then what the data decide."""
    x = n[0]
    first: list[Dim] = [0] * x.rank
    sizes: list[Dim] = list(x.shape)
    step_by = [1] * x.rank
    moving: list[tuple[int, Node, Dim]] = []
    by_data: list[tuple[int, int, int]] = []
    for i, (start, end, axis, step) in enumerate(zip(starts, ends, axes, steps, strict=True)):
        at = normal_axis("Slice", axis, x.rank)
        if step == 0:
            raise ShapeError("a step of 0 is not allowed")
        if isinstance(start, (Unknown, Quotient)) or isinstance(end, (Unknown, Quotient)):
            by_data.append((i, at, step))
            continue
        begin, size = slice_range(n, start, end, step, x.shape[at])
        n.refuse_step(size, "the size of its result")
        if n.importer.known.is_step(begin):
            moving.append((at, _start(n, i, start, begin, step, x.shape[at]), size))
        else:
            first[at], sizes[at], step_by[at] = begin, size, step
    y = get_op("slice")(x, starts=tuple(first), sizes=tuple(sizes), steps=tuple(step_by))
    if moving:
        at_axes, at_starts, at_sizes = zip(*moving, strict=True)
        y = ops.dynamic_slice(y, list(at_starts), list(at_sizes), at_axes)
    for i, at, step in by_data:
        y = _cut_by_data(n, y, i, at, step)
    return y


def _start(n: Call, i: int, start: Dim, begin: Dim, step: int, d: Dim) -> Node:
    """Where a slice begins that moves with the steps of a loop, as a value."""
    if step != 1:
        raise ModelImportError(f"it moves with the steps of the loop around it, by strides of {step}, not 1")
    if begin == start:
        return _element(n, 1, i)
    if begin == start + d:
        made: Node = _element(n, 1, i) + ops.dim_value(d, "i64")
        return made
    raise ModelImportError(
        f"its start {start} may are outside the axis of {d} in some steps of the loop around"
    )


def _element(n: Call, operand: int, i: int) -> Node:
    made: Node = ops.cast(ops.reshape(ops.slice_axis(ops.reshape(n[operand], (-1,)), 0, i, 1), ()), "i64")
    return made


def _cut_by_data(n: Call, x: Node, i: int, axis: int, step: int) -> Node:
    """A slice between places that only the data know: its size is found by the run, at most that of x."""
    d = x.shape[axis]
    size = ops.dim_value(d, "i64")
    start, end = (_element(n, operand, i) for operand in (1, 2))
    start, end = (ops.where(ops.less(at, 0), at + size, at) for at in (start, end))
    if step < 0:  # the other way round, places count from the end
        x = ops.flip(x, axis)
        start, end = size - 1 - ops.minimum(start, size - 1), size - 1 - ops.maximum(end, -1)
    start = ops.maximum(start, 0)
    at = ops.iota((d,))
    inside = ops.logical_and(ops.greater_equal(at, start), ops.less(at, end))
    if abs(step) > 1:
        inside = ops.logical_and(inside, ops.equal(ops.mod(at - start, abs(step)), 0))
    return ops.compress(inside, x, axis)
