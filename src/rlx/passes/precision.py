"""Lower precision on request: products with weights take narrow operands and accumulate in f32."""

from __future__ import annotations

from rlx.errors import ConfigError
from rlx.ir.dtype import BF16, F16, F32, DType
from rlx.ir.graph import Graph, Node, rewrite
from rlx.ir.op import get_op
from rlx.ops.contract import dot_general
from rlx.ops.elementwise import cast
from rlx.passes.layout import weight_ids

PRECISIONS: dict[str, DType | None] = {"f32": None, "bf16": BF16, "f16": F16}


def lower_precision(graph: Graph, precision: str) -> Graph:
    """Contractions of f32 activations with constant weights, computed from operands of a narrower dtype."""
    if precision not in PRECISIONS:
        raise ConfigError(f"precision {precision!r} is unknown; use one of {', '.join(PRECISIONS)}")
    narrow = PRECISIONS[precision]
    if narrow is None:
        return graph
    fixed = weight_ids(graph)
    contraction = get_op("dot_general")
    casts: dict[int, Node] = {}

    def narrowed(x: Node) -> Node:
        if x.id not in casts:
            casts[x.id] = cast(x, dtype=narrow)
        return casts[x.id]

    def visit(node: Node, operands: tuple[Node, ...], out: Graph) -> Node | None:
        if node.op is not contraction or node.dtype is not F32 or operands[0].dtype is not F32:
            return None
        if node.operands[1].id not in fixed or node.operands[0].id in fixed:
            return None
        a, b = (narrowed(x) for x in operands)
        at = node.attrs
        made: Node = dot_general(
            a, b, (at["lhs_contract"], at["rhs_contract"]), (at["lhs_batch"], at["rhs_batch"]), out_dtype=F32
        )
        return made

    return rewrite(graph, visit)
