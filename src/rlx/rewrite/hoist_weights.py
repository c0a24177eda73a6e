"""Weights of bodies: what a body computes from weights alone is computed outside, once.

A value of a body that is a weight outside, the same in every step, is a weight of the body too. So the passes
that lay out weights (panels of matmuls and convolutions) work on bodies as on any graph; what they derive
moves out of the body and becomes an operand in place of the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rlx.ir.attr import attr_key
from rlx.ir.dtype import I8
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Role
from rlx.ir.rewrite import copy_node, inline, rewrite
from rlx.kernel.control import is_laid_out, loop_form
from rlx.kernel.form import Loop
from rlx.ops.math.elementwise import cast
from rlx.rewrite.basic import is_derivable, split_derived
from rlx.rewrite.half_weights import Halves
from rlx.rewrite.weight_layout import derived_value

Pass = Callable[[Graph], Graph]


def hoist_weights(graph: Graph, layouts: Pass) -> Graph:
    """Run `layouts` on all bodies that the program lays out, with their weights known as such."""
    if not any(is_laid_out(n) for n in graph.nodes):
        return graph
    fixed, made, halves = _weights(graph), dict[object, Node](), Halves()

    def visit(node: Node, operands: tuple[Node, ...], out: Graph) -> Node | None:
        form = loop_form(node)
        if form is None or not is_laid_out(node):
            return None
        known = [o.id in fixed for o in node.operands]
        half = [halves.of(o) if fits else None for o, fits in zip(operands, known, strict=True)]
        values = [
            derived_value(graph, o) if fits and o.dtype is I8 else None
            for o, fits in zip(node.operands, known, strict=True)
        ]
        return _Hoist(node, operands, known, half, values, form, layouts, out, made).node()

    return rewrite(graph, visit)


def _weights(graph: Graph) -> set[int]:
    """Params, constants and what can be computed from them at load."""
    fixed: set[int] = set()
    for node in graph.nodes:
        leaf = node.op.role in (Role.PARAM, Role.CONSTANT)
        made = node.op.role is Role.COMPUTE and bool(node.operands) and is_derivable(node)
        if leaf or (made and all(o.id in fixed for o in node.operands)):
            fixed.add(node.id)
    return fixed


class _Hoist:
    """One node with bodies, on its way into a new graph."""

    def __init__(
        self,
        node: Node,
        operands: Sequence[Node],
        known: list[bool],
        half: list[Node | None],
        values: list[np.ndarray | None],
        form: Loop,
        layouts: Pass,
        out: Graph,
        made: dict[object, Node],
    ) -> None:
        self.made, self.half, self.values = made, half, values
        self.old, self.operands, self.known, self.layouts, self.out = node, operands, known, layouts, out
        self.first = form.fixed_operands
        self.moving = form.fixed_inputs  # inputs that differ from step to step come first in every body

    def node(self) -> Node:
        bodies = [split_derived(self._inside(body)) for body in self.old.bodies]
        given = [self._given(main, derived) for main, derived in bodies]
        read = list(dict.fromkeys(outer for leaves in given for outer in leaves.values()))
        closed = [self._closed(main, leaves, read) for (main, _), leaves in zip(bodies, given, strict=True)]
        operands = [*self.operands[: self.first], *read]
        return self.out.add(self.old.op, operands, self.old.attrs, closed, where=self.old.where)

    def _inside(self, body: Graph) -> Graph:
        """A body with weights as params and constants as constants, laid out."""
        made = Graph(body.name)
        for c in body.constraints:
            made.assume(c)
        inputs = []
        for i, n in enumerate(body.inputs):
            number = self.first + i - self.moving
            outer = self.operands[number] if i >= self.moving else None
            if outer is not None and outer.op.role is Role.CONSTANT:
                inputs.append(copy_node(outer, (), made))
            elif outer is not None and self.known[number]:
                inputs.append(self._weight(number, n, made))
            else:
                inputs.append(made.input(_name(number), n.shape, n.dtype))
        results = inline(body, inputs, made)
        made.set_outputs(dict(zip(body.outputs, results, strict=True)))
        return hoist_weights(self.layouts(made), self.layouts)

    def _weight(self, number: int, given: Node, inside: Graph) -> Node:
        """A weight inside a body, which sees that it is widened from 16 bits, and what bytes are: their sizes
        decide about their layout."""
        half = self.half[number]
        if half is None:
            return inside.param(_name(number), given.shape, given.dtype, self.values[number])
        made: Node = cast(inside.param(_name(number), half.shape, half.dtype), dtype=given.dtype)
        return made

    def _given(self, main: Graph, derived: Graph | None) -> dict[int, Node]:
        """What to pass for the leaves that a body reads of what is fixed, by their ids in it."""
        sources = zip(self.operands, self.half, strict=True)
        outer = {_name(i): o if half is None else half for i, (o, half) in enumerate(sources)}
        if derived is not None:
            inside: dict[int, Node] = {}
            for n in derived.nodes:
                if n.op.role is Role.PARAM:
                    inside[n.id] = outer[n.attrs["name"]]
                else:
                    inside[n.id] = self._made_once(n, [inside[o.id] for o in n.operands])
            outer |= {name: inside[n.id] for name, n in derived.outputs.items()}
        live = main.live()
        leaves = [*main.inputs[self.moving :], *main.params.values()]
        return {n.id: outer[n.attrs["name"]] for n in leaves if n.id in live}

    def _made_once(self, node: Node, operands: Sequence[Node]) -> Node:
        """A node that computes weights, outside; weights of several bodies are computed once."""
        attrs = tuple(attr_key(v) for v in node.attrs.values())
        key = (node.op.name, tuple(o.id for o in operands), attrs)
        if key not in self.made:
            self.made[key] = copy_node(node, operands, self.out)
        return self.made[key]

    def _closed(self, main: Graph, leaves: dict[int, Node], read: Sequence[Node]) -> Graph:
        """A body with inputs alone: those that move, then all that is `read` of what is fixed."""
        made = Graph(main.name)
        for c in main.constraints:
            made.assume(c)
        mapping = {
            n.id: made.input(f"in{i}", n.shape, n.dtype) for i, n in enumerate(main.inputs[: self.moving])
        }
        fixed = {o: made.input(f"in{self.moving + i}", o.shape, o.dtype) for i, o in enumerate(read)}
        mapping |= {id: fixed[outer] for id, outer in leaves.items()}
        live = main.live()
        for n in main.nodes:
            if n.id not in mapping and n.id in live:
                mapping[n.id] = copy_node(n, [mapping[o.id] for o in n.operands], made)
        made.set_outputs({name: mapping[n.id] for name, n in main.outputs.items()})
        return made


def _name(number: int) -> str:
    """The name that an operand has in a body."""
    return f"operand{number}"
