"""Mapped files that shrink: a native handler of SIGBUS that knows our mappings and no other address.

Reading a page of a mapping whose file was truncated kills a process. The handler looks whether the address
lies in a range of its table. If so it puts a page of zeros there and notes it in the table, and the read goes
on; whoever owns the range asks afterwards and refuses what was computed. Any other fault goes to the handler
that was there before, or kills the process as ever. The handler is installed when the first file is mapped.
"""

from __future__ import annotations

import ctypes
import functools
import signal
import threading
import weakref
from enum import IntEnum

import numpy as np

from rlx.codegen.native.irtext import Module
from rlx.codegen.native.notation import emit_all, native
from rlx.codegen.native.words import (
    at,
    atomic_load,
    atomic_store,
    byte_at,
    call,
    field,
    i32,
    i64,
    load,
    loop,
    ptr,
    store,
    variable,
)
from rlx.driver.copy.native import c_function
from rlx.runtime.memory import PAGE, map_file, table
from rlx.runtime.native.code import build
from rlx.runtime.store.cache import default_cache
from rlx.system import SYSTEM

MOST_RANGES = 4096
_FIELDS = 3  # of a range: first address, address behind the last one, whether a page was missing
_SA_SIGINFO, _SA_ONSTACK = 4, 0x08000000
_SI_ADDR = 16  # where siginfo_t has the address, on 64-bit Linux
_PROT_READ, _FLAGS = 1, 0x02 | 0x20 | 0x10  # MAP_PRIVATE, MAP_ANONYMOUS and MAP_FIXED of Linux


class State(IntEnum):
    """Fields of what the handler knows."""

    RANGES = 0
    MMAP = 1  # functions of the C library
    SIGACTION = 2
    BEFORE = 3  # the `struct sigaction` that was there before
    FIELDS = 4


def emit_bus_guard(module: Module) -> None:
    """Write the handler and what tells it where its state is."""
    emit_all(module, rlx_guard, rlx_handle_fault)


@native
def rlx_guard(state: ptr) -> None:
    """What the handler knows is at `state` from now on."""
    store(state, variable("rlx_guard_state", ptr))


@native
def rlx_handle_fault(signal: i32, info: ptr, context: ptr) -> None:
    """The handler of SIGBUS."""
    address = load(i64, byte_at(info, _SI_ADDR))
    state = load(ptr, variable("rlx_guard_state", ptr))
    for i in loop(MOST_RANGES):
        place = at(field(state, State.RANGES, ptr), i * _FIELDS)
        start, end = atomic_load(i64, place), atomic_load(i64, at(place, 1))
        if (address >= start) & (address < end):
            atomic_store(i64(1), at(place, 2))
            page, make = address & -PAGE, field(state, State.MMAP, ptr)
            if call(make, page, PAGE, i32(_PROT_READ), i32(_FLAGS), i32(-1), 0, returns=i64) != -1:
                return
    before = field(state, State.BEFORE, ptr)
    if before[0] > 1:  # a function: 0 and 1 are SIG_DFL and SIG_IGN
        call(field(before, 0, ptr), signal, info, context)
    else:
        call(field(state, State.SIGACTION, ptr), signal, before, ptr(0), returns=i32)


class _SigAction(ctypes.Structure):
    """`struct sigaction` of the C libraries of 64-bit Linux."""

    _fields_ = [
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_uint64 * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    ]


def is_available() -> bool:
    """Whether this system has what the guard needs."""
    return SYSTEM.guards_mappings


class Guarded:
    """A read-only mapping of a file whose missing pages read as zeros; `broken` tells of them. `arrays` is as
    for `map_file`.

    >>> import os, tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     _ = file.write(bytes([7]) * (2 * PAGE)), file.flush()
    ...     guarded = Guarded(file.fileno(), 2 * PAGE)
    ...     os.truncate(file.name, PAGE)
    ...     int(guarded.array[0]), int(guarded.array[-1]), guarded.broken
    (7, 0, True)
    """

    def __init__(self, descriptor: int, size: int, arrays: int = 0) -> None:
        mapping = map_file(descriptor, size, arrays)
        self.array = np.frombuffer(mapping, np.uint8)
        self._place = _guard().watch(self.array.ctypes.data, size)
        # Arrays over the mapping may outlive this object: the range is forgotten with the mapping itself.
        weakref.finalize(mapping, _guard().forget, self._place)

    @property
    def broken(self) -> bool:
        """Whether a page was read that the file no longer has."""
        return bool(self._place[2])


class _Guard:
    def __init__(self) -> None:
        self._code = build(emit_bus_guard, default_cache())
        self.ranges = table(MOST_RANGES * _FIELDS).reshape(MOST_RANGES, _FIELDS)
        self._lock = threading.Lock()
        self._before = _SigAction()
        self._state = table(State.FIELDS)
        self._state[State.RANGES] = self.ranges.ctypes.data
        self._state[State.MMAP] = c_function("mmap")
        self._state[State.SIGACTION] = c_function("sigaction")
        self._state[State.BEFORE] = ctypes.addressof(self._before)
        library = SYSTEM.c_library()
        library.sigaction(int(signal.SIGBUS), None, ctypes.byref(self._before))
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._code.address(rlx_guard.name))(self._state.ctypes.data)
        handler = self._code.address(rlx_handle_fault.name)
        ours = _SigAction(handler=handler, flags=_SA_SIGINFO | _SA_ONSTACK)
        if library.sigaction(int(signal.SIGBUS), ctypes.byref(ours), None) != 0:
            raise OSError("the system has refused a handler of SIGBUS")

    def watch(self, start: int, size: int) -> np.ndarray:
        """Room in the table for a range."""
        with self._lock:
            free = np.flatnonzero(self.ranges[:, 1] == 0)
            if not free.size:
                raise OSError(f"more than {MOST_RANGES} files are mapped at once")
            place: np.ndarray = self.ranges[free[0]]
            place[2], place[0] = 0, start
            place[1] = start + size  # from here on the handler knows it
        return place

    def forget(self, place: np.ndarray) -> None:
        with self._lock:
            place[1] = 0


@functools.cache
def _guard() -> _Guard:
    return _Guard()
