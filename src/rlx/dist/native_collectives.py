"""Collectives that a native program runs by itself, where ranks are processes of one machine.

A kernel of the program's own list is the native exchange of `rlx.dist.transports.exchange`, on operands in the heap.
"""

from __future__ import annotations

import ctypes
import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.dist.native import sync
from rlx.dist.collectives import Regions, _slices
from rlx.dist.errors import TransportError
from rlx.dist.native.exchange_code import DIFFERENT, kernel
from rlx.dist.native.reduce import STREAM_BYTES, array_at, native_address
from rlx.dist.transport import CollectiveCall, Outgoing
from rlx.dist.types import ReduceKind

if TYPE_CHECKING:
    from rlx.dist.transports.shm import SharedMemoryTransport
    from rlx.ir.dtype import DType

NativeCall = tuple[int, np.ndarray]
"""Address of the kernel, and its table."""


class NativeMeetings:
    """Makes the tables of one group's collectives, and remembers why a wait was ended.

    Operands are in this rank's heap; results of those that are not in place are anywhere. The memory must
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
        return self._reduction("all_reduce", x, nbytes, dtype, kind, slices, x, share=True)

    def reduce_scatter(
        self, x: int, result: int, nbytes: int, dtype: DType, kind: ReduceKind
    ) -> NativeCall | None:
        """Reduce this rank's part of what all have."""
        return self._reduction("reduce_scatter", x, nbytes, dtype, kind, self._parts(nbytes), result)

    def all_gather(
        self, x: int, result: int, nbytes: int, dtype: DType, kind: ReduceKind
    ) -> NativeCall | None:
        """Copy what all have, one after the other."""
        return self._call("all_gather", x, nbytes, dtype, ((0, nbytes),), into=(result, nbytes))

    def all_to_all(
        self, x: int, result: int, nbytes: int, dtype: DType, kind: ReduceKind
    ) -> NativeCall | None:
        """Copy this rank's parts of what all have."""
        parts = self._parts(nbytes)
        return self._call("all_to_all", x, nbytes, dtype, parts, into=(result, parts[0][1]))

    def _parts(self, nbytes: int) -> Regions:
        part = nbytes // self._group.num_ranks
        return tuple((rank * part, part) for rank in range(self._group.num_ranks))

    def _reduction(
        self,
        op: str,
        x: int,
        nbytes: int,
        dtype: DType,
        kind: ReduceKind,
        regions: Regions,
        result: int,
        share: bool = False,
    ) -> NativeCall | None:
        reduce = native_address(dtype.name, kind)
        if reduce is None:
            return None
        options: dict[str, object] = {"share": share, "reduce": reduce}
        return self._call(op, x, nbytes, dtype, regions, kind.value, into=(result, 0), **options)

    def _call(
        self, op: str, x: int, nbytes: int, dtype: DType, regions: Regions, kind: str = "", **options: Any
    ) -> NativeCall | None:
        if not 0 < nbytes < STREAM_BYTES:
            return None
        group, array = self._group, array_at(x, dtype.np, nbytes // dtype.itemsize)
        out, place = Outgoing(array, regions, **options), x - group._own_heap + 1
        look = ctypes.cast(self._look, ctypes.c_void_p).value or 0
        return kernel(), group._exchanges.table(CollectiveCall(op, dtype.name, kind).tag, out, place, look)

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
                f"the ranks made different calls: {self._group._calls()}; all ranks must make the same calls in the same order"
            )
        failure, self._failure = self._failure, None
        return failure
