"""Matmuls whose right operand repeats matrices, as files with grouped heads write them: each matrix is read
where it is, by all the left operands that share it.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.ir.dim import Dim
from rlx.ir.graph import Node
from rlx.ir.op import Role, get_op
from rlx.ir.types import Shape
from rlx.kernel.scalar import Scalar, axes, const, replace_axes, size
from rlx.ops.math.contract import Axes
from rlx.rewrite.rules import Rule, Subject, rule

GROUPED: list[Rule] = []
MOST_BETWEEN = 40  # values between two matmuls


@rule("matmul with repeated matrices", GROUPED)
def without_repeats(s: Subject) -> Node | None:
    """dot_general(a, repeat(b, n, axis)) for the last batch axis: n becomes an axis of rows of a."""
    node, matmul = s.node, get_op("dot_general")
    if node.op is not matmul:
        return None
    out_dtype, at = node.attrs["out_dtype"], Axes(**{k: v for k, v in node.attrs.items() if k != "out_dtype"})
    a, b = node.operands
    if not at.batch:
        return None
    own, along = at.batch[-1]
    if any(i < own for i in at.left(a.rank)):
        return None
    found = _repeated(b, along)
    if found is None:
        return None
    matrices, times = found
    groups = matrices.shape[along]
    split = _Split(own, groups, times).of(a)

    def moved(used: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(i + (i > own) for i in used)

    made: Node = matmul(
        split,
        matrices,
        lhs_contract=moved(at.lhs_contract),
        rhs_contract=at.rhs_contract,
        lhs_batch=moved(at.lhs_batch),
        rhs_batch=at.rhs_batch,
        out_dtype=out_dtype,
    )
    out: Node = get_op("reshape")(made, shape=node.shape)
    return out


class _Split:
    """Values with an axis cut in two: groups, and the members of each.

    A matmul that was cut ends in a view that joins the two again. Where a value is computed from such a view
    alone, and from what is the same for all members, it is computed without the view.
    """

    def __init__(self, axis: int, groups: Dim, members: int) -> None:
        self.axis, self.groups, self.members = axis, groups, members
        self.made: dict[int, Node | None] = {}
        self.reshape = get_op("reshape")

    def of(self, node: Node) -> Node:
        made = self.without_view(node, node.rank)
        return self.view(node, node.rank) if made is None else made

    def shape(self, shape: Shape, rank: int) -> Shape:
        """Of a value that is broadcast to `rank` axes."""
        at = self.axis - (rank - len(shape))
        if at < 0:
            return shape
        parts = (1, 1) if shape[at] == 1 else (self.groups, self.members)
        return (*shape[:at], *parts, *shape[at + 1 :])

    def view(self, node: Node, rank: int) -> Node:
        shape = self.shape(node.shape, rank)
        made: Node = node if shape == node.shape else self.reshape(node, shape=shape)
        return made

    def without_view(self, node: Node, rank: int) -> Node | None:
        """None where a value does not come from a matmul that was cut."""
        if node.id not in self.made:
            self.made[node.id] = None if len(self.made) > MOST_BETWEEN else self._computed(node, rank)
        return self.made[node.id]

    def _computed(self, node: Node, rank: int) -> Node | None:
        if node.op is self.reshape and node.rank == rank:
            (source,) = node.operands
            return source if source.shape == self.shape(node.shape, rank) else None
        if node.rank != rank or node.op.role is not Role.COMPUTE or node.bodies:
            return None
        attrs = dict(node.attrs)
        if node.op.family == "reduction":
            if attrs.get("axes") != (rank - 1,) or attrs.get("keepdims") is not True:
                return None
            attrs["axes"] = (rank,)
        elif node.op.family not in ("elementwise", "cast"):
            return None
        operands = [self.without_view(o, rank) for o in node.operands]
        if all(o is None for o in operands):
            return None
        pairs = zip(operands, node.operands, strict=True)
        made: Node = node.op(*(self.view(o, rank) if cut is None else cut for cut, o in pairs), **attrs)
        return made if made.shape == self.shape(node.shape, rank) else None


def _repeated(node: Node, along: int) -> tuple[Node, int] | None:
    """What a node repeats n times along an axis, each element next to its copies; and n."""
    index: Sequence[Scalar] = axes(node.rank)
    source = node
    while (moved := _moves(source)) is not None:
        index = [_whole(replace_axes(i, index), node.shape) for i in moved]
        source = source.operands[0]
        times = _divisor(index, along)
        if times is not None and len(index) == node.rank:
            shape = tuple(d // times if i == along else d for i, d in enumerate(node.shape))
            matrices = _transposed(source, index, along, shape)
            if matrices is not None and matrices.dtype is node.dtype:
                return matrices, times
    return None


def _moves(node: Node) -> tuple[Scalar, ...] | None:
    """Where an op reads its operand that only moves elements."""
    if node.op.role is not Role.COMPUTE or len(node.operands) != 1:
        return None
    return Subject(node).moved


def _whole(index: Scalar, shape: Shape) -> Scalar:
    """The remainder of an axis by its size is the axis."""
    if index.prim == "mod" and index.args[0].prim == "axis":
        own, by = index.args
        if by == size(shape[own.data]):
            return own
    return index


def _divisor(index: Sequence[Scalar], along: int) -> int | None:
    """n if an index is an axis divided by n."""
    own = axes(along + 1)[along]
    for i in index:
        if i.prim == "floor_div" and i.args[0] == own and i.args[1].prim == "const":
            times = i.args[1].data
            return times if isinstance(times, int) and times > 1 else None
    return None


def _transposed(source: Node, index: Sequence[Scalar], along: int, shape: Shape) -> Node | None:
    """The source with axes in the order of an index, if each of them is one, and `along` is divided."""
    place = []
    for number, i in enumerate(index):
        if i.prim == "floor_div":
            place.append(along)
        elif i.prim == "axis":
            place.append(i.data)
        elif i == const(0) and source.shape[number] == 1:
            place.append(number)
        else:
            return None
    if sorted(place) != list(range(len(place))):
        return None
    perm = tuple(place.index(i) for i in range(len(place)))
    made: Node = source
    if perm != tuple(range(len(perm))):
        made = get_op("transpose")(source, perm=perm)
    return made if made.shape == shape else None
