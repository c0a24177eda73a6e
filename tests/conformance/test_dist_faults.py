"""Ranks that die, stop, raise or never come: survivors raise in time and agree, and nothing is left."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import rlx.dist as dist
from conformance.dist_ranks import Outcome, fork_ranks, resources, results
from rlx.dist.native import exchange_code
from rlx.dist.transports.mapped import MappedTransport

RANKS, VICTIM = 3, 1
LONG_DEADLINE = 120.0  # seconds, which pass only where a fault is not noticed
# For one that is stopped or never comes survivors look around so often, once nobody else is missing; then
# their deadline is over. So none of them can be late itself, however busy the machine is.
PATIENT_LOOKS = 20
COUNT = 40_000  # in the heap it is used in place: a meeting before and one after

CALLS: dict[str, Callable[[MappedTransport, Any, Any], object]] = {
    "barrier": lambda t, b, a: t.barrier(),
    "all_reduce": dist.all_reduce,
    "all_gather": dist.all_gather,
    "reduce_scatter": dist.reduce_scatter,
    "broadcast": lambda t, b, a: dist.broadcast(t, b, a, root=VICTIM),
    "all_to_all": dist.all_to_all,
}
PHASES = ("before", "inside", "native", "after")
FAULTS = ("kill", "stop", "raise", "leave", "never join", "abort")


@dataclass(frozen=True)
class Fault:
    kind: str
    phase: str
    call: str
    in_heap: bool

    @property
    def is_late(self) -> bool:
        """Whether only the deadline tells it."""
        return self.kind in ("stop", "never join")

    def __str__(self) -> str:
        return f"{self.kind} {self.phase} {self.call}{' in the heap' if self.in_heap else ''}".replace(
            " ", "-"
        )


EVERY_FAULT = [
    Fault(kind, phase, call, in_heap)
    for kind in FAULTS
    for phase in (PHASES if kind != "never join" else ("before",))
    for call in CALLS
    if (phase, call) != ("native", "barrier")
    for in_heap in (False, True)
]


class Boom(Exception):
    """What a failing rank raises."""


def strike(transport: MappedTransport, kind: str) -> None:
    """What happens to the victim."""
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "raise":
        raise Boom("on purpose")
    elif kind == "leave":
        transport.close()
        raise SystemExit(0)
    elif kind == "abort":
        transport.abort("told to")
        raise SystemExit(0)


def strike_inside(transport: MappedTransport, kind: str) -> None:
    """Let the next meeting of the victim be its last: it has sent its data, the others have not read them."""
    move = transport.exchange
    meet = transport._meet

    def last_meeting(*args: Any, **kwargs: Any) -> bool:
        agreed = meet(*args, **kwargs)
        strike(transport, kind)
        return agreed

    transport._meet = last_meeting  # type: ignore[method-assign]
    transport._calls_before.clear()
    stepwise = lambda call, out, timeout: move(call, out._replace(into=None), timeout)  # noqa: E731
    transport.exchange = stepwise  # type: ignore[method-assign]


def strike_natively(transport: MappedTransport, kind: str) -> None:
    """The same inside the native call: between its first meeting and what it copies or reduces."""
    exchanges, meet = transport._exchanges, transport._native.barrier

    def last_meeting(post: int) -> int:
        agreed = meet(post)
        if kind in ("kill", "stop"):
            strike(transport, kind)
            return agreed
        return -1  # as if it had to wait, where Python looks around and may raise

    transport._look_around = lambda deadline: strike(transport, kind)  # type: ignore[method-assign]
    hook = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(last_meeting)
    exchanges._common[exchange_code.BARRIER] = ctypes.cast(hook, ctypes.c_void_p).value
    transport._calls_before.clear()
    transport.__dict__["hook"] = hook  # it lives as long as who may call it


def watch_looks(transport: MappedTransport, fault: Fault) -> None:
    """Let the deadline be over after some looks, and see to it that no look misses what there is to see."""
    look_around, looks = transport._look_around, 0

    def look(deadline: float) -> None:
        nonlocal looks
        looks = looks + 1 if fault.is_late and transport._missing() == [VICTIM] else 0
        over, gone = looks > PATIENT_LOOKS, transport._why_gone(VICTIM) is not None
        look_around(time.monotonic() if over else deadline)
        still_missing = VICTIM in transport._missing()
        assert not (still_missing and (gone or over)), f"{fault}: a look has not seen who is missing"

    transport._look_around = look  # type: ignore[method-assign]


def scenario(transport: MappedTransport, fault: Fault) -> None:
    """Two calls go well, then the victim is struck; survivors raise at the first look that can tell."""
    call, buf = CALLS[fault.call], transport.alloc(4 * COUNT)
    array = np.zeros(COUNT, np.float32)
    if fault.in_heap:
        array = transport.view(transport.this_rank, buf).view(np.float32)
    if fault.kind != "never join":
        call(transport, buf, array)
        call(transport, buf, array)
    victim = transport.this_rank == VICTIM
    if not victim:
        watch_looks(transport, fault)
    if victim and fault.phase == "before":
        strike(transport, fault.kind)
    if victim and fault.phase == "inside":
        strike_inside(transport, fault.kind)
    if victim and fault.phase == "native":
        strike_natively(transport, fault.kind)
    for _ in range(11):
        call(transport, buf, array)
        if victim:
            strike(transport, fault.kind)
    raise AssertionError("the others did not notice")


def check_survivors(fault: Fault, outcomes: list[Outcome]) -> None:
    errors = [outcome.error for rank, outcome in enumerate(outcomes) if rank != VICTIM]
    for error in errors:
        assert isinstance(error, dist.RanksMissing), f"{fault}: {error!r}"
        assert isinstance(error, dist.Timeout if fault.is_late else dist.RankFailed), f"{fault}: {error!r}"
        assert error.ranks == (VICTIM,), f"{fault}: {error}"
        assert f"rank {VICTIM}" in str(error)
    assert len({(type(error), str(error)) for error in errors}) == 1, f"{fault}: they disagree: {errors}"


def run_fault(fault: Fault) -> None:
    outcomes = fork_ranks(
        RANKS,
        lambda t: scenario(t, fault),
        timeout=LONG_DEADLINE,
        limit=2 * LONG_DEADLINE,
        join=lambda rank: rank != VICTIM or fault.kind != "never join",
        hangs=frozenset([VICTIM]) if fault.kind == "stop" else frozenset(),
    )
    check_survivors(fault, outcomes)


SAMPLE = random.Random(7).sample(EVERY_FAULT, 30)


def check_faults(faults: list[Fault]) -> None:
    results(fork_ranks(RANKS, lambda t: CALLS["all_reduce"](t, None, np.zeros(4, np.float32)) is None))
    before = resources()
    for fault in faults:
        run_fault(fault)
        assert resources() <= before, f"{fault} left something behind"
    assert results(fork_ranks(RANKS, lambda t: float(dist.all_reduce(t, None, np.ones(1))[0]))) == [3.0] * 3


@pytest.mark.parametrize("part", range(5))
def test_a_sample_of_faults(part: int) -> None:
    check_faults(SAMPLE[part::5])


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
def test_every_fault(kind: str) -> None:
    check_faults([fault for fault in EVERY_FAULT if fault.kind == kind])


def run_in_threads(fault: Fault) -> list[Outcome]:
    """Like the processes, for faults that a thread can have; its deadline ends one that hangs."""
    transports = dist.LocalTransport.fan_out(RANKS, 1 << 20, timeout=LONG_DEADLINE)
    outcomes = [Outcome() for _ in range(RANKS)]

    def run(rank: int) -> None:
        try:
            scenario(transports[rank], fault)
        except BaseException as error:
            outcomes[rank].error = error

    joins = [rank for rank in range(RANKS) if rank != VICTIM or fault.kind != "never join"]
    started = [threading.Thread(target=run, args=(rank,)) for rank in joins]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join(2 * LONG_DEADLINE)
        assert not thread.is_alive()
    return outcomes


KINDS_OF_THREADS = pytest.mark.parametrize("kind", ["raise", "leave", "never join", "abort"])


@KINDS_OF_THREADS
def test_a_sample_of_faults_of_threads(kind: str) -> None:
    faults = [fault for fault in EVERY_FAULT if fault.kind == kind]
    for fault in random.Random(3).sample(faults, 4):
        check_survivors(fault, run_in_threads(fault))


@pytest.mark.slow
@KINDS_OF_THREADS
def test_every_fault_of_threads(kind: str) -> None:
    for fault in EVERY_FAULT:
        if fault.kind == kind:
            check_survivors(fault, run_in_threads(fault))


def test_a_failed_transport_keeps_raising_the_same_error() -> None:
    def work(transport: dist.LocalTransport) -> list[str]:
        if transport.this_rank == 1:
            return []
        told = []
        for attempt in (
            transport.barrier,
            lambda: dist.all_reduce(transport, None, np.ones(1)),
            transport.barrier,
        ):
            with pytest.raises(dist.RankFailed) as caught:
                attempt()
            told.append(str(caught.value))
        return told

    told = dist.run_threads(2, work, timeout=LONG_DEADLINE)[0]
    assert len(set(told)) == 1 and "rank 1 closed its transport" in told[0]


def test_a_timeout_of_a_signal_can_be_retried() -> None:
    def work(transport: dist.LocalTransport) -> None:
        buf = transport.alloc(8)
        if transport.this_rank == 0:
            with pytest.raises(dist.Timeout, match="signal 5"):
                transport.wait_signal(5, timeout=0.05)
            transport.barrier()
            transport.wait_signal(5)
        else:
            transport.barrier()
            transport.put_signal(buf.on(0), np.array([1.0]), signal=5)

    dist.run_threads(2, work, timeout=LONG_DEADLINE)


def test_a_deadline_is_neither_early_nor_missed() -> None:
    """Nobody is blamed before it is over, and the first look after it blames who is missing."""
    transport = dist.LocalTransport.fan_out(2, 1 << 20)[0]
    look_around, ends, deadlines = transport._look_around, [], set()

    def look(deadline: float) -> None:
        begin = time.monotonic()
        deadlines.add(deadline)
        look_around(deadline)
        ends.append(begin)

    transport._look_around = look  # type: ignore[method-assign]
    begin = time.monotonic()
    with pytest.raises(dist.Timeout) as caught:
        transport.barrier(timeout=0.2)
    (deadline,) = deadlines
    assert caught.value.ranks == (1,)
    assert time.monotonic() >= deadline >= begin + 0.2
    assert all(looked < deadline for looked in ends)


def test_who_waits_for_a_signal_learns_of_a_death() -> None:
    def work(transport: dist.SharedMemoryTransport) -> None:
        transport.barrier()
        if transport.this_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        transport.wait_signal()

    outcomes = fork_ranks(2, work, timeout=LONG_DEADLINE, limit=2 * LONG_DEADLINE)
    # No Timeout, which the deadline would have raised: it sees the death.
    assert isinstance(outcomes[0].error, dist.RankFailed) and outcomes[0].error.ranks == (1,)


def test_a_group_without_the_victim_goes_on() -> None:
    def work(transport: dist.SharedMemoryTransport) -> int:
        group = transport.split([[0, 2], [1, 3]])
        if transport.this_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            for _ in range(200):
                total = int(dist.all_reduce(group, None, np.ones(1, np.int64))[0])
        except dist.RankFailed as error:
            assert error.ranks == (0,) and "rank 1 of the job" in str(error)
            return -1
        return total

    outcomes = fork_ranks(4, work)
    assert [outcome.value for outcome in outcomes] == [2, None, 2, -1]
