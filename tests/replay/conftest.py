"""How digests are compared with what is recorded, or recorded."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from replay.records import Digests, Key, Records

FOLDER = Path(__file__).parent


class ReplayWarning(UserWarning):
    """Bits that this machine could record are not recorded."""


Check = Callable[[str, str, Mapping[Key, Digests]], None]


@pytest.fixture
def replay(request: pytest.FixtureRequest) -> Check:
    """`replay(file, run, found)`: `found` must be what tests/replay/<file>.txt says; `run` are the options of
    pytest that check this file, for the message."""

    def check(file: str, run: str, found: Mapping[Key, Digests]) -> None:
        records = Records(FOLDER / f"{file}.txt", f"pytest {run} --update-replay, then review the diff")
        if request.config.getoption("--update-replay"):
            records.write(found)
            return
        if wrong := records.differences(found):
            pytest.fail("\n".join(wrong), pytrace=False)
        for key in records.unrecorded(found):
            told = f"{key.name} on {key.target}: no bits are recorded for this code"
            warnings.warn(f"{told}; {records.accept}", ReplayWarning, stacklevel=2)

    return check


@pytest.fixture
def keep_text(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`keep_text(name, text)` writes a text that was digested to the folder of --replay-texts, if given."""
    folder = request.config.getoption("--replay-texts")

    def keep(name: str, text: str) -> None:
        if folder is not None:
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")

    return keep
