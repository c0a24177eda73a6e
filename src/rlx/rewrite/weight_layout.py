"""Layout: constant right operands of contractions are packed once, at load, in the
panels that kernels read.
"""

from __future__ import annotations

from rlx.ir.dtype import I8, U8
from rlx.ir.graph import Graph, Node
from rlx.ir.op import get_op
from rlx.ir.rewrite import rewrite
from rlx.ir.weights import weight_ids
from rlx.kernel.panels import Panels
from rlx.ops.array.shape import transpose
from rlx.ops.math.contract import dot_general
from rlx.ops.storage.packing import read_as, store_as
from rlx.target.tiles import PanelTile


def pack_weights(graph: Graph, tiles: tuple[PanelTile, ...]) -> Graph:
    """Contractions x @ w with a constant matrix w read w from panels."""
    fixed = weight_ids(graph)
    by_dtype = {t.dtype: t for t in tiles}
    contraction = get_op("dot_general")
    packed: dict[tuple[int, int], Node] = {}

    def visit(node: Node, operands: tuple[Node, ...], out: Graph) -> Node | None:
        if node.op is not contraction or node.operands[0].id in fixed:
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
        key = (b.id, axis)
        if n <= tile.lanes // 2 and b.dtype.name in (
            "f32",
            "f64",
        ):  # so narrow that lanes run along k instead
            rows = b if axis == 1 else transpose(b, (1, 0))
            narrow: Node = dot_general(
                a, rows, (node.attrs["lhs_contract"], (1,)), out_dtype=node.attrs["out_dtype"]
            )
            return narrow
        if key not in packed:
            layout = Panels(k, n, tile.columns, tile.lanes, tile.group).layout
            matrix = b if axis == 0 else transpose(b, (1, 0))
            packed[key] = read_as(store_as(matrix, layout=layout), layout=layout)
        made: Node = dot_general(
            a, packed[key], (node.attrs["lhs_contract"], (0,)), out_dtype=node.attrs["out_dtype"]
        )
        return made

    return rewrite(graph, visit)
