"""The host as a device: its memory is this process's memory, its streams run on the calling thread."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping

from rlx.config import THREADS
from rlx.driver.arena import ArenaSlot, HostArena
from rlx.driver.copy.thread import ThreadCopy
from rlx.driver.device import Capabilities, Device
from rlx.driver.region import HostMemory
from rlx.driver.stream import SyncStream
from rlx.runtime.memory import allocate


class HostDevice(Device):
    """This machine's processor. Always there."""

    name = "cpu"

    def __init__(self) -> None:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
        self.capabilities = Capabilities(
            description=platform.processor() or platform.machine(),
            unified_memory=True,
            alignment=64,
            max_allocation=memory,
            total_memory=memory,
            compute_units=THREADS.get(),
            float16=True,
            float64=True,
        )

    def allocate(self, nbytes: int) -> HostMemory:
        return HostMemory.wrap(allocate(nbytes).array)

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
