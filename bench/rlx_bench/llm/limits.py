"""What the machine gives while language models are timed, in a process and memory of its own."""

from __future__ import annotations

import sys
import time
from typing import Any

from rlx.target.cpu import resolve
from rlx_bench.commands import answer_commands
from rlx_bench.quiet import take_precedence
from rlx_bench.yardsticks import Yardstick, peak, stream

SECONDS = 0.03  # of one sample
READ_BYTES = 256 << 20  # more than caches hold


class _Limits:
    def __init__(self, threads: int) -> None:
        target = resolve("host")
        (read,) = stream(target, threads, READ_BYTES, writes=False)
        self.found = {"flops": peak(target, threads), "bytes": read}

    def rates(self, what: str, samples: int) -> dict[str, Any]:
        """Flops of f32 multiply-adds, or bytes that are read, by the second."""
        return {"rates": [rate(self.found[what]) for _ in range(samples)]}


def rate(yardstick: Yardstick) -> float:
    """Over a while, after a run that fills caches."""
    yardstick.run()
    runs, start = 0, time.perf_counter()
    while time.perf_counter() - start < SECONDS:
        yardstick.run()
        runs += 1
    return runs * yardstick.amount / (time.perf_counter() - start)


if __name__ == "__main__":
    take_precedence()
    answer_commands(_Limits(int(sys.argv[2])))
