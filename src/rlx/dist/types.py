"""The small values of `rlx.dist`: ranks, regions of the symmetric heap, kinds of reduction."""

from __future__ import annotations

import enum
import operator
from rlx.records import dataclass

from rlx.dist.errors import OutOfBounds, UnknownRank


class Rank(int):
    """One member of a job, counted from 0. It is an int, so ints are accepted wherever a rank is.

    >>> Rank(1) < Rank(2), Rank(1) == 1, Rank(3)
    (True, True, Rank(3))
    """

    def __new__(cls, value: int) -> Rank:
        number = operator.index(value)
        if number < 0:
            raise UnknownRank(number, 0)
        return super().__new__(cls, number)

    def __repr__(self) -> str:
        return f"Rank({int(self)})"

    __str__ = int.__repr__


@dataclass(frozen=True, slots=True)
class SymmetricBuffer:
    """`len` bytes at `offset` in the heap of `rank`; the same offset and length are valid on every rank.

    >>> mine = SymmetricBuffer(0, 64, 16)
    >>> mine.on(2), mine.part(4, 8)
    (SymmetricBuffer(rank=2, offset=64, len=16), SymmetricBuffer(rank=0, offset=68, len=8))
    """

    rank: int
    offset: int
    len: int

    def __post_init__(self) -> None:
        # Python ints, so that offset + len cannot wrap around as fixed-width integers do.
        for name in ("rank", "offset", "len"):
            object.__setattr__(self, name, operator.index(getattr(self, name)))

    def on(self, rank: int) -> SymmetricBuffer:
        """The same region in another rank's heap."""
        return SymmetricBuffer(rank, self.offset, self.len)

    def part(self, start: int, len: int) -> SymmetricBuffer:
        """`len` bytes of this region from `start` on."""
        start, len = operator.index(start), operator.index(len)
        if start < 0 or len < 0 or start + len > self.len:
            raise OutOfBounds(self.rank, self.offset + start, len, self.offset + self.len)
        return SymmetricBuffer(self.rank, self.offset + start, len)


class ReduceKind(enum.Enum):
    """How the values of the ranks are combined, always in the order of the ranks.

    f16 and bf16 are accumulated in f32 and rounded once. Integer SUM and PROD wrap like NumPy's; integer MEAN
    is the exact mean rounded down. NaN propagates through all of them.
    """

    SUM = "sum"
    MEAN = "mean"
    MAX = "max"
    MIN = "min"
    PROD = "prod"
