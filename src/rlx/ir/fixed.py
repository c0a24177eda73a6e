"""A graph at some sizes: symbols become numbers, and types are found anew."""

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
