"""The same graph at other sizes: `with_sizes` infers types again, `rebind` replaces symbols as they are."""

from __future__ import annotations

from collections.abc import Mapping

from rlx.errors import ShapeError
from rlx.ir.dim import Constraint, Dim, substitute, symbols
from rlx.ir.graph import NAMED, Graph, Node
from rlx.ir.op import Role
from rlx.ir.rewrite import copy_node, dims_in, finish_rewrite, substitute_dims
from rlx.ir.types import TensorType


def with_sizes(graph: Graph, sizes: Mapping[str, int]) -> Graph:
    """The same graph where some symbols are numbers.

    Types are inferred again, so that a size which is 1 now stretches next to others where it had to equal
    them. Assumptions that no type rule makes are kept. An attribute that may mean the size before or after it
    was stretched is refused: `(a + b)[0]` and `(a + b)[:a.shape[0]]` hold the same symbol.

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
    stretched: set[str] = set()  # symbols that stand for a larger size in some value, as it was stretched
    for node in graph.nodes:
        operands = [mapping[o.id] for o in node.operands]
        if node.op.role is Role.RESULT:
            mapping[node.id] = copy_node(node, operands, out)
            continue
        if stretched and node.op.role not in NAMED:
            _refuse_ambiguous(node, operands, sizes, stretched)
        attrs: dict[str, object] = {k: substitute_dims(v, sizes) for k, v in node.attrs.items()}
        bodies = [_rebuilt(body, sizes) for body in node.bodies]
        made = mapping[node.id] = out.add(node.op, operands, attrs, bodies, where=node.where)
        stretched |= _stretched(node, made, sizes)
    finish_rewrite(graph, out, mapping)
    return out


def _stretched(node: Node, made: Node, sizes: dict[str, Dim]) -> set[str]:
    """The symbols in sizes of a value which are not what these symbols are now."""
    if not isinstance(node.type, TensorType) or not isinstance(made.type, TensorType):
        return set()
    pairs = zip(node.shape, made.shape, strict=True)
    return {s for d, n in pairs if substitute(d, sizes) != n for s in symbols(d) if s in sizes}


def _refuse_ambiguous(node: Node, operands: list[Node], sizes: dict[str, Dim], stretched: set[str]) -> None:
    """Refuse attributes with symbols that were stretched; those of a whole axis that was not are certain."""
    axes = [
        pair
        for old, new in zip(node.operands, operands, strict=True)
        if isinstance(old.type, TensorType)
        for pair in zip(old.shape, new.shape, strict=True)
    ]
    for name, value in node.attrs.items():
        for d in dims_in(value):
            here = [substitute(old, sizes) == new for old, new in axes if old == d]
            if not stretched.isdisjoint(symbols(d)) and not (here and all(here)):
                raise ShapeError(
                    f"{node.op.name}: {name} has the size {d}, which was stretched next to others"
                )


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
