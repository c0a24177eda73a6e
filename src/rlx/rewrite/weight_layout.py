"""Layout: constant right operands of contractions are packed once, at load, in the
panels that kernels read.
"""

from __future__ import annotations

import numpy as np

from rlx.ir.dtype import F32, F64, I8, I32, U8
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Op, Role, get_op
from rlx.ir.rewrite import rewrite
from rlx.ir.weights import weight_ids
from rlx.kernel.panels import Panels
from rlx.kernel.quads import GROUP, QuadPanels, room_for
from rlx.ops.array.shape import transpose
from rlx.ops.math.contract import dot_general
from rlx.ops.storage.columns import gather_stored
from rlx.ops.storage.packing import read_as, store_as
from rlx.ops.storage.quads import pack_quads, unpack_quads
from rlx.rewrite.basic import uses_symbols
from rlx.rewrite.half_weights import Halves
from rlx.rewrite.sparse import weight_value
from rlx.target.tiles import PanelTile

MOST_ROOM = 4  # steps from which one more pays for itself: products of pairs in 16 bits are a third faster
ROOMS = 16  # parts of all steps that room is counted in, so that layers of one size share their kernel


def pack_weights(graph: Graph, tiles: tuple[PanelTile, ...]) -> Graph:
    """Contractions x @ w with a constant matrix w read w from panels; w of 16 bits stays so.

    A table whose rows are gathered, and which is such a w, transposed, is read from its panels, too.
    """
    packing = _Packing(graph, tiles)
    return rewrite(graph, packing.visit)


class _Packing:
    """Which weights are packed, and what they became."""

    def __init__(self, graph: Graph, tiles: tuple[PanelTile, ...]) -> None:
        self.graph, self.tiles = graph, {t.dtype: t for t in tiles}
        self.fixed, self.halves = weight_ids(graph), Halves()
        self.contraction, self.gathering = get_op("dot_general"), get_op("gather")
        self.packed: dict[tuple[int, int, bool], Node] = {}
        # Matrices of f32 in panels: the node behind a transposition, and its axis that is summed.
        self.in_panels = {
            turned(n.operands[1], n.attrs["rhs_contract"][0])
            for n in graph.nodes
            if (tile := self.tile_of(n)) is not None and n.dtype is F32 and not is_narrow(n, tile)
        }

    def tile_of(self, node: Node) -> PanelTile | None:
        """The panels for the constant matrix of a contraction, None where it has none."""
        if node.op is not self.contraction or node.operands[0].id in self.fixed:
            return None
        a, b = node.operands
        tile = self.tiles.get(b.dtype.name)
        if b.id not in self.fixed or tile is None or b.rank != 2:
            return None
        if a.dtype is not b.dtype and (a.dtype, b.dtype) != (U8, I8):
            return None
        if node.attrs["lhs_batch"] or len(node.attrs["rhs_contract"]) != 1 or not b.tensor.is_static:
            return None
        return tile if all(isinstance(n, int) and n > 0 for n in b.shape) else None

    def visit(self, node: Node, operands: tuple[Node, ...], out: Graph) -> Node | None:
        tile = self.tile_of(node)
        if tile is None:
            rows = self.rows(node, operands)
            return self.halves.gathered(node, operands, self.fixed) if rows is None else rows
        a, b = operands
        (axis,) = node.attrs["rhs_contract"]
        left, out_dtype = node.attrs["lhs_contract"], node.attrs["out_dtype"]
        made: Node
        if is_narrow(node, tile):
            rows = b if axis == 1 else transpose(b, (1, 0))
            made = dot_general(a, rows, (left, (1,)), out_dtype=out_dtype)
            return made
        sums = node.dtype is I32  # what matmuls of bytes sum in
        in_quads = sums and tile.quads is not None and b.shape[axis] >= GROUP
        matrix = self.matrix(node.operands[1], b, axis, in_quads)
        made = dot_general(
            a, matrix, (left, (0,)), out_dtype=node.dtype if self.halves.of(b) is not None else out_dtype
        )
        return made

    def matrix(self, old: Node, b: Node, axis: int, in_quads: bool) -> Node:
        """A weight as a matmul that sums over an axis reads it."""
        root, axis = turned(b, axis)
        key = (root, axis, in_quads)
        if key not in self.packed:
            self.packed[key] = self.stored(old, b, axis if root == b.id else 1 - axis, in_quads)
        return self.packed[key]

    def stored(self, old: Node, b: Node, axis: int, in_quads: bool) -> Node:
        tile, half = self.tiles[b.dtype.name], self.halves.of(b)
        matrix = b if half is None else half
        matrix = matrix if axis == 0 else transpose(matrix, (1, 0))
        value = derived_value(self.graph, old) if in_quads else None
        quads = None if value is None else small_quads(value if axis == 0 else value.T, tile)
        made: Node
        if quads is not None:
            made = unpack_quads(pack_quads(matrix, **vars(quads)), **vars(quads))
            return made
        k, n = map(int, matrix.shape)
        layout = Panels(k, n, tile.columns, tile.lanes, tile.group).layout
        made = read_as(store_as(matrix, layout=layout), layout=layout)
        return made

    def rows(self, node: Node, operands: tuple[Node, ...]) -> Node | None:
        """Rows of a table that some matmul reads in panels."""
        if not is_row_gather(node, self.gathering) or node.id in self.fixed:
            return None
        if turned(node.operands[0], 1) not in self.in_panels:
            return None
        matrix = self.matrix(node.operands[0], operands[0], 1, False)
        made: Node = gather_stored(matrix.operands[0], operands[1], layouts=(matrix.attrs["layout"],))
        return made


def is_row_gather(node: Node, gathering: Op) -> bool:
    """Whether a node gives whole rows of a matrix of f32, chosen by indices."""
    if node.op is not gathering or node.dtype is not F32 or node.operands[0].rank != 2:
        return False
    return bool(node.attrs["axis"] == 0 and node.attrs["batch_dims"] == 0)


def turned(matrix: Node, axis: int) -> tuple[int, int]:
    """The matrix that a transposed one is made of, and which of its axes an axis is."""
    if matrix.op is get_op("transpose") and matrix.attrs["perm"] == (1, 0):
        return matrix.operands[0].id, 1 - axis
    return matrix.id, axis


def is_narrow(node: Node, tile: PanelTile) -> bool:
    """Whether a matmul has so few columns that lanes run along k instead."""
    (axis,) = node.attrs["rhs_contract"]
    b = node.operands[1]
    return int(b.shape[1 - axis]) <= tile.lanes // 2 and b.dtype in (F32, F64)


def derived_value(graph: Graph, node: Node) -> np.ndarray | None:
    """What a weight is, or what is computed of weights; None where that is not known."""
    value = weight_value(graph, node)
    if value is not None or node.op.role is not Role.COMPUTE or node.bodies or uses_symbols(node):
        return value
    operands = [derived_value(graph, o) for o in node.operands]
    if any(o is None for o in operands) or node.op.host_only is not None or node.op.effects != "none":
        return None
    with np.errstate(all="ignore"):
        return np.asarray(node.op.ref(*operands, **node.attrs))


def small_quads(w: np.ndarray, tile: PanelTile) -> QuadPanels | None:
    """The panels of quads of a matrix, None where so much is large that wider products are faster."""
    (k, n), seven = w.shape, tile.quads == "seven"
    room, unit = room_for(w, tile.columns, seven), -(-k // (GROUP * ROOMS))
    if room * MOST_ROOM * GROUP > k:
        return None
    return QuadPanels(k, n, tile.columns, tile.lanes, -(-room // unit) * unit, seven)
