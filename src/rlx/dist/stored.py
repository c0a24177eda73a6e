"""Sharded programs in files: every rank has one of its own, with its weights and the mesh it is part of."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.dist.environment import init
from rlx.dist.errors import TransportError
from rlx.dist.program import RankProgram
from rlx.dist.rank_files import FACT, rank_file
from rlx.dist.transport import SymmetricTransport
from rlx.ir.mesh import Mesh
from rlx.rewrite.sharding.propagate import Sharded

if TYPE_CHECKING:
    from rlx.runtime.store.artifact import Artifact


def own_file(path: Path, transport: SymmetricTransport | None) -> Path:
    """The file of this rank, if `path` names those of all ranks; else `path`."""
    if path.exists() or not any(path.parent.glob(f"{path.stem}.*of*{path.suffix}")):
        return path
    group = transport or init()
    own = rank_file(path, int(group.this_rank), group.num_ranks)
    if not own.exists():
        there = sorted(p.name for p in path.parent.glob(f"{path.stem}.*of*{path.suffix}"))
        raise TransportError(
            f"rank {group.this_rank} of {group.num_ranks} has no file {own.name}, there are "
            f"{', '.join(there)}; start as many ranks as the program was saved for"
        )
    return own


class StoredRank:
    """One rank's file, and the transport that it will run on."""

    def __init__(self, file: Artifact, transport: SymmetricTransport | None) -> None:
        about = file.facts[FACT]
        try:
            self.mesh = Mesh(about["mesh"])
            rank, self._inserted = int(about["rank"]), [str(note) for note in about["inserted"]]
            self._parts = {
                name: [(str(axis), int(dim)) for axis, dim in cuts] for name, cuts in about["parts"].items()
            }
        except (AttributeError, KeyError, TypeError, ValueError) as e:
            raise file.container.fail(f"its header does not say which rank it is of ({e!r})") from e
        self.transport = transport or init()
        here = int(self.transport.this_rank), self.transport.num_ranks
        if here != (rank, self.mesh.size):
            raise TransportError(
                f"{file.container.path} is of rank {rank} of {self.mesh.size}, this is rank {here[0]} of "
                f"{here[1]}; load the path without the rank's number, on {self.mesh.size} ranks"
            )

    def sharded(self, graph: object) -> Sharded:
        return Sharded(graph, self.mesh, self._parts, self._inserted)  # type: ignore[arg-type]

    def make(self) -> Callable[..., RankProgram]:
        """The function that builds the program of the plan in the file."""

        def program(lir: Any, *given: Any) -> RankProgram:
            return RankProgram(lir, *given, sharded=self.sharded(lir.mir), transport=self.transport)

        return program
