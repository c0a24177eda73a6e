"""What RLX is doing, reported to the logger "rlx" of Python's `logging`: silent unless a user turns it on.

    import logging
    logging.basicConfig(level="INFO")        # models, programs, caches; "DEBUG": every stage and kernel too

Python's `logging` takes 20 ms to import. Who listens has imported it, so RLX need not.
"""

from __future__ import annotations

import sys
from _thread import get_ident
from collections.abc import Callable, Iterator
from contextlib import contextmanager

NAME = "rlx"
_DEBUG, _INFO = 10, 20  # levels of logging
_listeners: list[Callable[[str], None]] = []
_unwatched: set[int] = set()  # threads that nobody waits for


def info(text: str, *values: object) -> None:
    """Tell of a step that may take long; `values` are put into `text` if somebody listens."""
    _tell(_INFO, text, values)


def debug(text: str, *values: object) -> None:
    """Tell of a detail: a stage, a kernel."""
    _tell(_DEBUG, text, values)


@contextmanager
def heard(listener: Callable[[str], None]) -> Iterator[None]:
    """Call a function with every step that is reported inside the block: the command line shows them.

    >>> with heard(print):
    ...     info("writing %s", "net.weights")
    writing net.weights
    """
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@contextmanager
def unwatched() -> Iterator[None]:
    """What this thread does inside the block goes to the log alone: those who listen wait for something else.

    >>> with heard(print), unwatched():
    ...     info("writing %s", "net.weights")
    """
    thread = get_ident()
    _unwatched.add(thread)
    try:
        yield
    finally:
        _unwatched.discard(thread)


def _tell(level: int, text: str, values: tuple[object, ...]) -> None:
    if level >= _INFO and get_ident() not in _unwatched:
        for listener in _listeners:
            listener(text % values)
    logging = sys.modules.get("logging")
    if logging is not None:
        logging.getLogger(NAME).log(level, text, *values)
