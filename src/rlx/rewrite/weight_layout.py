"""Layout: constant right operands of contractions are packed once, at load, in the
panels that kernels read.
"""

from __future__ import annotations

import numpy as np

from rlx.ir.dtype import I8, I32, U8
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Role, get_op
from rlx.ir.rewrite import rewrite
from rlx.ir.weights import weight_ids
from rlx.kernel.panels import Panels
from rlx.kernel.quads import GROUP, QuadPanels, room_for
from rlx.ops.array.shape import transpose
from rlx.ops.math.contract import dot_general
from rlx.ops.storage.packing import read_as, store_as
from rlx.ops.storage.quads import pack_quads, unpack_quads
from rlx.rewrite.basic import uses_symbols
from rlx.rewrite.half_weights import Halves
from rlx.rewrite.sparse import weight_value
from rlx.target.tiles import PanelTile

MOST_ROOM = 4  # steps from which one more pays for itself: products of pairs in 16 bits are a third faster
ROOMS = 16  # parts of all steps that room is counted in, so that layers of one size share their kernel


def pack_weights(graph: Graph, tiles: tuple[PanelTile, ...]) -> Graph:
    """Contractions x @ w with a constant matrix w read w from panels; w of 16 bits stays so."""
    fixed = weight_ids(graph)
    by_dtype = {t.dtype: t for t in tiles}
    contraction = get_op("dot_general")
    packed: dict[tuple[int, int, bool], Node] = {}
    halves = Halves()

    def visit(node: Node, operands: tuple[Node, ...], out: Graph) -> Node | None:
        if node.op is not contraction:
            return halves.gathered(node, operands, fixed)
        if node.operands[0].id in fixed:
            return None
        a, b = operands
        tile = by_dtype.get(b.dtype.name)
        if node.operands[1].id not in fixed or tile is None or b.rank != 2:
            return None
        if a.dtype is not b.dtype and (a.dtype, b.dtype) != (U8, I8):
            return None
        if node.attrs["lhs_batch"] or len(node.attrs["rhs_contract"]) != 1 or not b.tensor.is_static:
            return None
        (axis,) = node.attrs["rhs_contract"]
        k, n = b.shape[axis], b.shape[1 - axis]
        if not isinstance(k, int) or not isinstance(n, int) or k * n == 0:
            return None
        in_quads = tile.quads and k >= GROUP and node.dtype is I32  # what a matmul of bytes sums in
        key = (b.id, axis, in_quads)
        if n <= tile.lanes // 2 and b.dtype.name in (
            "f32",
            "f64",
        ):  # so narrow that lanes run along k instead
            rows = b if axis == 1 else transpose(b, (1, 0))
            narrow: Node = dot_general(
                a, rows, (node.attrs["lhs_contract"], (1,)), out_dtype=node.attrs["out_dtype"]
            )
            return narrow
        half = halves.of(b)
        out_dtype = node.attrs["out_dtype"] if half is None else node.dtype
        if key not in packed:
            matrix = b if half is None else half
            matrix = matrix if axis == 0 else transpose(matrix, (1, 0))
            value = _value(graph, node.operands[1]) if in_quads else None
            quads = None if value is None else small_quads(value if axis == 0 else value.T, tile)
            if quads is not None:
                packed[key] = unpack_quads(pack_quads(matrix, **vars(quads)), **vars(quads))
            else:
                layout = Panels(k, n, tile.columns, tile.lanes, tile.group).layout
                packed[key] = read_as(store_as(matrix, layout=layout), layout=layout)
        made: Node = dot_general(a, packed[key], (node.attrs["lhs_contract"], (0,)), out_dtype=out_dtype)
        return made

    return rewrite(graph, visit)


def _value(graph: Graph, node: Node) -> np.ndarray | None:
    """What a weight is, or what is computed of weights; None where that is not known."""
    value = weight_value(graph, node)
    if value is not None or node.op.role is not Role.COMPUTE or node.bodies or uses_symbols(node):
        return value
    operands = [_value(graph, o) for o in node.operands]
    if any(o is None for o in operands) or node.op.host_only is not None or node.op.effects != "none":
        return None
    with np.errstate(all="ignore"):
        return np.asarray(node.op.ref(*operands, **node.attrs))


def small_quads(w: np.ndarray, tile: PanelTile) -> QuadPanels | None:
    """The panels of quads of a matrix, None where so many pairs are large that wider products are faster."""
    k, n = w.shape
    room, unit = room_for(w, tile.columns), -(-k // (GROUP * ROOMS))
    if room * MOST_ROOM * GROUP > k:
        return None
    return QuadPanels(k, n, tile.columns, tile.lanes, -(-room // unit) * unit)
