"""Meshes of ranks with named axes, placements of tensors (sharded, replicated, partial), and collectives."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

from rlx.errors import ConfigError, ShapeError
from rlx.records import dataclass

if TYPE_CHECKING:
    from rlx.ir.graph import Graph, Node

PARTIAL_KINDS = ("sum", "max", "min", "prod")


class ShardingError(ConfigError, ShapeError):
    """A placement that a program cannot have."""


@dataclass(frozen=True)
class Shard:
    """Every rank holds an equal part of axis `dim`, in the order of the ranks."""

    dim: int

    def __str__(self) -> str:
        return f"Shard({self.dim})"


@dataclass(frozen=True)
class Replicate:
    """Every rank holds the whole value."""

    def __str__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True)
class Partial:
    """Every rank holds a value of the whole shape; combined over the ranks they are the value."""

    kind: str = "sum"

    def __post_init__(self) -> None:
        if self.kind not in PARTIAL_KINDS:
            raise ShardingError(f"Partial({self.kind!r}) is unknown; use one of {', '.join(PARTIAL_KINDS)}")

    def __str__(self) -> str:
        return f"Partial({self.kind!r})"


Placement: TypeAlias = Shard | Replicate | Partial
Placements: TypeAlias = Mapping[str, Placement]  # axis of the mesh -> placement; axes left out replicate


class Mesh:
    """Ranks in a grid with named axes; the last axis runs fastest.

    >>> mesh = Mesh({"dp": 2, "tp": 2})
    >>> mesh.size, mesh.coordinates(3), mesh.groups("tp"), mesh.groups("dp")
    (4, {'dp': 1, 'tp': 1}, ((0, 1), (2, 3)), ((0, 2), (1, 3)))
    """

    def __init__(self, axes: Mapping[str, int]) -> None:
        self.axes = dict(axes)
        for name, count in self.axes.items():
            if not isinstance(name, str) or not name or not isinstance(count, int) or count < 1:
                raise ShardingError(
                    f"mesh axis {name!r} of {count!r} ranks is not valid; give a name and a count"
                )
        self.size = math.prod(self.axes.values())

    def __repr__(self) -> str:
        return f"Mesh({self.axes})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and list(self.axes.items()) == list(other.axes.items())

    def __hash__(self) -> int:
        return hash(tuple(self.axes.items()))

    def check_axis(self, axis: str) -> int:
        """How many ranks an axis has."""
        if axis not in self.axes:
            raise ShardingError(f"the mesh has no axis {axis!r}; it has: {', '.join(self.axes) or 'none'}")
        return self.axes[axis]

    def coordinates(self, rank: int) -> dict[str, int]:
        """The number of a rank along every axis."""
        if not 0 <= rank < self.size:
            raise ShardingError(f"there is no rank {rank} in {self}; it has {self.size} ranks")
        out = {}
        for name, count in reversed(self.axes.items()):
            rank, out[name] = divmod(rank, count)
        return {name: out[name] for name in self.axes}

    def rank_at(self, coordinates: Mapping[str, int]) -> int:
        """The rank with these coordinates."""
        rank = 0
        for name, count in self.axes.items():
            rank = rank * count + coordinates[name]
        return rank

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """The ranks that meet along an axis: one group for every place on the other axes."""
        self.check_axis(axis)
        others = [range(count) for name, count in self.axes.items() if name != axis]
        names = [name for name in self.axes if name != axis]
        out = []
        for place in itertools.product(*others):
            fixed = dict(zip(names, place, strict=True))
            out.append(tuple(self.rank_at({**fixed, axis: i}) for i in range(self.axes[axis])))
        return tuple(out)

    def group_of(self, axis: str, rank: int) -> tuple[int, ...]:
        """The group of one rank."""
        return next(group for group in self.groups(axis) if rank in group)


def meetings(graph: Graph, in_body: bool = False) -> Iterator[tuple[Node, bool]]:
    """Nodes of a graph and of bodies in it that need more ranks than one, and whether they are in a body."""
    for node in graph.nodes:
        if node.op.has("everywhere") and node.attrs["ranks"] > 1:
            yield node, in_body
        for body in node.bodies:
            yield from meetings(body, True)
