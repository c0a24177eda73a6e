"""What every transport can do, and the few things that all of them check alike."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from rlx.dist.errors import LengthMismatch, TransportError, UnknownRank
from rlx.dist.types import Rank, ReduceKind, SymmetricBuffer
from rlx.ir.dtype import ALL_DTYPES
from rlx.records import dataclass

Array = np.ndarray
Partition = Sequence[Sequence[int]]

DEFAULT_HEAP_BYTES = 256 << 20


OPS = ("barrier", "split", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
_KINDS = ("", *(kind.value for kind in ReduceKind))


@dataclass(frozen=True)
class CollectiveCall:
    """The purpose of a rank's rendezvous. Ranks whose calls differ get an error instead of each other's data.

    >>> call = CollectiveCall("broadcast", "f32", root=2)
    >>> str(call), CollectiveCall.from_tag(call.tag) == call
    ('broadcast(f32, root 2)', True)
    """

    op: str
    dtype: str = ""
    kind: str = ""
    root: int = 0
    row_bytes: int = 0
    """Bytes of one row along the first axis, which must agree where lengths need not."""

    @functools.cached_property
    def tag(self) -> int:
        """The call as one integer below 2**63, which ranks can compare."""
        numbers = (
            OPS.index(self.op),
            _KINDS.index(self.kind),
            _dtype_names().index(self.dtype),
            self.root % 2**16,
        )
        packed = sum(number << shift for number, shift in zip(numbers, (0, 4, 8, 16), strict=True))
        return packed | self.row_bytes % 2**31 << 32

    @staticmethod
    def from_tag(tag: int) -> CollectiveCall:
        op, kind, dtype, root = tag & 15, tag >> 4 & 15, tag >> 8 & 255, tag >> 16 & 0xFFFF
        return CollectiveCall(OPS[op], _dtype_names()[dtype], _KINDS[kind], root, tag >> 32)

    def __str__(self) -> str:
        details = [self.dtype, self.kind.upper(), f"root {self.root}" if self.op == "broadcast" else ""]
        listed = ", ".join(detail for detail in details if detail)
        return f"{self.op}({listed})" if listed else self.op


@functools.cache
def _dtype_names() -> tuple[str, ...]:
    return ("", *(dtype.name for dtype in ALL_DTYPES))


# What `again` returns when all is moved; verdicts of a rendezvous are smaller.
DONE = 1 << 20


class Step(NamedTuple):
    """One piece of an exchange: at sources[i] stand sizes[i] bytes of what the i-th sender has for this rank.

    They are its bytes from `start` on, out of totals[i]. The addresses hold until the exchange is advanced.
    In a shared exchange results go to `destinations`.
    """

    start: int
    totals: Sequence[int]
    sizes: Sequence[int]
    sources: Sequence[int]
    destinations: Sequence[int] = ()


class Repeat(NamedTuple):
    """A call as its caller made it: the objects by which it is known again."""

    op: str
    how: object
    buf: SymmetricBuffer | None
    array: Array
    out: Array


class Outgoing(NamedTuple):
    """What a rank brings to an exchange: an array cut into regions of bytes, one for each receiver.

    With a single region every rank receives all of it. `sender` is set when only one rank sends. With
    `share` the receiver's results go back to all ranks, into the same place of their arrays. `overwritten`
    says that results go into the array at once, so that others must not read it in place. `into` says
    where results are wanted: (address, bytes from one sender's part to the next), those of a reduction if
    `reduce` is the address of its native code. `repeat` is what the caller may come
    again with, `met` the verdict of the first rendezvous, if it is over.
    """

    array: Array
    regions: Sequence[tuple[int, int]]
    sender: int | None = None
    share: bool = False
    overwritten: bool = False
    into: tuple[int, int] | None = None
    reduce: int = 0
    repeat: Repeat | None = None
    met: int | None = None

    def overlaps(self, ranks: int, me: int | None = None) -> bool:
        """Whether results are stored in the array; those of rank `me` may already be in place."""
        if self.into is None or self.share or self.sender is not None:
            return False
        own, (to, stride) = address_of(self.array), self.into
        if me is not None and len(self.regions) == 1 and not self.reduce and to + me * stride == own:
            return False
        size = max(length for _, length in self.regions)
        return to < own + self.array.nbytes and own < to + stride * (ranks - 1) + size


@dataclass(frozen=True)
class Costs:
    """What the choice between all-reduce algorithms depends on, in nanoseconds; the same on every rank.

    One-shot: everybody sends everything and reduces everything (one rendezvous). Two-shot: everybody reduces its
    slice and sends it back (two rendezvous, but no byte is reduced twice).
    """

    meeting: float
    copy_byte: float
    reduce_byte: float

    def one_shot_pays(self, nbytes: int, ranks: int) -> bool:
        """Whether one-shot is expected to be faster.

        >>> costs = Costs(meeting=1000, copy_byte=0.05, reduce_byte=0.05)
        >>> costs.one_shot_pays(8 << 10, 4), costs.one_shot_pays(1 << 20, 4)
        (True, False)
        """
        one = self.meeting + nbytes * (self.copy_byte + self.reduce_byte * ranks)
        two = 2 * self.meeting + nbytes * (2 * self.copy_byte + self.reduce_byte)
        return one <= two


@runtime_checkable
class SymmetricTransport(Protocol):
    """Ranks with a symmetric heap. A transport belongs to one rank and is used by one thread at a time.

    `timeout=None` means the transport's own default (30 s unless configured), never forever.
    """

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        raise NotImplementedError

    @property
    def this_rank(self) -> Rank:
        """Which one this is."""
        raise NotImplementedError

    @property
    def heap_size(self) -> int:
        """Bytes of every rank's heap."""
        raise NotImplementedError

    @property
    def timeout(self) -> float:
        """Default limit of a wait, in seconds."""
        raise NotImplementedError

    @property
    def costs(self) -> Costs:
        """What the choice of algorithms depends on."""
        raise NotImplementedError

    def put(self, buf: SymmetricBuffer, src: object) -> None:
        """Copy `src` into the region of `buf.rank`. Over MPI it is complete after the next barrier."""

    def get(self, buf: SymmetricBuffer, dst: object) -> None:
        """Copy the region of `buf.rank` into `dst`."""

    def barrier(self, timeout: float | None = None) -> None:
        """Wait until every rank is here."""

    def view(self, rank: int, buf: SymmetricBuffer) -> Array:
        """The bytes of the region in `rank`'s heap, zero-copy, where memory is shared."""
        raise NotImplementedError

    def put_signal(self, buf: SymmetricBuffer, src: object, signal: int = 0) -> None:
        """`put`, then count the receiver's signal up by one: who sees the signal sees the data."""

    def wait_signal(self, signal: int = 0, count: int = 1, timeout: float | None = None) -> None:
        """Wait for `count` signals and use them up."""

    def abort(self, reason: str) -> None:
        """End this rank's part: ranks that wait for it raise `RankFailed` with the reason."""

    def alloc(self, nbytes: int) -> SymmetricBuffer:
        """A new region of the heap. All ranks allocate the same sizes in the same order."""
        raise NotImplementedError

    def free(self, buf: SymmetricBuffer) -> None:
        """Give a region back; all ranks free in the same order too."""

    def split(self, groups: Partition) -> SymmetricTransport:
        """The group of this rank as a separate transport; all ranks pass the same partition."""
        raise NotImplementedError

    def again(
        self,
        op: str,
        how: object,
        buf: SymmetricBuffer | None,
        array: Array,
        out: Array,
        timeout: float | None,
    ) -> int | None:
        """Repeat a call that moved these very arrays before, if the transport remembers it.

        None: it does not, and nothing was done. Else `DONE`, or what the first rendezvous found, for
        `Outgoing.met`.
        """
        raise NotImplementedError

    def exchange(self, call: CollectiveCall, out: Outgoing, timeout: float | None) -> Iterable[Step]:
        """Move an array between all ranks, piece by piece: the engine under the collectives.

        There are not steps if all of it is already where `out.into` says.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Leave. Ranks that still wait for this one raise `RankFailed`."""


# Where NumPy's array object holds the address of its data: the first field of its ABI. Asking in Python
# takes 1 us.
_DATA_FIELD = object.__basicsize__


def address_of(array: Array) -> int:
    """Address of an array's first element.

    >>> array = np.zeros(3)
    >>> address_of(array) == array.ctypes.data
    True
    """
    return ctypes.c_void_p.from_address(id(array) + _DATA_FIELD).value or 0


def as_bytes(data: Any, writable: bool = False) -> Array:
    """Memory of `data` as a flat byte array, without a copy where it will be written."""
    array = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
    if writable and not (array.flags.c_contiguous and array.flags.writeable):
        raise TransportError(
            f"the destination array {array.shape} must be writable and contiguous; pass a copy"
        )
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def check_length(buf: SymmetricBuffer, data: Array) -> None:
    if data.nbytes != buf.len:
        raise LengthMismatch(buf.len, data.nbytes, f"the array for the buffer at offset {buf.offset}")


def check_rank(rank: int, num_ranks: int) -> int:
    if not 0 <= rank < num_ranks:
        raise UnknownRank(int(rank), num_ranks)
    return int(rank)


def group_of(rank: int, groups: Partition, num_ranks: int) -> tuple[int, ...]:
    """The members of the group that holds `rank`, after checking that the groups are a partition.

    >>> group_of(2, [[0, 2], [1]], 3)
    (0, 2)
    """
    listed = sorted(int(member) for group in groups for member in group)
    if listed != list(range(num_ranks)):
        raise TransportError(
            f"the groups {[list(g) for g in groups]} do not name each of {num_ranks} ranks once"
        )
    return next(tuple(int(member) for member in group) for group in groups if rank in group)
