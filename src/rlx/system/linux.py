"""Linux: what only it has, such as affinity, memfd, huge pages and /proc."""

from __future__ import annotations

import mmap
import os
import platform
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlx.system.base import ASK_FOR_MATRICES
from rlx.system.posix import Posix

if TYPE_CHECKING:
    import numpy as np

_MAP_NORESERVE = 0x4000  # Python's mmap module names it from 3.13 on
_PR_SET_PDEATHSIG = 1
_AT_HWCAP = 16
_BACKGROUND = 10  # niceness of threads that nobody waits for


class Linux(Posix):
    """The system whose conventions native code follows."""

    name = "Linux"
    runs_native_code = True
    guards_mappings = sys.maxsize > 1 << 32
    lacks: Sequence[str] = ()

    def cpus(self) -> list[int]:
        return sorted(os.sched_getaffinity(0))

    def current_cpu(self) -> int:
        return int(self.c_library().sched_getcpu())

    def hardware_word(self) -> int:
        import ctypes  # start time

        ask = self.c_library().getauxval
        ask.restype, ask.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
        return int(ask(_AT_HWCAP))

    def let_use_matrices(self) -> bool:
        """Linux 5.16 gives the permission once for all threads, also later ones, and for forked processes."""
        import ctypes  # start time

        words = map(ctypes.c_long, ASK_FOR_MATRICES)
        return platform.machine() == "x86_64" and self.c_library().syscall(*words) == 0

    def pin(self, thread: int, cpus: Sequence[int]) -> None:
        os.sched_setaffinity(thread, cpus)

    def core_of(self, cpu: int) -> object:
        try:
            return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
        except OSError:
            return cpu

    def yield_to_others(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BACKGROUND)

    def give_back_memory(self) -> None:
        trim = getattr(self.c_library(), "malloc_trim", None)  # glibc has it
        if trim is not None:
            trim(0)

    def last_cache_bytes(self) -> int:
        for name in ("SC_LEVEL3_CACHE_SIZE", "SC_LEVEL2_CACHE_SIZE"):
            size = os.sysconf(name) if name in os.sysconf_names else 0
            if size > 0:
                return size
        return 0

    def map_pages(self, size: int, reserve: bool = True) -> mmap.mmap:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        return mmap.mmap(-1, size, flags=flags if reserve else flags | _MAP_NORESERVE)

    def use_huge_pages(self, mapping: mmap.mmap, start: int, size: int) -> None:
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE, start, size)
        except OSError:
            pass  # a kernel without huge pages

    def drop_pages(self, mapping: mmap.mmap, start: int, size: int) -> None:
        mapping.madvise(mmap.MADV_DONTNEED, start, size)

    def shared_memory(self, name: str) -> int:
        return os.memfd_create(name, os.MFD_CLOEXEC)

    def read_at(self, descriptor: int, out: np.ndarray, offset: int) -> int:
        return os.preadv(descriptor, [out.data], offset)

    def die_with_parent(self) -> None:
        self.c_library().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def process_fields(self, pid: int) -> list[str]:
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                return file.read().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return []
