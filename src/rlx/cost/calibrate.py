"""Measure the gate's constants on this machine, in about a second.

Defaults are used unless a user gives `gate="calibrated"`: measured constants differ from run to run, so
plans for them do too. The constants in force are part of the plan text either way.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from rlx.cost.gate import IoFusionGate, default_gate
from rlx.errors import UnsupportedError

# Larger than the last-level cache of common machines, so that the copy is paid by DRAM.
_COPY_BYTES = 96 << 20
_QUEUE_BYTES = 32 << 20


def calibrate(device: str = "cpu", run_empty_records: Callable[[int], None] | None = None) -> IoFusionGate:
    """The gate of `device` with measured constants.

    `run_empty_records(n)` runs n empty kernels in the native driver; a backend that has one passes it, and
    `dispatch_ns` is then measured too, else it stays the default's. `min_gain_ns` is a choice, not a
    measurement, and stays.

    >>> calibrate("cpu").memory_bw > 0
    True
    """
    gate = default_gate(device)
    if device != "cpu":
        return _measured_by_queue(gate, device)
    bandwidth = _copy_bandwidth()
    return replace(
        gate,
        dispatch_ns=gate.dispatch_ns if run_empty_records is None else _dispatch_ns(run_empty_records),
        roundtrip_ns=_foreign_call_ns(),
        memory_bw=bandwidth,
        host_readback_bw=bandwidth,
        host_thunk_penalty_ns=_wake_ns(),
    )


def _measured_by_queue(gate: IoFusionGate, name: str) -> IoFusionGate:
    """A device with its own queue, measured by commands that every driver has."""
    from rlx.driver import Tile, open_device, why_unavailable  # devices come after prices

    missing = why_unavailable(name)
    if missing is not None:
        raise UnsupportedError(f"calibrate cannot measure {name!r}: {missing}; use default_gate({name!r})")
    device = open_device(name)
    stream = device.stream()
    here, there = device.allocate(_QUEUE_BYTES), device.allocate(_QUEUE_BYTES)
    host = np.zeros(_QUEUE_BYTES, np.uint8)

    def commands(count: int, host_calls: int = 0) -> int:
        for _ in range(count):
            stream.fill(Tile(here, 0, 1, 4, 4))
        for _ in range(host_calls):
            stream.call(lambda: None)
            stream.fill(Tile(here, 0, 1, 4, 4))
        return _elapsed_ns(stream.submit_and_wait)

    def copied(source: object, target: object) -> int:
        stream.copy(source, target)
        return _elapsed_ns(stream.submit_and_wait)

    commands(10, 1), copied(here, there), copied(here, host)  # whatever is done once, is done now
    one, many = (min(commands(n) for _ in range(5)) for n in (1, 201))
    waits = min(commands(1, host_calls=10) for _ in range(5))
    return replace(
        gate,
        dispatch_ns=max(1, min((many - one) // 200, one)),  # a round trip holds one, whatever else ran
        roundtrip_ns=one,
        memory_bw=max(0.1, round(2 * _QUEUE_BYTES / min(copied(here, there) for _ in range(3)), 1)),
        host_readback_bw=max(0.1, round(_QUEUE_BYTES / min(copied(here, host) for _ in range(3)), 1)),
        host_thunk_penalty_ns=max(1, (waits - one) // 10),
    )


def _copy_bandwidth() -> float:
    """Bytes moved per ns (read + written) by a copy in DRAM; one decimal is all that repeats."""
    source = np.ones(_COPY_BYTES, np.uint8)
    target = np.zeros_like(source)  # written once, so that no page fault is timed
    target[:] = 0
    best = min(_elapsed_ns(lambda: np.copyto(target, source)) for _ in range(5))
    return max(0.1, round(2 * _COPY_BYTES / best, 1))


def _dispatch_ns(run_empty_records: Callable[[int], None]) -> int:
    """Slope between a short and a long run, so that entering the driver is not counted."""
    few, many = 100, 10_100
    run_empty_records(few)
    short = min(_elapsed_ns(lambda: run_empty_records(few)) for _ in range(5))
    long = min(_elapsed_ns(lambda: run_empty_records(many)) for _ in range(5))
    return max(1, (long - short) // (many - few))


def _foreign_call_ns() -> int:
    """Leaving native code for Python and coming back: a callback called through a C function pointer."""
    callback = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(lambda value: value)
    calls = 10_000

    def call_all() -> None:
        for value in range(calls):
            callback(value)

    return max(1, min(_elapsed_ns(call_all) for _ in range(5)) // calls)


def _wake_ns() -> int:
    """Median time to wake a sleeping thread and hear back: what a host thunk does to the pool."""
    rounds = 200
    ping, pong = threading.Semaphore(0), threading.Semaphore(0)

    def answer() -> None:
        for _ in range(rounds):
            ping.acquire()
            pong.release()

    partner = threading.Thread(target=answer, daemon=True)
    partner.start()
    times = []
    for _ in range(rounds):
        start = time.perf_counter_ns()
        ping.release()
        pong.acquire()
        times.append(time.perf_counter_ns() - start)
    partner.join()
    return max(1, sorted(times)[rounds // 2])


def _elapsed_ns(work: Callable[[], object]) -> int:
    start = time.perf_counter_ns()
    work()
    return max(1, time.perf_counter_ns() - start)
