"""ONNX's own backend suite: one test of each op by default, all of it with `-m slow` and in CI."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx")

RUNNER = Path(__file__).parents[3] / "bench" / "onnx_suite.py"


@pytest.fixture(scope="module")
def runner() -> Any:
    """bench/onnx_suite.py as a module."""
    spec = importlib.util.spec_from_file_location("onnx_suite", RUNNER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["onnx_suite"] = module
    spec.loader.exec_module(module)
    return module


def unexpected(runner: Any, outcomes: list[Any]) -> list[str]:
    """Failures that are not on the list of known ones."""
    known = [re.compile(pattern) for pattern in runner.REASONS]
    failed = [o for o in outcomes if not o.passed and not any(k.match(o.name) for k in known)]
    return [f"{o.name}: {o.reason[:300]}" for o in failed]


def test_one_of_each_op(runner: Any) -> None:
    suite = runner.Suite()
    first: dict[str, str] = {}
    for name in sorted(suite.cases):
        op = runner.main_op(None, name)
        if name not in runner.WHOLE_MODELS:
            first.setdefault(op, name)
    assert len(first) > 150
    outcomes = [suite.run(name) for name in first.values()]
    assert not unexpected(runner, outcomes)
    assert sum(o.native for o in outcomes) / len(outcomes) > 0.85


@pytest.mark.slow
def test_whole_suite(runner: Any) -> None:
    outcomes = runner.run_suite(workers=1)
    print(runner.table(outcomes))
    assert len(outcomes) == 2033
    assert not unexpected(runner, outcomes)
    assert sum(o.passed for o in outcomes) >= 2000
    assert sum(o.native for o in outcomes) >= 1760
