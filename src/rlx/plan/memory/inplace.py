"""In-place results: a kernel may write over an operand that nobody needs afterwards.

It may if it reads every element of that operand before it writes the same element, and reads it nowhere else.
A loop nest does so where all its loads of the operand are at the point that it stores; of several results at
a point, those stored later may read only what an earlier one has read. An update of part of a tensor writes
that part only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rlx.ir.graph import Graph, Node
from rlx.ir.op import Role
from rlx.ir.types import TupleType
from rlx.kernel.compose import body_of, compose
from rlx.kernel.form import Scatter, dense_strides
from rlx.kernel.lowering import lower_node
from rlx.kernel.nests import ComposeError, Nest, Store
from rlx.kernel.scalar import LOADS, Scalar, axis, const, load_index
from rlx.kernel.views import View


def overwritable(node: Node, number: int = 0) -> list[int]:
    """Numbers of the operands whose storage a result of a kernel (by its number) may take, in order."""
    if node.op.role is not Role.REGION:
        if isinstance(node.type, TupleType):
            return []
        if node.op.in_place:
            return [0]
        form = lower_node(node) if node.op.family == "update" else None
        return [form.base] if isinstance(form, Scatter) else []
    body = body_of(node)
    try:
        nest = compose(body)
    except ComposeError:
        return []
    if not isinstance(nest, Nest) or len(nest.stores) != len(body.outputs) or not _in_one_pass(nest):
        return []
    result = list(body.outputs.values())[number].tensor
    place = _place(nest.stores[number], dense_strides(result.shape))
    if place is None:
        return []
    made = [s.body for s in nest.stats] + [s.body for s in nest.stores]
    # A point reads an element once, when it is first needed: these before the result is stored.
    early = set(_loads(made[: len(nest.stats) + number + 1]))
    loads: dict[int, list[Scalar]] = {}
    for e in _loads(made):
        loads.setdefault(e.data, []).append(e)
    found = []
    for i, operand in enumerate(body.inputs):
        same = operand.shape == result.shape and operand.dtype.itemsize == result.dtype.itemsize
        own = loads.get(i, ())
        if same and all(e in early and _at_own_place(e, place, operand.shape) for e in own):
            found.append(i)
    return found


def _in_one_pass(nest: Nest) -> bool:
    """Whether everything that is stored at a point is stored together, after all reductions."""
    if len(nest.stores) == 1:
        return nest.stores[0].full or not nest.stats
    return not nest.stats and all(s.full for s in nest.stores)


def _loads(expressions: Iterable[Scalar]) -> Iterator[Scalar]:
    return (e for expression in expressions for e in expression.walk() if e.prim in LOADS)


def _place(store: Store, dense: Sequence[object]) -> list[int] | None:
    """Axis of the nest along each axis of the result; None if the store reorders elements."""
    strides = store.strides
    if len(strides) != len(dense):
        return None
    out: list[int] = []
    for axis_of_result in range(len(dense)):
        found = [i for i, s in enumerate(strides) if s == dense[axis_of_result] and i not in out]
        if not found:
            return None
        out.append(found[0])
    return out


def _at_own_place(e: Scalar, place: Sequence[int], shape: Sequence[object]) -> bool:
    if e.prim == "load_checked":
        return False
    index = load_index(e)
    return all(
        i == axis(p) or (d == 1 and i == const(0)) for i, p, d in zip(index, place, shape, strict=True)
    )


def share_storage(
    graph: Graph,
    order: Sequence[int],
    life: Mapping[int, tuple[int, int]],
    views: Mapping[int, View],
    overwrites: Mapping[int, Sequence[int]],
) -> dict[int, int]:
    """value -> the dying value in whose storage it is written, for a given order of kernels."""
    shared: dict[int, int] = {}
    taken: set[int] = set()
    for step, kernel in enumerate(order):
        node = graph.nodes[kernel]
        if kernel not in life:
            continue
        for value, count in _candidates(node, views, overwrites.get(kernel, ())):
            dies = value in life and life[value][1] == step
            if dies and count == 1 and value not in taken and life[kernel][0] == step:
                shared[kernel] = value
                taken.add(value)
                break
    return shared


def _candidates(node: Node, views: Mapping[int, View], numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Operands that may be overwritten, and how many operands of the kernel use their storage."""
    roots = [views[o.id].root if o.id in views else o.id for o in node.operands]
    for number in numbers:
        operand = node.operands[number]
        if operand.id not in views:
            yield operand.id, roots.count(operand.id)
