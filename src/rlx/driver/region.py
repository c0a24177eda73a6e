"""Memory and tiles: the two words in which arenas, buffers, streams and copies talk about bytes.

A `Memory` is a flat run of bytes on one device. A `Tile` is a part of one memory: a single run of bytes, or
equal rows at a fixed pitch. Everything typed (arena slots, buffers) is a tile plus a dtype and a shape.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Hashable
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from rlx.errors import BufferUseError, CopyError
from rlx.records import dataclass
from rlx.system import SYSTEM

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

Bytes = npt.NDArray[np.uint8]


class Memory(ABC):
    """A flat run of bytes on one device; offsets count from its first byte."""

    device: str
    nbytes: int
    readonly: bool = False

    @abstractmethod
    def read(self, offset: int, nbytes: int) -> Bytes:
        """A host copy of `nbytes` bytes from `offset` on; returns when they are there."""

    @abstractmethod
    def write(self, offset: int, data: Bytes) -> None:
        """Copy the host bytes `data` to `offset`; returns when they are there."""

    @abstractmethod
    def place(self, offset: int) -> tuple[Hashable, int]:
        """(address space, address) of a byte. Two bytes are the same byte exactly when these are equal."""

    def check_range(self, offset: int, nbytes: int) -> None:
        """Refuse a range that is not inside this memory."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise BufferUseError(
                f"bytes {offset}..{offset + nbytes} are outside {self.device} memory of {self.nbytes} bytes"
            )


class HostMemory(Memory):
    """Bytes of this process, kept alive by the array `owner`.

    >>> memory = HostMemory.wrap(np.arange(3, dtype=np.uint16))
    >>> memory.nbytes, memory.read(2, 2).tolist()
    (6, [1, 0])
    """

    device = "cpu"

    def __init__(self, array: np.ndarray, nbytes: int) -> None:
        self.owner = array
        self.nbytes = nbytes
        self.address: int = array.ctypes.data
        self.readonly = not array.flags.writeable
        self._bytes: Bytes | None = None

    @classmethod
    def wrap(cls, array: np.ndarray) -> HostMemory:
        """The bytes from the first to the last element of `array`, holes between its rows included."""
        if array.flags.c_contiguous:
            return cls(array, array.nbytes)
        if min(array.strides) < 0:
            raise CopyError(f"an array with negative strides {array.strides} has no tile; copy it first")
        return cls(
            array, array.itemsize + sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True))
        )

    @property
    def bytes(self) -> Bytes:
        """A flat view of the bytes, which keeps them alive."""
        if self._bytes is None:
            strided, item = np.lib.stride_tricks.as_strided, self.owner.itemsize
            writeable = not self.readonly
            if not self.nbytes:
                self._bytes = np.zeros(0, np.uint8)
            else:
                # Seen as void items first, so that bf16 and f8, which NumPy does not know, work too.
                first = strided(self.owner.view(f"V{item}"), (1,), (item,), writeable=writeable).view(
                    np.uint8
                )
                self._bytes = strided(first, (self.nbytes,), (1,), writeable=writeable)
        return self._bytes

    def read(self, offset: int, nbytes: int) -> Bytes:
        self.check_range(offset, nbytes)
        return self.bytes[offset : offset + nbytes].copy()

    def write(self, offset: int, data: Bytes) -> None:
        self.check_range(offset, data.nbytes)
        if self.readonly:
            raise BufferUseError("this host memory is read-only; write to a copy of it")
        self.bytes[offset : offset + data.nbytes] = data

    def place(self, offset: int) -> tuple[Hashable, int]:
        return "host", self.address + offset


class FileMemory(Memory):
    """The bytes of a file, read with `pread`, never mapped: a source for copies, not a destination.

    The descriptor stays open until `close`, so a file that is replaced under its name is still read whole.
    """

    device = "file"
    readonly = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self.descriptor = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise CopyError(f"cannot open {self.path} for reading: {error.strerror}") from error
        self.nbytes = os.fstat(self.descriptor).st_size

    def read(self, offset: int, nbytes: int) -> Bytes:
        self.check_range(offset, nbytes)
        data = np.empty(nbytes, np.uint8)
        self.read_into(offset, data)
        return data

    def read_into(self, offset: int, data: Bytes) -> None:
        """Fill the contiguous `data` from `offset` on; a short file is an error."""
        done = 0
        while done < data.nbytes:
            try:
                count = SYSTEM.read_at(self.descriptor, data[done:], offset + done)
            except OSError as error:
                raise self.fault(error.errno or 0, offset, data.nbytes) from error
            if count == 0:
                raise self.fault(0, offset, data.nbytes)
            done += count

    def fault(self, errno: int, offset: int, nbytes: int) -> CopyError:
        """The error for a failed read; `errno` 0 means that the file ended early."""
        wanted = f"bytes {offset}..{offset + nbytes} of {self.path}"
        if errno:
            return CopyError(f"cannot read {wanted}: {os.strerror(errno)}; check the disk")
        return CopyError(f"cannot read {wanted}: the file ends before; it was truncated, restore it")

    def write(self, offset: int, data: Bytes) -> None:
        raise BufferUseError(f"{self.path} can only be read; copy to memory instead")

    def place(self, offset: int) -> tuple[Hashable, int]:
        return ("file", self.descriptor), offset

    def close(self) -> None:
        """Close the file; copies from it must be finished."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        if getattr(self, "descriptor", -1) >= 0:
            self.close()


@dataclass(frozen=True, slots=True)
class Tile:
    """`rows` rows of `row_bytes` bytes each, `pitch` bytes apart, the first at `offset` of `memory`.

    >>> matrix = np.arange(12, dtype=np.int32).reshape(3, 4)
    >>> Tile.of(matrix).contiguous, Tile.of(matrix[:, :2]).contiguous
    (True, False)
    >>> Tile.of(matrix).rectangle(rows=2, row_bytes=4, pitch=16, offset=8).nbytes
    8
    """

    memory: Memory
    offset: int
    rows: int
    row_bytes: int
    pitch: int

    def __post_init__(self) -> None:
        if self.rows < 0 or self.row_bytes < 0 or (self.rows > 1 and self.pitch < self.row_bytes):
            raise CopyError(
                f"a tile of {self.rows} rows of {self.row_bytes} bytes cannot have pitch {self.pitch}"
            )
        if self.offset < 0 or self.offset + self.span > self.memory.nbytes:
            raise CopyError(
                f"tile bytes {self.offset}..{self.offset + self.span} are outside the {self.memory.device} "
                f"memory of {self.memory.nbytes} bytes"
            )

    @classmethod
    def of(cls, thing: object) -> Tile:
        """The tile of an array, a buffer-protocol object, a `Buffer`, a `Memory` or a tile itself."""
        if isinstance(thing, Tile):
            return thing
        if isinstance(thing, Memory):
            return cls(thing, 0, 1, thing.nbytes, thing.nbytes)
        if hasattr(thing, "as_tile"):
            tile = thing.as_tile()
            assert isinstance(tile, Tile)
            return tile
        if isinstance(thing, np.ndarray):
            return cls._of_array(thing)
        try:
            return cls._of_array(np.asarray(memoryview(cast("ReadableBuffer", thing))))
        except TypeError:
            raise CopyError(
                f"{type(thing).__name__} is not memory; give an array, a buffer, a tile or bytes"
            ) from None

    @classmethod
    def _of_array(cls, array: np.ndarray) -> Tile:
        memory = HostMemory.wrap(array)
        run = array.itemsize  # bytes in one piece
        outer: list[tuple[int, int]] = []  # (extent, stride) of the dims outside that piece
        for extent, stride in zip(reversed(array.shape), reversed(array.strides), strict=True):
            if extent == 1:
                continue
            if not outer and stride == run:
                run *= extent
            elif outer and stride == outer[-1][0] * outer[-1][1]:
                outer[-1] = (outer[-1][0] * extent, outer[-1][1])
            else:
                outer.append((extent, stride))
        if array.size == 0:
            return cls(memory, 0, 1, 0, 0)
        if len(outer) > 1:
            raise CopyError(
                f"an array of shape {array.shape} and strides {array.strides} is not rows at one pitch; "
                "copy it in 2-D pieces"
            )
        rows, pitch = outer[0] if outer else (1, run)
        return cls(memory, 0, rows, run, pitch)

    def part(self, offset: int, nbytes: int) -> Tile:
        """`nbytes` bytes from `offset` on, of a tile in one piece."""
        if not self.contiguous:
            raise CopyError(
                f"cannot cut bytes out of {self.rows} rows at pitch {self.pitch}; use rectangle()"
            )
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise CopyError(f"bytes {offset}..{offset + nbytes} are outside the tile of {self.nbytes} bytes")
        return Tile(self.memory, self.offset + offset, 1, nbytes, nbytes)

    def rectangle(self, rows: int, row_bytes: int, pitch: int, offset: int = 0) -> Tile:
        """Rows inside a tile in one piece, as of a matrix with `pitch` bytes per row."""
        inner = Tile(self.memory, self.offset + offset, rows, row_bytes, pitch)
        if not self.contiguous or offset < 0 or offset + inner.span > self.nbytes:
            raise CopyError(
                f"rows up to byte {offset + inner.span} are outside a dense tile of {self.nbytes} bytes"
            )
        return inner

    @property
    def nbytes(self) -> int:
        """Bytes of data, holes not counted."""
        return self.rows * self.row_bytes

    @property
    def span(self) -> int:
        """Bytes from the first to the last, holes counted."""
        return (self.rows - 1) * self.pitch + self.row_bytes if self.nbytes else 0

    @property
    def contiguous(self) -> bool:
        """Whether the data are contiguous."""
        return self.rows <= 1 or self.pitch == self.row_bytes


@dataclass(frozen=True, slots=True)
class Transfer:
    """A checked copy: `rows` full rows, then `tail_bytes` of one more. The two pitches may differ."""

    src: Tile
    dst: Tile
    rows: int
    row_bytes: int
    src_pitch: int
    dst_pitch: int
    tail_bytes: int

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes + self.tail_bytes

    def pieces(self) -> list[tuple[int, int, int, int]]:
        """The non-empty rectangles as (src offset, dst offset, rows, row bytes): full rows, then the tail."""
        found = []
        if self.rows:
            found.append((self.src.offset, self.dst.offset, self.rows, self.row_bytes))
        if self.tail_bytes:
            src = self.src.offset + self.rows * self.src_pitch
            found.append((src, self.dst.offset + self.rows * self.dst_pitch, 1, self.tail_bytes))
        return found


def plan_transfer(src: object, dst: object, nbytes: int | None = None) -> Transfer:
    """Check a copy of the first `nbytes` bytes (default: all of `src`) and cut it into rows.

    >>> t = plan_transfer(np.zeros((4, 8), np.uint8)[:, :5], bytearray(20), 12)
    >>> t.rows, t.row_bytes, t.tail_bytes
    (2, 5, 2)
    """
    src, dst = Tile.of(src), Tile.of(dst)
    count = src.nbytes if nbytes is None else nbytes
    if count < 0 or count > src.nbytes:
        raise CopyError(f"cannot copy {count} bytes out of a source of {src.nbytes} bytes")
    if count > dst.nbytes:
        raise CopyError(f"cannot copy {count} bytes into a destination of {dst.nbytes} bytes")
    if dst.memory.readonly:
        raise CopyError(f"the destination is read-only {dst.memory.device} memory; copy to writable memory")
    transfer = _cut(src, dst, count)
    if _alias(transfer):
        raise CopyError("source and destination of a copy overlap; copy through a third buffer")
    return transfer


def _cut(src: Tile, dst: Tile, count: int) -> Transfer:
    if src.contiguous and dst.contiguous:
        return Transfer(src, dst, 1 if count else 0, count, count, count, 0)
    if not src.contiguous and not dst.contiguous and src.row_bytes != dst.row_bytes:
        raise CopyError(
            f"rows of {src.row_bytes} bytes cannot be copied to rows of {dst.row_bytes} bytes; "
            "give both tiles the same row length"
        )
    row = dst.row_bytes if src.contiguous else src.row_bytes
    rows, tail = divmod(count, row)
    return Transfer(
        src, dst, rows, row, row if src.contiguous else src.pitch, row if dst.contiguous else dst.pitch, tail
    )


def _alias(transfer: Transfer) -> bool:
    """Whether any byte is both read and written: by spans first, then row by row."""
    if not transfer.nbytes:
        return False
    (src_space, src), (dst_space, dst) = (t.memory.place(t.offset) for t in (transfer.src, transfer.dst))
    if src_space != dst_space:
        return False
    if src + transfer.src.span <= dst or dst + transfer.dst.span <= src:
        return False
    src_rows = _row_ranges(src, transfer.src_pitch, transfer)
    dst_rows = _row_ranges(dst, transfer.dst_pitch, transfer)
    # Rows of one tile never overlap each other, so after sorting all rows only neighbours can.
    merged = np.concatenate([src_rows, dst_rows])
    merged = merged[np.argsort(merged[:, 0], kind="stable")]
    return bool(np.any(merged[1:, 0] < merged[:-1, 1]))


def _row_ranges(start: int, pitch: int, transfer: Transfer) -> npt.NDArray[np.int64]:
    rows = transfer.rows + bool(transfer.tail_bytes)
    begins = start + pitch * np.arange(rows, dtype=np.int64)
    ends = begins + transfer.row_bytes
    if transfer.tail_bytes:
        ends[-1] = begins[-1] + transfer.tail_bytes
    return np.stack([begins, ends], axis=1)
