"""The recipes of CONTRIBUTING.md work as they are written: their code runs, each in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NEEDS = {
    "Add an op": None,
    "Add a pass": None,
    "Add a kernel": None,
    "Add a device": None,
    "Add an ONNX op": "onnx",
}


def recipe(heading: str) -> str:
    """The Python blocks of a section, one after the other."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = re.search(rf"^## {heading}\n(.*?)(?=^## )", text, re.S | re.M)
    assert section is not None, f"CONTRIBUTING.md has lost its section «{heading}»"
    return "\n".join(re.findall(r"^```python\n(.*?)^```", section[1], re.S | re.M))


@pytest.mark.parametrize("heading", NEEDS)
def test_a_recipe_works_as_written(heading: str, tmp_path: Path, require: Callable[[str], None]) -> None:
    part = NEEDS[heading]
    if part is not None:
        require(part)
    code = recipe(heading)
    assert "assert" in code, f"«{heading}» checks nothing"
    (tmp_path / "recipe.py").write_text(code, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "RLX_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "recipe.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
