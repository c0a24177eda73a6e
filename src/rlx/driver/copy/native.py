"""The native half of `ThreadCopy`: a worker that takes copies from a ring, without Python's lock.

The control block of the worker and one ring, both tables of 8-byte fields, are shared with Python. Who waits
for a copy looks at a counter for some microseconds and then sleeps until it changes.

Copies of at least `NT_BYTES` bypass the caches on the way out (non-temporal stores): a tile that is larger
than the last cache would only evict what the compute thread is using.
"""

from __future__ import annotations

import ctypes
import errno
import functools
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from rlx.codegen.native.irtext import Module
from rlx.codegen.native.notation import emit_all, inline, native
from rlx.codegen.native.waiting import clock, sleep_while, wake
from rlx.codegen.native.words import (
    address_of,
    at,
    atomic_load,
    atomic_rmw,
    builder,
    byte_at,
    call,
    external,
    field,
    i32,
    i64,
    load,
    pause,
    ptr,
    select,
    trunc,
    zext,
)
from rlx.driver.copy.nontemporal import LEAST_BYTES, LINE, rlx_copy_past_caches
from rlx.driver.worker import CFunction, Control, rlx_stop_worker, signal, work
from rlx.errors import UnsupportedError
from rlx.system import SYSTEM

if TYPE_CHECKING:
    from rlx.codegen.native.jit import Code
    from rlx.target.cpu import Target


class CopyControl(IntEnum):
    """Fields of the control block after those of every worker."""

    ISSUED = Control.POSTED
    RING = Control.FIELDS
    NT_BYTES = Control.FIELDS + 1
    PREAD = Control.FIELDS + 2  # the function that reads files
    FINISHED = Control.FIELDS + 8
    WAITING = Control.FIELDS + 16  # threads that sleep until `FINISHED` changes
    FIELDS = Control.FIELDS + 24


class CopyField(IntEnum):
    """Fields of one ring entry. FD -1 means that SRC is an address, else it is an offset in that file."""

    SRC = 0
    DST = 1
    ROWS = 2
    ROW_BYTES = 3
    SRC_PITCH = 4
    DST_PITCH = 5
    TAIL_BYTES = 6
    FD = 7
    STATUS = 8  # 0 fine, -1 the file ended early, else errno
    NANOSECONDS = 9


RING_ENTRIES = 256  # a power of two
ENDED = -1  # status of a read whose file ended early

_memcpy = external("memcpy", ptr)
_errno = external("__errno_location", ptr)  # targets are machines with Linux


def emit(target: Target) -> str:
    """LLVM IR of the worker and of what Python calls."""
    module = Module(target)
    emit_all(module, rlx_copy_worker, rlx_publish_copy, rlx_stop_worker, rlx_copies_finished, rlx_await_copy)
    return module.text()


# -- reading and copying


@inline
def read_file(pread: Callable[..., i64], descriptor: i64, target: ptr, count: i64, offset: i64) -> i64:
    """Read bytes of a file by the function `pread`; 0, ENDED or errno."""
    file = trunc(descriptor, i32)
    done, status = i64(0), i64(0)
    while (done < count) & (status == 0):
        got = pread(file, byte_at(target, done), count - done, offset + done)
        if got < 0:
            code = zext(load(i32, _errno()), i64)
            status = select(code == errno.EINTR, 0, code)
        else:
            status = select(got == 0, i64(ENDED), 0)
        done += max(got, i64(0))
    return status


@native(internal=True)
def rlx_copy_run(control: ptr, file: i64, source: i64, to: ptr, count: i64) -> i64:
    """Copy bytes that follow each other; the status."""
    if file >= 0:
        pread = field(control, CopyControl.PREAD, ptr)
        return read_file(lambda *args: call(pread, *args, returns=i64), file, to, count, source)
    origin = builder().op("ptr", f"inttoptr {source} to ptr")
    if (count >= control[CopyControl.NT_BYTES]) & (count >= LEAST_BYTES):
        rlx_copy_past_caches(to, origin, count, -address_of(to) & (LINE - 1))
    else:
        _memcpy(to, origin, count)
    return i64(0)


@native(internal=True)
def rlx_copy_entry(control: ptr, entry: ptr) -> i64:
    """Copy the rows of an entry of the ring, then its tail; the status."""
    source, to, file = entry[CopyField.SRC], field(entry, CopyField.DST, ptr), entry[CopyField.FD]
    rows, row_bytes = entry[CopyField.ROWS], entry[CopyField.ROW_BYTES]
    source_pitch, to_pitch = entry[CopyField.SRC_PITCH], entry[CopyField.DST_PITCH]
    row, status = i64(0), i64(0)
    while (row < rows) & (status == 0):
        place = byte_at(to, row * to_pitch)
        status = rlx_copy_run(control, file, source + row * source_pitch, place, row_bytes)
        row += 1
    if status != 0:
        return status
    tail = entry[CopyField.TAIL_BYTES]
    return rlx_copy_run(control, file, source + rows * source_pitch, byte_at(to, rows * to_pitch), tail)


# -- the worker


@native
def rlx_copy_worker(control: ptr) -> None:
    """What the thread runs: copies in their order, until it is stopped and nothing is left."""
    work(control, rlx_copy_next)


@native(internal=True)
def rlx_copy_next(control: ptr) -> i64:
    """Carry out the next copy of the ring; 0 if there is none at present."""
    finished = control[CopyControl.FINISHED]
    if atomic_load(i64, at(control, CopyControl.ISSUED)) == finished:
        return i64(0)
    entry = at(field(control, CopyControl.RING, ptr), (finished & (RING_ENTRIES - 1)) * len(CopyField))
    began = clock()
    entry[CopyField.STATUS] = rlx_copy_entry(control, entry)
    entry[CopyField.NANOSECONDS] = clock() - began
    # A waiter counts itself first and looks second, so one of the two sees the other.
    atomic_rmw("xchg", at(control, CopyControl.FINISHED), finished + 1, "seq_cst")
    if atomic_load(i64, at(control, CopyControl.WAITING), "seq_cst") != 0:
        wake(at(control, CopyControl.FINISHED), everybody=True)
    return i64(1)


# -- what Python calls


@native
def rlx_publish_copy(control: ptr) -> None:
    """The next entry of the ring is complete."""
    atomic_rmw("add", at(control, CopyControl.ISSUED), i64(1))
    signal(control)


@native
def rlx_copies_finished(control: ptr) -> i64:
    """How many copies are finished."""
    return atomic_load(i64, at(control, CopyControl.FINISHED))


@native
def rlx_await_copy(control: ptr, ticket: i64) -> None:
    """Return when so many copies are finished: spin, then sleep."""
    place, tries = at(control, CopyControl.FINISHED), 0
    while atomic_load(i64, place) < ticket:
        if tries < control[Control.SPINS]:
            pause()
        else:
            atomic_rmw("add", at(control, CopyControl.WAITING), i64(1), "seq_cst")
            seen = atomic_load(i64, place, "seq_cst")
            if seen < ticket:
                sleep_while(place, seen)
            atomic_rmw("sub", at(control, CopyControl.WAITING), i64(1), "seq_cst")
        tries += 1


class NativeCopy(NamedTuple):
    """The loaded functions. Calling them releases Python's lock."""

    work: CFunction
    publish: CFunction
    stop: CFunction
    finished: CFunction
    wait_for: CFunction
    code: object  # keeps the machine code mapped

    @classmethod
    def of(cls, code: Code) -> NativeCopy:
        """The functions of loaded code."""
        return cls(
            work=code.function(rlx_copy_worker),
            publish=code.function(rlx_publish_copy),
            stop=code.function(rlx_stop_worker),
            finished=code.function(rlx_copies_finished),
            wait_for=code.function(rlx_await_copy),
            code=code,
        )


@functools.cache
def native_copy() -> NativeCopy:
    """Load the loop; it is compiled once per user (LLVM takes some 20 ms, and 80 MiB of memory)."""
    from rlx.runtime.native.code import load_for_host  # the cache of native code comes after drivers

    return NativeCopy.of(load_for_host(emit))


def c_function(*names: str) -> int:
    """Address of the first of `names` that the C library has."""
    library = SYSTEM.c_library()
    for name in names:
        if hasattr(library, name):
            return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
    raise UnsupportedError(f"the C library has no {' or '.join(names)}; use SyncCopy here")
