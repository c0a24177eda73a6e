"""Copies: through the caches by the C library, past them by a loop of our own, eight vectors at a time."""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlx.codegen.native.irtext import Module
from rlx.codegen.native.irtypes import vector
from rlx.codegen.native.notation import native
from rlx.codegen.native.words import builder, byte_at, fence, i64, load, ptr, store
from rlx.dist.native.sync import load_cached
from rlx.records import dataclass

if TYPE_CHECKING:
    from rlx.target.cpu import Target

UNROLL = 8
LEAST_BYTES = 4 << 10  # what the loop copies at least
# From this many bytes on, stores go past the caches: the lines would be evicted before they are read.
STREAM_BYTES = 4 << 20
# So do shorter ones of memory that another core has read: to take its lines back mostly costs five times as
# much (1 MiB in 47 us past the caches, in 300 through them; in some runs it was the slower way).
HAND_OVER_BYTES = 32 << 10
LINE = 64


def emit(target: Target) -> str:
    """LLVM IR of `rlx_copy_past_caches`."""
    module = Module(target)
    rlx_copy_past_caches.emit(module)
    return module.text()


@native
def rlx_copy_past_caches(to: ptr, source: ptr, count: i64, head: i64) -> None:
    """Copy `count` bytes, LEAST_BYTES or more; `head` of them stand before the first whole line of `to`."""
    width = builder().module.target.vector_bytes
    step = UNROLL * width

    def block(start: Any, is_aligned: bool) -> None:
        places = [start + i * width for i in range(UNROLL)]
        values = [load(vector("i8", width), byte_at(source, i)) for i in places]
        for i, value in zip(places, values, strict=True):
            store(value, byte_at(to, i), nontemporal=is_aligned)

    # The ends are copied by blocks that overlap what the loop does, so it starts and stores at whole lines.
    last = count - step
    block(0, is_aligned=False)
    for i in range(head, last, step):
        block(i, is_aligned=True)
    block(last, is_aligned=False)
    fence()


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
    code = load_cached(emit)
    i64, pointer = ctypes.c_int64, ctypes.c_void_p
    address = code.address(rlx_copy_past_caches.name)
    return _Native(code, address, ctypes.CFUNCTYPE(None, pointer, pointer, i64, i64)(address))


def copy_bytes(destination: int, source: int, nbytes: int, total: int = 0) -> None:
    """Copy memory; past the caches if it is part of a large copy of `total` bytes. Releases the GIL.

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
    """Where the loop begins, if parts of a result of `total` bytes are to go past the caches, else 0."""
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
