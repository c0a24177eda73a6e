"""Every sample of every op, compiled and run natively, against the reference; host thunks are no surprise."""

from __future__ import annotations

import pytest
from op_cases import ALL_CASES, IDS, Case

import rlx
from rlx.fuzz.bounds import assert_by_table
from rlx.reference.interpreter import evaluate

# What no native kernel exists for: ops, and parts of reasons. Everything else must be native.
HOST_OPS = {"cond", "custom", "data_size", "loop", "pack_groups", "pack_sparse", "unique"}
HOST_REASONS = ("dtype c64 ", "dtype c128 ", "a Fourier transform of", "can only be read by matmuls")


@pytest.mark.parametrize("case", ALL_CASES, ids=IDS)
def test_native_is_the_reference(case: Case) -> None:
    graph, _ = case.graph()
    want = evaluate(graph, case.feed())
    program = rlx.compile(graph, threads=2)
    got = program.run(case.feed())
    assert_by_table(graph, case.feed(), got, want)
    for thunk in program.stats["host_thunks"]:
        known = thunk["op"] in HOST_OPS or any(why in thunk["why"] for why in HOST_REASONS)
        assert known, thunk
