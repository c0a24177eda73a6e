"""Mapped files that shrink: a native handler of SIGBUS that knows our mappings and no other address.

Reading a page of a mapping whose file was truncated kills a process. The handler looks whether the address
lies in a range of its table. If so it puts a page of zeros there and notes it in the table, and the read goes
on; whoever owns the range asks afterwards and refuses what was computed. Any other fault goes to the handler
that was there before, or kills the process as ever. The handler is installed when the first file is mapped.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import mmap
import signal
import sys
import threading
import weakref

import numpy as np

from rlx.codegen.native.jit import compile_object, load
from rlx.driver.copy.native import c_function, c_library
from rlx.runtime.memory import PAGE, table
from rlx.runtime.native.code import baseline
from rlx.runtime.store.cache import default_cache
from rlx.target.cpu import resolve

MOST_RANGES = 4096
_FIELDS = 3  # of a range: first address, address behind the last one, whether a page was missing
_SA_SIGINFO, _SA_ONSTACK = 4, 0x08000000
_SI_ADDR = 16  # where siginfo_t has the address, on 64-bit Linux

_TEXT = r"""
@ranges = internal global ptr null
@mmap = internal global ptr null
@sigaction = internal global ptr null
@before = internal global ptr null

define void @set(ptr %ranges, ptr %mmap, ptr %sigaction, ptr %before) {
  store ptr %ranges, ptr @ranges
  store ptr %mmap, ptr @mmap
  store ptr %sigaction, ptr @sigaction
  store ptr %before, ptr @before
  ret void
}

define void @handle(i32 %signal, ptr %info, ptr %context) {
entry:
  %address_at = getelementptr i8, ptr %info, i64 {SI_ADDR}
  %address = load i64, ptr %address_at
  %ranges = load ptr, ptr @ranges
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %next, %no ]
  %more = icmp ult i64 %i, {MOST_RANGES}
  br i1 %more, label %look, label %chain
look:
  %at = mul i64 %i, {FIELDS}
  %range = getelementptr i64, ptr %ranges, i64 %at
  %start = load atomic i64, ptr %range acquire, align 8
  %end_at = getelementptr i64, ptr %range, i64 1
  %end = load atomic i64, ptr %end_at acquire, align 8
  %above = icmp uge i64 %address, %start
  %below = icmp ult i64 %address, %end
  %inside = and i1 %above, %below
  br i1 %inside, label %ours, label %no
no:
  %next = add i64 %i, 1
  br label %loop
ours:
  %flag_at = getelementptr i64, ptr %range, i64 2
  store atomic i64 1, ptr %flag_at release, align 8
  %page = and i64 %address, -{PAGE}
  %place = inttoptr i64 %page to ptr
  %mmap = load ptr, ptr @mmap
  %made = call ptr %mmap(ptr %place, i64 {PAGE}, i32 {PROT_READ}, i32 {FLAGS}, i32 -1, i64 0)
  %number = ptrtoint ptr %made to i64
  %failed = icmp eq i64 %number, -1
  br i1 %failed, label %chain, label %return
chain:
  %before = load ptr, ptr @before
  %function = load i64, ptr %before
  %is_function = icmp ugt i64 %function, 1
  br i1 %is_function, label %call, label %default
call:
  %callee = inttoptr i64 %function to ptr
  call void %callee(i32 %signal, ptr %info, ptr %context)
  br label %return
default:
  %sigaction = load ptr, ptr @sigaction
  %ignored = call i32 %sigaction(i32 %signal, ptr %before, ptr null)
  br label %return
return:
  ret void
}
"""


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
    return sys.platform == "linux" and sys.maxsize > 1 << 32


class Guarded:
    """A read-only mapping of a file whose missing pages read as zeros; `broken` tells of them.

    >>> import os, tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     _ = file.write(bytes([7]) * (2 * PAGE)), file.flush()
    ...     guarded = Guarded(file.fileno(), 2 * PAGE)
    ...     os.truncate(file.name, PAGE)
    ...     int(guarded.array[0]), int(guarded.array[-1]), guarded.broken
    (7, 0, True)
    """

    def __init__(self, descriptor: int, size: int) -> None:
        mapping = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
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
        target = baseline(resolve("host").x86)
        text = _text()
        key = hashlib.sha256(text.encode()).hexdigest()
        made = default_cache().get_or_make(key, target, lambda: compile_object(text, target))
        self._code = load(made, target)
        self.ranges = table(MOST_RANGES * _FIELDS).reshape(MOST_RANGES, _FIELDS)
        self._lock = threading.Lock()
        self._before = _SigAction()
        word = ctypes.c_uint64
        set_up = ctypes.CFUNCTYPE(None, word, word, word, word)(self._code.address("set"))
        places = (self.ranges.ctypes.data, c_function("mmap"), c_function("sigaction"))
        library = c_library()
        library.sigaction(int(signal.SIGBUS), None, ctypes.byref(self._before))
        set_up(*places, ctypes.addressof(self._before))
        ours = _SigAction(handler=self._code.address("handle"), flags=_SA_SIGINFO | _SA_ONSTACK)
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


def _text() -> str:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # MAP_FIXED
    parts = {
        "SI_ADDR": _SI_ADDR,
        "MOST_RANGES": MOST_RANGES,
        "FIELDS": _FIELDS,
        "PAGE": PAGE,
        "PROT_READ": mmap.PROT_READ,
        "FLAGS": flags,
    }
    text = _TEXT
    for name, part in parts.items():
        text = text.replace("{" + name + "}", str(part))
    return text


@functools.cache
def _guard() -> _Guard:
    return _Guard()
