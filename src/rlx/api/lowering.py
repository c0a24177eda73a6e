"""The levels of a graph: HIR -> MIR -> optimised MIR."""

from __future__ import annotations

from rlx.crash_report import reports_crashes
from rlx.errors import TypeMismatchError
from rlx.ir.graph import Graph
from rlx.ir.op import Level
from rlx.model_kinds import instead_of
from rlx.rewrite.basic import remove_dead
from rlx.rewrite.rules import Firing, apply_rules
from rlx.rewrite.share import share_bodies
from rlx.rewrite.simplify import simplify_rules
from rlx.transform.expand import expand_graph


@reports_crashes
def lower(graph: Graph) -> Graph:
    """HIR -> MIR: every block in terms of primitive ops.

    >>> import rlx
    >>> g = rlx.Graph("net")
    >>> x = g.input("x", ("n", 4), "f32")
    >>> g.output("y", rlx.ops.softmax(x, axis=-1))
    >>> [n.op.name for n in rlx.lower(g).nodes]
    ['input', 'reduce_max', 'sub', 'exp', 'reduce_sum', 'div']
    """
    need_graph(graph, "rlx.lower")
    flat = all(n.op.level is Level.MIR and not n.bodies for n in graph.nodes)
    return remove_dead(graph if flat else expand_graph(graph))


@reports_crashes
def optimize(graph: Graph, log: list[Firing] | None = None) -> Graph:
    """HIR or MIR -> MIR: constants folded, algebra, moves and casts simplified, equals merged, the dead gone.

    >>> import rlx
    >>> g = rlx.Graph("net")
    >>> x = g.input("x", ("n", 4), "f32")
    >>> g.output("y", rlx.ops.exp(rlx.ops.transpose(rlx.ops.transpose(x * 1.0))))
    >>> [n.op.name for n in rlx.optimize(g).nodes]
    ['input', 'exp']
    """
    need_graph(graph, "rlx.optimize")
    if any(n.op.level is not Level.MIR for n in graph.nodes):
        graph = lower(graph)
    return remove_dead(share_bodies(apply_rules(graph, simplify_rules(), log)))


def need_graph(graph: object, caller: str) -> Graph:
    """The graph; what is not one is refused in the name of the function that was called."""
    if not isinstance(graph, Graph):
        got = f"got a value of type {type(graph).__name__}"
        instead = instead_of(graph) or "; rlx.load takes files, rlx.jit functions"
        raise TypeMismatchError(f"{caller} takes an rlx.Graph, {got}{instead}")
    return graph
