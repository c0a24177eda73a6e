"""The native half of `ThreadCopy`: a worker loop that takes copies from a ring, without Python's lock.

One control block and one ring, both tables of 8-byte fields, are shared with Python; field names below are
the single place where their layout is written. Worker and waiters look at a counter for some microseconds
and then sleep on a condition variable: waking a sleeper takes longer than copying many a tile. Functions of
the C library come in through the control block as addresses, so the object holds none and links to nothing.

Copies of at least `NT_BYTES` bypass the caches on the way out (non-temporal stores): a tile that is larger
than the last cache would only evict what the compute thread is using.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import os
import time
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from rlx.errors import UnsupportedError


class Control(IntEnum):
    """Fields of the control block."""

    MUTEX = 0
    WORK = 1  # condition: something was issued, or stop
    DONE = 2  # condition: something was finished
    ISSUED = 3
    FINISHED = 4
    STOP = 5
    RING = 6
    NT_BYTES = 7
    LOCK = 8
    UNLOCK = 9
    COND_WAIT = 10
    BROADCAST = 11
    PREAD = 12
    ERRNO = 13
    CLOCK = 14
    MEMCPY = 15
    SPINS = 16  # looks at a counter before sleeping on its condition


class Entry(IntEnum):
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

_TEXT = r"""
declare i64 @llvm.umin.i64(i64, i64)

define internal ptr @field_ptr(ptr %table, i64 %field) {
  %at = getelementptr i64, ptr %table, i64 %field
  %value = load ptr, ptr %at
  ret ptr %value
}

define internal i64 @field(ptr %table, i64 %field) {
  %at = getelementptr i64, ptr %table, i64 %field
  %value = load i64, ptr %at
  ret i64 %value
}

define internal i64 @counter(ptr %table, i64 %field) {
  %at = getelementptr i64, ptr %table, i64 %field
  %value = load atomic i64, ptr %at acquire, align 8
  ret i64 %value
}

define internal void @call_with(ptr %control, i64 %function, i64 %object) {
  %f = call ptr @field_ptr(ptr %control, i64 %function)
  %o = call ptr @field_ptr(ptr %control, i64 %object)
  %ignored = call i32 %f(ptr %o)
  ret void
}

define internal void @sleep_on(ptr %control, i64 %condition) {
  %f = call ptr @field_ptr(ptr %control, i64 {COND_WAIT})
  %c = call ptr @field_ptr(ptr %control, i64 %condition)
  %m = call ptr @field_ptr(ptr %control, i64 {MUTEX})
  %ignored = call i32 %f(ptr %c, ptr %m)
  ret void
}

define internal void @copy_plainly(ptr %control, ptr %src, ptr %dst, i64 %n) {
  %f = call ptr @field_ptr(ptr %control, i64 {MEMCPY})
  %ignored = call ptr %f(ptr %dst, ptr %src, i64 %n)
  ret void
}

; Look at a counter until it reaches a value or the patience is over; the caller looks again under the lock.
define internal void @linger(ptr %control, i64 %field, i64 %value) {
entry:
  %spins = call i64 @field(ptr %control, i64 {SPINS})
  br label %look
look:
  %k = phi i64 [ 0, %entry ], [ %next, %pause ]
  %seen = call i64 @counter(ptr %control, i64 %field)
  %reached = icmp uge i64 %seen, %value
  %patient = icmp ult i64 %k, %spins
  %quit = xor i1 %patient, true
  %leave = or i1 %reached, %quit
  br i1 %leave, label %return, label %pause
pause:
  {PAUSE}
  %next = add i64 %k, 1
  br label %look
return:
  ret void
}

define internal i64 @now(ptr %control) {
  %time = alloca [2 x i64]
  %f = call ptr @field_ptr(ptr %control, i64 {CLOCK})
  %ignored = call i32 %f(i32 {CLOCK_MONOTONIC}, ptr %time)
  %seconds = call i64 @field(ptr %time, i64 0)
  %rest = call i64 @field(ptr %time, i64 1)
  %scaled = mul i64 %seconds, 1000000000
  %sum = add i64 %scaled, %rest
  ret i64 %sum
}

; Vector loads from anywhere, non-temporal stores of whole cache lines; the two ends go plainly.
define internal void @copy_past_caches(ptr %control, ptr %src, ptr %dst, i64 %n) {
entry:
  %address = ptrtoint ptr %dst to i64
  %negated = sub i64 0, %address
  %to_line = and i64 %negated, 63
  %head = call i64 @llvm.umin.i64(i64 %to_line, i64 %n)
  call void @copy_plainly(ptr %control, ptr %src, ptr %dst, i64 %head)
  br label %loop
loop:
  %i = phi i64 [ %head, %entry ], [ %end, %body ]
  %end = add i64 %i, 256
  %fits = icmp ule i64 %end, %n
  br i1 %fits, label %body, label %rest
body:
{VECTORS}
  br label %loop
rest:
  %left = sub i64 %n, %i
  %s = getelementptr i8, ptr %src, i64 %i
  %d = getelementptr i8, ptr %dst, i64 %i
  call void @copy_plainly(ptr %control, ptr %s, ptr %d, i64 %left)
  {FENCE}
  ret void
}

define internal i64 @read_file(ptr %control, i64 %fd64, ptr %dst, i64 %n, i64 %offset) {
entry:
  %fd = trunc i64 %fd64 to i32
  %pread = call ptr @field_ptr(ptr %control, i64 {PREAD})
  %errno = call ptr @field_ptr(ptr %control, i64 {ERRNO})
  br label %loop
loop:
  %done = phi i64 [ 0, %entry ], [ %more, %good ], [ %done, %failed ]
  %left = sub i64 %n, %done
  %finished = icmp eq i64 %left, 0
  br i1 %finished, label %fine, label %read
read:
  %d = getelementptr i8, ptr %dst, i64 %done
  %o = add i64 %offset, %done
  %got = call i64 %pread(i32 %fd, ptr %d, i64 %left, i64 %o)
  %bad = icmp slt i64 %got, 0
  br i1 %bad, label %failed, label %check
check:
  %empty = icmp eq i64 %got, 0
  br i1 %empty, label %short, label %good
good:
  %more = add i64 %done, %got
  br label %loop
failed:
  %where = call ptr %errno()
  %code = load i32, ptr %where
  %interrupted = icmp eq i32 %code, {EINTR}
  br i1 %interrupted, label %loop, label %report
report:
  %wide = zext i32 %code to i64
  ret i64 %wide
short:
  ret i64 -1
fine:
  ret i64 0
}

define internal i64 @copy_run(ptr %control, i64 %fd, i64 %src, ptr %dst, i64 %n) {
entry:
  %memory = icmp slt i64 %fd, 0
  br i1 %memory, label %choose, label %file
file:
  %status = call i64 @read_file(ptr %control, i64 %fd, ptr %dst, i64 %n, i64 %src)
  ret i64 %status
choose:
  %s = inttoptr i64 %src to ptr
  %threshold = call i64 @field(ptr %control, i64 {NT_BYTES})
  %large = icmp uge i64 %n, %threshold
  br i1 %large, label %past, label %plain
past:
  call void @copy_past_caches(ptr %control, ptr %s, ptr %dst, i64 %n)
  ret i64 0
plain:
  call void @copy_plainly(ptr %control, ptr %s, ptr %dst, i64 %n)
  ret i64 0
}

define internal i64 @copy_entry(ptr %control, ptr %entry_) {
entry:
  %src = call i64 @field(ptr %entry_, i64 {SRC})
  %dst = call ptr @field_ptr(ptr %entry_, i64 {DST})
  %rows = call i64 @field(ptr %entry_, i64 {ROWS})
  %row_bytes = call i64 @field(ptr %entry_, i64 {ROW_BYTES})
  %src_pitch = call i64 @field(ptr %entry_, i64 {SRC_PITCH})
  %dst_pitch = call i64 @field(ptr %entry_, i64 {DST_PITCH})
  %tail = call i64 @field(ptr %entry_, i64 {TAIL_BYTES})
  %fd = call i64 @field(ptr %entry_, i64 {FD})
  br label %loop
loop:
  %row = phi i64 [ 0, %entry ], [ %next, %copied ]
  %s_at = mul i64 %row, %src_pitch
  %s = add i64 %src, %s_at
  %d_at = mul i64 %row, %dst_pitch
  %d = getelementptr i8, ptr %dst, i64 %d_at
  %more = icmp ult i64 %row, %rows
  br i1 %more, label %full, label %last
full:
  %status = call i64 @copy_run(ptr %control, i64 %fd, i64 %s, ptr %d, i64 %row_bytes)
  %failed = icmp ne i64 %status, 0
  br i1 %failed, label %stop, label %copied
copied:
  %next = add i64 %row, 1
  br label %loop
stop:
  ret i64 %status
last:
  %result = call i64 @copy_run(ptr %control, i64 %fd, i64 %s, ptr %d, i64 %tail)
  ret i64 %result
}

define void @worker(ptr %control) {
entry:
  call void @call_with(ptr %control, i64 {LOCK}, i64 {MUTEX})
  br label %look
more:
  call void @call_with(ptr %control, i64 {UNLOCK}, i64 {MUTEX})
  %wanted = add i64 %count, 1
  call void @linger(ptr %control, i64 {ISSUED}, i64 %wanted)
  call void @call_with(ptr %control, i64 {LOCK}, i64 {MUTEX})
  br label %look
look:
  %finished = call i64 @counter(ptr %control, i64 {FINISHED})
  %issued = call i64 @counter(ptr %control, i64 {ISSUED})
  %idle = icmp eq i64 %finished, %issued
  br i1 %idle, label %nothing, label %work
nothing:
  %stop = call i64 @field(ptr %control, i64 {STOP})
  %stopping = icmp ne i64 %stop, 0
  br i1 %stopping, label %leave, label %sleep
sleep:
  call void @sleep_on(ptr %control, i64 {WORK})
  br label %look
work:
  call void @call_with(ptr %control, i64 {UNLOCK}, i64 {MUTEX})
  %ring = call ptr @field_ptr(ptr %control, i64 {RING})
  %slot = and i64 %finished, {RING_MASK}
  %at = mul i64 %slot, {ENTRY_FIELDS}
  %entry_ = getelementptr i64, ptr %ring, i64 %at
  %began = call i64 @now(ptr %control)
  %status = call i64 @copy_entry(ptr %control, ptr %entry_)
  %ended = call i64 @now(ptr %control)
  %took = sub i64 %ended, %began
  %status_at = getelementptr i64, ptr %entry_, i64 {STATUS}
  store i64 %status, ptr %status_at
  %took_at = getelementptr i64, ptr %entry_, i64 {NANOSECONDS}
  store i64 %took, ptr %took_at
  call void @call_with(ptr %control, i64 {LOCK}, i64 {MUTEX})
  %count = add i64 %finished, 1
  %count_at = getelementptr i64, ptr %control, i64 {FINISHED}
  store atomic i64 %count, ptr %count_at release, align 8
  call void @call_with(ptr %control, i64 {BROADCAST}, i64 {DONE})
  br label %more
leave:
  call void @call_with(ptr %control, i64 {UNLOCK}, i64 {MUTEX})
  ret void
}

; Publish one more entry (one = 1) or ask the worker to leave when it is idle (one = 0).
define void @publish(ptr %control, i64 %one) {
  call void @call_with(ptr %control, i64 {LOCK}, i64 {MUTEX})
  %issued = call i64 @counter(ptr %control, i64 {ISSUED})
  %count = add i64 %issued, %one
  %count_at = getelementptr i64, ptr %control, i64 {ISSUED}
  store atomic i64 %count, ptr %count_at release, align 8
  %stop = sub i64 1, %one
  %stop_at = getelementptr i64, ptr %control, i64 {STOP}
  store i64 %stop, ptr %stop_at
  call void @call_with(ptr %control, i64 {BROADCAST}, i64 {WORK})
  call void @call_with(ptr %control, i64 {UNLOCK}, i64 {MUTEX})
  ret void
}

define i64 @finished(ptr %control) {
  %count = call i64 @counter(ptr %control, i64 {FINISHED})
  ret i64 %count
}

define void @wait_for(ptr %control, i64 %ticket) {
entry:
  call void @linger(ptr %control, i64 {FINISHED}, i64 %ticket)
  %early = call i64 @counter(ptr %control, i64 {FINISHED})
  %there = icmp uge i64 %early, %ticket
  br i1 %there, label %return, label %enter
enter:
  call void @call_with(ptr %control, i64 {LOCK}, i64 {MUTEX})
  br label %look
look:
  %count = call i64 @counter(ptr %control, i64 {FINISHED})
  %reached = icmp uge i64 %count, %ticket
  br i1 %reached, label %leave, label %sleep
sleep:
  call void @sleep_on(ptr %control, i64 {DONE})
  br label %look
leave:
  call void @call_with(ptr %control, i64 {UNLOCK}, i64 {MUTEX})
  br label %return
return:
  ret void
}
"""

_X86 = {"FENCE": "call void @llvm.x86.sse.sfence()", "PAUSE": "call void @llvm.x86.sse2.pause()"}
_OTHER = {"FENCE": "fence seq_cst", "PAUSE": "fence acquire"}
_X86_DECLARATIONS = "declare void @llvm.x86.sse.sfence()\ndeclare void @llvm.x86.sse2.pause()\n"


def _vectors() -> str:
    lines = []
    for k in range(4):
        lines += [
            f"  %i{k} = add i64 %i, {64 * k}",
            f"  %s{k} = getelementptr i8, ptr %src, i64 %i{k}",
            f"  %v{k} = load <16 x i32>, ptr %s{k}, align 1",
        ]
    for k in range(4):
        lines += [
            f"  %d{k} = getelementptr i8, ptr %dst, i64 %i{k}",
            f"  store <16 x i32> %v{k}, ptr %d{k}, align 64, !nontemporal !0",
        ]
    return "\n".join(lines)


def _module_text(x86: bool) -> str:
    parts = {"VECTORS": _vectors()} | (_X86 if x86 else _OTHER)
    parts |= {field.name: str(int(field)) for table in (Control, Entry) for field in table}
    parts |= {"RING_MASK": str(RING_ENTRIES - 1), "ENTRY_FIELDS": str(len(Entry))}
    parts |= {"EINTR": str(errno.EINTR), "CLOCK_MONOTONIC": str(time.CLOCK_MONOTONIC)}
    text = _TEXT
    for name, part in parts.items():
        text = text.replace("{" + name + "}", part)
    return text + (_X86_DECLARATIONS if x86 else "") + "!0 = !{i32 1}\n"


class NativeCopy(NamedTuple):
    """The loaded functions. Calling them releases Python's lock."""

    worker: Any
    publish: Any
    finished: Any
    wait_for: Any
    code: Any  # keeps the machine code mapped


@functools.cache
def native_copy() -> NativeCopy:
    """Load the loop; it is compiled once per user (LLVM takes some 20 ms, and 80 MiB of memory)."""
    from rlx.codegen.native.jit import compile_object, load
    from rlx.runtime.store.cache import default_cache
    from rlx.target.cpu import resolve

    target = resolve("host")
    text = _module_text(target.x86)
    key = hashlib.sha256(text.encode()).hexdigest()
    made = default_cache().get_or_make(key, target, lambda: compile_object(text, target, passes=2))
    code = load(made, target)
    word, nothing = ctypes.c_int64, None

    def function(name: str, result: Any, arguments: Sequence[Any]) -> Any:
        return ctypes.CFUNCTYPE(result, *arguments)(code.address(name))

    return NativeCopy(
        function("worker", nothing, [word]),
        function("publish", nothing, [word, word]),
        function("finished", word, [word]),
        function("wait_for", nothing, [word, word]),
        code,
    )


@functools.cache
def c_library() -> Any:
    """The C library of this process, which holds the POSIX functions that the worker calls."""
    if os.name != "posix":
        raise UnsupportedError("ThreadCopy needs a POSIX system; use SyncCopy here")
    return ctypes.CDLL(None)


def c_function(*names: str) -> int:
    """Address of the first of `names` that the C library has."""
    library = c_library()
    for name in names:
        if hasattr(library, name):
            return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
    raise UnsupportedError(f"the C library has no {' or '.join(names)}; use SyncCopy here")
