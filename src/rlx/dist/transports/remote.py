"""Reading the private memory of another process of this machine, where the system allows it.

Whether it does is found out by trying: every rank of a job has a secret in its own memory and a copy of it in
the heap, and who can read the one and finds the other may read all of that process.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable

from rlx.system import SYSTEM

TOKEN_BYTES = 16


class _Vector(ctypes.Structure):
    """The system's struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("len", ctypes.c_size_t))


@functools.cache
def _system_read() -> Callable[..., int] | None:
    function = getattr(SYSTEM.c_library(), "process_vm_readv", None)
    if function is not None:
        vector, count = ctypes.POINTER(_Vector), ctypes.c_ulong
        function.argtypes = (ctypes.c_int, vector, count, vector, count, ctypes.c_ulong)
        function.restype = ctypes.c_ssize_t
    return function


def read(pid: int, address: int, nbytes: int) -> bytes | None:
    """Memory of a process, None if it cannot be read.

    >>> mine = ctypes.create_string_buffer(b"here", 4)
    >>> read(os.getpid(), ctypes.addressof(mine), 4) in (b"here", None)
    True
    """
    system_read = _system_read()
    if system_read is None:
        return None
    found = ctypes.create_string_buffer(nbytes)
    here, there = _Vector(ctypes.addressof(found), nbytes), _Vector(address, nbytes)
    got = system_read(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    return found.raw if got == nbytes else None


class Token:
    """A secret in this process's own memory, by which others find out that they read the right one."""

    def __init__(self) -> None:
        self.value = os.urandom(TOKEN_BYTES)
        self._memory = ctypes.create_string_buffer(self.value, TOKEN_BYTES)
        self.address = ctypes.addressof(self._memory)
