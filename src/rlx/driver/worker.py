"""A native thread that does jobs for others: one loop, for copies and for the reader of streamed weights.

It shares a control block with Python and with kernels, a table of 8-byte fields, and never needs Python's
lock. Without a job it spins for some microseconds, because waking a thread takes longer than most jobs. Then
it sleeps until it is signalled.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rlx.codegen.native.notation import inline, native
from rlx.codegen.native.waiting import SPINS, sleep_announced, wake
from rlx.codegen.native.words import at, atomic_load, atomic_rmw, atomic_store, i64, pause, ptr
from rlx.config import THREADS


class Control(IntEnum):
    """The first fields of a control block. Those that threads write are on cache lines of their own."""

    SPINS = 0  # looks before the worker sleeps, or before who waits for it gives its core away
    STOP = 1
    SIGNAL = 8  # changes when there may be a job
    POSTED = 9  # for the jobs: what changes just before the signal does
    ASLEEP = 16  # whether the worker waits for a signal
    FIELDS = 24  # those of the jobs begin here


# -- the native part


@inline
def work(control: ptr, job: Callable[[ptr], i64]) -> None:
    """What the thread runs: jobs in their order, until it is stopped and none is left.

    `job` does one, or gives 0 where there is none at present.
    """
    tries, running = i64(0), i64(1)
    while running != 0:
        # Both before the look for a job: what came before the signal, or before the stop, is seen there.
        last = atomic_load(i64, at(control, Control.SIGNAL), "seq_cst")
        stopped = is_stopped(control)
        if job(control) != 0:
            tries = i64(0)
        elif stopped:
            running = i64(0)
        elif tries < control[Control.SPINS]:
            pause()
            tries += 1
        else:
            sleep_announced(at(control, Control.SIGNAL), last, at(control, Control.ASLEEP))
            atomic_store(i64(0), at(control, Control.ASLEEP))


@inline
def is_stopped(control: ptr) -> bool:
    """Whether the worker was told to stop."""
    return atomic_load(i64, at(control, Control.STOP)) != 0


@inline
def signal(control: ptr) -> None:
    """Tell the worker to look, after a change of what it looks at."""
    place = at(control, Control.SIGNAL)
    atomic_rmw("add", place, i64(1), "seq_cst")
    if atomic_load(i64, at(control, Control.ASLEEP), "seq_cst") != 0:
        wake(place)


@native
def rlx_stop_worker(control: ptr) -> None:
    """Ask the worker to leave when nothing is left."""
    atomic_store(i64(1), at(control, Control.STOP))
    signal(control)


# -- the thread

CFunction = Callable[..., int]  # what a function without a result gives is not read


class Functions(Protocol):
    """The loaded functions of a worker: what its thread runs, and `rlx_stop_worker`."""

    @property
    def work(self) -> CFunction: ...

    @property
    def stop(self) -> CFunction: ...


class Worker:
    """The thread of a control block. It keeps the memory alive that it works on, but not its owner.

    It runs from `start` to `stop`, until the owner is forgotten, or until the interpreter ends.
    """

    def __init__(
        self, name: str, functions: Functions, control: NDArray[np.int64], *kept: object, spins: int = SPINS
    ) -> None:
        # On a single core, spinning only keeps the other side out.
        control[Control.SPINS] = spins if THREADS.default() > 1 else 0
        self._name, self._kept = name, (functions, control, *kept)
        self._process = 0  # that has the thread
        self._finalizer: weakref.finalize[..., object] | None = None

    @property
    def is_here(self) -> bool:
        """Whether this process started the thread: threads do not survive a fork."""
        return self._process == os.getpid()

    def start(self, owner: object) -> None:
        """Start the thread, unless this process has it."""
        if self.is_here:
            return
        if self._finalizer is not None:
            self._finalizer.detach()  # of a thread that the parent process has
        thread = threading.Thread(target=_work, args=self._kept, name=self._name, daemon=True)
        thread.start()
        self._process = os.getpid()
        # Before the owner gives up the memory of its jobs, and before the interpreter takes the code away.
        self._finalizer = weakref.finalize(owner, _stop, *self._kept[:2], thread, self._process)

    def stop(self) -> None:
        """End the thread, and wait for it. A second call does nothing."""
        if self._finalizer is not None:
            self._finalizer()


def _work(functions: Functions, control: NDArray[np.int64], *_: object) -> None:
    functions.work(control.ctypes.data)


def _stop(functions: Functions, control: NDArray[np.int64], thread: threading.Thread, process: int) -> None:
    if os.getpid() == process:
        functions.stop(control.ctypes.data)
        thread.join()
