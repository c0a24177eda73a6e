"""The same graph at other sizes: `with_sizes` infers types again, `rebind` replaces symbols as they are."""

from __future__ import annotations

from collections.abc import Mapping

from rlx.ir.dim import Constraint, Dim, substitute
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Role
from rlx.ir.rewrite import copy_node, finish_rewrite, substitute_dims


def with_sizes(graph: Graph, sizes: Mapping[str, int]) -> Graph:
    """The same graph where some symbols are numbers.

    Types are inferred again, so that a size which is 1 now stretches next to others where it had to equal
    them. Assumptions that no type rule makes are kept.

    >>> g = Graph()
    >>> g.output("y", g.input("a", ("n", 3), "f32") + g.input("b", ("m", 3), "f32"))
    >>> with_sizes(g, {"n": 1}).outputs["y"].tensor == g.inputs[1].tensor
    True
    >>> len(g.constraints), len(with_sizes(g, {"n": 1}).constraints)
    (1, 0)
    """
    return _rebuilt(graph, dict(sizes))


def _rebuilt(graph: Graph, sizes: dict[str, Dim]) -> Graph:
    inferred = {_key(c) for c in _copied(graph, {}).constraints}
    out = _copied(graph, sizes)
    for c in graph.constraints:
        if _key(c) not in inferred:
            fixed = Constraint(c.kind, substitute(c.lhs, sizes), substitute(c.rhs, sizes), c.where)
            if fixed.known() is not True:
                out.assume(fixed)
    return out


def _copied(graph: Graph, sizes: dict[str, Dim]) -> Graph:
    """A copy whose only assumptions are those of type rules."""
    out = Graph(graph.name)
    mapping: dict[int, Node] = {}
    for node in graph.nodes:
        operands = [mapping[o.id] for o in node.operands]
        if node.op.role is Role.RESULT:
            mapping[node.id] = copy_node(node, operands, out)
            continue
        attrs: dict[str, object] = {k: substitute_dims(v, sizes) for k, v in node.attrs.items()}
        bodies = [_rebuilt(body, sizes) for body in node.bodies]
        mapping[node.id] = out.add(node.op, operands, attrs, bodies, where=node.where)
    finish_rewrite(graph, out, mapping)
    return out


def _key(c: Constraint) -> tuple[str, Dim, Dim]:
    return c.kind, c.lhs, c.rhs


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
