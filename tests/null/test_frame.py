"""The test frame itself: golden texts are compared and updated, missing parts skip or fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A suite of its own that uses the same conftest."""
    shutil.copy(CONFTEST, tmp_path / "conftest.py")
    (tmp_path / "golden").mkdir()
    return tmp_path


def run(suite: Path, test: str, *options: str, require: str = "") -> tuple[int, str]:
    (suite / "test_it.py").write_text(test)
    environment = {
        name: text for name, text in os.environ.items() if not name.startswith(("PYTEST_", "RLX_"))
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *options, "test_it.py"],
        cwd=suite,
        env={
            **environment,
            "RLX_REQUIRE": require,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONPATH": str(CONFTEST.parent),  # of what the conftest imports
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout + done.stderr


def test_golden(suite: Path) -> None:
    test = "def test(golden): golden('plan', 'line 1\\nline {}')"
    file = suite / "golden" / "plan.txt"

    code, out = run(suite, test.format(2))
    assert code == 1 and "plan.txt does not exist; run pytest --update-golden" in out
    assert run(suite, test.format(2), "--update-golden")[0] == 0
    assert file.read_text() == "line 1\nline 2\n"
    assert run(suite, test.format(2))[0] == 0
    code, out = run(suite, test.format(3))
    assert code == 1 and "plan.txt differs" in out
    assert file.read_text() == "line 1\nline 2\n"


MISSING = """
import conftest
def test(require, monkeypatch):
    monkeypatch.setitem(conftest.PARTS, "onnx", lambda: "it is not there")
    require("onnx")
"""


def test_a_missing_part_skips_or_fails(suite: Path) -> None:
    code, out = run(suite, MISSING)
    assert code == 0 and "optional part 'onnx': it is not there" in out
    code, out = run(suite, MISSING, require="onnx,models")
    assert code == 1 and "RLX_REQUIRE lists 'onnx', but: it is not there" in out


def test_a_misspelt_part_is_refused(suite: Path) -> None:
    code, out = run(suite, "def test(require): require('onyx')")
    assert code == 1 and "unknown part 'onyx'" in out
    code, out = run(suite, "def test(): pass", require="onyx")
    assert code != 0 and "RLX_REQUIRE names unknown parts ['onyx']" in out
