"""The contract of asynchronous copies: tokens, engines, statistics, and the engine that copies at once."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from typing import Protocol, Self

import numpy as np

from rlx.driver.region import FileMemory, HostMemory, Tile, Transfer, plan_transfer
from rlx.errors import CopyError
from rlx.records import dataclass

_MINT = object()  # only engines hold it, so nobody can invent a token


class BarrierToken:
    """One issued copy. Opaque: an engine's `issue` creates it, and only that engine understands it."""

    __slots__ = ("_engine", "_ticket")

    def __init__(self, engine: object = None, ticket: int = 0, mint: object = None) -> None:
        if mint is not _MINT:
            raise CopyError("a BarrierToken cannot be created directly; use the one that issue() returns")
        self._engine = engine
        self._ticket = ticket

    def __repr__(self) -> str:
        return f"<BarrierToken {self._ticket} of {type(self._engine).__name__}>"


@dataclass(frozen=True)
class CopyStats:
    """What an engine has done so far, in seconds; `waited` is how long callers stood still in `wait`."""

    copies: int = 0
    bytes: int = 0
    busy: float = 0.0
    waited: float = 0.0

    @property
    def overlap(self) -> float:
        """Share of the copying time that was hidden under the callers' own work: 0 = none, 1 = all.

        >>> CopyStats(copies=4, bytes=1 << 20, busy=2.0, waited=0.5).overlap
        0.75
        """
        return max(0.0, 1.0 - self.waited / self.busy) if self.busy > 0 else 0.0

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / self.busy if self.busy > 0 else 0.0

    def since(self, earlier: CopyStats) -> CopyStats:
        """What was done after the snapshot `earlier`."""
        return CopyStats(
            self.copies - earlier.copies,
            self.bytes - earlier.bytes,
            self.busy - earlier.busy,
            self.waited - earlier.waited,
        )


class AsyncCopy(Protocol):
    """An engine that copies tiles while its caller works. Its copies finish in the order of issue."""

    def issue(self, src: object, dst: object, nbytes: int | None = None) -> BarrierToken:
        """Start copying the first `nbytes` bytes (default: all) of `src` to the start of `dst`.

        Both are arrays, bytes-like objects, buffers or tiles (1-D, or rows at a pitch). Bounds and aliasing
        are checked before anything starts. The engine keeps both alive until the copy is finished.
        """
        ...

    def wait(self, token: BarrierToken) -> None:
        """Return when the copy is finished; raise its error if it failed. Waiting twice is fine."""
        ...

    def done(self, token: BarrierToken) -> bool:
        """Whether `wait(token)` would return at once."""
        ...

    def drain(self) -> None:
        """Wait for every copy; raise the first error that no `wait` has raised yet."""
        ...

    def close(self) -> None:
        """Finish every copy and give up the engine. Closing twice is fine; issuing afterwards is an error."""
        ...

    @property
    def stats(self) -> CopyStats:
        """Copies, bytes, time spent copying and time spent waiting, up to now."""
        ...


class CopyEngine(ABC):
    """What all engines share: checks at issue, tickets, remembered failures, statistics.

    A concrete engine starts a transfer (`_start`), says how many are finished (`_finished`, a count, since
    they finish in order) and blocks for one (`_block`).
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._issued = 0
        self._closed = False
        self._failures: dict[int, CopyError] = {}
        self._unreported: list[int] = []
        self._copies = self._bytes = 0
        self._busy = self._waited = 0.0

    @abstractmethod
    def _accept(self, transfer: Transfer) -> None:
        """Raise CopyError for memory that this engine cannot reach."""

    @abstractmethod
    def _start(self, ticket: int, transfer: Transfer) -> None:
        """Begin the transfer; called with the lock held, in the order of tickets."""

    @abstractmethod
    def _finished(self) -> int:
        """Number of finished copies. Books their time and failures through `_book`."""

    @abstractmethod
    def _block(self, ticket: int) -> None:
        """Return when the copy is finished; called without the lock."""

    def _release(self) -> None:  # noqa: B027 - an engine without resources has nothing to release
        """Give up threads and queues; called once, with every copy finished."""

    def _book(self, ticket: int, nbytes: int, seconds: float, failure: CopyError | None = None) -> None:
        self._copies += 1
        self._busy += seconds
        if failure is None:
            self._bytes += nbytes
        else:
            self._failures[ticket] = failure
            self._unreported.append(ticket)

    def issue(self, src: object, dst: object, nbytes: int | None = None) -> BarrierToken:
        transfer = plan_transfer(src, dst, nbytes)
        self._accept(transfer)
        with self._lock:
            if self._closed:
                raise CopyError(f"this {type(self).__name__} is closed; make a new one")
            self._start(self._issued + 1, transfer)
            self._issued += 1
            return BarrierToken(self, self._issued, _MINT)

    def wait(self, token: BarrierToken) -> None:
        ticket = self._ticket_of(token)
        began = time.perf_counter()
        self._block(ticket)
        elapsed = time.perf_counter() - began
        with self._lock:
            self._finished()
            self._waited += elapsed
            if ticket in self._failures:
                if ticket in self._unreported:
                    self._unreported.remove(ticket)
                raise self._failures[ticket]

    def done(self, token: BarrierToken) -> bool:
        ticket = self._ticket_of(token)
        with self._lock:
            return self._finished() >= ticket

    def drain(self) -> None:
        with self._lock:
            last = self._issued
        began = time.perf_counter()
        if last:
            self._block(last)
        elapsed = time.perf_counter() - began
        with self._lock:
            self._finished()
            self._waited += elapsed
            if self._unreported:
                first = self._failures[self._unreported[0]]
                self._unreported.clear()
                raise first

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            self.drain()
        finally:
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def stats(self) -> CopyStats:
        with self._lock:
            self._finished()
            return CopyStats(self._copies, self._bytes, self._busy, self._waited)

    def _ticket_of(self, token: BarrierToken) -> int:
        if not isinstance(token, BarrierToken) or not hasattr(token, "_ticket"):
            raise CopyError(
                f"this {type(token).__name__} is not a token of an issue(); wait for what issue() returned"
            )
        if token._engine is not self:
            raise CopyError(f"{token!r} belongs to another engine; wait for it there")
        return token._ticket


def accept_host_only(engine: CopyEngine, transfer: Transfer) -> None:
    """Refuse tiles that are not in host memory (files may be read)."""
    for tile, kinds in ((transfer.src, (HostMemory, FileMemory)), (transfer.dst, (HostMemory,))):
        if not isinstance(tile.memory, kinds):
            raise CopyError(
                f"{type(engine).__name__} cannot reach {tile.memory.device} memory; "
                f"use the engine of that device: open_device({tile.memory.device!r}).copy_engine()"
            )


class SyncCopy(CopyEngine):
    """Copies at issue, on the calling thread; waiting returns at once.

    >>> out = np.zeros(3, np.float32)
    >>> engine = SyncCopy()
    >>> engine.wait(engine.issue(np.float32([1, 2, 3]), out))
    >>> out.tolist(), engine.stats.bytes
    ([1.0, 2.0, 3.0], 12)
    """

    def _accept(self, transfer: Transfer) -> None:
        accept_host_only(self, transfer)

    def _start(self, ticket: int, transfer: Transfer) -> None:
        began = time.perf_counter()
        failure = None
        try:
            copy_on_host(transfer)
        except CopyError as error:
            failure = error
        seconds = time.perf_counter() - began
        self._book(ticket, transfer.nbytes, seconds, failure)
        self._waited += seconds  # the caller stood still all the while

    def _finished(self) -> int:
        return self._copies

    def _block(self, ticket: int) -> None:
        pass


def copy_on_host(transfer: Transfer) -> None:
    """Carry out a transfer between host memories, or from a file, on the calling thread."""
    for src_offset, dst_offset, rows, row_bytes in transfer.pieces():
        dst = _rows(transfer.dst, dst_offset, rows, row_bytes, transfer.dst_pitch)
        source = transfer.src.memory
        if isinstance(source, FileMemory):
            for row in range(rows):
                source.read_into(src_offset + row * transfer.src_pitch, dst[row])
        else:
            dst[...] = _rows(transfer.src, src_offset, rows, row_bytes, transfer.src_pitch)


def _rows(tile: Tile, offset: int, rows: int, row_bytes: int, pitch: int) -> np.ndarray:
    assert isinstance(tile.memory, HostMemory)
    start = tile.memory.bytes[offset:]
    return np.lib.stride_tricks.as_strided(start, (rows, row_bytes), (pitch, 1))
