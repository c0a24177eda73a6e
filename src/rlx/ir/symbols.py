"""The symbols of a graph with their bounds, wherever they occur: types, attributes, constraints, bodies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rlx.ir.dim import Dim, DimCall, Expr, Sym, dim_min, evaluate, never_falls, substitute, symbols
from rlx.ir.dims.atom import quote
from rlx.ir.types import TensorType, TupleType, type_symbols

if TYPE_CHECKING:
    from rlx.ir.graph import Graph, Node

Bounds = tuple[int, int | None]
NOT_FOUND = 1
"""What a size that data decide is planned as until they do; others may be divided by it."""


def graph_symbols(graph: Graph) -> dict[str, list[Bounds]]:
    """Name -> its distinct bounds (one pair in a sound graph), sorted by name.

    >>> import rlx
    >>> from rlx.ir.dim import sym
    >>> g = rlx.Graph()
    >>> _ = g.input("x", (sym("batch", min=1, max=64), "seq"), "f32")
    >>> graph_symbols(g)
    {'batch': [(1, 64)], 'seq': [(0, None)]}
    """
    found: dict[str, list[Bounds]] = {}
    seen: set[int] = set()  # expressions are shared, and equality of expressions ignores bounds
    for value in _values(graph):
        _collect(value, found, seen)
    return dict(sorted(found.items()))


def found_by_data(graph: Graph) -> dict[str, Dim | None]:
    """Symbols that no input or state gives: an op finds them when it runs. Name -> most it can be, if known:
    a number, or an expression of sizes that are given.

    >>> import rlx
    >>> from rlx.ops import nonzero
    >>> g = rlx.Graph()
    >>> g.output("at", nonzero(g.input("x", (4, 5), "f32"))[0])
    >>> g.output("of_rows", nonzero(g.input("y", (4, "n"), "f32"))[0])
    >>> list(found_by_data(g).values())
    [20, 4*n]
    """
    given = {s for n in (*graph.inputs, *graph.state_inputs.values()) for s in type_symbols(n.type)}
    later = [s for s in graph.symbols() if s not in given]
    bounds = graph_symbols(graph) if later else {}  # a look at everything, which few graphs need
    found: dict[str, Dim | None] = {s: bounds[s][0][1] for s in later}
    open_ = [s for s in later if found[s] is None]
    for s in open_ * len(open_):  # a bound may speak of another size that data decides, whose bound is known
        if found[s] is None:
            found[s] = _bound_by_assumptions(graph, s, found)
    return found


def _bound_by_assumptions(graph: Graph, name: str, found: Mapping[str, Dim | None]) -> Dim | None:
    """The least that a graph assumes a size to stay within, in sizes that are given."""
    most: list[Dim] = []
    for c in graph.constraints:
        if c.kind != "min" or str(c.rhs) != quote(name):
            continue
        inner = [s for s in symbols(c.lhs) if s in found]
        known = {s: bound for s in inner if (bound := found[s]) is not None}
        if len(known) == len(inner) and all(never_falls(c.lhs, s) for s in inner):
            most.append(substitute(c.lhs, known))
    return dim_min(*most) if most else None


def sizes_at_bounds(graph: Graph, given: Mapping[str, int]) -> dict[str, int]:
    """The most that sizes which data decide can be where others are `given`. Those without a bound, or with
    one that is not known from these, are left out.

    >>> import rlx
    >>> from rlx.ops import nonzero
    >>> g = rlx.Graph()
    >>> g.output("at", nonzero(g.input("x", (4, "n"), "f32"))[0])
    >>> list(sizes_at_bounds(g, {"n": 7}).values())
    [28]
    """
    known = {s: most for s, most in found_by_data(graph).items() if most is not None}
    return {s: evaluate(most, given) for s, most in known.items() if all(n in given for n in symbols(most))}


def sizes_of(node: Node) -> set[str]:
    """Symbols that a node's value depends on by itself: in its type, attributes and bodies.

    >>> import rlx
    >>> g = rlx.Graph()
    >>> y = g.input("x", ("n", 4), "f32").reshape("m", 2)
    >>> sorted(sizes_of(y))
    ['m']
    """
    found: dict[str, list[Bounds]] = {}
    seen: set[int] = set()
    for value in _values_of(node):
        _collect(value, found, seen)
    return set(found)


def waits_for_sizes(graph: Graph) -> dict[int, list[int]]:
    """Nodes that need a size which another one finds in data -> those others, also where they read no value
    of them. Nodes are in an order in which they can run: the first that has a size is the one that finds it.

    >>> import rlx
    >>> from rlx.ops import iota, nonzero
    >>> g = rlx.Graph()
    >>> found = nonzero(g.input("x", (9,), "f32"))[0]
    >>> with g.building():
    ...     g.output("y", iota((found.shape[0],)))
    >>> waits_for_sizes(g)[g.outputs["y"].id]
    [1]
    """
    unknown = found_by_data(graph)
    finders: dict[str, int] = {}
    out: dict[int, list[int]] = {}
    if not unknown:
        return out
    for node in graph.nodes:
        needed = [finders.setdefault(s, node.id) for s in sorted(node_symbols(node)) if s in unknown]
        if any(i != node.id for i in needed):
            out[node.id] = sorted({i for i in needed if i != node.id})
    return out


def node_symbols(node: Node) -> dict[str, list[Bounds]]:
    """Symbols of one node, in its type, attributes and bodies, with their bounds."""
    found: dict[str, list[Bounds]] = {}
    seen: set[int] = set()
    for value in _values_of(node):
        _collect(value, found, seen)
    return found


def _values(graph: Graph) -> Iterator[object]:
    for c in graph.constraints:
        yield c.lhs
        yield c.rhs
    for node in graph.nodes:
        yield from _values_of(node)


def _values_of(node: Node) -> Iterator[object]:
    yield node.type
    yield from node.attrs.values()
    for body in node.bodies:
        yield from _values(body)


def _collect(value: object, found: dict[str, list[Bounds]], seen: set[int]) -> None:
    if isinstance(value, TensorType):
        for d in value.shape:
            if isinstance(d, Expr):
                _collect_dim(d, found, seen)
    elif isinstance(value, Expr):
        _collect_dim(value, found, seen)
    elif isinstance(value, tuple):
        for item in value:
            _collect(item, found, seen)
    elif isinstance(value, TupleType):
        for t in value.items:
            _collect(t, found, seen)


def _collect_dim(d: Dim, found: dict[str, list[Bounds]], seen: set[int]) -> None:
    if isinstance(d, int) or id(d) in seen:
        return
    seen.add(id(d))
    for monomial, _ in d.terms:
        for atom, _ in monomial:
            if isinstance(atom, Sym):
                known = found.setdefault(atom.name, [])
                if (atom.min, atom.max) not in known:
                    known.append((atom.min, atom.max))
            elif isinstance(atom, DimCall):
                for arg in atom.args:
                    _collect_dim(arg, found, seen)
