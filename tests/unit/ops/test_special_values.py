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


def sampled(x: np.ndarray, at: float, mode: str) -> list[np.ndarray]:
    """x [5] at one place, by each op that interpolates and reads nothing outside."""
    image, grid = x[None, None], np.float32([[[(2 * at + 1) / len(x) - 1]]])
    offset, one = np.float32([[[at]]]), np.ones((1, 1, 1), np.float32)
    found = [
        rlx.jit(lambda x, g: ops.grid_sample(x, g, mode))(image, grid),
        ops.grid_sample(image, grid, mode),
    ]
    if mode == "linear":
        how = {"strides": len(x)}
        found += [
            f(image, one, offset, **how)
            for f in (ops.deform_conv, rlx.jit(ops.deform_conv, static=("strides",)))
        ]
    return found


@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
@pytest.mark.parametrize(("place", "at"), [(0, -3.0), (0, 3.5), (4, 7.0), (4, 0.5), (0, np.nan), (4, np.inf)])
def test_an_infinity_that_is_not_read_changes_nothing(place: int, at: float, mode: str) -> None:
    x = np.arange(1, 6, dtype=np.float32)
    want = sampled(x, at, mode)
    x[place] = np.inf
    for got, clean in zip(sampled(x, at, mode), want, strict=True):
        np.testing.assert_array_equal(got, clean)


def test_samples_of_a_region_that_do_not_count_read_nothing() -> None:
    x = np.arange(36, dtype=np.float32).reshape(1, 1, 6, 6)
    rois, images = np.float32([[2.0, 2.0, 4.5, 4.5]]), np.array([0])
    want = ops.roi_align(x, rois, images, (2, 2))
    x[0, 0, 0, 0] = np.inf
    for function in (ops.roi_align, rlx.jit(ops.roi_align, static=("size",))):
        np.testing.assert_array_equal(function(x, rois, images, size=(2, 2)), want)
