"""Outlines of graphs: names, roles, types and operands of nodes, which is all that running needs of a plan.

An outline is written as JSON values and read back as a Graph whose ops are known by name and role alone. No
declaration of an op is loaded, no type inferred, so it must come from one's own hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from rlx.ir.dim import Constraint, Expr, parse_dim, sym
from rlx.ir.graph import Graph
from rlx.ir.op import Op, Role, get_op
from rlx.ir.types import TensorType, TupleType, Type, parse_type

_KEPT = ("name", "index", "once")  # attributes by which nodes are found


class NamedOp:
    """An op by name and role; whatever else is asked of it, its declaration answers, loaded for that."""

    __slots__ = ("name", "role")

    def __init__(self, name: str, role: Role) -> None:
        self.name, self.role = name, role

    def canonical_attrs(self, attrs: Mapping[str, Any]) -> Mapping[str, Any]:
        return attrs

    def __getattr__(self, name: str) -> Any:
        return getattr(get_op(self.name), name)

    def __repr__(self) -> str:
        return f"<op {self.name}>"


def outline(graph: Graph) -> dict[str, Any]:
    """A graph without bodies, values of constants and other attributes, as JSON values.

    >>> g = Graph("double")
    >>> x = g.input("x", ("n",), "f32")
    >>> g.output("y", x + x)
    >>> read_outline(outline(g)).outputs["y"]
    %1 = add(%0, %0) : f32[n]
    """
    from rlx.ir.symbols import graph_symbols

    bounds = {name: found[0] for name, found in graph_symbols(graph).items()}
    return {
        "name": graph.name,
        "symbols": {name: list(b) for name, b in bounds.items() if b != (0, None)},
        "constraints": [[c.kind, str(c.lhs), str(c.rhs), list(c.where)] for c in graph.constraints],
        "roles": {n.op.name: n.op.role.name for n in graph.nodes},
        "nodes": [
            [
                n.op.name,
                [o.id for o in n.operands],
                _type_text(n.type),
                {key: n.attrs[key] for key in _KEPT if key in n.attrs and n.op.role is not Role.COMPUTE},
                list(n.where),
            ]
            for n in graph.nodes
        ],
        "inputs": [n.id for n in graph.inputs],
        "outputs": [[name, n.id] for name, n in graph.outputs.items()],
        "states": [[s.name, s.output.id] for s in graph.states],
    }


def read_outline(data: Mapping[str, Any]) -> Graph:
    """The graph of an outline."""
    symbols = {name: sym(name, low, high) for name, (low, high) in data["symbols"].items()}
    ops = {name: cast(Op, NamedOp(name, Role[role])) for name, role in data["roles"].items()}
    types: dict[str, TensorType] = {}
    graph = Graph(data["name"])
    for kind, lhs, rhs, where in data["constraints"]:
        graph.assume(Constraint(kind, parse_dim(lhs, symbols), parse_dim(rhs, symbols), tuple(where)))
    nodes = graph.nodes
    for op, operands, type_, attrs, where in data["nodes"]:
        made = _read_type(type_, symbols, types)
        graph.add_typed(ops[op], [nodes[o] for o in operands], attrs, (), made, tuple(where))
    graph.inputs = [nodes[i] for i in data["inputs"]]
    for name, id in data["outputs"]:
        graph.output(name, nodes[id])
    for name, id in data["states"]:
        graph.set_state(name, nodes[id])
    return graph


def _type_text(type_: Type) -> str | list[str]:
    return [str(t) for t in type_.items] if isinstance(type_, TupleType) else str(type_)


def _read_type(text: str | list[str], symbols: Mapping[str, Expr], known: dict[str, TensorType]) -> Type:
    if isinstance(text, list):
        return TupleType(tuple(cast(TensorType, _read_type(t, symbols, known)) for t in text))
    if text not in known:
        known[text] = parse_type(text, symbols)
    return known[text]
