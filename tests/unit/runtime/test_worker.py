"""The loop of native workers: when it works, sleeps and leaves, and what it keeps alive."""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from rlx.codegen.native.irtext import Module
from rlx.codegen.native.notation import emit_all, native
from rlx.codegen.native.words import at, atomic_load, atomic_rmw, atomic_store, call, field, i64, ptr
from rlx.driver import FileMemory
from rlx.driver.copy import ThreadCopy
from rlx.driver.copy.native import CopyControl
from rlx.driver.worker import Control, Worker, rlx_stop_worker, signal, work
from rlx.runtime.memory import table
from rlx.runtime.native.code import build
from rlx.runtime.native.reader import Fill, Reader


class Own(IntEnum):
    """A job counts."""

    POSTED = Control.POSTED
    DONE = Control.FIELDS
    IDLE = Control.FIELDS + 8  # is called when there was no job
    FIELDS = Control.FIELDS + 16


@native
def rlx_count(control: ptr) -> None:
    work(control, rlx_count_next)


@native(internal=True)
def rlx_count_next(control: ptr) -> i64:
    done, idle = control[Own.DONE], field(control, Own.IDLE, ptr)
    if atomic_load(i64, at(control, Own.POSTED)) != done:
        atomic_store(done + 1, at(control, Own.DONE))
        return i64(1)
    if idle != 0:
        call(idle)
    return i64(0)


@native
def rlx_post(control: ptr) -> None:
    atomic_rmw("add", at(control, Own.POSTED), i64(1))
    signal(control)


class Counting(NamedTuple):
    work: Callable[..., int]
    stop: Callable[..., int]
    post: Callable[..., int]
    code: object


@pytest.fixture(scope="module")
def counting() -> Counting:
    def emit(module: Module) -> None:
        emit_all(module, rlx_count, rlx_stop_worker, rlx_post)

    code = build(emit)
    return Counting(code.function(rlx_count), code.function(rlx_stop_worker), code.function(rlx_post), code)


class Owner:
    pass


def wait_until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0)


@pytest.mark.parametrize("spins", [0, 2000])
def test_a_worker_that_is_stopped_leaves_nothing_undone(counting: Counting, spins: int) -> None:
    for jobs in range(50):
        control, owner = table(Own.FIELDS), Owner()
        worker = Worker("counts", counting, control, spins=spins)
        worker.start(owner)
        for _ in range(jobs):
            counting.post(control.ctypes.data)
        worker.stop()
        assert control[Own.DONE] == jobs


def test_a_job_that_comes_between_the_look_and_the_stop_is_done(counting: Counting) -> None:
    control = table(Own.FIELDS)
    looks: list[int] = []

    @ctypes.CFUNCTYPE(None)
    def idle() -> None:
        looks.append(1)
        if len(looks) == 1:
            counting.post(control.ctypes.data)
            counting.stop(control.ctypes.data)

    control[Own.IDLE] = ctypes.cast(idle, ctypes.c_void_p).value
    counting.work(control.ctypes.data)
    assert control[Own.DONE] == 1 and len(looks) == 2


def test_signals_without_a_job_do_not_keep_a_worker_awake(counting: Counting) -> None:
    control, owner = table(Own.FIELDS), Owner()
    worker = Worker("counts", counting, control)
    control[Control.SPINS] = spins = 100
    looks: list[int] = []

    @ctypes.CFUNCTYPE(None)
    def idle() -> None:
        looks.append(1)
        if len(looks) <= 2 * spins:
            control[Control.SIGNAL] += 1

    control[Own.IDLE] = ctypes.cast(idle, ctypes.c_void_p).value
    worker.start(owner)
    wait_until(lambda: len(looks) > 2 * spins and bool(control[Control.ASLEEP]))
    assert len(looks) < 3 * spins  # it does not count anew after the last signal
    worker.stop()


def test_a_sleeper_is_woken_for_a_job_and_to_stop(counting: Counting) -> None:
    control, owner = table(Own.FIELDS), Owner()
    worker = Worker("counts", counting, control, spins=0)
    worker.start(owner)
    for jobs in range(1, 20):
        wait_until(lambda: bool(control[Control.ASLEEP]))
        counting.post(control.ctypes.data)
        wait_until(lambda jobs=jobs: control[Own.DONE] == jobs)
    wait_until(lambda: bool(control[Control.ASLEEP]))
    worker.stop()


def test_a_worker_ends_with_its_owner_and_starts_once(counting: Counting) -> None:
    before = set(threading.enumerate())
    control, owner = table(Own.FIELDS), Owner()
    worker = Worker("counts", counting, control)
    assert not worker.is_here
    worker.stop()  # of what has not begun
    worker.start(owner)
    worker.start(owner)
    (thread,) = set(threading.enumerate()) - before
    assert worker.is_here and thread.name == "counts" and thread.daemon
    del owner
    assert not thread.is_alive()
    worker.stop()


def test_a_forgotten_reader_that_is_paused_stops_its_thread(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    before, ring = set(threading.enumerate()), np.zeros(1, np.uint8)
    reader = Reader(FileMemory(tmp_path / "file"), [Fill(0, ring.ctypes.data, 1, 0, 0)])
    reader.pause(True)
    reader.begin()
    (thread,) = set(threading.enumerate()) - before
    del reader
    assert not thread.is_alive()


def test_a_forgotten_engine_keeps_memory_until_its_copies_are_done(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    engine, target = ThreadCopy(), np.zeros(1, np.uint8)
    control, there = engine._shared.control, weakref.ref(target)
    alive: list[bool] = []

    @ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    def read(descriptor: int, into: int, nbytes: int, offset: int) -> int:
        wait_until(lambda: bool(control[Control.STOP]))
        alive.append(there() is not None)
        return nbytes

    control[CopyControl.PREAD] = ctypes.cast(read, ctypes.c_void_p).value
    engine.issue(FileMemory(tmp_path / "file"), target)
    del target
    del engine
    assert alive == [True]
