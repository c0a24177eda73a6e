"""Ranks that see each other's memory: how arrays move between threads and processes of one machine."""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlx.dist.transports import exchange
from rlx.dist.native import exchange_code
from rlx.dist.native import sync
from rlx.dist.native.copies import STREAM_BYTES, copy_bytes
from rlx.dist.errors import LengthMismatch, TransportError
from rlx.dist.rendezvous import RankState, Rendezvous
from rlx.dist.transport import DONE, Array, CollectiveCall, Costs, Outgoing, Step, address_of
from rlx.dist.types import SymmetricBuffer

# Arrays in the heap up to this size are staged like any other: copying them is cheaper than a second barrier.
IN_PLACE_BYTES = 16 << 10
CALLS_REMEMBERED = 256
# Arrays from this size on may be read in the other processes' own memory.
AWAY_BYTES = 128 << 10
# So long it takes at most until a process whose memory cannot be read any more is seen to be gone.
GONE_SECONDS = 2.0


class MappedTransport(Rendezvous):
    """One rank of a group whose heaps are all mapped here."""

    # Measured between two processes: a rendezvous from Python, and copies that stay in the caches.
    costs = Costs(meeting=3000, copy_byte=0.05, reduce_byte=0.2)

    def __init__(self, state: RankState, group: int, members: tuple[int, ...]) -> None:
        super().__init__(state, group, members)
        self._stages = [self._heap.stage(group, rank) for rank in members]
        self._exchanges = exchange.Exchanger(
            self._table_address, self._heaps, self._stages, int(self.this_rank)
        )
        self._look = _callback(self)
        self._look_address = ctypes.cast(self._look, ctypes.c_void_p).value or 0
        # Of the native call that runs: the seconds it was given, when they are over, what ended it.
        self._patience: float | None = None
        self._native_deadline: float | None = None
        self._ended: BaseException | None = None
        self._can_read: bool | None = None  # all others' own memory; None: not known yet
        self._calls_before: dict[tuple[str, int, int], _Before] = {}

    def _readable(self) -> Sequence[int] | None:
        """The members' processes if this rank may read their memory, else (); None: some have not joined."""
        return ()

    def again(
        self,
        op: str,
        how: object,
        buf: SymmetricBuffer | None,
        array: Array,
        out: Array,
        timeout: float | None,
    ) -> int | None:
        """Repeat a call that moved these very arrays before: `DONE`, or the verdict of its first rendezvous.

        None if there is nothing to repeat, and nothing was done.
        """
        before = self._calls_before.get((op, id(array), id(out)))
        if before is None or before.how is not how or before.buf is not buf:
            return None
        if type(array) is not np.ndarray or type(out) is not np.ndarray:
            return None
        self._enter()
        verdict = self._natively(self._exchanges.again, before.address, timeout)
        if verdict != exchange_code.CHANGED:
            return verdict
        del self._calls_before[op, id(array), id(out)]
        return None

    def _natively(self, call: Callable[[int], int], table: int, timeout: float | None) -> int:
        """Run a native exchange; raises what was seen while it waited, or that calls differ."""
        self._patience, self._native_deadline = timeout, None
        verdict = call(table)
        if verdict == DONE or verdict == exchange_code.CHANGED:
            return verdict
        if verdict == exchange_code.ENDED:
            failure, self._ended = self._ended, None
            raise failure or TransportError("an exchange was ended")
        if verdict == exchange_code.UNREADABLE:
            self._tell_unreadable()
        self._check_tags(verdict)
        return verdict

    def _tell_unreadable(self) -> None:
        """Another rank's memory could not be read, which was possible before: it is about to be gone."""
        others = [member for member in range(self.num_ranks) if member != self.this_rank]
        over = time.monotonic() + GONE_SECONDS
        while time.monotonic() < over:
            self._raise_if_dead(others, "their data")
            time.sleep(0.001)
        reason = "the memory of another rank can no longer be read; do not change that while ranks run"
        self.abort(reason)
        raise TransportError(reason)

    def _look_natively(self) -> int:
        """Called by a native exchange that waits, once in a while; not 0 ends it."""
        try:
            if self._native_deadline is None:
                self._native_deadline = self._deadline(self._patience)
            self._look_around(self._native_deadline)
        except BaseException as failure:  # it cannot pass through native code
            self._ended = failure
            return 1
        return 0

    def exchange(self, call: CollectiveCall, out: Outgoing, timeout: float | None) -> Iterable[Step]:
        """Move an array between all ranks, piece by piece.

        Arrays that are in the heap of every rank are read where they are, between two barriers. Others go
        through the staging memory: a rank fills the next part of its own, meets the others, and reads theirs.
        The rendezvous of the next piece proves that everybody has read this one, so each piece costs one
        barrier. A native call does all of it where it can, and there are not steps left.
        """
        sends = out.sender is None or out.sender == self.this_rank
        place = self._place_of(out) if sends else 0
        verdict = out.met
        if verdict is None and out.into is not None:
            self._enter()
            table = self._exchanges.table(call.tag, out, place, self._look_address, self._away(out, place))
            verdict = self._natively(self._exchanges.run, address_of(table), timeout)
            if verdict == DONE:
                self._remember(call.tag, out, place)
                return ()
        if verdict is not None:
            place = self._table[sync.PLACE]  # what the native call has posted
        return self._stepwise(call, out, timeout, place, verdict)

    def _remember(self, tag: int, out: Outgoing, place: int) -> None:
        """Keep the table of a call that its caller may repeat."""
        if out.repeat is None:
            return
        op, how, buf, array, result = out.repeat
        if type(array) is not np.ndarray or type(result) is not np.ndarray or array is not out.array:
            return
        if len(self._calls_before) >= CALLS_REMEMBERED:
            self._calls_before.clear()
        facts = [*exchange.facts_of(array), *exchange.facts_of(result)]
        away = self._away(out, place)
        table = self._exchanges.table(tag, out, place, self._look_address, away, facts)
        kept = _Before(address_of(table), how, buf, table, (array.dtype, result.dtype))
        self._calls_before[op, id(array), id(result)] = kept

    def _stepwise(
        self, call: CollectiveCall, out: Outgoing, timeout: float | None, place: int, verdict: int | None
    ) -> Iterable[Step]:
        """The exchange as steps for the caller; `verdict` is that of the first rendezvous, if it is over."""
        deadline, tag, nbytes = self._deadline(timeout), call.tag, out.array.nbytes
        sends = out.sender is None or out.sender == self.this_rank
        if verdict is None:
            if sends and not place:
                self._fill(out, 0)
            verdict = self._meet(tag, deadline, nbytes, place)
        lengths = [nbytes] * self.num_ranks
        if verdict & sync.LENGTHS_DIFFER:
            lengths = self._received(0)
            if call.op != "all_gather":
                other = next(rank for rank, length in enumerate(lengths) if length != lengths[0])
                raise LengthMismatch(lengths[0], lengths[other], f"the array of rank {other} in {call}")
        if verdict & sync.SOME_PLACES:
            places = self._received(1)
            if all(place > 0 for place in (places if out.sender is None else [places[out.sender]])):
                return self._in_place(tag, deadline, out, places, lengths)
            if min(places) < 0:
                self._exchanges.count_as_far()
            if place:  # others have their arrays elsewhere: be staged like them
                self._fill(out, 0)
            self._meet(tag, deadline, nbytes)
        return self._staged(tag, deadline, out, lengths)

    def _place_of(self, out: Outgoing) -> int:
        """1 + offset of an array in this rank's heap; 0 if it is elsewhere, small, or overwritten."""
        nbytes = out.array.nbytes
        if nbytes <= IN_PLACE_BYTES or out.overwritten:
            return 0
        if out.overlaps(self.num_ranks, int(self.this_rank)):
            return 0
        offset = address_of(out.array) - self._own_heap
        return offset + 1 if 0 <= offset <= self.heap_size - nbytes else 0

    def _away(self, out: Outgoing, place: int) -> int:
        """Minus the address of an array that others may read in this process's own memory; else 0."""
        moves = (
            not out.reduce and out.sender is None and not out.overlaps(self.num_ranks, int(self.this_rank))
        )
        if place or not moves or self.num_ranks == 1 or out.array.nbytes < AWAY_BYTES:
            return 0
        return -address_of(out.array) if self._reads_remotely() else 0

    def _reads_remotely(self) -> bool:
        """Whether this rank can read the others' own memory. All of them must, so each posts what it can."""
        if self._can_read is None:
            pids = self._readable()
            if pids:
                self._exchanges.set_processes(pids)
            self._can_read = None if pids is None else bool(pids)
        return bool(self._can_read)

    def _mine(self, out: Outgoing, lengths: list[int]) -> tuple[int, list[int]]:
        """Start of the region that this rank receives, and how many bytes of it every sender has."""
        if len(out.regions) > 1:
            start, size = out.regions[self.this_rank]
            return start, [size] * self.num_ranks
        return 0, lengths if out.sender is None else [lengths[out.sender]]

    def _in_place(
        self, tag: int, deadline: float, out: Outgoing, places: list[int], lengths: list[int]
    ) -> Iterator[Step]:
        ranks = range(self.num_ranks) if out.sender is None else [out.sender]
        start, sizes = self._mine(out, lengths)
        sources = [self._heaps[rank] + places[rank] - 1 + start for rank in ranks]
        yield Step(0, sizes, sizes, sources, sources if out.share else ())
        self._meet(tag, deadline)  # nobody may change its array before all have read it

    def _fill(self, out: Outgoing, done: int) -> None:
        """Copy the next piece of every region that others read into the staging memory."""
        if self.num_ranks == 1:
            return
        slot = exchange.slot_bytes(out.regions, max(length for _, length in out.regions))
        stage = self._stages[self.this_rank] + self._exchanges.position
        alone = len(out.regions) == 1
        for receiver, (offset, length) in enumerate(out.regions):
            size = min(length - done, slot)
            if size > 0 and (alone or receiver != self.this_rank):
                source = address_of(out.array) + offset + done
                total = STREAM_BYTES if self._exchanges.far else out.array.nbytes
                copy_bytes(stage + receiver * slot, source, size, total)

    def _step(self, out: Outgoing, lengths: list[int], done: int, slot: int) -> Step:
        """What stands in the staging memory for this rank."""
        start, sizes = self._mine(out, lengths)
        shift = self._exchanges.position + (0 if len(out.regions) == 1 else self.this_rank * slot)
        sources = [stage + shift for stage in self._stages]
        own = address_of(out.array) + start + done
        results = [own, sources[self.this_rank]] if out.share else ()
        if out.sender is not None:
            sources = [sources[out.sender]]
        else:
            sources[self.this_rank] = own  # one's own data need no detour
        here = [max(0, min(size - done, slot)) for size in sizes]
        return Step(done, sizes, here, sources, results)

    def _staged(self, tag: int, deadline: float, out: Outgoing, lengths: list[int]) -> Iterator[Step]:
        longest = max(lengths) if len(out.regions) == 1 else max(length for _, length in out.regions)
        slot = exchange.slot_bytes(out.regions, longest)
        sends = out.sender is None or out.sender == self.this_rank
        for done in range(0, max(longest, 1), slot):
            yield self._step(out, lengths, done, slot)
            position = self._exchanges.position
            self._exchanges.advance(len(out.regions) * slot)
            more = done + slot < longest
            if more and sends:
                self._fill(out, done + slot)
            if more or out.share:
                self._meet(tag, deadline)
            if out.share:
                self._collect(out, done, slot, position)

    def _collect(self, out: Outgoing, done: int, slot: int, position: int) -> None:
        """Copy the shared results of one piece from the stages of those who have reduced them."""
        for owner, (offset, length) in enumerate(out.regions):
            size = min(length - done, slot)
            if size > 0 and owner != self.this_rank:
                source = self._stages[owner] + position + owner * slot
                copy_bytes(address_of(out.array) + offset + done, source, size, out.array.nbytes)


class _Before(NamedTuple):
    """A call that can be repeated: its table, and what must stay alive for the table's facts to hold."""

    address: int
    how: object
    buf: SymmetricBuffer | None
    table: Array
    dtypes: tuple[object, ...]


def _callback(transport: MappedTransport) -> Any:
    """What native exchanges call while they wait; it does not keep the transport alive."""
    known = weakref.ref(transport)

    def look() -> int:
        there = known()
        return 1 if there is None else there._look_natively()

    return ctypes.CFUNCTYPE(ctypes.c_int64)(look)
