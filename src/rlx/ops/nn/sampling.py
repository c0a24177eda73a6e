"""Interpolation at computed coordinates: which neighbours an axis reads, with which weights, and their sum.

Shared by resize, grid_sample, roi_align and deformable convolution. Coordinates are in elements: 0 is the
centre of the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.ir.dim import Dim
from rlx.ir.dtype import I64, DType
from rlx.ir.graph import Node
from rlx.ir.operand import Tensor
from rlx.ops.array.gather import gather
from rlx.ops.array.shape import reshape
from rlx.ops.math.elementwise import cast, floor, logical_and, maximum, minimum, mul, where
from rlx.ops.math.stats import dim_value
from rlx.ops.rules import op_call
from rlx.records import dataclass


@dataclass(frozen=True, eq=False)
class Tap:
    """One neighbour along an axis: its index (a whole number, maybe outside), its weight (None: 1), and where
    it counts (None: everywhere)."""

    index: Node
    weight: Node | None
    inside: Node | None = None


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
    """The same neighbour, which does not count where it is outside, even infinitely far."""
    return Tap(tap.index, tap.weight, is_inside(tap.index, d))


def interpolate(x: Node, taps: Sequence[Sequence[Tap]]) -> Node:
    """x [N, C, axes] at points [N, points], summed over all combinations of one tap per axis: [N, C, points].

    Indices outside are clamped: taps say what counts.
    """
    spatial = x.shape[2:]
    total: Dim = 1
    for d in spatial:
        total = total * d
    flat = reshape(x, (*x.shape[:2], total))
    combined: list[tuple[Node | None, Node | None, Node | None]] = [(None, None, None)]
    for d, row in zip(spatial, taps, strict=True):
        grown: list[tuple[Node | None, Node | None, Node | None]] = []
        for place, weight, inside in combined:
            for tap in row:
                index = clamp_index(tap.index, d)
                at = index if place is None else place * op_call("dim_value", dim=d, dtype=I64) + index
                counts = _joined(logical_and, inside, tap.inside)
                grown.append((at, _joined(mul, weight, tap.weight), counts))
        combined = grown
    out: Node | None = None
    for place, weight, inside in combined:
        assert place is not None
        part = gather(flat, place, axis=2, batch_dims=1)
        if weight is not None:
            part = part * cast(_for_channels(weight), dtype=x.dtype)
        if inside is not None:  # what is outside is not read: it may be infinite
            part = where(_for_channels(inside), part, 0.0)
        out = part if out is None else out + part
    assert out is not None
    return out


def _joined(combine: Callable[[Node, Node], Node], a: Node | None, b: Node | None) -> Node | None:
    """Both combined, where there are both."""
    return b if a is None else a if b is None else combine(a, b)


def _for_channels(values: Node) -> Node:
    """[N, points] next to [N, C, points]."""
    made: Node = reshape(values, (values.shape[0], 1, *values.shape[1:]))
    return made
