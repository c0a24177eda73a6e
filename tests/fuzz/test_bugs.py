"""The grammar is wide: bugs of the past, put back, are found."""

from __future__ import annotations

import pytest

from fuzz.bugs import Bug, all_bugs
from rlx.fuzz.oracles import check
from rlx.fuzz.programs.grammar import draw_program

MOST = 2000  # programs
SEED = 2026
BUGS = all_bugs()
QUICK = (
    "nodes of a model are taken in the order of the file",
    "pins of the main graph are looked up in bodies",
    "products that end in a truth value have no type",
)
"""Those that few programs show."""
NOT_FOUND = {
    "a window grows with the image that it must fit": "190 programs could have shown it",
    "gaps between the elements of nothing": "20 programs could have shown it",
}


def found_by(bug: Bug) -> int | None:
    """The first program that shows the bug, and nothing without it."""
    for number in range(MOST):
        program = draw_program(SEED, number)
        if not bug.may_show_in(program):
            continue
        with pytest.MonkeyPatch.context() as patch:
            bug.plant(patch)
            finding = check(program)
        if finding is not None and check(program) is None:
            return number
    return None


def test_enough_of_them_are_found() -> None:
    assert len(BUGS) >= 12 and len(BUGS) - len(NOT_FOUND) >= 10 and NOT_FOUND.keys() <= BUGS.keys()


def test_every_bug_can_be_planted() -> None:
    """The lines that it changes are still there."""
    for bug in BUGS.values():
        with pytest.MonkeyPatch.context() as patch:
            bug.plant(patch)


@pytest.mark.parametrize("name", QUICK)
def test_a_bug_that_shows_early_is_found(name: str) -> None:
    assert found_by(BUGS[name]) is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BUGS.keys() - NOT_FOUND.keys() - {*QUICK}))
def test_an_old_bug_is_found(name: str) -> None:
    assert found_by(BUGS[name]) is not None
