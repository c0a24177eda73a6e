"""The barrier is a rendezvous, without end, and buffers may be reused at once."""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx.dist as dist
from conformance.dist_ranks import fork_ranks, results
from rlx.dist.native import sync
from rlx.dist.transports.mapped import MappedTransport

Work = Callable[[Any], Any]


def threads(n: int, work: Work) -> list[Any]:
    return dist.run_threads(n, work, 4 << 20, timeout=120)


def processes(n: int, work: Work) -> list[Any]:
    return results(fork_ranks(n, work, 4 << 20, timeout=120, limit=3600))


BOTH = pytest.mark.parametrize("start", [threads, processes])


def count_epochs(transport: MappedTransport, epochs: int) -> None:
    """Everybody counts in its own word; after a barrier nobody is behind, or more than one ahead."""
    rng = random.Random(transport.this_rank)
    buf = transport.alloc(8)
    words = [transport.view(rank, buf).view(np.int64) for rank in range(transport.num_ranks)]
    for epoch in range(1, epochs + 1):
        if rng.random() < 0.002:
            time.sleep(rng.random() * 0.002)
        words[transport.this_rank][0] = epoch
        transport.barrier()
        seen = [int(word[0]) for word in words]
        assert all(epoch <= other <= epoch + 1 for other in seen), (epoch, seen)
    transport.barrier()


@BOTH
def test_ten_thousand_epochs_with_eight_ranks(start: Callable[[int, Work], Any]) -> None:
    start(8, lambda t: count_epochs(t, 10_000))


@pytest.mark.slow
@BOTH
def test_a_million_epochs(start: Callable[[int, Work], Any]) -> None:
    start(8, lambda t: count_epochs(t, 1_000_000))


@BOTH
def test_the_counter_wraps(start: Callable[[int, Work], Any]) -> None:
    def work(transport: MappedTransport) -> None:
        buf = transport.alloc(8)
        words = [transport.view(rank, buf).view(np.int64) for rank in range(transport.num_ranks)]

        def all_come(step: int) -> None:
            """A meeting without the counters that are about to be changed."""
            words[transport.this_rank][0] = step
            while min(int(word[0]) for word in words) < step:
                time.sleep(0.001)

        # A few barriers before the 32-bit counter comes to 0, and before it changes its sign.
        for turn, last in enumerate((-5, 2**31 - 5)):
            transport.barrier()
            all_come(2 * turn + 1)  # everybody has left the barrier
            transport._table[sync.MY_EPOCH] = last
            ctypes.c_int32.from_address(transport._lines[transport.this_rank]).value = last
            all_come(2 * turn + 2)  # everybody has set its counter
            count_epochs(transport, 12)

    start(3, work)


@BOTH
def test_nobody_leaves_before_the_last_arrives(start: Callable[[int, Work], Any]) -> None:
    def work(transport: MappedTransport) -> tuple[float, float]:
        transport.barrier()
        if transport.this_rank == 1:
            time.sleep(0.2)
        arrived = time.monotonic()
        transport.barrier()
        return arrived, time.monotonic()

    times = start(4, work)
    assert min(left for _, left in times) >= max(arrived for arrived, _ in times)


def test_who_came_and_ended_while_we_looked_is_not_missed() -> None:
    """A rank that is seen missing, comes, leaves the barrier and ends, before it is asked after."""

    def work(transport: MappedTransport) -> None:
        looked = transport.view(0, transport.alloc(8))
        why_gone = transport._why_gone

        def look_late(rank: int) -> str | None:
            looked[0] = 1
            while transport._missing() or why_gone(rank) is None:
                time.sleep(0.001)
            return why_gone(rank)

        transport.barrier()
        if transport.this_rank == 0:
            transport._why_gone = look_late  # type: ignore[method-assign]
        while transport.this_rank == 1 and not looked[0]:
            time.sleep(0.001)
        transport.barrier()

    processes(2, work)


def reuse(transport: MappedTransport, rounds: int) -> None:
    """Arrays are overwritten the moment a collective returns, while one rank is slow to read."""
    rng = random.Random(100 + transport.this_rank)
    n, rank = transport.num_ranks, transport.this_rank
    slow = rank == n - 1
    small, large = 100, 20_000  # staged, and in place in the heap
    buf = transport.alloc(4 * large)
    for round_ in range(rounds):
        count = small if round_ % 3 else large
        array = transport.view(rank, buf).view(np.float32)[:count]
        expected = sum(range(n)) + n * round_
        array[:] = rank + round_
        gathered = dist.all_gather(transport, buf, array)
        array[:] = -1
        assert (gathered.reshape(n, count) == (np.arange(n) + round_)[:, None]).all()
        array[:] = rank + round_
        chunk = dist.reduce_scatter(transport, buf, array)
        array[:] = -2
        assert (chunk == expected).all()
        array[:] = rank + round_
        dist.all_reduce(transport, buf, array)
        assert (array == expected).all()
        if slow and rng.random() < 0.05:
            time.sleep(rng.random() * 0.002)
        array[:] = rank
        exchanged = dist.all_to_all(transport, buf, array)
        array[:] = -3
        assert set(exchanged.tolist()) == set(range(n))
        array[:] = round_ if rank == round_ % n else -4
        dist.broadcast(transport, buf, array, root=round_ % n)
        assert (array == round_).all()


@BOTH
def test_buffers_are_reused_with_a_slow_reader(start: Callable[[int, Work], Any]) -> None:
    start(3, lambda t: reuse(t, 1000))


@BOTH
def test_groups_do_not_disturb_each_other(start: Callable[[int, Work], Any]) -> None:
    def work(transport: MappedTransport) -> None:
        rows = transport.split([[0, 1], [2, 3]])
        columns = transport.split([[0, 2], [1, 3]])
        rank = int(transport.this_rank)
        for round_ in range(200):
            mine = np.array([round_ * 10 + rank])
            row = dist.all_gather(rows, None, mine).tolist()
            column = dist.all_gather(columns, None, mine).tolist()
            if rank == 3 and round_ % 20 == 0:
                time.sleep(0.002)
            first = rank // 2 * 2
            assert row == [round_ * 10 + first, round_ * 10 + first + 1]
            assert column == [round_ * 10 + rank % 2, round_ * 10 + rank % 2 + 2]

    start(4, work)
