"""Loops and branches that do the same work: one that gives more results stands for one that gives fewer.

The gradient of a scan needs values that the scan itself does not give; the scan that gives them does all
that the first one does.
"""

from __future__ import annotations

from rlx.ir.attr import attr_key
from rlx.ir.graph import Graph, Node
from rlx.ir.rewrite import rewrite
from rlx.ir.text.write import Printer
from rlx.ir.types import TupleType

Key = tuple[object, ...]
Outputs = tuple[tuple[int, ...], ...]


def share_bodies(graph: Graph) -> Graph:
    """Merge nodes of one op over the same operands whose bodies differ only in results at the end.

    An op with bodies gives its results in the order of their outputs: the longer one begins with the shorter.
    """
    groups: dict[Key, list[Node]] = {}
    for node in graph.nodes:
        if node.bodies and node.op.effects == "none":
            groups.setdefault(_key(node), []).append(node)
    leader: dict[int, Node] = {}
    for nodes in groups.values():
        longest = max(nodes, key=lambda n: len(_outputs(n)[0]))  # of equals, the first
        same = [n for n in nodes if _begins_with(_outputs(longest), _outputs(n))]
        if len(same) > 1:
            leader.update({n.id: longest for n in same})
    if not leader:
        return graph
    made: dict[int, Node] = {}

    def visit(node: Node, operands: tuple[Node, ...], out: Graph) -> Node | None:
        first = leader.get(node.id)
        if first is None:
            return None
        if first.id not in made:
            where = tuple(dict.fromkeys((*node.where, *first.where)))
            made[first.id] = out.add(first.op, operands, first.attrs, first.bodies, where=where)
        whole = made[first.id]
        several = isinstance(whole.type, TupleType) and not isinstance(node.type, TupleType)
        return out.results(whole)[0] if several else whole

    return rewrite(graph, visit)


def _key(node: Node) -> Key:
    attrs = tuple(attr_key(v) for v in node.attrs.values())
    return (node.op.name, tuple(o.id for o in node.operands), attrs, *(_core(b) for b in node.bodies))


def _core(body: Graph) -> str:
    """A body as text, without its outputs."""
    printer = Printer(locations=False)
    return "\n".join(line for node in body.nodes for line in printer.node_lines(node))


def _outputs(node: Node) -> Outputs:
    return tuple(tuple(n.id for n in body.outputs.values()) for body in node.bodies)


def _begins_with(longer: Outputs, shorter: Outputs) -> bool:
    return all(a[: len(b)] == b for a, b in zip(longer, shorter, strict=True))
