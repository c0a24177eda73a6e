"""The demo on processors that this machine is not: QEMU executes no instruction that they lack."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

# Engines beside RLX are not the point, and slow under an emulator.
DEMO = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "onnxruntime" else find(name, *rest)
sys.path[:0] = {path!r}
from rlx.target.cpu import host
from rlx.cli.demo import demo
print(host().name, flush=True)
demo(["--json"], standalone_mode=False)
"""
SECONDS = 3600  # only ends a hang


def ran(before: Sequence[str], **variables: str) -> tuple[str, dict[str, Any]]:
    """The host that the demo saw, and what it found."""
    text = DEMO.format(path=[p for p in sys.path if p])
    python = os.path.realpath(sys.executable)
    env = {**os.environ, "RLX_HOST": "", "RLX_TARGET": "", **variables}
    done = subprocess.run(
        [*before, python, "-c", text],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    host, _, page = done.stdout.partition("\n")
    return host, json.loads(page)


@pytest.mark.slow
@pytest.mark.parametrize(("processor", "host"), [("Haswell", "x86-64-v3"), ("Nehalem", "x86-64-v2")])
def test_the_demo(
    processor: str,
    host: str,
    require: Callable[[str], None],
    zoo_path: Callable[..., Path],
    tmp_path: Path,
) -> None:
    require("qemu")
    require("demo")
    model = zoo_path("minilm").parent
    (tmp_path / "zoo").mkdir()
    (tmp_path / "zoo" / model.name).symlink_to(model)  # nothing else is taken from the cache
    # NumPy's OpenBLAS must be told which kernels to take: it chooses some with AVX on QEMU's Nehalem.
    seen, found = ran(
        ["qemu-x86_64", "-cpu", processor], RLX_CACHE=str(tmp_path), OPENBLAS_CORETYPE=processor
    )
    assert seen == host
    same, known = ran([], RLX_HOST=host, RLX_CACHE=str(tmp_path))
    assert same == host and found["host_thunks"] == known["host_thunks"] == 0
    for query, wanted in known["answers"].items():
        got = found["answers"][query]
        assert [match["sentence"] for match in got] == [match["sentence"] for match in wanted]
        # The same code, from the cache; but NumPy's product that gives the scores may be another.
        scores = [match["score"] for match in wanted]
        assert [match["score"] for match in got] == pytest.approx(scores, abs=1e-6)
