"""Who runs a call and where threads meet: decisions are sound on random lists, and no meeting is idle."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.errors import PlanError
from rlx.runtime.barriers import ALL, SMALL_PS, Mark, Span, Turn, settle, verify

SMALL, LARGE = SMALL_PS // 2, SMALL_PS * 100


def span(at: int, size: int = 64, space: int | None = None) -> Span:
    return Span(space, at, at + size)


spans = st.lists(
    st.builds(span, st.integers(0, 300), st.sampled_from([1, 64, 128]), st.sampled_from([None, 3])),
    max_size=3,
)
turns = st.builds(
    Turn,
    spans,
    spans,
    st.sampled_from([0, SMALL, LARGE]),
    alone=st.booleans(),
    waits_for_all=st.sampled_from([False] * 9 + [True]),
    all_wait_for=st.sampled_from([False] * 9 + [True]),
)


@st.composite
def lists(draw: st.DrawFn) -> list[Turn]:
    """Calls, some of them jumps to anywhere."""
    made = draw(st.lists(turns, min_size=1, max_size=14))
    for at in draw(st.lists(st.integers(0, len(made) - 1), max_size=3)):
        made[at] = Turn([span(draw(st.integers(0, 300)), 1)], to=Mark(draw(st.integers(0, len(made)))))
    return made


@given(lists(), st.integers(1, 5))
def test_what_is_settled_is_sound(made: list[Turn], threads: int) -> None:
    settle(made, threads)
    verify(made)
    assert all(ALL <= t.owner < threads for t in made)
    assert all(t.owner != ALL for t in made if t.alone)
    assert all(t.owner == ALL for t in made if t.to is not None)


def test_a_jump_to_the_first_call_meets_there() -> None:
    made = [Turn(waits_for_all=True), Turn([span(0)], [span(64)], LARGE), Turn([span(1, 1)], to=Mark(0))]
    settle(made, 2)
    assert made[0].meets
    verify(made)


@given(st.lists(turns, min_size=1, max_size=14), st.integers(2, 4))
def test_no_meeting_is_idle(made: list[Turn], threads: int) -> None:
    """Without any one of them, the list is refused."""
    settle(made, threads)
    for turn in made:
        if turn.meets:
            turn.meets = False
            with pytest.raises(PlanError):
                verify(made)
            turn.meets = True


class Counted(int):
    """A number that counts how often numbers like it are compared."""

    compared = 0

    def __lt__(self, other: object) -> bool:
        Counted.compared += 1
        return int.__lt__(self, other)  # type: ignore[operator]

    def __gt__(self, other: object) -> bool:
        Counted.compared += 1
        return int.__gt__(self, other)  # type: ignore[operator]


@pytest.mark.parametrize("work", [SMALL, LARGE])
@pytest.mark.parametrize("chained", [False, True])
def test_five_thousand_calls_are_settled_without_looking_at_all_pairs(chained: bool, work: int) -> None:
    many = 5000

    def cell(i: int) -> Span:
        return Span(None, Counted(128 * i), Counted(128 * i + 64))

    made = [Turn([cell(i if chained else 0)], [cell(i + 1)], work) for i in range(many)]
    Counted.compared = 0
    settle(made, 2)
    assert Counted.compared < 100 * many
    assert sum(t.meets for t in made) == (many - 1 if chained and work == LARGE else 0)


def test_a_chain_of_small_calls_stays_on_one_thread() -> None:
    many = 100
    chain = [Turn([span(64 * i)], [span(64 * i + 64)], SMALL) for i in range(many)]
    settle(chain, 2)
    assert {t.owner for t in chain} == {0}
    assert not any(t.meets for t in chain)


def test_small_calls_of_their_own_are_spread() -> None:
    free = [Turn([span(0)], [span(64 * i + 64)], SMALL) for i in range(100)]
    settle(free, 4)
    load = [sum(t.work for t in free if t.owner == thread) for thread in range(4)]
    assert max(load) - min(load) <= 2 * SMALL_PS
    assert not any(t.meets for t in free)


def test_a_program_with_little_to_do_wakes_nobody() -> None:
    few = [Turn([span(0)], [span(64)], LARGE), Turn([span(64)], [span(0)], LARGE)]
    few[0].work = few[1].work = SMALL_PS
    settle(few, 2)
    assert [t.owner for t in few] == [0, 0]
    again = [*few, Turn([span(200, 1)], to=Mark(0))]  # unless it goes on for as long as data say
    settle(again, 2)
    assert [t.owner for t in again] == [ALL] * 3


def test_large_calls_that_touch_nothing_in_common_do_not_wait() -> None:
    made = [Turn([span(0)], [span(64)], LARGE), Turn([span(0)], [span(128)], LARGE)]
    made.append(Turn([span(64), span(128)], [span(192)], LARGE))
    settle(made, 2)
    assert [t.meets for t in made] == [False, False, True]


def test_a_missing_meeting_is_named() -> None:
    made = [Turn([], [span(0)], LARGE), Turn([span(32)], [], LARGE, meets=False)]
    with pytest.raises(PlanError, match="calls 0 and 1 touch the same bytes"):
        verify(made)
    loop = [Turn([span(0)], [span(64)], owner=ALL, meets=False), Turn([], [span(0)]), Turn([], to=Mark(0))]
    loop[2].meets = False
    with pytest.raises(PlanError, match="calls 1 and 0 touch the same bytes"):
        verify(loop)
