"""Devices: what exists, what is there on this machine, and what is missing for the rest.

A device is opened once per process and shared. Adding one means a `DeviceEntry` in `_ENTRIES` and a module
that implements `Device`; nothing else in RLX lists devices.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
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


@dataclass(frozen=True)
class DeviceEntry:
    """A device that RLX knows. `missing` says what keeps it from being opened here, or None."""

    name: str
    meaning: str
    missing: Callable[[], str | None]
    open: Callable[[], Device]


def _open_host() -> Device:
    from rlx.driver.host import HostDevice

    return HostDevice()


def _missing_opencl() -> str | None:
    from rlx.driver.opencl.platform import missing

    return missing()


def _open_opencl() -> Device:
    from rlx.driver.opencl.device import OpenCLDevice

    return OpenCLDevice()


def _not_written(name: str) -> DeviceEntry:
    reason = f"this version of RLX has no driver for {name}"

    def refuse() -> Device:
        raise DeviceError(reason)

    return DeviceEntry(name, "planned", lambda: reason, refuse)


_ENTRIES: dict[str, DeviceEntry] = {
    "cpu": DeviceEntry("cpu", "this machine's processor and memory", lambda: None, _open_host),
    "opencl": DeviceEntry("opencl", "an OpenCL device with its own memory", _missing_opencl, _open_opencl),
    **{name: _not_written(name) for name in ("gpu", "cuda", "rocm", "metal", "tpu", "wasm")},
}
_opened: dict[str, Device] = {}
_lock = threading.Lock()


def known_devices() -> tuple[DeviceEntry, ...]:
    """Every device RLX has a name for, there or not."""
    return tuple(_ENTRIES.values())


def why_unavailable(name: str) -> str | None:
    """What is missing for device `name`: a package, a driver; None if it can be opened.

    >>> why_unavailable("cpu") is None
    True
    >>> why_unavailable("cuda")
    'this version of RLX has no driver for cuda'
    """
    return _entry(name).missing()


def is_available(name: str) -> bool:
    """Whether `open_device(name)` works here. A name that RLX does not know is an error.

    >>> is_available("cpu")
    True
    """
    return why_unavailable(name) is None


def available_devices() -> tuple[str, ...]:
    """Names of the devices that can be opened here, the host first.

    >>> available_devices()[0]
    'cpu'
    """
    return tuple(name for name in _ENTRIES if is_available(name))


def open_device(name: str | Device) -> Device:
    """The open device called `name`; a device that was lost is opened anew.

    >>> open_device("cpu").capabilities.unified_memory
    True
    """
    if isinstance(name, Device):
        return name
    entry = _entry(name)
    with _lock:
        found = _opened.get(name)
        if found is None or found.lost:
            missing = entry.missing()
            if missing is not None:
                raise DeviceError(f"device {name} is not available: {missing}")
            found = _opened[name] = entry.open()
        return found


def _entry(name: str) -> DeviceEntry:
    if name not in _ENTRIES:
        raise DeviceError(f"unknown device {name!r}; RLX knows {', '.join(_ENTRIES)}")
    return _ENTRIES[name]
