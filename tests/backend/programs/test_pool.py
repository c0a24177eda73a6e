"""The thread pool: every share runs once, from any thread, after sleep, fork, Ctrl-C and failed starts."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from measured import grows
from rlx.codegen.native.irtext import Bool, Module, Value, constant
from rlx.codegen.native.jit import Code, compile_object
from rlx.errors import ConfigError
from rlx.runtime.native import code as native
from rlx.runtime.native import pool as pool_module
from rlx.runtime.native.driver import emit_driver
from rlx.runtime.native.pool import CPUS, Pool, PoolError, default_pool, emit_pool
from rlx.target.cpu import resolve

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
two_cores = pytest.mark.skipif(len(CPUS) < 2, reason="needs two cores")
LINE = 8  # int64 fields of a cache line


def emit_functions(module: Module) -> None:
    """count(cells, thread): cells[thread] += 1 (one cache line each).

    linger: the same when field 1 of its line is no longer 0, after field 2 has told that it is there.
    interrupt: the same after thread 0 has sent the process a SIGINT.
    """
    f = module.function("count", [("ptr", "cells"), ("i64", "thread")])
    cells, thread = f.args
    cell = f.gep(cells, f.mul(thread, LINE), "i64")
    f.store(f.add(f.load("i64", cell), 1), cell)

    f = module.function("linger", [("ptr", "cells"), ("i64", "thread")])
    line = f.gep(f.args[0], f.mul(f.args[1], LINE), "i64")
    f.atomic_store(f.value(1), f.gep(line, 2, "i64"), "seq_cst")

    def held(_: list[Value]) -> Bool:
        return f.cmp("eq", f.atomic_load("i64", f.gep(line, 1, "i64")), 0)

    def nothing(_: list[Value]) -> None:
        f.call("sched_yield", [], "i32")

    f.while_loop([], held, nothing)
    f.call("count", f.args)

    f = module.function("interrupt", [("ptr", "cells"), ("i64", "thread")])
    first = f.cmp("eq", f.args[1], 0)
    f.branch(first, lambda: f.call("raise", [constant("i32", signal.SIGINT)], "i32"))
    f.call("count", f.args)


@pytest.fixture(scope="module")
def code() -> Code:
    return native.build(emit_functions)


@pytest.fixture(scope="module")
def count(code: Code) -> int:
    return code.address("count")


class Cells:
    """One counter per thread."""

    def __init__(self, threads: int) -> None:
        self.array = np.zeros((threads, LINE), np.int64)
        self.address = self.array.ctypes.data

    def __eq__(self, other: object) -> bool:
        return self.array[:, 0].tolist() == other

    def __repr__(self) -> str:
        return repr(self.array[:, 0].tolist())

    __hash__ = None  # type: ignore[assignment]


def wait_until(condition: Callable[[], object]) -> None:
    """Other threads decide when that is; a machine without time for them is no fault."""
    while not condition():
        time.sleep(0.001)


class NewThreads:
    """Threads that have started since. Those that earlier tests have told to end may still be about to."""

    def __init__(self) -> None:
        self._before = set(threading.enumerate())

    def number(self) -> int:
        return len(set(threading.enumerate()) - self._before)

    def fall_to(self, number: int) -> None:
        """Threads that were told to end may take as long as the machine lets them."""
        wait_until(lambda: self.number() <= number)
        assert self.number() == number


def team_of(pool: Pool) -> pool_module._Team:
    assert pool._team is not None
    return pool._team


@two_cores
def test_every_thread_runs_its_share_once(count: int) -> None:
    cells = Cells(2)
    with Pool(2) as pool:
        for _ in range(10_000):
            pool.run(count, cells.address)
        assert cells == [10_000, 10_000]
        pool.run(count, cells.address, threads=1)
        assert cells == [10_001, 10_000]


def test_more_threads_than_cores_still_work(count: int) -> None:
    threads = 2 * len(CPUS)
    cells = Cells(threads)
    with Pool(threads, oversubscribe=True) as pool:
        assert pool.threads == threads
        for _ in range(200):
            pool.run(count, cells.address)
    assert cells == [200] * threads


@two_cores
def test_a_sleeping_pool_wakes(count: int) -> None:
    cells = Cells(2)
    with Pool(2, spin_us=0) as pool:
        for _ in range(100):
            pool.run(count, cells.address)
            wait_until(lambda: team_of(pool).has_sleepers)
    assert cells == [100, 100]


@two_cores
def test_workers_soon_leave_their_core(count: int) -> None:
    """They spin for 200 us after a run, no longer."""
    assert pool_module.SPIN_MICROSECONDS == 200
    cells = Cells(2)
    with Pool(2) as pool:
        for _ in range(20):
            pool.run(count, cells.address)
            wait_until(lambda: team_of(pool).has_sleepers)
        before = time.process_time()
        time.sleep(0.2)
        assert time.process_time() - before < 0.02
    assert cells == [20, 20]


@two_cores
def test_a_pool_grows_with_the_runs(count: int) -> None:
    new = NewThreads()
    cells = Cells(4)
    with Pool(4, oversubscribe=True) as pool:
        pool.run(count, cells.address, threads=2)
        assert new.number() == 1
        pool.run(count, cells.address, threads=4)
        new.fall_to(3)
        pool.run(count, cells.address, threads=3)
        assert cells == [3, 3, 2, 1]
    new.fall_to(0)


def test_one_thread_needs_no_pool(count: int) -> None:
    new = NewThreads()
    cells = Cells(1)
    pool = Pool()
    pool.run(count, cells.address, threads=1)
    pool.close()
    pool.run(count, cells.address, threads=1)
    assert cells == [2]
    assert new.number() == 0


def test_a_pool_is_capped_at_the_cores_of_the_process() -> None:
    assert Pool(1000).threads == len(CPUS) == default_pool().threads


@pytest.mark.parametrize("threads", [0, -1, 1001])
def test_impossible_runs_are_refused(count: int, threads: int) -> None:
    with pytest.raises(ConfigError, match=f"{threads} threads"):
        Pool().run(count, 0, threads=threads)


def test_a_pool_of_no_threads_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        Pool(0)


@two_cores
def test_a_closed_pool_refuses(count: int) -> None:
    pool = Pool(2)
    pool.close()
    pool.close()
    with pytest.raises(PoolError, match="closed"):
        pool.run(count, 0, threads=2)


@two_cores
def test_runs_from_several_python_threads(count: int) -> None:
    all_cells = [Cells(2) for _ in range(8)]
    failures: list[BaseException] = []

    def use(cells: Cells) -> None:
        try:
            for _ in range(300):
                default_pool().run(count, cells.address, threads=2)
        except BaseException as error:
            failures.append(error)

    users = [threading.Thread(target=use, args=(cells,)) for cells in all_cells]
    for user in users:
        user.start()
    for user in users:
        user.join()
    assert not failures
    assert all(cells == [300, 300] for cells in all_cells)


@two_cores
def test_a_run_inside_a_run_is_refused_instead_of_waiting_for_itself(count: int) -> None:
    cells = Cells(2)
    caught: list[BaseException] = []
    with Pool(2) as pool:

        def inner(_: int, thread: int) -> None:
            if thread == 0:
                try:
                    pool.run(count, cells.address, threads=2)
                except PoolError as error:
                    caught.append(error)

        callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(inner)
        pool.run(ctypes.cast(callback, ctypes.c_void_p).value or 0, 0, threads=2)
        assert len(caught) == 1
        pool.run(count, cells.address, threads=2)
    assert cells == [1, 1]


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """A shell that starts a program in the background lets it ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@two_cores
def test_ctrl_c_during_a_run_comes_after_it(code: Code, count: int, heeds_ctrl_c: None) -> None:
    cells = Cells(2)
    with Pool(2) as pool:
        pool.run(count, cells.address)
        for _ in range(3):
            before = cells.array[:, 0].tolist()
            with pytest.raises(KeyboardInterrupt):
                pool.run(code.address("interrupt"), cells.address)
            assert cells == [number + 1 for number in before]
        pool.run(count, cells.address)
    assert cells == [5, 5]


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyboardInterrupt()])
def test_a_failed_start_leaves_the_pool_usable(
    count: int, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    new = NewThreads()
    start, calls = threading.Thread.start, []

    def second_fails(thread: threading.Thread) -> None:
        calls.append(thread)
        if len(calls) == 2:
            raise error
        start(thread)

    cells = Cells(4)
    with Pool(4, oversubscribe=True) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", second_fails)
            with pytest.raises(type(error)):
                pool.run(count, cells.address)
        new.fall_to(0)
        pool.run(count, cells.address)
    assert cells == [1, 1, 1, 1]


@two_cores
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs sched_getaffinity")
def test_workers_are_pinned_apart_and_the_caller_is_not(count: int) -> None:
    mine = os.sched_getaffinity(0)
    with Pool() as pool:
        pool.run(count, Cells(pool.threads).address)
        masks = [os.sched_getaffinity(worker.native_id or 0) for worker in team_of(pool)._workers]
        assert all(len(mask) == 1 for mask in masks)
        assert len(set.union(*masks)) == len(masks)
        team = team_of(pool)
        for core in CPUS:  # wherever the caller is, no worker waits for its core
            os.sched_setaffinity(0, {core})
            time.sleep(0.001)
            team.spread()
            assert core not in set.union(*(os.sched_getaffinity(w.native_id or 0) for w in team._workers))
            os.sched_setaffinity(0, mine)
        pool.run(count, Cells(pool.threads).address)
    assert os.sched_getaffinity(0) == mine


@two_cores
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs sched_setaffinity")
def test_a_library_that_pins_the_main_thread_does_not_pin_the_workers(count: int) -> None:
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {CPUS[0]})
    try:
        with Pool(2) as pool:
            pool.run(count, Cells(2).address)
            (worker,) = team_of(pool)._workers
            assert os.sched_getaffinity(worker.native_id or 0) == {CPUS[1]}
    finally:
        os.sched_setaffinity(0, mine)


# --- other systems --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["aarch64", "x86-64", "x86-64-v4"])
def test_pool_and_driver_assemble_for_every_machine(name: str) -> None:
    module = Module(resolve(name))
    emit_pool(module)
    emit_driver(module)
    made = compile_object(module.text(), module.target)
    assert b"rlx_fork_join" in made
    assert b"rlx_run_program" in made


# --- the life of threads --------------------------------------------------------------------------


@two_cores
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_thousand_pools_leave_nothing_behind(count: int) -> None:
    cells = Cells(2)

    def cycle(times: int) -> None:
        for _ in range(times):
            Pool(2).run(count, cells.address)

    new = NewThreads()
    assert not grows(lambda: cycle(1000), most=2 << 20)
    new.fall_to(0)
    assert cells.array[0, 0] == cells.array[1, 0]


def in_child(action: Callable[[], bool]) -> bool:
    """Fork, and tell whether `action` returned True in the child. A child that hangs is ended by an alarm."""
    child = os.fork()
    if child == 0:
        signal.alarm(300)
        good = False
        try:
            good = action()
        finally:
            os._exit(0 if good else 1)
    return os.waitpid(child, 0)[1] == 0


@two_cores
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_its_own_threads(count: int) -> None:
    cells = Cells(2)
    with Pool(2) as pool:
        pool.run(count, cells.address)

        def child() -> bool:
            pool.run(count, cells.address)
            grandchild = in_child(lambda: pool.run(count, cells.address) is None and cells == [3, 3])
            pool.close()
            return grandchild and cells == [2, 2]

        assert in_child(child)
        pool.run(count, cells.address)
    assert cells == [2, 2]


@two_cores
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_while_another_thread_is_in_a_run(code: Code, count: int) -> None:
    slow, mine = Cells(2), Cells(2)
    with Pool(2) as pool:
        user = threading.Thread(target=pool.run, args=(code.address("linger"), slow.address))
        user.start()
        wait_until(lambda: slow.array[:, 2].all())
        assert in_child(lambda: pool.run(count, mine.address) is None and mine == [1, 1])
        slow.array[:, 1] = 1
        user.join()
        assert slow == [1, 1]


EXITS = {
    "open pool": "pool.run(count, cells.ctypes.data)",
    "dropped pool": "pool.run(count, cells.ctypes.data); del pool",
    "during a run": """
def forever():
    while True:
        pool.run(count, cells.ctypes.data)
threading.Thread(target=forever, daemon=True).start()
time.sleep(0.05)""",
    "uncaught error": "pool.run(count, cells.ctypes.data); raise SystemExit(0)",
}


@two_cores
@pytest.mark.parametrize("how", EXITS)
def test_the_interpreter_ends_cleanly(how: str, tmp_path: Path) -> None:
    script = f"""
import threading, time
import numpy as np
from rlx.runtime.native import code as native
from rlx.runtime.native.pool import Pool
def emit(module):
    module.function("nothing", [("ptr", "argument"), ("i64", "thread")])
code = native.build(emit)
count, cells, pool = code.address("nothing"), np.zeros(16, np.int64), Pool(2)
{EXITS[how]}
"""
    environment = {**os.environ, "RLX_CACHE": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
