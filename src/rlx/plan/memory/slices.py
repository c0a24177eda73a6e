"""How a plan runs chains of kernels in slices, for pages and predictions."""

from __future__ import annotations

from rlx.ir.dim import evaluate
from rlx.ir.graph import Node
from rlx.kernel.control import loop_form, own_symbols
from rlx.plan.lir import LirBufferPlan
from rlx.records import dataclass


@dataclass(frozen=True)
class Slices:
    """`count` slices of `rows` rows each (the last may have fewer), of `total` rows, which are `name`."""

    count: int
    rows: int
    total: int
    name: str

    def __str__(self) -> str:
        """
        >>> str(Slices(2, 16, 32, "batch")), str(Slices(1, 8, 8, "8"))
        ('2 slices of 16 rows, of batch = 32', '1 slice of 8 rows, of 8')
        """
        named = "" if self.name.isdecimal() else f"{self.name} = "
        slices = f"{self.count} slice{'s' * (self.count != 1)}"
        return f"{slices} of {self.rows} row{'s' * (self.rows != 1)}, of {named}{self.total}"


def slices_of(plan: LirBufferPlan, node: Node) -> Slices | None:
    """The slices of a node; None if it does not run in slices."""
    form = loop_form(node) if node.id in plan.work else None
    if form is None or not own_symbols(form):
        return None
    size = dict(form.config)["size"]
    total, rows = evaluate(size, plan.binding), plan.work[node.id].bodies[0].binding[own_symbols(form)[0]]
    return Slices(-(-total // rows), rows, total, str(size))
