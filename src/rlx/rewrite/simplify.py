"""Simplification: rules over forms, so that they hold for every op that lowers to the form.

Nothing here changes a bit of any result: x + 0.0 stays (it turns -0.0 into 0.0), and a division becomes a
multiplication only where the reciprocal is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlx.ir.attr import attr_key
from rlx.ir.dim import Dim
from rlx.ir.dtype import DType, dtype
from rlx.ir.graph import Node
from rlx.ir.op import Role, get_op
from rlx.ir.types import Shape
from rlx.kernel.affine import affine, to_dim
from rlx.kernel.form import Reduce
from rlx.kernel.scalar import Scalar, axes, axis, const, replace_axes
from rlx.kernel.views import keeps_order
from rlx.rewrite.basic import uses_symbols
from rlx.rewrite.grouped import GROUPED
from rlx.rewrite.rules import Rule, Rules, Subject, rule
from rlx.rewrite.stacked import STACKED

FOLD_LIMIT = 1 << 16  # elements up to which an operation on constants is done at compile time
FOLD_GROWTH = 256  # elements that a folded value may always have; above, it must not outgrow its operands


# -- constants and equal nodes

FOLD: list[Rule] = []


@rule("fold constants", FOLD)
def fold(s: Subject) -> Node | None:
    """Compute what depends on constants only, where the result is small."""
    node = s.node
    if node.op.role is not Role.COMPUTE or node.bodies or node.op.effects != "none" or node.reader_side:
        return None
    if not node.operands or any(o.op.role is not Role.CONSTANT for o in node.operands):
        return None
    size = node.tensor.numel
    most = max(int(o.attrs["value"].array.size) for o in node.operands)
    if not isinstance(size, int) or size > FOLD_LIMIT or size > max(most, FOLD_GROWTH):
        return None
    if uses_symbols(node):  # (0, m) has no elements, yet its shape is not known
        return None
    with np.errstate(all="ignore"):
        value = np.asarray(node.op.ref(*(o.attrs["value"].array for o in node.operands), **node.attrs))
    if dtype(value.dtype) is not node.dtype or value.shape != node.shape:
        return None
    return node.graph.constant(value)


def common_nodes() -> Rule:
    """A rule with memory: a node that computes what an earlier one does is that one."""
    known: dict[object, Node] = {}

    def apply(s: Subject) -> Node | None:
        node = s.node
        if node.op.effects != "none":
            return None
        attrs = tuple([attr_key(v) for v in node.attrs.values()])
        key = (node.op.name, tuple(map(_identity, node.operands)), attrs, tuple(map(id, node.bodies)))
        return known.setdefault(key, node)

    return Rule("common subexpression", apply)


def _identity(node: Node) -> Any:
    """What distinguishes values. Rules create constants that no rule has seen yet: their values count."""
    return node.attrs["value"] if node.op.role is Role.CONSTANT else node.id


# -- moves: ops whose form is one load at another index

MOVES: list[Rule] = []


@rule("identity", MOVES)
def identity(s: Subject) -> Node | None:
    """Every element of an operand at its own place: reshape, transpose, slice, cast, pad ... to the same."""
    body = s.body
    if body is None or body.prim != "load":
        return None
    node, source = s.node, s.node.operands[body.data]
    return source if source.type == node.type and is_identity(body.args, node.shape) else None


def is_identity(index: Sequence[Scalar], shape: Shape) -> bool:
    """index[i] is axis i; along axes of size 1 it may also be 0."""
    return len(index) == len(shape) and all(
        e == a or (d == 1 and e == const(0)) for e, a, d in zip(index, axes(len(shape)), shape, strict=True)
    )


@rule("reshape of reshape", MOVES)
def merge_reshapes(s: Subject) -> Node | None:
    """Two views that keep the order of elements are one reshape."""
    node = s.node
    if s.moved is None or not keeps_order(node.operands[0]) or not keeps_order(node):
        return None
    made: Node = get_op("reshape")(node.operands[0].operands[0], shape=node.shape)
    return made


@rule("move of move", MOVES)
def merge_moves(s: Subject) -> Node | None:
    """transpose of transpose, slice of slice, broadcast of broadcast: one op at the composed index."""
    node, outer = s.node, s.moved
    if outer is None or node.operands[0].op.role is not Role.COMPUTE:
        return None
    inner = Subject(node.operands[0]).moved
    if inner is None:
        return None
    source = node.operands[0].operands[0]
    if source.dtype is not node.dtype:
        return None
    index = [replace_axes(i, outer) for i in inner]
    for recognise in (_as_transpose, _as_slice, _as_broadcast):
        made = recognise(source, index, node.shape)
        if made is not None and made.type == node.type:
            return made
    return None


def _as_transpose(source: Node, index: Sequence[Scalar], shape: Shape) -> Node | None:
    if len(index) != len(shape) or any(i.prim != "axis" for i in index):
        return None
    place = [i.data for i in index]  # axis of the source -> axis of the result
    if sorted(place) != list(range(len(shape))):
        return None
    made: Node = get_op("transpose")(source, perm=tuple(place.index(i) for i in range(len(shape))))
    return made


def _as_slice(source: Node, index: Sequence[Scalar], shape: Shape) -> Node | None:
    if len(index) != len(shape):
        return None
    starts: list[Dim] = []
    steps: list[int] = []
    for number, i in enumerate(index):
        parts = affine(i, len(shape))
        start = None if parts is None else to_dim(parts[1])
        if parts is None or start is None:
            return None
        own = parts[0][number]
        if not isinstance(own, int) or own == 0 or any(c != 0 for j, c in enumerate(parts[0]) if j != number):
            return None
        starts.append(start)
        steps.append(own)
    made: Node = get_op("slice")(source, starts=tuple(starts), sizes=shape, steps=tuple(steps))
    return made


def _as_broadcast(source: Node, index: Sequence[Scalar], shape: Shape) -> Node | None:
    skip = len(shape) - len(index)
    if skip < 0:
        return None
    for i, own, of_result in zip(index, source.shape, range(skip, len(shape)), strict=True):
        stretched = own == 1 and i == const(0)
        whole = i == axis(of_result) and own == shape[of_result]
        if not stretched and not whole:  # part of an axis: a slice is left
            return None
    made: Node = get_op("broadcast_to")(source, shape=shape)
    return made


# -- casts

CASTS: list[Rule] = []


def holds_exactly(narrow: DType, wide: DType) -> bool:
    """Whether every value of one dtype is a value of the other."""
    if narrow is wide:
        return True
    if narrow.is_bool:
        return wide.is_int or (wide.is_float and not wide.storage_only)
    if narrow.is_int and wide.is_int:
        return narrow.min_value >= wide.min_value and narrow.max_value <= wide.max_value
    if wide.is_float and not wide.storage_only and not narrow.is_complex:
        digits = 1 - math.log2(wide.eps)
        needed = narrow.bits - narrow.is_signed if narrow.is_int else 1 - math.log2(narrow.eps)
        wider = narrow.is_int or wide.bits > narrow.bits
        return wider and needed <= digits and narrow.max_value <= wide.max_value
    return False


@rule("cast of cast", CASTS)
def merge_casts(s: Subject) -> Node | None:
    """A cast after one that loses nothing starts from the original."""
    node = s.node
    if s.body is None or s.body.prim not in ("cast", "load") or len(node.operands) != 1:
        return None
    inner = node.operands[0]
    if inner.op is not node.op or (node.op.has("view") or not _converts(inner)):
        return None
    source = inner.operands[0]
    if not holds_exactly(source.dtype, inner.dtype):
        return None
    if source.dtype.is_int and inner.dtype.is_float and node.dtype.is_int:
        if not holds_exactly(source.dtype, node.dtype):  # floats saturate, integers wrap
            return None
    made: Node = node.op(source, **node.attrs)
    return made


def _converts(node: Node) -> bool:
    body = Subject(node).body
    return body is not None and body.prim == "cast"


# -- algebra

ALGEBRA: list[Rule] = []


def uniform(node: Node) -> Any:
    """The one value of a constant tensor, seen through views; None if there is none."""
    while node.op.role is Role.COMPUTE and node.op.has("view") and not node.reader_side:
        node = node.operands[0]
    if node.op.role is not Role.CONSTANT:
        return None
    array = node.attrs["value"].array
    if array.size == 0 or array.dtype.kind == "c":
        return None
    first = array.reshape(-1)[0]
    return first.item() if array.size == 1 or bool((array == first).all()) else None


def _is_zero(value: object, of: DType) -> bool:
    """A value that changes nothing when added: 0 of an integer, -0.0 of a float."""
    return value == 0 and (not of.is_float or math.copysign(1, value) < 0)


# (primitive, constant argument) -> whether the other argument passes unchanged next to this value
NEUTRAL: dict[tuple[str, int], Callable[[object, DType], bool]] = {
    ("mul", 0): lambda v, _: v == 1,
    ("mul", 1): lambda v, _: v == 1,
    ("div", 1): lambda v, _: v == 1,
    ("add", 0): _is_zero,
    ("add", 1): _is_zero,
    ("sub", 1): lambda v, of: v == 0 and (not of.is_float or math.copysign(1, v) > 0),
    ("pow", 1): lambda v, of: v == 1,
    ("maximum", 0): lambda v, _: v == -math.inf,
    ("maximum", 1): lambda v, _: v == -math.inf,
    ("minimum", 0): lambda v, _: v == math.inf,
    ("minimum", 1): lambda v, _: v == math.inf,
    ("logical_and", 0): lambda v, _: v is True,
    ("logical_and", 1): lambda v, _: v is True,
    ("logical_or", 0): lambda v, _: v is False,
    ("logical_or", 1): lambda v, _: v is False,
    ("bitwise_or", 0): lambda v, _: v == 0,
    ("bitwise_or", 1): lambda v, _: v == 0,
    ("bitwise_xor", 0): lambda v, _: v == 0,
    ("bitwise_xor", 1): lambda v, _: v == 0,
}

INVERSES = ("neg", "logical_not", "bitwise_not")  # primitives that undo themselves
IDEMPOTENT = ("abs", "floor", "ceil", "round", "trunc")


@rule("neutral element", ALGEBRA)
def neutral(s: Subject) -> Node | None:
    """x * 1, x / 1, x - 0, x ** 1, x and True ... are x."""
    node, found = s.node, s.applied
    if found is None or len(found[1]) != 2:
        return None
    prim, operands = found
    for at in (0, 1):
        test = NEUTRAL.get((prim, at))
        other = operands[1 - at]
        if test is None or other.type != node.type:
            continue
        value = uniform(operands[at])
        if value is not None and test(value, node.dtype):
            return other
    return None


@rule("undone", ALGEBRA)
def undone(s: Subject) -> Node | None:
    """neg(neg(x)) is x; abs(abs(x)) is abs(x)."""
    node, found = s.node, s.applied
    if found is None or len(found[1]) != 1 or found[1][0].op is not node.op:
        return None
    prim, (inner,) = found
    if prim in INVERSES:
        return inner.operands[0]
    return inner if prim in IDEMPOTENT else None


@rule("exact reciprocal", ALGEBRA)
def exact_reciprocal(s: Subject) -> Node | None:
    """x / 2**k is x * 2**-k: the same bits, and multiplications are cheaper."""
    node, found = s.node, s.applied
    if found is None or found[0] != "div" or not node.dtype.is_float:
        return None
    x, divisor = found[1]
    value = uniform(divisor)
    if value is None or not math.isfinite(value) or value == 0 or abs(math.frexp(value)[0]) != 0.5:
        return None
    inverse = 1 / value
    if not _is_normal(inverse, node.dtype) or not _is_normal(value, node.dtype):
        return None
    made: Node = get_op("mul")(x, node.graph.constant(np.asarray(inverse, node.dtype.np)))
    return made if made.type == node.type else None


def _is_normal(value: float, of: DType) -> bool:
    import ml_dtypes

    limits = ml_dtypes.finfo(of.np)  # type: ignore[no-untyped-call]
    return float(limits.smallest_normal) <= abs(value) <= float(limits.max)


@rule("square", ALGEBRA)
def square(s: Subject) -> Node | None:
    """x ** 2 is x * x, correctly rounded."""
    node, found = s.node, s.applied
    if found is None or found[0] != "pow" or not node.dtype.is_float:
        return None
    x, exponent = found[1]
    if x.type != node.type or uniform(exponent) != 2:
        return None
    made: Node = get_op("mul")(x, x)
    return made


@rule("same both ways", ALGEBRA)
def same_both_ways(s: Subject) -> Node | None:
    """where(c, x, x) is x."""
    node, found = s.node, s.applied
    if found is None or found[0] != "where":
        return None
    _, yes, no = found[1]
    return yes if yes is no and yes.type == node.type else None


# -- reductions

REDUCTIONS: list[Rule] = []


@rule("reduction of one", REDUCTIONS)
def reduction_of_one(s: Subject) -> Node | None:
    """Combining along axes of size 1 only changes the shape (but a sum of -0.0 is 0.0)."""
    node, form = s.node, s.form
    if not isinstance(form, Reduce) or form.finish is not None or form.body.prim != "load":
        return None
    source = node.operands[form.body.data]
    if form.combine in ("argmax", "argmin") or source.dtype is not node.dtype:
        return None
    if form.combine == "sum" and not node.dtype.is_int:
        return None
    if any(form.space[i] != 1 for i in form.axes) or not is_identity(form.body.args, form.space):
        return None
    made: Node = get_op("reshape")(source, shape=node.shape)
    return made


def simplify_rules() -> Rules:
    """The whole table, in the order in which rules are tried on a node."""
    return (*FOLD, *MOVES, *CASTS, *ALGEBRA, *REDUCTIONS, *STACKED, *GROUPED, common_nodes())
