"""Which values of a graph are known when a program is loaded."""

from __future__ import annotations

from rlx.ir.graph import Graph
from rlx.ir.op import Role


def weight_ids(graph: Graph) -> set[int]:
    """Nodes that depend on params and constants only and have a static shape."""
    fixed: set[int] = set()
    for node in graph.nodes:
        if node.op.role in (Role.PARAM, Role.CONSTANT):
            fixed.add(node.id)
        elif node.op.role is Role.COMPUTE and node.operands and not node.op.reader_side:
            if all(o.id in fixed for o in node.operands):
                fixed.add(node.id)
    return fixed
