from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlx import zoo
from rlx.cli.main import main


@pytest.fixture(autouse=True)
def demo_packages(require) -> None:  # type: ignore[no-untyped-def]
    require("demo")


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_CACHE", str(tmp_path))


def test_help_lists_commands_and_variables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "zoo" in out and "RLX_CACHE" in out


def test_every_command_of_the_table_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    from rlx.cli.app import COMMANDS

    for name in COMMANDS:
        assert main([name, "--help"]) == 0
        assert f"Usage: rlx {name}" in capsys.readouterr().out


def test_zoo_list_in_a_pipe_shows_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zoo", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(zoo.models())
    for line, model in zip(lines[1:], zoo.models(), strict=True):
        assert line.split()[:2] == [model.id, "no"]
        assert line.rstrip().endswith(model.note)


def test_zoo_list_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zoo", "list", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert [entry["id"] for entry in entries] == [model.id for model in zoo.models()]
    assert entries[0]["path"] is None and "tokenizer.json" in entries[0]["files"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["zoo", "path", "minilm"], 1, "rlx: zoo model 'minilm' is not in the cache"),
        (["zoo", "fetch", "minilm", "nothing"], 1, "rlx: the zoo has no model 'nothing'"),
        (["zoo", "fetch"], 2, "name the models to fetch, or give --all"),
        (["zoo", "fetch", "minilm", "--all"], 2, "name the models to fetch, or give --all"),
        (["frobnicate"], 2, "No such command 'frobnicate'"),
    ],
)
def test_refusals(arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""
    assert list(Path(zoo.store.root().parent).iterdir()) == []  # refused before anything was downloaded


def test_traceback_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_TRACEBACK", "1")
    with pytest.raises(zoo.ZooError):
        main(["zoo", "path", "minilm"])


@pytest.mark.parametrize("command", [["zoo", "list"], ["zoo", "list", "--json"], ["--version"]])
def test_a_reader_that_leaves_gets_no_complaint(command: list[str]) -> None:
    code = "import sys\nfrom rlx.cli.main import main; sys.exit(main(sys.argv[1:]))"
    reader, writer = os.pipe()
    os.close(reader)  # before there is anything to read
    start = [sys.executable, "-c", code, *command]
    done = subprocess.run(start, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=300)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_bench_without_the_repository_says_where_to_find_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The harness is no part of the package."""
    monkeypatch.setattr("rlx.cli.bench.HARNESS", "not_there")
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "--list"]) != 0
    assert "rlx bench needs the repository, which holds the workloads: clone it" in capsys.readouterr().err
