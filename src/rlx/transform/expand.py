"""HIR -> MIR: replace every HIR op by its expansion until none is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.errors import VerifyError, provenance
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Level, Op, Role, get_op, run_rule
from rlx.ir.rewrite import inline, rewrite
from rlx.ir.types import TupleType


def expand_graph(graph: Graph, keep: Callable[[Op], bool] = lambda op: False) -> Graph:
    """The same computation without HIR ops, except those that `keep` holds for."""

    def visit(node: Node, operands: tuple[Node, ...], out: Graph) -> Node | None:
        bodies = tuple(expand_graph(b, keep) for b in node.bodies)
        if node.op.level is Level.HIR and not keep(node.op):
            return expand_node(node, operands, out, keep)
        if bodies != node.bodies:
            return out.add(node.op, operands, node.attrs, bodies, where=node.where)
        return None

    return rewrite(graph, visit, keep_dead=True)


def expand_node(node: Node, operands: Sequence[Node], out: Graph, keep: Callable[[Op], bool]) -> Node:
    """One HIR node in terms of MIR ops, added to `out`."""
    scratch = Graph(node.op.name)
    known = [node.op.sees_constants and o.op.role is Role.CONSTANT for o in operands]
    inside = [
        scratch.constant(o.attrs["value"].array) if k else scratch.input(f"x{i}", o.shape, o.dtype)
        for i, (o, k) in enumerate(zip(operands, known, strict=True))
    ]
    with scratch.building(), provenance(node.where):
        made = run_rule(node.op, "expand", *inside, node=node)
    results = made if isinstance(made, tuple) else (made,)
    scratch.set_outputs(results)
    flat = expand_graph(scratch, keep)
    copies = inline(flat, [o for o, k in zip(operands, known, strict=True) if not k], out)
    for c in flat.constraints:
        out.assume(c)
    if not isinstance(node.type, TupleType):
        if copies[0].tensor.dtype is not node.dtype or copies[0].rank != node.rank:
            raise VerifyError(f"{node.op.name} is {node.type} but expands to {copies[0].type}", node.where)
        return copies[0]
    return tie(copies, node, out)


def tie(values: Sequence[Node], node: Node, out: Graph) -> Node:
    """Stand-in for a multi-output node whose results are separate nodes: `result` nodes resolve to them."""
    made = out.add(get_op("tuple"), tuple(values), where=node.where)
    return made
