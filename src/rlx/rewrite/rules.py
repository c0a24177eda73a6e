"""The engine under the small rewrites: a table of named rules, tried on every node, each firing recorded.

A rule looks at one node (as a `Subject`, which knows its form) and gives the node that should stand in its
place, or None. Operands are rewritten before their readers, so a rule sees operands that no rule applies to
any more. A result whose type rules must assume more about sizes than the graph does is not taken. Tables are
tuples of rules and compose by `+`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TypeAlias

from rlx.errors import VerifyError
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Role
from rlx.ir.rewrite import copy_node, rewrite
from rlx.ir.types import TupleType
from rlx.kernel.form import Form, Map, Pieces
from rlx.kernel.lowering import lower_node
from rlx.kernel.scalar import Scalar
from rlx.records import dataclass

MOST_FIRINGS = 50  # on one node; more means that rules undo each other


class Subject:
    """A node under the eyes of rules: what its form says about it, worked out once."""

    def __init__(self, node: Node) -> None:
        self.node = node

    @cached_property
    def form(self) -> Form | None:
        """The form of a node that is computed by one from operands; None for all others."""
        node = self.node
        if (
            node.op.role is not Role.COMPUTE
            or node.op.host_only is not None
            or node.bodies
            or not node.operands
        ):
            return None
        return lower_node(node)

    @cached_property
    def body(self) -> Scalar | None:
        """What a map computes at every point."""
        form = self.form
        if isinstance(form, Map):
            return form.body
        if isinstance(form, Pieces) and len(form.pieces) == 1:
            return form.pieces[0].body
        return None

    @cached_property
    def moved(self) -> tuple[Scalar, ...] | None:
        """Where operand 0 is read, by an op that only moves its elements."""
        body = self.body
        return (
            body.args if body is not None and body.prim == "load" and len(self.node.operands) == 1 else None
        )

    @cached_property
    def applied(self) -> tuple[str, list[Node]] | None:
        """Primitive and arguments of a plain elementwise op."""
        body = self.body
        if body is None or not body.args or any(a.prim != "load" for a in body.args):
            return None
        return body.prim, [self.node.operands[a.data] for a in body.args]


Apply: TypeAlias = Callable[[Subject], Node | None]


@dataclass(frozen=True)
class Rule:
    """A named rewrite of one node."""

    name: str
    apply: Apply


Rules: TypeAlias = tuple[Rule, ...]


@dataclass(frozen=True, slots=True)
class Firing:
    """One rewrite that happened: the rule, the node's id before the pass, its op, and where it came from."""

    rule: str
    node: int
    op: str
    where: tuple[str, ...]

    def __str__(self) -> str:
        at = f" (at {', '.join(self.where)})" if self.where else ""
        return f"{self.rule}: %{self.node} {self.op}{at}"


def rule(name: str, table: list[Rule]) -> Callable[[Apply], Apply]:
    """Decorator: the function is a rule of `table`."""

    def enter(apply: Apply) -> Apply:
        table.append(Rule(name, apply))
        return apply

    return enter


def apply_rules(graph: Graph, rules: Sequence[Rule], log: list[Firing] | None = None) -> Graph:
    """Rewrite every live node until no rule applies to it; firings are appended to `log`.

    >>> g = Graph()
    >>> x = g.input("x", (2,), "f32")
    >>> g.output("y", -(-x))
    >>> twice = Rule("neg twice", lambda s: s.node.operands[0].operands[0] if s.node.id == 2 else None)
    >>> log = []
    >>> apply_rules(g, (twice,), log).outputs["y"].op.name, [f.rule for f in log]
    ('input', ['neg twice'])
    """
    fired = log if log is not None else []

    def visit(node: Node, operands: tuple[Node, ...], out: Graph) -> Node | None:
        now = copy_node(node, operands, out)
        if now.op.role not in (Role.COMPUTE, Role.CONSTANT) or isinstance(now.type, TupleType):
            return now
        for _ in range(MOST_FIRINGS):
            subject = Subject(now)
            for one in rules:
                mark = out.mark()
                made = one.apply(subject)
                if len(out.constraints) > mark[1]:  # it would hold for fewer sizes than the graph does
                    out.take_back(mark)
                elif made is not None and made is not now:
                    break
            else:
                return now
            if made.type != now.type:
                raise VerifyError(
                    f"rule {one.name!r} turned {now!r} into {made!r}, of another type", node.where
                )
            if node.op.role is Role.COMPUTE:  # that equal constants are one goes without saying
                fired.append(Firing(one.name, node.id, node.op.name, node.where))
            now = made
        names = ", ".join(dict.fromkeys(f.rule for f in fired[-MOST_FIRINGS:]))
        raise VerifyError(f"rules {names} rewrite %{node.id} ({node.op.name}) without end", node.where)

    return rewrite(graph, visit)
