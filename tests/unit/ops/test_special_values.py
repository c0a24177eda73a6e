"""Every op takes NaN and infinities in every operand: an answer or an error of ours, no bare exception."""

from __future__ import annotations

import numpy as np
import pytest
from op_cases import ALL_CASES, Case, by_op

import rlx
from rlx import ops
from rlx.errors import RlxError
from rlx.ir.dtype import dtype
from rlx.reference.interpreter import evaluate


@by_op(ALL_CASES)
def test_the_reference_takes_what_is_not_finite(case: Case) -> None:
    g, _ = case.graph()
    feed = case.feed()
    for name, array in feed.items():
        if not dtype(array.dtype).is_float or not array.size:
            continue
        for value in (np.nan, np.inf, -np.inf):
            for place in (0, -1):
                given = array.copy()
                given.reshape(-1)[place] = value
                try:
                    with np.errstate(all="ignore"):
                        evaluate(g, {**feed, name: given})
                except RlxError:
                    pass


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("region", [(np.nan, 1.0), (0.0, np.inf), (-np.inf, np.inf), (0.2, np.nan)])
def test_a_crop_to_no_number_is_outside(region: tuple[float, float], mode: str) -> None:
    def crop(x: np.ndarray, roi: np.ndarray) -> np.ndarray:
        how = {"mode": mode, "transform": "tf_crop_and_resize", "extrapolation": 7.0}
        return ops.resize(x, (4,), roi=roi, **how)

    x, roi = np.arange(1, 6, dtype=np.float32), np.float32(region)
    want = crop(x, roi)
    assert np.isfinite(want).all() and 7 in want
    np.testing.assert_allclose(rlx.jit(crop)(x, roi), want, rtol=1e-6)
