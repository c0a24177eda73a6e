"""One browser for all tests of pages, and what they have in common."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from chromium import Browser, browsing


@pytest.fixture(scope="session")
def browser_process(require, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:  # type: ignore[no-untyped-def]
    require("browser")
    with browsing(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture
def browser(browser_process: Browser, tmp_path: Path) -> Iterator[Browser]:
    """A browser whose console must stay empty: no error, no blocked resource, no warning."""
    browser_process.open("about:blank")
    browser_process.logged()
    yield browser_process
    assert browser_process.logged() == []
