"""The README's Python blocks run, one after the other, as a reader would paste them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parents[3] / "README.md"


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S)


def test_the_quickstart_runs(
    zoo_path: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    zoo_path("ppocr-cls"), zoo_path("silero-ifless")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    assert len(blocks()) >= 3
    for block in blocks():
        exec(compile(block, str(README), "exec"), names)
    assert (tmp_path / "model.rlx").stat().st_size > 0
    assert names["gradient"].shape == (3, 3)
    assert "kernels" in capsys.readouterr().out
