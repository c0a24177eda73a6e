"""Constant matrices that are mostly zeros (mel filters, masks, selections) are multiplied by their other
elements
only.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rlx.ir.dtype import LazyArray
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Role, get_op
from rlx.ir.rewrite import rewrite
from rlx.ops.array.shape import transpose
from rlx.ops.math.contract import dot_general
from rlx.rewrite.basic import uses_symbols

MOST_DENSE = 0.1  # share of non-zero elements up to which a matrix counts as sparse
LEAST_SAVED = 1024  # zeros, below which nothing is to be gained
ROWS_AT_ONCE = 64
PARTS = 64  # in which a matrix is read from a file
FEW_ROWS = 4  # rows of the other operand with which lanes along columns of the whole matrix are faster


def weight_value(graph: Graph, node: Node) -> np.ndarray | None:
    """The value of a param, a constant, or a view of one; None where it is not known."""
    if node.op.role is Role.CONSTANT:
        value: np.ndarray = node.attrs["value"].array
        return value
    if node.op.role is Role.PARAM:
        found = graph.param_values.get(node.attrs["name"])
        return None if found is None else np.asarray(found)
    if _is_view(node):
        inner = weight_value(graph, node.operands[0])
        return None if inner is None else np.asarray(node.op.ref(inner, **node.attrs))
    return None


def _is_view(node: Node) -> bool:
    one = node.op.role is Role.COMPUTE and node.op.has("view") and len(node.operands) == 1
    return one and not uses_symbols(node)


def find_sparse_weights(graph: Graph) -> Graph:
    """Contractions with a sparse constant matrix, on either side, read its non-zero elements."""
    contraction = get_op("dot_general")
    counts: dict[int, int | None] = {}  # weight -> its non-zero elements, if it is sparse

    def sparse_side(node: Node) -> int | None:
        """The number of the operand that is sparse."""
        if node.op is not contraction or node.attrs["lhs_batch"] or len(node.attrs["lhs_contract"]) != 1:
            return None
        if any(o.dtype is not node.dtype for o in node.operands) or node.dtype.name not in ("f32", "f64"):
            return None
        for side in (1, 0):
            weight = node.operands[side]
            if weight.id not in counts:
                counts[weight.id] = _count(graph, weight)
            if counts[weight.id] is not None and not _few_rows(node.operands[1 - side]):
                return side
        return None

    live = graph.live()
    sides = {n.id: side for n in graph.nodes if n.id in live and (side := sparse_side(n)) is not None}
    if not sides:
        return graph

    def visit(node: Node, operands: tuple[Node, ...], out: Graph) -> Node | None:
        if node.id not in sides:
            return None
        side = sides[node.id]
        count = counts[node.operands[side].id]
        assert count is not None
        kept, reduced = (node.attrs[f"{s}_contract"] for s in (("lhs", "rhs") if side else ("rhs", "lhs")))
        packed = _packed(operands[side], reduced[0], count)
        made: Node = dot_general(operands[1 - side], packed, (kept, (0,)))
        return made if side else transpose(made, (made.rank - 1, *range(made.rank - 1)))

    return rewrite(graph, visit)


def _few_rows(other: Node) -> bool:
    rows = 1
    for d in other.shape[:-1]:
        if not isinstance(d, int):
            return False
        rows *= d
    return rows <= FEW_ROWS


def _count(graph: Graph, node: Node) -> int | None:
    if node.rank != 2 or not node.tensor.is_static:
        return None
    rows, columns = map(int, node.shape)
    most = min(MOST_DENSE * rows * columns, rows * columns - LEAST_SAVED)
    blocks = _blocks(graph, node) if most >= 0 else None
    if blocks is None:
        return None
    count = 0
    for block in blocks:  # a dense matrix shows in its first rows
        count += int(np.count_nonzero(block))
        if count > most:
            return None
    return max(count, 1)


def _blocks(graph: Graph, node: Node) -> Iterator[np.ndarray] | None:
    """The elements of a matrix, some rows at a time; None where they are not known. Of a tensor in a file, no
    more is read than is taken: these elements are the same, in the order of the file."""
    rows, columns = map(int, node.shape)
    stored = _stored(graph, node)
    if stored is not None and stored.part is not None:
        part, size = stored.part, rows * columns
        step = -(-size // PARTS)
        return (part(first, min(first + step, size)) for first in range(0, size, step))
    value = weight_value(graph, node)
    if value is None:
        return None
    return (value[first : first + ROWS_AT_ONCE] for first in range(0, rows, ROWS_AT_ONCE))


def _stored(graph: Graph, node: Node) -> LazyArray | None:
    """The array of a file whose elements a weight has, each once."""
    while _is_view(node) and node.tensor.numel == node.operands[0].tensor.numel:
        node = node.operands[0]
    if node.op.role is not Role.PARAM:
        return None
    found = graph.param_values.get(node.attrs["name"])
    return found if isinstance(found, LazyArray) else None


def _packed(weight: Node, axis: int, room: int) -> Node:
    """The weight as [reduced, kept], through its sparse form."""
    matrix = weight if axis == 0 else transpose(weight, (1, 0))
    layout = {"k": matrix.shape[0], "n": matrix.shape[1], "room": room, "dtype": weight.dtype}
    made: Node = get_op("unpack_sparse")(get_op("pack_sparse")(matrix, **layout), **layout)
    return made
