"""Every sample of every op, compiled and run natively, against the reference; host thunks are counted."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from op_cases import ALL_CASES, IDS, Case

import rlx
from rlx.backend.reference.interpreter import evaluate

THUNKS: Counter[str] = Counter()


def assert_close(got: np.ndarray, want: np.ndarray) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    if want.dtype.kind in "iub":
        np.testing.assert_array_equal(got, want)
        return
    wide = np.complex128 if want.dtype.kind == "c" else np.float64
    narrow = want.dtype.itemsize <= 2
    scale = 1e-2 if narrow else 2e-5 if want.dtype.itemsize <= 4 or want.dtype == np.complex64 else 1e-12
    np.testing.assert_allclose(got.astype(wide), want.astype(wide), rtol=scale, atol=scale, equal_nan=True)


@pytest.mark.parametrize("case", ALL_CASES, ids=IDS)
def test_native_is_the_reference(case: Case) -> None:
    graph, _ = case.graph()
    want = evaluate(graph, case.feed())
    program = rlx.compile(graph, threads=2)
    got = program.run(case.feed())
    for name, value in want.items():
        assert_close(got[name], value)
