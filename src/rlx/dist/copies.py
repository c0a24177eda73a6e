"""Copies of large arrays: native code that keeps its speed where that of the C library depends on luck.

`memmove` of a megabyte is slower by a third or more for most distances between source and destination
(measured: 45 GB/s against 34); eight vectors at a time, stored to whole cache lines, are as fast for all.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlx.dist.sync import load_cached

if TYPE_CHECKING:
    from rlx.backend.cpu.irtext import Function, Int
    from rlx.backend.cpu.irtypes import Value
    from rlx.backend.cpu.target import Target

UNROLL = 8
NATIVE_BYTES = 4 << 10  # shorter copies go to the C library
# From this many bytes on, stores go past the caches: the lines would be evicted before they are read.
STREAM_BYTES = 4 << 20
# So do shorter ones of memory that another core has read: to take its lines back costs five times as much
# (measured: 1 MiB in 47 us past the caches, in 300 through them).
HAND_OVER_BYTES = 32 << 10
LINE = 64

_NAMES = ("rlx_copy", "rlx_copy_past_caches")


def emit(target: Target) -> str:
    """LLVM IR of `void rlx_copy(ptr to, ptr from, i64 bytes, i64 head)` and of its form past the caches.

    There are NATIVE_BYTES or more of them; `head` says how many stand before the first whole line of `to`.
    """
    from rlx.backend.cpu.irtext import Module

    module = Module(target)
    parameters = [("ptr", "to"), ("ptr", "from"), ("i64", "bytes"), ("i64", "head")]
    for past_caches, name in zip((False, True), _NAMES, strict=True):
        _emit_copy(module.function(name, parameters), past_caches)
    return module.text()


def _emit_copy(f: Function, past_caches: bool) -> None:
    from rlx.backend.cpu.irtypes import vector

    to, source, count, head = f.args
    width = f.module.target.vector_bytes
    step = UNROLL * width

    def block(start: Int, aligned: bool) -> None:
        places = [f.add(start, i * width) for i in range(UNROLL)]
        values: list[Value] = [f.load(vector("i8", width), f.gep(source, i, "i8")) for i in places]
        for i, value in zip(places, values, strict=True):
            f.store(value, f.gep(to, i, "i8"), nontemporal=aligned and past_caches)

    # The ends are copied by blocks that overlap what the loop does, so it starts and stores at whole lines.
    last = f.sub(count, step)
    block(0, aligned=False)
    f.loop(head, last, step, [], lambda i, _: block(i, aligned=True))
    block(last, aligned=False)
    if past_caches:
        f.fence()


_Copy = Callable[[int, int, int, int], None]


@dataclass(frozen=True)
class _Native:
    """The compiled functions; the code lives as long as what calls it."""

    code: object
    through_caches: _Copy
    past_caches: _Copy


_compiling = threading.Lock()


@functools.cache
def _native() -> _Native:
    with _compiling:  # ranks that are threads come here together; one of them compiles
        return _compiled()


@functools.cache
def _compiled() -> _Native:
    code = load_cached(emit)
    i64, pointer = ctypes.c_int64, ctypes.c_void_p
    prototype = ctypes.CFUNCTYPE(None, pointer, pointer, i64, i64)
    return _Native(code, *(prototype(code.address(name)) for name in _NAMES))


def copy_bytes(destination: int, source: int, nbytes: int, total: int = 0) -> None:
    """Copy memory; past the caches if it is part of a large copy of `total` bytes. Releases the GIL.

    >>> import numpy as np
    >>> a, b = np.arange(3), np.zeros(3, np.int64)
    >>> copy_bytes(b.ctypes.data, a.ctypes.data, a.nbytes); b.tolist()
    [0, 1, 2]
    """
    if nbytes < NATIVE_BYTES or abs(destination - source) < nbytes:
        if nbytes:
            ctypes.memmove(destination, source, nbytes)
        return
    native = _native()
    copy = native.past_caches if max(nbytes, total) >= STREAM_BYTES else native.through_caches
    copy(destination, source, nbytes, -destination % LINE)


@functools.cache
def code_for(total: int) -> int:
    """Where the code begins that copies parts of a result of `total` bytes."""
    code: Any = _native().code
    found: int = code.address(_NAMES[total >= STREAM_BYTES])
    return found


def hand_over(destination: int, source: int, nbytes: int) -> None:
    """Copy memory to where another core has read before and will read now."""
    copy_bytes(destination, source, nbytes, STREAM_BYTES if nbytes >= HAND_OVER_BYTES else 0)
