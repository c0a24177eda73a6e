"""One checked transfer as OpenCL commands: plain copies for runs, rectangle copies for rows at a pitch."""

from __future__ import annotations

from typing import Any

from rlx.driver.opencl.platform import cl
from rlx.driver.region import HostMemory, Transfer
from rlx.errors import CopyError


def accept(transfer: Transfer) -> None:
    """Refuse memory that an OpenCL queue cannot reach, and copies that stay on the host."""
    devices = [tile.memory.device for tile in (transfer.src, transfer.dst)]
    for name in devices:
        if name not in ("cpu", "opencl"):
            raise CopyError(f"an OpenCL queue cannot reach {name} memory; copy it to host memory first")
    if devices == ["cpu", "cpu"]:
        raise CopyError("both sides of this copy are host memory; use ThreadCopy or SyncCopy")


def enqueue(queue: Any, transfer: Transfer) -> list[Any]:
    """Put the transfer into the queue, not blocking; returns the events. Keep them and the transfer alive."""
    events = []
    for src_offset, dst_offset, rows, row_bytes in transfer.pieces():
        if rows == 1:
            events.append(_run(queue, transfer, src_offset, dst_offset, row_bytes))
        else:
            events.append(_rectangle(queue, transfer, src_offset, dst_offset, rows, row_bytes))
    return events


def _run(queue: Any, transfer: Transfer, src_offset: int, dst_offset: int, nbytes: int) -> Any:
    src, dst = transfer.src.memory, transfer.dst.memory
    copy = cl().enqueue_copy
    if isinstance(src, HostMemory):
        data = src.bytes[src_offset : src_offset + nbytes]
        return copy(queue, dst.handle, data, dst_offset=dst_offset, is_blocking=False)  # type: ignore[attr-defined]
    if isinstance(dst, HostMemory):
        data = dst.bytes[dst_offset : dst_offset + nbytes]
        return copy(queue, data, src.handle, src_offset=src_offset, is_blocking=False)  # type: ignore[attr-defined]
    return copy(
        queue,
        dst.handle,  # type: ignore[attr-defined]
        src.handle,  # type: ignore[attr-defined]
        byte_count=nbytes,
        src_offset=src_offset,
        dst_offset=dst_offset,
    )


def _rectangle(
    queue: Any, transfer: Transfer, src_offset: int, dst_offset: int, rows: int, row_bytes: int
) -> Any:
    src, dst = transfer.src.memory, transfer.dst.memory
    region = (row_bytes, rows, 1)
    src_pitch, dst_pitch = transfer.src_pitch, transfer.dst_pitch
    copy = cl().enqueue_copy
    if isinstance(src, HostMemory):
        return copy(
            queue,
            dst.handle,  # type: ignore[attr-defined]
            src.bytes[src_offset:],
            buffer_origin=_origin(dst_offset, dst_pitch),
            host_origin=(0, 0, 0),
            region=region,
            buffer_pitches=(dst_pitch,),
            host_pitches=(src_pitch,),
            is_blocking=False,
        )
    if isinstance(dst, HostMemory):
        return copy(
            queue,
            dst.bytes[dst_offset:],
            src.handle,  # type: ignore[attr-defined]
            buffer_origin=_origin(src_offset, src_pitch),
            host_origin=(0, 0, 0),
            region=region,
            buffer_pitches=(src_pitch,),
            host_pitches=(dst_pitch,),
            is_blocking=False,
        )
    return copy(
        queue,
        dst.handle,  # type: ignore[attr-defined]
        src.handle,  # type: ignore[attr-defined]
        src_origin=_origin(src_offset, src_pitch),
        dst_origin=_origin(dst_offset, dst_pitch),
        region=region,
        src_pitches=(src_pitch,),
        dst_pitches=(dst_pitch,),
    )


def _origin(offset: int, pitch: int) -> tuple[int, int, int]:
    """A byte offset as (byte in row, row, 0)."""
    return offset % pitch, offset // pitch, 0
