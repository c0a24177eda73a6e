"""RLX on AArch64: Python for that machine, run by QEMU (`.ci/aarch64_python` unpacks it).

It sees its host, compiles, loads objects by its own loader and runs them on threads. A file that x86 wrote
for it runs without LLVM.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from machines import AARCH64_PYTHON
from rlx import ops
from rlx.cli.app import app
from rlx.ir.graph import Graph
from rlx.ir.text.files import save
from rlx.reference.interpreter import evaluate

pytestmark = pytest.mark.slow
SECONDS = 3600  # only ends a hang

COMPILE = """
import json, sys
import numpy as np
import rlx
from rlx import ops
from rlx.codegen.native import jit
from rlx.reference.interpreter import evaluate
from rlx.target.cpu import host, machine_features, missing_here, resolve, runs_here

jit._linked_by_llvm = None  # objects are for our own loader
rng = np.random.default_rng(0)

def values(*shape):
    return rng.uniform(-1, 1, shape).astype(np.float32)

g = rlx.Graph("net")
x, image = g.input("x", ("n", 40), "f32"), g.input("image", (1, 3, 11, 9), "f32")
w = g.param("w", (40, 48), "f32", value=values(40, 48))
h = ops.softmax(ops.gelu(x @ w))
g.output("sorted", ops.sort(h)[:, ::-1])
g.output("sums", ops.sum(h, axis=0))
kernel = g.param("k", (5, 3, 3, 3), "f32", value=values(5, 3, 3, 3))
g.output("conv", ops.relu(ops.conv(image, kernel, padding=((1, 1), (1, 1)))))
q = ops.cast(ops.round(x * 100.0), "i8")
g.output("bytes", ops.matmul_integer(q, ops.transpose(q, (1, 0))))
g.output("half", ops.cast(ops.exp(ops.cast(x, "f16")), "f32"))
feed = {"x": values(7, 40), "image": values(1, 3, 11, 9)}
program = rlx.compile(g, threads=2)
got, want = program.run(feed), evaluate(g, feed)
print(json.dumps({
    "host": host().name,
    "features": sorted(machine_features()),
    "missing": missing_here(resolve("aarch64")),
    "x86": runs_here(resolve("x86-64")),
    "thunks": len(program.stats["host_thunks"]),
    "off": {name: float(np.abs(got[name].astype("f8") - want[name].astype("f8")).max()) for name in want},
}))
"""
RUN = """
import json, sys
import numpy as np
import rlx

feed = {"x": np.load(sys.argv[2])}
y = rlx.load(sys.argv[1], threads=2).run(feed)["y"]
print(json.dumps({"y": y.tolist(), "llvm": "llvmlite" in sys.modules}))
"""


@pytest.fixture(autouse=True)
def needs_python(require) -> None:  # type: ignore[no-untyped-def]
    require("aarch64-python")


def on_arm(text: str, cache: Path, *arguments: str, without: str = "", cpu: str = "max") -> dict[str, Any]:
    """What a program prints that AArch64's Python runs, without one of its packages."""
    folder = AARCH64_PYTHON
    packages = [str(path) for path in (folder / "site").iterdir() if path.name != without]
    home = {"PYTHONHOME": str(folder / "root" / "usr"), "RLX_CACHE": str(cache), "RLX_HOST": ""}
    path = os.pathsep.join([*packages, str(Path(rlx.__file__).parents[1])])
    command = ["qemu-aarch64-static", "-cpu", cpu, "-L", str(folder / "root"), str(folder / "python")]
    done = subprocess.run(
        [*command, "-c", text, *arguments],
        env={**os.environ, **home, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("cpu", "host", "more"),
    [("cortex-a53", "aarch64", []), ("cortex-a76", "aarch64-dotprod", ["dotprod", "fullfp16"])],
)
def test_it_compiles_and_runs(tmp_path: Path, cpu: str, host: str, more: list[str]) -> None:
    """As what the emulator is, whatever the machine below it."""
    found = on_arm(COMPILE, tmp_path, cpu=cpu)
    assert found["host"] == host and found["features"] == sorted(["fp-armv8", "neon", *more])
    assert found["missing"] == [] and not found["x86"] and found["thunks"] == 0
    assert found["off"].pop("half") <= 2e-3 and found["off"].pop("bytes") == 0
    assert all(off < 1e-5 for off in found["off"].values()), found["off"]


def test_a_file_from_x86_runs_without_llvm(
    require,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,  # type: ignore[no-untyped-def]
) -> None:
    """`rlx compile --target aarch64` signs the file; the same user's RLX on AArch64 trusts it."""
    require("demo")
    from click.testing import CliRunner

    cache = tmp_path / "cache"
    monkeypatch.setenv("RLX_CACHE", str(cache))
    g, x = network(), np.linspace(-1, 1, 6 * 40, dtype=np.float32).reshape(6, 40)
    save(g, tmp_path / "net.graph")
    np.save(tmp_path / "x.npy", x)
    command = ["compile", str(tmp_path / "net.graph"), "-o", str(tmp_path / "net.rlx"), "--target", "aarch64"]
    made = CliRunner().invoke(app, command)
    assert made.exit_code == 0, made.output
    assert "code for aarch64" in made.output
    found = on_arm(RUN, cache, str(tmp_path / "net.rlx"), str(tmp_path / "x.npy"), without="llvmlite")
    assert not found["llvm"]
    np.testing.assert_allclose(found["y"], evaluate(g, {"x": x})["y"], rtol=1e-5, atol=1e-6)


def network() -> Graph:
    g = Graph("net")
    w = np.random.default_rng(0).normal(size=(40, 48)).astype(np.float32)
    y = ops.gelu(g.input("x", ("n", 40), "f32") @ g.param("w", (40, 48), "f32", value=w))
    g.output("y", ops.softmax(y) + ops.cumsum(y, 1))
    return g
