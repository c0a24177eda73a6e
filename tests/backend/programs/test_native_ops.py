"""Every sample of every op, compiled and run natively, against the reference; host steps are listed.

By default those run that `op_cases.SAMPLE` names: of each op every dtype, number of operands, flag and
choice, scalars, symbolic and empty sizes. The others are slow.
"""

from __future__ import annotations

import pytest
from op_cases import ALL_CASES, ALL_OPS, SAMPLE, Case, cases, features

import rlx
from rlx.fuzz.bounds import assert_by_table
from rlx.reference.interpreter import evaluate
from rlx.runtime.barriers import all_shared

# What no native kernel exists for: ops, and parts of reasons. Everything else must be native.
HOST_OPS = {"cond", "custom", "data_size", "loop", "pack_quads", "pack_sparse", "unique"}
HOST_REASONS = (
    "dtype c64 ",
    "dtype c128 ",
    "a Fourier transform of",
    "can only be read by matmuls",
    "template 'store_as'",
    "cannot read the layout",  # of another target
)


CASES = [pytest.param(c, id=c.id, marks=() if c.id in SAMPLE else pytest.mark.slow) for c in ALL_CASES]


@pytest.mark.parametrize("case", CASES)
def test_native_is_the_reference(case: Case) -> None:
    graph, _ = case.graph()
    want = evaluate(graph, case.feed())
    program = rlx.compile(graph, threads=2)
    with all_shared():
        got = program.run(case.feed())
    assert_by_table(graph, case.feed(), got, want)
    for thunk in program.stats["host_thunks"]:
        known = thunk["op"] in HOST_OPS or any(why in thunk["why"] for why in HOST_REASONS)
        assert known, thunk


def test_the_sample_has_every_feature_of_every_op() -> None:
    assert len(SAMPLE) < len(ALL_CASES) // 2
    for op in ALL_OPS:
        own = cases(op)
        there = [features(c) for c in own if c.id in SAMPLE]
        assert set().union(*there) == set().union(*map(features, own)), op.name
