"""Arrays that other processes read in a rank's own memory: where they may, where not, and failures."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Any

import numpy as np
import pytest

import rlx.dist as dist
from conformance.dist_ranks import fork_ranks, results
from rlx.dist.native import exchange_code
from rlx.dist.transport import DONE, Outgoing
from rlx.dist.transports import mapped, remote

COUNT = 100_003  # f32: enough to be read remotely, and no whole number of lines


def values(rank: int, count: int = COUNT) -> Any:
    return (np.arange(count) % 1000 + 1000 * rank).astype(np.float32)


def check_gather(transport: dist.SharedMemoryTransport, rounds: int = 3) -> None:
    """Gather and exchange the same arrays several times, with other values each time."""
    n, me = transport.num_ranks, int(transport.this_rank)
    count = COUNT // n * n
    array, gathered, swapped = (np.zeros(size, np.float32) for size in (count, n * count, count))
    for turn in range(rounds):
        array[:] = values(me, count) + turn
        dist.all_gather(transport, None, array, out=gathered)
        dist.all_to_all(transport, None, array, out=swapped)
        array[:] = -1
        whole = [values(rank, count) + turn for rank in range(n)]
        assert np.array_equal(gathered, np.concatenate(whole))
        assert np.array_equal(swapped, np.concatenate([np.split(a, n)[me] for a in whole]))
        array[:] = turn + me
        dist.all_reduce(transport, None, array)
        assert (array == n * turn + n * (n - 1) // 2).all()


def verdicts_of(transport: dist.SharedMemoryTransport) -> list[int]:
    """Note what the native calls return from now on."""
    seen: list[int] = []
    natively = transport._natively

    def noted(*given: Any) -> int:
        verdict = natively(*given)
        seen.append(verdict)
        return verdict

    transport._natively = noted  # type: ignore[method-assign]
    return seen


def needs_remote_reading() -> None:
    token = remote.Token()
    if remote.read(os.getpid(), token.address, remote.TOKEN_BYTES) is None:
        pytest.skip("this system does not let processes read each other's memory")


@pytest.mark.parametrize("ranks", [2, 3])
def test_arrays_of_ranks_that_are_far_away(ranks: int) -> None:
    needs_remote_reading()

    def work(transport: dist.SharedMemoryTransport) -> bool:
        transport.barrier()
        transport._exchanges.count_as_far()
        array, seen = values(int(transport.this_rank)), verdicts_of(transport)
        outgoing = Outgoing(array, ((0, array.nbytes),), into=(0, array.nbytes))
        assert transport._away(outgoing, 0) == -array.ctypes.data
        check_gather(transport)
        return all(verdict == DONE for verdict in seen)

    assert results(fork_ranks(ranks, work)) == [True] * ranks


@pytest.mark.parametrize("who", [0, 1])
def test_one_rank_may_not_read_the_others(who: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(transport: dist.SharedMemoryTransport) -> bool:
        if transport.this_rank == who:
            monkeypatch.setattr(remote, "read", lambda pid, address, nbytes: None)
        transport.barrier()
        transport._exchanges.count_as_far()
        check_gather(transport)
        return transport._reads_remotely()

    readable = results(fork_ranks(2, work))
    assert readable[who] is False


def test_a_process_that_is_another_is_not_read() -> None:
    """Such as one of another container, whose number means somebody else here."""

    def work(transport: dist.SharedMemoryTransport) -> bool:
        transport.barrier()
        transport._heap.write_token(int(transport.this_rank), transport._token.address, b"x" * 16)
        transport.barrier()
        return transport._reads_remotely()

    assert results(fork_ranks(2, work)) == [False, False]


def test_ranks_disagree_about_how_far_they_are() -> None:
    def work(transport: dist.SharedMemoryTransport) -> bool:
        transport.barrier()
        if transport.this_rank == 1:
            transport._exchanges.count_as_far()
        check_gather(transport)
        return transport._exchanges.far

    assert len(set(results(fork_ranks(2, work)))) == 1


def test_lengths_differ_where_arrays_are_far() -> None:
    def work(transport: dist.SharedMemoryTransport) -> None:
        transport.barrier()
        transport._exchanges.count_as_far()
        counts = [COUNT, COUNT + 50]
        got = dist.all_gather(transport, None, values(int(transport.this_rank), counts[transport.this_rank]))
        assert np.array_equal(got, np.concatenate([values(rank, count) for rank, count in enumerate(counts)]))

    results(fork_ranks(2, work))


def test_memory_that_can_no_longer_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_remote_reading()
    monkeypatch.setattr(mapped, "GONE_SECONDS", 0.05)

    def work(transport: dist.SharedMemoryTransport) -> None:
        transport.barrier()
        transport._exchanges.count_as_far()
        assert transport._reads_remotely()
        transport.barrier()  # nobody ends before all have found that out
        if transport.this_rank == 0:
            transport._exchanges.set_processes([2**22 + 1] * 2)  # more than any process's number
        array = values(int(transport.this_rank))
        dist.all_gather(transport, None, array, out=np.zeros(2 * COUNT, np.float32))

    unable, other = (outcome.error for outcome in fork_ranks(2, work))
    assert isinstance(unable, dist.TransportError) and "can no longer be read" in str(unable)
    assert isinstance(other, dist.RankFailed) and other.ranks == (0,) and "can no longer" in str(other)


def test_a_death_while_its_memory_is_read_is_named() -> None:
    needs_remote_reading()

    def work(transport: dist.SharedMemoryTransport) -> None:
        transport.barrier()
        transport._exchanges.count_as_far()
        assert transport._reads_remotely()
        transport.barrier()  # nobody ends before all have found that out
        array, out = values(int(transport.this_rank)), np.zeros(2 * COUNT, np.float32)

        def last_meeting(post: int) -> int:
            verdict = transport._native.barrier(post)
            while verdict < 0:
                verdict = transport._native.wait(post)
            os.kill(os.getpid(), signal.SIGKILL)
            return 0

        hook = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(last_meeting)
        if transport.this_rank == 1:
            transport._exchanges._common[exchange_code.BARRIER] = ctypes.cast(hook, ctypes.c_void_p).value
        for _ in range(3):
            dist.all_gather(transport, None, array, out=out)

    error = fork_ranks(2, work)[0].error
    assert isinstance(error, dist.RankFailed) and error.ranks == (1,)
