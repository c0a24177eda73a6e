"""Interpolation at computed coordinates: which neighbours an axis reads, with which weights, and their sum.

Shared by resize, grid_sample, roi_align and deformable convolution. Coordinates are in elements: 0 is the
centre of the first one.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.ir.dim import Dim
from rlx.ir.dtype import I64, DType
from rlx.ir.graph import Node
from rlx.ir.operand import Tensor
from rlx.ops.array.gather import gather
from rlx.ops.array.shape import reshape
from rlx.ops.math.elementwise import cast, floor, logical_and, maximum, minimum, where
from rlx.ops.math.stats import dim_value
from rlx.ops.rules import op_call
from rlx.records import dataclass


@dataclass(frozen=True, eq=False)
class Tap:
    """One neighbour along an axis: its index (a whole number, maybe outside) and its weight (None: 1)."""

    index: Node
    weight: Node | None


def extent_of(d: Dim, dtype: DType) -> Tensor:
    """A size as a number to compute with: a float, or a scalar node where it is symbolic."""
    return float(d) if isinstance(d, int) else dim_value(d, dtype)


def positions(n: Dim, dtype: DType) -> Node:
    """0, 1, ... n - 1."""
    made: Node = op_call("iota", shape=(n,), axis=0, dtype=dtype)
    return made


def cubic_weights(f: Node, a: float) -> list[Node]:
    """Keys' weights of the elements at -1, 0, 1, 2 around a fraction f."""

    def near(t: Node) -> Node:
        return ((a + 2) * t - (a + 3)) * t * t + 1.0

    def far(t: Node) -> Node:
        return ((t - 5.0) * t + 8.0) * t * a - 4 * a

    return [far(f + 1.0), near(f), near(1.0 - f), far(2.0 - f)]


def taps_at(c: Node, mode: str, cubic_a: float = -0.75) -> list[Tap]:
    """Neighbours of coordinates c and their weights; `nearest` takes c as it is, rounded before."""
    if mode == "nearest":
        return [Tap(c, None)]
    base = floor(c)
    f = c - base
    if mode == "linear":
        return [Tap(base, 1.0 - f), Tap(base + 1.0, f)]
    return [Tap(base + float(i - 1), w) for i, w in enumerate(cubic_weights(f, cubic_a))]


def clamp_index(index: Node, d: Dim) -> Node:
    """A whole number brought into 0 .. d - 1, as i64."""
    last = extent_of(d, index.dtype) - 1.0
    made: Node = cast(minimum(maximum(index, 0.0), last), dtype=I64)
    return made


def is_inside(index: Node, d: Dim) -> Node:
    """Whether an index is in 0 .. d - 1."""
    made: Node = logical_and(index >= 0.0, index <= extent_of(d, index.dtype) - 1.0)
    return made


def zero_outside(tap: Tap, d: Dim) -> Tap:
    """The same neighbour with weight 0 where it is outside, even infinitely far."""
    inside = is_inside(tap.index, d)
    if tap.weight is None:
        return Tap(tap.index, cast(inside, dtype=tap.index.dtype))
    return Tap(tap.index, where(inside, tap.weight, 0.0))


def interpolate(x: Node, taps: Sequence[Sequence[Tap]]) -> Node:
    """x [N, C, axes] at points [N, points], summed over all combinations of one tap per axis: [N, C, points].

    Indices outside are clamped: weights say what counts.
    """
    spatial = x.shape[2:]
    total: Dim = 1
    for d in spatial:
        total = total * d
    flat = reshape(x, (*x.shape[:2], total))
    combined: list[tuple[Node | None, Node | None]] = [(None, None)]
    for d, row in zip(spatial, taps, strict=True):
        grown: list[tuple[Node | None, Node | None]] = []
        for place, weight in combined:
            for tap in row:
                index = clamp_index(tap.index, d)
                at = index if place is None else place * op_call("dim_value", dim=d, dtype=I64) + index
                both = tap.weight if weight is None else weight if tap.weight is None else weight * tap.weight
                grown.append((at, both))
        combined = grown
    out: Node | None = None
    for place, weight in combined:
        assert place is not None
        part = gather(flat, place, axis=2, batch_dims=1)
        if weight is not None:
            part = part * cast(reshape(weight, (weight.shape[0], 1, *weight.shape[1:])), dtype=x.dtype)
        out = part if out is None else out + part
    assert out is not None
    return out
