"""rlx run, explain and compile with --device: programs on the OpenCL device from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import rlx
from rlx.cli.main import main

GRAPH = """graph "double" {
    %0 = input() {name="x", type=f32[n,4]}
    %1 = add(%0, %0)
    %2 = cumsum(%1) {axis=0}
    output "y" = %2
}
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, require) -> str:  # type: ignore[no-untyped-def]
    require("demo")
    require("opencl")
    monkeypatch.setenv("RLX_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "double.txt"
    file.write_text(GRAPH)
    return str(file)


def test_run_on_the_device(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["run", model, "--device", "opencl", "--bind", "n=3", "--input", "x=ones"]
    assert main([*run, "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert " on opencl" in shown and "1 host thunk besides 1 kernel;" in shown
    want = np.cumsum(np.full((3, 4), 2, np.float32), 0)
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "y.npy"), want)
    assert main([*run, "--json"]) == 0
    stats = json.loads(capsys.readouterr().out)["stats"]
    assert stats["device"] == "opencl" and stats["host_thunks"][0]["op"] == "cumsum"


def test_explain_and_what_is_refused(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", model, "--device", "opencl"]) == 0
    assert "runs on the host: form Cumulate has no OpenCL kernel" in capsys.readouterr().out
    assert main(["explain", model, "--device", "opencl", "--asm", "%1"]) == 1
    assert "--asm is for device 'cpu' only; leave out --device" in capsys.readouterr().err
    assert main(["compile", model, "--device", "opencl", "-o", str(tmp_path / "x.rlx")]) == 1
    assert "a program for opencl cannot be saved" in capsys.readouterr().err
    assert main(["run", model, "--device", "gpu"]) == 1
    assert (
        "device 'gpu' cannot run programs in this version; use 'cpu' or 'opencl'" in capsys.readouterr().err
    )


def test_devices_lists_it(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "--json"]) == 0
    (found,) = [d for d in json.loads(capsys.readouterr().out)["devices"] if d["name"] == "opencl"]
    assert found["available"] and found["facts"]["unified_memory"] is False


def test_a_saved_program_runs_on_the_device_too(model: str, tmp_path: Path) -> None:
    file = tmp_path / "double.rlx"
    rlx.load(model).save(file)
    program = rlx.load(file, device="opencl")
    assert program.stats["device"] == "opencl"
    x = np.ones((2, 4), np.float32)
    np.testing.assert_array_equal(program(x), rlx.load(file)(x))
    np.testing.assert_array_equal(rlx.Session(device="opencl").load(model)(x), program(x))
