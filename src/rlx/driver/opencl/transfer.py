"""One checked transfer as OpenCL commands: plain copies for runs, rectangle copies for rows at a pitch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlx.driver.opencl.memory import OpenCLMemory
from rlx.driver.opencl.platform import cl
from rlx.driver.region import HostMemory, Memory, Transfer
from rlx.errors import CopyError

if TYPE_CHECKING:
    from pyopencl import CommandQueue, Event

    from rlx.driver.opencl.device import OpenCLDevice


def accept(device: OpenCLDevice, transfer: Transfer) -> None:
    """Refuse memory that a queue of `device` cannot reach, and copies that stay on the host."""
    memories = (transfer.src.memory, transfer.dst.memory)
    for memory in memories:
        if isinstance(memory, OpenCLMemory):
            if memory.owner is not device:
                raise CopyError("this OpenCL memory belongs to a device that was lost; allocate it again")
        elif not isinstance(memory, HostMemory):
            raise CopyError(f"an OpenCL queue cannot reach {memory.device} memory; copy it to the host first")
    if all(isinstance(memory, HostMemory) for memory in memories):
        raise CopyError("both sides of this copy are host memory; use ThreadCopy or SyncCopy")


def enqueue(queue: CommandQueue, transfer: Transfer) -> list[Event]:
    """Put the transfer into the queue, not blocking; returns the events. Keep them and the transfer alive."""
    events = []
    for src_offset, dst_offset, rows, row_bytes in transfer.pieces():
        if rows == 1:
            events.append(_run(queue, transfer, src_offset, dst_offset, row_bytes))
        else:
            events.append(_rectangle(queue, transfer, src_offset, dst_offset, rows, row_bytes))
    return events


def _run(queue: CommandQueue, transfer: Transfer, src_offset: int, dst_offset: int, nbytes: int) -> Event:
    src, src_part = _side(transfer.src.memory, src_offset, nbytes)
    dst, dst_part = _side(transfer.dst.memory, dst_offset, nbytes)
    options: dict[str, object] = {"is_blocking": False}
    if src_part and dst_part:
        options = {"byte_count": nbytes}  # between device buffers OpenCL never blocks
    if src_part:
        options["src_offset"] = src_offset
    if dst_part:
        options["dst_offset"] = dst_offset
    return cl().enqueue_copy(queue, dst, src, **options)


def _rectangle(
    queue: CommandQueue, transfer: Transfer, src_offset: int, dst_offset: int, rows: int, row_bytes: int
) -> Event:
    src, src_part = _side(transfer.src.memory, src_offset)
    dst, dst_part = _side(transfer.dst.memory, dst_offset)
    src_at = _origin(src_offset, transfer.src_pitch) if src_part else (0, 0, 0)
    dst_at = _origin(dst_offset, transfer.dst_pitch) if dst_part else (0, 0, 0)
    src_pitches, dst_pitches = (transfer.src_pitch,), (transfer.dst_pitch,)
    if src_part and dst_part:
        options: dict[str, object] = {
            "src_origin": src_at,
            "dst_origin": dst_at,
            "src_pitches": src_pitches,
            "dst_pitches": dst_pitches,
        }
    else:
        options = {
            "buffer_origin": src_at if src_part else dst_at,
            "host_origin": (0, 0, 0),
            "buffer_pitches": src_pitches if src_part else dst_pitches,
            "host_pitches": dst_pitches if src_part else src_pitches,
            "is_blocking": False,
        }
    return cl().enqueue_copy(queue, dst, src, region=(row_bytes, rows, 1), **options)


def _side(memory: Memory, offset: int, nbytes: int | None = None) -> tuple[object, bool]:
    """What pyopencl wants for one side, and whether it is a device buffer, whose offset goes extra."""
    if isinstance(memory, OpenCLMemory):
        return memory.handle, True
    assert isinstance(memory, HostMemory), "`accept` refuses any other"
    return memory.bytes[offset : None if nbytes is None else offset + nbytes], False


def _origin(offset: int, pitch: int) -> tuple[int, int, int]:
    """A byte offset as (byte in row, row, 0)."""
    return offset % pitch, offset // pitch, 0
