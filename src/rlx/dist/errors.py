"""What can go wrong between ranks. Every error is a `CollectiveError` and carries its facts as fields."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.errors import CollectiveError

__all__ = [
    "CollectiveError",
    "LengthMismatch",
    "OutOfBounds",
    "RankFailed",
    "RanksMissing",
    "Timeout",
    "TransportError",
    "UnknownRank",
]


class _WithFacts(CollectiveError):
    """Keeps its arguments, so that it can be sent to another process."""

    def __init__(self, message: str, *facts: object) -> None:
        self._facts = facts
        super().__init__(message)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), self._facts, self.__dict__


class OutOfBounds(_WithFacts, IndexError):
    """A region that is not inside a rank's heap."""

    def __init__(self, rank: int, offset: int, len: int, heap_size: int) -> None:
        self.rank, self.offset, self.len, self.heap_size = int(rank), offset, len, heap_size
        message = (
            f"bytes {offset} to {offset + len} of rank {self.rank} are outside its {heap_size}-byte heap; "
            "take a buffer from alloc() or a larger heap_size"
        )
        super().__init__(message, rank, offset, len, heap_size)


class LengthMismatch(_WithFacts, ValueError):
    """Two lengths in bytes that must agree do not."""

    def __init__(self, expected: int, got: int, what: str = "the data") -> None:
        self.expected, self.got = expected, got
        message = f"{what} has {got} bytes, expected are {expected}; make the lengths equal"
        super().__init__(message, expected, got, what)


class UnknownRank(_WithFacts, LookupError):
    """A rank that this transport does not have."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        message = f"there is no rank {rank}: this transport has ranks 0 to {num_ranks - 1}"
        super().__init__(message, rank, num_ranks)


class TransportError(_WithFacts):
    """The transport cannot do what was asked, or ranks did not make the same calls."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason, reason)


class RanksMissing(_WithFacts):
    """Ranks that others wait for are gone or late; `ranks` names them, `reason` says what was seen.

    All survivors of a group raise the same error. The transport cannot be used afterwards.
    """

    def __init__(self, ranks: Sequence[int], reason: str) -> None:
        self.ranks, self.reason = tuple(int(rank) for rank in ranks), reason
        super().__init__(reason, self.ranks, reason)


class RankFailed(RanksMissing):
    """Ranks died, raised, were aborted or left."""


class Timeout(RanksMissing, TimeoutError):
    """Ranks that are not known to be dead did not come before the deadline."""
