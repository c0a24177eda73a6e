"""Winograd's transforms mix neighbours; still Inf and NaN reach those pixels only whose windows hold them."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

import rlx
from machines import executable, on_targets
from rlx.ir.graph import Graph
from rlx.ir.op import get_op
from rlx.ops import conv
from rlx.ops.storage.packing import from_blocks, to_blocks
from rlx.ops.storage.winograd import INPUT, OUTPUT, WHOLE_KERNEL, WHOLE_ROWS, WinogradLayout, transform_kernel
from rlx.target.cpu import Target, resolve

TARGETS = executable("x86-64-v4", "x86-64-v3", "x86-64")
SHAPE, OUT = (2, 16, 11, 13), 40  # tiles and panels that are not full
PLACES = [(0, 3, 5, 6), (0, 0, 0, 0), (1, 15, 10, 12), (1, 7, 3, 4), (0, 9, 8, 0)]


def block(image: np.ndarray, target: Target) -> np.ndarray:
    made: np.ndarray = to_blocks(image, target.lanes("f32"))
    return made


def winograd(m: int, target: Target, blocked: bool = True) -> tuple[Graph, np.ndarray]:
    """A convolution in Winograd's layout, whatever the cost model says, and its kernel."""
    lanes, channels = target.lanes("f32"), SHAPE[1]
    layout = WinogradLayout(m, OUT, channels, 2 * lanes, lanes)
    unpack = get_op("unpack_winograd")
    g = Graph("winograd")
    w = g.param("w", (OUT, channels, 3, 3), "f32")
    kernel = unpack(transform_kernel(w, layout), **{k: getattr(layout, k) for k in unpack.attrs})
    if blocked:
        x = g.input("x", (SHAPE[0], channels // lanes, *SHAPE[2:], lanes), "f32")
        y = conv(from_blocks(x, channels), kernel, padding=1)
        g.output("y", to_blocks(y, lanes))
    else:
        g.output("y", conv(g.input("x", SHAPE, "f32"), kernel, padding=1))
    weights = np.random.default_rng(1).standard_normal((OUT, channels, 3, 3)).astype(np.float32)
    weights[3, :, 1], weights[4, :, :, 1], weights[5, :, 0], weights[6] = 0, 0, 0, 0  # Inf * 0 is NaN
    g.set_param("w", weights)
    return g, weights


@on_targets(TARGETS)
@pytest.mark.parametrize("m", [2, 4])
def test_inf_and_nan_stay_in_their_windows(m: int, target: Target) -> None:
    g, weights = winograd(m, target)
    programs = [rlx.compile(g, target=target.name, threads=n) for n in (1, 2)]
    assert not programs[0].stats["host_thunks"]
    image = np.random.default_rng(2).standard_normal(SHAPE).astype(np.float32)
    for value in (np.inf, -np.inf, np.nan):
        x = image.copy()
        for place in PLACES:
            x[place] = value
        with np.errstate(invalid="ignore"):
            want = block(conv(x.astype(np.float64), weights.astype(np.float64), padding=1), target)
        x = block(x, target)
        got = programs[0](x)
        assert np.isnan(want).any() and np.isfinite(want).any()
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)  # Inf and NaN in the same places
        assert got.tobytes() == programs[1](x).tobytes()


def test_images_that_are_not_blocked_are_no_business_of_this_kernel() -> None:
    g, weights = winograd(4, resolve("host"), blocked=False)
    program = rlx.compile(g)
    assert "blocked channels on both sides" in program.stats["host_thunks"][0]["why"]
    x = np.random.default_rng(2).standard_normal(SHAPE).astype(np.float32)
    np.testing.assert_allclose(program(x), conv(x, weights, padding=1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("m", [2, 4])
def test_matrices_are_those_of_a_convolution(m: int) -> None:
    """A [(G w) * (B x)] is w slid over x."""
    rng = np.random.default_rng(3)
    w, x = rng.integers(-9, 10, 3), rng.integers(-9, 10, m + 2)
    points = [Fraction(int(np.dot(row, w)), d) for row, d in zip(WHOLE_KERNEL[m], WHOLE_ROWS[m], strict=True)]
    products = [p * int(t) for p, t in zip(points, np.array(INPUT[m]) @ x, strict=True)]
    made = [sum(a * p for a, p in zip(row, products, strict=True)) for row in OUTPUT[m]]
    assert made == np.correlate(x, w, "valid").tolist()


@pytest.mark.parametrize("lead", [(), (2,)], ids=["one", "batch"])
@pytest.mark.parametrize("m", [2, 4])
def test_kernels_are_rounded_once(m: int, lead: tuple[int, ...]) -> None:
    """Each transformed weight is the f32 that is nearest to its exact value, in every panel and part."""
    layout = {"m": m, "out": 21, "channels": 700, "columns": 16, "lanes": 4}
    w = np.random.default_rng(4).standard_normal((*lead, 21, 700, 3, 3)).astype(np.float32)
    packed = get_op("pack_winograd")(w, **layout)
    got = WinogradLayout(**layout).panels.layout.unpack(packed)
    side, place = m + 2, (-1,) * len(lead)
    for o, i in [(0, 0), (15, 699), (16, 511), (20, 512), (20, 699), (7, 300)]:
        window = [[Fraction(float(v)) for v in line] for line in w[(*place, o, i)]]
        for a, b in np.ndindex(side, side):
            rows, divisors = WHOLE_KERNEL[m], WHOLE_ROWS[m]
            whole = sum(rows[a][r] * rows[b][s] * window[r][s] for r in range(3) for s in range(3))
            exact = whole / (divisors[a] * divisors[b])
            made = got[(*place, a * side + b, i, o)]
            beside = [np.nextafter(made, np.float32(to)) for to in (-np.inf, np.inf)]
            miss = abs(Fraction(float(made)) - exact)
            assert all(miss <= abs(Fraction(float(other)) - exact) for other in beside)
    zeros = WinogradLayout(**layout).panels.layout
    np.testing.assert_array_equal(zeros.pack(got), packed)  # padding is zero
