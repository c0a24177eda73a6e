"""What the logger "rlx" is told, and that nothing is printed unless somebody listens."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import rlx
from rlx.runtime.store.programs import wait_until_stored

X = np.ones((4, 8), np.float32)


def net() -> rlx.Graph:
    g = rlx.Graph("net")
    g.output("y", rlx.ops.softmax(g.input("x", ("n", 8), "f32") @ g.input("w", (8, 8), "f32")))
    return g


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Messages:
    monkeypatch.setenv("RLX_CACHE", str(tmp_path / "cache"))
    caplog.set_level("DEBUG", "rlx")
    return Messages(caplog)


class Messages:
    """Levels and texts of what was logged since the last look."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.caplog = caplog

    def take(self) -> str:
        records = [f"{r.levelname} {r.getMessage()}" for r in self.caplog.records if r.name == "rlx"]
        self.caplog.clear()
        return "\n".join(records)


def test_stages_kernels_and_code(told: Messages) -> None:
    rlx.compile(net())
    first = told.take()
    assert first.startswith("INFO compiling 'net': 4 nodes\nDEBUG stage input of 'net': ")
    for line in (
        "DEBUG stage fuse of 'net': ",
        "(dot_general)",
        "(reduce_max + exp_difference + reduce_sum + div + mul)",
        "INFO native code of 'net' for ",
        "INFO compiled <program 'net'(x: f32[n,8], w: f32[8,8]) -> (y: f32[n,8]), 2 kernels",
    ):
        assert line in first
    assert ": compiled\n" in first and "from the cache" not in first
    rlx.compile(net())
    second = told.take()
    assert ": from the cache\n" in second and "DEBUG kernel" not in second


def test_models_from_the_cache(told: Messages, tmp_path: Path) -> None:
    path = tmp_path / "net.txt"
    path.write_text(str(net()))
    rlx.load(path)
    assert f"INFO importing {path}\nINFO compiling 'net'" in told.take()
    wait_until_stored()
    told.take()
    rlx.load(path)
    found, native = told.take().splitlines()
    assert found == f"INFO program of {path}: from the cache"
    assert native == f"INFO {path}: all of its 2 kernels are native"


def test_programs_of_a_jitted_function(told: Messages) -> None:
    def double(x: rlx.Node) -> rlx.Node:
        return x * 2.0

    f = rlx.jit(double)
    f(X)
    assert ", program 1: first call of its dtypes, ranks and structure" in told.take()
    f(X)
    assert told.take() == ""
    f(X[:3])
    assert "program 2: x.shape[0] is 3, was 4, a symbol from now on" in told.take()


@pytest.mark.parametrize("listening", [False, True])
def test_silent_by_default(listening: bool, tmp_path: Path) -> None:
    """Also for who uses logging for something else; and RLX does not import logging by itself."""
    setup = "import logging\nlogging.warning('mine')\n" if listening else ""
    script = tmp_path / "script.py"
    script.write_text(
        f"{setup}import sys, numpy as np, rlx\n"
        "rlx.jit(lambda x: rlx.ops.softmax(x @ x))(np.ones((4, 4), np.float32))\n"
        "print('logging' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, f"{listening}\n")
    assert done.stderr == ("WARNING:root:mine\n" if listening else "")


def test_level_of_a_user(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "rlx")
    rlx.compile(net())
    assert caplog.records and all(r.levelno >= logging.INFO for r in caplog.records)
