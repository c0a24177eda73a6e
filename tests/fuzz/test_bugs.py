"""The grammar is wide: bugs of the past, put back, are found."""

from __future__ import annotations

import pytest

from fuzz.bugs import Bug
from fuzz.bugs.compiler import BUGS
from rlx.fuzz.grammar import draw_program
from rlx.fuzz.oracles import check

MOST = 2000  # programs
SEED = 2026


def found_by(bug: Bug, numbers: range) -> int | None:
    """The first program that shows the bug, and nothing without it."""
    for number in numbers:
        program = draw_program(SEED, number)
        with pytest.MonkeyPatch.context() as patch:
            bug.plant(patch)
            finding = check(program)
        if finding is not None and check(program) is None:
            return number
    return None


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BUGS))
def test_an_old_bug_is_found(name: str) -> None:
    assert found_by(BUGS[name], range(MOST)) is not None
