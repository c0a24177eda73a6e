"""What the runtime itself costs: fork-join, barriers, wake-up, program tables, cache.

Run: python bench/pool.py. Every figure is a median with the 10th and 90th percentile, in microseconds. Start
it with `setsid` and pin nothing: the pool places its own workers.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rlx.codegen.cpu.kernels import KERNEL_ARGS
from rlx.codegen.native.irtext import Module
from rlx.codegen.native.jit import compile_object, load
from rlx.runtime.native import code as native
from rlx.runtime.native.driver import NativeProgram, Record, emit_driver
from rlx.runtime.native.pool import CPUS, Pool, emit_pool
from rlx.runtime.store.cache import ObjectCache
from rlx.runtime.store.trust import Keyring

RECORDS = 50


def emit_empty(module: Module) -> None:
    module.function("share", [("ptr", "argument"), ("i64", "thread")])
    module.function("kernel", KERNEL_ARGS)


def show(name: str, nanoseconds: list[int]) -> None:
    low, *_, high = statistics.quantiles(nanoseconds, n=10)
    median = statistics.median(nanoseconds)
    print(f"{name:<52} {median / 1e3:9.2f}   ({low / 1e3:.2f} .. {high / 1e3:.2f})")


def sample(
    action: Callable[[], object], times: int, before: Callable[[], object] = lambda: None
) -> list[int]:
    found = []
    for _ in range(times):
        before()
        start = time.perf_counter_ns()
        action()
        found.append(time.perf_counter_ns() - start)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=10_000)
    samples = parser.parse_args().samples
    code = native.build(emit_empty)
    share, kernel = code.address("share"), code.address("kernel")
    print(f"{'microseconds':<52} {'median':>9}   (p10 .. p90), {len(CPUS)} cores")
    show("nothing (the clock itself)", sample(lambda: None, samples))
    for threads in dict.fromkeys((1, len(CPUS))):
        with Pool(threads) as pool:
            pool.run(share, 0)
            run = pool.run
            show(f"pool.run, {threads} threads, hot", sample(lambda run=run: run(share, 0), samples))
            if threads > 1:
                cold = sample(lambda run=run: run(share, 0), samples // 50, lambda: time.sleep(0.002))
                show(f"pool.run, {threads} threads, workers asleep for 2 ms", cold)
            program = NativeProgram([Record(kernel) for _ in range(RECORDS)], pool=pool, keep=code)
            wall, own = [], []
            for _ in range(samples):
                wall += sample(program.run, 1)
                own.append(program.total_ns)
            show(f"program of {RECORDS} empty records, {threads} threads, wall", wall)
            show("  by its own clock", own)
            show("  one record with its barrier", [value // RECORDS for value in own])
            show("  overhead: wall minus own clock", [a - b for a, b in zip(wall, own, strict=True)])
    over = 2 * len(CPUS)
    with Pool(over, oversubscribe=True) as pool:
        program = NativeProgram([Record(kernel) for _ in range(RECORDS)], pool=pool, keep=code)
        show(
            f"program of {RECORDS} empty records, {over} threads (too many)",
            sample(program.run, samples // 20),
        )
    records = [Record(kernel, 8) for _ in range(RECORDS)]
    show(f"tables of a program of {RECORDS} records", sample(lambda: NativeProgram(records, threads=1), 300))
    show("pool of all cores: start, run, stop", sample(lambda: start_run_stop(share), 100))
    show_cache()


def start_run_stop(share: int) -> None:
    with Pool() as pool:
        pool.run(share, 0)


def show_cache() -> None:
    """The pool's own code as the example: about the size of a small kernel."""
    module = Module(native.baseline())
    emit_pool(module)
    emit_driver(module)
    text, target = module.text(), module.target
    made = compile_object(text, target)
    with tempfile.TemporaryDirectory() as folder:
        cache = ObjectCache(Path(folder), keyring=Keyring(b"b" * 32))
        cache.put("ab", target, made)
        show(
            f"compile pool and driver ({len(made):,} bytes)", sample(lambda: compile_object(text, target), 20)
        )
        show("  read the same from the cache, verified", sample(lambda: cache.get("ab", target), 200))
        show("  map it into the process", sample(lambda: load(made, target), 50))


if __name__ == "__main__":
    main()
