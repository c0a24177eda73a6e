"""Every sample of every op, compiled and run natively, against the reference; host thunks are no surprise."""

from __future__ import annotations

import numpy as np
import pytest
from error_bounds import Follower, NotFollowed, assert_within
from op_cases import ALL_CASES, IDS, Case, assert_close

import rlx
from rlx.backend.reference.interpreter import evaluate

# What no native kernel exists for: ops, and parts of reasons. Everything else must be native.
HOST_OPS = {"cond", "custom", "loop", "pack_groups", "pack_sparse", "unique"}
HOST_REASONS = ("dtype c64 ", "dtype c128 ", "a Fourier transform of", "is read by products only")


def check(case: Case, got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    """By the table of rounding; what it does not follow (complex numbers, loops) by one closeness."""
    try:
        truth = Follower(rlx.lower(case.graph()[0]), case.feed(), case.binding()).outputs()
    except NotFollowed:
        for name, value in want.items():
            assert_close(got[name], value)
        return
    for name, value in want.items():
        assert_within(got[name], value, truth[name])


def test_most_cases_are_judged_by_the_table() -> None:
    followed = 0
    for case in ALL_CASES[::10]:
        try:
            Follower(rlx.lower(case.graph()[0]), case.feed(), case.binding()).outputs()
            followed += 1
        except NotFollowed:
            pass
    assert followed > 0.8 * len(ALL_CASES[::10])


@pytest.mark.parametrize("case", ALL_CASES, ids=IDS)
def test_native_is_the_reference(case: Case) -> None:
    graph, _ = case.graph()
    want = evaluate(graph, case.feed())
    program = rlx.compile(graph, threads=2)
    got = program.run(case.feed())
    check(case, got, want)
    for thunk in program.stats["host_thunks"]:
        known = thunk["op"] in HOST_OPS or any(why in thunk["why"] for why in HOST_REASONS)
        assert known, thunk
