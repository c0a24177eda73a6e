"""Outlines of graphs: names, roles, types and operands of nodes, which is all that running needs of a plan.

Control flow has its bodies in an outline, with their guards and constants, and its form; kernels have none.
An outline is written as JSON values and read back as a Graph whose ops are known by name and role alone. No
declaration of an op is loaded, no type inferred, so it must come from one's own hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np

from rlx.ir.attr import Blob
from rlx.ir.dim import Constraint, Expr, parse_dim, sym
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Op, Role, get_op
from rlx.ir.symbols import graph_symbols
from rlx.ir.types import TensorType, TupleType, Type, parse_type
from rlx.kernel.control import loop_form, set_loop_form

_KEPT = ("name", "index", "once")  # attributes by which nodes are found


class NamedOp:
    """An op by name and role; whatever else is asked of it, its declaration answers, loaded for that."""

    __slots__ = ("name", "role")

    def __init__(self, name: str, role: Role) -> None:
        self.name, self.role = name, role

    def canonical_attrs(self, attrs: Mapping[str, object]) -> Mapping[str, object]:
        return attrs

    def __getattr__(self, name: str) -> object:
        return getattr(get_op(self.name), name)

    def __repr__(self) -> str:
        return f"<op {self.name}>"


def outline(graph: Graph, blobs: dict[str, np.ndarray]) -> dict[str, object]:
    """What running needs of a graph, as JSON values; constants of bodies are added to `blobs` by digest.

    >>> g = Graph("double")
    >>> x = g.input("x", ("n",), "f32")
    >>> g.output("y", x + x)
    >>> read_outline(outline(g, {}), {}.get).outputs["y"]
    %1 = add(%0, %0) : f32[n]
    """
    bounds = {name: found[0] for name, found in graph_symbols(graph).items()}
    symbols = {name: list(b) for name, b in bounds.items() if b != (0, None)}
    return {"symbols": symbols, **_Writer(blobs).graph(graph, is_body=False)}


class _Writer:
    def __init__(self, blobs: dict[str, np.ndarray]) -> None:
        self.blobs = blobs

    def graph(self, graph: Graph, is_body: bool) -> dict[str, object]:
        return {
            "name": graph.name,
            "constraints": [[c.kind, str(c.lhs), str(c.rhs), list(c.where)] for c in graph.constraints],
            "roles": {n.op.name: n.op.role.name for n in graph.nodes},
            "nodes": [
                [
                    n.op.name,
                    [o.id for o in n.operands],
                    _type_text(n.type),
                    self.attrs(n, is_body),
                    list(n.where),
                    *self.control(n),
                ]
                for n in graph.nodes
            ],
            "inputs": [n.id for n in graph.inputs],
            "outputs": [[name, n.id] for name, n in graph.outputs.items()],
            "states": [[s.name, s.output.id] for s in graph.states],
        }

    def attrs(self, node: Node, is_body: bool) -> dict[str, object]:
        """Attributes by which nodes are found. A constant of a body has its value here, unlike a weight."""
        if node.op.role is Role.COMPUTE:
            return {}
        kept = {key: node.attrs[key] for key in _KEPT if key in node.attrs}
        if is_body and node.op.role is Role.CONSTANT:
            value: Blob = node.attrs["value"]
            self.blobs[value.digest] = value.array
            kept["value"] = value.digest
        return kept

    def control(self, node: Node) -> list[object]:
        """Form and bodies of control flow; nothing for other nodes."""
        form = loop_form(node)
        if form is None:
            return []
        config = [[key, _config_json(value)] for key, value in form.config]
        facts = [form.control, config, form.fixed_operands, form.fixed_inputs, form.carries]
        return [facts, [self.graph(body, is_body=True) for body in node.bodies]]


def read_outline(data: Mapping[str, Any], blob: Callable[[str], np.ndarray]) -> Graph:
    """The graph of an outline; `blob` gives the constants of bodies by digest."""
    symbols = {name: sym(name, low, high) for name, (low, high) in data["symbols"].items()}
    return _Reader(symbols, blob).graph(data)


class _Reader:
    def __init__(self, symbols: Mapping[str, Expr], blob: Callable[[str], np.ndarray]) -> None:
        self.symbols, self.blob = symbols, blob
        self.types: dict[str, TensorType] = {}

    def graph(self, data: Mapping[str, Any]) -> Graph:
        ops = {name: cast(Op, NamedOp(name, Role[role])) for name, role in data["roles"].items()}
        graph = Graph(data["name"])
        for kind, lhs, rhs, where in data["constraints"]:
            sides = parse_dim(lhs, self.symbols), parse_dim(rhs, self.symbols)
            graph.assume(Constraint(kind, *sides, tuple(where)))
        nodes = graph.nodes
        for op, operands, type_, attrs, where, *control in data["nodes"]:
            if "value" in attrs:
                attrs["value"] = Blob(self.blob(attrs["value"]))
            bodies = [self.graph(body) for body in control[1]] if control else ()
            inputs = [nodes[o] for o in operands]
            made = graph.add_typed(ops[op], inputs, attrs, bodies, self.type(type_), tuple(where))
            if control:
                kind, config, *counts = control[0]
                set_loop_form(made, kind, tuple((key, self.config(value)) for key, value in config), *counts)
        graph.inputs = [nodes[i] for i in data["inputs"]]
        for name, id in data["outputs"]:
            graph.output(name, nodes[id])
        for name, id in data["states"]:
            graph.set_state(name, nodes[id])
        return graph

    def type(self, text: str | list[str]) -> Type:
        if isinstance(text, list):
            return TupleType(tuple(cast(TensorType, self.type(t)) for t in text))
        if text not in self.types:
            self.types[text] = parse_type(text, self.symbols)
        return self.types[text]

    def config(self, value: object) -> object:
        match value:
            case {"dim": str(text)}:
                return parse_dim(text, self.symbols)
            case list():
                return tuple(value)
        return value


def _config_json(value: object) -> object:
    """A fact of a form; a size that is not a number is marked, as names of symbols are strings, too."""
    return {"dim": str(value)} if isinstance(value, Expr) else value


def _type_text(type_: Type) -> str | list[str]:
    return [str(t) for t in type_.items] if isinstance(type_, TupleType) else str(type_)
