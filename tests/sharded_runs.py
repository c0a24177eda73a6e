"""Helpers for tests of sharded programs: random placements, and cutting and joining values by them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rlx.ir.dim import divides
from rlx.ir.graph import Graph
from rlx.ir.mesh import Mesh, Partial, Placement, Replicate, Shard

Arrays = dict[str, np.ndarray]
Placements = dict[str, dict[str, Placement]]


def random_shardings(graph: Graph, mesh: Mesh, rng: np.random.Generator, share: float = 0.6) -> Placements:
    """Some inputs, params and outputs cut along axes that divide, each along one axis of the mesh."""
    named = {n.attrs["name"]: n for n in graph.inputs} | graph.params | graph.outputs
    out: Placements = {}
    for name, node in named.items():
        for axis, ranks in mesh.axes.items():
            taken = {p.dim for p in out.get(name, {}).values() if isinstance(p, Shard)}
            dims = [d for d, n in enumerate(node.shape) if divides(ranks, n) is True and d not in taken]
            if dims and rng.random() < share:
                out.setdefault(name, {})[axis] = Shard(int(rng.choice(dims)))
    return out


def cut(value: np.ndarray, placements: Mapping[str, Placement], mesh: Mesh, rank: int) -> np.ndarray:
    """One rank's part of a value; of a partial one, rank 0 of the axis holds it all."""
    at = mesh.coordinates(rank)
    for axis, ranks in mesh.axes.items():
        placement = placements.get(axis, Replicate())
        if isinstance(placement, Shard):
            value = np.split(value, ranks, placement.dim)[at[axis]]
        elif isinstance(placement, Partial) and at[axis] > 0:
            value = np.zeros_like(value)
    return np.array(value, order="C")


def feeds(inputs: Arrays, shardings: Placements, mesh: Mesh) -> list[Arrays]:
    """What every rank is given."""
    return [
        {name: cut(value, shardings.get(name, {}), mesh, rank) for name, value in inputs.items()}
        for rank in range(mesh.size)
    ]


def assert_parts(
    outputs: list[Arrays], want: Arrays, shardings: Placements, mesh: Mesh, scale: float
) -> None:
    """Every rank's outputs are its parts of what the whole program gives."""
    for rank, own in enumerate(outputs):
        assert own.keys() == want.keys()
        for name, value in want.items():
            part = cut(value, shardings.get(name, {}), mesh, rank)
            assert own[name].shape == part.shape, name
            np.testing.assert_allclose(
                own[name], part, rtol=scale, atol=scale, err_msg=f"{name}, rank {rank}"
            )
