"""An exchange is one native call, Python does what that cannot, and a call that comes again is shorter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx.dist as dist
from rlx.dist.heap import RING_BYTES, STAGE_BYTES
from rlx.dist.native import exchange_code
from rlx.dist.transport import DONE, CollectiveCall, Outgoing, address_of
from rlx.dist.transports import exchange

COUNT = 10_007  # f32: more than is staged, and no whole number of vectors


def verdicts_of(transport: dist.LocalTransport, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Note what the native calls return from now on."""
    verdicts: list[tuple[str, int]] = []
    natively = transport._natively

    def noted(call: Callable[[int], int], table: int, timeout: float | None) -> int:
        verdict = natively(call, table, timeout)
        verdicts.append(("again" if call is transport._exchanges.again else "run", verdict))
        return verdict

    monkeypatch.setattr(transport, "_natively", noted)
    return verdicts


def array_of(transport: dist.LocalTransport, count: int, in_heap: bool) -> tuple[Any, Any]:
    if not in_heap:
        return None, np.zeros(count, np.float32)
    buf = transport.alloc(4 * count)
    return buf, transport.view(transport.this_rank, buf).view(np.float32)


@pytest.mark.parametrize("in_heap", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_one_native_call_moves_everything(ranks: int, in_heap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(transport: dist.LocalTransport) -> None:
        buf, array = array_of(transport, COUNT, in_heap)
        array[:] = np.arange(COUNT) + 0.5 * transport.this_rank
        verdicts = verdicts_of(transport, monkeypatch)
        held = []  # an array in the place of a dropped one is taken for that at first
        for shift in (0, 1, 5):  # results that begin between two vectors
            room = np.full(ranks * COUNT + 20, -1, np.float32)
            out = room[shift : shift + ranks * COUNT]
            held.append(out)
            assert dist.all_gather(transport, buf, array, out=out) is out
            for rank in range(ranks):
                part = out[rank * COUNT : (rank + 1) * COUNT]
                assert (part == np.arange(COUNT) + np.float32(0.5) * rank).all()
            assert (room[:shift] == -1).all() and (room[shift + ranks * COUNT :] == -1).all()
        assert [verdict for _, verdict in verdicts] == [DONE] * 3

    dist.run_threads(ranks, work, timeout=120)


Calls = dict[str, Callable[[Any, Any, Any, Any], Any]]
CALLS: Calls = {
    "all_reduce": lambda t, b, a, out: dist.all_reduce(t, b, a),
    "reduce_scatter": lambda t, b, a, out: dist.reduce_scatter(t, b, a, out=out[: len(a) // t.num_ranks]),
    "all_gather": lambda t, b, a, out: dist.all_gather(t, b, a, out=out),
    "broadcast": lambda t, b, a, out: dist.broadcast(t, b, a, root=t.num_ranks - 1),
    "all_to_all": lambda t, b, a, out: dist.all_to_all(t, b, a, out=out[: len(a)]),
}


@pytest.mark.parametrize("in_heap", [True, False])
@pytest.mark.parametrize("count", [12, 30_000, 1_200_000], ids=["small", "one piece", "many pieces"])
@pytest.mark.parametrize("call", CALLS)
def test_the_native_call_does_what_python_does(call: str, count: int, in_heap: bool) -> None:
    ranks = 3

    def work(transport: dist.LocalTransport) -> list[bool]:
        rng = np.random.default_rng(int(transport.this_rank))
        buf, array = array_of(transport, count, in_heap)
        values = rng.standard_normal(count).astype(np.float32)
        found = []
        for native in (True, False):
            array[:] = values
            out = np.zeros(ranks * count, np.float32)
            if not native:
                transport._calls_before.clear()
                transport.exchange = stepwise(transport)  # type: ignore[method-assign]
            got = CALLS[call](transport, buf, array, out)
            found.append((got.copy(), array.copy()))
        return [np.array_equal(a, b) for a, b in zip(*found, strict=True)]

    assert dist.run_threads(ranks, work, 8 << 20, timeout=120) == [[True, True]] * ranks


def stepwise(transport: dist.LocalTransport) -> Callable[..., Any]:
    """An exchange that leaves all to Python."""
    move = type(transport).exchange
    return lambda call, out, timeout: move(transport, call, out._replace(into=None), timeout)


def test_a_call_that_comes_again_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(transport: dist.LocalTransport) -> list[tuple[str, int]]:
        buf, array = array_of(transport, COUNT, True)
        out = np.zeros(2 * COUNT, np.float32)
        verdicts = verdicts_of(transport, monkeypatch)
        for value in range(3):
            array[:] = value + transport.this_rank
            assert dist.all_gather(transport, buf, array, out=out) is out
            assert (out == np.repeat([value, value + 1], COUNT)).all()
        return verdicts

    assert dist.run_threads(2, work, timeout=120) == [[("run", DONE), ("again", DONE), ("again", DONE)]] * 2


def test_an_array_that_has_changed_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(transport: dist.LocalTransport) -> list[tuple[str, int]]:
        array, verdicts = np.ones(64, np.float32), verdicts_of(transport, monkeypatch)
        dist.all_reduce(transport, None, array)
        array.flags.writeable = False
        with pytest.raises(dist.TransportError, match="read-only"):
            dist.all_reduce(transport, None, array)
        array.flags.writeable = True
        dist.all_reduce(transport, None, array)
        assert dist.all_reduce(transport, None, array, dist.ReduceKind.MAX)[0] == 4
        return verdicts

    expected = [("run", DONE), ("again", exchange_code.CHANGED), ("run", DONE), ("run", DONE)]
    assert dist.run_threads(2, work, timeout=120) == [expected] * 2


def test_facts_tell_arrays_apart() -> None:
    whole = np.zeros((4, 6), np.float32)
    same, others = whole[:], [whole[1:], whole.T, whole.view(np.int32), whole.reshape(6, 4), whole[:, :3]]

    def values(array: Any) -> list[int]:
        words = [(value & mask) for _, value, mask in exchange.facts_of(array)]
        return words[:2] + words[3:]  # without the place of the sizes, which is the object's own

    assert values(whole)[0] == address_of(whole)
    assert values(same)[0:3] == values(whole)[0:3]
    assert all(values(other) != values(whole) for other in others)


def test_only_some_know_the_call() -> None:
    """Who repeats a call meets who makes it for the first time, and who brings something else."""

    def work(transport: dist.LocalTransport) -> None:
        buf, array = array_of(transport, COUNT, True)
        out = np.zeros(2 * COUNT, np.float32)
        for turn in range(3):
            array[:] = turn
            if transport.this_rank == 0:
                got = dist.all_gather(transport, buf, array, out=out)
            else:  # elsewhere, and the last time longer
                got = dist.all_gather(transport, None, np.full(COUNT + 3 * (turn == 2), turn, np.float32))
            assert (got == turn).all() and len(got) == 2 * COUNT + 3 * (turn == 2)

    with pytest.raises(dist.LengthMismatch):  # of the last turn, by rank 0, whose `out` is too short
        dist.run_threads(2, work, timeout=120)


def test_nothing_is_left_to_do_when_all_is_moved() -> None:
    def work(transport: dist.LocalTransport) -> int:
        _, array = array_of(transport, COUNT, True)
        out = np.zeros(COUNT, np.float32)
        array[:] = 3
        outgoing = Outgoing(array, ((0, array.nbytes),), into=(address_of(out), array.nbytes))
        steps = list(transport.exchange(CollectiveCall("all_gather", "f32"), outgoing, None))
        assert (out == 3).all()
        return len(steps)

    assert dist.run_threads(1, work) == [0]


@pytest.mark.parametrize("in_heap", [True, False])
def test_a_result_may_overlap_its_operand(in_heap: bool) -> None:
    def work(transport: dist.LocalTransport) -> None:
        buf, room = array_of(transport, 2 * COUNT, in_heap)
        me = int(transport.this_rank)
        start = me * COUNT
        room[start : start + COUNT] = me + 1
        dist.all_gather(transport, buf, room[start : start + COUNT], out=room)
        assert (room == np.repeat([1, 2], COUNT)).all()
        room[:] = np.repeat([10 * me, 10 * me + 1], COUNT)
        dist.all_to_all(transport, buf, room, out=room)
        assert (room == np.repeat([me, 10 + me], COUNT)).all()
        room[:] = np.arange(2 * COUNT) % 3 + me
        dist.reduce_scatter(transport, buf, room, out=room[:COUNT])
        assert (room[:COUNT] == 2 * ((start + np.arange(COUNT)) % 3) + 1).all()

    dist.run_threads(2, work, timeout=120)


def test_ranks_that_bring_different_lengths() -> None:
    def work(transport: dist.LocalTransport) -> int:
        count = COUNT + 100 * int(transport.this_rank)
        buf, array = array_of(transport, COUNT + 200, True)
        array = array[:count]
        array[:] = transport.this_rank
        got = dist.all_gather(transport, buf, array)
        assert (got == np.repeat([0, 1], [COUNT, COUNT + 100])).all()
        return len(got)

    assert dist.run_threads(2, work, timeout=120) == [2 * COUNT + 100] * 2


def test_the_ring_has_room_for_the_largest_piece_and_spares_the_last_two() -> None:
    transport = dist.LocalTransport(1, 4096, 0)
    ring, before = transport._exchanges, []
    rng = np.random.default_rng(5)
    for used in rng.integers(1, STAGE_BYTES // 64 + 1, 2000) * 64:
        start, end = ring.position, ring.position + int(used)
        assert end <= RING_BYTES
        assert all(end <= low or high <= start for low, high in before)
        before = [*before[-1:], (start, end)]
        ring.advance(int(used))
