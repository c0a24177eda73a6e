"""Operations of a kernel and, from them, how long one core works on it, as expressions of its sizes."""

from __future__ import annotations

from rlx.ir.dim import Dim
from rlx.ir.graph import Node
from rlx.ir.op import Level, Role, run_rule
from rlx.ir.types import tensor_types
from rlx.target.prices import DEVICES, Prices


def kernel_operations(node: Node) -> tuple[Dim, Dim]:
    """Operations of contractions and of everything else in a kernel.

    >>> from rlx.ir.graph import Graph
    >>> g = Graph()
    >>> kernel_operations(g.input("x", ("n", 8), "f32") * 2.0)
    (0, 8*n)
    """
    inside = node.bodies[0].nodes if node.op.role is Role.REGION else [node]
    heavy: Dim = 0
    light: Dim = 0
    for n in inside:
        if n.op.role is not Role.COMPUTE or n.op.level is Level.HIR or not n.op.has("cost"):
            continue
        cost: Dim = run_rule(n.op, "cost", *(o.type for o in n.operands), node=n)
        heavy, light = (heavy + cost, light) if n.op.heavy else (heavy, light + cost)
    return heavy, light


def kernel_work(node: Node, prices: Prices = DEVICES["cpu"]) -> Dim:
    """Picoseconds that one core spends on a kernel, roughly.

    >>> from rlx.ir.graph import Graph
    >>> g = Graph()
    >>> kernel_work(g.input("x", ("n", 8), "f32") * 2.0)
    880*n
    """
    heavy, light = kernel_operations(node)
    stored: Dim = 0
    for t in tensor_types(node.type):
        stored = stored + t.nbytes
    computing = heavy * prices.contraction_ps + light * prices.elementwise_ps
    return computing * prices.cores + stored * prices.store_ps
