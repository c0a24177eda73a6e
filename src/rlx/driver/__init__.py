"""The layer between plan and device: devices, arenas, buffers, command streams and asynchronous copies."""

from __future__ import annotations

from rlx.driver.arena import Arena, ArenaSlot, DeviceArena
from rlx.driver.buffer import Buffer, BufferHandle
from rlx.driver.device import (
    Capabilities,
    Device,
    DeviceLost,
    available_devices,
    is_available,
    known_devices,
    open_device,
    why_unavailable,
)
from rlx.driver.host import HostArena
from rlx.driver.region import FileMemory, HostMemory, Memory, Tile
from rlx.driver.stream import CommandStream, Event, SyncStream
from rlx.driver.typed import read_typed_to_f32, write_typed_from_f32

__all__ = [
    "Device",
    "Capabilities",
    "DeviceLost",
    "available_devices",
    "is_available",
    "why_unavailable",
    "known_devices",
    "open_device",
    "DeviceArena",
    "Arena",
    "ArenaSlot",
    "HostArena",
    "write_typed_from_f32",
    "read_typed_to_f32",
    "Buffer",
    "BufferHandle",
    "Memory",
    "HostMemory",
    "FileMemory",
    "Tile",
    "CommandStream",
    "SyncStream",
    "Event",
]
