"""Meetings of ranks that see each other's memory: barriers, signals, who is missing, and why."""

from __future__ import annotations

import ctypes
import json
import time
from abc import ABC, abstractmethod
from dataclasses import field
from rlx.records import dataclass
from typing import Any, Self

from rlx.dist.native import sync
from rlx.dist.allocator import SymmetricAllocator
from rlx.dist.native.copies import copy_bytes, hand_over
from rlx.dist.cores import roomy
from rlx.dist.errors import RankFailed, RanksMissing, Timeout, TransportError
from rlx.dist.heap import ABSENT, FAILED, GROUPS, LEFT, RECORD_BYTES, SymmetricHeap
from rlx.dist.transport import (
    Array,
    CollectiveCall,
    Partition,
    address_of,
    as_bytes,
    check_length,
    check_rank,
    group_of,
)
from rlx.dist.types import Rank, SymmetricBuffer

# A waiter looks after deaths and deadlines this often.
SLICE_NANOSECONDS = 10_000_000
# Looks before a waiter gives its core away, which it may not get back for milliseconds: about 80 us where
# every rank can have a core, 1 us where one may wait for that very core. About 100 us later it sleeps.
PATIENT_PAUSES, FEW_PAUSES = 4096, 64
_BARRIER = CollectiveCall("barrier").tag
_CLOSED = "closed its transport"


@dataclass
class RankState:
    """What all groups of one rank have in common."""

    heap: SymmetricHeap
    rank: int
    timeout: float
    allocator: SymmetricAllocator = field(init=False)
    signals_used: dict[int, int] = field(default_factory=dict)
    next_group: int = 1
    closed: bool = False

    def __post_init__(self) -> None:
        self.allocator = SymmetricAllocator(self.heap.heap_size)


class Rendezvous(ABC):
    """One rank of a group whose heaps are all mapped here."""

    def __init__(self, state: RankState, group: int, members: tuple[int, ...]) -> None:
        self._state, self._heap, self._group, self._members = state, state.heap, group, members
        self.num_ranks, self.this_rank = len(members), Rank(members.index(state.rank))
        self.heap_size = self._heap.heap_size
        self._failure: RanksMissing | None = None
        self._heaps = [self._heap.heap_address(rank) for rank in members]
        self._own_heap = self._heap.heap_address(state.rank)
        self._native = sync.sync()
        self._lines = (ctypes.c_int64 * self.num_ranks)(*(self._heap.line(group, r) for r in members))
        self._table = (ctypes.c_int64 * (sync.RECEIVED + 2 * self.num_ranks))()
        self._table_address = ctypes.addressof(self._table)
        self._table[sync.LINES] = ctypes.addressof(self._lines)
        self._table[sync.MEMBERS], self._table[sync.ME] = self.num_ranks, self.this_rank
        pauses = PATIENT_PAUSES if roomy(self._heap.num_ranks) else FEW_PAUSES
        self._table[sync.SPINS] = pauses + sync.YIELDS
        self._table[sync.NANOSECONDS] = SLICE_NANOSECONDS

    # ---- what threads and processes do differently

    @abstractmethod
    def _cause_of_death(self, rank: int) -> str | None:
        """Why a rank of the job that had joined is gone, as far as the system knows; None if it lives."""

    @abstractmethod
    def _about(self, rank: int) -> str:
        """What is known about a late rank of the job, for the error text."""

    @abstractmethod
    def _regroup(self, group: int, members: tuple[int, ...]) -> Self:
        """The same rank as a member of another group."""

    # ---- the public face

    @property
    def timeout(self) -> float:
        """Default limit of a wait, in seconds."""
        return self._state.timeout

    def put(self, buf: SymmetricBuffer, src: object) -> None:
        """Copy `src` into the region of `buf.rank`; it is there when this returns."""
        data = as_bytes(src)
        place = self._address(buf)
        check_length(buf, data)
        hand_over(place, address_of(data), buf.len)

    def get(self, buf: SymmetricBuffer, dst: object) -> None:
        """Copy the region of `buf.rank` into `dst`."""
        data = as_bytes(dst, writable=True)
        place = self._address(buf)
        check_length(buf, data)
        copy_bytes(address_of(data), place, buf.len)

    def view(self, rank: int, buf: SymmetricBuffer) -> Array:
        """The bytes of the region in `rank`'s heap, zero-copy."""
        start = self._address(buf.on(rank)) - self._heap.base
        return self._heap.bytes[start : start + buf.len]

    def put_signal(self, buf: SymmetricBuffer, src: object, signal: int = 0) -> None:
        """`put`, then count the receiver's signal up by one: who sees the signal sees the data."""
        word = self._heap.signal(self._members[check_rank(buf.rank, self.num_ranks)], signal)
        self.put(buf, src)
        self._native.signal(word)

    def wait_signal(self, signal: int = 0, count: int = 1, timeout: float | None = None) -> None:
        """Wait for `count` signals and use them up. After a `Timeout` it may be called again."""
        self._check_usable()
        word, used = self._heap.signal(self._state.rank, signal), self._state.signals_used
        goal = used.get(signal, 0) + count
        deadline = self._deadline(timeout)
        slice_address = self._table_address + 8 * sync.SECONDS
        others = [member for member in range(self.num_ranks) if member != self.this_rank]
        gone: list[int] = []
        over = False
        while not self._native.wait_word(word, goal % 2**32, self._table[sync.SPINS], slice_address):
            if gone:  # seen before this last look at the word: what they had sent would be here
                self._raise_if_dead(gone, f"signal {signal}")
            if over:  # and so was the clock
                raise Timeout(
                    others, f"no rank sent signal {signal} to rank {self.this_rank} before the deadline"
                )
            left = [member for member in others if self._why_gone(self._members[member]) == _CLOSED]
            dead = [
                member for member in others if self._why_gone(self._members[member]) not in (None, _CLOSED)
            ]
            gone = dead or (left if left == others else [])
            over = time.monotonic() >= deadline
        used[signal] = goal

    def barrier(self, timeout: float | None = None) -> None:
        """Wait until every rank is here."""
        self._meet(_BARRIER, self._deadline(timeout))

    def abort(self, reason: str) -> None:
        """End this rank's part: ranks that wait for it raise `RankFailed` with the reason."""
        self._heap.write_entry(self._state.rank, FAILED, reason=reason)
        self._failure = RankFailed(
            [self.this_rank], f"rank {self.this_rank} (this rank) was aborted: {reason}"
        )

    def alloc(self, nbytes: int) -> SymmetricBuffer:
        """A new region of the heap. All ranks of the job allocate the same sizes in the same order."""
        return SymmetricBuffer(self.this_rank, self._state.allocator.alloc(nbytes), nbytes)

    def free(self, buf: SymmetricBuffer) -> None:
        """Give a region back; all ranks free in the same order too."""
        self._state.allocator.free(buf.offset)

    def split(self, groups: Partition) -> Self:
        """The group of this rank as a separate transport; all ranks pass the same partition."""
        mine = group_of(self.this_rank, groups, self.num_ranks)
        # Groups that split further may have used up different numbers; the highest is free everywhere.
        self._meet(CollectiveCall("split").tag, self._deadline(None), length=self._state.next_group)
        group = max(self._received(0))
        if group >= GROUPS:
            raise TransportError(f"a job can make {GROUPS - 1} splits at most; keep and reuse groups")
        self._state.next_group = group + 1
        return self._regroup(group, tuple(self._members[member] for member in mine))

    def close(self) -> None:
        """Leave. Ranks that still wait for this one raise `RankFailed`."""
        if not self._state.closed:
            self._state.closed = True
            if self._heap.read_entry(self._state.rank)[0] != FAILED:
                self._heap.write_entry(self._state.rank, LEFT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.abort(f"{type(error).__name__}: {error}")
        self.close()

    # ---- rendezvous

    def _address(self, buf: SymmetricBuffer) -> int:
        rank = self._members[check_rank(buf.rank, self.num_ranks)]
        return self._heap.check(rank, buf.offset, buf.len)

    def _deadline(self, timeout: float | None) -> float:
        return time.monotonic() + (self._state.timeout if timeout is None else timeout)

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._state.closed:
            raise TransportError(f"the transport of rank {self.this_rank} is closed; create a new one")

    def _meet(self, tag: int, deadline: float, length: int = 0, place: int = 0) -> int:
        """The barrier under everything: exchange posts with all members; says how they differ."""
        self._enter()
        self._table[sync.TAG : sync.RECEIVED] = [tag, length, place]
        return self._met(self._native.barrier(self._table_address), deadline)

    def _enter(self) -> None:
        """Before a rendezvous: this rank has arrived and can take part."""
        if self._failure is not None or self._state.closed:
            self._check_usable()

    def _met(self, verdict: int, deadline: float) -> int:
        """The verdict of a rendezvous that has begun, when all have arrived."""
        while verdict < 0:
            self._look_around(deadline)
            verdict = self._native.wait(self._table_address)
        self._check_tags(verdict)
        return verdict

    def _check_tags(self, verdict: int) -> None:
        if verdict & sync.TAGS_DIFFER:
            raise TransportError(f"the ranks made different calls: {self._calls()}; all ranks must make the same calls in the same order")

    def _received(self, which: int) -> list[int]:
        """Lengths (0) or places (1) that the members posted at the last rendezvous."""
        return self._table[sync.RECEIVED + which :: 2]

    def _calls(self) -> str:
        epoch = self._table[sync.MY_EPOCH] % 2**32
        post = sync.POSTS + epoch % 2 * sync.POST_BYTES
        tags = [ctypes.c_int64.from_address(line + post).value for line in self._lines]
        return ", ".join(f"rank {rank} called {CollectiveCall.from_tag(tag)}" for rank, tag in enumerate(tags))

    def _look_around(self, deadline: float) -> None:
        """Between two slices of waiting: has the group failed, did a missing rank die, is the time over?"""
        # This rank may be stopped between any two of these lines, and others come meanwhile. So the clock and
        # dead ranks, which cannot return, are looked at first, and who is missing after that.
        over = time.monotonic() >= deadline
        gone = {rank for rank in self._missing() if self._why_gone(self._members[rank]) is not None}
        missing = self._missing()
        if not missing:
            return
        self._raise_if_dead([rank for rank in missing if rank in gone], "a barrier")
        if over:
            late = "; ".join(f"{self._name(rank)} {self._about(self._members[rank])}" for rank in missing)
            self._agree(Timeout(missing, f"ranks did not come to a barrier before the deadline: {late}"))

    def _missing(self) -> list[int]:
        """The members that have not arrived at this rank's rendezvous."""
        epoch = self._table[sync.MY_EPOCH]
        epochs = [ctypes.c_int32.from_address(line).value for line in self._lines]
        return [rank for rank, its in enumerate(epochs) if ctypes.c_int32(its - epoch).value < 0]

    def _raise_if_dead(self, awaited: list[int], what: str) -> None:
        agreed = self._read_record()
        if agreed is not None:
            self._failure = agreed
            raise agreed
        dead = {rank: self._why_gone(self._members[rank]) for rank in awaited}
        gone = [rank for rank, why in dead.items() if why is not None]
        if gone:
            told = "; ".join(f"{self._name(rank)} {dead[rank]}" for rank in gone)
            self._agree(RankFailed(gone, f"ranks are gone while others wait for {what}: {told}"))

    def _name(self, member: int) -> str:
        rank = self._members[member]
        return f"rank {member}" if rank == member else f"rank {member} (rank {rank} of the job)"

    def _why_gone(self, rank: int) -> str | None:
        state, _, _, reason = self._heap.read_entry(rank)
        if state == FAILED:
            return f"failed: {reason}"
        if state == LEFT:
            return _CLOSED
        return None if state == ABSENT else self._cause_of_death(rank)

    # ---- agreement: the failure that one of those who see one gets in first is the one that all raise

    def _winner(self) -> int:
        """Address of the word that says whose record counts: 1 + its rank in the job, 0 if nobody's does."""
        return self._heap.record(self._group, min(self._members))

    def _agree(self, failure: RanksMissing) -> None:
        """Write down what this rank saw, let it count unless another's does already, and raise what counts.

        The record is whole before it can win: nobody ever waits for a rank that may be stopped or dead.
        """
        facts = {"kind": type(failure).__name__, "ranks": failure.ranks, "reason": failure.reason}
        text = json.dumps(facts).encode()
        if len(text) > RECORD_BYTES - 8:
            facts["reason"] = failure.reason[: (RECORD_BYTES - 200) // 6] + " ..."
            text = json.dumps(facts).encode()
        mine = self._heap.record(self._group, self._state.rank)
        ctypes.memmove(mine + 8, text, len(text))
        ctypes.c_int32.from_address(mine + 4).value = len(text)
        self._native.claim(self._winner(), 1 + self._state.rank)
        self._failure = self._read_record() or failure
        raise self._failure

    def _read_record(self) -> RanksMissing | None:
        winner = ctypes.c_int32.from_address(self._winner()).value
        if winner == 0:
            return None
        place = self._heap.record(self._group, winner - 1)
        facts = json.loads(ctypes.string_at(place + 8, ctypes.c_int32.from_address(place + 4).value))
        kind = Timeout if facts["kind"] == "Timeout" else RankFailed
        return kind(facts["ranks"], facts["reason"])
