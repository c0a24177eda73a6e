"""Ranks: symmetric memory, collectives, and how to start a program on many ranks.

>>> import numpy as np, rlx.dist as dist
>>> dist.run_threads(2, lambda transport: dist.all_reduce(transport, None, np.ones(2)).tolist())
[[2.0, 2.0], [2.0, 2.0]]
"""

from __future__ import annotations

from rlx.dist.collectives import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
from rlx.dist.environment import init
from rlx.dist.errors import (
    CollectiveError,
    LengthMismatch,
    OutOfBounds,
    RankFailed,
    RanksMissing,
    Timeout,
    TransportError,
    UnknownRank,
)
from rlx.dist.heap import SymmetricHeap
from rlx.dist.transports.local import LocalTransport, run_threads
from rlx.dist.transports.mpi import MpiTransport
from rlx.dist.transports.shm import SharedMemoryTransport
from rlx.dist.transport import SymmetricTransport
from rlx.dist.types import Rank, ReduceKind, SymmetricBuffer
from rlx.ir.mesh import Mesh, Partial, Replicate, Shard, ShardingError

__all__ = [
    "Rank",
    "SymmetricBuffer",
    "SymmetricHeap",
    "SymmetricTransport",
    "LocalTransport",
    "SharedMemoryTransport",
    "MpiTransport",
    "init",
    "ReduceKind",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "all_to_all",
    "run_threads",
    "CollectiveError",
    "OutOfBounds",
    "LengthMismatch",
    "UnknownRank",
    "TransportError",
    "RanksMissing",
    "RankFailed",
    "Timeout",
    "Mesh",
    "Shard",
    "Replicate",
    "Partial",
    "ShardingError",
]
