"""What streaming is for: memory of the process within its budget, speed of whatever binds the program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streaming_models import layers

import rlx
from rlx.runtime.native import streaming

_MEASURE = """
import json, sys
import numpy as np, rlx
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(l.split()[1]) << 10 for l in lines if l.startswith("VmHWM"))
program = rlx.load(sys.argv[1], weight_budget=int(sys.argv[2]))
x = np.random.default_rng(1).normal(size=(3, int(sys.argv[3]))).astype(np.float32)
y = [program(x) for _ in range(3)][-1]
print(json.dumps([peak(), float(np.abs(y).sum()), program.memory({"n": 3})]))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_memory_of_the_process_stays_within_the_budget(tmp_path: Path) -> None:
    """60 MiB of weights, 10 MiB of budget: the process grows by about the budget, not by the weights."""
    width, count = 1024, 15
    path = tmp_path / "big.rlx"
    program = rlx.compile(layers(count, width), weight_budget="10MiB", weight_file=path)
    x = np.random.default_rng(1).normal(size=(3, width)).astype(np.float32)
    total = float(np.abs(program(x)).sum())
    small = tmp_path / "small.rlx"
    rlx.compile(layers(1, width)).save(small)

    def measured(file: Path, budget: int) -> tuple[int, float, dict[str, int]]:
        command = [sys.executable, "-c", _MEASURE, str(file), str(budget), str(width)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, run.stderr
        peak, found, sizes = json.loads(run.stdout)
        return peak, found, sizes

    base, _, _ = measured(small, 5 << 20)
    peak, found, sizes = measured(path, 10 << 20)
    assert found == total
    assert sizes["weight"] + sizes["ring"] <= 10 << 20
    assert peak - base < (10 << 20) + sizes["activation"] + (12 << 20), "weights were mapped or kept"


def test_reading_gets_a_core_where_it_binds() -> None:
    load, now = streaming._Load(), [0.0]
    original = streaming.time.perf_counter
    streaming.time.perf_counter = lambda: now[0]  # type: ignore[assignment]
    try:
        load.resume(0.0)
        busy = 0.0
        for share, high in ((0.2, False), (0.65, False), (1.0, True), (0.65, True), (0.1, False)):
            for _ in range(20):
                now[0] += 1.0
                busy += share
                load.note(busy)
            assert load.high is high, share
    finally:
        streaming.time.perf_counter = original


def _bench() -> Any:
    sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
    try:
        import weight_streaming
    finally:
        sys.path.pop(0)
    return weight_streaming


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_a_small_gpt_runs_in_a_sixth_of_its_weights(tmp_path: Path) -> None:
    bench = _bench()
    model = bench.Model(layers=4, width=512, vocabulary=2048, context=64)
    found = bench.measure(model, "10MiB", 32, 2, tmp_path / "gpt.rlx")
    assert found.equal and found.weights > 56 << 20
    assert found.over <= 200 << 20, str(found)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_a_gpt_of_more_than_a_gigabyte_runs_in_200_mib(tmp_path: Path) -> None:
    """Correct, within its memory, at the speed of what binds it: reads of the file, or compute."""
    found = _bench().measure(_bench().Model(), "200MiB", 512, 7, tmp_path / "gpt.rlx")
    print(found)
    assert found.equal and found.weights >= 1536 << 20
    assert found.over <= 200 << 20 and found.maker_peak < found.weights // 2, str(found)
    fast = found.of_limit >= 0.8 and found.slowdown <= 1.25
    if not fast and os.getloadavg()[0] > 2 * (os.cpu_count() or 1):
        pytest.skip(f"the machine is busy (load {os.getloadavg()[0]:.1f}), speed cannot be measured: {found}")
    assert found.of_limit >= 0.8, str(found)
    assert found.slowdown <= 1.25, str(found)
