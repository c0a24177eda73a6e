"""Planning is fast: MIR to LIR of a thousand nodes, as `bench/plan_speed.py` measures it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[3] / "bench" / "plan_speed.py"
MOST_MILLISECONDS = 300  # of CPU time, on an idle machine


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "convnet", "random"])
def test_a_thousand_nodes_are_planned_in_a_third_of_a_second(kind: str) -> None:
    runs = []
    for _ in range(3):
        command = [sys.executable, str(BENCH), kind, "--alone"]
        runs.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
    best = min(runs, key=lambda run: run["all"])
    assert best["nodes"] > 900
    assert best["all"] < MOST_MILLISECONDS, best
