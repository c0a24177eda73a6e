"""What it takes to evaluate expressions once, in all lanes: instructions, loads, the longest chain."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from rlx.cost.instructions import instructions
from rlx.cost.time.reads import Read, read_of
from rlx.cost.time.work import Setting
from rlx.kernel.scalar import LOADS, Scalar
from rlx.records import dataclass
from rlx.target.rates import Rates


@dataclass(frozen=True)
class Body:
    """Per vector of points: instructions, those of the longest chain, and loads; and operations on indices,
    which are the same for all lanes."""

    operations: float
    chain: float
    reads: tuple[Read, ...]
    indices: float = 0.0

    def vector_ps(
        self, rates: Rates, lanes: int, lane: int, stores: int = 1, ahead: float = 1.0, cut: bool = False
    ) -> float:
        """Time of one vector whose lanes run along an axis; `ahead` vectors are computed next to each other.
        `cut` says that parts of the axis have code of their own, which asks no guards."""
        loads, apart = float(stores), 0.0
        for read in self.reads:
            part = read.part if cut else 1.0
            if read.steps and read.is_apart(lane):
                index = read.index_operations if read.computes_index(lane) else 0.0
                apart += part * lanes * (rates.gather_ps + rates.index_ps * index)
            elif read.steps and read.steps[lane] != 0:
                loads += part * (1.0 if cut or not read.guarded else 3.0) * max(read.itemsize / 4, 0.5)
        waits = max(1.0, min(self.chain / (rates.window * ahead), 4.0))
        apart += self.indices * rates.index_ps
        return max(self.operations * rates.op_ps * waits, loads * rates.load_ps) + apart


def evaluated(
    at: Setting,
    bodies: Sequence[Scalar],
    space: Sequence[int],
    inner: Callable[[Scalar], bool] = lambda e: True,
    known: Collection[Scalar] = (),
    cut: bool = True,
) -> Body:
    """Expressions at one point of a space. `inner` says what is evaluated at every point, `known` what is
    there already, `cut` that code is written for each part of a concatenation."""
    operations, indices, chains, reads = 0.0, 0.0, dict[Scalar, float](), dict[Scalar, Read]()

    def visit(e: Scalar) -> float:
        nonlocal operations, indices
        if e in chains:
            return chains[e]
        chains[e] = 0.0
        if e in known or e.prim in ("const", "axis", "size", "acc"):
            return 0.0
        if e.prim in LOADS:
            reads[e] = read_of(e, at.strides[e.data], space, at.size)
            if e.prim == "load_or":
                chains[e] = max(visit(e.args[1]), 0.0 if cut else visit(e.args[0]))
            return chains[e]
        if cut and e.prim == "where" and not _reads(e.args[0]):  # which part of a concatenation: asked once
            chains[e] = max(visit(e.args[1]), visit(e.args[2]))
            return chains[e]
        below = max((visit(a) for a in e.args), default=0.0)
        own = instructions(e) if inner(e) else 0
        if not _reads(e):
            indices += own
            return 0.0
        operations += own
        chains[e] = below + own
        return chains[e]

    longest = max((visit(b) for b in bodies), default=0.0)
    return Body(operations, longest, tuple(reads.values()), indices)


def _reads(e: Scalar) -> bool:
    """Whether an expression depends on data."""
    return any(x.prim in LOADS or x.prim == "acc" for x in e.walk())
