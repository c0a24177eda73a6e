"""The thread of a native worker, which does jobs for others: copies, and reading of streamed weights.

It shares a control block with Python and with kernels, a table of 8-byte fields, and never needs Python's
lock.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rlx.codegen.native.waiting import SPINS
from rlx.config import THREADS

CFunction = Callable[..., int]  # what a function without a result gives is not read


def looks(spins: int = SPINS) -> int:
    """How often a worker, or who waits for it, looks before it gives its core away.

    >>> looks(0)
    0
    """
    return spins if THREADS.default() > 1 else 0  # on a single core, spinning only keeps the other side out


class Functions(Protocol):
    """The loaded functions of a worker: what its thread runs, and what ends it."""

    @property
    def work(self) -> CFunction: ...

    @property
    def stop(self) -> CFunction: ...


class Worker:
    """The thread of a control block. It keeps the memory alive that it works on, but not its owner.

    It runs from `start` to `stop`, until the owner is forgotten, or until the interpreter ends.
    """

    def __init__(self, name: str, functions: Functions, control: NDArray[np.int64], *kept: object) -> None:
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
