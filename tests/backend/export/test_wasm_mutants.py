"""Damaged weights and wrong arguments in JavaScript: an Error with a text, or the right result; no crash."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.ir.graph import Graph

MUTANTS = 500
SAMPLE = 60

SCRIPT = Path(__file__).with_name("mutants.mjs")


def net(scale: float) -> Graph:
    """Weights, a state, an index from data, and a branch that data choose."""
    g = Graph("net")
    x, at = g.input("x", ("n", 3), "f32"), g.input("at", (2,), "i64")
    w = np.random.default_rng(0).normal(size=(3, 70)).astype(np.float32)
    h = g.state("h", (70,), "f32", init=np.zeros(70, np.float32))
    y = ops.tanh(x @ g.param("w", (3, 70), "f32", value=w) * scale) + h
    picked = ops.gather(y, at, axis=0)
    g.set_state("h", ops.sum(picked, axis=0))
    g.output("y", ops.cond(ops.sum(picked) > 0.0, lambda: picked * 2.0, lambda: picked - 1.0))
    return g


def run(folder: Path, first: int, last: int) -> dict[str, object]:
    rlx.compile(net(2.0), threads=1).export(folder, "wasm", name="other", bind={"n": (1, 5)})
    rlx.compile(net(1.0), threads=1).export(folder, "wasm", name="net", bind={"n": (1, 5)})
    (folder / "mutants.mjs").write_bytes(SCRIPT.read_bytes())
    command = ["node", "mutants.mjs", str(first), str(last)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def check(found: dict[str, object], least: int) -> None:
    assert found["wrong"] == []
    errors = found["errors"]
    assert isinstance(errors, dict) and len(errors) >= least, errors


def test_a_sample_of_mutants(require, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    require("node")
    check(run(tmp_path, 0, SAMPLE), 8)


@pytest.mark.slow
def test_all_mutants(require, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    require("node")
    found = run(tmp_path, SAMPLE, MUTANTS)
    check(found, 20)
    texts = " ".join(found["errors"])  # type: ignore[arg-type]
    for told in ("damaged", "truncated", "another export", "out of range", "is closed", "no sizes are bound"):
        assert told in texts, texts
