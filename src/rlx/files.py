"""Files, ours and those of others: opened, recognised again, replaced in one step, and refused in one way.

A file from outside is data. Reading one gives a value or a `FormatError`, whatever is in it; a pipe or a
device, which may never end, is not read at all. Our own files appear whole or not at all: they are written
next to their name, flushed to the disk and renamed. What a killed process leaves there has a name by which it
is found, and a lock while somebody still writes it.
"""

from __future__ import annotations

import glob
import io
import math
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from rlx.errors import FormatError, RlxError
from rlx.system import SYSTEM

Json: TypeAlias = dict[str, Any]
"""An object of JSON, as it is read or written."""


UNFINISHED = ".rlx-unfinished"
"""How the names of files end that are being written."""
_STALE_SECONDS = 60.0  # a file is locked right after it is created; nobody takes this long between the two
LIKELY_LOCKED = 1.0
"""Seconds between the two that are hardly ever taken: for a user who asks to delete what is abandoned."""

Array = np.ndarray
Identity = tuple[int, int, int, int, int]


def identity(file: str | os.PathLike[str] | int) -> Identity | None:
    """What changes when a file does: device, inode, size, times of change. None if it is not there.

    >>> identity("/no/such/file") is None
    True
    """
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def open_plain(path: str | os.PathLike[str], flags: int = 0) -> BinaryIO:
    """A plain file opened for reading; OSError for a folder, pipe, socket or device, which is not waited for.

    >>> open_plain("/dev/zero")
    Traceback (most recent call last):
    OSError: [Errno 22] it is not a plain file: '/dev/zero'
    """
    # Without O_NONBLOCK, opening a pipe waits for somebody to write to it.
    flags |= getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(22, "it is not a plain file", os.fspath(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_plain(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a plain file; OSError for anything else."""
    with open_plain(path) as file:
        return file.read()


def read_npy(data: bytes) -> Array:
    """The array in the bytes of a `.npy` file; ValueError for one that claims more than there is.

    >>> import io
    >>> file = io.BytesIO()
    >>> np.save(file, np.arange(3))
    >>> read_npy(file.getvalue())
    array([0, 1, 2])
    >>> read_npy(file.getvalue()[:-1])
    Traceback (most recent call last):
    ValueError: it says that it holds int64[3], 24 bytes, but has 23
    """
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, kind = read(file)
    if kind.hasobject or min(shape, default=0) < 0:
        raise ValueError(f"its elements are {kind}, its shape is {shape}")
    size, there = math.prod(shape) * kind.itemsize, len(data) - file.tell()
    if size > there:  # before memory is allocated for it
        sizes = ",".join(map(str, shape))
        raise ValueError(f"it says that it holds {kind}[{sizes}], {size} bytes, but has {there}")
    file.seek(0)
    found: Array = np.lib.format.read_array(file, allow_pickle=False)
    return found


@contextmanager
def file_boundary(path: str | os.PathLike[str], what: str = "file") -> Iterator[None]:
    """Whatever reading a file raises comes out as a FormatError that names it; our own errors stay as they
    are.

    >>> with file_boundary("x.npy", "array"):
    ...     raise ValueError("bad magic")
    Traceback (most recent call last):
    rlx.errors.FormatError: x.npy is not a valid array: bad magic (ValueError)
    """
    name = os.fspath(path)
    try:
        yield
    except RlxError:
        raise
    except OSError as e:
        raise FormatError(f"cannot read {name}: {e.strerror or e}") from e
    except MemoryError as e:
        raise FormatError(f"{name}: the system has not enough memory for what it claims to hold") from e
    except Exception as e:
        told = f"{e} ({type(e).__name__})" if str(e) else type(e).__name__
        raise FormatError(f"{name} is not a valid {what}: {told[:400]}") from e


# -- writing


def unfinished_name(target: Path) -> Path:
    """A fresh name next to a file's own, by which it is found if it stays unfinished."""
    return target.with_name(f"{_start(target)}{os.getpid()}-{os.urandom(4).hex()}{UNFINISHED}")


def _start(target: Path) -> str:
    return f".{target.name[:100]}."


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write to, which takes its name when the block ends without an error; then it is on the disk.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replacing(folder + "/a") as file:
    ...         _ = file.write(b"whole")
    ...     Path(folder, "a").read_bytes(), len(os.listdir(folder))
    (b'whole', 1)
    """
    target = Path(path)
    remove_abandoned(target.parent, start=_start(target))
    unfinished = unfinished_name(target)
    try:
        with open(unfinished, "xb+") as file:
            SYSTEM.lock(file)
            yield file
            file.flush()
            os.fsync(file.fileno())
            if SYSTEM.renames_open_files:
                os.replace(unfinished, target)  # while it is locked: nobody takes it for abandoned
        if not SYSTEM.renames_open_files:
            os.replace(unfinished, target)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    SYSTEM.sync_folder(target.parent)  # a new name is on the disk when its folder is


def unfinished_files(folder: Path, start: str = ".") -> list[tuple[Path, os.stat_result]]:
    """Unfinished files in a folder whose names begin so, with their status; files may vanish meanwhile."""
    found = []
    for path in folder.glob(f"{glob.escape(start)}*{UNFINISHED}"):
        try:
            found.append((path, path.stat()))
        except OSError:
            continue
    return found


def remove_abandoned(folder: Path, least_age: float = _STALE_SECONDS, start: str = ".") -> int:
    """Delete what killed processes left in a folder; returns how many files there were."""
    old = [p for p, s in unfinished_files(folder, start) if time.time() - s.st_mtime >= least_age]
    gone = [path for path in old if not _is_locked(path)]
    for path in gone:
        path.unlink(missing_ok=True)
    return len(gone)


def _is_locked(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return not SYSTEM.lock(file, wait=False)  # what cannot be locked is left alone
    except OSError:
        return True  # gone, or of somebody else
