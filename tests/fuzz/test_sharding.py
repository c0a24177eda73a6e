"""Random graphs with random placements on 2 or 3 ranks: each gets its part of what one rank computes."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rlx
from random_graphs import SIZES, graphs
from rlx.dist import Mesh, Shard, run_threads
from rlx.ir.dim import divides, symbols
from rlx.ir.dim import evaluate as size_of
from rlx.ir.graph import Graph
from rlx.ir.types import Shape
from rlx.reference.interpreter import evaluate
from rlx.reference.ranks import evaluate_ranks
from rlx.rewrite.sharding.propagate import shard
from sharded_runs import Placements, assert_parts, feeds


def places(shape: Shape, ranks: int, symbolic: bool) -> list[int]:
    """Axes that can be cut; symbols only where a value enters, because they count parts from then on."""
    plain = [not isinstance(d, int) and str(d) in symbols(d) for d in shape]
    return [
        i
        for i, d in enumerate(shape)
        if divides(ranks, d) is True or (symbolic and plain[i] and size_of(d, SIZES) % ranks == 0)
    ]


@st.composite
def sharded_graphs(draw: Any) -> tuple[Graph, dict[str, np.ndarray], Mesh, Placements]:
    graph, feed = draw(graphs(smooth=True))
    mesh = Mesh({"r": draw(st.sampled_from([2, 3]))})
    shardings: Placements = {}
    entering = {n.attrs["name"]: n for n in graph.inputs} | graph.params
    for name, node in {**graph.outputs, **entering}.items():
        axes = places(node.shape, mesh.size, symbolic=name in entering)
        axis = draw(st.none() | st.sampled_from(axes)) if axes else None
        if axis is not None:
            shardings[name] = {"r": Shard(axis)}
    return graph, feed, mesh, shardings


@settings(max_examples=max(150, settings().max_examples), suppress_health_check=list(HealthCheck))
@given(sharded_graphs())
def test_the_sharding_pass_keeps_the_meaning(made: tuple[Graph, dict[str, Any], Mesh, Placements]) -> None:
    graph, feed, mesh, shardings = made
    whole = rlx.optimize(rlx.lower(graph))
    done = shard(whole, mesh, shardings)
    values = []
    for rank in range(mesh.size):
        done.fill(whole, rank)
        values.append(dict(done.graph.param_values))
    got = evaluate_ranks(done.graph, mesh, feeds(feed, shardings, mesh), values)
    assert_parts(got, evaluate(graph, feed), shardings, mesh, 1e-9)


@settings(
    max_examples=max(15, settings().max_examples), suppress_health_check=list(HealthCheck), deadline=None
)
@given(sharded_graphs())
def test_ranks_run_it_natively(made: tuple[Graph, dict[str, Any], Mesh, Placements]) -> None:
    graph, feed, mesh, shardings = made
    given_to = feeds(feed, shardings, mesh)

    def work(transport: Any) -> dict[str, np.ndarray]:
        program = rlx.compile(graph, threads=1, mesh=mesh, shardings=shardings, transport=transport)
        out: dict[str, np.ndarray] = program.run(given_to[int(transport.this_rank)])
        return out

    assert_parts(run_threads(mesh.size, work), evaluate(graph, feed), shardings, mesh, 1e-9)
