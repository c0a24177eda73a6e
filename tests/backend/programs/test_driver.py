"""The native driver: order, barriers, serial records, errors, profile, on any number of threads."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from measured import grows
from rlx.codegen.cpu.kernels import KERNEL_ARGS
from rlx.codegen.native.irtext import Bool, Int, Module, Value, constant
from rlx.codegen.native.jit import Code
from rlx.errors import ConfigError, KernelError
from rlx.runtime.barriers import ALL
from rlx.runtime.memory import table
from rlx.runtime.native import code as native
from rlx.runtime.native.driver import _ARRIVED, NO_BARRIER, OPERANDS, NativeProgram, Record, RecordError
from rlx.runtime.native.pool import CPUS, Pool

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, or forks")
LINE = 8  # int64 fields of a cache line


def emit_kernels(module: Module) -> None:
    """Kernels whose results tell whether the driver did its part."""
    _emit_relay(module)
    _emit_log(module)
    _emit_fail(module)
    _emit_multiply(module)
    _emit_linger(module)


def _emit_relay(module: Module) -> None:
    """relay(args: from, to, value): every cell of `from` must hold `value`; then to[thread] = value + 1.

    A thread that is let through early finds a cell that is not ready, or spoils one that is still read.
    Threads idle for different times, so that the last to arrive changes from step to step.
    """
    f = module.function("relay", KERNEL_ARGS)
    args, thread, threads, _ = f.args
    source, target = f.field(args, OPERANDS, "ptr"), f.field(args, OPERANDS + 1, "ptr")
    value = f.field(args, OPERANDS + 2)

    def idle(_: Int, __: list[Value]) -> None:
        f.pause()

    f.loop(0, f.urem(f.add(f.mul(value, 7), f.mul(thread, 13)), 16), 1, [], idle)

    def check(other: Int, _: list[Value]) -> None:
        wrong = f.cmp("ne", f.load("i64", f.gep(source, f.mul(other, LINE), "i64")), value)
        f.branch(wrong, lambda: f.store(f.value(7), f.field(args, 0, "ptr")))

    f.loop(0, threads, 1, [], check)
    f.store(f.add(value, 1), f.gep(target, f.mul(thread, LINE), "i64"))


def _emit_linger(module: Module) -> None:
    """linger(args: words): set word 0, and stay until word 1 is no longer 0."""
    f = module.function("linger", KERNEL_ARGS)
    words = f.field(f.args[0], OPERANDS, "ptr")
    f.atomic_store(f.value(1), words, "seq_cst")

    def held(_: list[Value]) -> Bool:
        return f.cmp("eq", f.atomic_load("i64", f.gep(words, 1, "i64")), 0)

    def rest(_: list[Value]) -> None:
        f.call("sched_yield", [], "i32")

    f.while_loop([], held, rest)


def _emit_log(module: Module) -> None:
    """log(args: cells, value): cells[thread] = cells[thread] * 10 + value, and cells[thread][1] = threads."""
    f = module.function("log", KERNEL_ARGS)
    args, thread, threads, _ = f.args
    cells = f.field(args, OPERANDS, "ptr")
    cell = f.gep(cells, f.mul(thread, LINE), "i64")
    f.store(f.add(f.mul(f.load("i64", cell), 10), f.field(args, OPERANDS + 1)), cell)
    f.store(threads, f.gep(cell, 1, "i64"))


def _emit_fail(module: Module) -> None:
    """fail(args: code, guilty thread): one thread stores an error code."""
    f = module.function("fail", KERNEL_ARGS)
    args, thread = f.args[:2]
    guilty = f.cmp("eq", thread, f.field(args, OPERANDS + 1))
    f.branch(guilty, lambda: f.store(f.field(args, OPERANDS), f.field(args, 0, "ptr")))


def _emit_multiply(module: Module) -> None:
    """multiply(args: x, y, out): out[thread] = x * y in f32; flush(): switch denormals off in this thread."""
    f = module.function("multiply", KERNEL_ARGS)
    args, thread = f.args[:2]
    x, y, out = (f.field(args, OPERANDS + n, "ptr") for n in range(3))
    f.store(f.fmul(f.load("float", x), f.load("float", y)), f.gep(out, thread, "float"))
    f = module.function("set_mode", [("i32", "mode")])
    place = f.alloca("i32", 1, align=4)
    f.store(f.args[0], place)
    if module.target.x86:
        f.call("llvm.x86.sse.ldmxcsr", [place])
    f = module.function("get_mode", [], returns="i32")
    place = f.alloca("i32", 1, align=4)
    f.store(constant("i32", 0), place)
    if module.target.x86:
        f.call("llvm.x86.sse.stmxcsr", [place])
    f.return_(f.load("i32", place))


@pytest.fixture(scope="module")
def code() -> Code:
    return native.build(emit_kernels)


@pytest.fixture(scope="module", params=[1, 2, 4])
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    with Pool(request.param, oversubscribe=True) as made:
        yield made


class Log:
    """A program of `log` records, each with a digit, on `threads` threads."""

    def __init__(self, code: Code, pool: Pool, records: list[Record]) -> None:
        self.cells = np.zeros((pool.threads, LINE), np.int64)
        self.program = NativeProgram(records, pool=pool, keep=code)
        for index, record in enumerate(records):
            if record.kernel == code.address("log"):
                self.program.args(index)[OPERANDS:] = self.cells.ctypes.data, index + 1

    def run(self) -> list[int]:
        self.cells[:] = 0
        self.program.run()
        return self.cells[:, 0].tolist()


# --- order ----------------------------------------------------------------------------------------


def test_records_run_in_order_on_every_thread(code: Code, pool: Pool) -> None:
    log = Log(code, pool, [Record(code.address("log"), 5) for _ in range(9)])
    for _ in range(3):
        assert log.run() == [123456789] * pool.threads
    assert (log.cells[:, 1] == pool.threads).all()


def test_a_serial_record_runs_once_as_the_only_thread(code: Code, pool: Pool) -> None:
    log = Log(code, pool, [Record(code.address("log"), 5, owner=owner) for owner in (ALL, 0, ALL)])
    assert log.run() == [123] + [13] * (pool.threads - 1)
    alone = Log(code, pool, [Record(code.address("log"), 5, owner=0)])
    alone.run()
    assert alone.cells[0, 1] == 1


def test_records_without_barrier_run_too(code: Code, pool: Pool) -> None:
    log = Log(code, pool, [Record(code.address("log"), 5, meets=index % 3 == 2) for index in range(8)])
    for _ in range(100):
        assert log.run() == [12345678] * pool.threads


def test_an_empty_program_runs(pool: Pool) -> None:
    program = NativeProgram([], pool=pool)
    program.run()
    assert program.total_ns >= 0


def test_another_number_of_threads_between_runs(code: Code, pool: Pool) -> None:
    log = Log(code, pool, [Record(code.address("log"), 5) for _ in range(3)])
    for threads in [*range(1, pool.threads + 1), 1]:
        log.program.threads = threads
        assert log.run() == [123] * threads + [0] * (pool.threads - threads)
        assert log.cells[0, 1] == threads
    log.program.threads = 1000
    assert log.program.threads == pool.threads
    with pytest.raises(ConfigError, match="at least 1 thread"):
        log.program.threads = 0


# --- barriers -------------------------------------------------------------------------------------


def relay_program(code: Code, pool: Pool, steps: int) -> tuple[NativeProgram, np.ndarray]:
    cells = table(2 * pool.threads * LINE).reshape(2, pool.threads, LINE)
    program = NativeProgram(
        [Record(code.address("relay"), 6, f"step {n}") for n in range(steps)], pool=pool, keep=code
    )
    for step in range(steps):
        program.args(step)[OPERANDS:] = cells[step % 2].ctypes.data, cells[1 - step % 2].ctypes.data, step
    return program, cells


def test_the_barrier_holds_for_a_hundred_thousand_epochs(code: Code, pool: Pool) -> None:
    steps = 1000
    program, cells = relay_program(code, pool, steps)
    crowded = pool.threads > (os.cpu_count() or 1)  # every barrier then waits for the scheduler
    for _ in range(10 if crowded else 100):
        cells[0] = 0
        program.run()
        assert (cells[0, :, 0] == steps).all()


def test_the_relay_notices_a_missing_barrier(code: Code) -> None:
    """The test above would see a fault: without barriers it fails."""
    with Pool(4, oversubscribe=True) as pool:
        program, cells = relay_program(code, pool, 2000)
        program._steps.reshape(len(program.records), -1)[:, 2] = NO_BARRIER
        with pytest.raises(RecordError):
            for _ in range(200):
                cells[0] = 0
                program.run()


@linux
@pytest.mark.parametrize("oversubscribe", [False, True])
def test_threads_that_wait_for_long_leave_their_core(code: Code, oversubscribe: bool) -> None:
    """At a barrier inside a run they spin for 200 us, no longer; who waits first may be the caller."""
    threads = 4 if oversubscribe else min(2, len(CPUS))
    words = table(2)
    with Pool(threads, oversubscribe=oversubscribe) as pool:
        for owner in range(threads):
            cells = np.zeros((pool.threads, LINE), np.int64)
            kinds = [(code.address("linger"), owner), (code.address("log"), ALL)]
            records = [Record(address, OPERANDS + 2, owner=who) for address, who in kinds]
            program = NativeProgram(records, pool=pool, keep=code)
            program.args(0)[OPERANDS] = words.ctypes.data
            program.args(1)[OPERANDS:] = cells.ctypes.data, 5
            words[:] = 0
            user = threading.Thread(target=program.run)
            user.start()
            while not words[0]:
                time.sleep(0.001)
            team = pool._team
            assert team is not None
            idle = [worker.ident for thread, worker in enumerate(team._workers, 1) if thread != owner]
            idle += [user.ident] * (owner != 0)
            clocks = [time.pthread_getcpuclockid(ident or 0) for ident in idle]
            time.sleep(0.05)
            before = [time.clock_gettime(clock) for clock in clocks]
            time.sleep(0.2)
            used = [time.clock_gettime(clock) - x for clock, x in zip(clocks, before, strict=True)]
            words[1] = 1
            user.join()
            assert max(used, default=0.0) < 0.01
            assert cells[:, 0].tolist() == [5] * pool.threads


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("guilty", [0, -1])
def test_an_error_stops_the_program_and_names_the_kernel(code: Code, pool: Pool, guilty: int) -> None:
    records = [Record(code.address("log"), 5) for _ in range(5)]
    records[2] = Record(code.address("fail"), 5, "gather_7")
    log = Log(code, pool, records)
    fields = log.program.args(2)
    for code_stored in (42, -3, 42):
        fields[OPERANDS:] = code_stored, guilty % pool.threads
        with pytest.raises(RecordError, match=f"kernel gather_7 reported error {code_stored}") as caught:
            log.run()
        assert isinstance(caught.value, KernelError)
        assert (caught.value.record, caught.value.code) == (2, code_stored)
        assert log.cells[:, 0].tolist() == [12] * pool.threads
    fields[OPERANDS] = 0  # the fault is gone: the same program runs to its end
    for _ in range(2):
        assert log.run() == [1245] * pool.threads


def test_without_a_barrier_the_first_failing_record_is_still_the_one_named(code: Code, pool: Pool) -> None:
    """The group up to the next barrier runs to its end, then all threads stop."""
    fail, log_ = code.address("fail"), code.address("log")
    records = [
        Record(log_, 5),
        Record(fail, 5, "first", meets=False),
        Record(log_, 5, meets=False),
        Record(fail, 5, "second", meets=False),
        Record(log_, 5),
    ]
    log = Log(code, pool, records)
    log.program.args(1)[OPERANDS:] = 1, pool.threads - 1
    log.program.args(3)[OPERANDS:] = 2, 0
    for _ in range(50):
        with pytest.raises(RecordError) as caught:
            log.run()
        assert (caught.value.name, caught.value.code) == ("first", 1)
        assert log.cells[:, 0].tolist() == [13] * pool.threads


def test_an_error_in_the_last_record_is_reported(code: Code, pool: Pool) -> None:
    for meets in (True, False):
        program = NativeProgram([Record(code.address("fail"), 5, meets=meets)], pool=pool, keep=code)
        program.args(0)[OPERANDS:] = 9, pool.threads - 1
        with pytest.raises(RecordError, match="kernel 0 reported error 9"):
            program.run()


def test_a_block_without_room_for_the_fixed_fields_is_refused() -> None:
    with pytest.raises(ConfigError, match="'thin' has 2 argument fields"):
        NativeProgram([Record(1, 2, "thin")])


# --- tables, clock, profile -----------------------------------------------------------------------


def test_argument_blocks_are_views_of_one_table(code: Code) -> None:
    program = NativeProgram([Record(0, 5), Record(0, 12), Record(0, 3)], threads=1)
    program.args(1)[:] = range(12)
    start = program.start(1)
    assert program.table[start : start + 12].tolist() == list(range(12))
    program.table[start + 4] = 99
    assert program.args(1)[4] == 99
    assert [program.args(index).size for index in range(3)] == [5, 12, 3]
    assert all(program.args(index).ctypes.data % 64 == 0 for index in range(3))


def test_the_profile_stamps_every_record_of_every_thread(code: Code, pool: Pool) -> None:
    records = [Record(code.address("log"), 5, owner=0 if index == 1 else ALL) for index in range(4)]
    cells = np.zeros((pool.threads, LINE), np.int64)
    program = NativeProgram(records, pool=pool, profile=True, keep=code)
    for index in range(4):
        program.args(index)[OPERANDS:] = cells.ctypes.data, 1
    before = time.perf_counter_ns()
    program.run()
    after = time.perf_counter_ns()
    assert program.stamps is not None
    events = program.stamps.events()
    places = [(t, r) for t in range(pool.threads) for r in range(4) if t == 0 or r != 1]
    assert list(map(tuple, events[:, :2].tolist())) == places  # the serial record ran on thread 0 alone
    ran = events[events[:, 1] != 1, 2:].reshape(pool.threads, 3, 2)
    assert (ran[..., 1] >= ran[..., 0]).all()
    assert ran.min() >= before  # the same clock as Python's
    assert ran.max() <= after
    ends, starts = ran[:, :-1, 1].max(axis=0), ran[:, 1:, 0].min(axis=0)
    assert (starts >= ends).all()  # no thread starts a record before all have ended the one before
    assert 0 < program.total_ns <= after - before
    assert ran.max() - ran[0].min() <= program.total_ns  # another thread may enter before thread 0


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="sets MXCSR")
def test_the_float_mode_of_the_caller_does_not_matter(code: Code, pool: Pool) -> None:
    set_mode = ctypes.CFUNCTYPE(None, ctypes.c_uint32)(code.address("set_mode"))
    get_mode = ctypes.CFUNCTYPE(ctypes.c_uint32)(code.address("get_mode"))
    x, y = np.array([1e-30], np.float32), np.array([1e-12], np.float32)
    out = np.zeros(pool.threads, np.float32)
    program = NativeProgram([Record(code.address("multiply"), 6)], pool=pool, keep=code)
    program.args(0)[OPERANDS:] = x.ctypes.data, y.ctypes.data, out.ctypes.data
    usual, flushing = get_mode(), 0x9FC0  # flush to zero, denormals are zero
    set_mode(flushing)
    try:
        program.run()
        assert get_mode() & ~0x3F == flushing
    finally:
        set_mode(usual)
    assert (out == x * y).all()
    assert (out > 0).all()


# --- processes, threads, memory -------------------------------------------------------------------


@linux
def test_a_forked_child_runs_a_program(code: Code, pool: Pool) -> None:
    log = Log(code, pool, [Record(code.address("log"), 5) for _ in range(3)])
    assert log.run() == [123] * pool.threads
    # As a fork leaves it that comes while another thread is inside a barrier of this program:
    log.program._header[_ARRIVED] = pool.threads - 1
    child = os.fork()
    if child == 0:
        signal.alarm(300)
        good = False
        try:
            good = log.run() == [123] * pool.threads
        finally:
            os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert log.run() == [123] * pool.threads


def test_programs_from_several_python_threads(code: Code, pool: Pool) -> None:
    failures: list[object] = []

    def use() -> None:
        try:
            program, cells = relay_program(code, pool, 50)
            for _ in range(50):
                cells[0] = 0
                program.run()
                assert (cells[0, :, 0] == 50).all()
        except BaseException as error:
            failures.append(error)

    users = [threading.Thread(target=use) for _ in range(4)]
    for user in users:
        user.start()
    for user in users:
        user.join()
    assert not failures


@linux
def test_a_thousand_programs_leave_nothing_behind(code: Code) -> None:
    with Pool(min(2, len(CPUS))) as pool:

        def cycle(times: int) -> None:
            for _ in range(times):
                log = Log(code, pool, [Record(code.address("log"), 5) for _ in range(50)])
                log.run()

        assert not grows(lambda: cycle(1000), most=2 << 20)
