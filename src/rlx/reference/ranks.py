"""Runs a graph on every rank of a mesh at once, in one process: the oracle of programs with collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rlx.errors import InputError
from rlx.ir.graph import Graph, Node
from rlx.ir.mesh import Mesh, ShardingError
from rlx.ir.operand import Arrays
from rlx.ir.rewrite import substitute_dims
from rlx.reference.interpreter import Interpreter


class _Rank(Interpreter):
    """One rank: what others must take part in is handed to it."""

    met: dict[int, np.ndarray]

    def compute(self, node: Node) -> Arrays:
        if node.id in self.met:
            value = self.met.pop(node.id)
            self._check_result(node, node.tensor, value)
            return value
        return super().compute(node)


def evaluate_ranks(
    graph: Graph,
    mesh: Mesh,
    inputs: Sequence[Mapping[str, object]],
    params: Sequence[Mapping[str, object]] | None = None,
) -> list[dict[str, np.ndarray]]:
    """Outputs of every rank for the inputs (and params) of every rank.

    >>> import rlx
    >>> g = rlx.Graph()
    >>> g.output("y", rlx.ops.all_reduce(g.input("x", (2,), "f32"), axis="tp", ranks=2))
    >>> ones = np.ones(2, np.float32)
    >>> evaluate_ranks(g, Mesh({"tp": 2}), [{"x": ones}, {"x": 2 * ones}])[1]["y"]
    array([3., 3.], dtype=float32)
    """
    if len(inputs) != mesh.size:
        raise InputError(f"{mesh} has {mesh.size} ranks, but inputs were given for {len(inputs)}")
    ranks = [_Rank(graph) for _ in inputs]
    given = params or [{}] * mesh.size
    for rank, own, values in zip(ranks, inputs, given, strict=True):
        rank.met = {}
        rank._feed(graph.inputs, own, "input")
        rank._feed(list(graph.params.values()), {**graph.param_values, **values}, "param")
    live = graph.live()
    for node in graph.nodes:
        if node.id not in live:
            continue
        if node.op.has("everywhere") and node.attrs["ranks"] > 1:
            _meet(node, mesh, ranks)
        for rank in ranks:
            if node.id not in rank.values:
                rank.values[node.id] = rank.compute(node)
    return [{name: rank.array(n) for name, n in graph.outputs.items()} for rank in ranks]


def _meet(node: Node, mesh: Mesh, ranks: Sequence[_Rank]) -> None:
    """Compute a collective for every group of its axis."""
    axis, count = node.attrs["axis"], node.attrs["ranks"]
    if mesh.check_axis(axis) != count:
        raise ShardingError(
            f"{node!r} is over {count} ranks, but axis {axis!r} of {mesh} has {mesh.axes[axis]}"
        )
    for group in mesh.groups(axis):
        operands = [ranks[r].values[o.id] for r in group for o in node.operands]
        attrs = {k: substitute_dims(v, ranks[group[0]].binding) for k, v in node.attrs.items()}
        everywhere = getattr(node.op, "everywhere")  # noqa: B009 - only collectives have it
        for r, value in zip(group, everywhere(operands, **attrs), strict=True):
            ranks[r].met[node.id] = np.asarray(value)
