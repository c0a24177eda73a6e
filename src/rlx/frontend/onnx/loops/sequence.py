"""Sequences and optionals: lists of values while importing, so they cost nothing in the program."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlx import ops
from rlx.errors import ModelImportError
from rlx.frontend.onnx.call import Call
from rlx.frontend.onnx.registry import onnx_op
from rlx.frontend.onnx.value import Outputs, Rows
from rlx.ir.dim import Dim
from rlx.ir.graph import Node
from rlx.ops.rules import normal_axis

MOST_PARTS = 4096
"""Elements that one op may put into a sequence: each is a node of the graph."""


@onnx_op("SequenceEmpty", ignored=("dtype",))
def sequence_empty(n: Call) -> Outputs:
    return []


@onnx_op("SequenceConstruct")
def sequence_construct(n: Call) -> Outputs:
    return [n.value(i) for i in range(len(n))]


def place_in(n: Call, i: int, length: int, default: int, extra: int = 0) -> int:
    """A position in a sequence; negative ones count from the end."""
    if n.value(i) is None:
        return default
    at = n.integer(i)
    if not -length <= at < length + extra:
        raise ModelImportError(f"position {at} is outside of a sequence of {length}")
    return at + length if at < 0 else at


@onnx_op("SequenceAt")
def sequence_at(n: Call) -> Outputs:
    value = n.value(0)
    if isinstance(value, Rows):
        return ops.gather(value.numbers, ops.reshape(n[1], ()), 0)
    items = n.sequence(0)
    return items[place_in(n, 1, len(items), 0)]


@onnx_op("SequenceInsert")
def sequence_insert(n: Call) -> Outputs:
    items = n.sequence(0)
    at = place_in(n, 2, len(items), len(items), extra=1)
    return [*items[:at], n.value(1), *items[at:]]


@onnx_op("SequenceErase")
def sequence_erase(n: Call) -> Outputs:
    items = n.sequence(0)
    at = place_in(n, 1, len(items), len(items) - 1)
    return [*items[:at], *items[at + 1 :]]


@onnx_op("SequenceLength")
def sequence_length(n: Call) -> Outputs:
    value = n.value(0)
    if isinstance(value, Rows):
        return ops.dim_value(value.numbers.shape[0], "i64")
    return n.constant(np.int64(len(n.sequence(0))))


@onnx_op("ConcatFromSequence")
def concat_from_sequence(n: Call) -> Outputs:
    axis, value = int(n.attr("axis")), n.value(0)
    if isinstance(value, Rows):
        return joined(value.numbers, axis, n.flag("new_axis"))
    items = n.tensors(0)
    return ops.stack(items, axis) if n.flag("new_axis") else ops.concat(items, axis)


def joined(rows: Node, axis: int, new_axis: bool) -> Node:
    """The rows of a tensor side by side along an axis, a new one or one of theirs."""
    axis = normal_axis("ConcatFromSequence", axis, rows.rank if new_axis else rows.rank - 1)
    order = [*range(1, axis + 1), 0, *range(axis + 1, rows.rank)]
    side = ops.transpose(rows, order)
    if new_axis:
        return side
    return ops.reshape(
        side, (*side.shape[:axis], side.shape[axis] * side.shape[axis + 1], *side.shape[axis + 2 :])
    )


@onnx_op("SplitToSequence")
def split_to_sequence(n: Call) -> Outputs:
    x = n[0]
    axis = normal_axis("SplitToSequence", int(n.attr("axis", 0)), x.rank)
    keepdims = n.flag("keepdims", 1)
    size = x.shape[axis]
    if n.value(1) is not None:
        chunks: Sequence[Dim] = n.dims(1)
        if n[1].rank == 0:  # equal parts, the last one smaller
            each = chunks[0]
            sensible = (
                isinstance(size, int) and isinstance(each, int) and 0 < each and size // each <= MOST_PARTS
            )
            if not sensible:
                raise ModelImportError(
                    f"a split of {size} into parts of {each} does not give a valid number of parts"
                )
            chunks = [min(each, size - i) for i in range(0, size, each)]
        return list(ops.split(x, axis=axis, sizes=tuple(chunks)))
    if not isinstance(size, int) or size > MOST_PARTS:
        raise ModelImportError(f"a split of {size} elements does not give a valid number of parts")
    parts = ops.split(x, axis=axis, sizes=(1,) * size)
    return list(parts) if keepdims else [ops.squeeze(p, axis) for p in parts]


@onnx_op("SequenceMap")
def sequence_map(n: Call) -> Outputs:
    body, items = n.subgraph("body"), n.sequence(0)
    others = [n.value(i) for i in range(1, len(n))]
    rows = []
    for i, item in enumerate(items):
        rows.append(n.run_subgraph(body, [item, *(o[i] if isinstance(o, list) else o for o in others)]))
    return tuple([row[j] for row in rows] for j in range(len(body.output)))


@onnx_op("Optional", ignored=("type",))
def optional(n: Call) -> Outputs:
    return n.value(0)


@onnx_op("OptionalHasElement")
def optional_has_element(n: Call) -> Outputs:
    return n.constant(np.bool_(n.value(0) is not None))


@onnx_op("OptionalGetElement")
def optional_get_element(n: Call) -> Outputs:
    if n.value(0) is None:
        raise ModelImportError("the optional is empty")
    return n.value(0)
