"""Bodies of loops become graphs of kernels too, so that a whole loop can run natively."""

from __future__ import annotations

from collections.abc import Callable

from rlx.ir.compose import lower_node
from rlx.ir.form import Loop, is_dense
from rlx.ir.graph import Graph, Node, rewrite
from rlx.ir.op import Role, get_op
from rlx.ir.views import view_layouts
from rlx.passes.basic import materialize_outputs

NATIVE_LOOPS = ("scan",)


def is_native_loop(node: Node) -> bool:
    """Loops whose number of steps is known when a program is placed: their steps are laid out as records."""
    if node.op.role is not Role.COMPUTE or not node.bodies:
        return False
    form = lower_node(node)
    return isinstance(form, Loop) and form.control in NATIVE_LOOPS


def prepare_bodies(graph: Graph, kernels: Callable[[Graph], Graph]) -> Graph:
    """Replace the bodies of native loops by graphs of kernels; a loop reads dense rows, so other views are
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
        if not is_native_loop(node):
            return None
        operands = tuple(dense(old, new) for old, new in zip(node.operands, operands, strict=True))
        bodies = [kernels(materialize_outputs(prepare_bodies(b, kernels))) for b in node.bodies]
        return out.add(node.op, operands, node.attrs, bodies, where=node.where)

    if not any(is_native_loop(n) for n in graph.nodes):
        return graph
    return rewrite(graph, visit)
