"""Files of every release are read: texts and graph files as they are, programs by their source part.

A release adds a folder, `python tests/golden/test_releases.py`, and never changes one: docs/compatibility.md
promises 24 months. While a version is not released, its folder may be written again.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from stored_models import set_own_folders

import rlx
from rlx import config
from rlx.ir.lir import LirModule
from rlx.ir.text.files import load, save
from rlx.ir.text.read import parse_graph

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "releases"
RELEASES = sorted(path.name for path in FOLDER.iterdir())


def network() -> rlx.Graph:
    """A small model with a param, a constant, a state, a symbolic size and a branch."""
    rng = np.random.default_rng(1)
    g = rlx.Graph("network")
    x = g.input("x", ("n", 6), "f32")
    w = g.param("w", (6, 4), "f32", rng.standard_normal((6, 4)).astype(np.float32))
    total = g.state("total", (4,), "f32", np.full(4, 3, np.float32))
    shifted = rlx.ops.gelu(x @ w) + g.constant(np.arange(4, dtype=np.float32))
    large = rlx.ops.sum(x) > 0.0
    y = rlx.ops.cond(large, lambda a: rlx.ops.softmax(a, axis=-1), lambda a: rlx.ops.tanh(a), shifted)
    g.output("y", y + total)
    g.set_state("total", total + rlx.ops.sum(y, axis=0))
    return g


def inputs() -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(2).standard_normal((3, 6)).astype(np.float32)}


def results(program: rlx.CompiledProgram) -> np.ndarray:
    """Of two runs: the second one has another state."""
    program.run(inputs())
    return program.run(inputs())["y"]


def write(folder: Path) -> None:
    """The files of this version."""
    folder.mkdir(parents=True, exist_ok=True)
    g = network()
    (folder / "graph.txt").write_text(str(g), encoding="utf-8")
    save(g, folder / "graph.rlxgraph")
    program = rlx.compile(g, target="x86-64", threads=1, cache=False)
    (folder / "plan.txt").write_text(program.lir.to_text(), encoding="utf-8")
    program.save(folder / "program.rlx")
    np.save(folder / "y.npy", results(rlx.compile(g, target="x86-64", threads=1, cache=False)))


@pytest.mark.parametrize("release", RELEASES)
def test_the_text_of_a_graph_is_read(release: str) -> None:
    text = (FOLDER / release / "graph.txt").read_text(encoding="utf-8")
    assert str(parse_graph(text)).count("\n") == text.count("\n")


@pytest.mark.parametrize("release", RELEASES)
def test_a_graph_file_is_read_and_runs(release: str) -> None:
    program = rlx.compile(load(FOLDER / release / "graph.rlxgraph"), threads=1, cache=False)
    np.testing.assert_allclose(results(program), np.load(FOLDER / release / "y.npy"), rtol=1e-5)


@pytest.mark.parametrize("release", RELEASES)
def test_the_text_of_a_plan_is_read_and_proved(release: str) -> None:
    module = LirModule.from_text((FOLDER / release / "plan.txt").read_text(encoding="utf-8"))
    module.plan.check()
    assert [name for name, _ in module.plan.io.outputs] == ["y"]


@pytest.mark.parametrize("release", RELEASES)
def test_a_program_is_read(release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_own_folders(tmp_path, monkeypatch)  # no key has signed the file
    program = rlx.load(FOLDER / release / "program.rlx")
    np.testing.assert_allclose(results(program), np.load(FOLDER / release / "y.npy"), rtol=1e-5)


def test_every_release_has_files() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## (\d+\.\d+\.\d+), \d{4}-\d\d-\d\d$", changes, re.M)
    missing = {*released, config.VERSION} - set(RELEASES)
    assert not missing, f"python tests/golden/test_releases.py writes those of {config.VERSION}: {missing}"


if __name__ == "__main__":
    write(FOLDER / config.VERSION)
