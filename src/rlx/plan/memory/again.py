"""Graphs of kernels in which some kernels run more than once, to keep fewer values in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rlx.ir.graph import Graph, Node
from rlx.ir.op import Role
from rlx.ir.rewrite import copy_node, finish_rewrite


class Run(NamedTuple):
    """One run of a kernel: its version, and which version of each stored value it reads (0 if not said)."""

    kernel: int
    version: int
    reads: Mapping[int, int]


def with_repeats(graph: Graph, runs: Sequence[Run], roots: Mapping[int, int]) -> tuple[Graph, list[int]]:
    """The graph with one node per run, in the order of the runs, and the ids of these nodes.

    `roots` maps views to the value whose storage they use: readers of a version see views of it. The
    kernels are the same regions, so they share their code and give the same bits.
    """
    out = Graph(graph.name)
    for c in graph.constraints:
        out.assume(c)
    made: dict[tuple[int, int], Node] = {}

    def value(node: Node, reads: Mapping[int, int]) -> Node:
        """A node of the new graph, of the version that a run reads."""
        version = reads.get(roots.get(node.id, node.id), 0)
        key = (node.id, version)
        if key not in made:
            made[key] = copy_node(node, [value(o, reads) for o in node.operands], out)
        return made[key]

    with out.building():
        for node in graph.nodes:
            if node.op.role in (Role.INPUT, Role.PARAM, Role.STATE):
                value(node, {})
        kernels = []
        for run in runs:
            node = graph.nodes[run.kernel]
            operands = [value(o, run.reads) for o in node.operands]
            new = made[node.id, run.version] = copy_node(node, operands, out)
            kernels.append(new.id)
            for result in graph.results(node):
                if result is not node:
                    made[result.id, run.version] = copy_node(result, [new], out)
        mapping = {n.id: value(n, {}) for n in graph.roots()}
    finish_rewrite(graph, out, mapping)
    return out, kernels
