"""rlx export: files, notes about ranges, JSON, and errors that say what to do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.cli import output
from rlx.cli.main import main
from rlx.runtime.store.artifact import Artifact
from rlx.target.cpu import runs_here, targets


@pytest.fixture
def model(tmp_path: Path) -> str:
    g = rlx.Graph("two words")
    g.output("y", ops.exp(g.input("x", ("n", 4), "f32")))
    path = tmp_path / "small-net.hir"
    path.write_text(str(g))
    return str(path)


def test_files_and_the_ranges_that_were_chosen(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", model, "--c", str(tmp_path / "c"), "--target", "x86-64"]) == 0
    told = capsys.readouterr()
    assert told.err == "n ranges from 0 to 128; --bind n=LOW..HIGH changes it\n"
    assert "small_net.h: " in told.out and "small_net for x86-64: " in told.out
    assert (tmp_path / "c" / "libsmall_net.a").exists()


def test_json_for_machines(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "web")
    arguments = ["--bind", "n=1..8", "--name", "net", "--target", "wasm32-relaxed", "--json"]
    assert main(["export", model, "--wasm", folder, *arguments]) == 0
    told = capsys.readouterr()
    made = json.loads(told.out)
    assert made["ranges"] == {"n": [1, 8]} and made["target"] == "wasm32-relaxed" and not told.err
    assert made["files"].keys() == {"net.wasm", "net.threads.wasm", "net.weights", "net.mjs", "net.d.mts"}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "give --c DIR or --wasm DIR"),
        (["--c", "a", "--wasm", "b"], 2, "give --c DIR or --wasm DIR"),
        (["--c", "a", "--bind", "n=8..x"], 2, "--bind takes NAME=LOW..HIGH, like seq=1..512, not 'n=8..x'"),
        (["--c", "a", "--bind", "m=1..8"], 1, "has no symbol 'm'; its symbols: n"),
        (["--c", "a", "--bind", "n=8..1"], 1, "n=8..1 is not a range"),
        (["--c", "a", "--name", "int"], 1, "name 'int' is not an identifier of C"),
        (["--c", "a", "--target", "wasm32"], 1, "not for target wasm32; choose x86-64-v4"),
        (["--wasm", "a", "--embed"], 1, "leave out embed"),
        (["--wasm", "a", "--context", "9"], 2, "--context is for language models"),
        (["--c", "a", "--page"], 2, "--page goes with --wasm DIR"),
    ],
)
def test_errors_say_what_to_do(
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["export", model, *arguments]) == code
    assert message in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


def test_a_file_for_another_machine_has_its_code_alone(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It cannot be run here, but loading it compiles the graph in it again."""
    other = next(t.name for t in reversed(targets()) if not runs_here(t))
    for ending in ("rlx", "plan"):
        assert main(["compile", model, "-o", str(tmp_path / f"net.{ending}"), "--target", other]) == 0
        assert f"for {other}, in" in capsys.readouterr().out
    assert Artifact(tmp_path / "net.rlx").targets == [other]
    assert f'target "{other}"' in (tmp_path / "net.plan").read_text()
    x = np.zeros((2, 4), np.float32)
    np.testing.assert_array_equal(rlx.load(tmp_path / "net.rlx")(x), np.ones_like(x))


class Terminal:
    """Stands for the console: what its status line has said."""

    is_terminal = True

    def __init__(self, **how: object) -> None:
        pass

    @contextmanager
    def status(self, first: object) -> Iterator[Terminal]:
        SAID.append(str(first))
        yield self

    def update(self, line: object) -> None:
        SAID.append(str(line))


SAID: list[str] = []


@pytest.mark.parametrize("flag", ["--c", "--wasm"])
def test_a_terminal_sees_the_steps(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    SAID.clear()
    monkeypatch.setattr(output, "Console", Terminal)
    assert main(["export", model, flag, str(tmp_path / "out")]) == 0
    assert main(["compile", model, "-o", str(tmp_path / "net.rlx")]) == 0
    steps = ["loading", "importing", "compiling 'two words'", "exporting", "compiling small_net", "writing"]
    for step in steps:
        assert any(line.startswith(step) for line in SAID), (step, SAID)


def test_an_interrupted_export_leaves_nothing(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pressed(*given: object) -> None:
        raise KeyboardInterrupt

    before = set(tmp_path.iterdir())
    monkeypatch.setattr("rlx.export.wasm.write_weights", pressed)
    assert main(["export", model, "--wasm", str(tmp_path / "web"), "--json"]) == 130
    told = capsys.readouterr()
    assert told.err.strip() == "rlx: interrupted" and not told.out
    assert set(tmp_path.iterdir()) == before
