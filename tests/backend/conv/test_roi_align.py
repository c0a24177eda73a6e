"""Regions that are small, empty, outside the image, or not numbers."""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from machines import on_targets
from rlx.errors import ShapeError
from rlx.target.cpu import runs_here, targets

INF, NAN = np.inf, np.nan
REGIONS = [
    [0, 0, 2, 2], [0.2, 0.1, 0.4, 0.3], [-1, -1, 0.5, 0.5], [3, 3, 1, 1], [1, 1, 1, 1], [0, 0, 9, 9],
    [50, 50, 60, 60], [NAN, 0, 2, 2], [0, 0, INF, 2], [-INF, 0, 1, 1], [-INF, -INF, INF, INF],
    [0, 0, 1e30, 1],
]  # fmt: skip


@on_targets([t.name for t in targets() if runs_here(t)])
@pytest.mark.parametrize("ratio", [0, 2])
@pytest.mark.parametrize("half_pixel", [False, True], ids=["corner", "half-pixel"])
def test_small_images_and_odd_regions(half_pixel: bool, ratio: int, target: str) -> None:
    rng, regions = np.random.default_rng(0), np.array(REGIONS, np.float32)
    images = np.arange(len(regions)) % 2
    g = rlx.Graph("regions")
    operands = (
        g.input("x", (2, 2, "h", "w"), "f32"), g.input("r", ("n", 4), "f32"), g.input("i", ("n",), "i64")
    )  # fmt: skip
    how = {"size": (2, 3), "sampling_ratio": ratio, "half_pixel": half_pixel}
    for mode in ("avg", "max"):
        g.output(mode, rlx.ops.roi_align(*operands, **how, mode=mode))
    program = rlx.compile(g, target=target, threads=1)
    for height, width in ((1, 1), (1, 3), (2, 2), (5, 1)):
        x = rng.standard_normal((2, 2, height, width)).astype(np.float32)
        for mode, got in program.run({"x": x, "r": regions, "i": images}).items():
            expected = rlx.ops.roi_align(x, regions, images, **how, mode=mode)
            np.testing.assert_allclose(got, expected, 1e-5, 1e-6)


def test_an_image_without_elements_is_refused() -> None:
    with pytest.raises(ShapeError, match="has no elements to sample"):
        rlx.ops.roi_align(np.zeros((1, 1, 0, 2), np.float32), np.zeros((1, 4), np.float32), np.array([0]))
