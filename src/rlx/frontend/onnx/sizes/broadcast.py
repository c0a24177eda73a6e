"""Broadcasting of sizes that are not written as 1 but are never more, like that of x[-1:]."""

from __future__ import annotations

from rlx import ops
from rlx.errors import current_where
from rlx.frontend.onnx.call import Call
from rlx.ir.dim import Constraint, Dim, dim_min, known_eq, known_le
from rlx.ir.graph import Node


def stretches(n: Call, d: Dim, other: Dim) -> bool:
    """Whether a size is a 1 next to a different one. That it is not 0 there becomes a guard."""
    if d == 1:
        return other != 1
    if known_le(d, 1) is not True or known_eq(d, other) is True or known_le(other, 1) is True:
        return False
    least = dim_min(other, 1)
    if known_le(least, d) is not True:
        n.graph.assume(Constraint("min", d, least, current_where()))
    return True


def aligned(n: Call, *operands: Node) -> list[Node]:
    """Operands of an op that broadcasts, where sizes that stretch are written as 1."""
    out = list(operands)
    for axis in range(-max(x.rank for x in operands), 0):
        sizes = {x.shape[axis] for x in operands if x.rank >= -axis} - {1}
        if len(sizes) < 2:
            continue
        others = [d for d in sizes if known_le(d, 1) is not True]
        for i, x in enumerate(operands):
            if x.rank >= -axis and x.shape[axis] != 1 and any(stretches(n, x.shape[axis], d) for d in others):
                out[i] = _as_one(out[i], x.rank + axis)
    return out


def _as_one(x: Node, axis: int) -> Node:
    """The same with a size of 1 on an axis of at most 1: one that is 0 is padded, and then read by nobody."""
    missing: Dim = 1 - x.shape[axis]
    padding = [(0, missing if i == axis else 0) for i in range(x.rank)]
    return ops.reshape(ops.pad(x, padding), [1 if i == axis else d for i, d in enumerate(x.shape)])
