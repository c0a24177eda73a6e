"""Fixtures of the driver's conformance suite: the same tests run over every device and copy engine."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlx.driver import Buffer, Device, FileMemory, open_device
from rlx.driver.copy import CopyEngine, SyncCopy, ThreadCopy
from rlx.driver.copy.native import CopyControl

DEVICES = ("cpu", "opencl")

Hold = Callable[[CopyEngine], AbstractContextManager[None]]


@pytest.fixture(params=DEVICES)
def on(request: pytest.FixtureRequest, require: Callable[[str], None]) -> Device:
    """The device under test; one that is missing skips, or fails under RLX_REQUIRE."""
    if request.param != "cpu":
        require(request.param)
    return open_device(request.param)


@pytest.fixture(params=["sync", "thread", "opencl"])
def engine(request: pytest.FixtureRequest, require: Callable[[str], None]) -> Iterator[CopyEngine]:
    """The copy engine under test."""
    if request.param == "opencl":
        require("opencl")
    made: dict[str, Callable[[], CopyEngine]] = {
        "sync": SyncCopy,
        "thread": ThreadCopy,
        "opencl": lambda: open_device("opencl").copy_engine(),
    }
    with made[request.param]() as engine:
        yield engine


@pytest.fixture
def place(engine: CopyEngine) -> Callable[[Any], Buffer]:
    """Puts an array where the engine under test copies to and from."""
    device = "opencl" if type(engine).__name__ == "QueueCopy" else "cpu"
    return lambda array: Buffer.of(np.ascontiguousarray(array)).to_device(device)


@pytest.fixture
def hold(tmp_path: Path) -> Hold:
    """`with hold(engine):` no copy issued to the engine finishes before the block ends."""

    @contextmanager
    def held(engine: CopyEngine) -> Iterator[None]:
        if isinstance(engine, ThreadCopy):
            with _hold_thread(engine, tmp_path / "held"):
                yield
        else:
            with _hold_queue(engine):
                yield

    return held


@contextmanager
def _hold_thread(engine: ThreadCopy, path: Path) -> Iterator[None]:
    """The worker reads a file by a function of ours, which does not return before it may."""
    released = threading.Event()

    @ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    def slow_read(descriptor: int, into: int, nbytes: int, offset: int) -> int:
        released.wait()
        return nbytes

    path.write_bytes(b"x")
    control = engine._shared.control
    original = int(control[CopyControl.PREAD])
    control[CopyControl.PREAD] = ctypes.cast(slow_read, ctypes.c_void_p).value
    token = engine.issue(FileMemory(path), np.zeros(1, np.uint8))
    try:
        yield
    finally:
        released.set()
        engine.wait(token)
        control[CopyControl.PREAD] = original


@contextmanager
def _hold_queue(engine: Any) -> Iterator[None]:
    import pyopencl

    gate = pyopencl.UserEvent(engine._device.context)
    pyopencl.enqueue_barrier(engine._queue, wait_for=[gate])
    try:
        yield
    finally:
        gate.set_status(pyopencl.command_execution_status.COMPLETE)
