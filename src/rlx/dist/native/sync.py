"""Native rendezvous: epoch words that ranks share, written as LLVM IR with acquire and release order.

Every rank owns one *line* per group, which it alone writes: its epoch (how many barriers it has entered, 32
bits that may wrap) and, for each parity of the epoch, a post: a tag that says what it came for, the length
of its data and, if they are in its heap, their place. A waiter reads the others' lines, so a missing rank
is visible without any further bookkeeping. Waiting spins briefly, then sleeps in a futex for one short
slice; Python looks after deadlines and deaths between slices.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlx.codegen.native.irtext import Module
from rlx.codegen.native.notation import emit_all, inline, native
from rlx.codegen.native.words import (
    at,
    atomic_load,
    atomic_rmw,
    atomic_store,
    builder,
    byte_at,
    compare_exchange,
    external,
    field,
    i1,
    i32,
    i64,
    load,
    pause,
    ptr,
    select,
    store,
    trunc,
    zext,
)
from rlx.codegen.native.waiting import sched_yield
from rlx.records import dataclass
from rlx.runtime.native.code import load_for_host

if TYPE_CHECKING:
    from rlx.target.cpu import Target

# A line, in bytes: epoch i32, sleepers i32, then a post of three i64 for even and for odd epochs. The 64
# bytes in use are one cache line; the rest keeps the neighbour's line out of the prefetcher's way.
LINE_BYTES = 128
EPOCH, SLEEPERS, POSTS, POST_BYTES = 0, 4, 16, 24

# The waiter's private table, in 8-byte fields; (length, place) of every member follow from RECEIVED on.
LINES, MEMBERS, ME, MY_EPOCH, SPINS, SECONDS, NANOSECONDS, TAG, LENGTH, PLACE, RECEIVED = range(11)

# What `barrier` and `wait` return: bits that say what was posted, or -1 - i when member i has not arrived
# yet.
LENGTHS_DIFFER, TAGS_DIFFER, SOME_PLACES = 1, 2, 4

# The last rounds of spinning give the core away, those before only pause.
YIELDS = 336

_FUTEX_ON_X86, _FUTEX_ON_ARM = 202, 98
_FUTEX_WAIT, _FUTEX_WAKE, _EVERYBODY = 0, 1, 2**31 - 1


_syscall = external("syscall", i64, fixed=1)


def emit(target: Target) -> str:
    """The whole module as LLVM IR."""
    module = Module(target)
    emit_all(module, rlx_wait_word, rlx_barrier, rlx_signal, rlx_claim)
    return module.text()


@inline
def _futex(word: ptr, operation: int, value: i64, timeout: ptr) -> None:
    number = _FUTEX_ON_X86 if builder().module.target.x86 else _FUTEX_ON_ARM
    _syscall(number, word, operation, value, timeout, 0, 0)


@inline
def _wake(word: ptr) -> None:
    """After a change of `word`: wake those who sleep on it. The count of sleepers is next to the word."""
    # Sequentially consistent with the sleeper's "count myself, then look again": one of the two sees the
    # other.
    if atomic_load(i32, byte_at(word, SLEEPERS), "seq_cst") != 0:
        _futex(word, _FUTEX_WAKE, i64(_EVERYBODY), ptr(0))


@native(internal=True)
def rlx_reached(word: ptr, goal: i32) -> i1:
    """Whether the counter is at or past the goal, seen modulo 2**32."""
    return i1(atomic_load(i32, word, "seq_cst") - goal >= 0)


@native
def rlx_wait_word(word: ptr, goal: i32, spins: i64, time_slice: ptr) -> i64:
    """Spin, then sleep one slice; 1 if the goal is reached."""
    pauses = spins - YIELDS
    tries = 0
    while (not rlx_reached(word, goal)) & (tries < spins):
        # At first the other is only late by a moment; later it may be waiting for this very core.
        if tries < pauses:
            pause()
        else:
            sched_yield()
        tries += 1
    if not rlx_reached(word, goal):
        sleepers = byte_at(word, SLEEPERS)
        atomic_rmw("add", sleepers, i32(1), "seq_cst")
        seen = atomic_load(i32, word, "seq_cst")
        if seen - goal < 0:
            _futex(word, _FUTEX_WAIT, zext(seen, i64), time_slice)
        atomic_rmw("sub", sleepers, i32(1), "seq_cst")
    return zext(rlx_reached(word, goal), i64)


@native
def rlx_arrive(table: ptr) -> None:
    """Write the post of the next epoch, then publish the epoch."""
    epoch = load(i32, at(table, MY_EPOCH)) + 1
    store(epoch, at(table, MY_EPOCH))
    line = field(field(table, LINES, ptr), table[ME], ptr)
    post = _post(line, epoch)
    for index, number in enumerate((TAG, LENGTH, PLACE)):
        post[index] = table[number]
    atomic_store(epoch, line, "seq_cst")
    _wake(line)


@inline
def _post(line: ptr, epoch: i32) -> ptr:
    """Where a line holds the post of `epoch`. Two suffice: nobody is more than one barrier ahead."""
    parity = zext(epoch & 1, i64)
    return byte_at(byte_at(line, POSTS), parity * POST_BYTES)


@native
def rlx_wait(table: ptr) -> i64:
    """Wait until every member has posted the epoch of `rlx_arrive`, or one slice has passed."""
    epoch = load(i32, at(table, MY_EPOCH))
    lines, members = field(table, LINES, ptr), table[MEMBERS]
    spins, time_slice = table[SPINS], at(table, SECONDS)
    tag, length = table[TAG], table[LENGTH]

    def has_arrived(member: int) -> i1:
        return trunc(rlx_wait_word(field(lines, member, ptr), epoch, spins, time_slice), i1)

    seen = 0
    while seen < members and has_arrived(seen):
        seen += 1
    if seen < members:
        return i64(-1 - seen)
    verdict = i64(0)
    for member in range(members):
        post = _post(field(lines, member, ptr), epoch)
        its_tag, its_length, its_place = post[0], post[1], post[2]
        received = at(at(table, RECEIVED), member * 2)
        received[0] = its_length
        received[1] = its_place
        for mine, other, bit in (
            (its_length, length, LENGTHS_DIFFER),
            (its_tag, tag, TAGS_DIFFER),
            (its_place, 0, SOME_PLACES),
        ):
            verdict = verdict | select(mine != other, i64(bit), 0)
    return verdict


@native
def rlx_barrier(table: ptr) -> i64:
    """Arrive, then wait."""
    rlx_arrive(table)
    return rlx_wait(table)


@native
def rlx_signal(word: ptr) -> None:
    """Count a word up, and wake those who wait for it."""
    atomic_rmw("add", word, i32(1), "seq_cst")
    _wake(word)


@native
def rlx_claim(word: ptr, value: i32) -> None:
    """Set a word that is still 0."""
    compare_exchange(word, i32(0), value)


@dataclass(frozen=True)
class Sync:
    """The native functions; each releases the GIL while it runs. Arguments are addresses and numbers."""

    barrier: Callable[[int], int]
    wait: Callable[[int], int]
    wait_word: Callable[[int, int, int, int], int]
    signal: Callable[[int], None]
    claim: Callable[[int, int], None]
    code: object


@functools.cache
def sync() -> Sync:
    """Compile and load the functions, once per process."""
    code = load_for_host(emit)
    pointer, i64, i32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32

    def function(name: str, returns: Any, *arguments: Any) -> Callable[..., Any]:
        return ctypes.CFUNCTYPE(returns, *arguments)(code.address(f"rlx_{name}"))

    return Sync(
        barrier=function("barrier", i64, pointer),
        wait=function("wait", i64, pointer),
        wait_word=function("wait_word", i64, pointer, i32, i64, pointer),
        signal=function("signal", None, pointer),
        claim=function("claim", None, pointer, i32),
        code=code,
    )
