"""The same graph over other sizes: symbols replaced by dims, in types, attributes and bodies."""

from __future__ import annotations

from collections.abc import Mapping

from rlx.ir.dim import Constraint, Dim, substitute
from rlx.ir.graph import Graph, Node
from rlx.ir.rewrite import substitute_dims


def rebind(graph: Graph, sizes: Mapping[str, Dim]) -> Graph:
    """A copy of a graph in which symbols have other sizes.

    >>> g = Graph()
    >>> g.output("y", abs(g.input("x", ("n", 2), "f32")))
    >>> rebind(g, {"n": 3}).outputs["y"].type == rebind(g, {"n": 3}).inputs[0].type
    True
    >>> str(rebind(g, {"n": 3}).outputs["y"].type)
    'f32[3,2]'
    """
    return _Rebinding(sizes).graph(graph)


class _Rebinding:
    """Bodies that nodes share stay shared: the layers of a model have one."""

    def __init__(self, sizes: Mapping[str, Dim]) -> None:
        self.sizes = dict(sizes)
        self.made: dict[int, tuple[Graph, Graph]] = {}  # by identity of the body, which is kept alive

    def graph(self, graph: Graph) -> Graph:
        known = self.made.get(id(graph))
        if known is not None:
            return known[1]
        out = Graph(graph.name)
        for c in graph.constraints:
            lhs, rhs = substitute(c.lhs, self.sizes), substitute(c.rhs, self.sizes)
            out.assume(Constraint(c.kind, lhs, rhs, c.where))
        mapping: dict[int, Node] = {}
        with out.building():
            for node in graph.nodes:
                mapping[node.id] = self.node(node, [mapping[o.id] for o in node.operands], out)
            out.set_outputs({name: mapping[n.id] for name, n in graph.outputs.items()})
        self.made[id(graph)] = (graph, out)
        return out

    def node(self, node: Node, operands: list[Node], out: Graph) -> Node:
        attrs = {key: substitute_dims(value, self.sizes) for key, value in node.attrs.items()}
        return out.add(node.op, operands, attrs, [self.graph(b) for b in node.bodies], where=node.where)
