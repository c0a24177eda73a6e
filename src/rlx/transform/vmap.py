"""Automatic batching of graphs: every op's batch rule, applied where an operand carries a batch axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlx.errors import TransformError, provenance
from rlx.ir.dim import Dim
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Role, get_op, run_rule
from rlx.ir.rewrite import copy_node
from rlx.ir.types import TupleType
from rlx.transform.grad import ensure_mir


def batch_graph(graph: Graph, axes: Mapping[str, int | None], size: Dim, out_axis: int = 0) -> Graph:
    """The graph applied to each slice of its inputs along `axes` (None: same for all), results stacked."""
    mir = ensure_mir(graph, "batch")
    out = Graph(graph.name)
    for c in mir.constraints:
        out.assume(c)
    with out.building():
        arguments: list[tuple[Node, bool]] = []
        for node in mir.inputs:
            name, at = node.attrs["name"], axes.get(node.attrs["name"])
            if at is None:
                arguments.append((copy_node(node, (), out), False))
                continue
            rank = node.rank + 1
            at = at + rank if at < 0 else at
            if not 0 <= at < rank:
                raise TransformError(
                    f"vmap: axis {axes[name]} is out of range for input {name!r} of rank {rank}"
                )
            shape = (*node.shape[:at], size, *node.shape[at:])
            x = out.input(name, shape, node.dtype)
            arguments.append((to_front(x, at), True))
        values = batch_nodes(mir, arguments, out)
        outputs = {}
        for name, node in mir.outputs.items():
            value, batched = values[node.id]
            if not batched:
                value = get_op("broadcast_to")(value, shape=(size, *value.shape))
            outputs[name] = from_front(value, out_axis)
        out.set_outputs(outputs)
    out.param_values = dict(mir.param_values)
    return out


def batch_nodes(
    mir: Graph, arguments: Sequence[tuple[Node, bool]], out: Graph
) -> dict[int, tuple[Any, bool]]:
    """Batched copies of all nodes: id -> (node, whether it has a batch axis 0)."""
    values: dict[int, tuple[Any, bool]] = {n.id: a for n, a in zip(mir.inputs, arguments, strict=True)}
    for node in mir.nodes:
        if (
            node.id in values or node.op.role is Role.TUPLE
        ):  # results of a tuple are its operands: nothing reads it
            continue
        operands = [values[o.id] for o in node.operands]
        if node.op.role is Role.RESULT and isinstance(operands[0][0], tuple):
            values[node.id] = (operands[0][0][node.attrs["index"]], operands[0][1])
            continue
        flags = [f for _, f in operands]
        if not any(flags):
            values[node.id] = (copy_node(node, [x for x, _ in operands], out), False)
            continue
        with provenance(node.where):
            made = run_rule(node.op, "batch", flags, *(x for x, _ in operands), node=node)
        if isinstance(made, Node) and isinstance(made.type, TupleType):
            made = tuple(out.results(made))
        values[node.id] = (made, True)
    return values


def to_front(x: Node, axis: int) -> Node:
    """Move an axis to position 0."""
    if axis == 0:
        return x
    made: Node = get_op("transpose")(x, perm=(axis, *(i for i in range(x.rank) if i != axis)))
    return made


def from_front(x: Node, axis: int) -> Node:
    """Move axis 0 to a position."""
    axis = axis + x.rank if axis < 0 else axis
    if not 0 <= axis < x.rank:
        raise TransformError(f"vmap: out axis {axis} is out of range for a result of rank {x.rank}")
    if axis == 0:
        return x
    made: Node = get_op("transpose")(x, perm=(*range(1, axis + 1), 0, *range(axis + 1, x.rank)))
    return made
