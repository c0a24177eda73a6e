"""Collectives that a native program runs by itself, where ranks are processes of one machine.

A kernel of the program's own list meets the other ranks at the group's barrier, reduces or copies what lies
in their heaps for this rank, and meets them again. It is what `rlx.dist.collectives` do with arrays in the
heap, without leaving native code. While it waits it calls back into Python from time to time, which looks
after deaths and deadlines as in any other meeting.
"""

from __future__ import annotations

import ctypes
import functools
import math
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

NAME = "rlx_meet"
ARGUMENT = 3  # of the kernel: the address of its table, behind the fields that every kernel has
STOPPED, DIFFERENT = 1001, 1002  # error codes: the wait was ended; the ranks came for different calls

# The kernel's table, in 8-byte fields: what to post and whom to call, then what to do in between. It ends
# with pointers: one source for each rank, then the destinations. Without a reduction `COUNT` bytes are copied
# from each source to its destination.
POST, TAG, LENGTH, PLACE, BARRIER, WAIT, LOOK, REDUCE, RANKS, PLACES, COUNT, POINTERS = range(12)
_ENDED = 1 << 20  # a verdict beside those of `sync`


def emit(target: Target) -> str:
    """LLVM IR of `void rlx_meet(ptr args, i64 thread, i64 threads)`, a kernel for one thread."""
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

        first = f.call(f.field(table, BARRIER, "ptr"), [post], "i64")
        return f.while_loop([first], lambda carried: f.cmp("slt", carried[0], 0), look_and_wait)[0]

    def is_ended(verdict: Value) -> Value:
        return f.value(f.cmp("ne", f.and_(verdict, _ENDED), 0))

    def exchange() -> None:
        ranks, count, pointers = f.field(table, RANKS), f.field(table, COUNT), f.gep(table, POINTERS, "i64")
        reduction = f.field(table, REDUCE, "ptr")

        def reduce() -> None:
            f.call(reduction, [pointers, ranks, f.field(table, PLACES), count])

        def copy(rank: Any, _: list[Value]) -> None:
            to, source = f.field(pointers, f.add(rank, ranks), "ptr"), f.field(pointers, rank, "ptr")
            f.call("memcpy", [to, source, count], "ptr")

        copies = f.cmp("eq", f.field(table, REDUCE), 0)
        f.branch(copies, lambda: f.loop(0, ranks, 1, [], copy), reduce)
        f.branch(is_ended(meet(0, 0)), lambda: fail(STOPPED))  # nobody writes on before all have read

    def together(verdict: Value) -> None:
        differ = f.and_(verdict, sync.TAGS_DIFFER | sync.LENGTHS_DIFFER)
        f.branch(f.cmp("ne", differ, 0), lambda: fail(DIFFERENT), exchange)

    arrived = meet(f.field(table, LENGTH), f.field(table, PLACE))
    f.branch(is_ended(arrived), lambda: fail(STOPPED), lambda: together(arrived))
    return module.text()


@functools.cache
def _kernel() -> tuple[object, int]:
    code = sync.load_cached(emit)
    return code, code.address(NAME)


NativeCall = tuple[int, np.ndarray]
"""Address of the kernel, and its table."""


class NativeMeetings:
    """Makes the tables of one group's collectives, and remembers why a wait was ended.

    Operands lie in this rank's heap; results of those that are not in place lie anywhere. The memory must
    stay where it is. What Python has to do, because of its dtype or size, gives None.
    """

    def __init__(self, group: SharedMemoryTransport) -> None:
        self._group = group
        self._failure: BaseException | None = None
        self._epoch, self._deadline = -1, 0.0
        self._look = ctypes.CFUNCTYPE(ctypes.c_int64)(self._look_around)

    def all_reduce(
        self, x: int, result: int, nbytes: int, dtype: DType, kind: ReduceKind
    ) -> NativeCall | None:
        """Reduce in place: each rank its slice, in the heaps of all."""
        slices = _slices(nbytes, self._group.num_ranks, math.lcm(64, dtype.itemsize))
        start, size = slices[self._group.this_rank]
        places = self._everywhere(x + start)
        return self._reduction("all_reduce", x, nbytes, dtype, kind, places, places, size)

    def reduce_scatter(
        self, x: int, result: int, nbytes: int, dtype: DType, kind: ReduceKind
    ) -> NativeCall | None:
        """Reduce this rank's part of what all have."""
        part = nbytes // self._group.num_ranks
        sources = self._everywhere(x + self._group.this_rank * part)
        return self._reduction("reduce_scatter", x, nbytes, dtype, kind, sources, [result], part)

    def all_gather(
        self, x: int, result: int, nbytes: int, dtype: DType, kind: ReduceKind
    ) -> NativeCall | None:
        """Copy what all have, one after the other."""
        places = [result + rank * nbytes for rank in range(self._group.num_ranks)]
        return self._copies("all_gather", x, nbytes, dtype, self._everywhere(x), places, nbytes)

    def all_to_all(
        self, x: int, result: int, nbytes: int, dtype: DType, kind: ReduceKind
    ) -> NativeCall | None:
        """Copy this rank's parts of what all have."""
        part = nbytes // self._group.num_ranks
        sources = self._everywhere(x + self._group.this_rank * part)
        places = [result + rank * part for rank in range(self._group.num_ranks)]
        return self._copies("all_to_all", x, nbytes, dtype, sources, places, part)

    def _everywhere(self, address: int) -> list[int]:
        """An address in this rank's heap, in the heaps of all ranks."""
        return [heap + address - self._group._own_heap for heap in self._group._heaps]

    def _reduction(
        self,
        op: str,
        x: int,
        nbytes: int,
        dtype: DType,
        kind: ReduceKind,
        sources: list[int],
        places: list[int],
        size: int,
    ) -> NativeCall | None:
        reduce = native_address(dtype.name, kind)
        if reduce is None or not 0 < nbytes < STREAM_BYTES:
            return None
        call = Call(op, dtype.name, kind.value)
        return self._call(call, x, nbytes, reduce, sources, places, size // dtype.itemsize)

    def _copies(
        self, op: str, x: int, nbytes: int, dtype: DType, sources: list[int], places: list[int], size: int
    ) -> NativeCall | None:
        if not 0 < nbytes < STREAM_BYTES:
            return None
        return self._call(Call(op, dtype.name), x, nbytes, 0, sources, places, size)

    def _call(
        self, call: Call, x: int, nbytes: int, reduce: int, sources: list[int], places: list[int], count: int
    ) -> NativeCall:
        group, native = self._group, sync.sync().code
        table = np.zeros(POINTERS + len(sources) + len(places), np.int64)
        table[POST], table[TAG], table[LENGTH] = group._table_address, call.tag, nbytes
        table[PLACE] = x - group._own_heap + 1
        table[BARRIER], table[WAIT] = (native.address(f"rlx_{name}") for name in ("barrier", "wait"))  # type: ignore[attr-defined]
        table[LOOK] = ctypes.cast(self._look, ctypes.c_void_p).value or 0
        table[REDUCE], table[RANKS], table[PLACES], table[COUNT] = reduce, len(sources), len(places), count
        table[POINTERS:] = [*sources, *places]
        return _kernel()[1], table

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
