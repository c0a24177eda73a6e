"""Threads of native workers: when they begin and end, and what they keep alive."""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rlx.driver import FileMemory
from rlx.driver.copy import ThreadCopy
from rlx.driver.copy.native import Control, native_copy
from rlx.driver.copy.thread import _Shared
from rlx.driver.worker import Worker
from rlx.runtime.native.reader import Fill, Reader


class Owner:
    pass


def wait_until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0)


def test_a_worker_ends_with_its_owner_and_starts_once() -> None:
    before = set(threading.enumerate())
    shared, owner = _Shared(1 << 30), Owner()
    worker = Worker("copies", native_copy(), shared.control, shared)
    assert not worker.is_here
    worker.stop()  # of what has not begun
    worker.start(owner)
    worker.start(owner)
    (thread,) = set(threading.enumerate()) - before
    assert worker.is_here and thread.name == "copies" and thread.daemon
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

    control[Control.PREAD] = ctypes.cast(read, ctypes.c_void_p).value
    engine.issue(FileMemory(tmp_path / "file"), target)
    del target
    del engine
    assert alive == [True]
