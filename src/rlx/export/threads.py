"""Threads of exported programs: they wait for runs, walk the steps together, and meet after each."""

from __future__ import annotations

from rlx.codegen.native.notation import inline, native
from rlx.codegen.native.waiting import (
    SPINS,
    default_float_mode,
    doze,
    sched_yield,
    sleep_while,
    wait_while,
    wake,
)
from rlx.codegen.native.words import (
    alloca,
    at,
    atomic_load,
    atomic_rmw,
    atomic_store,
    builder,
    byte_at,
    field,
    i32,
    i64,
    pause,
    ptr,
    sext,
    store,
)
from rlx.export.layout import ARRIVED, ASLEEP, EPOCH, ERROR, GO, QUIT, SEEN, THREAD_BYTES, THREADS
from rlx.export.steps import rlx_steps

_WEB_SPINS = 10 * SPINS  # WebAssembly has no pause, so they take less time


@native(internal=True, noinline=True)
def rlx_meet(context: ptr, threads: i64, own: ptr) -> i64:
    """Wait for all threads; gives the error that all of them see. `own` counts meetings of this thread, and
    has its number.

    The last thread to arrive decides what they see, so that all of them go on or all stop.
    """
    if threads == 1:
        return context[ERROR]
    epoch, place = own[0], at(context, EPOCH)
    own[0] = epoch + 1
    if atomic_rmw("add", at(context, ARRIVED), i64(1)) == threads - 1:
        atomic_store(i64(0), at(context, ARRIVED), "monotonic")
        context[SEEN] = context[ERROR]
        atomic_store(epoch + 1, place)
    else:
        web = builder().module.target.web
        rest = (lambda: _doze_unless_first(place, epoch, own)) if web else sched_yield
        wait_while(lambda: atomic_load(i64, place) == epoch, _WEB_SPINS if web else SPINS, rest)
    return context[SEEN]


@inline
def _doze_unless_first(place: ptr, epoch: i64, own: ptr) -> None:
    """Leave the core to others; the main thread of a page must not."""
    if own[1] != 0:
        doze(place, epoch)


@native(internal=True, noinline=True)
def rlx_work(context: ptr, thread: i64, threads: i64) -> i32:
    """The share of a thread in a run, which is over when all threads are."""
    own = alloca(i64, 2)
    own[1] = thread
    # Nobody can move the epoch before this thread arrives.
    own[0] = atomic_load(i64, at(context, EPOCH), "monotonic")
    restore = default_float_mode()
    code = rlx_steps(context, thread, threads, own)
    restore()
    rlx_meet(context, threads, own)
    return code


@inline
def start_others(context: ptr) -> None:
    """Let all other threads begin a run."""
    if context[THREADS] > 1:
        atomic_rmw("add", at(context, GO), i64(1), "seq_cst")
        if atomic_load(i64, at(context, ASLEEP), "seq_cst") != 0:
            wake(at(context, GO), everybody=True)


@native
def rlx_enlist(context: ptr, threads: i32, *, scratch: tuple[int, int]) -> ptr:
    """Note how many threads share runs, and what each of them is given; that is after the scratch."""
    begin, per_thread = scratch
    count = sext(threads, i64)
    records = byte_at(context, count * per_thread + begin)
    for thread in range(count):
        record = byte_at(records, thread * THREAD_BYTES)
        store(context, record)
        record[1] = thread
    context[THREADS] = count
    return records


@native
def rlx_worker(record: ptr) -> ptr:
    """What a thread does until the model is closed."""
    context, number = field(record, 0, ptr), record[1]
    last, go = i64(0), at(context, GO)
    while atomic_load(i64, at(context, QUIT)) == 0:
        tries = 0
        while atomic_load(i64, go) == last:
            if tries < SPINS:
                pause()
            else:
                # Who starts a run looks here after the change of the word that this sleeps on.
                atomic_rmw("add", at(context, ASLEEP), i64(1), "seq_cst")
                sleep_while(go, last)
                atomic_rmw("sub", at(context, ASLEEP), i64(1), "seq_cst")
            tries += 1
        last += 1
        if atomic_load(i64, at(context, QUIT)) == 0:
            rlx_work(context, number, context[THREADS])
    return ptr(0)
