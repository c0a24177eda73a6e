"""Whole blocks that one op does together: peaks of a spectrum, straight from the signal.

The rule is the op's own (`joined`); whether it pays is the gate's business. Where a backend computes the
joined op from primitive ops, both ways are priced by what they expand to. Where the host must step in for it,
the choice is another: either the value between the two is read back and the host does the rest after the run,
or the host steps in during the run, and only the small result is read back.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlx.cost.decision import Decision, decide
from rlx.cost.gate import IoFusionGate
from rlx.cost.io import IoModel, profile_graph_io
from rlx.cost.profile import GraphIoProfile
from rlx.cost.sync import host_sync_op_kinds
from rlx.ir.graph import Graph, Node
from rlx.ir.op import run_rule
from rlx.ir.rewrite import copy_node, rewrite
from rlx.rewrite.basic import remove_dead
from rlx.transform.expand import expand_graph


def join_blocks(
    graph: Graph, gate: IoFusionGate, assume: Mapping[str, int] | None = None, backend: str = "cpu"
) -> tuple[Graph, list[Decision]]:
    """The graph with pairs of blocks joined where the gate agrees, and what it said about each.

    >>> from rlx.cost import default_gate
    >>> from rlx.ops import spectral_peaks, welch
    >>> g = Graph()
    >>> f, power = welch(g.input("x", (8, 4096), "f32"), nperseg=256)
    >>> for name, peaks in zip(("at", "power"), spectral_peaks(power, 3, 1 / 256)):
    ...     g.output(name, peaks)
    >>> joined, (decision,) = join_blocks(g, default_gate("cpu"))
    >>> print(decision.rule, decision.ops, decision.verdict, decision.reason)
    join welch_peaks ('welch', 'spectral_peaks') False changes no IO; gains less than 100 ns (0 ns)
    """
    if not any(n.op.has("joined") for n in graph.nodes):
        return graph, []
    readers = graph.users()
    kept = {n.id for n in graph.roots()}
    decisions: list[Decision] = []

    def visit(node: Node, operands: tuple[Node, ...], out: Graph) -> Node | None:
        if not node.op.has("joined"):
            return None
        made = run_rule(node.op, "joined", *operands, node=node)
        if made is None:
            return None
        producer = node.operands[0]
        stays = producer.id in kept or len(readers[producer.id]) > 1
        apart = copy_node(node, operands, out)
        io = IoModel(out, assume, host_sync_op_kinds(backend))
        before, after = _price(io, operands[0], apart, made, stays)
        where = tuple(dict.fromkeys((*producer.where, *node.where)))
        names = (producer.op.name, node.op.name)
        decision = decide(gate, (), before, after, rule=f"join {made.op.name}", where=where, ops=names)
        decisions.append(decision)
        return made if decision.verdict else apart

    joined = rewrite(graph, visit)
    return (rewrite(joined, lambda node, operands, out: None) if decisions else graph), decisions


def _price(
    io: IoModel, producer: Node, node: Node, made: Node, stays: bool
) -> tuple[GraphIoProfile, GraphIoProfile]:
    """IO of both ways. `stays` says that the producer's value is needed in any case."""
    if not io.waits(made):
        extra = [producer] if stays else []
        return _expanded(io, [producer, node], extra), _expanded(io, [made], extra)
    first = io.profile(producer)
    whole = GraphIoProfile(host_output_bytes=io.bytes(producer))
    after = io.profile(made) + GraphIoProfile(host_output_bytes=io.bytes(node))
    return first + whole, first + whole + after if stays else after


def _expanded(io: IoModel, chain: list[Node], extra: list[Node]) -> GraphIoProfile:
    """IO of the primitive ops of a chain of blocks, and of others whose values are needed too."""
    alone = Graph("blocks")
    given: dict[int, Node] = {}
    with alone.building():
        for block in (*extra, *chain):
            for o in block.operands:
                if o.id not in given:
                    given[o.id] = alone.input(f"x{o.id}", o.shape, o.dtype)
            operands = [given[o.id] for o in block.operands]
            given[block.id] = copy_node(block, operands, alone)
        ends = [given[b.id] for b in (*extra, chain[-1])]
        alone.set_outputs([r for end in ends for r in alone.results(end)])
    return profile_graph_io(remove_dead(expand_graph(alone)), io.binding)
