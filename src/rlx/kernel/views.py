"""Views: values that lie inside another one's storage and so need no kernel."""

from __future__ import annotations

from rlx.ir.graph import Graph, Node
from rlx.ir.op import Role, run_rule
from rlx.ir.types import TupleType
from rlx.kernel.form import Strides, dense, dense_strides
from rlx.records import dataclass


@dataclass(frozen=True)
class View:
    """Whose storage a value lies in, and how."""

    root: int
    layout: Strides


def view_layouts(graph: Graph) -> dict[int, View]:
    """Views that need no kernel: node -> root and layout. An op that could be a view is none if its operand's
    elements do not lie so that strides can describe the result.

    >>> g = Graph()
    >>> x = g.input("x", (2, 3), "f32")
    >>> flat = x.T.reshape(6)
    >>> [g.nodes[i].op.name for i in view_layouts(g)]
    ['transpose']
    """
    out: dict[int, View] = {}
    for node in graph.nodes:
        if node.op.role is not Role.COMPUTE or not node.op.has("view") or isinstance(node.type, TupleType):
            continue
        source = node.operands[0]
        base = out.get(source.id) or View(source.id, dense(source.shape))
        layout = run_rule(node.op, "view", base.layout, *(o.type for o in node.operands), node=node)
        if layout is not None:
            out[node.id] = View(base.root, layout)
    return out


def keeps_order(node: Node) -> bool:
    """Whether a view has all elements of its operand in the same row-major order, as a reshape has.

    >>> g = Graph()
    >>> x = g.input("x", (2, 1, 3), "f32")
    >>> keeps_order(x.reshape(6)), keeps_order(x.T)
    (True, False)
    """
    if node.op.role is not Role.COMPUTE or not node.op.has("view") or isinstance(node.type, TupleType):
        return False
    source = node.operands[0]
    layout = run_rule(node.op, "view", dense(source.shape), *(o.type for o in node.operands), node=node)
    if layout is None or layout.offset != 0:
        return False
    want = dense_strides(node.shape)
    if any(d != 1 and s != w for d, s, w in zip(node.shape, layout.strides, want, strict=True)):
        return False
    return source.tensor.numel == node.tensor.numel
