"""New graphs from old ones: copying nodes, replacing some of them, putting bodies in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from rlx.errors import RlxError, provenance
from rlx.ir.dim import Dim, Expr, substitute
from rlx.ir.graph import NAMED, Graph, Node, State
from rlx.ir.op import Role
from rlx.ir.types import TensorType

Visit = Callable[[Node, tuple[Node, ...], Graph], Node | None]


def copy_node(node: Node, operands: Sequence[Node], into: Graph) -> Node:
    """The same op in another graph."""
    if node.op.role is Role.RESULT and operands[0].op.role is Role.TUPLE:
        found: Node = operands[0].operands[node.attrs["index"]]
        return found
    if node.op.role is Role.RESULT:
        existing = into._results.get(operands[0].id, {}).get(node.attrs["index"])
        if existing is not None:
            return existing
    made = into.adopt(node, operands)
    if made is None:
        made = into.add(node.op, operands, node.attrs, node.bodies, where=node.where)
    return made


def rewrite(graph: Graph, visit: Visit, keep_dead: bool = False) -> Graph:
    """A new graph: `visit(node, new_operands, new_graph)` gives each node's replacement, None copies it.

    Inputs, params and states always survive; other nodes only if they are live. What a visit creates
    carries the locations of the node it replaces.
    """
    out = Graph(graph.name)
    for c in graph.constraints:
        out.assume(c)
    alive = {n.id for n in graph.nodes} if keep_dead else graph.live()
    mapping: dict[int, Node] = {}
    with out.building():
        for node in graph.nodes:
            if node.op.role in NAMED:
                mapping[node.id] = copy_node(node, (), out)
            elif node.id in alive:
                operands = tuple(mapping[o.id] for o in node.operands)
                with provenance(node.where):
                    made = visit(node, operands, out)
                mapping[node.id] = copy_node(node, operands, out) if made is None else made
    finish_rewrite(graph, out, mapping)
    return out


def copy(graph: Graph) -> Graph:
    """A separate graph that shares the arrays of this one."""
    return rewrite(graph, lambda node, operands, out: None, keep_dead=True)


def finish_rewrite(graph: Graph, out: Graph, mapping: Mapping[int, Node]) -> None:
    """Carry outputs, states and values over to a rewritten graph."""
    out.param_values = dict(graph.param_values)
    out.state_values = dict(graph.state_values)
    out.outputs = {name: mapping[n.id] for name, n in graph.outputs.items()}
    out.states = [State(s.name, out.state_inputs[s.name], mapping[s.output.id]) for s in graph.states]


def inline(body: Graph, arguments: Sequence[Node], into: Graph) -> list[Node]:
    """Copy a body into a graph with its inputs replaced by nodes; returns its outputs there."""
    if len(arguments) != len(body.inputs):
        raise RlxError(f"graph {body.name!r} takes {len(body.inputs)} inputs, got {len(arguments)}")
    mapping = {n.id: a for n, a in zip(body.inputs, arguments, strict=True)}
    for node in body.nodes:
        if node.id not in mapping:
            mapping[node.id] = copy_node(node, [mapping[o.id] for o in node.operands], into)
    return [mapping[n.id] for n in body.outputs.values()]


def dims_in(value: object) -> Iterator[Expr]:
    """Sizes with symbols in an attribute value (dims, types, tuples of them).

    >>> import rlx
    >>> x = rlx.Graph().input("x", ("n", 4), "f32")
    >>> [str(d) for d in dims_in((x.shape[0], 3, x.type))]
    ['n', 'n']
    """
    if isinstance(value, Expr):
        yield value
    elif isinstance(value, tuple):
        for v in value:
            yield from dims_in(v)
    elif isinstance(value, TensorType):
        yield from dims_in(value.shape)


def substitute_dims(value: object, mapping: Mapping[str, Dim]) -> object:
    """Replace symbols in an attribute value (dims, types, tuples of them)."""
    if isinstance(value, Expr):
        return substitute(value, dict(mapping))
    if isinstance(value, tuple):
        return tuple(substitute_dims(v, mapping) for v in value)
    if isinstance(value, TensorType):
        return value.substitute(dict(mapping))
    return value
