"""Pooling over regions given by real coordinates (ONNX RoiAlign)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rlx.errors import ShapeError
from rlx.ir.assume import require_equal
from rlx.ir.attr import Attr, AttrValue, boolean, integer, ints, one_of, real
from rlx.ir.dim import Dim, ceildiv
from rlx.ir.dtype import I64
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Level, Op, Sample, declare
from rlx.ir.operand import Operand, Tensor, of_one
from rlx.ir.types import TensorType
from rlx.ops.array.addressing import OutOfRangeError
from rlx.ops.array.gather import gather
from rlx.ops.array.shape import reshape, slice_axis
from rlx.ops.math.elementwise import cast, ceil, floor, logical_and, maximum, minimum
from rlx.ops.math.reduce import max as max_over
from rlx.ops.math.reduce import sum as sum_over
from rlx.ops.math.stats import dim_value
from rlx.ops.nn.sampling import extent_of, positions
from rlx.ops.rules import expand_in_f32, in_f32, is_real_float, need_dtype, op_call, same_dtype


def most_samples(size: Dim, bins: int) -> Dim:
    """Samples that a bin of a region as large as the image needs: one for each element that it covers."""
    return ceildiv(size, bins) + 1


@declare
class _roi_align(Op):
    """Regions [R, 4] (x1, y1, x2, y2) of images [N, C, H, W], each cut into bins [R, C, bins].

    A bin holds `sampling_ratio` samples along each axis, each blended from four elements. With 0 it is one
    for each element that the bin covers, at most as many as a bin of a region as large as the image needs.
    """

    name = "roi_align"
    level = Level.HIR
    arity = 3
    attrs = {
        "bins": Attr(ints),
        "sampling_ratio": Attr(integer, 0),
        "spatial_scale": Attr(real, 1.0),
        "half_pixel": Attr(boolean, True),
        "mode": Attr(one_of("avg", "max"), "avg"),
    }

    def infer(self, x: TensorType, rois: TensorType, images: TensorType, **how: AttrValue) -> TensorType:
        need_dtype(self.name, x, is_real_float)
        same_dtype(self.name, (x, rois))
        if x.rank != 4 or rois.rank != 2 or rois.shape[1] != 4 or images.rank != 1 or not images.dtype.is_int:
            raise ShapeError(
                f"roi_align: x {x} is not [N, C, H, W], rois {rois} not [R, 4] or images {images} not i64[R]"
            )
        if len(how["bins"]) != 2 or any(b < 1 for b in how["bins"]) or how["sampling_ratio"] < 0:
            raise ShapeError(
                f"roi_align: bins {how['bins']} are not two positive numbers, or sampling_ratio is negative"
            )
        count = require_equal(
            rois.shape[0], images.shape[0], f"roi_align: {rois} and {images} differ in number"
        )
        if 0 in x.shape[2:]:
            raise ShapeError(f"roi_align: x {x} has no elements to sample; give images of at least 1 x 1")
        return x.with_shape((count, x.shape[1], *how["bins"]))

    def ref(self, x: np.ndarray, rois: np.ndarray, images: np.ndarray, **how: object) -> np.ndarray:
        return np.asarray(_roi_ref(x, rois, images, **how))

    def expand(self, x: Node, rois: Node, images: Node, **how: object) -> Node:
        made: Node = _roi_expand(x, rois, images, **how)
        return made

    def samples(self) -> list[Sample]:
        rois = np.array([[0.3, 0.6, 4.1, 3.2], [1.2, 0.1, 2.7, 4.3], [-2.3, 3.3, 9.1, 3.9]], np.float32)
        images = np.array([1, 0, 1])
        x = Arg("f32[2,2,5,6]", distinct=True)
        out = []
        for mode in ("avg", "max"):
            for half in (False, True):
                how = {"bins": (2, 3), "mode": mode, "half_pixel": half}
                out.append(Sample((x, rois, images), {**how, "sampling_ratio": 2}, grad=mode == "avg"))
                out.append(Sample((x, rois[:2], images[:2]), {**how, "spatial_scale": 0.5}, grad=False))
        out += [
            Sample((x, rois[:0], images[:0]), {"bins": (1, 1)}, grad=False),
            Sample((Arg("f32[1,1,m,m]"), rois[:1] / 2, images[1:2]), {"bins": (2, 2)}, grad=False),
            Sample((Arg("f32[1,1,4,4]"), Arg("f32[n,4]", 0.0, 3.0), Arg("i64[n]", 0, 0)),
                   {"bins": (2, 1), "sampling_ratio": 1}, grad=False),
        ]  # fmt: skip
        return out


def _line(
    rois: Node, axis: int, d: Dim, bins: int, **how: AttrValue
) -> tuple[list[tuple[Node, Node]], Node, Node, Node]:
    """Along one axis: two (index, weight) pairs [R, bins, samples], which samples are read, which count, and
    how many [R].
    """
    own = rois.dtype
    ends = [reshape(slice_axis(rois, 1, i, 1), (rois.shape[0],)) for i in (1 - axis, 3 - axis)]
    shift = 0.5 if how["half_pixel"] else 0.0
    start, end = (e * how["spatial_scale"] - shift for e in ends)
    length = end - start if how["half_pixel"] else maximum(end - start, 1.0)
    step = length / float(bins)
    ratio = how["sampling_ratio"]
    samples: Dim = ratio or most_samples(d, bins)
    if ratio:
        fixed = rois.graph.constant(np.asarray(ratio, own.np))
        count = op_call("broadcast_to", fixed, shape=step.shape)
    else:  # none in a region that ends before it starts, or that is not a number
        count = op_call("where", step > 0.0, minimum(ceil(step), extent_of(samples, own)), 0.0)

    def column(v: Node) -> Node:
        return reshape(v, (v.shape[0], 1, 1))

    at = positions(samples, own)
    bin_ = reshape(positions(bins, own), (bins, 1))
    c = column(start) + (bin_ + (at + 0.5) / column(maximum(count, 1.0))) * column(step)
    size = extent_of(d, own)
    used = logical_and(logical_and(c >= -1.0, c <= size), at < column(count))
    c = op_call("where", used, minimum(maximum(c, 0.0), size - 1.0), 0.0)
    low = floor(c)
    part = c - low
    high = minimum(low + 1.0, size - 1.0)
    pairs = [(cast(low, dtype=I64), 1.0 - part), (cast(high, dtype=I64), part)]
    return pairs, used, at < column(count), count


@expand_in_f32
def _roi_expand(x: Node, rois: Node, images: Node, *, bins: Sequence[int], mode: str, **how: object) -> Node:
    channels, height, width = x.shape[1:]
    ys, y_used, y_counts, y_count = _line(rois, 0, height, bins[0], **how)
    xs, x_used, x_counts, x_count = _line(rois, 1, width, bins[1], **how)
    total: Dim = x.tensor.numel
    flat = reshape(x, (total,))
    # points: [R, C, bins y, samples y, bins x, samples x]
    image = reshape(cast(images, dtype=I64), (images.shape[0], 1)) * dim_value(channels)
    plane = image + op_call("iota", shape=(channels,), axis=0)
    base = reshape(plane * dim_value(height * width), (*plane.shape, 1, 1, 1, 1))

    def vertical(v: Node) -> Node:
        return reshape(v, (v.shape[0], 1, v.shape[1], v.shape[2], 1, 1))

    def horizontal(v: Node) -> Node:
        return reshape(v, (v.shape[0], 1, 1, 1, v.shape[1], v.shape[2]))

    used = logical_and(vertical(y_used), horizontal(x_used))  # elsewhere nothing is read: it may be infinite
    parts = []
    for row, row_weight in ys:
        for column, column_weight in xs:
            place = base + vertical(row) * dim_value(width) + horizontal(column)
            weight = vertical(row_weight) * horizontal(column_weight)
            parts.append(op_call("where", used, gather(flat, place) * weight, 0.0))
    made: Node
    if mode == "avg":
        summed = sum_over(parts[0] + parts[1] + parts[2] + parts[3], axis=(3, 5))
        made = summed / reshape(maximum(y_count * x_count, 1.0), (x_count.shape[0], 1, 1, 1))
        return made
    best = maximum(maximum(parts[0], parts[1]), maximum(parts[2], parts[3]))
    lowest = x.graph.constant(np.asarray(-np.inf, x.dtype.np))
    counted = logical_and(vertical(_each(y_counts, bins[0])), horizontal(_each(x_counts, bins[1])))
    found = max_over(op_call("where", counted, best, lowest), axis=(3, 5))
    made = op_call("where", reshape(y_count * x_count > 0.0, (x_count.shape[0], 1, 1, 1)), found, 0.0)
    return made


def _each(counts: Node, bins: int) -> Node:
    """[R, 1, samples] repeated for each bin."""
    made: Node = op_call("broadcast_to", counts, shape=(counts.shape[0], bins, counts.shape[2]))
    return made


def _ref_corners(c: float, size: int) -> list[tuple[int, float]]:
    """Elements next to a coordinate with their weights; none outside."""
    if not -1 <= c <= size:
        return []
    c = min(max(c, 0.0), size - 1.0)
    low = int(c)
    return [(low, 1 - (c - low)), (min(low + 1, size - 1), c - low)]


@in_f32
def _roi_ref(
    x: np.ndarray, rois: np.ndarray, images: np.ndarray, *, bins: Sequence[int], sampling_ratio: int,
    spatial_scale: float, half_pixel: bool, mode: str,
) -> np.ndarray:  # fmt: skip
    if len(images) and not 0 <= images.min() <= images.max() < len(x):
        raise OutOfRangeError(f"roi_align: image {images.max()} is out of range for {len(x)} images")
    out = np.zeros((len(rois), x.shape[1], *bins), np.float64)
    for r, (roi, image) in enumerate(zip(rois.astype(np.float64), images, strict=True)):
        ends = roi * spatial_scale - (0.5 if half_pixel else 0.0)
        starts, lengths = ends[[1, 0]], ends[[3, 2]] - ends[[1, 0]]
        lengths = lengths if half_pixel else np.maximum(lengths, 1.0)
        steps = lengths / np.array(bins)
        counts = [
            sampling_ratio
            or (math.ceil(min(float(np.float32(s)), float(most_samples(d, b)))) if s > 0 else 0)
            for s, d, b in zip(steps, x.shape[2:], bins, strict=True)
        ]
        for at in np.ndindex(*bins):
            values = []
            for sample in np.ndindex(*counts):
                c = [starts[i] + (at[i] + (sample[i] + 0.5) / counts[i]) * steps[i] for i in range(2)]
                ys, xs = _ref_corners(c[0], x.shape[2]), _ref_corners(c[1], x.shape[3])
                corner = [x[image, :, i, j] * u * v for i, u in ys for j, v in xs] or [np.zeros(x.shape[1])]
                values.append(np.sum(corner, 0) if mode == "avg" else np.max(corner, 0))
            if values:
                out[(r, slice(None), *at)] = np.mean(values, 0) if mode == "avg" else np.max(values, 0)
    return out.astype(x.dtype)


@of_one
def roi_align(
    x: Operand,
    rois: Operand,
    images: Operand,
    size: Sequence[int] = (1, 1),
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
    half_pixel: bool = True,
    mode: str = "avg",
) -> Tensor:
    """Pool regions [R, 4] (x1, y1, x2, y2) of x [N, C, H, W] to [R, C, size]; region r is of image images[r].

    mode: avg or max of the samples of a bin. half_pixel: coordinates are shifted by half an element.

    >>> x = np.arange(16.0).reshape(1, 1, 4, 4)
    >>> roi_align(x, np.array([[0.0, 0.0, 2.0, 2.0]]), np.array([0]), sampling_ratio=1)
    array([[[[2.5]]]])
    """
    how = {
        "sampling_ratio": sampling_ratio,
        "spatial_scale": spatial_scale,
        "half_pixel": half_pixel,
        "mode": mode,
    }
    return _roi_align(x, rois, images, bins=tuple(size), **how)
