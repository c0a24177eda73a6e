"""Bugs inside the compiler are told as such: an InternalError with the graph in a file, never a KeyError."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import rlx
from rlx import Graph, ops
from rlx.errors import InternalError, RlxError
from rlx.ir.diff import structurally_equal
from rlx.ir.serialize import load


def net() -> Graph:
    g = Graph("net")
    x = g.input("x", (4, 64), "f32")
    w = g.param("w", (64, 8), "f32", np.full((64, 8), 0.125, np.float32))
    g.output("y", ops.softmax(x @ w))
    return g


def fail(*args: object, **kwargs: object) -> None:
    raise KeyError("at:f32(i1)")


@pytest.mark.parametrize(
    ("place", "inside"),
    [
        ("rlx.passes.simplify.simplify_rules", "optimize"),
        ("rlx.transform.expand.expand_graph", "lower"),
        ("rlx.plan.build.Planner.plan", "plan"),
        ("rlx.backend.cpu.build.emit_kernel", "compile"),  # in the thread that makes native code
    ],
)
def test_a_bug_is_told_with_its_graph(
    place: str, inside: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(place, fail)
    with pytest.raises(InternalError) as caught:
        rlx.optimize(net()) if inside == "optimize" else rlx.compile(net(), cache=False)
    error = caught.value
    assert isinstance(error, RlxError) and isinstance(error.__cause__, KeyError)
    told = (
        rf"RLX failed inside {inside} \(KeyError: 'at:f32\(i1\)'\); this is a bug of RLX, not of your program"
    )
    assert re.match(told, error.message)
    (path,) = re.findall(r"open an issue with the file (\S+),", error.message)
    saved = load(path)
    assert structurally_equal(saved, net()) and not saved.param_values


def test_refusals_and_errors_of_the_system_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(rlx.errors.ConfigError):
        rlx.compile(net(), assume={"seq": 3})

    def full(*args: object, **kwargs: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("rlx.plan.build.Planner.plan", full)
    with pytest.raises(OSError, match="no space left"):
        rlx.compile(net())
