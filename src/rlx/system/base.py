"""What RLX asks of any operating system, and the answer of one that can do nothing special."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING

from rlx.errors import CompileError, UnsupportedError

if TYPE_CHECKING:
    import ctypes

    import numpy as np

ASK_FOR_MATRICES = (158, 0x1023, 18)
"""Linux on x86-64: the system call arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA), which gives 0."""


class System:
    """An operating system. What its methods say of missing things is also in `lacks`, for `rlx doctor`.

    >>> len(System().cpus()) == os.cpu_count()
    True
    """

    name = "an unknown system"
    runs_native_code = False  # generated code follows the conventions of Linux
    guards_mappings = False  # whether a mapped file that shrinks can be noticed
    has_guard_pages = False  # whether pages can be made to fault
    renames_open_files = True
    lacks: Sequence[str] = (
        "native code: programs are planned, compiled and saved, but only the NumPy reference runs them",
        "ranks as processes (rlx launch); ranks are threads only",
        "threads bound to cores, and huge pages",
        "mapped files of other users: they are read into memory",
    )

    def refuse_native_code(self) -> UnsupportedError:
        """The error of a program that is to run here although `runs_native_code` is not set."""
        return UnsupportedError(
            f"RLX runs native code on Linux only, not on {self.name}; compute with NumPy "
            "(rlx.reference.interpreter.evaluate), or save or export the program for another machine"
        )

    # -- processors

    def cpus(self) -> list[int]:
        """The numbers of the processors that this process may use."""
        return list(range(os.cpu_count() or 1))

    def current_cpu(self) -> int:
        """The processor that runs this thread, or -1 where that is not known."""
        return -1

    def hardware_word(self) -> int:
        """The bits in which the system tells what an AArch64 processor can do; 0 where it does not."""
        return 0

    def let_use_matrices(self) -> bool:
        """Ask that this process, with all its threads, may use the registers of AMX; whether it may."""
        return False

    def pin(self, thread: int, cpus: Sequence[int]) -> None:
        """Let a thread, or the process for 0, run on these processors only. OSError if it may not; nothing
        happens on systems where threads cannot be bound."""

    def core_of(self, cpu: int) -> object:
        """The same for all processors of one core; by default each is a core of its own."""
        return cpu

    def yield_to_others(self) -> None:
        """Give this thread a lower priority, where threads have one of their own."""

    def give_back_memory(self) -> None:
        """Give memory that the allocator of C keeps for later back to the system, where it can be told to."""

    def physical_memory(self) -> int:
        """Bytes of memory of this machine, or 0 if that is not known."""
        return 0

    def last_cache_bytes(self) -> int:
        """Bytes of the last cache before memory, or 0 if that is not known."""
        return 0

    # -- memory

    def c_library(self) -> ctypes.CDLL:
        """The C library of this process, with POSIX functions."""
        raise UnsupportedError(f"this needs functions of a POSIX system, which {self.name} does not have")

    def map_pages(self, size: int, reserve: bool = True) -> mmap.mmap:
        """Zeroed pages of this process. Without `reserve`, those that are never touched may be more than the
        system has."""
        return mmap.mmap(-1, size)

    def use_huge_pages(self, mapping: mmap.mmap, start: int, size: int) -> None:
        """Ask for huge pages: the memory is the same without, only slower."""

    def drop_pages(self, mapping: mmap.mmap, start: int, size: int) -> None:
        """Give the pages of a mapped file back; they are read again when needed."""

    def forbid(self, address: int, size: int) -> None:
        """Make whole pages fault on any access."""
        raise UnsupportedError(f"guard pages cannot be made on {self.name}; allocate without guard")

    def protect(self, address: int, size: int, execute: bool) -> None:
        """Make whole pages read-only, or executable."""
        raise CompileError(f"code cannot be made executable on {self.name}; compute with NumPy, or use Linux")

    def shared_memory(self, name: str) -> int:
        """A descriptor of empty memory without a name that processes can share."""
        raise UnsupportedError("ranks as processes need Linux (memfd_create); use LocalTransport here")

    # -- files and users

    def user_id(self) -> int | None:
        """The user of this process, as files have it; None where files have no such owner."""
        return None

    def lock(self, file: IO[bytes] | IO[str], wait: bool = True) -> bool:
        """Lock a file for as long as it is open; False if somebody else has, or it cannot be. A dead process
        holds no lock."""
        return False

    def sync_folder(self, folder: str | os.PathLike[str]) -> None:
        """Wait until new names of a folder are on the disk, where that can be asked for."""

    def read_at(self, descriptor: int, out: np.ndarray, offset: int) -> int:
        """Fill contiguous bytes from a place of a file; how many there were. Where no call does it in one
        step, other threads must not use the descriptor meanwhile."""
        before = os.lseek(descriptor, 0, os.SEEK_CUR)
        try:
            os.lseek(descriptor, offset, os.SEEK_SET)
            data = os.read(descriptor, out.nbytes)
        finally:
            os.lseek(descriptor, before, os.SEEK_SET)
        out.data[: len(data)] = data
        return len(data)

    # -- processes

    def die_with_parent(self) -> None:
        """Ask that this process ends when its parent does, however that ends."""
        raise UnsupportedError("ranks as processes need Linux (prctl); use LocalTransport here")

    def process_fields(self, pid: int) -> list[str]:
        """What is known of a process, as in /proc/<pid>/stat after its name; [] if it is gone."""
        raise UnsupportedError("ranks as processes need Linux (/proc); use LocalTransport here")
