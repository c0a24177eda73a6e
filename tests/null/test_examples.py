"""Properties are tested on the same examples whatever else has been imported, or found before."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


def test_examples_do_not_depend_on_modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[tuple[int, str]] = []

    @given(st.integers(), st.text())
    def note(number: int, text: str) -> None:
        seen.append((number, text))

    note()
    first, seen[:] = list(seen), []
    module = ModuleType("with_constants")
    module.__file__ = str(tmp_path / "with_constants.py")
    Path(module.__file__).write_text("".join(f"x = {n}, 'word {n}'\n" for n in range(7_000_000, 7_000_400)))
    monkeypatch.setitem(sys.modules, "with_constants", module)
    note()
    assert seen == first and len(first) == settings().max_examples
    assert settings().deadline is None and settings().database is None
