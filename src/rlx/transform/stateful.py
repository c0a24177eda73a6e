"""Explicit state becomes implicit: inputs that take an earlier output become states."""

from __future__ import annotations

from collections.abc import Mapping

from rlx.errors import InputError, provenance
from rlx.ir.dim import known_eq
from rlx.ir.graph import Graph, Node, State
from rlx.ir.op import Role, get_op
from rlx.ir.rewrite import copy_node


def with_states(graph: Graph, pairs: Mapping[str, str]) -> Graph:
    """See `Graph.with_states`."""
    by_name = {n.attrs["name"]: n for n in graph.inputs}
    for name, output in pairs.items():
        if name not in by_name:
            known = ", ".join(by_name) or "none"
            raise InputError(
                f"graph {graph.name!r} has no input {name!r} to make a state of; it has: {known}"
            )
        if output not in graph.outputs:
            known = ", ".join(graph.outputs) or "none"
            raise InputError(
                f"graph {graph.name!r} has no output {output!r} for state {name!r}; it has: {known}"
            )
        old, new = by_name[name].tensor, graph.outputs[output].tensor
        if old.dtype is not new.dtype or old.rank != new.rank:
            raise InputError(
                f"state {name!r} is {old}, but {output!r} is {new}: one cannot replace the other"
            )
        if any(known_eq(a, b) is False for a, b in zip(old.shape, new.shape, strict=True)):
            raise InputError(
                f"state {name!r} is {old}, but {output!r} is {new}: a state keeps its size; for a cache that "
                "grows, use a state of the largest size, g.size and ops.append"
            )
    out = Graph(graph.name)
    for c in graph.constraints:
        out.assume(c)
    mapping: dict[int, Node] = {}
    with out.building():
        for node in graph.nodes:
            if node.op.role is Role.INPUT and node.attrs["name"] in pairs:
                with provenance(node.where):
                    mapping[node.id] = out.state(node.attrs["name"], node.shape, node.dtype)
            else:
                mapping[node.id] = copy_node(node, [mapping[o.id] for o in node.operands], out)
        for name, output in pairs.items():
            out.set_state(name, _of_type(mapping[graph.outputs[output].id], out.state_inputs[name]))
    out.inputs = [mapping[n.id] for n in graph.inputs if n.attrs["name"] not in pairs]
    out.param_values, out.state_values = dict(graph.param_values), dict(graph.state_values)
    out.states = [
        *(State(s.name, mapping[s.input.id], mapping[s.output.id]) for s in graph.states),
        *out.states,
    ]
    replaced = set(pairs.values())
    out.outputs = {name: mapping[n.id] for name, n in graph.outputs.items() if name not in replaced}
    return out


def _of_type(value: Node, state: Node) -> Node:
    """A value with the state's sizes; those that cannot be proved equal become guards."""
    if value.tensor == state.tensor:
        return value
    made: Node = get_op("reshape")(value, shape=state.shape)
    return made
