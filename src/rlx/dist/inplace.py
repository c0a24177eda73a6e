"""Arrays in the heap move by one native call: meet, copy from the others' heaps, meet again.

A call that has copied a megabyte finds Python's own memory gone from the caches, which costs 20 us for a few
lines of it. What the call cannot do (a rank is late, lengths differ, arrays lie outside the heap) is left to
`MappedTransport.exchange`, which goes on where it ended.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rlx.dist import copies, sync

if TYPE_CHECKING:
    from rlx.backend.cpu.irtext import Int
    from rlx.backend.cpu.irtypes import Value
    from rlx.backend.cpu.target import Target

# The call's table, in 8-byte fields: the table of `sync`, code, addresses of heaps; then, per call, where in
# everybody's array to begin, and where `BYTES` of each of them go.
POST, BARRIER, COPY, HEAPS, START, TO, STRIDE, BYTES, FIELDS = range(9)

# What it returns: the verdict of the first meeting if nothing was moved, else one of these.
MOVED, MOVED_BUT_LATE = 1 << 16, -(1 << 16)


def emit(target: Target) -> str:
    """LLVM IR of `i64 rlx_move(ptr table)`."""
    from rlx.backend.cpu.irtext import Module

    f = (module := Module(target)).function("rlx_move", [("ptr", "table")], returns="i64")
    (table,) = f.args
    post, barrier = f.field(table, POST, "ptr"), f.field(table, BARRIER, "ptr")
    members, me = f.field(post, sync.MEMBERS), f.field(post, sync.ME)
    received = f.gep(post, sync.RECEIVED + 1, "i64")

    verdict = f.call(barrier, [post], "i64")
    f.branch(f.cmp("ne", verdict, sync.SOME_PLACES), lambda: f.return_(verdict))

    def place(member: Value) -> Value:
        return f.field(received, f.mul(member, 2))

    def count_absent(member: Int, carried: list[Value]) -> list[Value]:
        absent = f.cmp("eq", place(f.value(member)), 0)
        return [f.value(f.add(carried[0], f.select(absent, f.value(1), f.value(0))))]

    (absent,) = f.loop(0, members, 1, [0], count_absent)
    f.branch(f.cmp("ne", absent, 0), lambda: f.return_(verdict))

    def move(turn: Int, _: list[Value]) -> None:
        # Oneself first, then the neighbour and so on round, so that nobody is crowded.
        around = f.value(f.add(me, turn))
        member = f.select(f.cmp("slt", around, members), around, f.value(f.sub(around, members)))
        offset = f.add(f.sub(place(member), 1), f.field(table, START))
        source = f.gep(f.field(f.field(table, HEAPS, "ptr"), member, "ptr"), offset, "i8")
        shift = f.mul(member, f.field(table, STRIDE))
        head = f.and_(f.sub(0, f.add(f.field(table, TO), shift)), copies.LINE - 1)
        to = f.gep(f.field(table, TO, "ptr"), shift, "i8")
        size, loop = f.field(table, BYTES), f.field(table, COPY, "ptr")
        f.branch(
            f.cmp("eq", f.field(table, COPY), 0),
            lambda: f.call("memmove", [to, source, size], "ptr"),
            lambda: f.call(loop, [to, source, size, f.value(head)]),
        )

    f.loop(0, members, 1, [], move)
    for field in (sync.LENGTH, sync.PLACE):
        f.store(f.value(0), f.gep(post, field, "i64"), 8)
    closing = f.call(barrier, [post], "i64")  # nobody may change its array before all have read it
    f.branch(f.cmp("slt", closing, 0), lambda: f.return_(f.value(MOVED_BUT_LATE)))
    f.return_(f.value(f.or_(closing, MOVED)))
    return module.text()


@functools.cache
def _native() -> tuple[object, Callable[[int], int]]:
    code = sync.load_cached(emit)
    return code, ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(code.address("rlx_move"))


class Mover:
    """The native call for one group."""

    def __init__(self, post: int, heaps: Sequence[int]) -> None:
        self._code, self._call = _native()
        self._heaps = (ctypes.c_int64 * len(heaps))(*heaps)
        self._table = (ctypes.c_int64 * FIELDS)()
        self._address = ctypes.addressof(self._table)
        native: Any = sync.sync().code
        self._table[POST], self._table[BARRIER] = post, native.address("rlx_barrier")
        self._table[HEAPS] = ctypes.addressof(self._heaps)
        self._wanted: list[ctypes.c_int64 | int] = []

    def __call__(self, start: int, size: int, to: int, stride: int) -> int:
        """Post what stands in the table of `sync`, and copy `size` bytes of every rank to `to`."""
        wanted: list[ctypes.c_int64 | int] = [start, to, stride, size]
        if wanted != self._wanted:  # loops come with the same arrays again
            self._wanted = wanted
            self._table[COPY] = copies.code_for(size * len(self._heaps))
            self._table[START:FIELDS] = wanted
        return self._call(self._address)
