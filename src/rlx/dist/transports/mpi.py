"""Ranks on many machines, over MPI (mpi4py).

MPI moves bytes, nothing else: reductions are our kernels in rank order. All communication is non-blocking
and between two ranks, polled under a deadline, so a rank that does not answer is known by name. MPI's own
one-sided calls are not used: over TCP they wait for the target as well, without a deadline, and no fault
tolerance covers them. Differences to ranks that share memory: a `put` to another host is complete after the
next barrier, a `get` from another host waits until that rank waits in some call of this module, and `view`
reaches the ranks of one's own host only.
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Self, TypeVar

import numpy as np

from rlx.config import DIST_TIMEOUT
from rlx.dist.errors import LengthMismatch, OutOfBounds, RankFailed, RanksMissing, Timeout, TransportError
from rlx.dist.heap import FAILED, JOINED, LEFT
from rlx.dist.transports.mpi_job import CHANNELS, DATA, FAILURES, GETS, POSTS, PUTS, REPLIES, SIGNALS, MpiJob, Pending
from rlx.dist.transports.shm import SharedMemoryTransport, process_is_gone, process_started
from rlx.dist.transport import (
    DEFAULT_HEAP_BYTES,
    Array,
    CollectiveCall,
    Costs,
    Outgoing,
    Partition,
    Step,
    SymmetricTransport,
    address_of,
    as_bytes,
    check_length,
    check_rank,
    group_of,
)
from rlx.dist.types import Rank, SymmetricBuffer

GROUPS = 4000
PIECE_BYTES = 1 << 20
MESSAGE_BYTES = 1 << 30
# Gathers of larger pieces go round a ring, where every link carries each byte once.
RING_BYTES = 64 << 10
BUSY_POLLS, NAP_SECONDS, LOOK_SECONDS = 200, 50e-6, 0.02

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

D = TypeVar("D", np.ndarray, None)
_POST = struct.Struct("<qqqq")


def connect(
    heap_size: int = DEFAULT_HEAP_BYTES,
    timeout: float | None = None,
    comm: Comm | None = None,
    share: bool = True,
) -> SymmetricTransport:
    """The best transport between the ranks of an MPI communicator: shared memory if they are on one host.

    With `share=False` ranks of one host do not map each other's memory: everything goes over MPI.
    """
    job = _job(heap_size, timeout, comm, share)
    if job.shared and len(job.host) == job.size:
        return SharedMemoryTransport(job.heap, job.rank, timeout)
    return MpiTransport._of(job)


def _job(heap_size: int, timeout: float | None, comm: Comm | None, share: bool) -> MpiJob:
    return MpiJob(comm, heap_size, DIST_TIMEOUT.get() if timeout is None else timeout, share)


class MpiTransport:
    """One rank of a job that talks over MPI; `rlx.dist.init()` creates it under mpiexec on several hosts.

    Ranks of one host map each other's heaps unless `share` is False.
    """

    # A rendezvous is a message to and from everybody; bytes cross a network or a pipe between processes.
    costs = Costs(meeting=20_000, copy_byte=0.5, reduce_byte=0.2)

    def __init__(
        self,
        heap_size: int = DEFAULT_HEAP_BYTES,
        timeout: float | None = None,
        comm: Comm | None = None,
        share: bool = True,
    ) -> None:
        self._set_up(_job(heap_size, timeout, comm, share), 0, None)

    @classmethod
    def _of(cls, job: MpiJob, group: int = 0, members: tuple[int, ...] | None = None) -> Self:
        made = cls.__new__(cls)
        made._set_up(job, group, members)
        return made

    def _set_up(self, job: MpiJob, group: int, members: tuple[int, ...] | None) -> None:
        self._job, self._group = job, group
        self._members = tuple(range(job.size)) if members is None else members
        self.num_ranks, self.this_rank = len(self._members), Rank(self._members.index(job.rank))
        self.heap_size = job.heap_size
        self._others = [member for member in range(self.num_ranks) if member != self.this_rank]
        self._puts = [0] * self.num_ranks
        self._failure: RanksMissing | None = None
        if group == 0:
            job.heap.write_entry(job.index, JOINED, os.getpid(), process_started(os.getpid()))

    @property
    def timeout(self) -> float:
        """Default limit of a wait, in seconds."""
        return self._job.timeout

    # ---- one-sided access

    def put(self, buf: SymmetricBuffer, src: object) -> None:
        """Copy `src` into the region of `buf.rank`: at once on this host, at the next barrier elsewhere."""
        data, memory = self._checked(buf, as_bytes(src))
        if memory is not None:
            memory[buf.offset : buf.offset + buf.len] = data
            return
        for start in range(0, max(1, buf.len), MESSAGE_BYTES):
            self._send(buf.rank, PUTS, 0, buf.offset + start, data[start : start + MESSAGE_BYTES])
            self._puts[buf.rank] += 1

    def get(self, buf: SymmetricBuffer, dst: object) -> None:
        """Copy the region of `buf.rank` into `dst`."""
        data, memory = self._checked(buf, as_bytes(dst, writable=True))
        if memory is not None:
            data[:] = memory[buf.offset : buf.offset + buf.len]
            return
        job, peer, pending = self._job, self._members[buf.rank], Pending()
        for start in range(0, buf.len, MESSAGE_BYTES):
            part = data[start : start + MESSAGE_BYTES]
            pending.add(job.comm.Irecv([part, job.MPI.BYTE], peer, REPLIES), buf.rank, part)
            job.send(peer, GETS, part.nbytes, buf.offset + start, part[:0])
        self._finish(pending, self._deadline(None), "a get")

    def view(self, rank: int, buf: SymmetricBuffer) -> Array:
        """The bytes of the region in `rank`'s heap, zero-copy, if that rank is on this host."""
        _, memory = self._checked(buf.on(rank), None)
        if memory is None:
            raise TransportError(
                f"rank {rank} is on another host, its memory cannot be viewed; use get and put"
            )
        return memory[buf.offset : buf.offset + buf.len]

    def put_signal(self, buf: SymmetricBuffer, src: object, signal: int = 0) -> None:
        """`put`, then count the receiver's signal up by one: who sees the signal sees the data."""
        if signal < 0:
            raise TransportError(f"there is no signal {signal}; use 0 or more")
        data, _ = self._checked(buf, as_bytes(src))
        if data.nbytes > MESSAGE_BYTES:
            raise LengthMismatch(MESSAGE_BYTES, data.nbytes, "the data of put_signal over MPI")
        if buf.rank == self.this_rank:
            self._deliver(signal, buf.offset, data)
        else:
            self._send(buf.rank, SIGNALS, signal, buf.offset, data)

    def wait_signal(self, signal: int = 0, count: int = 1, timeout: float | None = None) -> None:
        """Wait for `count` signals and use them up. After a `Timeout` it may be called again."""
        self._check_usable()
        deadline, signals = self._deadline(timeout), self._job.signals

        def here() -> bool:
            while (message := self._receive(SIGNALS)) is not None:
                self._deliver(*message[1:])
            return signals.get(signal, 0) >= count

        if not self._poll(here, deadline, self._others):
            raise Timeout(
                self._others, f"no rank sent signal {signal} to rank {self.this_rank} before the deadline"
            )
        signals[signal] -= count

    def _deliver(self, signal: int, offset: int, data: Array) -> None:
        own = self._job.memory(self._job.rank)
        assert own is not None
        own[offset : offset + data.nbytes] = data
        self._job.signals[signal] = self._job.signals.get(signal, 0) + 1

    def _checked(self, buf: SymmetricBuffer, data: D) -> tuple[D, Array | None]:
        """`data`, and the heap of the rank if it is mapped here; the region and its length are fine."""
        rank = self._members[check_rank(buf.rank, self.num_ranks)]
        if buf.offset < 0 or buf.len < 0 or buf.offset + buf.len > self.heap_size:
            raise OutOfBounds(buf.rank, buf.offset, buf.len, self.heap_size)
        if data is not None:
            check_length(buf, data)
        return data, self._job.memory(rank)

    # ---- the rest of the public face

    def barrier(self, timeout: float | None = None) -> None:
        """Wait until every rank is here and every put has arrived."""
        self._meet(CollectiveCall("barrier"), self._deadline(timeout))

    def abort(self, reason: str) -> None:
        """End this rank's part: ranks that wait for it raise `RankFailed` with the reason."""
        if self._failure is None:
            self._announce(RankFailed([self.this_rank], f"rank {self.this_rank} failed: {reason}"))
        self._job.heap.write_entry(self._job.index, FAILED, reason=reason)

    def alloc(self, nbytes: int) -> SymmetricBuffer:
        """A new region of the heap. All ranks of the job allocate the same sizes in the same order."""
        return SymmetricBuffer(self.this_rank, self._job.allocator.alloc(nbytes), nbytes)

    def free(self, buf: SymmetricBuffer) -> None:
        """Give a region back; all ranks free in the same order too."""
        self._job.allocator.free(buf.offset)

    def split(self, groups: Partition) -> Self:
        """The group of this rank as a separate transport; all ranks pass the same partition."""
        mine = group_of(self.this_rank, groups, self.num_ranks)
        group = max(self._meet(CollectiveCall("split"), self._deadline(None), self._job.next_group))
        if group >= GROUPS:
            raise TransportError(f"a job can make {GROUPS - 1} splits at most; keep and reuse groups")
        self._job.next_group = group + 1
        return self._of(self._job, group, tuple(self._members[member] for member in mine))

    def close(self) -> None:
        """Leave; the last thing that all ranks do together, unless the job has failed."""
        job = self._job
        if job.closed or self._group != 0:
            return
        if self._failure is None:
            self.barrier()
            self._finish(job.outgoing, self._deadline(None), "the last messages")
            job.heap.write_entry(job.index, LEFT)
        job.closed = True
        job.heap.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.abort(f"{type(error).__name__}: {error}")
        self.close()

    # ---- messages

    def _deadline(self, timeout: float | None) -> float:
        return time.monotonic() + (self._job.timeout if timeout is None else timeout)

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._job.closed:
            raise TransportError(f"the transport of rank {self.this_rank} is closed; create a new one")

    def _tag(self, channel: int) -> int:
        return self._group * CHANNELS + channel

    def _send(self, member: int, channel: int, number: int, offset: int, data: Array) -> None:
        self._job.send(self._members[member], self._tag(channel), number, offset, data)

    def _receive(self, channel: int, member: int | None = None) -> tuple[int, int, int, Array] | None:
        source = self._job.MPI.ANY_SOURCE if member is None else self._members[member]
        return self._job.receive(source, self._tag(channel))

    def _poll(self, done: Callable[[], bool], deadline: float, awaited: Sequence[int]) -> bool:
        """Ask `done` until it holds (True) or the time is over (False); raise when the group has failed."""
        MPI, polls, look = self._job.MPI, 0, time.monotonic() + LOOK_SECONDS
        gone: list[int] = []
        over = False
        while True:
            try:
                if done():
                    return True
                self._job.serve()
            except MPI.Exception as error:
                failed = error
                break
            for member in gone:  # seen before `done` was asked: what it had sent is here
                self._announce(RankFailed([member], f"rank {member} died: its process is gone"))
            if over:  # and so was the clock
                return False
            polls += 1
            if polls < BUSY_POLLS:
                continue
            time.sleep(NAP_SECONDS)
            now = time.monotonic()
            if now >= min(look, deadline):
                look = now + LOOK_SECONDS
                gone = self._look_around(awaited)
            over = now >= deadline
        self._raise_mpi(failed, awaited)
        return False

    def _finish(self, pending: Pending, deadline: float, what: str) -> None:
        """Wait until all requests are complete."""
        MPI = self._job.MPI
        if not self._poll(lambda: bool(MPI.Request.Testall(pending.requests)), deadline, pending.peers):
            late = [
                peer
                for request, peer in zip(pending.requests, pending.peers, strict=True)
                if request != MPI.REQUEST_NULL and not request.Get_status()
            ]
            if not late:  # the last has answered in this very moment
                MPI.Request.Waitall(pending.requests)
                return
            missing = sorted(set(late))
            named = ", ".join(f"rank {rank}" for rank in missing)
            self._announce(Timeout(missing, f"{named} did not answer before the deadline, during {what}"))

    # ---- failures

    def _look_around(self, awaited: Sequence[int]) -> list[int]:
        """Raise if others reported a failure; the awaited ranks whose process is gone."""
        told = self._receive(FAILURES)
        if told is not None:
            facts = json.loads(bytes(told[3]))
            kind = Timeout if facts["kind"] == "Timeout" else RankFailed
            self._failure = kind(facts["ranks"], facts["reason"])
            raise self._failure
        return [member for member in awaited if self._is_gone(self._members[member])]

    def _is_gone(self, rank: int) -> bool:
        """Whether the process of a rank on this host has ended, which can be seen where MPI says nothing."""
        if rank not in self._job.host:
            return False
        state, pid, started, _ = self._job.heap.read_entry(self._job.host.index(rank))
        return state == JOINED and process_is_gone(pid, started)

    def _raise_mpi(self, error: Exception, awaited: Sequence[int]) -> None:
        """An MPI call failed: with fault tolerance (ULFM) MPI knows who died."""
        dead: list[int] = []
        comm = self._job.comm
        if hasattr(comm, "Get_failed"):
            try:
                failed = comm.Get_failed()
                ranks = failed.Translate_ranks(None, comm.Get_group())
                dead = [self._members.index(rank) for rank in ranks if rank in self._members]
            except (NotImplementedError, self._job.MPI.Exception):
                pass
        if dead:
            named = ", ".join(f"rank {rank}" for rank in dead)
            self._announce(RankFailed(dead, f"MPI reports that {named} died"))
        self._announce(RankFailed(sorted(set(awaited)), f"MPI cannot reach the ranks awaited: {error}"))

    def _announce(self, failure: RanksMissing) -> None:
        """Tell all others what failed, so that they raise the same, and raise it, unless it is this rank."""
        facts = {"kind": type(failure).__name__, "ranks": failure.ranks, "reason": failure.reason}
        text = np.frombuffer(json.dumps(facts).encode(), np.uint8)
        self._failure = failure
        for member in self._others:
            if member not in failure.ranks or member == self.this_rank:
                try:
                    self._send(member, FAILURES, 0, 0, text)
                except self._job.MPI.Exception:
                    continue
        if self.this_rank not in failure.ranks:
            raise failure

    # ---- rendezvous and moving arrays

    def _meet(self, call: CollectiveCall, deadline: float, length: int = 0) -> list[int]:
        """Exchange posts with everybody, take in their puts, and return the lengths that they posted."""
        self._check_usable()
        MPI, comm = self._job.MPI, self._job.comm
        posts = np.zeros((self.num_ranks, _POST.size), np.uint8)
        pending, any_puts = Pending(), int(any(self._puts))
        for member in self._others:
            peer, tag = self._members[member], self._tag(POSTS)
            mine = np.frombuffer(_POST.pack(call.tag, length, self._puts[member], any_puts), np.uint8)
            pending.add(comm.Irecv([posts[member], MPI.BYTE], peer, tag), member, posts)
            self._job.outgoing.add(comm.Isend([mine, MPI.BYTE], peer, tag), peer, mine)
        self._finish(pending, deadline, str(call))
        posts[self.this_rank] = np.frombuffer(_POST.pack(call.tag, length, 0, any_puts), np.uint8)
        read = [_POST.unpack(post.tobytes()) for post in posts]
        self._puts = [0] * self.num_ranks
        if any(post[3] for post in read):
            self._take_in([post[2] for post in read], deadline)
            self._meet(call, deadline, length)  # nobody may look before all puts have arrived everywhere
        self._job.prune()
        if any(post[0] != call.tag for post in read):
            calls = ", ".join(
                f"rank {rank} called {CollectiveCall.from_tag(post[0])}" for rank, post in enumerate(read)
            )
            raise TransportError(f"the ranks made different calls: {calls}; all ranks must make the same calls in the same order")
        return [post[1] for post in read]

    def _take_in(self, counts: list[int], deadline: float) -> None:
        """Receive the puts that the others have announced and copy them into the heap."""
        own = self._job.memory(self._job.rank)
        assert own is not None

        def here() -> bool:
            for member in range(self.num_ranks):
                while counts[member] and (message := self._receive(PUTS, member)) is not None:
                    own[message[2] : message[2] + message[3].nbytes] = message[3]
                    counts[member] -= 1
            return not any(counts)

        late = [member for member, count in enumerate(counts) if count]
        if not self._poll(here, deadline, late):
            missing = [member for member, count in enumerate(counts) if count]
            self._announce(Timeout(missing, f"puts of ranks {missing} did not arrive before the deadline"))

    def again(
        self,
        op: str,
        how: object,
        buf: SymmetricBuffer | None,
        array: Array,
        out: Array,
        timeout: float | None,
    ) -> int | None:
        """Nothing is remembered: messages cost more than what leads to them."""
        return None

    def exchange(self, call: CollectiveCall, out: Outgoing, timeout: float | None) -> Iterator[Step]:
        """Move an array between all ranks, piece by piece, through buffers of this rank."""
        deadline = self._deadline(timeout)
        lengths = self._meet(call, deadline, out.array.nbytes)
        if call.op != "all_gather" and len(set(lengths)) > 1:
            other = next(rank for rank, length in enumerate(lengths) if length != lengths[0])
            raise LengthMismatch(lengths[0], lengths[other], f"the array of rank {other} in {call}")
        data, me = as_bytes(out.array), self.this_rank
        if out.sender is not None:
            yield from self._broadcast(data, lengths[out.sender], out.sender, deadline)
            return
        one = len(out.regions) == 1
        start, size = out.regions[0 if one else me]
        sizes = lengths if one else [size] * self.num_ranks
        received = np.empty((self.num_ranks, min(PIECE_BYTES, max(*sizes, 1))), np.uint8)
        result = np.empty(received.shape[1], np.uint8) if out.share else None
        longest = max(sizes) if one else max(length for _, length in out.regions)
        for done in range(0, max(longest, 1), PIECE_BYTES):
            here = [max(0, min(total - done, PIECE_BYTES)) for total in sizes]
            blocks = [received[rank][:count] for rank, count in enumerate(here)]
            blocks[me] = data[start + done : start + done + here[me]]
            if one:
                self._gather(blocks, deadline)
            else:
                self._pairwise(data, out.regions, done, blocks, deadline)
            sources = [address_of(block) if block.nbytes else 0 for block in blocks]
            if result is None:
                yield Step(done, sizes, here, sources)
                continue
            yield Step(done, sizes, here, sources, [address_of(result)])
            shared = [_part(data, region, done) for region in out.regions]
            shared[me][:] = result[: here[me]]
            self._gather(shared, deadline)

    def _gather(self, blocks: Sequence[Array], deadline: float) -> None:
        """Fill every block from its rank: directly when small, round a ring when large."""
        n, me = self.num_ranks, int(self.this_rank)
        if n > 2 and max(block.nbytes for block in blocks) > RING_BYTES:
            for step in range(n - 1):
                outgoing, incoming = blocks[(me - step) % n], blocks[(me - step - 1) % n]
                self._swap([((me + 1) % n, outgoing)], [((me - 1) % n, incoming)], deadline)
            return
        self._swap(
            [(other, blocks[me]) for other in self._others],
            [(other, blocks[other]) for other in self._others],
            deadline,
        )

    def _pairwise(
        self,
        data: Array,
        regions: Sequence[tuple[int, int]],
        done: int,
        blocks: Sequence[Array],
        deadline: float,
    ) -> None:
        """Send every rank its region's next piece and receive one's own from everybody."""
        outgoing = [(other, _part(data, regions[other], done)) for other in self._others]
        self._swap(outgoing, [(other, blocks[other]) for other in self._others], deadline)

    def _broadcast(self, data: Array, total: int, sender: int, deadline: float) -> Iterator[Step]:
        for done in range(0, max(total, 1), PIECE_BYTES):
            part = data[done : min(total, done + PIECE_BYTES)]
            if sender == self.this_rank:
                self._swap([(other, part) for other in self._others], [], deadline)
            else:
                part = np.empty_like(part)
                self._swap([], [(sender, part)], deadline)
            yield Step(done, [total], [part.nbytes], [address_of(part) if part.nbytes else 0])

    def _swap(
        self, outgoing: Sequence[tuple[int, Array]], incoming: Sequence[tuple[int, Array]], deadline: float
    ) -> None:
        """Send and receive blocks of known size; returns when both is done. Empty blocks are not sent."""
        MPI, comm, tag, pending = self._job.MPI, self._job.comm, self._tag(DATA), Pending()
        for member, block in incoming:
            if block.nbytes:
                pending.add(comm.Irecv([block, MPI.BYTE], self._members[member], tag), member, block)
        for member, block in outgoing:
            if block.nbytes:
                pending.add(comm.Isend([block, MPI.BYTE], self._members[member], tag), member, block)
        self._finish(pending, deadline, "the exchange of data")


def _part(data: Array, region: tuple[int, int], done: int) -> Array:
    """The bytes of a region's piece that begins `done` bytes into it."""
    start, length = region
    return data[start + min(done, length) : start + min(done + PIECE_BYTES, length)]
