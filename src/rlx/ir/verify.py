"""The verifier: does a graph keep every rule of its level? It trusts nothing that a node says of itself."""

from __future__ import annotations

from typing import NoReturn

from rlx.errors import RlxError, VerifyError
from rlx.ir.assume import ConstraintLog, inferring
from rlx.ir.attr import Blob
from rlx.ir.bind import check_array
from rlx.ir.graph import Graph, Node, infer_type
from rlx.ir.node import are_same
from rlx.ir.op import Level, Role, all_ops, check_arity
from rlx.ir.symbols import graph_symbols
from rlx.ir.text.write import Printer
from rlx.ir.types import TupleType


def verify(graph: Graph, level: Level = Level.HIR) -> Graph:
    """Check a graph and its bodies; returns it, or raises a VerifyError that names the node.

    HIR graphs may hold every op, MIR graphs only those that lower to a form of a backend.

    >>> g = Graph()
    >>> g.output("y", abs(g.input("x", (3,), "f32")))
    >>> verify(g, Level.MIR) is g
    True
    """
    Verifier(level).graph(graph)
    for name, bounds in graph_symbols(graph).items():
        if len(bounds) > 1:
            listed = " and ".join(f"{low}..{'' if high is None else high}" for low, high in bounds)
            raise VerifyError(f"graph {graph.name!r}: symbol {name} has different bounds in places: {listed}")
    return graph


class Verifier:
    """One verification; knows which graphs it is inside of."""

    def __init__(self, level: Level) -> None:
        self.level = level
        self.declared = {op.name: op for op in all_ops()}
        self.inside: list[Graph] = []
        self.printer = Printer(locations=False)

    def graph(self, graph: Graph) -> None:
        if any(g is graph for g in self.inside):
            raise VerifyError(f"graph {graph.name!r} is a body of itself")
        self.inside.append(graph)
        for c in graph.constraints:
            if c.known() is False:
                raise VerifyError(f"graph {graph.name!r} assumes {c.describe()}, which never holds", c.where)
        log = ConstraintLog(graph.constraints)
        for position, node in enumerate(graph.nodes):
            self.place(graph, node, position)
            self.node(node, log)
        self.interface(graph)
        self.closing(graph)
        self.inside.pop()

    def place(self, graph: Graph, node: Node, position: int) -> None:
        """Ids, order, and operands that live in the graph above the node."""
        if node.id != position:
            self.fail(node, f"is number {position} of graph {graph.name!r}; its id must be %{position}")
        if node.graph is not graph:
            self.fail(node, f"says that it belongs to graph {node.graph.name!r}, but is in {graph.name!r}")
        for o in node.operands:
            if not isinstance(o, Node) or o.graph is not graph:
                self.fail(node, f"has an operand that is not a node of graph {graph.name!r}: {o!r}")
            if not 0 <= o.id < position or graph.nodes[o.id] is not o:
                self.fail(node, f"reads %{o.id}, which does not come before it")

    def node(self, node: Node, log: ConstraintLog) -> None:
        """Op, attributes, bodies and type."""
        op = node.op
        if self.declared.get(op.name) is not op:
            self.fail(node, "is an op that is not declared (or was declared again)")
        if self.level is Level.MIR and op.level is Level.HIR:
            self.fail(node, "is an HIR op in a MIR graph; expand it first with rlx.lower")
        for body in node.bodies:
            self.graph(body)
        try:
            check_arity(op, len(node.operands))
            canonical = op.canonical_attrs(node.attrs)
            with inferring(log, node.where):
                inferred = infer_type(op, node.operands, canonical, node.bodies)
        except RlxError as e:
            raise VerifyError(f"%{node.id}: {e.message}", node.where) from e
        except Exception as e:
            self.fail(node, f"has a type rule that failed with {type(e).__name__}: {e}", e)
        for key, value in canonical.items():
            if key not in node.attrs or not self.same(value, node.attrs[key]):
                self.fail(node, f"has an attribute {key!r} that is not in canonical form")
        if inferred != node.type:
            self.fail(node, f"is {node.type}, but its type rule says {inferred}")
        if log.items:
            missing = log.items[0].describe()
            self.fail(
                node, f"has a type that holds only if {missing}, which is not among the graph's assumptions"
            )

    def same(self, a: object, b: object) -> bool:
        if a is b:
            return True
        if isinstance(a, Blob):
            return a == b
        if type(a) is not type(b):
            return False
        # Texts distinguish 1 from 1.0, and find NaN equal.
        return self.printer.value_text(a) == self.printer.value_text(b)

    def interface(self, graph: Graph) -> None:
        """Inputs, params and states are listed once, with values of their types."""
        roles: dict[Role, list[Node]] = {Role.INPUT: [], Role.PARAM: [], Role.STATE: []}
        names: dict[str, Node] = {}
        for node in graph.nodes:
            if node.op.role in roles:
                roles[node.op.role].append(node)
                name = node.attrs["name"]
                if name in names:
                    self.fail(node, f"has the name {name!r}, which %{names[name].id} has already")
                names[name] = node
        listed = {
            Role.INPUT: sorted(graph.inputs, key=lambda n: n.id),
            Role.PARAM: sorted(graph.params.values(), key=lambda n: n.id),
            Role.STATE: sorted(graph.state_inputs.values(), key=lambda n: n.id),
        }
        for role, nodes in roles.items():
            if not are_same(listed[role], nodes):
                odd = ", ".join(f"%{i}" for i in sorted({n.id for n in {*nodes} ^ {*listed[role]}}))
                raise VerifyError(f"graph {graph.name!r}: its list of {role}s is not its {role} nodes: {odd}")
        for table in (graph.params, graph.state_inputs):
            for name, node in table.items():
                if node.attrs["name"] != name:
                    self.fail(node, f"is called {node.attrs['name']!r}, but is listed as {name!r}")
        for values, table in ((graph.param_values, graph.params), (graph.state_values, graph.state_inputs)):
            for name, array in values.items():
                if name not in table:
                    raise VerifyError(
                        f"graph {graph.name!r} has a value for {name!r}, but no such param or state"
                    )
                try:
                    check_array(table[name].tensor, array, {}, f"the value of {name!r}")
                except RlxError as e:
                    self.fail(table[name], e.message, e)

    def closing(self, graph: Graph) -> None:
        """Outputs and new states are tensors of the graph."""
        for name, node in graph.outputs.items():
            self.belongs(graph, node, f"output {name!r}")
        seen: set[str] = set()
        for s in graph.states:
            self.belongs(graph, s.input, f"state {s.name!r}")
            self.belongs(graph, s.output, f"the new value of state {s.name!r}")
            if graph.state_inputs.get(s.name) is not s.input or s.name in seen:
                raise VerifyError(f"graph {graph.name!r}: state {s.name!r} is listed twice or not declared")
            seen.add(s.name)
            if s.output.type != s.input.type:
                self.fail(s.output, f"is {s.output.type}, but replaces state {s.name!r} of {s.input.type}")

    def belongs(self, graph: Graph, node: Node, what: str) -> None:
        if node.graph is not graph or not 0 <= node.id < len(graph) or graph.nodes[node.id] is not node:
            raise VerifyError(
                f"graph {graph.name!r}: {what} is {node!r}, which is not one of its nodes", node.where
            )
        if isinstance(node.type, TupleType):
            self.fail(node, f"has {len(node.type.items)} results, but is {what}; pick one first")

    def fail(self, node: Node, why: str, cause: Exception | None = None) -> NoReturn:
        raise VerifyError(f"%{node.id} ({node.op.name}) {why}", node.where) from cause
