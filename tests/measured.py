"""What tests measure, so that it depends neither on the machine's speed nor on what else it does.

Time is CPU time of the calling thread, in units of fixed work of the interpreter on the same machine; memory
is that which a loop takes over and over.
"""

from __future__ import annotations

import functools
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path

ROUNDS = 5


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU time of this thread for one call."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def _interpreted() -> int:
    found: dict[tuple[int, str], list[int]] = {}
    for i in range(5_000):
        found.setdefault((i % 97, str(i % 13)), []).append(i)
    return sum(len(numbers) for numbers in found.values())


@functools.cache
def unit() -> float:
    """CPU seconds that this machine takes for some interpreted work: about 1 ms."""
    return min(cpu_seconds(_interpreted) for _ in range(20))


def units(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """The least CPU time of several calls, in units. Caches and clocks change; a round that they spoil does
    not count."""
    return min(cpu_seconds(work) for _ in range(rounds)) / unit()


def resident_bytes(process: int | str = "self") -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def grows(work: Callable[[], object], most: int) -> bool:
    """Whether a process grows by `most` bytes or more each time it does `work`, after the first.

    What is lost every time is lost in each of several rounds. Allocators, huge pages and other threads make a
    process grow in some of them only, so one round without is enough.
    """
    work()
    for _ in range(ROUNDS):
        gc.collect()
        before = resident_bytes()
        work()
        gc.collect()
        if resident_bytes() - before < most:
            return False
    return True
