"""Values of small nodes that depend on constants only: scales, zero points, bounds.

Each node of a graph is asked about once. Networks with skip connections have more paths than any machine can
follow, so a node keeps the answer, "no number" too.
"""

from __future__ import annotations

import numpy as np

from rlx.ir.node import Node
from rlx.ir.op import Role
from rlx.ir.types import TupleType
from rlx.rewrite.basic import uses_symbols

SMALL = 1 << 16  # elements of parameters whose value is worked out


def number_of(node: Node) -> np.ndarray | None:
    """The value of a small node that depends on constants only; None for every other node.

    >>> from rlx.ir.graph import Graph
    >>> g = Graph()
    >>> x, two = g.input("x", (3,), "f32"), g.constant(np.float32(2))
    >>> number_of(two * two), number_of(x * two) is None
    (array(4., dtype=float32), True)
    """
    stack = [node]
    while stack:
        at = stack[-1]
        ask = at._number is None and _is_small(at)
        unknown = [o for o in at.operands if o._number is None] if ask else []
        if unknown:
            stack += unknown
            continue
        stack.pop()
        if at._number is None:
            at._number = (_value(at),)
    assert node._number is not None
    return node._number[0]


def _is_small(node: Node) -> bool:
    """Whether a node is computed by a plain op, from operands, and has few elements."""
    if node.op.role is not Role.COMPUTE or node.bodies or node.op.effects != "none":
        return False
    if not node.operands or isinstance(node.type, TupleType):
        return False
    size = node.tensor.numel
    return isinstance(size, int) and size <= SMALL and not uses_symbols(node)


def _value(node: Node) -> np.ndarray | None:
    if node.op.role is Role.CONSTANT:
        return np.asarray(node.attrs["value"].array)
    values = [o._number[0] if o._number else None for o in node.operands] if _is_small(node) else [None]
    if any(v is None for v in values):
        return None
    with np.errstate(all="ignore"):
        return np.asarray(node.op.ref(*values, **node.attrs))
