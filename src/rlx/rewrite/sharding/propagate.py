"""One program for many ranks: placements spread through a graph, and collectives where they disagree.

The pass takes one axis of the mesh at a time and walks the graph forwards (`shard_walk`). What comes out is
the graph of one rank's work, the same for all of them; which rank it is enters as a param.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

import numpy as np

from rlx.cost.io import assumed_binding
from rlx.ir.dim import Constraint, Dim, Expr, divides, substitute, sym, symbols
from rlx.ir.dtype import ParamValue
from rlx.ir.graph import Graph, Node, State
from rlx.ir.mesh import (
    Mesh,
    Partial,
    Placement,
    Placements,
    Replicate,
    Shard,
    ShardingError,
    meetings,
)
from rlx.ir.op import Role
from rlx.ir.rewrite import substitute_dims
from rlx.records import dataclass
from rlx.rewrite.sharding.walk import NAMED, Inserted, Walk
from rlx.transform.expand import expand_graph

MOST_TRIALS = 16  # values that are gathered early, to see whether that is cheaper


@dataclass
class Sharded:
    """The graph of one rank, which params it holds parts of, and what was inserted."""

    graph: Graph
    mesh: Mesh
    parts: dict[str, list[tuple[str, int]]] = field(default_factory=dict)  # param or state -> (axis, dim)
    inserted: list[Inserted] = field(default_factory=list)
    rank_params: dict[str, str] = field(default_factory=dict)  # name of a param -> axis whose number it holds

    def part(self, name: str, given: ParamValue, rank: int) -> np.ndarray:
        """The part of a param's or state's whole value that a rank holds."""
        at, value = self.mesh.coordinates(rank), np.asarray(given)
        for axis, dim in self.parts.get(name, ()):
            value = np.split(value, self.mesh.axes[axis], dim)[at[axis]]
        return np.array(value) if name in self.parts else value  # a copy: the whole may be dropped

    def fill(self, whole: Graph, rank: int) -> None:
        """Give the graph one rank's parts of the values that params and states of the whole graph have."""
        graph, at = self.graph, self.mesh.coordinates(rank)
        for own, values in (
            (graph.param_values, whole.param_values),
            (graph.state_values, whole.state_values),
        ):
            for name, value in values.items():
                own[name] = self.part(name, value, rank)
        for name, axis in self.rank_params.items():
            graph.param_values[name] = np.asarray(at[axis], np.int64)


def shard(
    graph: Graph,
    mesh: Mesh,
    shardings: Mapping[str, Placements] | None = None,
    assume: Mapping[str, int] | None = None,
) -> Sharded:
    """One rank's part of a MIR graph whose named values are placed on a mesh by `shardings`.

    Sizes that are symbols and cut by an axis count one rank's part afterwards. The values of params are those
    of the whole; `Sharded.fill` gives each rank its part.

    >>> g = Graph()
    >>> x, w = g.input("x", (4, 8), "f32"), g.param("w", (8, 6), "f32")
    >>> import rlx.ops
    >>> g.output("y", rlx.ops.dot_general(x, w, ((1,), (0,))))
    >>> done = shard(g, Mesh({"tp": 2}), {"w": {"tp": Shard(0)}, "x": {"tp": Shard(1)}})
    >>> str(done.graph.params["w"].type), [i.what for i in done.inserted]
    ('f32[4,6]', ['all_reduce sum'])
    """
    given = _checked(graph, mesh, shardings or {})
    done = Sharded(graph, mesh)
    for node, in_body in meetings(graph):
        if in_body:
            told = f"{node.op.name} is in the body of a loop or branch"
            raise ShardingError(f"{told}, where collectives are not supported; move it out", node.where)
        if mesh.check_axis(node.attrs["axis"]) != node.attrs["ranks"]:
            told = f"{node.op.name} is over {node.attrs['ranks']} ranks, but {mesh} has"
            here = mesh.axes[node.attrs["axis"]]
            raise ShardingError(f"{told} {here} along {node.attrs['axis']!r}", node.where)
    for axis, ranks in mesh.axes.items():
        if ranks == 1:
            continue
        own = {name: placements[axis] for name, placements in given.items() if axis in placements}
        _shard_axis(done, axis, ranks, own, assume)
    return done


def _checked(
    graph: Graph, mesh: Mesh, shardings: Mapping[str, Placements]
) -> dict[str, dict[str, Placement]]:
    """Placements with axes counted from the front; refuses what does not name a value, an axis or a dim."""
    leaves = {n.attrs["name"]: n for n in graph.nodes if n.op.role in NAMED}
    out: dict[str, dict[str, Placement]] = {}
    for name, placements in shardings.items():
        node = leaves.get(name, graph.outputs.get(name))
        if node is None:
            known = ", ".join([*leaves, *graph.outputs])
            told = f"shardings name {name!r}, which is not an input, param, state or output"
            raise ShardingError(f"{told}; there are: {known}")
        if not isinstance(placements, Mapping):
            told = f"the sharding of {name!r} must map axes of the mesh to placements"
            raise ShardingError(f"{told}, as in {{'tp': Shard(0)}}")
        out[name] = {}
        for axis, placement in placements.items():
            mesh.check_axis(axis)
            out[name][axis] = _normal(name, node, placement)
    return out


def _normal(name: str, node: Node, placement: Placement) -> Placement:
    if isinstance(placement, Partial) and node.op.role in (Role.PARAM, Role.STATE):
        raise ShardingError(f"{name!r} cannot be {placement}; a param or state is Shard(dim) or Replicate()")
    if not isinstance(placement, Shard):
        if not isinstance(placement, (Replicate, Partial)):
            told = f"the placement of {name!r} is {placement!r}"
            raise ShardingError(f"{told}; use Shard(dim), Replicate() or Partial()")
        return placement
    dim = placement.dim + node.rank if placement.dim < 0 else placement.dim
    if not 0 <= dim < node.rank:
        raise ShardingError(f"{name!r} is {node.type} and has no axis {placement.dim} to shard")
    return Shard(dim)


def _shard_axis(
    done: Sharded, axis: str, ranks: int, given: Mapping[str, Placement], assume: Mapping[str, int] | None
) -> None:
    """Shard the graph of `done` over one axis of its mesh."""
    graph = _scaled(done.graph, _cut_symbols(done.graph, axis, ranks, given))
    binding = assumed_binding(graph, assume)
    best = Walk(graph, axis, ranks, given, binding)
    tried = best.doubtful()[:MOST_TRIALS]
    for value in tried:
        other = Walk(graph, axis, ranks, given, binding, best.gathered | {value})
        if other.cost < best.cost:
            best = other
    for name, placement in given.items():
        if isinstance(placement, Shard) and (name in best.out.params or name in best.out.state_inputs):
            done.parts.setdefault(name, []).append((axis, placement.dim))
    done.graph = expand_graph(best.out)
    done.inserted += best.inserted
    if best.rank is not None:
        done.rank_params[best.rank.attrs["name"]] = axis


def _cut_symbols(graph: Graph, axis: str, ranks: int, given: Mapping[str, Placement]) -> dict[str, Dim]:
    """Symbols that are cut: from now on they count one rank's part. Refuses sizes that do not divide."""
    out: dict[str, Dim] = {}
    for node in graph.nodes:
        placement = given.get(node.attrs["name"]) if node.op.role in NAMED else None
        if not isinstance(placement, Shard) or divides(ranks, node.shape[placement.dim]) is True:
            continue
        d = node.shape[placement.dim]
        if not isinstance(d, Expr) or str(d) not in symbols(d):
            what = f"axis {placement.dim} of {node.attrs['name']!r} ({node.type})"
            raise ShardingError(f"{what} does not divide by the {ranks} ranks of axis {axis!r}", node.where)
        out[str(d)] = ranks * sym(str(d))
    return out


def _scaled(graph: Graph, mapping: Mapping[str, Dim]) -> Graph:
    """The graph with other sizes for symbols."""
    if not mapping:
        return graph
    out = Graph(graph.name)
    for c in graph.constraints:
        lhs, rhs = substitute(c.lhs, dict(mapping)), substitute(c.rhs, dict(mapping))
        out.assume(Constraint(c.kind, lhs, rhs, c.where))
    made: dict[int, Node] = {}
    for node in graph.nodes:
        attrs = {k: substitute_dims(v, mapping) for k, v in node.attrs.items()}
        bodies = [_scaled(b, mapping) for b in node.bodies]
        made[node.id] = out.add(node.op, [made[o.id] for o in node.operands], attrs, bodies, where=node.where)
    out.param_values, out.state_values = dict(graph.param_values), dict(graph.state_values)
    out.outputs = {name: made[n.id] for name, n in graph.outputs.items()}
    out.states = [State(s.name, out.state_inputs[s.name], made[s.output.id]) for s in graph.states]
    return out
