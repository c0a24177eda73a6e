"""Arrays in the heap are moved by one native call, and by Python where that cannot do it."""

from __future__ import annotations

import numpy as np
import pytest

import rlx.dist as dist
from rlx.dist import inplace
from rlx.dist.transport import Call, Outgoing, address_of

COUNT = 10_007  # f32: more than is staged, and no whole number of vectors


def native_verdicts(transport: dist.LocalTransport, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note what the native call returns from now on."""
    verdicts: list[int] = []
    mover = transport._mover
    assert mover is not None
    call = mover._call
    monkeypatch.setattr(mover, "_call", lambda table: verdicts.append(call(table)) or verdicts[-1])
    return verdicts


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_one_native_call_moves_everything(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(transport: dist.LocalTransport) -> None:
        buf = transport.alloc(4 * COUNT)
        array = transport.view(transport.this_rank, buf).view(np.float32)
        array[:] = np.arange(COUNT) + 0.5 * transport.this_rank
        verdicts = native_verdicts(transport, monkeypatch)
        for shift in (0, 1, 5):  # results that begin between two vectors
            room = np.full(ranks * COUNT + 20, -1, np.float32)
            out = room[shift : shift + ranks * COUNT]
            assert dist.all_gather(transport, buf, array, out=out) is out
            for rank in range(ranks):
                part = out[rank * COUNT : (rank + 1) * COUNT]
                assert (part == np.arange(COUNT) + np.float32(0.5) * rank).all()
            assert (room[:shift] == -1).all() and (room[shift + ranks * COUNT :] == -1).all()
        assert len(verdicts) == 3
        # A rank that is late has the others go on in Python.
        assert all(verdict < 0 or verdict & inplace.MOVED for verdict in verdicts)

    dist.run_threads(ranks, work, timeout=30)


def test_nothing_is_left_to_do_when_all_is_moved() -> None:
    def work(transport: dist.LocalTransport) -> int:
        buf = transport.alloc(4 * COUNT)
        array, out = transport.view(0, buf).view(np.float32), np.zeros(COUNT, np.float32)
        array[:] = 3
        outgoing = Outgoing(array, ((0, array.nbytes),), into=(address_of(out), array.nbytes))
        steps = list(transport.exchange(Call("all_gather", "f32"), outgoing, None))
        assert (out == 3).all()
        return len(steps)

    assert dist.run_threads(1, work) == [0]


def test_a_result_may_overlap_its_operand() -> None:
    def work(transport: dist.LocalTransport) -> list[float]:
        buf = transport.alloc(8 * COUNT)
        room = transport.view(transport.this_rank, buf).view(np.float32)
        start = transport.this_rank * COUNT
        room[start : start + COUNT] = transport.this_rank + 1
        dist.all_gather(transport, buf, room[start : start + COUNT], out=room)
        return [float(room[0]), float(room[-1]), float(room.sum())]

    assert dist.run_threads(2, work, timeout=30) == [[1.0, 2.0, 3.0 * COUNT]] * 2


def test_ranks_that_bring_different_lengths() -> None:
    def work(transport: dist.LocalTransport) -> int:
        count = COUNT + 100 * int(transport.this_rank)
        buf = transport.alloc(4 * (COUNT + 200))
        array = transport.view(transport.this_rank, buf).view(np.float32)[:count]
        array[:] = transport.this_rank
        got = dist.all_gather(transport, buf, array)
        assert (got == np.repeat([0, 1], [COUNT, COUNT + 100])).all()
        return len(got)

    assert dist.run_threads(2, work, timeout=30) == [2 * COUNT + 100] * 2
