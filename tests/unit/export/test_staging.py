"""An export appears whole or not at all."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import rlx
from rlx import ops
from rlx.errors import ConfigError
from rlx.export import Page
from rlx.export.page import POLICY
from rlx.export.staging import filling
from rlx.ir.graph import Graph


def test_nothing_is_left_of_what_was_interrupted(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), filling(tmp_path / "new" / "model") as there:
        (there / "a").write_text("half")
        raise KeyboardInterrupt
    assert not (tmp_path / "new" / "model").exists()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "a").write_text("before")
    with pytest.raises(KeyboardInterrupt), filling(tmp_path / "old") as there:
        (there / "a").write_text("half")
        raise KeyboardInterrupt
    assert [p.name for p in (tmp_path / "old").iterdir()] == ["a"]
    assert (tmp_path / "old" / "a").read_text() == "before"


def test_a_folder_that_is_there_keeps_its_other_files(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "objects").mkdir()
    (tmp_path / "objects" / "stale.o").write_text("stale")
    with filling(tmp_path) as there:
        (there / "objects").mkdir()
        (there / "objects" / "new.o").write_text("new")
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")) == [
        "mine",
        "objects",
        "objects/new.o",
    ]


def test_a_failed_export_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("rlx.export.export")  # the package has a function of that name

    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    g = Graph("net")
    g.output("y", ops.exp(g.input("x", (4,), "f32")))
    monkeypatch.setattr(module, "write_page", interrupted)  # the last step
    with pytest.raises(KeyboardInterrupt):
        rlx.compile(g).export(tmp_path / "web", "wasm", page=True)
    assert list(tmp_path.iterdir()) == []


def test_pages_are_for_the_browser_and_of_a_known_kind(tmp_path: Path) -> None:
    g = Graph("net")
    g.output("y", ops.exp(g.input("x", ("n",), "f32")))
    program = rlx.compile(g)
    with pytest.raises(ConfigError, match="a page runs WebAssembly"):
        program.export(tmp_path / "c", "c", page=True)
    with pytest.raises(ConfigError, match="kind 'game' of a page is unknown; choose model"):
        program.export(tmp_path / "web", "wasm", page=Page("game"))
    assert list(tmp_path.iterdir()) == []
    made = program.export(tmp_path / "web", "wasm", page=Page(title='a "b" <c>'))
    assert {"index.html", "serve.py", "page.json", "page.mjs", "style.css"} < made.files.keys()
    frame = (tmp_path / "web" / "index.html").read_text()
    assert "<title>a &quot;b&quot; &lt;c&gt;</title>" in frame and "http" not in frame.replace(
        "http-equiv", ""
    )
    assert f'"{POLICY}"' in (tmp_path / "web" / "serve.py").read_text()
