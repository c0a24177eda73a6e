"""How the axes of operands and results hang together, read from forms: what propagation of shards rests on.

A form has an iteration space. Where an axis of it indexes operands and the result directly, each rank can do
its part of the axis: operands and result are cut along the same places. An axis that is reduced leaves every
rank with a partial result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlx.ir.dim import known_eq
from rlx.ir.graph import Node
from rlx.ir.mesh import PARTIAL_KINDS
from rlx.ir.op import Role
from rlx.ir.types import Shape, TupleType
from rlx.kernel.form import Collective, Contract, Conv, Cumulate, Form, Map, Pieces, Reduce, Scatter
from rlx.kernel.lowering import lower_node
from rlx.kernel.scalar import LOADS, Scalar, load_index
from rlx.kernel.views import keeps_order
from rlx.ops.array.shape import matching_groups
from rlx.records import dataclass


@dataclass(frozen=True)
class Link:
    """One axis of an iteration space: where it runs in each operand (None: not at all) and in the result.

    Without a place in the result the axis is reduced by `combine`.
    """

    operands: tuple[int | None, ...]
    result: int | None
    combine: str | None = None


def form_of(node: Node) -> Form | None:
    """The form of a node that is one kernel with one result."""
    plain = node.op.role is Role.COMPUTE and node.op.host_only is None and not node.bodies
    if not plain or isinstance(node.type, TupleType):
        return None
    return lower_node(node)


def links(node: Node) -> list[Link]:
    """The axes along which a node can be cut, in the order of its iteration space."""
    form = form_of(node)
    if form is None:
        return []
    if keeps_order(node):
        return list(_renamed(node))
    if isinstance(form, Map):
        return _by_body(node, form.space, [form.body])
    if isinstance(form, Pieces):
        whole = [
            all(p.offset[a] == 0 and p.extent[a] == d for p in form.pieces) for a, d in enumerate(form.space)
        ]
        return [k for k in _by_body(node, form.space, [p.body for p in form.pieces]) if whole[k.result or 0]]
    if isinstance(form, Cumulate):
        return [k for k in _by_body(node, form.space, [form.body]) if k.result != form.axis]
    if isinstance(form, Reduce) and form.finish is None:
        return _by_body(node, form.space, [form.body], form)
    if isinstance(form, Contract):
        return list(_contracted(form))
    if isinstance(form, Conv) and form.groups == 1:
        return [Link((0, None), 0), Link((None, 0), 1), Link((1, 1), None, "sum")]
    if isinstance(form, Scatter):
        return list(_scattered(node, form))
    if isinstance(form, Collective):
        return [Link((i,), j) for i, j in form.pairs]
    return []


def _contracted(form: Contract) -> Iterator[Link]:
    at = 0
    for i, j in form.batch:
        yield Link((i, j), at)
        at += 1
    for i, j in form.contract:
        yield Link((i, j), None, "sum")
    for side, rank in ((0, len(form.lhs)), (1, len(form.rhs))):
        taken = {pair[side] for pair in (*form.batch, *form.contract)}
        for i in range(rank):
            if i not in taken:
                yield Link((i, None) if side == 0 else (None, i), at)
                at += 1


def _renamed(node: Node) -> Iterator[Link]:
    """A reshape: of axes that are split or joined, the outermost of each side run along each other."""
    source = node.operands[0].shape
    for left, right in matching_groups(source, node.shape) or ():
        outer = next((i for i in left if source[i] != 1), None)
        inner = next((j for j in right if node.shape[j] != 1), None)
        if outer is not None and inner is not None:
            yield Link((outer,), inner)


def _scattered(node: Node, form: Scatter) -> Iterator[Link]:
    """Along axes that go to their own place each rank writes its part; sums over others are partial."""
    direct = [i.data if i.prim == "axis" else None for i in form.index]
    reader = _Reader(node, form.space)
    for e in (*(i for i in form.index if i.prim != "axis"), form.value):
        reader.read(e)
    for a, size in enumerate(form.space):
        operands = None if a in reader.spoilt else reader.operands(a)
        if operands is None or operands[form.base] is not None:
            continue
        to = [d for d, axis in enumerate(direct) if axis == a]
        if len(to) == 1 and known_eq(form.shape[to[0]], size) is True:
            yield Link((*operands[: form.base], to[0], *operands[form.base + 1 :]), to[0])
        elif not to and form.combine == "add" and _is_zero(node.operands[form.base]):
            yield Link(operands, None, "sum")


def _is_zero(node: Node) -> bool:
    """Whether a value is zero everywhere by construction: a constant, repeated or moved."""
    if node.op.role is Role.CONSTANT:
        return not node.attrs["value"].array.any()
    form = form_of(node)
    return isinstance(form, Map) and form.body.prim == "load" and _is_zero(node.operands[form.body.data])


class _Reader:
    """Where each axis of a space indexes each operand; axes that do anything else are overwritten."""

    def __init__(self, node: Node, space: Shape) -> None:
        self.node, self.space = node, space
        self.places: dict[tuple[int, int], set[int | None]] = {}  # (axis, operand) -> places in its loads
        self.spoilt: set[int] = set()

    def read(self, e: Scalar) -> None:
        if e.prim == "axis":
            self.spoilt.add(e.data)
        elif e.prim in LOADS:
            index = load_index(e)
            direct = [i.data if i.prim == "axis" else None for i in index]
            for a in range(len(self.space)):
                found = [d for d, axis in enumerate(direct) if axis == a]
                shape = self.node.operands[e.data].shape
                fits = len(found) <= 1 and all(known_eq(shape[d], self.space[a]) is True for d in found)
                if not fits:
                    self.spoilt.add(a)
                self.places.setdefault((a, e.data), set()).add(found[0] if found else None)
            for other in e.args[: len(e.args) - len(index)]:
                self.read(other)
            for i in index:
                if i.prim != "axis":
                    self.read(i)
        else:
            for argument in e.args:
                self.read(argument)

    def operands(self, a: int) -> tuple[int | None, ...] | None:
        """The place of an axis in every operand; None if it has several."""
        found = [self.places.get((a, o), {None}) for o in range(len(self.node.operands))]
        return tuple(next(iter(p)) for p in found) if all(len(p) == 1 for p in found) else None


def _by_body(node: Node, space: Shape, bodies: Sequence[Scalar], reduce: Reduce | None = None) -> list[Link]:
    reader = _Reader(node, space)
    for body in bodies:
        reader.read(body)
    reduced = reduce.axes if reduce is not None else ()
    kept = [a for a in range(len(space)) if a not in reduced]
    if len(node.shape) == len(space):  # reduced axes may stay, with size 1
        kept = list(range(len(space)))
    out = []
    for a in range(len(space)):
        operands = None if a in reader.spoilt else reader.operands(a)
        if operands is None:
            continue
        if a not in reduced:
            out.append(Link(operands, kept.index(a)))
        elif reduce is not None and reduce.combine in PARTIAL_KINDS:
            out.append(Link(operands, None, reduce.combine))
    return out


# -- partial values


def passes_partial(node: Node, operands: Sequence[int], kind: str) -> bool:
    """Whether a node applied to partial operands (the others whole) gives a partial result of that kind."""
    form, inside = form_of(node), set(operands)
    if isinstance(form, Contract):
        return kind == "sum" and len(inside) == 1 and node.operands[0] is not node.operands[1]
    if isinstance(form, Reduce):
        combines = form.finish is None and form.combine == kind
        return combines and _passes(form.body, inside, kind)
    if isinstance(form, Map):
        return _passes(form.body, inside, kind)
    return isinstance(form, Pieces) and all(_passes(p.body, inside, kind) for p in form.pieces)


def _passes(e: Scalar, inside: set[int], kind: str) -> bool:
    if kind != "sum":  # only moves keep the order of values for certain
        return e.prim == "load" and e.data in inside and _free(e.args, inside)
    return _linear(e, inside)


def _free(expressions: Sequence[Scalar], inside: set[int]) -> bool:
    return not any(x.prim in LOADS and x.data in inside for e in expressions for x in e.walk())


def _linear(e: Scalar, inside: set[int]) -> bool:
    """Whether an expression is a linear function (no constant term) of what is loaded from `inside`."""
    if e.prim == "const":
        return bool(e.data == 0)
    if e.prim in ("load", "load_checked"):
        return e.data in inside and _free(e.args, inside)
    if e.prim == "load_or":
        zero = e.args[1].prim == "const" and bool(e.args[1].data == 0)
        return zero and e.data in inside and _free((e.args[0], *e.args[2:]), inside)
    if e.prim in ("add", "sub", "neg"):
        return all(_linear(a, inside) for a in e.args)
    if e.prim == "mul":
        a, b = e.args
        return (_linear(a, inside) and _free([b], inside)) or (_linear(b, inside) and _free([a], inside))
    if e.prim == "div":
        return e.dtype.is_float and _linear(e.args[0], inside) and _free(e.args[1:], inside)
    if e.prim == "where":
        return _free(e.args[:1], inside) and all(_linear(a, inside) for a in e.args[1:])
    return False
