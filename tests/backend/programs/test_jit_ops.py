"""Every sample of every op through rlx.jit, with its arrays as arguments, against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from op_cases import ALL_CASES, ALL_OPS, Case

import rlx
from rlx.fuzz.bounds import assert_by_table
from rlx.ir.build import apply
from rlx.reference.interpreter import evaluate

# One sample of each op by default, the others under -m slow.
WITH_ARRAYS = [c for c in ALL_CASES if c.arrays]
FIRST = {c.op.name: c.id for c in reversed(WITH_ARRAYS)}
CASES = [
    pytest.param(c, id=c.id, marks=() if c.id == FIRST[c.op.name] else pytest.mark.slow) for c in WITH_ARRAYS
]


def call(case: Case, *arrays: Any) -> Any:
    return apply(case.op, arrays, case.sample.attrs, case.sample.bodies)


def check(case: Case, **options: Any) -> None:
    got = rlx.jit(lambda *arrays: call(case, *arrays), **options)(*case.arrays)
    graph, _ = case.graph()
    want = evaluate(graph, case.feed())
    values = got if isinstance(got, tuple) else (got,)
    assert_by_table(graph, case.feed(), dict(zip(want, map(np.asarray, values), strict=True)), want)


@pytest.mark.parametrize("case", CASES)
def test_arrays_as_arguments(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", CASES)
def test_symbols_at_once(case: Case) -> None:
    """Also where symbols are refused: then each size compiles by itself."""
    check(case, dynamic=True)


def test_every_op_that_takes_arrays_is_here() -> None:
    assert {c.op.name for c in WITH_ARRAYS} == {
        op.name for op in ALL_OPS if any(s.args for s in op.samples())
    }
    assert len(FIRST) > 200
