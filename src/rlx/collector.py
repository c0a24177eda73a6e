"""Python's garbage collector, kept out of the way of compiling and loading."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """No looking for garbage inside: a compilation makes many small objects that stay until its end, and
    going through all of them again and again takes up to a third of its time.

    What was made inside counts as old afterwards. As young objects, all of them would be gone through three
    times soon after, once per generation: in the first runs, and at the first new size.

    >>> import gc
    >>> with collector_paused():
    ...     gc.isenabled()
    False
    >>> gc.isenabled()
    True
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            if not gc.get_freeze_count():  # else somebody has frozen objects, which are to stay so
                gc.freeze()
                gc.unfreeze()  # into the oldest generation, without a look at them
            gc.enable()
