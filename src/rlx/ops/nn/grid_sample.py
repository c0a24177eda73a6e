"""Sampling an image at the points of a grid, and the grid of an affine map (ONNX GridSample, AffineGrid)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from rlx.errors import ShapeError
from rlx.ir.assume import require_at_least, require_equal
from rlx.ir.attr import Attr, boolean, dims, one_of
from rlx.ir.dim import Dim
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Level, Op, Sample, declare
from rlx.ir.operand import Operand, Tensor, of_one
from rlx.ir.types import Shape, TensorType
from rlx.ops.array.shape import broadcast_to, concat, reshape, slice_axis, transpose
from rlx.ops.math.contract import matmul
from rlx.ops.math.elementwise import abs, cast, equal, floor, logical_or, maximum, minimum, round, where
from rlx.ops.nn.sampling import Tap, extent_of, interpolate, positions, taps_at, zero_outside
from rlx.ops.rules import expand_in_f32, in_f32, is_real_float, need_dtype, same_dtype

MODES = ("linear", "nearest", "cubic")
PADDINGS = ("zeros", "border", "reflection")


@declare
class _grid_sample(Op):
    """x [N, C, axes] at the points of grid [N, out axes, coordinates], last axis of x first, in -1 .. 1."""

    name = "grid_sample"
    level = Level.HIR
    arity = 2
    attrs = {
        "mode": Attr(one_of(*MODES), "linear"),
        "padding": Attr(one_of(*PADDINGS), "zeros"),
        "align_corners": Attr(boolean, False),
    }

    def infer(self, x: TensorType, grid: TensorType, **how: object) -> TensorType:
        need_dtype(self.name, x, is_real_float)
        same_dtype(self.name, (x, grid))
        n = x.rank - 2
        if n < 1 or grid.rank != x.rank or grid.shape[-1] != n:
            raise ShapeError(
                f"grid_sample: x {x} is not [N, C, axes] or grid {grid} not [N, out axes, {max(n, 1)}]"
            )
        for d in x.shape[2:]:
            require_at_least(d, 1, f"grid_sample: x {x} has no pixels to read")
        batch = require_equal(
            x.shape[0], grid.shape[0], f"grid_sample: x {x} and grid {grid} differ in batch"
        )
        return x.with_shape((batch, x.shape[1], *grid.shape[1:-1]))

    def ref(self, x: np.ndarray, grid: np.ndarray, **how: object) -> np.ndarray:
        return np.asarray(_grid_ref(x, grid, **how))

    def expand(self, x: Node, grid: Node, **how: object) -> Node:
        made: Node = _grid_expand(x, grid, **how)
        return made

    def samples(self) -> list[Sample]:
        out = []
        for mode, padding, align in itertools.product(MODES, PADDINGS, (False, True)):
            how = {"mode": mode, "padding": padding, "align_corners": align}
            far = 1.9 if mode == "linear" else 1.3
            out.append(Sample((Arg("f32[1,2,4,3]"), Arg("f32[1,2,3,2]", -far, far, distinct=True)), how))
        out += [
            Sample((Arg("f32[2,1,5]"), Arg("f32[2,7,1]", -1.5, 1.5, distinct=True)), {}),
            Sample(
                (Arg("f32[1,1,2,3,2]"), Arg("f32[1,1,2,2,3]", -1.27, 1.13, distinct=True)),
                {"padding": "border"},
            ),
            Sample((Arg("f32[1,1,1,1]"), Arg("f32[1,1,1,2]", -0.5, 0.5)), {"align_corners": True}),
            Sample((Arg("f32[0,1,2,2]"), Arg("f32[0,1,3,2]")), {}, grad=False),
            Sample(
                (Arg("f32[1,2,n,m]"), Arg("f32[1,k,3,2]", -1.2, 1.2)), {"padding": "reflection"}, grad=False
            ),
            Sample((Arg("bf16[1,1,4,4]"), Arg("bf16[1,2,2,2]", -0.9, 0.9)), {}, grad=False),
        ]
        return out


def _place(g: Tensor, size: Tensor, align_corners: bool) -> Tensor:
    """From -1 .. 1 to elements: the corners are the first and last centres, or the outer edges."""
    return (g + 1.0) * ((size - 1.0) * 0.5) if align_corners else (g + 1.0) * (size * 0.5) - 0.5


def _reflect(c: Node, size: Tensor, align_corners: bool) -> Node:
    """Fold coordinates back at the borders until they are between them."""
    low = 0.0 if align_corners else -0.5
    span = size - 1.0 if align_corners else size
    if isinstance(span, float) and span == 0.0:
        return c * 0.0
    width = span if isinstance(span, float) else maximum(span, 1.0)
    from_low = abs(c - low)
    times = floor(from_low / width)
    rest = from_low - times * width
    even = equal(times, floor(times * 0.5) * 2.0)
    made: Node = where(even, rest + low, (low + span) - rest)
    return made


def _padded_taps(c: Node, d: Dim, mode: str, padding: str, align_corners: bool) -> list[Tap]:
    """Neighbours of coordinates along one axis, with what padding makes of those outside."""
    size = extent_of(d, c.dtype)
    c = round(c) if mode == "nearest" else c
    if padding == "border":
        low, high = (0.0, size - 1.0) if align_corners else (-0.5, size - 0.5)
        c = where(logical_or(c < low, c > high), minimum(maximum(c, 0.0), size - 1.0), c)
    elif padding == "reflection":
        c = _reflect(c, size, align_corners)
    taps = taps_at(c, mode)
    if padding == "zeros":
        return [zero_outside(t, d) for t in taps]
    if padding == "reflection":
        return [Tap(_reflect(t.index, size, align_corners), t.weight) for t in taps]
    return taps


@expand_in_f32
def _grid_expand(x: Node, grid: Node, *, mode: str, padding: str, align_corners: bool) -> Node:
    n = x.rank - 2
    points: Dim = 1
    for d in grid.shape[1:-1]:
        points = points * d
    taps = []
    for i, d in enumerate(x.shape[2:]):
        g = reshape(slice_axis(grid, grid.rank - 1, n - 1 - i, 1), (grid.shape[0], points))
        c = _place(g, extent_of(d, x.dtype), align_corners)
        taps.append(_padded_taps(c, d, mode, padding, align_corners))
    made: Node = reshape(interpolate(x, taps), (*x.shape[:2], *grid.shape[1:-1]))
    return made


def _ref_reflect(c: float, low: float, high: float) -> float:
    span = high - low
    if span == 0 or low <= c <= high:
        return c if span else low
    return low + span - math.fabs(math.fmod(math.fabs(c - low), 2 * span) - span)


def _ref_weight(t: float, mode: str) -> float:
    t = math.fabs(t)
    if mode == "linear":
        return max(1 - t, 0.0)
    a = -0.75
    return (
        (a + 2) * t**3 - (a + 3) * t**2 + 1 if t <= 1 else a * (t**3 - 5 * t**2 + 8 * t - 4) if t < 2 else 0.0
    )


def _ref_taps(g: float, d: int, mode: str, padding: str, align: bool) -> list[tuple[int, float]]:
    """Elements of an axis that one grid coordinate reads, with their weights."""
    c = float(_place(g, d, align))
    low, high = (0.0, d - 1.0) if align else (-0.5, d - 0.5)
    c = float(np.rint(c)) if mode == "nearest" else c
    if padding == "border" and not low <= c <= high:
        c = min(max(c, 0.0), d - 1.0)
    elif padding == "reflection" and math.isfinite(c):
        c = _ref_reflect(c, low, high)
    if not math.isfinite(c):  # outside of everything; without a value where it is folded back
        return [] if padding == "zeros" else [(0, 1.0 if mode == "nearest" else math.nan)]
    first = math.floor(c)
    if mode == "nearest":
        near = {int(c): 1.0}
    else:
        reach = range(first, first + 2) if mode == "linear" else range(first - 1, first + 3)
        near = {i: _ref_weight(i - c, mode) for i in reach}
    if padding == "zeros":
        return [(i, w) for i, w in near.items() if 0 <= i < d]
    if padding == "reflection":
        return [(int(_ref_reflect(i, low, high)), w) for i, w in near.items()]
    return [(min(max(i, 0), d - 1), w) for i, w in near.items()]


@in_f32
def _grid_ref(x: np.ndarray, grid: np.ndarray, *, mode: str, padding: str, align_corners: bool) -> np.ndarray:
    n = x.ndim - 2
    out = np.zeros((*x.shape[:2], *grid.shape[1:-1]), np.float64)
    for at in np.ndindex(*grid.shape[:-1]):
        rows = [
            _ref_taps(grid[at][n - 1 - i], x.shape[2 + i], mode, padding, align_corners) for i in range(n)
        ]
        for taps in itertools.product(*rows):
            value = x[(at[0], slice(None), *(i for i, _ in taps))].astype(np.float64)
            out[(at[0], slice(None), *at[1:])] += value * math.prod(w for _, w in taps)
    return out.astype(x.dtype)


@of_one
def grid_sample(
    x: Operand, grid: Operand, mode: str = "linear", padding: str = "zeros", align_corners: bool = False
) -> Tensor:
    """Sample x [N, C, axes] at grid [N, out axes, coordinates]: in -1 .. 1, the last axis of x first.

    mode: linear, nearest, cubic. padding: zeros, border, reflection.

    >>> grid_sample(np.array([[[1.0, 2.0, 3.0]]]), np.array([[[0.0], [0.5]]]), align_corners=True)
    array([[[2. , 2.5]]])
    """
    same = {"bilinear": "linear", "bicubic": "cubic"}
    return _grid_sample(x, grid, mode=same.get(mode, mode), padding=padding, align_corners=align_corners)


@declare
class _affine_grid(Op):
    """The grid [N, out axes, n] that maps points of the output through theta [N, n, n + 1]."""

    name = "affine_grid"
    level = Level.HIR
    arity = 1
    attrs = {"sizes": Attr(dims), "align_corners": Attr(boolean, False)}

    def infer(self, theta: TensorType, *, sizes: Shape, align_corners: bool) -> TensorType:
        need_dtype(self.name, theta, is_real_float)
        n = len(sizes)
        if theta.rank != 3 or theta.shape[1:] != (n, n + 1):
            raise ShapeError(
                f"affine_grid: theta {theta} is not [N, {n}, {n + 1}], for {n} axes of the output"
            )
        return theta.with_shape((theta.shape[0], *sizes, n))

    def ref(self, theta: np.ndarray, **how: object) -> np.ndarray:
        return np.asarray(_affine_ref(theta, **how))

    def expand(self, theta: Node, **how: object) -> Node:
        made: Node = _affine_expand(theta, **how)
        return made

    def samples(self) -> list[Sample]:
        return [
            Sample((Arg("f32[2,2,3]"),), {"sizes": (3, 4)}),
            Sample((Arg("f32[1,2,3]"),), {"sizes": (2, 5), "align_corners": True}),
            Sample((Arg("f32[1,3,4]"),), {"sizes": (2, 1, 3)}),
            Sample((Arg("f32[1,2,3]"),), {"sizes": (1, 2), "align_corners": True}),
            Sample((Arg("f32[0,2,3]"),), {"sizes": (2, 2)}, grad=False),
            Sample((Arg("f32[n,2,3]"),), {"sizes": (2, "n"), "align_corners": True}, grad=False),
            Sample((Arg("bf16[1,2,3]"),), {"sizes": (2, 2)}, grad=False),
        ]


@in_f32
def _affine_ref(theta: np.ndarray, *, sizes: Sequence[int], align_corners: bool) -> np.ndarray:
    lines = []
    for d in sizes:
        wide = np.linspace(-1, 1, d) if align_corners and d > 1 else (np.arange(d) * 2 + 1) / d - 1
        lines.append(wide)
    points = np.stack([*reversed(np.meshgrid(*lines, indexing="ij")), np.ones(tuple(sizes))], -1)
    return np.asarray(np.einsum("nij,...j->n...i", theta.astype(np.float64), points).astype(theta.dtype))


@expand_in_f32
def _affine_expand(theta: Node, *, sizes: Shape, align_corners: bool) -> Node:
    n = len(sizes)
    parts = []
    for i, d in reversed([*enumerate(sizes)]):
        size, at = extent_of(d, theta.dtype), positions(d, theta.dtype)
        if not align_corners:
            line = (at * 2.0 + 1.0) / size - 1.0
        elif isinstance(size, float):
            line = at * (2.0 / (size - 1.0)) - 1.0 if size > 1.0 else at
        else:  # a single point is in the middle
            line = where(size > 1.0, at * 2.0 / maximum(size - 1.0, 1.0) - 1.0, at)
        parts.append(broadcast_to(reshape(line, (d, *(1,) * (n - 1 - i), 1)), (*sizes, 1)))
    parts.append(broadcast_to(theta.graph.constant(np.ones((), theta.dtype.np)), (*sizes, 1)))
    total: Dim = 1
    for d in sizes:
        total = total * d
    points = reshape(concat(parts, n), (total, n + 1))
    grid = matmul(points, transpose(theta, (0, 2, 1)))  # [N, points, n]
    made: Node = reshape(cast(grid, dtype=theta.dtype), (theta.shape[0], *sizes, n))
    return made


@of_one
def affine_grid(theta: Operand, size: Sequence[Dim], align_corners: bool = False) -> Tensor:
    """The grid for `grid_sample` of affine maps theta [N, n, n + 1], for an output of size (N, C, axes).

    >>> affine_grid(np.array([[[1.0, 0, 0], [0, 1, 0]]]), (1, 1, 1, 2))
    array([[[[-0.5,  0. ],
             [ 0.5,  0. ]]]])
    """
    return _affine_grid(theta, sizes=tuple(size)[2:], align_corners=align_corners)
