"""Devices: what exists, what is there on this machine, and what is missing for the rest.

A device is opened once per process and shared. Adding one means a `DeviceEntry` in `_ENTRIES` and a module
that implements `Device`; nothing else in RLX lists devices.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from rlx.driver.base import Capabilities, Device, DeviceLost
from rlx.errors import DeviceError
from rlx.records import dataclass


@dataclass(frozen=True)
class DeviceEntry:
    """A device that RLX knows. `missing` says what keeps it from being opened here, or None."""

    name: str
    meaning: str
    missing: Callable[[], str | None]
    open: Callable[[], Device]


def _open_host() -> Device:
    from rlx.driver.host import HostDevice  # its copies are of buffers, which open devices by name

    return HostDevice()


def _missing_opencl() -> str | None:
    from rlx.driver.opencl.platform import missing  # start time: few use such a device

    return missing()


def _open_opencl() -> Device:
    from rlx.driver.opencl.device import OpenCLDevice  # start time

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


__all__ = [
    "Capabilities",
    "Device",
    "DeviceEntry",
    "DeviceLost",
    "available_devices",
    "is_available",
    "known_devices",
    "open_device",
    "why_unavailable",
]
