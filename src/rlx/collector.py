"""Python's garbage collector, kept out of the way of compiling and loading."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_LEAST = 200_000
_unseen = 0  # objects that pauses have left to the oldest generation since it was last gone through
_alive = 0  # objects that were there then


@contextmanager
def collector_paused() -> Iterator[None]:
    """No garbage collection inside: a compilation creates many small objects that stay until its end, and
    going through all of them again and again takes up to a third of its time.

    Objects created inside count as old afterwards. As young objects, all would be scanned three
    times soon after, once per generation: in the first runs, and at the first new size. Python does not know
    of them and would never look for garbage among them: the next pause does, once they are many.

    >>> import gc
    >>> with collector_paused():
    ...     gc.isenabled()
    False
    >>> gc.isenabled()
    True
    """
    global _unseen
    running = gc.isenabled()
    if running:
        _collect_if_due()
    gc.disable()
    try:
        yield
    finally:
        if running:
            if not gc.get_freeze_count():  # else somebody has frozen objects, which are to stay so
                _unseen += gc.get_count()[0]
                gc.freeze()
                gc.unfreeze()  # into the oldest generation, without a look at them
            gc.enable()


def graphs_hold(nbytes: int) -> None:
    """Count the arrays of a graph, which only the collector frees, as nodes refer to their graph and it to
    them: a few nodes may hold gigabytes. A KiB counts like an object."""
    global _unseen
    _unseen += nbytes >> 10


def _collect_if_due() -> None:
    """Look for garbage among old objects by Python's own rule: when a quarter of them were never seen."""
    global _unseen, _alive
    if _unseen > max(_LEAST, _alive // 4):
        gc.collect()
        _unseen = 0
        if not gc.get_freeze_count():
            # Counted so, not by gc.get_objects(): a list of all objects holds tuples that other threads are
            # making at this moment, which fails there.
            gc.freeze()
            _alive = gc.get_freeze_count()
            gc.unfreeze()
