"""What RLX asks of the operating system."""

from __future__ import annotations

import ctypes
import functools

from rlx.errors import CompileError


@functools.cache
def libc() -> ctypes.CDLL:
    """The C library of this process."""
    return ctypes.CDLL(None, use_errno=True)


def protect(address: int, size: int, protection: int) -> None:
    """Change what may be done with whole pages of memory."""
    if libc().mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), protection):
        raise CompileError(
            f"the system does not let memory become executable (error {ctypes.get_errno()}); "
            "allow this process to run code that it generates"
        )
