"""The native code of an exchange (see `exchange`) as LLVM IR, and the table of its arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlx.codegen.native.irtext import Module
from rlx.codegen.native.notation import emit_all, inline, native
from rlx.codegen.native.words import (
    address_of,
    alloca,
    at,
    builder,
    byte_at,
    call,
    external,
    field,
    i32,
    i64,
    leave,
    ptr,
    select,
    trunc,
    udiv,
    zext,
)
from rlx.codegen.native.waiting import clock
from rlx.dist.heap import RING_BYTES, STAGE_BYTES
from rlx.dist.native import sync
from rlx.dist.transport import DONE
from rlx.driver.copy.nontemporal import LEAST_BYTES, LINE
from rlx.records import dataclass
from rlx.runtime.native.code import load_for_host

if TYPE_CHECKING:
    from rlx.codegen.native.jit import Code
    from rlx.target.cpu import Target

# The call's table, in 8-byte fields. First whom to call and what to post, then where everybody's memory is;
# what this rank has (its array, `REGIONS` pairs of offset and length at `CUTS`, the longest of them, how much
# of each is staged at once), what it wants (`SIZE` bytes from `START` on of everybody's array, those of rank
# r at `TO` + r * `STRIDE`), and how. Last come `FACTS` triples that `again` compares before all else.
(POST, BARRIER, WAIT, LOOK, TAG, LENGTH, PLACE, AWAY, ALWAYS, HEAPS, STAGES, PROCESSES, RING) = range(13)
(ARRAY, REGIONS, CUTS, LONGEST, SLOT, TOO_LONG, START, SIZE, TO, STRIDE) = range(13, 23)
(SENDER, SHARE, REDUCE, ITEM, FILL, PAST, COPY, POINTERS, FACTS, COMPARED, FIELDS) = range(23, 34)

# The ring's own fields: where the next piece begins, how often it came round, how many fills in a row were
# slow, and for how many calls the cores of the other ranks still count as far away.
POSITION, ROUNDS, SLOW, FAR, RING_FIELDS = range(5)
# Cores that do not share a cache take ten times as long to hand lines over, and a virtual machine may move to
# such cores at any time. Some fills in a row of so many bytes that are so much slower than a copy show it; then
# stores are non-temporal, or data are read in the other processes' own memory, until it is tried again.
MEASURED_BYTES, FAR_FACTOR, SLOW_FILLS, FAR_CALLS = 64 << 10, 6, 3, 64

# What it returns besides DONE and a verdict of the first barrier: the callback ended the wait, the arrays are
# not those that the table was made for, another process's memory could not be read.
ENDED, CHANGED, UNREADABLE = 2 * DONE, 4 * DONE, 8 * DONE
# Error codes of the kernel that a compiled program calls.
STOPPED, DIFFERENT = 1001, 1002
KERNEL_ARGUMENT = 3  # the address of its table, behind the fields that every kernel has

NOBODY = -1
_DIFFER = sync.TAGS_DIFFER | sync.LENGTHS_DIFFER

_memmove = external("memmove", ptr)
_process_vm_readv = external("process_vm_readv", i64)


def emit(target: Target) -> str:
    """LLVM IR of the exchange, of the call that compares first, and of the kernel for compiled programs."""
    module = Module(target)
    emit_all(module, rlx_again, rlx_meet)
    return module.text()


@native(internal=True)
def rlx_move(to: ptr, source: ptr, size: i64, loop: ptr) -> None:
    """Copy bytes: by the loop with non-temporal stores, if one is given."""
    address = address_of(to)
    is_plain = (size < LEAST_BYTES) | (address_of(loop) == 0)
    if address == address_of(source):  # in place already
        return
    if is_plain:
        _memmove(to, source, size)
    else:
        call(loop, to, source, size, -address & (LINE - 1))


@native(internal=True)
def rlx_read(process: i64, to: ptr, source: ptr, size: i64) -> i64:
    """Read from the own memory of a process; 0 if that went well."""
    here = alloca(i64, 4)
    there = at(here, 2)
    done = i64(0)
    while done < size:
        left = size - done
        for vector, start in ((here, to), (there, source)):
            vector[0] = byte_at(start, done)
            vector[1] = left
        got = _process_vm_readv(trunc(process, i32), here, 1, there, 1, 0)
        if got <= 0:
            return i64(1)
        done += got
    return i64(0)


@native(internal=True)
def rlx_meet_all(table: ptr, length: i64, place: i64) -> i64:
    """Post, and wait for all; the verdict, or ENDED by the callback."""
    post = field(table, POST, ptr)
    for value, number in ((table[TAG], sync.TAG), (length, sync.LENGTH), (place, sync.PLACE)):
        post[number] = value
    verdict = call(field(table, BARRIER, ptr), post, returns=i64)
    while verdict < 0:
        ended = call(field(table, LOOK, ptr), returns=i64)
        wait = field(table, WAIT, ptr)
        verdict = i64(ENDED) if ended != 0 else call(wait, post, returns=i64)
    return verdict


@inline
def _piece(table: ptr, total: i64, done: i64 | int) -> i64:
    """Bytes of the piece that begins `done` bytes into `total`."""
    return max(min(total - done, table[SLOT]), i64(0))


@native(internal=True)
def rlx_fill(table: ptr, done: i64) -> None:
    """Copy the next piece of every region that others read into the stage."""
    post = field(table, POST, ptr)
    me, regions = post[sync.ME], table[REGIONS]
    stage = byte_at(field(field(table, STAGES, ptr), me, ptr), _position(table))
    loop, array, cuts = _loop_for(table), field(table, ARRAY, ptr), field(table, CUTS, ptr)
    sender = table[SENDER]
    sends = (sender == NOBODY) | (sender == me)
    alone = post[sync.MEMBERS] == 1
    if sends & (not alone):
        for receiver in range(regions):
            offset = cuts[receiver * 2]
            length = cuts[receiver * 2 + 1]
            to = byte_at(stage, receiver * table[SLOT])
            source = byte_at(array, offset + done)
            if (receiver != me) | (regions == 1):
                rlx_move(to, source, _piece(table, length, done), loop)


@inline
def _position(table: ptr) -> i64:
    return field(table, RING, ptr)[POSITION]


@inline
def _far(table: ptr) -> i64:
    """For how many calls the others count as far away; 0 if they are near."""
    return field(table, RING, ptr)[FAR]


@inline
def _loop_for(table: ptr) -> ptr:
    """How to write what others will read."""
    return select(_far(table) != 0, field(table, PAST, ptr), field(table, FILL, ptr))


# ---- the exchange


@dataclass(frozen=True)
class _Ranks:
    """Run-time values that all parts of an exchange read."""

    table: ptr
    members: i64
    me: i64
    places: ptr  # what the members have posted
    sources: ptr  # a pointer to every member's data
    destinations: ptr
    only: i64  # the one sender, or NOBODY
    shares: bool


@native
def rlx_exchange(table: ptr) -> i64:
    """Meet, copy or reduce, meet again."""
    post = field(table, POST, ptr)
    members, me = post[sync.MEMBERS], post[sync.ME]
    places = at(post, sync.RECEIVED + 1)
    sources = field(table, POINTERS, ptr)
    destinations = at(sources, members)
    only = table[SENDER]
    shares = table[SHARE] != 0
    ranks = _Ranks(table, members, me, places, sources, destinations, only, shares)
    place = _offer(table)
    if place == 0:
        _first_fill(table)
    verdict = rlx_meet_all(table, table[LENGTH], place)
    if verdict & (_DIFFER | ENDED) != 0:
        return verdict
    if verdict & sync.SOME_PLACES == 0:
        _staged(ranks)
    else:
        _in_place(ranks, verdict)
    return i64(DONE)


@inline
def _offer(table: ptr) -> i64:
    """What to post: a place in the heap, or in this process's own memory if the others are far, or 0."""
    far, ring = _far(table), field(table, RING, ptr)
    if (far != 0) & (table[TOO_LONG] != 0):
        ring[FAR] = far - 1
    is_away = (_far(table) != 0) | (table[ALWAYS] != 0)
    given = table[PLACE]
    elsewhere = select(is_away, table[AWAY], 0)
    return select(given != 0, given, elsewhere)


@inline
def _first_fill(table: ptr) -> None:
    """Fill the stage, and see how long it takes; not while the ring's memory is new."""
    ring, limit = field(table, RING, ptr), table[TOO_LONG]
    begin = clock()
    rlx_fill(table, 0)
    is_slow = clock() - begin > limit
    is_near = (_far(table) == 0) & (limit != 0)
    if is_near & (ring[ROUNDS] != 0):
        slow = select(is_slow, ring[SLOW] + 1, 0)
        ring[SLOW] = slow
        if slow >= SLOW_FILLS:
            ring[FAR] = FAR_CALLS


@inline
def _meet_again(ranks: _Ranks) -> None:
    """A barrier."""
    verdict = rlx_meet_all(ranks.table, 0, 0)
    if verdict & (sync.TAGS_DIFFER | ENDED) != 0:
        leave(verdict)


@inline
def _each_sender(ranks: _Ranks, visit: Callable[[i64], None]) -> None:
    """Visit the one sender, or all: oneself first and so on round, so that nobody is crowded."""
    if ranks.only == NOBODY:
        for turn in range(ranks.members):
            around = ranks.me + turn
            wrapped = around - ranks.members
            visit(select(around < ranks.members, around, wrapped))
    else:
        visit(ranks.only)


@inline
def _place(ranks: _Ranks, member: i64) -> i64:
    """What a member has posted: 1 + offset in its heap, minus an address in its own memory, or 0."""
    return ranks.places[member * 2]


# ---- arrays that are in the heap


@inline
def _in_place(ranks: _Ranks, verdict: i64) -> None:
    table, sources = ranks.table, ranks.sources

    def need(member: i64) -> None:
        place = _place(ranks, member)
        if place == 0:
            leave(verdict)  # some have their arrays elsewhere: nothing is moved, all know it
        heap = field(table, HEAPS, ptr)[member] + (place - 1)
        address = select(place < 0, -place, heap)
        sources[member] = address + table[START]

    _each_sender(ranks, need)
    if ranks.shares:
        for member in range(ranks.members):
            ranks.destinations[member] = field(sources, member, ptr)
    _act(ranks, i64(0), table[SIZE], ranks.members)
    _meet_again(ranks)  # nobody may change its array before all have read it


# ---- arrays that are staged


@inline
def _staged(ranks: _Ranks) -> None:
    table = ranks.table
    slot, longest = table[SLOT], table[LONGEST]
    shift = select(table[REGIONS] != 1, ranks.me * slot, 0)
    for done in range(0, max(longest, i64(1)), slot):
        _staged_piece(ranks, done, shift, slot, longest)


@inline
def _staged_piece(ranks: _Ranks, done: i64 | int, shift: i64, slot: i64, longest: i64) -> None:
    table, sources, destinations = ranks.table, ranks.sources, ranks.destinations
    position, ring = _position(table), field(table, RING, ptr)
    here = position + shift

    def stand(member: i64) -> None:
        sources[member] = byte_at(field(field(table, STAGES, ptr), member, ptr), here)

    _each_sender(ranks, stand)
    own_stage = field(sources, ranks.me, ptr)
    own = byte_at(field(table, ARRAY, ptr), table[START] + done)
    if (ranks.only == NOBODY) | (ranks.only == ranks.me):  # needs no detour
        sources[ranks.me] = own
    if ranks.shares:
        destinations[0] = own
        destinations[1] = own_stage
    # The reduction writes them to both places, or the others' copy is non-temporal afterwards.
    size, is_far = _piece(table, table[SIZE], done), _far(table) != 0
    _act(ranks, done, size, select(is_far, i64(1), i64(2)))
    past = field(table, PAST, ptr)
    if is_far & ranks.shares:
        rlx_move(own_stage, own, size, past)
    moved = position + table[REGIONS] * slot
    is_full = moved + STAGE_BYTES > RING_BYTES
    ring[POSITION] = select(is_full, 0, moved)
    ring[ROUNDS] = ring[ROUNDS] + zext(is_full, i64)
    following = done + slot
    has_more = following < longest
    if has_more:
        rlx_fill(table, following)
    if has_more | ranks.shares:
        _meet_again(ranks)
    if ranks.shares:
        _collect(ranks, done, position)


@inline
def _collect(ranks: _Ranks, done: i64 | int, position: i64) -> None:
    """Copy the results of one piece from the stages of the ranks that have reduced them."""
    table = ranks.table
    cuts, array = field(table, CUTS, ptr), field(table, ARRAY, ptr)
    for owner in range(table[REGIONS]):
        offset = cuts[owner * 2]
        size = _piece(table, cuts[owner * 2 + 1], done)
        stage = field(field(table, STAGES, ptr), owner, ptr)
        source = byte_at(stage, position + owner * table[SLOT])
        to = byte_at(array, offset + done)
        if owner != ranks.me:
            rlx_move(to, source, size, field(table, COPY, ptr))


# ---- what happens between two barriers


@inline
def _act(ranks: _Ranks, done: i64 | int, size: i64, places: i64) -> None:
    """Reduce or copy `size` bytes from everybody, which belong `done` bytes into the results."""
    table = ranks.table
    to = byte_at(field(table, TO, ptr), done)

    def copy(member: i64) -> None:
        place = byte_at(to, member * table[STRIDE])
        source = field(ranks.sources, member, ptr)
        is_elsewhere = (_place(ranks, member) < 0) & (member != ranks.me)
        loop = field(table, COPY, ptr)
        if is_elsewhere:
            process = field(table, PROCESSES, ptr)[member]
            if rlx_read(process, place, source, size) != 0:
                leave(UNREADABLE)
        else:
            rlx_move(place, source, size, loop)

    if table[REDUCE] == 0:
        _each_sender(ranks, copy)
    else:
        if not ranks.shares:
            ranks.destinations[0] = to
        count = select(ranks.shares, places, 1)
        elements = udiv(size, table[ITEM])
        call(field(table, REDUCE, ptr), ranks.sources, ranks.members, count, elements)


@native
def rlx_again(table: ptr) -> i64:
    """The exchange, if the arrays are what they were: (*address ^ value) & mask is 0."""
    facts = field(table, FACTS, ptr)
    for index in range(table[COMPARED]):
        fact = at(facts, index * 3)
        word = field(fact, 0, ptr)[0]
        if (word ^ fact[1]) & fact[2] != 0:
            return i64(CHANGED)
    return rlx_exchange(table)


@native
def rlx_meet(args: ptr, thread: i64, threads: i64, part: i64) -> None:
    """The exchange as a kernel of a program, for one thread."""
    verdict = rlx_exchange(field(args, KERNEL_ARGUMENT, ptr))
    error = select(verdict & ENDED != 0, i64(STOPPED), i64(DIFFERENT))
    if verdict != DONE:
        field(args, 0, ptr)[0] = error


@functools.cache
def loaded() -> Code:
    """The code, compiled once per user and loaded once per process."""
    return load_for_host(emit)


def kernel() -> int:
    """Where the kernel for compiled programs begins."""
    return loaded().address(rlx_meet.name)
