"""`ThreadCopy`: copies on a native worker thread of the host, while Python and kernels run on."""

from __future__ import annotations

import struct
from collections import deque

import numpy as np

from rlx.driver.copy.engine import CopyEngine, accept_host_only
from rlx.driver.copy.native import RING_ENTRIES, CopyControl, CopyField, c_function, native_copy
from rlx.driver.region import FileMemory, HostMemory, Transfer
from rlx.driver.worker import Worker
from rlx.errors import CopyError
from rlx.system import SYSTEM

_ENTRY = struct.Struct(f"={len(CopyField)}q")


def default_nontemporal_bytes() -> int:
    """Half the last-level cache: a larger tile would only evict what the compute thread is using."""
    return SYSTEM.last_cache_bytes() // 2 or 8 << 20


class _Shared:
    """Memory that Python and the worker share: control block and ring."""

    def __init__(self, nontemporal_bytes: int) -> None:
        ring = np.zeros(RING_ENTRIES * len(CopyField), np.int64)
        self.ring = memoryview(ring).cast("B")  # type: ignore[arg-type]
        self.control = np.zeros(CopyControl.FIELDS, np.int64)
        self.control[CopyControl.RING] = ring.ctypes.data
        self.control[CopyControl.NT_BYTES] = nontemporal_bytes
        self.control[CopyControl.PREAD] = c_function("pread64", "pread")
        self.address = self.control.ctypes.data


class ThreadCopy(CopyEngine):
    """Copies in the order of issue on one native thread, which never needs Python's lock.

    Sources are host memory or a `FileMemory` (read with `pread`). Copies of `nontemporal_bytes` or more (half
    the last-level cache by default) bypass the caches on the way out.

    >>> source, out = np.arange(1000), np.zeros(1000, np.int64)
    >>> with ThreadCopy() as engine:
    ...     token = engine.issue(source, out)
    ...     engine.wait(token)
    >>> bool((out == source).all())
    True
    """

    def __init__(self, nontemporal_bytes: int | None = None) -> None:
        super().__init__()
        limit = default_nontemporal_bytes() if nontemporal_bytes is None else nontemporal_bytes
        if limit < 1:
            raise CopyError(f"nontemporal_bytes must be at least 1, not {limit}")
        self._native = native_copy()
        self._shared = _Shared(limit)
        self._pending: deque[Transfer] = deque()
        self._worker = Worker("rlx-copy", self._native, self._shared.control, self._shared)
        self._worker.start(self)

    def _accept(self, transfer: Transfer) -> None:
        self._check_process()
        accept_host_only(self, transfer)

    def _start(self, ticket: int, transfer: Transfer) -> None:
        if len(self._pending) == RING_ENTRIES:
            # A full ring holds the issuer back until its oldest copy is finished.
            self._native.wait_for(self._shared.address, self._copies + 1)
            self._finished()
        source, target = transfer.src.memory, transfer.dst.memory
        assert isinstance(target, HostMemory)
        if isinstance(source, FileMemory):
            start, descriptor = transfer.src.offset, source.descriptor
        else:
            assert isinstance(source, HostMemory)
            start, descriptor = source.address + transfer.src.offset, -1
        _ENTRY.pack_into(  # in the order of `CopyField`
            self._shared.ring,
            (ticket - 1) % RING_ENTRIES * _ENTRY.size,
            start,
            target.address + transfer.dst.offset,
            transfer.rows,
            transfer.row_bytes,
            transfer.src_pitch,
            transfer.dst_pitch,
            transfer.tail_bytes,
            descriptor,
            0,
            0,
        )
        self._pending.append(transfer)
        self._native.publish(self._shared.address)

    def _finished(self) -> int:
        count = int(self._native.finished(self._shared.address))
        while self._copies < count:
            transfer = self._pending.popleft()
            entry = _ENTRY.unpack_from(self._shared.ring, self._copies % RING_ENTRIES * _ENTRY.size)
            failure = None
            if entry[CopyField.STATUS]:
                assert isinstance(transfer.src.memory, FileMemory)
                errno = max(0, entry[CopyField.STATUS])
                failure = transfer.src.memory.fault(errno, transfer.src.offset, transfer.nbytes)
            self._book(self._copies + 1, transfer.nbytes, entry[CopyField.NANOSECONDS] / 1e9, failure)
        return count

    def _block(self, ticket: int) -> None:
        self._check_process()
        self._native.wait_for(self._shared.address, ticket)

    def _release(self) -> None:
        self._worker.stop()

    def _check_process(self) -> None:
        if not self._worker.is_here:
            raise CopyError("this ThreadCopy belongs to the parent process; make a new one after a fork")
