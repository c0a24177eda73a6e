"""Reductions over an axis along which values were stacked: the values themselves are combined.

Models that hold complex numbers as pairs stack real and imaginary parts only to sum their squares.
"""

from __future__ import annotations

from functools import reduce

from rlx.ir.graph import Node
from rlx.ir.op import Role, get_op
from rlx.kernel.form import Map, Pieces, Reduce
from rlx.kernel.lowering import lower_node
from rlx.kernel.scalar import axis
from rlx.kernel.views import keeps_order
from rlx.rewrite.rules import Rule, Subject, rule

STACKED: list[Rule] = []

MOST_PARTS = 4
MOST_BETWEEN = 8  # ops between the stack and the reduction
COMBINE = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum"}


@rule("reduction of a stack", STACKED)
def reduction_of_stack(s: Subject) -> Node | None:
    """sum(f(stack(a, b))) is f(a) + f(b), for elementwise f and slices along other axes."""
    node, form = s.node, s.form
    if not isinstance(form, Reduce) or len(form.axes) != 1 or form.finish is not None:
        return None
    (along,) = form.axes
    count, source = form.space[along], node.operands[0]
    if form.combine not in COMBINE or not isinstance(count, int) or not 2 <= count <= MOST_PARTS:
        return None
    if source.dtype is not node.dtype or form.body.prim != "load" or source.shape != form.space:
        return None
    parts = [_Part(along, i).of(source) for i in range(count)]
    made = [p for p in parts if p is not None]
    if len(made) != count:
        return None
    if form.combine == "sum" and not node.dtype.is_int and not _is_square(made[0]):
        made[0] = made[0] + 0.0  # a sum starts from 0.0, which -0.0 is not
    total: Node = reduce(get_op(COMBINE[form.combine]), made)
    if total.shape == node.shape:
        return total
    out: Node = get_op("reshape")(total, shape=node.shape)
    return out


def _is_square(node: Node) -> bool:
    if node.op.family != "elementwise" or len(node.operands) != 2 or node.operands[0] is not node.operands[1]:
        return False
    form = lower_node(node)
    return isinstance(form, Map) and form.body.prim == "mul"


class _Part:
    """One element along an axis of values that come from a stack."""

    def __init__(self, along: int, number: int) -> None:
        self.along, self.number, self.left = along, number, MOST_BETWEEN
        self.known: dict[int, Node | None] = {}

    def of(self, node: Node) -> Node | None:
        """The part, without the axis; None where a value is not a stack."""
        if node.id not in self.known:
            self.left -= 1
            self.known[node.id] = self._find(node) if self.left >= 0 else None
        return self.known[node.id]

    def _find(self, node: Node) -> Node | None:
        if node.op.role is Role.CONSTANT and node.rank == 0:
            return node
        subject = Subject(node)
        form = subject.form
        if isinstance(form, Pieces):
            return self._stacked(node, form)
        if not isinstance(form, Map):
            return None
        found = subject.applied
        if found is not None and len(found[1]) == len(node.operands):
            if any(o.rank and o.shape != node.shape for o in node.operands):
                return None
            operands = [self.of(o) for o in node.operands]
            if all(o is not None for o in operands):
                return node.graph.add(
                    node.op, [o for o in operands if o is not None], node.attrs, where=node.where
                )
            return None
        if (
            node.op.family == "slice"
            and subject.moved is not None
            and subject.moved[self.along] == axis(self.along)
        ):
            part = self.of(node.operands[0])
            if part is None or node.shape[self.along] != node.operands[0].shape[self.along]:
                return None
            made: Node = node.op(part, **{k: self._rest(v) for k, v in node.attrs.items()})
            return made
        return None

    def _rest(self, items: tuple[object, ...]) -> tuple[object, ...]:
        return (*items[: self.along], *items[self.along + 1 :])

    def _stacked(self, node: Node, form: Pieces) -> Node | None:
        """A concatenation along the axis of values that have one element there."""
        if len(form.pieces) != form.space[self.along] or len(node.operands) != len(form.pieces):
            return None
        if any(p.extent[self.along] != 1 or p.body.prim != "load" for p in form.pieces):
            return None
        if node.op.family != "concat" or node.attrs["axis"] != self.along:
            return None
        part = node.operands[self.number]
        shape = self._rest(part.shape)
        if keeps_order(part) and part.operands[0].shape == shape:
            return part.operands[0]
        made: Node = get_op("reshape")(part, shape=shape)
        return made
