"""Waiting, sleeping and telling the time: what native functions share, expanded where it is called."""

from __future__ import annotations

from collections.abc import Callable

from rlx.codegen.native.notation import inline
from rlx.codegen.native.words import (
    Int,
    alloca,
    atomic_load,
    atomic_rmw,
    atomic_store,
    builder,
    external,
    gep,
    i32,
    i64,
    pause,
    ptr,
    store,
    trunc,
)
from rlx.target.cpu import Target

SPINS = 2000
"""Looks, with a pause each, before a thread that waits yields or sleeps: some 30 to 50 microseconds, far
beyond the skew of balanced shares."""

SPIN_MICROSECONDS = 200.0
"""How long a thread that waits may keep its core from others; then it sleeps."""

_NAP_NS = 5_000_000  # how long a thread sleeps that nobody wakes
_YIELD_NS = 100_000  # of that, after the pauses, which take twice as long on some machines
_CLOCK_MONOTONIC = 1
_FUTEX_WAIT_PRIVATE, _FUTEX_WAKE_PRIVATE = 128, 129
_DOZE_NS = 50_000
_MXCSR_DEFAULT = 0x1F80  # all exceptions masked, round to nearest, denormals kept

_clock_gettime = external("clock_gettime", i32)
_syscall = external("syscall", i64, fixed=1)
_save_mxcsr, _set_mxcsr = external("llvm.x86.sse.stmxcsr"), external("llvm.x86.sse.ldmxcsr")
_get_fpcr, _set_fpcr = external("llvm.aarch64.get.fpcr", i64), external("llvm.aarch64.set.fpcr")
_web_wait = external("llvm.wasm.memory.atomic.wait32", i32)
_web_notify = external("llvm.wasm.memory.atomic.notify", i32)
sched_yield = external("sched_yield", i32)


@inline
def clock() -> i64:
    """Nanoseconds of the clock behind Python's `time.perf_counter_ns`; about 25 ns to read."""
    spec = alloca(i64, 2)
    _clock_gettime(i32(_CLOCK_MONOTONIC), spec)
    seconds, nanoseconds = spec[0], spec[1]
    return seconds * 1_000_000_000 + nanoseconds


@inline
def wait_while(
    condition: Callable[[], bool], spins: Int, rest: Callable[[], object] = lambda: sched_yield()
) -> None:
    """Wait for another thread that works: pause `spins` times, then yield, as it may need this very core."""
    tries = 0
    while condition():
        if tries < spins:
            pause()
        else:
            rest()
        tries += 1


@inline
def wait_for_change(word: ptr, old: i64, spins: Int, sleepers: ptr) -> None:
    """Wait until a thread that works calls `change` on `word`, which is `old`: pause `spins` times, then
    yield, then sleep; `sleepers` counts those that do. It should be on another cache line.

    A barrier between storing the word and looking at `sleepers` would cost every `change` some 25 ns. So one
    that stores at the very moment when another falls asleep may not see it: nobody sleeps for long.
    """
    tries, deadline = i64(0), i64(0)
    while atomic_load(i64, word) == old:
        if tries < spins:
            pause()
        else:
            if tries == spins:
                deadline = clock() + _YIELD_NS
            if clock() < deadline:
                sched_yield()
            else:
                atomic_rmw("add", sleepers, i64(1), "seq_cst")
                if atomic_load(i64, word, "seq_cst") == old:
                    sleep_while(word, old, _NAP_NS)
                atomic_rmw("sub", sleepers, i64(1), "monotonic")
        tries += 1


@inline
def change(word: ptr, new: i64, sleepers: ptr) -> None:
    """Store `new`, and wake who sleeps in `wait_for_change`."""
    atomic_store(new, word)
    if atomic_load(i64, sleepers, "monotonic") != 0:
        wake(word, everybody=True)


@inline
def doze(word: ptr, expected: i64) -> None:
    """Yield in WebAssembly, which only sleeps: for a moment, while a word is what is expected."""
    _web_wait(word, trunc(expected, i32), i64(_DOZE_NS))


@inline
def sleep_while(word: ptr, expected: i64, most_ns: int | None = None) -> None:
    """Sleep until `wake` is called on `word`, or for `most_ns`, unless it no longer holds `expected`. May
    return early.

    Targets are machines with Linux, whatever system writes their code.
    """
    if builder().module.target.web:
        limit = i64(-1 if most_ns is None else most_ns)
        _web_wait(word, trunc(expected, i32), limit)  # a page's main thread must not
    else:
        number = _futex_number(builder().module.target)
        time = ptr(0)
        if most_ns is not None:
            time = alloca(i64, 2)
            time[0] = most_ns // 1_000_000_000
            time[1] = most_ns % 1_000_000_000
        # The futex compares 32 bits: the low half of the word, which comes first on both machines.
        _syscall(number, word, i32(_FUTEX_WAIT_PRIVATE), trunc(expected, i32), time)


@inline
def wake(word: ptr, everybody: bool = False) -> None:
    """Wake a thread that sleeps on `word`, or all of them."""
    if builder().module.target.web:
        _web_notify(word, i32(2**31 - 1 if everybody else 1))
    else:
        number = _futex_number(builder().module.target)
        _syscall(number, word, i32(_FUTEX_WAKE_PRIVATE), i32(2**31 - 1 if everybody else 1))


@inline
def sleep_announced(word: ptr, last: i64, asleep: ptr) -> None:
    """Set `asleep` and sleep until `wake` is called, if `word` is still `last`. May return early.

    Who changes `word` looks at `asleep` afterwards, and this looks at `word` once more after the
    announcement: one of the two sees the other. The caller clears `asleep`.
    """
    atomic_rmw("xchg", asleep, i64(1), "seq_cst")
    if atomic_load(i64, word, "seq_cst") == last:
        sleep_while(word, last)


def _futex_number(target: Target) -> int:
    return 202 if target.x86 else 98


@inline
def default_float_mode() -> Callable[[], None]:
    """Round to nearest and keep denormals from here on; the returned function writes the way back.

    Other libraries change this mode in the threads they load in. Results must not depend on that, nor on
    which thread computes them.
    """
    if builder().module.target.x86:
        modes = alloca(i32, 2, align=4)
        wanted = gep(modes, 1, i32)
        _save_mxcsr(modes)
        store(i32(_MXCSR_DEFAULT), wanted)
        _set_mxcsr(wanted)
        return lambda: _set_mxcsr(modes)
    if builder().module.target.web:  # WebAssembly has no other mode
        return lambda: None
    saved = _get_fpcr()
    _set_fpcr(0)
    return lambda: _set_fpcr(saved)
