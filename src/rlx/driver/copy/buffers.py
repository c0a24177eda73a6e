"""Buffers that are filled ahead: `DoubleBuffer` (two) and `RingBuffer` (any number).

Each slot remembers the copy that fills it. Reading a slot whose copy is unfinished, or filling it again, is
an error rather than a race.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

from rlx.driver.base import Device
from rlx.driver.buffer import Buffer
from rlx.driver.copy.engine import AsyncCopy, BarrierToken
from rlx.driver.region import HostMemory, Tile
from rlx.errors import CopyError

B = TypeVar("B")


class _Slot(Generic[B]):
    """One buffer and the copy that last filled it."""

    def __init__(self, buffer: B, name: str) -> None:
        self.buffer = buffer
        self.name = name
        self.tile = Tile.of(buffer)
        if not self.tile.contiguous:
            raise CopyError(f"{name} is not in one piece; give dense buffers")
        self._engine: AsyncCopy | None = None
        self._token: BarrierToken | None = None
        self._source: object = None

    def unfinished(self) -> bool:
        return self._engine is not None and self._token is not None and not self._engine.done(self._token)

    def fill(self, engine: AsyncCopy, src: object) -> BarrierToken:
        if self.unfinished():
            raise CopyError(
                f"{self.name} is still being filled; wait for it with ready() before filling it again"
            )
        token = engine.issue(src, self.tile)
        self._engine, self._token, self._source = engine, token, src
        return token

    def wait(self) -> None:
        if self._engine is not None and self._token is not None:
            self._engine.wait(self._token)

    def forget(self) -> None:
        try:
            self.wait()
        except CopyError:
            pass  # whoever abandons a fill has no use for its data
        self._engine = self._token = self._source = None

    def filled(self) -> B | np.ndarray | Buffer:
        """What the last fill put here, shaped like its source: an array (host) or a Buffer (device).

        A slot that was never filled is the buffer as given.
        """
        source = self._source
        if source is None:
            return self.buffer
        if isinstance(source, (np.ndarray, Buffer)):
            kind, shape = source.dtype, source.shape
        else:
            kind, shape = "u8", (Tile.of(source).nbytes,)
        view = Buffer(self.tile.memory, kind, shape, self.tile.offset)
        return view.numpy() if isinstance(self.tile.memory, HostMemory) and view.dtype.bits >= 8 else view


class FillAhead(ABC, Generic[B]):
    """Buffers in a circle, one of them current. What `pipelined` needs of a DoubleBuffer or RingBuffer."""

    def __init__(self, slots: Sequence[_Slot[B]]) -> None:
        self._slots = slots
        self._at = 0
        places = [slot.tile.memory.place(slot.tile.offset) for slot in slots]
        if len(set(places)) < len(places):
            raise CopyError("the same memory was given twice; each buffer needs its own")

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def current(self) -> B:
        """The buffer to work on. An error while its fill is unfinished: call `ready` first."""
        slot = self._slots[self._at]
        if slot.unfinished():
            raise CopyError(
                f"{slot.name} is current, but its fill is unfinished; call ready() before reading it"
            )
        return slot.buffer

    def ready(self) -> B | np.ndarray | Buffer:
        """Wait until the current buffer is filled and return what was filled in, shaped like its source."""
        slot = self._slots[self._at]
        slot.wait()
        return slot.filled()

    @abstractmethod
    def fill(self, engine: AsyncCopy, src: object) -> BarrierToken:
        """Start copying all of `src` into the next buffer, from its first byte on, and remember the copy."""

    @abstractmethod
    def advance(self) -> None:
        """Give up the current buffer and go on to the one filled next."""

    def abandon(self) -> None:
        """Wait for all fills, whatever became of them, and forget them: after this every buffer is free."""
        for slot in self._slots:
            slot.forget()


class DoubleBuffer(FillAhead[B]):
    """Two buffers that take turns: one is worked on while the other is filled.

    >>> from rlx.driver.copy import SyncCopy
    >>> pair = DoubleBuffer(np.zeros(2, np.int64), np.zeros(2, np.int64))
    >>> token = pair.fill(SyncCopy(), np.array([5, 6])); pair.swap()
    >>> pair.current.tolist(), pair.next.tolist()
    ([5, 6], [0, 0])
    """

    def __init__(self, a: B, b: B) -> None:
        super().__init__([_Slot(a, "buffer a"), _Slot(b, "buffer b")])

    @property
    def next(self) -> B:
        """The other buffer, the one that `fill` writes to."""
        return self._slots[1 - self._at].buffer

    def pair(self) -> tuple[B, B]:
        """(current, next)."""
        return self.current, self.next

    def swap(self) -> None:
        """Exchange the two. Always legal; the new current one may need `ready`."""
        self._at = 1 - self._at

    def fill(self, engine: AsyncCopy, src: object) -> BarrierToken:
        return self._slots[1 - self._at].fill(engine, src)

    def advance(self) -> None:
        self.swap()


class RingBuffer(FillAhead[B | Buffer]):
    """`n` buffers in a circle: one is worked on while up to n - 1 are filled ahead.

    Give the number of buffers and the bytes of each, or the buffers themselves.

    >>> from rlx.driver.copy import SyncCopy
    >>> ring, engine = RingBuffer(3, nbytes=16), SyncCopy()
    >>> for k in range(2):
    ...     token = ring.fill(engine, np.array([k, k + 10]))
    >>> ring.advance(); ring.ready().tolist()
    [0, 10]
    >>> ring.advance(); ring.ready().tolist()
    [1, 11]
    """

    def __init__(
        self, buffers: int | Sequence[B], nbytes: int | None = None, on: str | Device = "cpu"
    ) -> None:
        if isinstance(buffers, int):
            if nbytes is None:
                raise CopyError("a RingBuffer with a number of buffers needs nbytes, the size of each")
            held: list[B | Buffer] = [Buffer.empty((nbytes,), "u8", on) for _ in range(buffers)]
        else:
            held = list(buffers)
        if len(held) < 2:
            raise CopyError(f"a RingBuffer needs at least 2 buffers, not {len(held)}")
        super().__init__([_Slot(buffer, f"ring buffer {k}") for k, buffer in enumerate(held)])
        self._ahead = 0

    @property
    def ahead(self) -> int:
        """Number of tiles filled, or being filled, beyond the current one."""
        return self._ahead

    def fill(self, engine: AsyncCopy, src: object) -> BarrierToken:
        if self._ahead == len(self._slots) - 1:
            raise CopyError(f"all {self._ahead} buffers ahead are filled; advance() before filling another")
        token = self._slots[(self._at + self._ahead + 1) % len(self._slots)].fill(engine, src)
        self._ahead += 1
        return token

    def advance(self) -> None:
        if self._ahead == 0:
            raise CopyError("no buffer ahead is filled; fill() before advance()")
        self._at = (self._at + 1) % len(self._slots)
        self._ahead -= 1

    def abandon(self) -> None:
        super().abandon()
        self._ahead = 0
