"""One piece of work in another thread, while the caller does something else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
_WAIT_SECONDS, _MOST_WAITS = 0.01, 20


def let_run_first(has_run: Callable[[], bool]) -> None:
    """Wait a moment for a first run, which somebody else waits for."""
    for _ in range(_MOST_WAITS):
        if has_run() or not threading.main_thread().is_alive():
            break
        time.sleep(_WAIT_SECONDS)


@contextmanager
def meanwhile(work: Callable[[], T], name: str) -> Iterator[Callable[[], T]]:
    """Begin `work` in a thread called `name`. The function that is given waits for it and returns its result,
    or raises what it raised; however the block ends, the work has ended by then.

    >>> with meanwhile(lambda: 6 * 7, "rlx-example") as answer:
    ...     answer()
    42
    """
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as e:  # raised in the thread that asked
            failed.append(e)

    def wait() -> T:
        thread.join()
        if failed:
            raise failed[0]
        return done[0]

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield wait
    finally:
        thread.join()
