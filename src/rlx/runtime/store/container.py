"""Files of programs (`rlx.ir.text.container` has their layout), whose arrays are used where they lie."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import BinaryIO

import numpy as np

from rlx import config
from rlx.files import Json, file_boundary, identity, open_plain
from rlx.ir.text import container as layout
from rlx.ir.text.container import PROGRAM, Bytes, File, Seal, Stored, read_blocks, read_into, sha256
from rlx.runtime.memory import allocate, drop_pages, map_file
from rlx.runtime.native.bus_guard import Guarded, is_available
from rlx.system import SYSTEM

MOST_READ = 1 << 20  # bytes of arrays that are read rather than mapped, if the file is not our own


def write(
    path: str | os.PathLike[str],
    header: Json,
    parts: Mapping[str, bytes],
    arrays: Sequence[Stored],
    seal: Seal = lambda header: None,
) -> None:
    """Write the file of a program; pages of arrays that are mapped are given back one by one.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(folder + "/a.rlx", {"name": "a"}, {"text": b"hello"}, [np.arange(3)])
    ...     Container(folder + "/a.rlx").array(0)
    array([0, 1, 2])
    """
    layout.write(path, PROGRAM, header, parts, arrays, seal, drop_pages)


def _is_own(descriptor: int, path: str) -> bool:
    """Whether a file lies in a folder of RLX's cache that nobody else can write to. Such files are replaced,
    never changed."""
    folder, cache = os.path.dirname(os.path.abspath(path)), os.path.abspath(config.CACHE.get())
    if os.path.commonpath([folder, cache]) != cache:
        return False
    user, status = SYSTEM.user_id(), [os.stat(folder), os.fstat(descriptor)]
    return all(s.st_uid == user for s in status) and not any(s.st_mode & 0o022 for s in status)


def _held(file: BinaryIO, start: int, size: int) -> Bytes:
    """Bytes of a file in memory of our own; the page behind them cannot be read."""
    region = allocate(size, fence=True)
    file.seek(start)
    read_into(file, region.array)
    region.array.flags.writeable = False
    return region.array


def file_identity(descriptor: int, own: bool) -> tuple[object, ...]:
    """What differs between files: device, inode, size, the prefix with its digest of all the rest; and, if
    the file is not in RLX's own cache, where files are touched and unlinked but never changed, its times."""
    status = os.fstat(descriptor)
    times = () if own else (status.st_mtime_ns, status.st_ctime_ns)
    start = np.zeros(layout.PREFIX_BYTES, np.uint8)
    SYSTEM.read_at(descriptor, start, 0)
    return status.st_dev, status.st_ino, status.st_size, start.tobytes(), *times


class Container(File):
    """The open file of a program.

    Arrays are read-only, and outlive this object while they are in use. Those of a file in RLX's own cache
    are mapped. Another file may be changed or cut by whoever can write to it: its arrays are read when they
    are first asked for, or, if they are more than `MOST_READ` bytes or are to stay in the file, mapped under
    a guard: see `check_whole`.
    """

    stay_in_file = False  # whether arrays shall take no memory
    _guarded: Guarded | None = None

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, PROGRAM)

    def _open(self, file: BinaryIO, size: int) -> None:
        self.status = identity(file.fileno())  # before anything is read
        super()._open(file, size)

    def _take(self, file: BinaryIO) -> None:
        number = file.fileno()
        self.is_own = _is_own(number, self.path)
        if self.is_own:
            mapped = np.frombuffer(map_file(number, self._size, self._first), np.uint8)
            self._head, self._arrays = mapped[: self._first], mapped[self._first :]
        else:
            self._head = _held(file, 0, self._first)
            self._file = os.fdopen(os.dup(number), "rb", buffering=0)
        self.identity = file_identity(number, self.is_own)

    @functools.cached_property
    def _arrays(self) -> Bytes:  # type: ignore[override]
        """The bytes of all arrays of a file that is not our own."""
        with self._file, file_boundary(self.path):
            if is_available() and (self.stay_in_file or self._size - self._first > MOST_READ):
                self._guarded = Guarded(self._file.fileno(), self._size, self._first)
                return self._guarded.array[self._first :]
            return _held(self._file, self._first, self._size - self._first)

    @property
    def state(self) -> tuple[object, ...]:
        """What changes when somebody writes to the file. RLX's own are touched, which changes other times."""
        assert self.status is not None
        return self.status[:4] if self.is_own else self.status

    @property
    def is_guarded(self) -> bool:
        """Whether arrays are mapped from a file that somebody may cut."""
        return self._guarded is not None

    def check_whole(self) -> None:
        """Refuse what was computed from arrays that the file no longer has."""
        if self._guarded is not None and self._guarded.broken:
            raise self.fail("it was cut while it was in use; restore it, and load it again")

    def _digest_of_arrays(self, digest: Callable[[Iterable[Bytes]], str], mapped: bool) -> str:
        if mapped:
            return super()._digest_of_arrays(digest, mapped)
        with file_boundary(self.path), open_plain(self.path) as file:
            if not self.is_own and identity(file.fileno()) != self.status:
                raise self.fail("it was changed while it was opened; load it again")
            return digest(read_blocks(file, self._first, self._size))

    def is_same(self, descriptor: int) -> bool:
        """Whether an open file, whose times have changed since it was loaded, has the same weights."""
        with os.fdopen(os.dup(descriptor), "rb", buffering=0) as file, file_boundary(self.path):
            found = sha256(read_blocks(file, self._first, self._size))
        return found == self.header["array_sha256"]
