"""What a plan says about collectives: which run, in which order, and the bytes that they move."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlx.config import bytes_text
from rlx.ir.dim import evaluate
from rlx.ir.graph import Node
from rlx.kernel.form import Collective
from rlx.kernel.lowering import lower_node
from rlx.plan.lir import LirBufferPlan, LirModule
from rlx.records import dataclass

if TYPE_CHECKING:
    from rlx.rewrite.sharding.propagate import Sharded

SHOWN = 3  # names of values that are cut alike


@dataclass(frozen=True)
class Exchange:
    """One collective of a program: its node, what it is, and the bytes that each rank receives in a run."""

    node: int
    what: str
    bytes: int


def exchanges(module: LirModule, plan: LirBufferPlan | None = None) -> list[Exchange]:
    """The collectives of a program in the order in which they run, at the sizes of a plan."""
    plan = plan or module.plan
    out = []
    for id in plan.schedule:
        node = module.mir.nodes[id]
        if node.op.family == "collective":
            form = lower_node(node)
            assert isinstance(form, Collective)
            out.append(Exchange(id, form.why, _received(node, plan)))
    return out


def _received(node: Node, plan: LirBufferPlan) -> int:
    """Bytes that come from other ranks: all but its own part, twice where results are handed round."""
    given, made = (evaluate(n.tensor.nbytes, plan.binding) for n in (node.operands[0], node))
    ranks = int(node.attrs["ranks"])
    if node.op.in_place:
        return 2 * made * (ranks - 1) // ranks
    return max(given, made) * (ranks - 1) // ranks


def report(module: LirModule, sharded: Sharded) -> str:
    """The part of `explain` about ranks: the mesh, what was inserted for whom, and the bytes moved."""
    met = exchanges(module)
    total = sum(e.bytes for e in met)
    axes = ", ".join(f"{axis} = {ranks}" for axis, ranks in sharded.mesh.axes.items())
    one = "collective" if len(met) == 1 else "collectives"
    lines = [f"Ranks: {axes}; {len(met)} {one}, each rank receives {bytes_text(total)} in a run"]
    if sharded.parts:
        lines.append(f"  {len(sharded.parts)} weights and states are cut:")
        by_cut: dict[str, list[str]] = {}
        for name, parts in sharded.parts.items():
            by_cut.setdefault(_cuts(parts), []).append(name)
        for cut, names in by_cut.items():
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            lines.append(f"    {cut}: {', '.join(names[:SHOWN])}{more}")
    for e in met:
        lines.append(f"  {bytes_text(e.bytes):>9}  %{e.node} {e.what}")
    if sharded.inserted:
        lines.append("Inserted where placements disagreed, by numbers before fusion")
        lines += [f"  {note}" for note in sharded.inserted]
    return "\n".join(lines)


def _cuts(parts: list[tuple[str, int]]) -> str:
    return ", ".join(f"axis {dim} over {axis}" for axis, dim in parts)
