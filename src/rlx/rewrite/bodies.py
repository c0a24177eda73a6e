"""Bodies of loops become graphs of kernels too, so that a whole loop can run natively."""

from __future__ import annotations

from collections.abc import Callable

from rlx.ir.graph import Graph, Node
from rlx.ir.op import get_op
from rlx.ir.rewrite import rewrite
from rlx.kernel.control import is_laid_out
from rlx.kernel.form import is_dense
from rlx.kernel.views import view_layouts
from rlx.rewrite.basic import materialize_outputs


def prepare_bodies(graph: Graph, kernels: Callable[[Graph], Graph]) -> Graph:
    """Replace the bodies of control flow by graphs of kernels; bodies read dense values, so other views are
    copied.
    """
    views = view_layouts(graph)

    def dense(old: Node, new: Node) -> Node:
        view = views.get(old.id)
        if view is None or is_dense(view.layout, old.shape):
            return new
        made: Node = get_op("copy")(new)
        return made

    def visit(node: Node, operands: tuple[Node, ...], out: Graph) -> Node | None:
        if not is_laid_out(node):
            return None
        operands = tuple(dense(old, new) for old, new in zip(node.operands, operands, strict=True))
        bodies = [kernels(materialize_outputs(prepare_bodies(b, kernels))) for b in node.bodies]
        return out.add(node.op, operands, node.attrs, bodies, where=node.where)

    if not any(is_laid_out(n) for n in graph.nodes):
        return graph
    return rewrite(graph, visit)
