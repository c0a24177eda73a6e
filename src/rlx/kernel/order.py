"""The order of a kernel's elements in memory: which axis its lanes follow, and strides of what it stores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx.ir.dim import Dim
from rlx.ir.graph import Node
from rlx.ir.op import Role, get_op
from rlx.ir.types import Shape
from rlx.kernel.affine import affine, to_dim
from rlx.kernel.form import Map, Reduce, Strides, dense, dense_strides
from rlx.kernel.legality import same_space
from rlx.kernel.lowering import lower_node
from rlx.kernel.scalar import LOADS, load_index
from rlx.kernel.views import keeps_order


def adds_by_columns(form: Reduce, operands: Sequence[Shape]) -> bool:
    """Whether lanes of a reduction run along the last axis that is kept, rather than the last reduced one.

    So it is where neighbours in memory lie along it if the operands are dense, whatever they really are: the
    order in which a sum adds must not depend on what it shares a kernel with.

    >>> from rlx.ir.dtype import F32
    >>> from rlx.kernel.scalar import axes, load
    >>> x = load(0, axes(2), F32)
    >>> [adds_by_columns(Reduce((8, 9), (i,), "sum", x, F32), [(8, 9)]) for i in (0, 1)]
    [True, False]
    """
    long = [i for i, d in enumerate(form.space) if d != 1]
    kept, reduced = [i for i in long if i not in form.axes], [i for i in long if i in form.axes]
    if not kept or not reduced:
        return False
    columns, rows = 1, 0  # the result is dense, too
    for e in form.body.walk():
        if e.prim in LOADS:
            at = [affine(i, len(form.space)) for i in load_index(e)]
            steps = dense_strides(operands[e.data])
            columns += _step(at, steps, kept[-1]) == 1
            rows += _step(at, steps, reduced[-1]) == 1
    return columns > rows


def _step(index: Sequence[Any], strides: Shape, axis: int) -> Dim | None:
    """By how many elements one step along an axis moves a load; None where that differs."""
    total: Dim = 0
    for parts, stride in zip(index, strides, strict=True):
        by = None if parts is None else to_dim(parts[0][axis])
        if by is None:
            return None
        total = total + by * stride
    return total


def stored_through(node: Node, source: Node) -> Shape | None:
    """Strides of `source` in the storage of `node`, which holds its elements in another order.

    None if it does not hold exactly them.
    """
    layout = dense(node.shape)
    while node is not source:
        if len(node.operands) != 1 or node.op.role is not Role.COMPUTE or node.op.host_only is not None:
            return None
        form = lower_node(node)
        if not isinstance(form, Map) or form.body.prim != "load":
            return None
        before = node.operands[0]
        if keeps_order(node):
            seen: Strides | None = get_op("reshape").view(layout, node.tensor, shape=before.shape)
        else:
            place = [i.data for i in form.body.args if i.prim == "axis"]
            whole = sorted(place) == list(range(node.rank)) and len(place) == before.rank
            whole = whole and same_space([node.shape[i] for i in place], before.shape)  # a slice has fewer
            seen = Strides(0, tuple(layout.strides[i] for i in place)) if whole else None
        if seen is None:
            return None
        layout, node = seen, before
    return layout.strides
