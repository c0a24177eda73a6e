"""Exports of torch architectures agree with torch, at several sizes of one program."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")

import rlx

SCRIPT = Path(__file__).parents[3] / "bench" / "torch_exports.py"


@pytest.mark.usefixtures("each_origin")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit", "resnet", "whisper"])
def test_export(name: str, tmp_path: Path, require: Any) -> None:
    require("torch")
    for package in ("transformers", "onnxscript"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"Python package {package!r} is not installed")
    subprocess.run([sys.executable, SCRIPT, tmp_path, name], check=True, capture_output=True, timeout=300)
    program = rlx.compile(rlx.from_onnx(tmp_path / f"{name}.onnx"))
    assert not program.stats["host_thunks"]
    arrays = np.load(tmp_path / f"{name}.npz")
    inputs = [node.attrs["name"] for node in program.inputs]
    cases = {key.partition(".")[0] for key in arrays}
    assert len(cases) == 3
    for case in sorted(cases):
        (got,) = program.run({i: arrays[f"{case}.{i}"] for i in inputs}).values()
        np.testing.assert_allclose(got, arrays[f"{case}.y"], rtol=1e-4, atol=1e-4)
