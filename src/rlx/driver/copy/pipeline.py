"""`pipelined`: copy tile k+1 while tile k is computed on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from rlx.driver.copy.buffers import FillAhead
from rlx.driver.copy.engine import AsyncCopy
from rlx.records import dataclass

B = TypeVar("B")
R = TypeVar("R")


@dataclass(frozen=True)
class PipelineRun(Generic[R]):
    """What `pipelined` did. Times are seconds.

    `copying` is what the engine spent on copies and `computing` what was spent in `compute`; one after the
    other they would take `serial`. `waiting` is how long compute stood still for a copy.
    """

    results: list[R]
    tiles: int
    bytes: int
    seconds: float
    copying: float
    computing: float
    waiting: float

    @property
    def serial(self) -> float:
        return self.copying + self.computing

    @property
    def ratio(self) -> float:
        """Time taken over the serial time: 0.5 is perfect overlap of equals, 1 is none."""
        return self.seconds / self.serial if self.serial > 0 else 1.0

    @property
    def overlap(self) -> float:
        """Share of the copying time that was hidden under compute."""
        return max(0.0, 1.0 - self.waiting / self.copying) if self.copying > 0 else 0.0

    def __str__(self) -> str:
        return (
            f"{self.tiles} tiles, {self.bytes:,} bytes in {self.seconds * 1e3:.1f} ms: "
            f"copy {self.copying * 1e3:.1f} ms, compute {self.computing * 1e3:.1f} ms, "
            f"{self.overlap:.0%} of the copy hidden, "
            f"{self.ratio:.2f} of the serial time"
        )


def pipelined(
    tiles: Iterable[object], compute: Callable[[Any], R], engine: AsyncCopy, buffers: FillAhead[B]
) -> PipelineRun[R]:
    """Copy each of `tiles` into `buffers` by `engine`, ahead of `compute(tile in the buffer)`, in order.

    `compute` gets an array (on the host) or a Buffer (on a device) of the dtype and shape of the tile, its
    own until it returns. With two buffers one tile is copied ahead, with n buffers n - 1. If a copy or
    `compute` fails, all copies under way are finished before the error leaves.

    >>> import numpy as np
    >>> from rlx.driver.copy import DoubleBuffer, ThreadCopy
    >>> data = np.arange(10).reshape(5, 2)
    >>> with ThreadCopy() as engine:
    ...     pair = DoubleBuffer(np.zeros(2, np.int64), np.zeros(2, np.int64))
    ...     pipelined(data, lambda tile: int(tile.sum()), engine, pair).results
    [1, 5, 9, 13, 17]
    """
    source = iter(tiles)
    before = engine.stats
    results: list[R] = []
    computing = 0.0
    began = time.perf_counter()
    try:
        under_way = sum(_fill_next(source, engine, buffers) for _ in range(len(buffers) - 1))
        while under_way:
            buffers.advance()
            # The next copy starts before we wait for this one, so that the engine never runs dry.
            under_way += _fill_next(source, engine, buffers)
            tile = buffers.ready()
            entered = time.perf_counter()
            results.append(compute(tile))
            computing += time.perf_counter() - entered
            under_way -= 1
    except BaseException:
        buffers.abandon()
        raise
    seconds = time.perf_counter() - began
    done = engine.stats.since(before)
    return PipelineRun(results, len(results), done.bytes, seconds, done.busy, computing, done.waited)


def _fill_next(source: Iterator[object], engine: AsyncCopy, buffers: FillAhead[B]) -> bool:
    """Start copying the next tile, if there is one."""
    for tile in source:
        buffers.fill(engine, tile)
        return True
    return False
