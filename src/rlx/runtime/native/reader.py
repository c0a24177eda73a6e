"""Fills of the weight ring: a native thread that reads ahead, and gates at which a run waits for it.

A run has a list of fills, always the same: bytes of a file and where they go, in the order in which kernels
read them. Fills are claimed one after the other, each as soon as the run has passed the last reader of what
lay in its place. The reader thread claims them all the time. A gate is a record of the native driver: it says
how far the run has come, and returns when certain fills are done. Until then its threads claim fills
themselves, so that no core stands still while there is something to read: where a file lies in memory
already, reading is work of a core like any other.

Positions count the places of a run at which it may stop; what they stand for is the caller's affair.
Everything lies in two tables of 8-byte fields. Whoever claimed a fill marks it with the number of the run,
so that nothing has to be cleared between runs.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlx.codegen.cpu.kernels import KERNEL_ARGS
from rlx.codegen.native.irtext import Bool, Function, Int, Module, Value
from rlx.codegen.native.jit import Code
from rlx.config import THREADS
from rlx.driver.copy import CopyStats
from rlx.driver.region import FileMemory
from rlx.errors import CopyError
from rlx.records import dataclass
from rlx.runtime.memory import table
from rlx.runtime.native import code as native
from rlx.runtime.native.driver import ERROR_SLOT, OPERANDS
from rlx.runtime.store.cache import default_cache

ARRIVE = "rlx_arrive"
EVERYTHING = np.iinfo(np.int64).max  # a position behind all others
_SPINS = 4000  # looks before the reader sleeps or a gate yields: some 60 microseconds
_RUN_UNIT = 1 << 32  # what a run counts in a ticket
_ENDED = -1  # status of a fill whose file ended early


class Control(IntEnum):
    """Fields of the control block. Those that threads write are on cache lines of their own."""

    FILLS = 0
    COUNT = 1
    DESCRIPTOR = 2
    SPINS = 3
    RUN = 4
    STOP = 5
    ALL = 6  # whether fills are needed wherever the run is
    PAUSED = 7  # whether the reader leaves fills to gates
    NEXT = 8  # the first fill that nobody has claimed, and above it the run: see `_ticket`
    POSITION = 16  # how far the run has come
    SIGNAL = 24  # changes when there may be something to claim
    ASLEEP = 32  # whether the reader waits for a signal
    FETCHES = 40
    BYTES = 41
    READING = 42  # nanoseconds of all threads
    BUSY = 43  # nanoseconds of the reader thread
    WAITED = 44  # nanoseconds that runs spent in gates, reading or waiting
    FIELDS = 48


class Entry(IntEnum):
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
        self._entries = table(max(len(fills), 1) * Entry.FIELDS).reshape(-1, Entry.FIELDS)
        for number, fill in enumerate(fills):
            self._entries[number, : Entry.DONE] = (
                fill.offset,
                fill.address,
                fill.nbytes,
                fill.after,
                fill.last,
                fill.ends_fetch,
            )
        self._control = table(Control.FIELDS)
        self.address = int(self._control.ctypes.data)
        self._control[Control.FILLS] = self._entries.ctypes.data
        self._control[Control.COUNT] = self._control[Control.NEXT] = len(fills)
        self._control[Control.DESCRIPTOR] = source.descriptor
        self._control[Control.SPINS] = _SPINS if THREADS.default() > 1 else 0
        self._process = 0  # that has the thread
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def begin(self) -> None:
        """A run begins; nothing is read before its first gate."""
        if self._process != os.getpid():  # threads do not survive a fork
            self._start()
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
        self._control[Control.ALL] = 1
        self.pause(False)
        try:
            if not helping:
                self._functions.read_alone(self.address, EVERYTHING)
            self.arrive(EVERYTHING, 0, len(self.fills))
        finally:
            self._control[Control.ALL] = 0

    def failure(self, first: int = 0, stop: int | None = None) -> CopyError | None:
        """What went wrong with the first of some fills that failed in this run."""
        run = self._control[Control.RUN]
        for fill, entry in zip(self.fills[first:stop], self._entries[first:stop], strict=False):
            status = int(entry[Entry.STATUS])
            if entry[Entry.DONE] == run and status:
                return self._source.fault(max(status, 0), fill.offset, fill.nbytes)
        return None

    def pause(self, paused: bool) -> None:
        """Leave reading to gates from now on, or read ahead again."""
        self._control[Control.PAUSED] = paused

    @property
    def stats(self) -> CopyStats:
        """Fetches, bytes, seconds of reading by all threads, seconds of runs in gates."""
        fetches, nbytes, reading, _, waited = self._control[Control.FETCHES : Control.WAITED + 1].tolist()
        return CopyStats(fetches, nbytes, reading / 1e9, waited / 1e9)

    @property
    def busy(self) -> float:
        """Seconds that the reader thread has been reading."""
        return float(self._control[Control.BUSY]) / 1e9

    def _start(self) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()  # of a thread that the parent process has
        self._process = os.getpid()
        kept = (self._functions, self._control, self._entries, self._source)
        worker = threading.Thread(target=_read, args=kept, name="rlx-reader", daemon=True)
        worker.start()
        # Runs when the reader is forgotten, or before the interpreter takes the code away.
        self._finalizer = weakref.finalize(self, _stop, *kept[:2], worker, self._process)


def _read(functions: _Functions, control: NDArray[np.int64], *_: object) -> None:
    """The thread, which keeps alive what it works on."""
    functions.read_ahead(control.ctypes.data)


def _stop(functions: _Functions, control: NDArray[np.int64], worker: threading.Thread, process: int) -> None:
    if os.getpid() == process:
        control[Control.PAUSED] = 0
        functions.stop(control.ctypes.data)
        worker.join()


class _Functions:
    """The native functions. Calling them releases Python's lock."""

    def __init__(self, code: Code) -> None:
        self._code = code
        self.arrive_address = code.address(ARRIVE)
        word = ctypes.c_int64

        def function(name: str, *more: Any, returns: Any = None) -> Any:
            return ctypes.CFUNCTYPE(returns, ctypes.c_void_p, *more)(code.address(name))

        self.begin = function("rlx_begin_fills")
        self.settle = function("rlx_settle_fills")
        self.stop = function("rlx_stop_reader")
        self.read_ahead = function("rlx_read_ahead")
        self.read_alone = function("rlx_read_alone", word)
        self.arrive_host = function("rlx_await_fills", word, word, word, returns=word)


@functools.cache
def _functions() -> _Functions:
    return _Functions(native.build(emit_reader, default_cache()))


# -- the native part


def emit_reader(module: Module) -> None:
    """Write the reader's loop, gates, and what begins and ends a run."""
    _emit_read(module)
    _emit_claim(module)
    _emit_publish(module)
    _emit_await(module)
    _emit_gate(module)
    _emit_loop(module)
    _emit_ends(module)


def _at(f: Function, control: Value, field: int) -> Value:
    return f.gep(control, int(field), "i64")


def _seen(f: Function, control: Value, field: int, order: str = "acquire") -> Value:
    return f.atomic_load("i64", _at(f, control, field), order)


def _entry(f: Function, control: Value, number: Int) -> Value:
    return f.gep(f.field(control, int(Control.FILLS), "ptr"), f.mul(number, int(Entry.FIELDS)), "i64")


def _ticket(f: Function, run: Int, number: Int) -> Value:
    """The run and the fill that is next, as one number. A thread that is stopped between its look and its
    claim, and goes on when another run has come as far, must not claim what was free in the run before."""
    return f.value(f.add(f.mul(run, _RUN_UNIT), number))


def _fill_of(f: Function, ticket: Value) -> Value:
    return f.value(f.and_(ticket, _RUN_UNIT - 1))


def _emit_read(module: Module) -> None:
    """i64 rlx_read_bytes(descriptor, target, count, offset): the status."""
    params = [("i64", "descriptor"), ("ptr", "target"), ("i64", "count"), ("i64", "offset")]
    f = module.function("rlx_read_bytes", params, returns="i64")
    descriptor, target, count, offset = f.args
    file = f.trunc(descriptor, "i32")
    name = "__error" if sys.platform == "darwin" else "__errno_location"

    def unfinished(carried: list[Value]) -> Bool:
        done, status = carried
        return f.value(f.and_(f.value(f.cmp("slt", done, count)), f.value(f.cmp("eq", status, 0))))

    def once(carried: list[Value]) -> list[Int]:
        done = carried[0]
        arguments = [file, f.gep(target, done, "i8"), f.sub(count, done), f.add(offset, done)]
        got = f.call("pread", arguments, "i64")

        def failed() -> list[Int]:
            code = f.zext(f.load("i32", f.call(name, [], "ptr")), "i64")
            return [f.select(f.cmp("eq", code, errno.EINTR), 0, code)]

        def fine() -> list[Int]:
            return [f.select(f.cmp("eq", got, 0), _ENDED, 0)]

        status = f.if_value(f.cmp("slt", got, 0), failed, fine)[0]
        return [f.add(done, f.smax(got, 0)), status]

    f.return_(f.while_loop([0, 0], unfinished, once)[1])


def _emit_claim(module: Module) -> None:
    """i64 rlx_claim_fill(control, by reader): carry out the next fill; 0 if there is none at present."""
    f = module.function("rlx_claim_fill", [("ptr", "control"), ("i64", "reader")], returns="i64")
    control, by_reader = f.args
    ticket = _seen(f, control, Control.NEXT)
    number = _fill_of(f, ticket)

    def look() -> list[Int]:
        entry = _entry(f, control, number)
        position = _seen(f, control, Control.POSITION)
        free = f.cmp("sle", f.field(entry, int(Entry.AFTER)), position)
        return list(f.if_value(free, lambda: claim(entry, position), lambda: [0]))

    def claim(entry: Value, position: Value) -> list[Int]:
        place = _at(f, control, Control.NEXT)
        _, mine = f.compare_exchange(place, ticket, f.value(f.add(ticket, 1)))
        f.branch(mine, lambda: fill(entry, position))
        return [1]  # also where another thread was faster: there may be more

    def fill(entry: Value, position: Value) -> None:
        # A run that passes over kernels passes over what they would have read.
        f.store(0, f.gep(entry, int(Entry.STATUS), "i64"))
        needed = f.or_(
            f.value(f.cmp("sge", f.field(entry, int(Entry.LAST)), position)),
            f.value(f.cmp("ne", f.field(control, int(Control.ALL)), 0)),
        )
        f.branch(f.value(needed), lambda: read(entry))
        run = f.field(control, int(Control.RUN))
        f.atomic_store(run, f.gep(entry, int(Entry.DONE), "i64"))

    def read(entry: Value) -> None:
        began = native.clock(f)
        nbytes = f.field(entry, int(Entry.NBYTES))
        descriptor = f.field(control, int(Control.DESCRIPTOR))
        target, offset = f.field(entry, int(Entry.ADDRESS), "ptr"), f.field(entry, int(Entry.OFFSET))
        status = f.call("rlx_read_bytes", [descriptor, target, nbytes, offset], "i64")
        f.store(status, f.gep(entry, int(Entry.STATUS), "i64"))
        took = f.value(f.sub(native.clock(f), began))
        fetched = f.field(entry, int(Entry.ENDS_FETCH))
        own = f.value(f.mul(took, by_reader))
        for field, amount in (
            (Control.FETCHES, fetched),
            (Control.BYTES, nbytes),
            (Control.READING, took),
            (Control.BUSY, own),
        ):
            f.atomic_rmw("add", _at(f, control, field), amount, "monotonic")

    some = f.cmp("slt", number, f.field(control, int(Control.COUNT)))
    f.return_(f.if_value(some, look, lambda: [0])[0])


def _emit_publish(module: Module) -> None:
    """rlx_publish(control, position): the run has come so far; wakes the reader if it sleeps."""
    f = module.function("rlx_publish", [("ptr", "control"), ("i64", "position")])
    control, position = f.args
    f.atomic_store(position, _at(f, control, Control.POSITION))
    _signal(f, control)
    f.return_()


def _signal(f: Function, control: Value) -> None:
    """Tell the reader to look: it announces its sleep first and looks second, so one sees the other."""
    f.atomic_rmw("add", _at(f, control, Control.SIGNAL), f.value(1), "seq_cst")
    asleep = f.cmp("ne", _seen(f, control, Control.ASLEEP, "seq_cst"), 0)
    active = f.cmp("eq", f.field(control, int(Control.PAUSED)), 0)
    needed = f.value(f.and_(f.value(asleep), f.value(active)))
    f.branch(needed, lambda: native.wake(f, _at(f, control, Control.SIGNAL)))


def _wait_done(f: Function, control: Value, number: Int, claiming: bool) -> Value:
    """Return when a fill is done, with its status."""
    entry = _entry(f, control, number)
    run = f.field(control, int(Control.RUN))
    done = f.gep(entry, int(Entry.DONE), "i64")

    def missing(_: list[Value]) -> Bool:
        return f.cmp("ne", f.atomic_load("i64", done), run)

    def once(carried: list[Value]) -> list[Int]:
        (tries,) = carried
        helped: Value = f.call("rlx_claim_fill", [control, 0], "i64") if claiming else f.value(0)

        def idle() -> list[Int]:
            patient = f.cmp("slt", tries, f.field(control, int(Control.SPINS)))
            f.branch(patient, f.pause, lambda: f.call("sched_yield", [], "i32"))
            return [f.add(tries, 1)]

        return list(f.if_value(f.cmp("ne", helped, 0), lambda: [0], idle))

    f.while_loop([0], missing, once)
    return f.load("i64", f.gep(entry, int(Entry.STATUS), "i64"))


def _emit_await(module: Module) -> None:
    """i64 rlx_await_fills(control, position, first, stop): 0, or the status of the first that failed."""
    params = [("ptr", "control"), ("i64", "position"), ("i64", "first"), ("i64", "stop")]
    f = module.function("rlx_await_fills", params, returns="i64")
    control, position, first, stop = f.args
    f.call("rlx_publish", [control, position])

    def fine(carried: list[Value]) -> Bool:
        number, status = carried
        return f.value(f.and_(f.value(f.cmp("slt", number, stop)), f.value(f.cmp("eq", status, 0))))

    def once(carried: list[Value]) -> list[Int]:
        return [f.add(carried[0], 1), _wait_done(f, control, carried[0], claiming=True)]

    f.return_(f.while_loop([first, 0], fine, once)[1])


def _emit_gate(module: Module) -> None:
    """The kernel of a gate. Every thread of the run waits, and helps; the first one keeps the time."""
    f = module.function(ARRIVE, KERNEL_ARGS)
    args, thread = f.args[:2]
    control = f.field(args, OPERANDS, "ptr")
    position, first, stop = (f.field(args, OPERANDS + i) for i in range(1, 4))
    began = native.clock(f)
    status = f.call("rlx_await_fills", [control, position, first, stop], "i64")
    took = f.value(f.mul(f.sub(native.clock(f), began), f.zext(f.cmp("eq", thread, 0), "i64")))
    f.atomic_rmw("add", _at(f, control, Control.WAITED), took, "monotonic")
    f.branch(f.cmp("ne", status, 0), lambda: f.store(status, f.field(args, ERROR_SLOT, "ptr")))
    f.return_()


def _emit_loop(module: Module) -> None:
    """rlx_read_ahead(control): what the reader thread runs until it is stopped."""
    f = module.function("rlx_read_ahead", [("ptr", "control")])
    control = f.args[0]

    def running(_: list[Value]) -> Bool:
        return f.cmp("eq", _seen(f, control, Control.STOP), 0)

    def once(carried: list[Value]) -> list[Int]:
        tries, seen = carried
        active = f.cmp("eq", f.field(control, int(Control.PAUSED)), 0)
        (found,) = f.if_value(
            active, lambda: [f.call("rlx_claim_fill", [control, 1], "i64")], lambda: [f.value(0)]
        )

        def sleep() -> None:
            f.atomic_rmw("xchg", _at(f, control, Control.ASLEEP), f.value(1), "seq_cst")
            unchanged = f.cmp("eq", _seen(f, control, Control.SIGNAL, "seq_cst"), seen)
            f.branch(unchanged, lambda: native.sleep_while(f, _at(f, control, Control.SIGNAL), seen))
            f.atomic_store(f.value(0), _at(f, control, Control.ASLEEP))

        def idle() -> list[Int]:
            # The signal was read before the look that found nothing.
            patient = f.cmp("slt", tries, f.field(control, int(Control.SPINS)))
            f.branch(patient, f.pause, sleep)
            return [f.add(tries, 1), _seen(f, control, Control.SIGNAL, "seq_cst")]

        def more() -> list[Int]:
            return [0, _seen(f, control, Control.SIGNAL, "seq_cst")]

        return list(f.if_value(f.cmp("ne", found, 0), more, idle))

    f.while_loop([0, _seen(f, control, Control.SIGNAL, "seq_cst")], running, once)
    f.return_()


def _emit_ends(module: Module) -> None:
    """What begins a run, ends one, and ends the reader."""
    f = module.function("rlx_begin_fills", [("ptr", "control")])
    control = f.args[0]
    f.atomic_store(f.value(-1), _at(f, control, Control.POSITION))
    run = f.value(f.add(f.field(control, int(Control.RUN)), 1))
    f.store(run, _at(f, control, Control.RUN))
    f.atomic_store(_ticket(f, run, 0), _at(f, control, Control.NEXT))
    f.return_()

    f = module.function("rlx_settle_fills", [("ptr", "control")])
    control = f.args[0]
    count = f.field(control, int(Control.COUNT))
    over = _ticket(f, f.field(control, int(Control.RUN)), count)
    last = f.atomic_rmw("xchg", _at(f, control, Control.NEXT), over, "seq_cst")
    f.loop(
        0,
        _fill_of(f, last),
        1,
        [],
        lambda number, _: (_wait_done(f, control, number, claiming=False), None)[1],
    )
    f.return_()

    f = module.function("rlx_stop_reader", [("ptr", "control")])
    control = f.args[0]
    f.atomic_store(f.value(1), _at(f, control, Control.STOP))
    _signal(f, control)
    f.return_()

    f = module.function("rlx_read_alone", [("ptr", "control"), ("i64", "position")])
    control, position = f.args
    f.call("rlx_publish", [control, position])
    count = f.field(control, int(Control.COUNT))
    f.loop(0, count, 1, [], lambda number, _: (_wait_done(f, control, number, claiming=False), None)[1])
    f.return_()
