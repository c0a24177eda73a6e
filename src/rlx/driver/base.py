"""What a device is: the class that the host and every other device implement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlx.errors import DeviceError
from rlx.records import dataclass

if TYPE_CHECKING:
    from rlx.driver.arena import Arena, ArenaSlot
    from rlx.driver.copy.engine import CopyEngine
    from rlx.driver.region import Memory
    from rlx.driver.stream import CommandStream


class DeviceLost(DeviceError):
    """The device stopped answering; its memory is gone. Opening it again gives a fresh one."""


@dataclass(frozen=True)
class Capabilities:
    """Facts about a device that plans and the fusion gate depend on.

    `unified_memory`: the host reads and writes its memory in place, so nothing has to be copied to it.
    `alignment`: what every slot offset must be a multiple of. `float16`, `float64`: kernels may use them.
    """

    description: str
    unified_memory: bool
    alignment: int
    max_allocation: int
    total_memory: int
    compute_units: int
    float16: bool
    float64: bool


class Device(ABC):
    """An open device: the source of its memory, arenas, streams and copy engines."""

    name: str
    capabilities: Capabilities

    @abstractmethod
    def allocate(self, nbytes: int) -> Memory:
        """Zeroed memory of the device, freed when the last user drops it."""

    @abstractmethod
    def arena(
        self,
        slots: Mapping[int, ArenaSlot],
        size: int | None = None,
        alignment: int | None = None,
        guard: bool = False,
    ) -> Arena:
        """An arena for `slots` (node id -> slot); `guard` detects stray accesses, where the device can."""

    @abstractmethod
    def stream(self) -> CommandStream:
        """A new, independent stream of commands."""

    @abstractmethod
    def copy_engine(self) -> CopyEngine:
        """A new engine that copies between the host and this device, and inside it."""

    @property
    def lost(self) -> bool:
        """Whether the device stopped working."""
        return False

    def __repr__(self) -> str:
        return f"<Device {self.name}: {self.capabilities.description}>"
