"""rlx doctor: what it finds here, and what it says where something is missing or wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlx import config
from rlx.cli import doctor as doctor_module
from rlx.cli.doctor import FAILED, NOTE, OK, Finding, examine
from rlx.cli.main import main
from rlx.system import System


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def findings() -> dict[str, Finding]:
    return {finding.what: finding for finding in examine()}


def test_a_healthy_installation(own_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["what", "verdict", "about"] and lines[-1] == "RLX works here."
    text = "\n".join(lines)
    for what in ("python", "package llvmlite", "extra onnx", "host", str(own_cache), "compiler", "MPI"):
        assert what in text
    assert FAILED not in text


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["healthy"] is True
    verdicts = {finding["what"]: finding["verdict"] for finding in found["findings"]}
    assert verdicts["compiler"] == verdicts["threads"] == verdicts["cache"] == OK
    assert set(verdicts.values()) <= {OK, NOTE}


def test_a_cache_that_cannot_be_written(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own_cache.write_text("a file where a folder should be")
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["healthy"]
    told = {
        finding["what"]: finding["about"] for finding in found["findings"] if finding["verdict"] == FAILED
    }
    assert str(own_cache) in told["cache"]


def test_variables_that_make_no_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.THREADS.name, "many")
    monkeypatch.setenv(config.HOST.name, "pentium")
    found = findings()
    assert found["threads"].verdict == found["host"].verdict == FAILED
    assert "RLX_THREADS='many'" in found["threads"].about and "RLX_HOST='pentium'" in found["host"].about
    assert found["python"].verdict == found["package numpy"].verdict == OK  # the others are looked at, too


def test_a_wrong_answer_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = doctor_module.evaluate
    monkeypatch.setattr(doctor_module, "evaluate", lambda g, f: {"y": right(g, f)["y"] + np.float32(0.01)})
    found = findings()
    assert found["compiler"].verdict == FAILED and "off the NumPy reference" in found["compiler"].about
    assert main(["doctor"]) == 1
    assert "see what FAILED" in capsys.readouterr().out


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    version: Any = doctor_module._version
    gone = {"onnx", "llvmlite", "mpi4py"}
    monkeypatch.setattr(doctor_module, "_version", lambda name: None if name in gone else version(name))
    find = doctor_module.importlib.util.find_spec
    monkeypatch.setattr(
        doctor_module.importlib.util,
        "find_spec",
        lambda name, *rest: None if name in gone else find(name, *rest),
    )
    found = findings()
    assert found["package llvmlite"].verdict == FAILED
    assert found["extra onnx"].verdict == NOTE and "pip install '.[onnx]'" in found["extra onnx"].about
    assert found["MPI"].verdict == NOTE and "pip install '.[mpi]'" in found["MPI"].about


def test_systems_that_run_no_native_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_module, "SYSTEM", System())
    found = findings()
    assert found["system"].verdict == found["compiler"].verdict == NOTE and found["threads"].verdict == OK
    assert "only the NumPy reference runs them" in found["system"].about
    assert "on Linux only" in found["compiler"].about


def test_an_odd_failure_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Iterator[tuple[str, str, str]]:
        raise OSError("the disk is gone")
        yield

    monkeypatch.setitem(doctor_module._CHECKS, "cache", broken)
    assert findings()["cache"] == Finding("cache", FAILED, "the disk is gone")
