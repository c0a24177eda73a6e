"""A server with a small random model, on a free port of this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from served import Client, serving_model, write_served_model


@pytest.fixture(scope="session")
def folder(require: Callable[[str], None], tmp_path_factory: pytest.TempPathFactory) -> Path:
    require("serve")
    return write_served_model(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def serving(folder: Path) -> Callable[..., Any]:
    """`with serving(slots=2, timeout=3.0) as client`: a server with these options."""
    return serving_model(folder)


@pytest.fixture(scope="session")
def client(serving: Callable[..., Any]) -> Iterator[Client]:
    with serving() as found:
        yield found
