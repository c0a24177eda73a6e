"""Ranks, buffers, the allocator, errors, and one-sided access on a single rank."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlx.dist as dist
from rlx.dist import LocalTransport, Rank, SymmetricBuffer, SymmetricHeap
from rlx.dist.allocator import SymmetricAllocator
from rlx.dist.heap import FAILED, JOINED
from rlx.dist.launch import mpi_command
from rlx.dist.transport import group_of
from rlx.errors import CollectiveError, RlxError


def one() -> LocalTransport:
    return LocalTransport(1, 1000, 0)


def test_ranks_are_ints() -> None:
    assert sorted([Rank(2), Rank(0), 1]) == [0, 1, 2]
    assert {Rank(1): "a"}[1] == "a"
    with pytest.raises(dist.UnknownRank):
        Rank(-1)


@pytest.mark.parametrize(
    ("offset", "length"), [(-1, 1), (0, 1001), (1000, 1), (2**63 - 1, 2**63 - 1), (-(2**63), 8), (8, -1)]
)
def test_regions_outside_the_heap_are_refused(offset: int, length: int) -> None:
    transport = one()
    for call in (
        lambda: transport.put(SymmetricBuffer(0, offset, length), b""),
        lambda: transport.get(SymmetricBuffer(0, offset, length), np.empty(0, np.uint8)),
        lambda: transport.view(0, SymmetricBuffer(0, offset, length)),
    ):
        with pytest.raises(dist.OutOfBounds) as caught:
            call()
        error = caught.value
        assert (error.rank, error.offset, error.len, error.heap_size) == (0, offset, length, 1000)


def test_fixed_width_integers_do_not_wrap() -> None:
    huge = SymmetricBuffer(0, np.int64(2**63 - 1), np.int64(1))  # type: ignore[arg-type]
    with pytest.raises(dist.OutOfBounds):
        one().view(0, huge)


def test_lengths_must_agree() -> None:
    transport = one()
    buf = transport.alloc(16)
    with pytest.raises(dist.LengthMismatch) as caught:
        transport.put(buf, np.zeros(3))
    assert (caught.value.expected, caught.value.got) == (16, 24)
    with pytest.raises(dist.LengthMismatch):
        transport.get(buf, np.zeros(1))
    with pytest.raises(dist.LengthMismatch):
        dist.all_reduce(transport, buf, np.zeros(3))


def test_unknown_ranks() -> None:
    transport = one()
    with pytest.raises(dist.UnknownRank) as caught:
        transport.put(SymmetricBuffer(3, 0, 0), b"")
    assert (caught.value.rank, caught.value.num_ranks) == (3, 1)
    with pytest.raises(dist.UnknownRank):
        dist.broadcast(transport, None, np.zeros(1), root=1)
    with pytest.raises(dist.UnknownRank):
        SymmetricHeap(2, 10).rank_view(2)
    with pytest.raises(dist.UnknownRank):
        LocalTransport(2, 10, 2)


def test_errors_are_rlx_errors_and_survive_pickling() -> None:
    errors: list[CollectiveError] = [
        dist.OutOfBounds(1, 2, 3, 4),
        dist.LengthMismatch(1, 2),
        dist.UnknownRank(5, 2),
        dist.TransportError("why"),
        dist.RankFailed([1], "died"),
        dist.Timeout([1, 2], "late"),
    ]
    for error in errors:
        assert isinstance(error, RlxError)
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and str(again) == str(error) and again.__dict__ == error.__dict__
    assert isinstance(errors[-1], TimeoutError)


def test_put_and_get_take_any_contiguous_data() -> None:
    transport = one()
    buf = transport.alloc(8)
    for data in (b"12345678", memoryview(b"abcdefgh"), np.arange(8, dtype=np.uint8), np.ones(2, np.float32)):
        transport.put(buf, data)
        back = bytearray(8)
        transport.get(buf, back)
        assert bytes(back) == bytes(np.asarray(data).tobytes())
    with pytest.raises(dist.TransportError, match="writable"):
        transport.get(buf, np.zeros((2, 8), np.uint8)[:, ::2])


def test_collectives_refuse_what_they_cannot_do() -> None:
    transport = one()
    with pytest.raises(dist.TransportError, match="NumPy array"):
        dist.all_reduce(transport, None, [1, 2])  # type: ignore[arg-type]
    frozen = np.zeros(3)
    frozen.setflags(write=False)
    with pytest.raises(dist.TransportError, match="read-only"):
        dist.all_reduce(transport, None, frozen)
    with pytest.raises(dist.TransportError, match="0-d"):
        dist.reduce_scatter(transport, None, np.array(1.0))
    with pytest.raises(RlxError, match="ReduceKind"):
        dist.all_reduce(transport, None, np.zeros(1), "sum")  # type: ignore[arg-type]
    with pytest.raises(RlxError, match="unknown dtype"):
        dist.all_reduce(transport, None, np.zeros(2, "datetime64[s]"))
    with pytest.raises(RlxError, match="cast"):
        dist.all_reduce(transport, None, np.zeros(2, bool), dist.ReduceKind.MEAN)
    with pytest.raises(dist.TransportError, match="shape"):
        dist.all_to_all(transport, None, np.zeros(2), out=np.zeros(3))
    with pytest.raises(dist.LengthMismatch):
        dist.all_gather(transport, None, np.zeros(2), out=np.zeros(3))


def test_a_closed_transport_says_so() -> None:
    transport = one()
    transport.close()
    with pytest.raises(dist.TransportError, match="closed"):
        transport.barrier()


def test_groups_must_be_a_partition() -> None:
    for groups in ([[0, 1]], [[0, 1], [1, 2]], [[0], [1], [3]]):
        with pytest.raises(dist.TransportError, match="once"):
            group_of(0, groups, 3)


def test_a_shared_heap_knows_itself() -> None:
    heap = SymmetricHeap.shared(2, 5000)
    heap.rank_view(1)[:] = 7
    heap.write_entry(1, JOINED, 42, 43)
    heap.write_entry(0, FAILED, reason="x" * 5000)
    import os

    other = SymmetricHeap.attach(os.dup(heap.fileno()))
    assert (other.num_ranks, other.heap_size) == (2, 5000)
    assert (other.rank_view(1) == 7).all() and not other.rank_view(0).any()
    assert other.read_entry(1) == (JOINED, 42, 43, "")
    assert other.read_entry(0)[3].startswith("xxx") and other.read_entry(1) == (JOINED, 42, 43, "")
    other.close()
    heap.close()
    read, write = os.pipe()
    with pytest.raises(dist.TransportError, match="not a symmetric heap"):
        SymmetricHeap.attach(read)
    os.close(read)
    os.close(write)


def test_a_rank_can_be_taken_once() -> None:
    heap = SymmetricHeap.shared(2, 100)
    transport = dist.SharedMemoryTransport(heap, 0)
    with pytest.raises(dist.TransportError, match="already joined"):
        dist.SharedMemoryTransport(heap, 0)
    transport.close()


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 10)), max_size=60))
def test_the_allocator_never_overlaps(script: list[tuple[int, int]]) -> None:
    heap, twin = SymmetricAllocator(20_000), SymmetricAllocator(20_000)
    held: list[tuple[int, int]] = []
    for nbytes, victim in script:
        if held and victim < 4:
            offset, _ = held.pop(victim % len(held))
            heap.free(offset)
            twin.free(offset)
            continue
        try:
            offset = heap.alloc(nbytes)
        except dist.TransportError:
            with pytest.raises(dist.TransportError):
                twin.alloc(nbytes)
            continue
        assert twin.alloc(nbytes) == offset and offset % 64 == 0 and offset + nbytes <= 20_000
        assert all(offset + max(nbytes, 1) <= o or o + max(size, 1) <= offset for o, size in held)
        held.append((offset, nbytes))
    for offset, _ in held:
        heap.free(offset)
    assert heap.alloc(20_000) == 0
    with pytest.raises(dist.TransportError, match="already freed"):
        heap.free(64)


def test_mpi_command_lines(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess

    from rlx.dist import launch

    monkeypatch.setattr(launch, "find_mpiexec", lambda: "mpiexec")
    for version, option in (("mpiexec (Open MPI) 5.0.11", "--hostfile"), ("HYDRA build details:", "-f")):
        answer = subprocess.CompletedProcess([], 0, stdout=version)
        monkeypatch.setattr(launch.subprocess, "run", lambda *a, answer=answer, **k: answer)
        line, _ = mpi_command(4, ["python", "x.py"], "hosts", {"RLX_DIST_TIMEOUT": "5", "HOME": "/"})
        assert line[:3] == ["mpiexec", "-n", "4"] and line[-2:] == ["python", "x.py"]
        assert line[line.index(option) + 1] == "hosts" and "HOME" not in line
