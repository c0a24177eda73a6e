"""Weights exist once: the memory of processes that compile or load a model, and the sizes of files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc has the figures")

MIB = 1 << 20
SIDE = 2048

CHILD = """
import json, sys
import numpy as np, rlx
from rlx.runtime.store.programs import wait_until_stored

def figures(path):
    words = [line.split() for line in open(path)]
    return {w[0].rstrip(":"): int(w[1]) * 1024 for w in words if len(w) == 3 and w[2] == "kB"}

path, mode = sys.argv[1:]
if path == "-":
    g = rlx.Graph("one")
    g.output("y", g.input("x", (8,), "f32") * 2.0)
    program = rlx.compile(g)
else:
    program = rlx.load(path)
if mode != "load":
    program.run({"x": np.zeros(program.inputs[0].shape, np.float32)})
wait_until_stored()
if mode == "wait":
    print("ready", flush=True)
    sys.stdin.readline()
print(json.dumps(figures("/proc/self/status")))
"""


def start(path: str, mode: str, cache: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "RLX_CACHE": str(cache), "RLX_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, path, mode], stdin=pipe, stdout=pipe, text=True, env=env
    )


def peak(path: str, cache: Path) -> int:
    """The largest resident memory of a process that loads a model and runs it."""
    child = start(path, "run", cache)
    told, _ = child.communicate()
    assert child.returncode == 0
    return int(json.loads(told.splitlines()[-1])["VmHWM"])


def private(path: Path, cache: Path, processes: int) -> list[int]:
    """Private bytes of each of several processes that have loaded one file and run it."""
    children = [start(str(path), "wait", cache) for _ in range(processes)]
    found = []
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for child in children:
        lines = Path(f"/proc/{child.pid}/smaps_rollup").read_text().splitlines()
        found.append(sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_")))
    for child in children:
        child.communicate("\n")
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """ONNX files by kind: two layers of f32, or one matrix of 4 bits."""
    pytest.importorskip("onnx")
    from rlx.zoo.onnx_writer import OnnxWriter

    def make(kind: str) -> Path:
        path = tmp_path_factory.mktemp("models") / f"{kind}.onnx"
        writer, rng = OnnxWriter(), np.random.default_rng(0)
        if kind == "f32":
            hidden = writer.op("MatMul", "x", writer.weight("a", rng.random((SIDE, SIDE), np.float32)))
            writer.op(
                "MatMul", hidden, writer.weight("b", rng.random((SIDE, SIDE), np.float32)), outputs=["y"]
            )
        else:
            codes = writer.weight("w", rng.integers(0, 256, (SIDE, SIDE // 32, 16), np.uint8))
            scales = writer.weight("s", rng.random((SIDE, SIDE // 32), np.float32))
            about = {"K": SIDE, "N": SIDE, "bits": 4, "block_size": 32}
            writer.op("MatMulNBits", "x", codes, scales, outputs=["y"], domain="com.microsoft", **about)
        rows = {"x": (np.float32, (1, SIDE))}, {"y": (np.float32, (1, SIDE))}
        model = writer.model(kind, *rows, contrib=kind == "int4")
        path.write_bytes(model.SerializeToString())
        return path

    return make


def resident(path: str, cache: Path) -> int:
    """The resident memory of a process that has loaded a model, and not run it."""
    child = start(path, "load", cache)
    told, _ = child.communicate()
    assert child.returncode == 0
    return int(json.loads(told.splitlines()[-1])["VmRSS"])


@pytest.mark.parametrize("stored", ["cache", "file"])
def test_loading_reads_no_weight(stored: str, models: Callable[[str], Path], tmp_path: Path) -> None:
    """Weights are compared with their digest by the first load of a file; the next one maps them."""
    import rlx

    path, file, cache = models("f32"), tmp_path / "f32.rlx", tmp_path / "cache"
    if stored == "file":
        rlx.load(path, cache=False, threads=1).save(file)
    else:
        file = path
        resident(str(file), cache)
    first, later = resident(str(file), cache), resident(str(file), cache)
    assert later < first - 0.9 * path.stat().st_size
    assert resident(str(file), cache) < later + 0.1 * path.stat().st_size


@pytest.mark.parametrize("kind", ["f32", "int4"])
def test_a_cold_start_holds_weights_once(kind: str, models: Callable[[str], Path], tmp_path: Path) -> None:
    path = models(kind)
    above = peak(str(path), tmp_path / "cold") - peak("-", tmp_path / "one")
    assert above <= 1.5 * path.stat().st_size + 64 * MIB
    (entry,) = (tmp_path / "cold" / "programs").glob("*.rlx")
    assert entry.stat().st_size <= 1.1 * path.stat().st_size + 3 * MIB  # arrays begin on a huge page


def test_processes_share_the_weights_of_a_file(models: Callable[[str], Path], tmp_path: Path) -> None:
    import rlx

    path, file, one = models("f32"), tmp_path / "f32.rlx", tmp_path / "one.rlx"
    rlx.load(path, cache=False, threads=1).save(file)
    g = rlx.Graph("one")
    g.output("y", g.input("x", (8,), "f32") * 2.0)
    rlx.compile(g, threads=1).save(one)
    shared, small = (private(f, tmp_path / "cache", 8) for f in (file, one))
    assert max(shared) - min(small) < 0.05 * path.stat().st_size + 4 * MIB
