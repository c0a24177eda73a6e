"""Ranks as forked processes, for tests: they start in milliseconds, with everything loaded and compiled."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlx.dist import SharedMemoryTransport, SymmetricHeap
from rlx.dist.native.sync import sync
from rlx.runtime.store.programs import wait_until_stored


@dataclass
class Outcome:
    """What became of a rank: its result, or its error, or the status it ended with."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    status: int = 0


def resources() -> set[str]:
    """Open descriptors, names of ours in shared memory, child processes; those that come are left behind.

    What earlier tests have dropped may go in between, and what they store in the background is waited for.
    """
    gc.collect()
    wait_until_stored()
    found = {f"child {pid}" for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}
    found |= {f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if "rlx" in name}
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the folder itself
            found.add(f"{descriptor} {os.readlink(f'/proc/self/fd/{descriptor}')}")
    return found


def fork_ranks(
    num_ranks: int,
    work: Callable[[SharedMemoryTransport], Any],
    heap_size: int = 1 << 20,
    timeout: float = 120.0,
    limit: float = 240.0,
    join: Callable[[int], bool] = lambda rank: True,
    hangs: frozenset[int] = frozenset(),
) -> list[Outcome]:
    """Run `work(transport)` in a process per rank.

    Who is not done after `limit` seconds is killed; ranks that are known to hang, when all others are done.
    """
    sync()
    heap = SymmetricHeap.shared(num_ranks, heap_size)
    pids, pipes = [], []
    for rank in range(num_ranks):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            _child(heap, rank, work, timeout, write, join(rank))
        os.close(write)
        pids.append(pid)
        pipes.append(read)
    heap.close()
    return _collect(pids, pipes, limit, hangs)


def _child(heap: SymmetricHeap, rank: int, work: Any, timeout: float, pipe: int, joins: bool) -> None:
    """Never returns: the test's process must not go on in here."""
    status, outcome = 0, Outcome()
    try:
        if joins:
            transport = SharedMemoryTransport(heap, rank, timeout)
            outcome.value = work(transport)
    except BaseException as error:
        outcome.error, outcome.trace, status = error, traceback.format_exc(), 1
    try:
        with os.fdopen(pipe, "wb") as file:
            pickle.dump(outcome, file)
    except BaseException:
        traceback.print_exc()
        status = 2
    sys.stdout.flush()
    os._exit(status)


def _collect(pids: list[int], pipes: list[int], limit: float, hangs: frozenset[int]) -> list[Outcome]:
    deadline = time.monotonic() + limit
    data = [b""] * len(pids)
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    while not hangs.issuperset(open_pipes.values()):
        ready, _, _ = select.select(list(open_pipes), [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            piece = os.read(pipe, 1 << 16)
            data[open_pipes[pipe]] += piece
            if not piece:
                del open_pipes[pipe]
                os.close(pipe)
    for pipe, rank in open_pipes.items():
        os.kill(pids[rank], signal.SIGKILL)
        os.close(pipe)
    outcomes = []
    for pid, raw in zip(pids, data, strict=True):
        _, status = os.waitpid(pid, 0)
        outcome = pickle.loads(raw) if raw else Outcome()
        outcome.status = os.waitstatus_to_exitcode(status)
        outcomes.append(outcome)
    return outcomes


def results(outcomes: list[Outcome]) -> list[Any]:
    """The values of all ranks; the first error is raised."""
    for rank, outcome in enumerate(outcomes):
        if outcome.error is not None:
            raise AssertionError(f"rank {rank} raised:\n{outcome.trace}")
        assert outcome.status == 0, f"rank {rank} ended with status {outcome.status}"
    return [outcome.value for outcome in outcomes]
