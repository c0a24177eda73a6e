"""What Linux and macOS have in common."""

from __future__ import annotations

import fcntl
import functools
import mmap
import os
from typing import IO, TYPE_CHECKING

from rlx.errors import CompileError, OutOfMemoryError
from rlx.system.base import System

if TYPE_CHECKING:
    import ctypes


# As <sys/mman.h> of all systems has them.
_NO_ACCESS, _READ, _EXECUTE = 0, 1, 4


class Posix(System):
    """A system with the functions of POSIX, and flock."""

    has_guard_pages = True

    def c_library(self) -> ctypes.CDLL:
        return _c_library()

    def map_pages(self, size: int, reserve: bool = True) -> mmap.mmap:
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def forbid(self, address: int, size: int) -> None:
        if error := _mprotect(address, size, _NO_ACCESS):
            raise OutOfMemoryError(f"mprotect refused a guard page: {os.strerror(error)}")

    def protect(self, address: int, size: int, execute: bool) -> None:
        if error := _mprotect(address, size, _READ | (_EXECUTE if execute else 0)):
            raise CompileError(
                f"the system does not let memory become executable (error {error}); "
                "allow this process to run code that it generates"
            )

    def physical_memory(self) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def user_id(self) -> int | None:
        return os.geteuid()

    def lock(self, file: IO[bytes] | IO[str], wait: bool = True) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError:
            return False  # taken, or a file system without locks
        return True

    def sync_folder(self, folder: str | os.PathLike[str]) -> None:
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except OSError:
            return  # a folder that may be written to but not read
        try:
            os.fsync(descriptor)
        except OSError:
            pass  # a file system whose folders cannot be synced
        finally:
            os.close(descriptor)


@functools.cache
def _c_library() -> ctypes.CDLL:
    import ctypes  # start time

    return ctypes.CDLL(None, use_errno=True)


def _mprotect(address: int, size: int, rights: int) -> int:
    """0, or the number of the error."""
    import ctypes  # start time

    if _c_library().mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), rights):
        return ctypes.get_errno()
    return 0
