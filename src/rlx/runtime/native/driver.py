"""The native driver: one call walks all kernels of a program, on all threads, which meet where they must.

A program is three tables of 8-byte fields: a header, a list of records {kernel, args, flags, part} and the
argument blocks. Nothing in them is code: binding other buffers or another shape is a store into
`NativeProgram.table`.

A record may be a jump instead of a kernel: where the byte it points to is zero, the walk goes on at another
record. Branches and loops are made of these. All threads read the same byte, which nobody writes before they
meet again, so all take the same way. Who runs a record and where threads meet is decided in `barriers.py`.

A loop that goes on for long pauses now and then: the walk ends and is entered again where it was, so that
Python sees signals (Ctrl-C) in between.

Every record has its own error slot, the first field of its block. A kernel that finds a fault stores a code
there; the driver notes the first such record and stops all threads at the next barrier.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rlx.codegen.native.irtext import Module
from rlx.codegen.native.jit import Code
from rlx.codegen.native.notation import Native, emit_all, inline, native
from rlx.codegen.native.waiting import change, clock, default_float_mode, wait_for_change
from rlx.codegen.native.words import (
    W,
    at,
    atomic_load,
    atomic_rmw,
    atomic_store,
    byte_at,
    call,
    external,
    field,
    i8,
    i64,
    load,
    lshr,
    ptr,
    sdiv,
    select,
    store,
    zext,
)
from rlx.errors import ConfigError, KernelError
from rlx.ir.weights import round_up
from rlx.records import dataclass
from rlx.runtime.barriers import ALL
from rlx.runtime.memory import table
from rlx.runtime.native.code import build
from rlx.runtime.native.pool import Pool, default_pool
from rlx.runtime.stamps import EVENT_FIELDS, FIRST_EVENT, Stamps
from rlx.runtime.store.cache import default_cache

NO_BARRIER, JUMP = 1, 2
_OWNER_BIT = 8  # from here on flags hold the number of the owner plus 1, or 0 for all threads
ERROR_SLOT, SCRATCH, SCRATCH_BYTES, OPERANDS = range(4)  # the fixed fields of an argument block

# Fields of the header. What threads write while others wait lies on cache lines of its own.
_RECORDS, _COUNT, _THREADS, _PROFILE, _SPINS, _STARTED, _FINISHED, _FIRST, _STRIDE, _ROOM = range(10)
_SLEEPERS = 15
_FAILED, _ARRIVED, _EPOCH = 16, 32, 48
_HEADER_FIELDS = 64
_RECORD_FIELDS = 4
CLOSED_BRANCH = 2  # error code of a branch that assumes other sizes than those of the run
PAUSE = 1 << 62  # what a loop stores in place of an error code when it wants to be entered again
_PAUSE_NS = 50_000_000
_COPY_GRAIN = 4096  # bytes that one thread copies at least
_FINE = -1  # no record failed; as an unsigned number it is above every index

_memcpy = external("memcpy", ptr)


class RecordError(KernelError):
    """A kernel of a program stored an error code. `record` is its index, `code` what it stored."""

    def __init__(self, record: int, name: str, code: int) -> None:
        self.record, self.name, self.code = record, name, code
        super().__init__(f"kernel {name or record} reported error {code}; its results are not valid")


@dataclass(frozen=True)
class Record:
    """One kernel call: the address, the fields of its argument block (the fixed three included), and when.

    A record with an `owner` runs on that thread alone, as the only one (on thread 0, if a run has fewer). All
    threads meet before it, unless `meets` is off: then others may still be in the records before it. A `jump`
    calls nothing: its two fields after the fixed ones are the address of a byte and the number of the record
    to go on with where that byte is zero.
    """

    kernel: int
    fields: int = OPERANDS
    name: str = ""
    owner: int = ALL
    meets: bool = True
    jump: bool = False
    part: int = 0  # the last argument of the kernel: see `kernels.part_word`

    @property
    def flags(self) -> int:
        """What the driver reads of it, beside the addresses."""
        return NO_BARRIER * (not self.meets) | JUMP * self.jump | (self.owner + 1) << _OWNER_BIT


class NativeProgram:
    """The tables of a program. Belongs to one run at a time; concurrent runs take a program each.

    `keep` is whatever must live as long as the kernels: their `Code`, the memory that the tables point to.

    >>> program = NativeProgram([], threads=1)
    >>> program.run()
    >>> program.total_ns >= 0
    True
    """

    def __init__(
        self,
        records: Sequence[Record],
        threads: int | None = None,
        pool: Pool | None = None,
        profile: bool = False,
        keep: object = None,
    ) -> None:
        self.records = tuple(records)
        self._pool = pool or default_pool()
        self._keep = keep
        self._alone = all(record.jump or record.owner == 0 for record in self.records)
        self._starts = _block_starts(self.records)
        self.table: NDArray[np.int64] = table(self._starts[-1])
        self._errors = table(len(self.records))
        self._steps = table(len(self.records) * _RECORD_FIELDS)
        self._header_table = table(_HEADER_FIELDS)
        # This memoryview reads and writes single fields several times faster than an array.
        self._header = self._header_table.data
        self._address = self._header_table.ctypes.data
        self._driver = _driver()
        self._fill()
        self.stamps: Stamps | None = None  # when records ran, if the program is profiled
        self._profiled = profile
        self.threads = self._pool.threads if threads is None else threads

    def _fill(self) -> None:
        starts = np.array(self._starts[:-1], np.int64)
        steps = self._steps.reshape(-1, _RECORD_FIELDS)
        steps[:, 0] = [record.kernel for record in self.records]
        steps[:, 1] = self.table.ctypes.data + 8 * starts
        steps[:, 2] = [record.flags for record in self.records]
        steps[:, 3] = [record.part for record in self.records]
        self.table[starts + ERROR_SLOT] = self._errors.ctypes.data + 8 * np.arange(len(self.records))
        self._header[_RECORDS] = self._steps.ctypes.data
        self._header[_COUNT] = len(self.records)
        self._header[_SPINS] = self._pool.wait_spins
        self._header[_FAILED] = _FINE

    def move_kernels(self, moved: Mapping[int, int]) -> None:
        """Call other functions in place of those at some addresses from now on, also in a run that is under
        way: a record has one word for it, which threads read and write as a whole."""
        kernels = self._steps.reshape(-1, _RECORD_FIELDS)[:, 0]
        for number, record in enumerate(self.records):
            if record.kernel in moved:
                kernels[number] = moved[record.kernel]

    @property
    def threads(self) -> int:
        """Threads of a run, at most those of the pool; one, if there is nothing for others to do. Results do
        not depend on it."""
        return self._threads

    @threads.setter
    def threads(self, wanted: int) -> None:
        if wanted < 1:
            raise ConfigError(f"a program needs at least 1 thread, not {wanted}")
        self._threads = 1 if self._alone else min(wanted, self._pool.threads)
        self._header[_THREADS] = self._threads
        if self._profiled:
            loops = any(record.jump for record in self.records)
            self.stamps = Stamps(self._threads, len(self.records), loops)
            self._header[_PROFILE] = self.stamps.address
            self._header[_STRIDE], self._header[_ROOM] = self.stamps.stride, self.stamps.room

    def start(self, record: int) -> int:
        """Index in `table` where the argument block of `record` begins."""
        return self._starts[record]

    def args(self, record: int) -> NDArray[np.int64]:
        """The argument block of `record`, to be written: field 0 is set, the caller fills the others."""
        return self.table[self._starts[record] :][: self.records[record].fields]

    def run(self) -> None:
        """Run all records. Raises `RecordError` for the first kernel that stored an error code."""
        if self.stamps is not None:
            self.stamps.clear()
        try:
            self._enter()
            while self._header[_FAILED] != _FINE:
                self._go_on()
        except BaseException:  # a failure, or a signal between two entries
            self._forget()
            raise
        self._header[_FIRST] = 0

    def caller(self) -> Callable[[], None]:
        """A function that does what `run` does, quicker: for a program that runs often.

        >>> NativeProgram([], threads=1).caller()()
        """
        if self._threads > 1 or self.stamps is not None:
            return self.run
        header, enter, go_on, forget = self._header, self._driver.run_program, self._go_on, self._forget
        # Numbers of the right types are passed as they are.
        address, thread = ctypes.c_void_p(self._address), ctypes.c_int64(0)

        def run() -> None:
            try:
                enter(address, thread)
                if header[_FAILED] == _FINE:
                    return
                while header[_FAILED] != _FINE:
                    go_on()
            except BaseException:
                forget()
                raise
            header[_FIRST] = 0

        return run

    def _enter(self) -> None:
        """Walk the records from the first one to run until the end, a pause or a failure."""
        header = self._header
        if self._threads == 1:
            self._driver.run_program(self._address, 0)
        else:
            header[_ARRIVED] = 0  # stays 0 by itself, except in the child of a fork that came during a run
            self._pool.run(self._driver.address, self._address, self._threads)

    def _go_on(self) -> None:
        """Enter again after a pause, or report the failed record."""
        record = self._header[_FAILED]
        code = int(self._errors[record])
        if code != PAUSE:
            raise RecordError(record, self.records[record].name, code)
        self._forget()
        if self.stamps is not None:
            self.stamps.take()
        self._header[_FIRST] = record + 1
        self._enter()

    def _forget(self) -> None:
        """Make the program ready for another run."""
        self._header[_FAILED] = _FINE
        self._header[_FIRST] = 0
        self._errors[:] = 0

    @property
    def total_ns(self) -> int:
        """Nanoseconds of the last run by its own clock, from the entry of thread 0 to its exit."""
        return int(self._header[_FINISHED] - self._header[_STARTED])


def _block_starts(records: Sequence[Record]) -> list[int]:
    """Where each block begins, every one on a cache line, and the end."""
    starts = [0]
    for record in records:
        if record.fields < OPERANDS:
            raise ConfigError(
                f"record {record.name!r} has {record.fields} argument fields; the first {OPERANDS} are fixed"
            )
        starts.append(starts[-1] + round_up(record.fields, 8))
    return starts


class _Driver:
    def __init__(self, code: Code) -> None:
        self._code = code
        self.address = code.address(rlx_run_program.name)
        self.address_of = code.address
        self.run_program = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(self.address)


@functools.cache
def _driver() -> _Driver:
    return _Driver(build(emit_driver, default_cache()))


def driver_address(function: Native[..., None]) -> int:
    """The address of one of the driver's functions."""
    return _driver().address_of(function.name)


def emit_driver(module: Module) -> None:
    """Write `rlx_run_program` and the driver's own kernels into `module`."""
    emit_all(module, rlx_copy, rlx_count_step, rlx_refuse, rlx_run_program)


# -- the walk


@dataclass(frozen=True)
class _Walk:
    """What all parts of a walk read: run-time values of one thread."""

    program: ptr
    thread: i64
    records: ptr
    count: i64
    threads: i64
    profile: i64
    spins: i64

    def place(self, field: int) -> ptr:
        """The address of a field of the header."""
        return at(self.program, field)


@native
def rlx_run_program(program: ptr, thread: i64) -> None:
    """Walk the records, from the first one to run to the end, a failure or a pause."""
    records, count = field(program, _RECORDS, ptr), program[_COUNT]
    threads, profile, spins = program[_THREADS], program[_PROFILE], program[_SPINS]
    walk = _Walk(program, thread, records, count, threads, profile, spins)
    first = thread == 0
    alone = threads == 1
    index = program[_FIRST]
    if first & (index == 0):
        program[_STARTED] = clock()
    restore = default_float_mode()
    # Nobody can move the epoch before this thread arrives at its first barrier.
    epoch = atomic_load(i64, walk.place(_EPOCH), "monotonic")
    while index < count:
        flags = _record_field(walk, index, 2, i64)
        meets = flags & NO_BARRIER == 0
        if meets:
            epoch = _barrier(walk, alone, epoch)
        # The epoch is odd, too, at the start of a run after one that failed: it counts after a barrier.
        if zext(meets, i64) & epoch == 1:
            index = count
        elif flags & JUMP != 0:
            index = _jump(walk, index)
        else:
            index = _run(walk, index, flags)
    _barrier(walk, alone, epoch)  # a run is over when all threads are
    restore()
    if first:
        program[_FINISHED] = clock()


@inline
def _record_field(walk: _Walk, index: i64, number: int, type_: type[W]) -> W:
    return field(walk.records, index * _RECORD_FIELDS + number, type_)


@inline
def _jump(walk: _Walk, index: i64) -> i64:
    """The record after a jump."""
    args = _record_field(walk, index, 1, ptr)
    byte = load(i8, field(args, OPERANDS, ptr))
    return select(byte == 0, args[OPERANDS + 1], index + 1)


@inline
def _run(walk: _Walk, index: i64, flags: i64) -> i64:
    """Run a record if this thread has a share in it; the record after it."""
    owner = lshr(flags, _OWNER_BIT) - 1
    shared = owner == ALL
    runner = select(owner < walk.threads, owner, 0)
    is_mine = shared | (runner == walk.thread)
    thread, threads = select(shared, walk.thread, 0), select(shared, walk.threads, 1)
    if is_mine:
        _run_record(walk, index, thread, threads)
    return index + 1


@inline
def _run_record(walk: _Walk, index: i64, thread: i64, threads: i64) -> None:
    """Call the kernel, note its time if asked, and its failure."""
    kernel, args = _record_field(walk, index, 0, ptr), _record_field(walk, index, 1, ptr)
    is_profiled = walk.profile != 0
    start = clock() if is_profiled else i64(0)
    call(kernel, args, thread, threads, _record_field(walk, index, 3, i64))
    if is_profiled:
        _stamp(walk, index, start)
    error = load(i64, field(args, ERROR_SLOT, ptr))
    if error != 0:
        atomic_rmw("umin", walk.place(_FAILED), index)


@inline
def _stamp(walk: _Walk, index: i64, start: i64) -> None:
    """Note that a record has run since `start`; see `Stamps`."""
    table = field(walk.program, _PROFILE, ptr)
    part = at(table, walk.thread * walk.program[_STRIDE])
    count = part[0]
    part[0] = count + 1
    if count < walk.program[_ROOM]:
        event = at(part, count * EVENT_FIELDS + FIRST_EVENT)
        now = clock()
        event[0] = index
        event[1] = start
        event[2] = now


@inline
def _barrier(walk: _Walk, alone: bool, epoch: i64) -> i64:
    """Wait for all threads. Gives the new epoch: even to go on, odd to stop.

    The last thread to arrive decides, so that all leave at the same barrier. Who waits for long sleeps, and
    leaves its core to others.
    """
    if alone:
        return _decision(walk, epoch)
    arrived = atomic_rmw("add", walk.place(_ARRIVED), i64(1))
    is_last = arrived == walk.threads - 1
    place = walk.place(_EPOCH)
    if is_last:
        atomic_store(i64(0), walk.place(_ARRIVED), "monotonic")
        change(place, _decision(walk, epoch), walk.place(_SLEEPERS))
    else:
        wait_for_change(place, epoch, walk.spins, walk.place(_SLEEPERS))
    return atomic_load(i64, place)


@inline
def _decision(walk: _Walk, epoch: i64) -> i64:
    failed = atomic_load(i64, walk.place(_FAILED), "monotonic") != _FINE
    return (epoch + 2) & -2 | zext(failed, i64)


# -- kernels of its own


@native
def rlx_copy(args: ptr, thread: i64, threads: i64, part: i64) -> None:
    """The kernel that copies bytes: from, to, how many."""
    source, target = field(args, OPERANDS, ptr), field(args, OPERANDS + 1, ptr)
    total = args[OPERANDS + 2]
    grains = sdiv(total + (_COPY_GRAIN - 1), _COPY_GRAIN)
    share = sdiv(grains + (threads - 1), threads) * _COPY_GRAIN
    start = min(thread * share, total)
    size = min(start + share, total) - start
    to, origin = byte_at(target, start), byte_at(source, start)
    if size > 0:
        _memcpy(to, origin, size)


@native
def rlx_refuse(args: ptr, thread: i64, threads: i64, part: i64) -> None:
    """The kernel that stores an error code, its only field."""
    code = args[OPERANDS]
    store(code, field(args, ERROR_SLOT, ptr))


@native
def rlx_count_step(args: ptr, thread: i64, threads: i64, part: i64) -> None:
    """The kernel that decides about the next step of a loop.

    Reads whether to go on (a byte) and how many steps there may be (from data, and a limit); stores the
    number of the step and whether there is one. Its last field is 0 for the first step, 1 for all others. The
    word after the number holds the time of the next pause.
    """
    go, trips, place, alive = (field(args, OPERANDS + i, ptr) for i in range(4))
    limit, later = args[OPERANDS + 4], args[OPERANDS + 5]
    step = (place[0] + 1) * later
    place[0] = step
    wanted = (load(i8, go) != 0) & (step < min(trips[0], limit))
    store(zext(wanted, i64), alive)
    now, due = clock(), at(place, 2)
    is_late = (now > due[0]) & (later != 0)
    if is_late:
        store(i64(PAUSE), field(args, ERROR_SLOT, ptr))
    if is_late | (later == 0):
        due[0] = now + _PAUSE_NS
