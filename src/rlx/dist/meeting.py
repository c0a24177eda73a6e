"""All-reduces that a native program makes by itself, where ranks are processes of one machine.

A kernel of the program's own list meets the other ranks at the group's barrier, reduces this rank's slice
where it lies in all heaps, and meets them again. It is what `all_reduce` does with arrays in the heap,
without leaving native code. Ranks of one program come within microseconds of each other, so where each has a
core it first waits without giving it away. Later it calls back into Python from time to time, which looks
after deaths and deadlines as in any other meeting.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.dist import sync
from rlx.dist.collectives import _slices
from rlx.dist.errors import TransportError
from rlx.dist.reduce import STREAM_BYTES, native_address
from rlx.dist.transport import Call
from rlx.dist.types import ReduceKind

if TYPE_CHECKING:
    from rlx.backend.cpu.irtypes import Value
    from rlx.backend.cpu.target import Target
    from rlx.dist.shm import SharedMemoryTransport
    from rlx.ir.dtype import DType

NAME = "rlx_all_reduce"
ARGUMENT = 3  # of the kernel: the address of its table, behind the fields that every kernel has
STOPPED, DIFFERENT = (
    1001,
    1002,
)  # error codes: a look around ended the wait; the ranks came for different calls

# The kernel's table, in 8-byte fields: what to post, whom to call, and the reduction of this rank's slice.
POST, TAG, LENGTH, PLACE, ARRIVE, WAIT, LOOK, PAUSES, REDUCE, POINTERS, RANKS, COUNT, FIELDS = range(13)
PATIENCE = 4000  # pauses, some 100 us
_ENDED = 1 << 20  # a verdict beside those of `sync`


def emit(target: Target) -> str:
    """LLVM IR of `void rlx_all_reduce(ptr args, i64 thread, i64 threads)`, a kernel for one thread."""
    from rlx.backend.cpu.irtext import Module

    module = Module(target)
    f = module.function(NAME, [("ptr", "args"), ("i64", "thread"), ("i64", "threads")])
    args = f.args[0]
    table = f.field(args, ARGUMENT, "ptr")
    post = f.field(table, POST, "ptr")

    def fail(code: int) -> None:
        f.store(f.value(code), f.field(args, 0, "ptr"), 8)

    def meet(length: Any, place: Any) -> Value:
        for value, field in ((f.field(table, TAG), sync.TAG), (length, sync.LENGTH), (place, sync.PLACE)):
            f.store(f.value(value), f.gep(post, field, "i64"), 8)

        def look_and_wait(_: list[Value]) -> list[Value]:
            ended = f.call(f.field(table, LOOK, "ptr"), [], "i64")
            wait = f.field(table, WAIT, "ptr")
            return f.if_value(
                f.cmp("ne", ended, 0), lambda: [f.value(_ENDED)], lambda: [f.call(wait, [post], "i64")]
            )

        f.call(f.field(table, ARRIVE, "ptr"), [post])
        pause_while_late()
        first = f.call(f.field(table, WAIT, "ptr"), [post], "i64")
        return f.while_loop([first], lambda carried: f.cmp("slt", carried[0], 0), look_and_wait)[0]

    def pause_while_late() -> None:
        epoch = f.load("i32", f.gep(post, sync.MY_EPOCH, "i64"))
        lines, pauses = f.field(post, sync.LINES, "ptr"), f.field(table, PAUSES)

        def count_late(member: Any, carried: list[Value]) -> list[Any]:
            its = f.atomic_load("i32", f.field(lines, member, "ptr"), "acquire")
            return [f.add(carried[0], f.zext(f.cmp("slt", f.sub(its, epoch), 0), "i64"))]

        def some_late(carried: list[Value]) -> Value:
            late = f.loop(0, f.field(table, RANKS), 1, [0], count_late)[0]
            return f.value(f.and_(f.cmp("ne", late, 0), f.cmp("slt", carried[0], pauses)))

        def pause(carried: list[Value]) -> list[Any]:
            f.pause()
            return [f.add(carried[0], 1)]

        f.while_loop([0], some_late, pause)

    def is_ended(verdict: Value) -> Value:
        return f.value(f.cmp("ne", f.and_(verdict, _ENDED), 0))

    def reduce() -> None:
        ranks = f.field(table, RANKS)
        pointers = f.field(table, POINTERS, "ptr")
        f.call(f.field(table, REDUCE, "ptr"), [pointers, ranks, ranks, f.field(table, COUNT)])
        f.branch(is_ended(meet(0, 0)), lambda: fail(STOPPED))  # nobody reads on before all have written

    def together(verdict: Value) -> None:
        differ = f.and_(verdict, sync.TAGS_DIFFER | sync.LENGTHS_DIFFER)
        f.branch(f.cmp("ne", differ, 0), lambda: fail(DIFFERENT), reduce)

    arrived = meet(f.field(table, LENGTH), f.field(table, PLACE))
    f.branch(is_ended(arrived), lambda: fail(STOPPED), lambda: together(arrived))
    return module.text()


@functools.cache
def _kernel() -> tuple[object, int]:
    code = sync.load_cached(emit)
    return code, code.address(NAME)


class NativeMeetings:
    """Makes the argument tables of one group's all-reduces, and remembers why a wait was ended."""

    def __init__(self, group: SharedMemoryTransport) -> None:
        self._group = group
        self._failure: BaseException | None = None
        self._epoch, self._deadline = -1, 0.0
        self._look = ctypes.CFUNCTYPE(ctypes.c_int64)(self._look_around)
        self._keep: list[object] = []

    def all_reduce(
        self, address: int, nbytes: int, dtype: DType, kind: ReduceKind
    ) -> tuple[int, list[int]] | None:
        """The kernel and its arguments for an array in this rank's heap; None where Python has to do it."""
        group = self._group
        reduce = native_address(dtype.name, kind)
        if reduce is None or not 0 < nbytes < STREAM_BYTES:
            return None
        code, kernel = _kernel()
        offset = address - group._own_heap
        start, size = _slices(nbytes, group.num_ranks, math.lcm(64, dtype.itemsize))[group.this_rank]
        places = [heap + offset + start for heap in group._heaps]
        pointers = np.array([*places, *places], np.int64)
        native: Any = sync.sync().code
        table = np.zeros(FIELDS, np.int64)
        table[POST], table[TAG] = group._table_address, Call("all_reduce", dtype.name, kind.value).tag
        table[LENGTH], table[PLACE] = nbytes, offset + 1
        table[ARRIVE], table[WAIT] = native.address("rlx_arrive"), native.address("rlx_wait")
        table[PAUSES] = PATIENCE if len(os.sched_getaffinity(0)) >= group.num_ranks else 0
        table[LOOK] = ctypes.cast(self._look, ctypes.c_void_p).value or 0
        table[REDUCE], table[POINTERS] = reduce, pointers.ctypes.data
        table[RANKS], table[COUNT] = group.num_ranks, size // dtype.itemsize
        self._keep += [code, native, table, pointers]
        return kernel, [table.ctypes.data]

    def _look_around(self) -> int:
        """Called by a waiting kernel once in a while; not 0 ends the wait."""
        group = self._group
        epoch = group._table[sync.MY_EPOCH]
        if epoch != self._epoch:  # a wait that has just begun
            self._epoch, self._deadline = epoch, time.monotonic() + group.timeout
        try:
            group._look_around(self._deadline)
        except BaseException as failure:  # it cannot pass through native code
            self._failure = failure
            return 1
        return 0

    def failure(self, code: int) -> BaseException:
        """What a kernel's error code means."""
        if code == DIFFERENT or self._failure is None:
            return TransportError(
                f"the ranks did not make the same call: {self._group._calls()}; every rank must"
            )
        failure, self._failure = self._failure, None
        return failure
