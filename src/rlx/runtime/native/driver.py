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
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlx.codegen.cpu.kernels import KERNEL_ARGS
from rlx.codegen.native.irtext import Bool, Function, Int, Module, Value
from rlx.codegen.native.jit import Code
from rlx.errors import ConfigError, KernelError
from rlx.records import dataclass
from rlx.runtime.barriers import ALL
from rlx.runtime.memory import round_up, table
from rlx.runtime.native import code as native
from rlx.runtime.native.pool import Pool, default_pool
from rlx.runtime.stamps import EVENT_FIELDS, FIRST_EVENT, Stamps
from rlx.runtime.store.cache import default_cache

NO_BARRIER, JUMP = 1, 2
_OWNER_BIT = 8  # from here on flags hold the number of the owner plus 1, or 0 for all threads
ERROR_SLOT, SCRATCH, SCRATCH_BYTES, OPERANDS = range(4)  # the fixed fields of an argument block

# Fields of the header. What threads write while others wait lies on cache lines of its own.
_RECORDS, _COUNT, _THREADS, _PROFILE, _SPINS, _STARTED, _FINISHED, _FIRST, _STRIDE, _ROOM = range(10)
_FAILED, _ARRIVED, _EPOCH = 16, 32, 48
_HEADER_FIELDS = 64
_RECORD_FIELDS = 4
COPY, COUNT_STEP, REFUSE = "rlx_copy", "rlx_count_step", "rlx_refuse"  # kernels of its own, for control flow
CLOSED_BRANCH = 2  # error code of a branch that assumes other sizes than those of the run
PAUSE = 1 << 62  # what a loop stores in place of an error code when it wants to be entered again
_PAUSE_NS = 50_000_000
_FINE = -1  # no record failed; as an unsigned number it is above every index


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
        self.address = code.address("rlx_run_program")
        self.address_of = code.address
        self.run_program = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(self.address)


@functools.cache
def _driver() -> _Driver:
    return _Driver(native.build(emit_driver, default_cache()))


def driver_address(name: str) -> int:
    """The address of one of the driver's own kernels."""
    return _driver().address_of(name)


def emit_driver(module: Module) -> None:
    """Write `void rlx_run_program(ptr program, i64 thread)` and the driver's own kernels into `module`."""
    emit_copy(module)
    emit_count_step(module)
    emit_refuse(module)
    f = module.function("rlx_run_program", [("ptr", "program"), ("i64", "thread")])
    _Emitter(f).emit()


class _Emitter:
    """The driver's function, part by part."""

    def __init__(self, f: Function) -> None:
        self.f = f
        self.program, self.thread = f.args
        self.records = f.field(self.program, _RECORDS, "ptr")
        self.count, self.threads = self.load(_COUNT), self.load(_THREADS)
        self.profile, self.spins = self.load(_PROFILE), self.load(_SPINS)
        self.first = f.cmp("eq", self.thread, 0)
        self.alone = f.cmp("eq", self.threads, 1)

    def load(self, field: int) -> Value:
        return self.f.field(self.program, field)

    def place(self, field: int) -> Value:
        return self.f.gep(self.program, field, "i64")

    def emit(self) -> None:
        f = self.f
        start = self.load(_FIRST)
        entered = f.and_(f.value(self.first), f.value(f.cmp("eq", start, 0)))
        f.branch(f.value(entered), lambda: f.store(native.clock(f), self.place(_STARTED)))
        restore = native.default_float_mode(f)
        # Nobody can move the epoch before this thread arrives at its first barrier.
        epoch = f.atomic_load("i64", self.place(_EPOCH), "monotonic")

        def unfinished(carried: list[Value]) -> Bool:
            return f.cmp("slt", carried[0], self.count)

        def step(carried: list[Value]) -> list[Int]:
            index, epoch = carried
            flags = self.record_field(index, 2)
            meet = f.cmp("eq", f.and_(flags, NO_BARRIER), 0)
            epoch = f.if_value(meet, lambda: [self.barrier(epoch)], lambda: [epoch])[0]
            # The epoch is odd, too, at the start of a run after one that failed: it counts after a barrier.
            stop = f.cmp("eq", f.and_(f.zext(meet, "i64"), epoch), 1)
            return [f.if_value(stop, lambda: [self.count], lambda: [go_on(index, flags)])[0], epoch]

        def go_on(index: Value, flags: Value) -> Int:
            jump = f.cmp("ne", f.and_(flags, JUMP), 0)
            return f.if_value(jump, lambda: [self.jump(index)], lambda: [run(index, flags)])[0]

        def run(index: Value, flags: Value) -> Int:
            owner = f.sub(f.lshr(flags, _OWNER_BIT), 1)
            shared = f.value(f.cmp("eq", owner, ALL))
            runner = f.select(f.cmp("slt", owner, self.threads), owner, 0)
            mine = f.or_(shared, f.value(f.cmp("eq", runner, self.thread)))
            thread, threads = f.select(shared, self.thread, 0), f.select(shared, self.threads, 1)
            f.branch(f.value(mine), lambda: self.run_record(index, thread, threads))
            return f.add(index, 1)

        _, epoch = f.while_loop([start, epoch], unfinished, step)
        self.barrier(epoch)  # a run is over when all threads are
        restore()
        f.branch(self.first, lambda: f.store(native.clock(f), self.place(_FINISHED)))

    def jump(self, index: Value) -> Int:
        """The record after a jump."""
        f = self.f
        args = self.record_field(index, 1, "ptr")
        byte = f.load("i8", f.field(args, OPERANDS, "ptr"))
        return f.select(f.cmp("eq", byte, 0), f.field(args, OPERANDS + 1), f.add(index, 1))

    def record_field(self, index: Value, field: int, type_: str = "i64") -> Value:
        f = self.f
        return f.field(self.records, f.add(f.mul(index, _RECORD_FIELDS), field), type_)

    def run_record(self, index: Value, thread: Int, threads: Int) -> None:
        """Call the kernel, note its time if asked, and its failure."""
        f = self.f
        kernel, args = self.record_field(index, 0, "ptr"), self.record_field(index, 1, "ptr")
        profiled = f.cmp("ne", self.profile, 0)
        (start,) = f.if_value(profiled, lambda: [native.clock(f)], lambda: [0])
        f.call(kernel, [args, thread, threads, self.record_field(index, 3)])
        f.branch(profiled, lambda: self.stamp(index, start))
        error = f.load("i64", f.field(args, ERROR_SLOT, "ptr"))
        f.branch(f.cmp("ne", error, 0), lambda: f.atomic_rmw("umin", self.place(_FAILED), index))

    def stamp(self, index: Value, start: Value) -> None:
        """Note that a record has run since `start`; see `Stamps`."""
        f = self.f
        table = f.field(self.program, _PROFILE, "ptr")
        part = f.gep(table, f.mul(self.thread, self.load(_STRIDE)), "i64")
        count = f.load("i64", part)
        f.store(f.value(f.add(count, 1)), part)

        def write() -> None:
            event = f.gep(part, f.add(f.mul(count, EVENT_FIELDS), FIRST_EVENT), "i64")
            for field, value in enumerate((index, start, native.clock(f))):
                f.store(value, f.gep(event, field, "i64"))

        f.branch(f.cmp("slt", count, self.load(_ROOM)), write)

    def barrier(self, epoch: Value) -> Value:
        """Wait for all threads. Gives the new epoch: even to go on, odd to stop.

        The last thread to arrive decides, so that all leave at the same barrier.
        """
        f = self.f

        def decision() -> Int:
            failed = f.cmp("ne", f.atomic_load("i64", self.place(_FAILED), "monotonic"), _FINE)
            return f.or_(f.and_(f.add(epoch, 2), -2), f.zext(failed, "i64"))

        def meet() -> list[Int]:
            arrived = f.atomic_rmw("add", self.place(_ARRIVED), f.value(1))
            last = f.cmp("eq", arrived, f.sub(self.threads, 1))
            place = self.place(_EPOCH)

            def release() -> None:
                f.atomic_store(f.value(0), self.place(_ARRIVED), "monotonic")
                f.atomic_store(f.value(decision()), place)

            def await_release() -> None:
                native.wait_while(f, lambda: f.cmp("eq", f.atomic_load("i64", place), epoch), self.spins)

            f.branch(last, release, await_release)
            return [f.atomic_load("i64", place)]

        return f.if_value(self.alone, lambda: [decision()], meet)[0]


_COPY_GRAIN = 4096  # bytes that one thread copies at least


def emit_copy(module: Module) -> None:
    """Write the kernel that copies bytes: from, to, how many."""
    f = module.function(COPY, KERNEL_ARGS)
    args, thread, threads, _ = f.args
    source, target = (f.field(args, OPERANDS + i, "ptr") for i in range(2))
    total = f.field(args, OPERANDS + 2)
    grains = f.sdiv(f.add(total, _COPY_GRAIN - 1), _COPY_GRAIN)
    share = f.mul(f.sdiv(f.add(grains, f.sub(threads, 1)), threads), _COPY_GRAIN)
    start = f.smin(f.mul(thread, share), total)
    size = f.sub(f.smin(f.add(start, share), total), start)
    copied = [f.gep(target, start, "i8"), f.gep(source, start, "i8"), size]
    f.branch(f.cmp("sgt", size, 0), lambda: f.call("memcpy", copied, "ptr"))


def emit_refuse(module: Module) -> None:
    """Write the kernel that stores an error code, its only field."""
    f = module.function(REFUSE, KERNEL_ARGS)
    args = f.args[0]
    f.store(f.field(args, OPERANDS), f.field(args, ERROR_SLOT, "ptr"))


def emit_count_step(module: Module) -> None:
    """Write the kernel that decides about the next step of a loop.

    Reads whether to go on (a byte) and how many steps there may be (from data, and a limit); stores the
    number of the step and whether there is one. Its last field is 0 for the first step, 1 for all others. The
    word after the number holds the time of the next pause.
    """
    f = module.function(COUNT_STEP, KERNEL_ARGS)
    args = f.args[0]
    go, trips, place, alive = (f.field(args, OPERANDS + i, "ptr") for i in range(4))
    limit, later = f.field(args, OPERANDS + 4), f.field(args, OPERANDS + 5)
    step = f.value(f.mul(f.add(f.load("i64", place), 1), later))
    f.store(step, place)
    wanted = f.and_(f.cmp("ne", f.load("i8", go), 0), f.cmp("slt", step, f.smin(f.load("i64", trips), limit)))
    f.store(f.zext(wanted, "i64"), alive)
    now, due = native.clock(f), f.gep(place, 2, "i64")
    late = f.and_(f.value(f.cmp("sgt", now, f.load("i64", due))), f.value(f.cmp("ne", later, 0)))
    f.branch(f.value(late), lambda: f.store(f.value(PAUSE), f.field(args, ERROR_SLOT, "ptr")))
    again = f.or_(f.value(late), f.value(f.cmp("eq", later, 0)))
    f.branch(f.value(again), lambda: f.store(f.add(now, _PAUSE_NS), due))
