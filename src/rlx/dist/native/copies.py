"""Copies: through the caches by the C library, past them by a loop of our own."""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rlx.codegen.native.irtext import Module
from rlx.driver.copy.nontemporal import LEAST_BYTES, LINE, rlx_copy_past_caches
from rlx.records import dataclass
from rlx.runtime.native.code import load_for_host

if TYPE_CHECKING:
    from rlx.target.cpu import Target

# From this many bytes on, stores are non-temporal: the lines would be evicted before they are read.
STREAM_BYTES = 4 << 20
# So do shorter ones of memory that another core has read: to take its lines back mostly costs five times as
# much (1 MiB in 47 us non-temporal, in 300 through the caches; in some runs it was the slower way).
HAND_OVER_BYTES = 32 << 10


def emit(target: Target) -> str:
    """LLVM IR of `rlx_copy_past_caches`."""
    module = Module(target)
    rlx_copy_past_caches.emit(module)
    return module.text()


@dataclass(frozen=True)
class _Native:
    """The compiled loop; the code lives as long as what calls it."""

    code: object
    address: int
    copy: Callable[[int, int, int, int], None]


_compiling = threading.Lock()


@functools.cache
def _native() -> _Native:
    with _compiling:  # ranks that are threads come here together; one of them compiles
        return _compiled()


@functools.cache
def _compiled() -> _Native:
    code = load_for_host(emit)
    i64, pointer = ctypes.c_int64, ctypes.c_void_p
    address = code.address(rlx_copy_past_caches.name)
    return _Native(code, address, ctypes.CFUNCTYPE(None, pointer, pointer, i64, i64)(address))


def copy_bytes(destination: int, source: int, nbytes: int, total: int = 0) -> None:
    """Copy memory; non-temporal if it is part of a large copy of `total` bytes. Releases the GIL.

    >>> import numpy as np
    >>> a, b = np.arange(3), np.zeros(3, np.int64)
    >>> copy_bytes(b.ctypes.data, a.ctypes.data, a.nbytes); b.tolist()
    [0, 1, 2]
    """
    large = max(nbytes, total) >= STREAM_BYTES
    if large and nbytes >= LEAST_BYTES and abs(destination - source) >= nbytes:
        _native().copy(destination, source, nbytes, -destination % LINE)
    elif nbytes:
        ctypes.memmove(destination, source, nbytes)


@functools.cache
def code_for(total: int) -> int:
    """Where the loop begins, if parts of a result of `total` bytes use non-temporal stores, else 0."""
    return _native().address if total >= STREAM_BYTES else 0


@functools.cache
def nanoseconds_per_byte() -> float:
    """How long a copy takes that stays in this core's caches and those it shares, the best of several."""
    nbytes = 512 << 10
    source, to = (ctypes.create_string_buffer(nbytes) for _ in range(2))
    best = float("inf")
    for _ in range(8):
        begin = time.perf_counter_ns()
        ctypes.memmove(to, source, nbytes)
        best = min(best, time.perf_counter_ns() - begin)
    return best / nbytes


def hand_over(destination: int, source: int, nbytes: int) -> None:
    """Copy memory to where another core has read before and will read now."""
    copy_bytes(destination, source, nbytes, STREAM_BYTES if nbytes >= HAND_OVER_BYTES else 0)
