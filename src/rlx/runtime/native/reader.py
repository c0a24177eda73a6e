"""Fills of the weight ring: a native thread that reads ahead, and gates at which a run waits for it.

A run has a list of fills, always the same: bytes of a file and where they go, in the order in which kernels
read them. Fills are claimed one after the other, each as soon as the run has passed the last reader of what
lay in its place. The reader thread claims them all the time. A gate is a record of the native driver: it says
how far the run has come, and returns when certain fills are done. Until then its threads claim fills
themselves, so that no core is idle while there is something to read: where a file lies in memory
already, reading is work of a core like any other.

Positions count the places of a run at which it may stop; what they stand for is the caller's affair.
Everything lies in two tables of 8-byte fields. Whoever claimed a fill marks it with the number of the run,
so that nothing has to be cleared between runs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from rlx.codegen.native.irtext import Module
from rlx.codegen.native.jit import Code
from rlx.codegen.native.notation import emit_all, inline, native
from rlx.codegen.native.waiting import SPINS, clock, sched_yield
from rlx.codegen.native.words import (
    at,
    atomic_load,
    atomic_rmw,
    atomic_store,
    compare_exchange,
    external,
    field,
    i64,
    load,
    pause,
    ptr,
    store,
    zext,
)
from rlx.driver.copy import CopyStats
from rlx.driver.copy.native import read_file
from rlx.driver.region import FileMemory
from rlx.driver.worker import Control, Worker, is_stopped, rlx_stop_worker, signal, work
from rlx.errors import CopyError
from rlx.records import dataclass
from rlx.runtime.memory import table
from rlx.runtime.native.code import build
from rlx.runtime.native.driver import ERROR_SLOT, OPERANDS
from rlx.runtime.store.cache import default_cache

EVERYTHING = np.iinfo(np.int64).max  # a position behind all others
_SPINS = 2 * SPINS  # before the reader sleeps or a gate yields
_RUN_UNIT = 1 << 32  # what a run counts in a ticket

_pread = external("pread", i64)


class ReaderControl(IntEnum):
    """Fields of the control block after those of every worker."""

    POSITION = Control.POSTED  # how far the run has come
    FILLS = Control.FIELDS
    COUNT = Control.FIELDS + 1
    DESCRIPTOR = Control.FIELDS + 2
    RUN = Control.FIELDS + 3
    ALL = Control.FIELDS + 4  # whether fills are needed wherever the run is
    PAUSED = Control.FIELDS + 5  # whether the reader leaves fills to gates
    NEXT = Control.FIELDS + 8  # the first fill that nobody has claimed, and above it the run: see `_ticket`
    FETCHES = Control.FIELDS + 16
    BYTES = Control.FIELDS + 17
    READING = Control.FIELDS + 18  # nanoseconds of all threads
    BUSY = Control.FIELDS + 19  # nanoseconds of the reader thread
    WAITED = Control.FIELDS + 20  # nanoseconds that runs spent in gates, reading or waiting
    FIELDS = Control.FIELDS + 24


class FillField(IntEnum):
    """Fields of one fill."""

    OFFSET = 0
    ADDRESS = 1
    NBYTES = 2
    AFTER = 3
    LAST = 4
    ENDS_FETCH = 5
    DONE = 6  # the run that has it
    STATUS = 7  # 0 fine, -1 the file ended early, else errno
    FIELDS = 8


@dataclass(frozen=True)
class Fill:
    """`nbytes` of the file from `offset` on go to `address`, from position `after` on; a run that begins
    behind position `last` does not need them. `ends_fetch` marks the last piece of what counts as one."""

    offset: int
    address: int
    nbytes: int
    after: int
    last: int
    ends_fetch: bool = True


class Reader:
    """The fills of a program, and the thread that carries them out.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     _ = file.write(bytes(range(200))), file.flush()
    ...     ring = np.zeros(100, np.uint8)
    ...     first, second = (Fill(100 * i, ring.ctypes.data, 100, i, i) for i in range(2))
    ...     reader = Reader(FileMemory(file.name), [first, second])
    ...     reader.begin()
    ...     reader.arrive(0, 0, 1)
    ...     seen = int(ring[7])
    ...     reader.arrive(1, 1, 2)
    ...     reader.settle()
    >>> seen, int(ring[7])
    (7, 107)
    """

    def __init__(self, source: FileMemory, fills: Sequence[Fill]) -> None:
        self._source, self.fills = source, tuple(fills)
        self._functions = _functions()
        self._entries = table(max(len(fills), 1) * FillField.FIELDS).reshape(-1, FillField.FIELDS)
        for number, fill in enumerate(fills):
            self._entries[number, : FillField.DONE] = (
                fill.offset,
                fill.address,
                fill.nbytes,
                fill.after,
                fill.last,
                fill.ends_fetch,
            )
        self._control = table(ReaderControl.FIELDS)
        self.address = int(self._control.ctypes.data)
        self._control[ReaderControl.FILLS] = self._entries.ctypes.data
        self._control[ReaderControl.COUNT] = self._control[ReaderControl.NEXT] = len(fills)
        self._control[ReaderControl.DESCRIPTOR] = source.descriptor
        self._worker = Worker(
            "rlx-reader", self._functions, self._control, self._entries, source, spins=_SPINS
        )

    def begin(self) -> None:
        """A run begins; nothing is read before its first gate."""
        self._worker.start(self)
        self._functions.begin(self.address)

    def arrive(self, position: int, first: int, stop: int) -> None:
        """What a gate does, for steps on the host: fills `first` to `stop` are done when this returns."""
        if self._functions.arrive_host(self.address, position, first, stop):
            failure = self.failure(first, stop)
            assert failure is not None, "a fill has a status"
            raise failure

    @property
    def gate_address(self) -> int:
        """The kernel of a gate: its fields are the control block, a position, and the fills first to stop."""
        return int(self._functions.arrive_address)

    def settle(self) -> None:
        """Nothing is read any more when this returns, however the run ended."""
        self._functions.settle(self.address)

    def read_all(self, helping: bool) -> None:
        """Carry out all fills, as if no kernel had to be waited for: by the reader alone, or by both."""
        self._control[ReaderControl.ALL] = 1
        self.pause(False)
        try:
            if not helping:
                self._functions.read_alone(self.address, EVERYTHING)
            self.arrive(EVERYTHING, 0, len(self.fills))
        finally:
            self._control[ReaderControl.ALL] = 0

    def failure(self, first: int = 0, stop: int | None = None) -> CopyError | None:
        """What went wrong with the first of some fills that failed in this run."""
        run = self._control[ReaderControl.RUN]
        for fill, entry in zip(self.fills[first:stop], self._entries[first:stop], strict=False):
            status = int(entry[FillField.STATUS])
            if entry[FillField.DONE] == run and status:
                return self._source.fault(max(status, 0), fill.offset, fill.nbytes)
        return None

    def pause(self, paused: bool) -> None:
        """Leave reading to gates from now on, or read ahead again."""
        self._control[ReaderControl.PAUSED] = paused

    @property
    def stats(self) -> CopyStats:
        """Fetches, bytes, seconds of reading by all threads, seconds of runs in gates."""
        fetches, nbytes, reading, _, waited = self._control[
            ReaderControl.FETCHES : ReaderControl.WAITED + 1
        ].tolist()
        return CopyStats(fetches, nbytes, reading / 1e9, waited / 1e9)

    @property
    def busy(self) -> float:
        """Seconds that the reader thread has been reading."""
        return float(self._control[ReaderControl.BUSY]) / 1e9


class _Functions:
    """The native functions. Calling them releases Python's lock."""

    def __init__(self, code: Code) -> None:
        self._code = code
        self.arrive_address = code.address(rlx_arrive.name)
        self.begin = code.function(rlx_begin_fills)
        self.settle = code.function(rlx_settle_fills)
        self.stop = code.function(rlx_stop_worker)
        self.work = code.function(rlx_read_ahead)
        self.read_alone = code.function(rlx_read_alone)
        self.arrive_host = code.function(rlx_await_fills)


@functools.cache
def _functions() -> _Functions:
    return _Functions(build(emit_reader, default_cache()))


# -- the native part


def emit_reader(module: Module) -> None:
    """Write the reader's loop, gates, and what begins and ends a run."""
    emit_all(module, rlx_arrive, rlx_read_ahead, rlx_stop_worker, rlx_read_alone)
    emit_all(module, rlx_begin_fills, rlx_settle_fills)


@inline
def _seen(control: ptr, number: int) -> i64:
    return atomic_load(i64, at(control, number))


@inline
def _entry(control: ptr, number: i64 | int) -> ptr:
    return at(field(control, ReaderControl.FILLS, ptr), number * FillField.FIELDS)


@inline
def _ticket(run: i64, number: i64 | int) -> i64:
    """The run and the fill that is next, as one number. A thread that is stopped between its look and its
    claim, and goes on when another run has come as far, must not claim what was free in the run before."""
    return run * _RUN_UNIT + number


@inline
def _fill_of(ticket: i64) -> i64:
    return ticket & (_RUN_UNIT - 1)


@native
def rlx_read_bytes(descriptor: i64, target: ptr, count: i64, offset: i64) -> i64:
    """Read bytes of a file; the status."""
    return read_file(_pread, descriptor, target, count, offset)


@native
def rlx_claim_fill(control: ptr, by_reader: i64) -> i64:
    """Carry out the next fill; 0 if there is none at present."""
    ticket = _seen(control, ReaderControl.NEXT)
    number = _fill_of(ticket)
    return _look(control, ticket, number, by_reader) if number < control[ReaderControl.COUNT] else i64(0)


@inline
def _look(control: ptr, ticket: i64, number: i64, by_reader: i64) -> i64:
    entry = _entry(control, number)
    position = _seen(control, ReaderControl.POSITION)
    if entry[FillField.AFTER] <= position:
        _, is_mine = compare_exchange(at(control, ReaderControl.NEXT), ticket, ticket + 1)
        if is_mine:
            _fill(control, entry, position, by_reader)
        return i64(1)  # also where another thread was faster: there may be more
    return i64(0)


@inline
def _fill(control: ptr, entry: ptr, position: i64, by_reader: i64) -> None:
    # A run that passes over kernels passes over what they would have read.
    entry[FillField.STATUS] = 0
    if (entry[FillField.LAST] >= position) | (control[ReaderControl.ALL] != 0):
        _read_entry(control, entry, by_reader)
    run = control[ReaderControl.RUN]
    atomic_store(run, at(entry, FillField.DONE))


@inline
def _read_entry(control: ptr, entry: ptr, by_reader: i64) -> None:
    began = clock()
    nbytes = entry[FillField.NBYTES]
    descriptor = control[ReaderControl.DESCRIPTOR]
    target, offset = field(entry, FillField.ADDRESS, ptr), entry[FillField.OFFSET]
    entry[FillField.STATUS] = rlx_read_bytes(descriptor, target, nbytes, offset)
    took = clock() - began
    fetched = entry[FillField.ENDS_FETCH]
    own = took * by_reader
    for number, amount in (
        (ReaderControl.FETCHES, fetched),
        (ReaderControl.BYTES, nbytes),
        (ReaderControl.READING, took),
        (ReaderControl.BUSY, own),
    ):
        atomic_rmw("add", at(control, number), amount, "monotonic")


@native
def rlx_publish(control: ptr, position: i64) -> None:
    """The run has come so far; wakes the reader if it sleeps."""
    atomic_store(position, at(control, ReaderControl.POSITION))
    if control[ReaderControl.PAUSED] == 0:
        signal(control)


@inline
def _wait_done(control: ptr, number: i64 | int, claiming: bool) -> i64:
    """Return when a fill is done, with its status."""
    entry = _entry(control, number)
    run = control[ReaderControl.RUN]
    done = at(entry, FillField.DONE)
    tries = 0
    while atomic_load(i64, done) != run:
        helped = rlx_claim_fill(control, 0) if claiming else i64(0)
        if helped != 0:
            tries = 0
        else:
            if tries < control[Control.SPINS]:
                pause()
            else:
                sched_yield()
            tries += 1
    return load(i64, at(entry, FillField.STATUS))


@native
def rlx_await_fills(control: ptr, position: i64, first: i64, stop: i64) -> i64:
    """0, or the status of the first fill that failed."""
    rlx_publish(control, position)
    number, status = first, i64(0)
    while (number < stop) & (status == 0):
        following = number + 1
        status = _wait_done(control, number, claiming=True)
        number = following
    return status


@native
def rlx_arrive(args: ptr, thread: i64, threads: i64, part: i64) -> None:
    """The kernel of a gate. Every thread of the run waits, and helps; the first one keeps the time."""
    control = field(args, OPERANDS, ptr)
    position, first, stop = (args[OPERANDS + i] for i in range(1, 4))
    began = clock()
    status = rlx_await_fills(control, position, first, stop)
    took = (clock() - began) * zext(thread == 0, i64)
    atomic_rmw("add", at(control, ReaderControl.WAITED), took, "monotonic")
    if status != 0:
        store(status, field(args, ERROR_SLOT, ptr))


@native
def rlx_read_ahead(control: ptr) -> None:
    """What the reader thread runs until it is stopped."""
    work(control, rlx_read_next)


@native(internal=True)
def rlx_read_next(control: ptr) -> i64:
    """Carry out the next fill, unless gates do or the reader ends; 0 if there is none at present."""
    if (control[ReaderControl.PAUSED] != 0) | is_stopped(control):
        return i64(0)
    return rlx_claim_fill(control, 1)


@native
def rlx_begin_fills(control: ptr) -> None:
    """A run begins."""
    atomic_store(i64(-1), at(control, ReaderControl.POSITION))
    run = control[ReaderControl.RUN] + 1
    control[ReaderControl.RUN] = run
    atomic_store(_ticket(run, 0), at(control, ReaderControl.NEXT))


@native
def rlx_settle_fills(control: ptr) -> None:
    """A run ends: nothing more is claimed, and what was claimed is done."""
    count = control[ReaderControl.COUNT]
    over = _ticket(control[ReaderControl.RUN], count)
    last = atomic_rmw("xchg", at(control, ReaderControl.NEXT), over, "seq_cst")
    for number in range(_fill_of(last)):
        _wait_done(control, number, claiming=False)


@native
def rlx_read_alone(control: ptr, position: i64) -> None:
    """Wait until the reader has carried out all fills."""
    rlx_publish(control, position)
    for number in range(control[ReaderControl.COUNT]):
        _wait_done(control, number, claiming=False)
