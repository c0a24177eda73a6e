"""Matmuls that do not depend on earlier steps of a loop run before it.

A matmul in a body that reads only values from outside the loop is the same in every step: it is computed
once. One of a row that a scan goes along with a matrix from around it (the inputs of a recurrent layer, as
exporters write them) runs for all rows at once: then the matrix is read once, not in every step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rlx.errors import RlxError
from rlx.ir.dim import evaluate
from rlx.ir.graph import Graph, Node
from rlx.ir.node import place_of
from rlx.ir.op import Role
from rlx.ir.rewrite import copy_node, inline, rewrite
from rlx.ir.types import TupleType, type_symbols
from rlx.kernel.control import loop_form
from rlx.kernel.form import Contract, Conv, Form, Loop, Map, Pieces, Reduce
from rlx.kernel.lowering import lower_node
from rlx.ops.control.bodies import batched, new_body, splice
from rlx.rewrite.rules import Firing

FIXED, ROW, CARRIED = range(3)
"""How a value of a body moves: not at all, with the rows of a scan, with what steps hand on."""


def products_ahead(graph: Graph, fired: list[Firing] | None = None) -> Graph:
    """Move matmuls out of loop bodies, where they do not depend on earlier steps."""
    if not any(loop_form(n) is not None for n in graph.nodes):
        return graph

    def visit(node: Node, operands: tuple[Node, ...], out: Graph) -> Node | None:
        form = loop_form(node)
        if form is None:
            return None
        bodies = [products_ahead(body, fired) for body in node.bodies]
        if form.control in ("scan", "loop"):
            made = _Body(node, bodies[0], form).ahead(operands, out)
            if made is not None:
                if fired is not None:
                    fired.append(Firing("products ahead of their loop", node.id, node.op.name, node.where))
                return made
        same = all(new is old for new, old in zip(bodies, node.bodies, strict=True))
        return None if same else out.add(node.op, operands, node.attrs, bodies, where=node.where)

    return rewrite(graph, visit)


class _Body:
    """The body of a scan or loop, with how each of its values moves."""

    def __init__(self, node: Node, body: Graph, form: Loop) -> None:
        self.node, self.body, self.form = node, body, form
        self.carries, self.first = form.carries, form.fixed_inputs
        self.scanned = self.first - self.carries if form.control == "scan" else 0
        self.length = node.attrs.get("length", 0)
        self.moves: dict[int, int] = {}
        self.forms: dict[int, Form] = {}
        for n in body.nodes:
            self.moves[n.id] = self._move(n)
        self.users, self.live = body.users(), body.live()

    def _move(self, node: Node) -> int:
        if node.op.role is Role.INPUT:
            at = place_of(node, self.body.inputs)
            row = self.carries <= at < self.carries + self.scanned
            return FIXED if at >= self.first else ROW if row else CARRIED
        if node.op.role is Role.CONSTANT:
            return FIXED
        form = self._plain_form(node)
        move = max((self.moves[o.id] for o in node.operands), default=FIXED)
        if form is None or (move == FIXED and _checks_places(form)):
            return CARRIED  # a loop of no steps must not stumble over a place that it never reads
        self.forms[node.id] = form
        return move

    def _plain_form(self, node: Node) -> Form | None:
        """What a node computes, if it could be computed elsewhere."""
        if node.op.role is not Role.COMPUTE or node.bodies or node.op.effects != "none":
            return None
        if node.op.host_only is not None or node.op.finds_size or isinstance(node.type, TupleType):
            return None
        form = lower_node(node)
        return form if isinstance(form, (Map, Pieces, Reduce, Contract, Conv)) else None

    def ahead(self, operands: Sequence[Node], out: Graph) -> Node | None:
        """The loop with its matmuls moved before it; None if there are none, or it is not possible."""
        fixed, rows = self._ends(FIXED), self._ends(ROW)
        try:
            made_rows = self._all_rows(rows, operands, out) if rows else []
        except RlxError:  # an op that knows no batches
            rows, made_rows = [], []
        if not fixed and not rows:
            return None
        last = self.form.fixed_operands
        made_fixed = inline(self._part(self.body.inputs[self.first :], fixed), operands[last:], out)
        body = self._rest(fixed, rows)
        attrs = dict(self.node.attrs)
        if rows:
            attrs["scanned"] = self.scanned + len(rows)
        given = [*operands[:last], *made_rows, *operands[last:], *made_fixed]
        return out.add(self.node.op, given, attrs, [body], where=self.node.where)

    def _ends(self, move: int) -> list[Node]:
        """Matmuls that move so (a fixed one with its results) and are read by something else. Views
        of them stay with their readers."""
        inside: set[int] = set()
        for n in self.body.nodes:
            if n.id in self.forms and self.moves[n.id] == move and n.id in self.live:
                after = move == FIXED and any(o.id in inside for o in n.operands)
                if after or self._is_product(n, move):
                    inside.add(n.id)
        results = {n.id for n in self.body.outputs.values()}
        read: set[int] = set()  # of these, what is read elsewhere, or whose view is
        for n in reversed(self.body.nodes):
            readers = [u for u in self.users[n.id] if u.id in self.live]
            if n.id in results or any(
                u.id not in inside or (u.op.has("view") and u.id in read) for u in readers
            ):
                read.add(n.id)
        return [n for n in self.body.nodes if n.id in inside & read and not n.op.has("view")]

    def _is_product(self, node: Node, move: int) -> bool:
        form = self.forms[node.id]
        if move == FIXED:
            return isinstance(form, (Contract, Conv))
        if not isinstance(form, Contract):
            return False
        kept = [o for o in node.operands[:2] if self.moves[o.id] == FIXED]
        # all rows of a matmul that is larger than its matrix would take more memory than they save reads
        return len(kept) == 1 and kept[0].rank > 1 and _least(node) <= _least(kept[0])

    def _part(self, inputs: Sequence[Node], ends: Sequence[Node]) -> Graph:
        """What computes some values from some inputs, as a graph."""
        part = new_body(self.body.name, [n.tensor for n in inputs])
        mapping = {old.id: new for old, new in zip(inputs, part.inputs, strict=True)}
        with part.building():
            for n in self._behind(ends):
                if n.id not in mapping:
                    mapping[n.id] = copy_node(n, [mapping[o.id] for o in n.operands], part)
        part.set_outputs([mapping[n.id] for n in ends])
        return part

    def _behind(self, ends: Sequence[Node]) -> list[Node]:
        found, stack = set[int](), [n.id for n in ends]
        while stack:
            i = stack.pop()
            if i not in found:
                found.add(i)
                stack += [o.id for o in self.body.nodes[i].operands]
        return [self.body.nodes[i] for i in sorted(found)]

    def _all_rows(self, rows: Sequence[Node], operands: Sequence[Node], out: Graph) -> list[Node]:
        """Values of all steps of a scan, stacked."""
        inputs = self.body.inputs[self.carries :]
        flags = [i < self.scanned for i in range(len(inputs))]
        whole, _ = batched(self._part(inputs, rows), flags, self.length)
        return splice(whole, operands[self.carries :], out)

    def _rest(self, fixed: Sequence[Node], rows: Sequence[Node]) -> Graph:
        """The body that is given these values: rows after those it had, fixed values at the end."""
        old = self.body.inputs
        order = [*old[: self.first], *rows, *old[self.first :], *fixed]
        rest = new_body(self.body.name, [n.tensor for n in order])
        for c in self.body.constraints:
            rest.assume(c)
        mapping = {n.id: new for n, new in zip(order, rest.inputs, strict=True)}
        kept = _still_needed(self.body, mapping.keys())
        with rest.building():
            for n in self.body.nodes:
                if n.id in kept and n.id not in mapping:
                    mapping[n.id] = copy_node(n, [mapping[o.id] for o in n.operands], rest)
        rest.set_outputs([mapping[n.id] for n in self.body.outputs.values()])
        return rest


def _still_needed(body: Graph, given: Collection[int]) -> set[int]:
    """Nodes that outputs need where some are given, and those that find sizes."""
    found = set[int]()
    stack = [*body.outputs.values(), *(n for n in body.nodes if n.op.finds_size)]
    while stack:
        node = stack.pop()
        if node.id not in found and node.id not in given:
            found.add(node.id)
            stack += node.operands
    return found


def _least(node: Node) -> int:
    """Elements where every symbol is 1."""
    return evaluate(node.tensor.numel, dict.fromkeys(type_symbols(node.type), 1))


def _checks_places(form: Form) -> bool:
    if isinstance(form, Pieces):
        return any(e.prim == "load_checked" for p in form.pieces for e in p.body.walk())
    return isinstance(form, Map) and any(e.prim == "load_checked" for e in form.body.walk())
