"""Which values of a graph are known when a program is loaded, and where their bytes begin."""

from __future__ import annotations

from rlx.ir.graph import Graph
from rlx.ir.op import Role

ALIASED = 4096  # loads and stores whose addresses agree modulo this wait for each other, on any machine


def weight_ids(graph: Graph) -> set[int]:
    """Nodes that depend on params and constants only and have a static shape."""
    fixed: set[int] = set()
    for node in graph.nodes:
        if node.op.role in (Role.PARAM, Role.CONSTANT):
            fixed.add(node.id)
        elif node.op.role is Role.COMPUTE and node.operands and not node.reader_side:
            if all(o.id in fixed for o in node.operands):
                fixed.add(node.id)
    return fixed


def weight_start(end: int, nbytes: int) -> int:
    """Where a weight of `nbytes` begins behind byte `end`: at a cache line, or at 4 KiB if it fills that.

    Large outputs begin mid-page. A load waits for a recent store with the same last 12 address bits, which
    can double the time of kernels that read scale and shift while they store.

    >>> weight_start(100, 200), weight_start(100, 5000)
    (128, 4096)
    """
    return round_up(end, ALIASED if nbytes >= ALIASED else 64)


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `value`.

    >>> round_up(65, 64)
    128
    """
    return -(-value // multiple) * multiple
