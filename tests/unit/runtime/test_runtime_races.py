"""Moments between a look and what is done about it, in the runtime: each test holds a thread just there."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlx.codegen.native.irtext import Function, Value, constant
from rlx.driver.region import FileMemory
from rlx.runtime.native import code as native
from rlx.runtime.native import reader as reader_module
from rlx.runtime.native.reader import Fill, Reader, ReaderControl
from rlx.runtime.store import programs, trust

HOOK = ReaderControl.FIELDS - 1  # a field of the control block that nobody uses


@pytest.fixture
def stopped_claims(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The reader's native code, built so that it calls the hook between a look and the claim after it."""
    claim = Function.compare_exchange

    def stopped(f: Function, place: Value, expected: Value, new: Value) -> tuple[Value, Value]:
        hook = f.load("ptr", f.gep(place, HOOK - ReaderControl.NEXT, "i64"))
        f.branch(f.cmp("ne", hook, constant("ptr", 0)), lambda: f.call(hook, []))
        return claim(f, place, expected, new)

    with monkeypatch.context() as patch:
        patch.setattr(Function, "compare_exchange", stopped)
        functions = reader_module._Functions(native.build(reader_module.emit_reader))
    monkeypatch.setattr(reader_module, "_functions", lambda: functions)
    return functions


def test_a_claim_of_the_run_before_is_none_in_this_one(stopped_claims: Any, tmp_path: Path) -> None:
    """A thread looks which fill is free, and claims it when the next run has come as far: there the place is
    still read."""
    path = tmp_path / "numbers"
    path.write_bytes(bytes(i // 100 for i in range(200)))
    ring = np.zeros(100, np.uint8)
    reader = Reader(FileMemory(path), [Fill(100 * i, ring.ctypes.data, 100, i, i) for i in range(2)])
    reader.pause(True)  # only those claim whom the test lets
    claim = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)(
        stopped_claims._code.address("rlx_claim_fill")
    )
    publish = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(
        stopped_claims._code.address("rlx_publish")
    )
    has_looked, may_claim = threading.Event(), threading.Event()
    slow = threading.Thread(target=claim, args=(reader.address, 1))

    @ctypes.CFUNCTYPE(None)
    def hook() -> None:
        if threading.current_thread() is slow:
            has_looked.set()
            may_claim.wait()

    reader.begin()
    reader.arrive(0, 0, 1)
    publish(reader.address, 1)  # from here on the second fill is free
    reader._control[HOOK] = ctypes.cast(hook, ctypes.c_void_p).value
    slow.start()
    has_looked.wait()
    reader.arrive(1, 1, 2)
    assert set(ring) == {1}
    reader.settle()
    reader.begin()
    reader.arrive(0, 0, 1)
    may_claim.set()
    slow.join()
    assert set(ring) == {0}  # what the run reads at this position
    reader.arrive(1, 1, 2)
    assert set(ring) == {1}
    reader.settle()
    reader._control[HOOK] = 0


def test_everybody_who_waits_for_a_stored_program_waits(tmp_path: Path) -> None:
    may_store, path = threading.Event(), tmp_path / "program"
    storing = threading.Thread(target=may_store.wait)
    joined, join = threading.Semaphore(0), storing.join
    storing.join = lambda timeout=None: (joined.release(), join())[1]  # type: ignore[method-assign]
    storing.start()
    programs._storing[path] = storing
    over: list[bool] = []

    def wait() -> None:
        programs.wait_until_stored(path)
        over.append(storing.is_alive())

    waiting = [threading.Thread(target=wait) for _ in range(2)]
    for thread in waiting:
        thread.start()
    joined.acquire()
    joined.acquire()  # both are there; the second found the thread although the first waits for it
    may_store.set()
    for thread in waiting:
        thread.join()
    assert over == [False, False] and path not in programs._storing


def test_an_acceptance_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    trust.accept(b"code")
    write = Path.write_bytes

    def half(path: Path, data: bytes) -> int:
        write(path, data[:5])
        assert trust.accepted(b"code")  # by somebody who asks while it is accepted once more
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", half)
    trust.accept(b"code")
    assert trust.accepted(b"code") and not trust.accepted(b"other code")
    assert len(list((tmp_path / "rlx" / "trusted").iterdir())) == 1
