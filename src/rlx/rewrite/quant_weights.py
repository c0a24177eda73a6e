"""Layout: constant weights of 4 or 8 bits stay so, packed once, at load, in the order that matmuls read."""

from __future__ import annotations

from rlx.ir.dtype import F32
from rlx.ir.graph import Graph, Node
from rlx.ir.op import get_op
from rlx.ir.rewrite import rewrite
from rlx.ir.weights import weight_ids
from rlx.ops.math.contract import dot_general
from rlx.ops.quant.group_layout import QuantLayout


def pack_quantised_weights(graph: Graph, lanes: int) -> Graph:
    """Products x @ dequantize_groups(...) of f32 with constant codes read the codes."""
    contraction, dequantize = get_op("dot_general"), get_op("dequantize_groups")
    if not any(node.op is dequantize for node in graph.nodes):
        return graph
    fixed = weight_ids(graph)
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
        fits = b.attrs["bits"] in (4, 8) and b.attrs["group"] % 8 == 0
        return b if fits and node.dtype is F32 and a.dtype is F32 else None

    def visit(node: Node, operands: tuple[Node, ...], out: Graph) -> Node | None:
        b = weights_of(node)
        if b is None:
            return None
        if b.id not in packed:
            codes, *factors = operands[1].operands
            halves = all(f.dtype.name == "f16" for f in factors)
            layout = vars(
                QuantLayout(
                    int(codes.shape[0]),
                    int(codes.shape[1]),
                    b.attrs["bits"],
                    b.attrs["group"],
                    lanes,
                    "f16" if halves else "f32",
                    len(factors) == 2,
                )
            )
            packed[b.id] = get_op("unpack_groups")(get_op("pack_groups")(codes, *factors, **layout), **layout)
        made: Node = dot_general(operands[0], packed[b.id], (node.attrs["lhs_contract"], (0,)))
        return made

    return rewrite(graph, visit)
