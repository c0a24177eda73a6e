"""Code for other machines than this one: ops compiled for targets without AVX-512 that run here too."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
from op_cases import ALL_CASES, ALL_OPS, Case

import rlx
from machines import executable
from rlx.fuzz.bounds import assert_by_table
from rlx.reference.interpreter import evaluate
from rlx.target.cpu import Target, resolve

HOST = resolve("host")
TARGETS = [t for t in executable() if t is not HOST and not t.has_avx512]


def sample() -> list[Any]:
    """Every op on every target, with another of its cases each time: by default on one target, the others
    are slow. Which one depends on the op, so that each target has its share."""
    out = []
    for op in ALL_OPS:
        own = [c for c in ALL_CASES if c.op is op]
        first = zlib.crc32(op.name.encode())
        for i, target in enumerate(TARGETS):
            kept = first % len(TARGETS) == i
            case = own[(first + i) % len(own)]
            out.append(pytest.param(target, case, marks=() if kept else pytest.mark.slow))
    return out


def check(target: Target, case: Case) -> None:
    graph, _ = case.graph()
    want = evaluate(graph, case.feed())
    got = rlx.compile(graph, target=target.name, threads=2).run(case.feed())
    assert_by_table(graph, case.feed(), got, want)


def name(value: object) -> str:
    return value.name if isinstance(value, Target) else value.id if isinstance(value, Case) else str(value)


@pytest.mark.parametrize(("target", "case"), sample(), ids=name)
def test_a_sample_on_other_targets(target: Target, case: Case) -> None:
    check(target, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL_CASES, ids=name)
@pytest.mark.parametrize("target", TARGETS, ids=name)
def test_every_case_on_other_targets(target: Target, case: Case) -> None:
    check(target, case)
