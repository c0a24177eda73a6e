"""Moments between two looks: whoever comes, fails or is stopped just there is judged as if the look were one.

Each test holds a rank at the very place where another could overtake it, so nothing here depends on speed.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rlx.dist as dist
from rlx.dist import heap as heaps
from rlx.dist import launch, rendezvous
from rlx.dist.heap import FAILED, JOINED
from rlx.dist.transports import mpi, shm
from rlx.system import linux

LONG = 60.0  # seconds, for what only a fault makes last so long
PAST = -1.0  # as a timeout: the deadline is over when the wait begins


def wait_until(condition: Callable[[], Any]) -> None:
    while not condition():
        time.sleep(0.001)


def test_an_entry_is_whole_whenever_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has just begun to say who it is has not joined yet, and is not taken for a dead one."""
    heap, seen = dist.SymmetricHeap(1, 100), set()
    write = heaps.SymmetricHeap._write

    def look_after_each_byte(self: heaps.SymmetricHeap, place: int, data: bytes) -> None:
        for index in range(len(data)):
            write(self, place + index, data[index : index + 1])
            state, pid, started, reason = heap.read_entry(0)
            seen.add((state, pid, started) if state == JOINED else (state, reason))

    monkeypatch.setattr(heaps.SymmetricHeap, "_write", look_after_each_byte)
    heap.write_entry(0, JOINED, 70_000, 90_000_000)
    assert {facts for facts in seen if facts[0] == JOINED} == {(JOINED, 70_000, 90_000_000)}
    seen.clear()
    heap.write_entry(0, FAILED, reason="out of cheese")
    assert seen == {(JOINED, 70_000, 90_000_000), (FAILED, "out of cheese")}


def look_late(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], None]) -> None:
    """Whenever the calling thread reads the clock from now on, `meanwhile` happens before it goes on."""
    me = threading.current_thread()

    def monotonic() -> float:
        now = time.monotonic()
        if threading.current_thread() is me:
            meanwhile()
        return now

    slow = SimpleNamespace(monotonic=monotonic, sleep=time.sleep)
    monkeypatch.setattr(rendezvous, "time", slow)


def test_who_comes_while_the_clock_is_read_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    is_in = threading.Event()

    def work(transport: dist.LocalTransport) -> None:
        if transport.this_rank == 1:
            is_in.wait()
            transport.barrier(timeout=LONG)
            return
        look = transport._look_around

        def look_and_wait(deadline: float) -> None:
            def let_it_come() -> None:
                is_in.set()
                wait_until(lambda: not transport._missing())

            look_late(monkeypatch, let_it_come)
            look(deadline)

        transport._look_around = look_and_wait  # type: ignore[method-assign]
        transport.barrier(timeout=PAST)

    dist.run_threads(2, work, timeout=LONG)


def test_a_signal_that_comes_while_the_clock_is_read_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = dist.LocalTransport(1, 1000, 0)
    buf, sent = transport.alloc(8), []

    def send() -> None:
        if len(sent) == 1:  # not when the deadline is set, but when it is seen to be over
            transport.put_signal(buf, np.array([1.0]), signal=3)
        sent.append(1)

    look_late(monkeypatch, send)
    transport.wait_signal(3, timeout=PAST)
    assert len(sent) == 2
    with pytest.raises(dist.Timeout, match="signal 3"):
        transport.wait_signal(3, timeout=PAST)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_survivors_agree_while_one_of_them_is_stopped(moment: str) -> None:
    """The first who sees a death is stopped where it tells the others: they neither wait nor disagree."""
    raised: dict[int, str] = {}
    is_there = threading.Event()

    def work(transport: dist.LocalTransport) -> None:
        me = int(transport.this_rank)
        transport.barrier()
        if me == 1:
            return
        why = transport._why_gone
        transport._why_gone = lambda rank: why(rank) and f"is gone, says {me}"  # type: ignore[method-assign]
        if me == 0:
            claim = transport._native.claim

            def stopped(place: int, value: int) -> None:
                if moment == "after":
                    claim(place, value)
                is_there.set()
                wait_until(lambda: 2 in raised)
                if moment == "before":
                    claim(place, value)

            transport._native = dataclasses.replace(transport._native, claim=stopped)
        else:
            is_there.wait()
        with pytest.raises(dist.RankFailed) as caught:
            transport.barrier()
        raised[me] = str(caught.value)

    dist.run_threads(3, work, timeout=LONG)
    assert raised[0] == raised[2] and f"says {0 if moment == 'after' else 2}" in raised[0]


def test_a_process_that_cannot_be_looked_at_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    me, started = os.getpid(), shm.process_started(os.getpid())
    assert not shm.process_is_gone(me, started) and shm.process_is_gone(me, started + 1)
    for number, gone in ((errno.ENOENT, True), (errno.ESRCH, True), (errno.EMFILE, False)):

        def fail(*_: Any, number: int = number, **__: Any) -> None:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr(linux, "open", fail, raising=False)
            assert shm.process_is_gone(me, started) is gone


def test_a_message_that_comes_while_the_clock_is_read_is_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    here: list[int] = []

    def monotonic() -> float:
        here.append(1)
        return 100.0

    monkeypatch.setattr(mpi, "time", SimpleNamespace(monotonic=monotonic, sleep=lambda seconds: None))
    monkeypatch.setattr(mpi, "BUSY_POLLS", 0)
    transport = mpi.MpiTransport.__new__(mpi.MpiTransport)
    job: Any = SimpleNamespace(MPI=SimpleNamespace(Exception=RuntimeError), serve=lambda: None)
    transport._job = job
    transport._look_around = lambda awaited: []  # type: ignore[method-assign, assignment]
    assert transport._poll(lambda: len(here) > 1, 50.0, [])
    assert not transport._poll(lambda: False, 50.0, [])


def made_launcher(*ends: tuple[int, bytes]) -> launch._Launcher:
    """A launcher whose ranks have all failed, in the order in which it noticed them."""
    made = launch._Launcher.__new__(launch._Launcher)
    made.ranks = [
        launch._RankProcess(rank, None, -1, -1, bytearray(words), code, True)  # type: ignore[arg-type]
        for rank, (code, words) in enumerate(ends)
    ]
    made.failed = made.ranks
    return made


def test_the_exit_code_is_that_of_the_culprit_whoever_is_noticed_first() -> None:
    blames = b'{"summary": "RankFailed", "traceback": "", "blames": [1]}'
    assert made_launcher((1, blames), (-9, b""))._exit_code() == 137
    assert made_launcher((1, blames), (3, b""), (1, blames))._exit_code() == 3
    assert made_launcher((1, blames), (1, blames))._exit_code() == 1
