"""The host as a device: its memory is this process's memory, its streams run on the calling thread."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from rlx.config import THREADS
from rlx.driver.arena import Arena, ArenaSlot, arena_size
from rlx.driver.base import Capabilities, Device
from rlx.driver.copy.thread import ThreadCopy
from rlx.driver.region import HostMemory
from rlx.driver.stream import SyncStream
from rlx.errors import DTypeError
from rlx.system import SYSTEM


class _Pages(Protocol):
    """Memory as the runtime gives it."""

    @property
    def array(self) -> np.ndarray: ...
    def check(self) -> None: ...


def _region(nbytes: int, alignment: int = 64, guard: bool = False) -> _Pages:
    """Zeroed pages of the process, huge ones where they pay."""
    from rlx.runtime.memory import allocate  # programs come after drivers

    return allocate(nbytes, align=alignment, guard=guard)


class HostArena(Arena):
    """An arena in host memory: aligned, on huge pages when large, with zero-copy views.

    With `guard` the memory ends at a page that faults on access, and `check` finds bytes written in front.

    >>> arena = HostArena({1: ArenaSlot(0, "f32", (2, 2)), 2: ArenaSlot(64, "i8", (3,))})
    >>> arena.view(1)[0, 0] = 5
    >>> arena.read(1).tolist(), arena.byte_offset(2), arena.byte_offset(9), arena.size_bytes()
    ([[5.0, 0.0], [0.0, 0.0]], 64, None, 67)
    """

    memory: HostMemory

    def __init__(
        self,
        slots: Mapping[int, ArenaSlot],
        size: int | None = None,
        alignment: int = 64,
        guard: bool = False,
    ) -> None:
        needed = arena_size(slots) if size is None else size
        # A guarded region ends at its guard page: it starts aligned only if its size is so too.
        room = -(-needed // alignment) * alignment if guard else needed
        self._region = _region(room, alignment, guard)
        super().__init__(HostMemory.wrap(self._region.array), slots, needed, alignment)

    @property
    def base_address(self) -> int:
        """Address of byte 0, for the tables of native code."""
        return self.memory.address

    def view(self, id: int) -> np.ndarray:
        """The slot itself as a writable array, no copy. Elements below one byte have no view; use `read`."""
        slot = self.slot(id)
        if slot.dtype.bits < 8:
            raise DTypeError(f"{slot.dtype} elements are packed and have no view; use read() and write()")
        raw = self._region.array[slot.offset : slot.offset + slot.nbytes]
        return raw.view(slot.dtype.np).reshape(slot.shape)

    def check(self) -> None:
        """Raise if something wrote in front of a guarded arena."""
        self._region.check()


class HostDevice(Device):
    """This machine's processor. Always there."""

    name = "cpu"

    def __init__(self) -> None:
        memory = SYSTEM.physical_memory()
        self.capabilities = Capabilities(
            description=platform.processor() or platform.machine(),
            unified_memory=True,
            alignment=64,
            max_allocation=memory,
            total_memory=memory,
            compute_units=THREADS.default(),  # of the machine; RLX_THREADS says how many a program uses
            float16=True,
            float64=True,
        )

    def allocate(self, nbytes: int) -> HostMemory:
        return HostMemory.wrap(_region(nbytes).array)

    def arena(
        self,
        slots: Mapping[int, ArenaSlot],
        size: int | None = None,
        alignment: int | None = None,
        guard: bool = False,
    ) -> HostArena:
        return HostArena(slots, size, alignment or self.capabilities.alignment, guard)

    def stream(self) -> SyncStream:
        return SyncStream()

    def copy_engine(self) -> ThreadCopy:
        return ThreadCopy()
