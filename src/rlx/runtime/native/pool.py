"""A fork-join pool of native threads, without a C compiler or an OpenMP library.

Python makes the threads; each enters one native loop through ctypes, which releases the interpreter lock, and
stays there. A worker owns a mailbox. To run a function the caller writes it into the mailboxes, runs share 0
itself and waits for the rest. A worker without work spins for a moment, because the next run is often near,
and then sleeps on a futex. So does a caller that waits for a worker.

Runs of one pool follow one another: callers from several Python threads queue at a lock. Two runs at once
would only share the same cores. Ctrl-C during a run is seen when the run is over.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import weakref

import numpy as np
from numpy.typing import NDArray

from rlx.codegen.native.irtext import Module
from rlx.codegen.native.jit import Code
from rlx.codegen.native.notation import emit_all, inline, native
from rlx.codegen.native.waiting import (
    SPIN_MICROSECONDS,
    SPINS,
    change,
    clock,
    sleep_announced,
    wait_for_change,
    wake,
)
from rlx.codegen.native.words import (
    at,
    atomic_load,
    atomic_rmw,
    atomic_store,
    call,
    field,
    i64,
    load,
    pause,
    ptr,
    store,
    zext,
)
from rlx.errors import ConfigError, RlxError
from rlx.runtime.memory import table
from rlx.runtime.native.code import build
from rlx.runtime.store.cache import default_cache
from rlx.system import SYSTEM

# Read at import: libraries with OpenMP settings may later pin the main thread, and with it every new thread.
CPUS: tuple[int, ...] = tuple(SYSTEM.cpus())

# Fields of a mailbox, 8 bytes each. Caller and worker write different pairs of cache lines. Worker i has box
# i; box 0 belongs to the team, and its field _ASLEEP counts the workers that sleep.
_GO, _ASLEEP, _FUNCTION, _ARGUMENT, _SPIN_NS = range(5)
_DONE, _AWAITED = 16, 24
_BOX_FIELDS = 32
_CLOCK_EVERY = 64  # pauses between two looks at the clock


class PoolError(RlxError):
    """The thread pool was used against its contract."""


class Pool:
    """Runs native functions `void f(ptr argument, i64 thread)` on several threads at once.

    `threads` is capped at the cores this process may use, unless `oversubscribe` is set; workers of an
    oversubscribed pool do not spin. Threads start with the first run that needs them and end with `close`,
    when the pool is dropped, or at exit. A forked child starts its own.

    >>> with Pool(threads=1) as pool:
    ...     pool.threads
    1
    """

    def __init__(
        self, threads: int | None = None, spin_us: float = SPIN_MICROSECONDS, oversubscribe: bool = False
    ) -> None:
        wanted = len(CPUS) if threads is None else threads
        if wanted < 1:
            raise ConfigError(f"a pool needs at least 1 thread, not {wanted}")
        self.threads = wanted if oversubscribe else min(wanted, len(CPUS))
        self.oversubscribed = self.threads > len(CPUS)
        self._spin_ns = 0 if self.oversubscribed else int(spin_us * 1000)
        self._closed = False
        self._lock = threading.Lock()
        self._owner = 0
        self._team: _Team | None = None
        self._stop_team: weakref.finalize[[], Pool] | None = None
        _pools.add(self)

    @property
    def wait_spins(self) -> int:
        """How often threads of this pool should pause before they yield, and sleep, while they wait for each
        other."""
        return 0 if self.oversubscribed else SPINS

    def run(self, function: int, argument: int, threads: int | None = None) -> None:
        """Call the function at address `function` as f(argument, thread) on every thread, and wait for all.

        One thread means a plain call in this thread: no lock, no worker.
        """
        count = self.threads if threads is None else threads
        if count == 1:
            _functions().fork_join(None, function, argument, 1)
            return
        if not 1 < count <= self.threads:
            raise ConfigError(f"a run on {count} threads does not fit a pool of {self.threads}")
        me = threading.get_ident()
        if self._owner == me:
            raise PoolError(
                "a function that a pool runs has asked the same pool to run another; use one thread inside"
            )
        with self._lock:
            team = self._team
            if team is None or len(team) < count:
                team = self._grow(count)
            if team.has_sleepers:
                team.spread()
            self._owner = me
            try:
                team.fork_join(team.address, function, argument, count)
            finally:
                self._owner = 0

    def close(self) -> None:
        """End the threads. A closed pool still runs on one thread, and refuses more."""
        with self._lock:
            self._closed = True
            self._end_team()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _grow(self, threads: int) -> _Team:
        """Replace the team by a larger one. The old one goes only when the new one stands."""
        if self._closed:
            raise PoolError("this pool is closed; make a new one or run on one thread")
        team = _Team(threads, self._spin_ns)
        self._end_team()
        self._team, self._stop_team = team, weakref.finalize(self, team.stop)
        return team

    def _end_team(self) -> None:
        if self._stop_team is not None:
            self._stop_team()
        self._team = self._stop_team = None

    def _after_fork(self) -> None:
        """Start without workers in a forked child: the parent's threads do not exist there."""
        if self._stop_team is not None:
            self._stop_team.detach()
        self._lock = threading.Lock()
        self._owner = 0
        self._team = self._stop_team = None


class _Team:
    """Caller plus workers 1 .. threads - 1, and their mailboxes; all run when the constructor returns."""

    def __init__(self, threads: int, spin_ns: int) -> None:
        self._threads = threads
        self._boxes: NDArray[np.int64] = table(threads * _BOX_FIELDS)
        self._boxes[_SPIN_NS::_BOX_FIELDS] = spin_ns
        self._view = self._boxes.data
        self.address = self._boxes.ctypes.data
        self._workers: list[threading.Thread] = []
        # Core of each thread; the first is left to the caller, who is never pinned.
        here = SYSTEM.current_cpu()
        cores = sorted(CPUS, key=lambda core: (core != here, core))
        self._cores = cores[:threads] if threads <= len(CPUS) else []
        functions = _functions()
        self.fork_join = functions.fork_join
        try:
            for thread in range(1, threads):
                # The thread keeps the mailboxes and the code alive, but not the pool: a dropped pool ends.
                arguments = (functions, self._boxes, thread)
                worker = threading.Thread(target=_work, args=arguments, name=f"rlx-{thread}", daemon=True)
                self._workers.append(worker)
                worker.start()
                self._pin(thread)
        except BaseException:  # Ctrl-C or no more threads: end those that run, keep the state as before
            self.stop()
            raise

    def __len__(self) -> int:
        return self._threads

    @property
    def has_sleepers(self) -> bool:
        return self._view[_ASLEEP] != 0

    def spread(self) -> None:
        """Move the worker whose core the caller occupies to the free core: it would wait for the caller."""
        core = SYSTEM.current_cpu()
        if core in self._cores[1:]:
            thread = self._cores.index(core)
            self._cores[0], self._cores[thread] = core, self._cores[0]
            self._pin(thread)

    def _pin(self, thread: int) -> None:
        """Bind a worker to its core, or to all of the process where there are too few for each."""
        try:
            SYSTEM.pin(self._workers[thread - 1].native_id or 0, self._cores[thread:][:1] or CPUS)
        except OSError:
            pass  # a container may forbid it, or have taken the core away; the scheduler then decides

    def stop(self) -> None:
        """Tell every worker to leave, and wait for them."""
        if self._workers:
            self.fork_join(self.address, None, None, self._threads)
        for worker in self._workers:
            if worker.ident is not None and worker is not threading.current_thread():
                worker.join(timeout=1.0)
        self._workers = []


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def _work(functions: _Functions, boxes: NDArray[np.int64], thread: int) -> None:
    functions.worker(boxes[thread * _BOX_FIELDS :].ctypes.data, thread)


def _forget_pools() -> None:
    for pool in list(_pools):
        pool._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pools)


@functools.cache
def default_pool() -> Pool:
    """The pool that programs share, as wide as the process may be.

    >>> default_pool().threads == len(CPUS)
    True
    """
    return Pool()


class _Functions:
    """The two native functions of the pool."""

    def __init__(self, code: Code) -> None:
        self._code = code
        self.worker = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(code.address("rlx_worker"))
        self.fork_join = ctypes.CFUNCTYPE(
            None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64
        )(code.address("rlx_fork_join"))


def prepare() -> None:
    """Have the native code of pools ready, which the first run waits for otherwise."""
    _functions()


@functools.cache
def _functions() -> _Functions:
    return _Functions(build(emit_pool, default_cache()))


def emit_pool(module: Module) -> None:
    """Write the worker's loop and the caller's fork-join into `module`."""
    emit_all(module, rlx_worker, rlx_fork_join)


@native
def rlx_worker(box: ptr, thread: i64) -> None:
    """What a worker runs: wait for a function, call it and say so, until there is no function."""
    go, asleep, done = at(box, _GO), at(box, _ASLEEP), at(box, _DONE)
    sleepers = at(box, _ASLEEP - thread * _BOX_FIELDS)
    spin_ns = box[_SPIN_NS]
    ticket, running = i64(0), i64(1)
    while running != 0:
        ticket = _await_ticket(go, ticket, asleep, sleepers, spin_ns)
        function, argument = field(box, _FUNCTION, ptr), field(box, _ARGUMENT, ptr)
        is_work = function != 0
        if is_work:
            call(function, argument, thread)
            change(done, ticket, at(box, _AWAITED))
        running = zext(is_work, i64)


@inline
def _await_ticket(go: ptr, last: i64, asleep: ptr, sleepers: ptr, spin_ns: i64) -> i64:
    """The number of the next run: spin until `go` is no longer `last`, and sleep if that takes long."""
    deadline = clock() + spin_ns
    tries = 0
    while atomic_load(i64, go) == last:
        if tries & (_CLOCK_EVERY - 1) != _CLOCK_EVERY - 1:
            pause()
        elif clock() > deadline:
            atomic_rmw("add", sleepers, i64(1), "monotonic")
            sleep_announced(go, last, asleep)
            atomic_store(i64(0), asleep, "monotonic")
            atomic_rmw("sub", sleepers, i64(1), "monotonic")
        tries += 1
    return atomic_load(i64, go)


@native
def rlx_fork_join(boxes: ptr, function: ptr, argument: ptr, threads: i64) -> None:
    """Post the function to all workers, run share 0 here and wait for the rest; null ends the workers."""

    def place(thread: int, field: int) -> ptr:
        return at(boxes, thread * _BOX_FIELDS + field)

    for thread in range(1, threads):
        go = place(thread, _GO)
        store(function, place(thread, _FUNCTION))
        store(argument, place(thread, _ARGUMENT))
        atomic_rmw("add", go, i64(1), "seq_cst")
        if atomic_load(i64, place(thread, _ASLEEP), "seq_cst") != 0:
            wake(go)
    if function != 0:
        call(function, argument, 0)
        for thread in range(1, threads):
            ticket = load(i64, place(thread, _GO))
            wait_for_change(place(thread, _DONE), ticket - 1, SPINS, place(thread, _AWAITED))
