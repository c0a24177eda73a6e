"""Layout: constant weights of 4 or 8 bits stay so, packed once, at load, in the order that matmuls read."""

from __future__ import annotations

from rlx.ir.dtype import F16, F32
from rlx.ir.graph import Graph, Node
from rlx.ir.op import get_op
from rlx.ir.rewrite import rewrite
from rlx.ir.weights import weight_ids
from rlx.kernel.panels import QuantLayout
from rlx.ops.math.contract import dot_general
from rlx.ops.math.elementwise import cast
from rlx.ops.storage.columns import gather_stored
from rlx.ops.storage.packing import read_as, store_as
from rlx.rewrite.weight_layout import is_row_gather, turned


def pack_quantised_weights(graph: Graph, lanes: int) -> Graph:
    """Products x @ dequantize_groups(...) of f32 with constant codes read the codes."""
    contraction, dequantize = get_op("dot_general"), get_op("dequantize_groups")
    if not any(node.op is dequantize for node in graph.nodes):
        return graph
    fixed, gathering = weight_ids(graph), get_op("gather")
    packed: dict[int, Node] = {}

    def weights_of(node: Node) -> Node | None:
        """The quantised matrix that is the right operand [k, n] of a plain matmul of f32."""
        if node.op is not contraction or node.attrs["lhs_batch"]:
            return None
        a, b = node.operands
        plain = (
            node.attrs["rhs_contract"] == (0,) and node.attrs["lhs_contract"] == (a.rank - 1,) and a.rank > 1
        )
        if (
            not plain
            or b.op is not dequantize
            or not b.tensor.is_static
            or b.id not in fixed
            or a.id in fixed
        ):
            return None
        return b if can_be_stored(b) and node.dtype is F32 and a.dtype is F32 else None

    def table_of(node: Node) -> Node | None:
        """The quantised matrix whose columns are the rows that a gather gives."""
        if not is_row_gather(node, gathering) or node.id in fixed:
            return None
        table = node.operands[0]
        id, axis = turned(table, 0)
        b = graph.nodes[id]
        fits = b.op is dequantize and axis == 1 and b.id in fixed and b.tensor.is_static
        return b if fits and can_be_stored(b) else None

    def visit(node: Node, operands: tuple[Node, ...], out: Graph) -> Node | None:
        made: Node
        b, table = weights_of(node), table_of(node)
        if b is not None:
            if b.id not in packed:
                packed[b.id] = _stored(operands[1], lanes)
            made = dot_general(operands[0], packed[b.id], (node.attrs["lhs_contract"], (0,)))
            return made
        if table is None:
            return None
        if table.id not in packed:
            packed[table.id] = _stored(operands[0].operands[0], lanes)
        parts = packed[table.id].operands
        layouts = tuple(part.attrs["layout"] for part in parts)
        group = table.attrs["group"]
        made = gather_stored(parts[0].operands[0], operands[1], layouts=layouts, group=group)
        return made

    return rewrite(graph, visit)


def can_be_stored(matrix: Node) -> bool:
    """Whether kernels read such codes."""
    return matrix.attrs["bits"] in (4, 8) and matrix.attrs["group"] % 8 == 0


def _stored(matrix: Node, lanes: int) -> Node:
    """The same matrix, of codes, scales and zeros that share the storage that kernels read."""
    codes, *factors = matrix.operands
    k, n = map(int, codes.shape)
    kinds = [F16 if f.dtype is F16 else F32 for f in factors]
    bits, group = matrix.attrs["bits"], matrix.attrs["group"]
    names = [kind.name for kind in kinds]
    layouts = QuantLayout(k, n, bits, group, lanes, names[0], len(names) == 2, zero=names[-1]).layouts
    stored = store_as(codes, layout=layouts[0])
    for factor, kind, layout in zip(factors, kinds, layouts[1:], strict=True):
        stored = store_as(factor if factor.dtype is kind else cast(factor, dtype=kind), stored, layout=layout)
    made: Node = matrix.op(*[read_as(stored, layout=own) for own in layouts], **matrix.attrs)
    return made
