"""Ops whose result has a size that only the data decide."""

from __future__ import annotations

from collections.abc import Callable

from rlx import ops
from rlx.frontend.onnx.call import Call
from rlx.frontend.onnx.registry import onnx_op
from rlx.frontend.onnx.value import Outputs
from rlx.ir.dim import Dim
from rlx.ir.graph import Node
from rlx.ops.rules import normal_axis

MOST_UNROLLED_BOXES = 64
"""Boxes up to which the greedy choice is written out; above, it is a scan."""


def optional_axis(n: Call) -> int | None:
    """The axis attribute; None is the flattened tensor."""
    axis = n.attr("axis", None)
    return None if axis is None else normal_axis(n.proto.op_type, int(axis), n[0].rank)


@onnx_op("NonZero")
def nonzero(n: Call) -> Outputs:
    return ops.transpose(ops.argwhere(n[0]))


@onnx_op("Compress")
def compress(n: Call) -> Outputs:
    return ops.compress(n[1], n[0], optional_axis(n))


@onnx_op("Unique")
def unique(n: Call) -> Outputs:
    return tuple(
        ops.unique(
            n[0],
            axis=optional_axis(n),
            sorted=n.flag("sorted", 1),
            return_index=True,
            return_inverse=True,
            return_counts=True,
        )
    )


@onnx_op("NonMaxSuppression")
def non_max_suppression(n: Call) -> Outputs:
    """[count, 3] of (batch, class, box): boxes by falling score, without those that overlap a better one."""
    boxes, scores = n[0], n[1]
    limit = n.integer(2) if n.value(2) is not None else 0
    iou_limit = n.get(3)
    by_centre = n.flag("center_point_box")
    count = boxes.shape[1]
    best, order = ops.top_k(scores, count, axis=2)  # [batch, classes, count]
    corners = ops.transpose(corners_of(boxes, by_centre), (0, 2, 1))  # [batch, 4, count]
    batch, classes = scores.shape[:2]
    spread = ops.broadcast_to(ops.expand_dims(corners, 1), (batch, classes, 4, count))
    at = ops.broadcast_to(ops.expand_dims(order, 2), (batch, classes, 4, count))
    ranked = ops.gather_elements(spread, at, axis=3)
    alive = ops.full((batch, classes, count), True, "bool")
    if n.get(4) is not None:
        alive = ops.greater(best, ops.reshape(n[4], ()))
    threshold = ops.reshape(iou_limit, ()) if iou_limit is not None else n.constant(0, boxes.dtype)
    keep = greedy(overlaps(ranked, threshold), alive, count)
    rank = ops.cumsum(ops.cast(keep, "i64"), axis=2)
    keep = ops.logical_and(keep, ops.less_equal(rank, max(limit, 0)))
    found = ops.argwhere(keep)  # [n, 3]: batch, class, place in the order
    box = ops.gather_nd(order, found)
    return ops.concat([ops.slice_axis(found, 1, 0, 2), ops.reshape(box, (-1, 1))], axis=1)


def corners_of(boxes: Node, by_centre: bool) -> Node:
    """Boxes [batch, count, 4] as (low, low, high, high), whichever corners were given."""
    a, b, c, d = (ops.slice_axis(boxes, 2, i, 1) for i in range(4))
    if by_centre:  # x, y, width, height
        half_w, half_h = c * 0.5, d * 0.5
        return ops.concat([b - half_h, a - half_w, b + half_h, a + half_w], axis=2)
    return ops.concat([ops.minimum(a, c), ops.minimum(b, d), ops.maximum(a, c), ops.maximum(b, d)], axis=2)


def overlaps(ranked: Node, threshold: Node) -> Node:
    """[.., i, j]: whether boxes i and j have more in common, relative to their union, than the threshold."""
    y1, x1, y2, x2 = (ops.squeeze(ops.slice_axis(ranked, 2, i, 1), 2) for i in range(4))
    area = (y2 - y1) * (x2 - x1)

    def pair(f: Callable[[Node, Node], Node], v: Node) -> Node:
        return f(ops.expand_dims(v, 3), ops.expand_dims(v, 2))

    height = ops.maximum(pair(ops.minimum, y2) - pair(ops.maximum, y1), 0.0)
    width = ops.maximum(pair(ops.minimum, x2) - pair(ops.maximum, x1), 0.0)
    common = height * width
    union = pair(ops.add, area) - common
    ratio = ops.where(ops.greater(union, 0.0), common / ops.where(ops.greater(union, 0.0), union, 1.0), 0.0)
    return ops.greater(ratio, threshold)


def greedy(overlap: Node, alive: Node, count: Dim) -> Node:
    """From the best box on: a box stays if it is alive, and then those behind it that overlap it do not."""
    if isinstance(count, int) and count <= MOST_UNROLLED_BOXES:
        for i in range(count):
            row = ops.squeeze(ops.slice_axis(overlap, 2, i, 1), 2)
            behind = ops.greater(ops.iota((count,)), i)
            hit = ops.logical_and(ops.logical_and(row, behind), ops.slice_axis(alive, 2, i, 1))
            alive = ops.logical_and(alive, ops.logical_not(hit))
        return alive

    def step(now: Node, row: tuple[Node, Node]) -> tuple[Node, None]:
        i, over = row
        here = ops.equal(ops.iota((count,)), i)
        stays = ops.any(ops.logical_and(now, here), axis=2, keepdims=True)
        hit = ops.logical_and(ops.logical_and(over, ops.greater(ops.iota((count,)), i)), stays)
        return ops.logical_and(now, ops.logical_not(hit)), None

    rows = ops.transpose(overlap, (2, 0, 1, 3))
    final, _ = ops.scan(step, alive, (ops.iota((count,)), rows))
    return final
