"""Winograd over the last two of three axes: planes of the window are summed before transforms back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlx
from conv_harness import compiled, in_turn
from gemm_harness import F32_TARGETS, Guarded
from machines import executable, on_targets
from rlx.ir.graph import Graph
from rlx.ir.op import get_op
from rlx.ops import conv, relu
from rlx.ops.storage.packing import from_blocks, to_blocks
from rlx.ops.storage.winograd import WinogradLayout, transform_kernel
from rlx.target.cpu import Target

EPS = 2.0**-23
TARGETS = executable("x86-64-v4", "x86-64-v3", "x86-64")
WINDOWS = {  # planes of the window; stride, dilation and padding of the first axis
    "same": (3, 1, 1, (1, 1)),
    "strided": (3, 2, 1, (1, 0)),
    "dilated": (2, 1, 3, (2, 2)),
    "one": (1, 1, 1, (0, 0)),
    "far": (3, 1, 1, (4, 3)),  # some planes read nothing but padding
    "five": (5, 3, 1, (2, 1)),
}
CHANNELS = {"32to40": (32, 40), "16to75": (16, 75), "48to16": (48, 16)}
IMAGES = [(1, 4, 7, 7), (2, 5, 13, 9), (1, 3, 30, 17), (1, 9, 1, 3), (3, 2, 4, 5), (1, 1, 6, 6)]


def planes(
    m: int,
    window: tuple[int, int, int, Any],
    channels: tuple[int, int],
    target: Target,
    sides: Any = ((1, 1), (1, 1)),
) -> tuple[Graph, dict[str, Any]]:
    """relu of a convolution in this layout with bias and residual, whatever the cost model says, and its
    geometry."""
    (depth, out), lanes, (taps, stride, dilation, padding) = channels, target.lanes("f32"), window
    layout, unpack = WinogradLayout(m, out, depth, 2 * lanes, lanes, planes=taps), get_op("unpack_winograd")
    more = {
        "strides": (stride, 1, 1),
        "dilations": (dilation, 1, 1),
        "padding": (padding, *sides),
    }
    g = Graph("planes")
    x = g.input("x", ("n", depth // lanes, "d", "h", "w", lanes), "f32")
    kernel = unpack(
        transform_kernel(g.param("w", layout.kernel, "f32"), layout),
        **{k: getattr(layout, k) for k in unpack.attrs},
    )
    y = conv(from_blocks(x, depth), kernel, g.param("b", (out,), "f32"), **more)
    r = g.input("r", (y.shape[0], -(-out // lanes), *y.shape[2:], lanes), "f32")
    g.output("y", to_blocks(relu(y + from_blocks(r, out)), lanes))
    return g, more


@pytest.mark.parametrize(
    ("m", "window", "channels", "target"),
    in_turn({"2": 2, "4": 4}, WINDOWS, CHANNELS, {target.name: target for target in F32_TARGETS}),
)
def test_it_is_the_convolution(m: int, window: Any, channels: tuple[int, int], target: Target) -> None:
    """Run-time sizes, several images, any number of threads: the same bits, within the tolerance."""
    (depth, out), lanes, rng = channels, target.lanes("f32"), np.random.default_rng(0)
    g, more = planes(m, window, channels, target, sides=((1, 1), (0, 2)))
    weights = rng.standard_normal((out, depth, window[0], 3, 3)).astype(np.float32)
    bias = rng.standard_normal(out).astype(np.float32)
    g.set_param("w", weights)
    g.set_param("b", bias)
    programs = [compiled(g, target, threads) for threads in (1, 3)]
    for n, *spatial in IMAGES:
        reach = (window[0] - 1) * window[2] + 1
        if spatial[0] + sum(window[3]) < reach:
            continue
        image = rng.standard_normal((n, depth, *spatial)).astype(np.float32)
        exact = conv(*(a.astype(np.float64) for a in (image, weights, bias)), **more)
        size = conv(*(np.abs(a).astype(np.float64) for a in (image, weights, bias)), **more)
        residual = rng.standard_normal(exact.shape).astype(np.float32)
        guarded = Guarded()
        feed = {
            "x": guarded.copy(to_blocks(image, lanes), True),
            "r": guarded.copy(to_blocks(residual, lanes), True),
        }
        want = to_blocks(np.maximum(exact + residual, 0), lanes)
        tolerance = to_blocks(2 * 9 * window[0] * depth * EPS * (size + np.abs(residual)), lanes)
        outs = [guarded.copy(np.zeros(want.shape, np.float32), True) for _ in programs]
        for program, result in zip(programs, outs, strict=True):
            program.bind(feed, {"y": result})()
        assert np.all(np.abs(outs[0] - want) <= tolerance)
        np.testing.assert_array_equal(*outs)


@on_targets(TARGETS)
@pytest.mark.parametrize("m", [2, 4])
def test_inf_and_nan_stay_in_their_windows(m: int, target: Target) -> None:
    lanes, depth, out = target.lanes("f32"), 16, 40
    g, more = planes(m, WINDOWS["same"], (depth, out), target)
    rng = np.random.default_rng(1)
    weights = rng.standard_normal((out, depth, 3, 3, 3)).astype(np.float32) / 8
    weights[3, :, 1], weights[4, :, :, 1], weights[5, :, 0], weights[6] = 0, 0, 0, 0  # Inf * 0 is NaN
    g.set_param("w", weights)
    g.set_param("b", np.zeros(out, np.float32))
    programs = [compiled(g, target, threads) for threads in (1, 2)]
    image = rng.standard_normal((2, depth, 5, 11, 13)).astype(np.float32)
    places = [(0, 3, 2, 5, 6), (0, 0, 0, 0, 0), (1, 15, 4, 10, 12), (1, 7, 1, 3, 4)]
    for value in (np.inf, -np.inf, np.nan):
        x = image.copy()
        for place in places:
            x[place] = value
        with np.errstate(invalid="ignore"):
            want = conv(x.astype(np.float64), weights.astype(np.float64), **more)
            residual = np.zeros(want.shape, np.float32)
            want = np.maximum(want, 0)
        runs = [p.run({"x": to_blocks(x, lanes), "r": to_blocks(residual, lanes)})["y"] for p in programs]
        assert np.isnan(want).any() and np.isfinite(want).any()
        np.testing.assert_allclose(runs[0], to_blocks(want, lanes), rtol=1e-4, atol=1e-4)
        assert runs[0].tobytes() == runs[1].tobytes()


@on_targets(TARGETS)
@pytest.mark.parametrize("m", [2, 4])
def test_a_weight_that_is_not_finite_shows_in_padding_too(m: int, target: Target) -> None:
    """0 times Inf is NaN: planes that are left out must not hide it."""
    lanes, depth, out = target.lanes("f32"), 16, 40
    g, more = planes(m, WINDOWS["far"], (depth, out), target)
    rng = np.random.default_rng(2)
    weights = rng.standard_normal((out, depth, 3, 3, 3)).astype(np.float32) / 8
    finite = [o for o in range(out) if o not in (3, 21, 39)]
    weights[3, 0, 0, 1, 1], weights[21, 15, 2, 0, 2], weights[39, 7, 1, 2, 0] = np.nan, np.inf, -np.inf
    g.set_param("w", weights)
    g.set_param("b", np.zeros(out, np.float32))
    x = rng.standard_normal((1, depth, 4, 9, 6)).astype(np.float32)
    with np.errstate(invalid="ignore"):
        want = conv(x.astype(np.float64), weights.astype(np.float64), **more)
    residual = to_blocks(np.zeros(want.shape, np.float32), lanes)
    got = from_blocks(compiled(g, target).run({"x": to_blocks(x, lanes), "r": residual})["y"], out)
    np.testing.assert_allclose(got[:, finite], np.maximum(want[:, finite], 0), rtol=1e-4, atol=1e-4)
    assert np.all(np.isnan(got[np.isnan(want)])), "a NaN of the reference is missing"


@pytest.mark.parametrize("m", [2, 4])
def test_planes_are_packed_as_further_channels(m: int) -> None:
    deep = WinogradLayout(m, out=21, channels=8, columns=16, lanes=4, planes=3)
    flat = WinogradLayout(m, out=21, channels=24, columns=16, lanes=4)
    w = np.random.default_rng(4).standard_normal((2, 21, 8, 3, 3, 3)).astype(np.float32)
    as_channels = np.ascontiguousarray(np.moveaxis(w, -3, 2)).reshape(2, 21, 24, 3, 3)
    pack, unpack = get_op("pack_winograd"), get_op("unpack_winograd")
    attrs = [{k: getattr(v, k) for k in pack.attrs} for v in (deep, flat)]
    packed = pack(w, **attrs[0])
    np.testing.assert_array_equal(packed, pack(as_channels, **attrs[1]))
    np.testing.assert_allclose(unpack(packed, **attrs[0]), w, rtol=1e-5, atol=1e-6)


def video(channels: int, size: tuple[int, int, int], **more: Any) -> Graph:
    """Two convolutions of 3x3x3 from planes to planes."""
    g, rng = rlx.Graph("video"), np.random.default_rng(5)
    x = g.input("x", (1, channels, *size), "f32")
    for _ in range(2):
        w = rng.standard_normal((channels, channels, 3, 3, 3)).astype(np.float32) / channels
        x = relu(conv(x, g.constant(w), padding=1, **more))
    g.output("y", x)
    return g


def transforms(program: Any) -> int:
    """Kernels that read transformed weights."""
    bodies = [body for region in program.lir.mir.nodes for body in region.bodies]
    return sum(any(n.op.name == "unpack_winograd" for n in body.nodes) for body in bodies)


@on_targets(TARGETS)
def test_networks_use_it_where_it_pays(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    g = video(64, (4, 28, 28))
    program = compiled(g, target)
    told = [d for d in program.lir.trace.decisions if d.rule == "winograd"]
    assert transforms(program) == 2 and [d.verdict for d in told] == [True, True]
    assert all(d.net_ps > 0 and "fewer products" in d.reason for d in told)
    assert "winograd (2)" in program.explain()
    x = np.random.default_rng(6).standard_normal((1, 64, 4, 28, 28)).astype(np.float32)
    monkeypatch.setenv("RLX_WINOGRAD", "0")
    direct = compiled(g, target)
    assert transforms(direct) == 0 and not [d for d in direct.lir.trace.decisions if d.rule == "winograd"]
    want = direct(x)
    np.testing.assert_allclose(program(x), want, rtol=1e-4, atol=1e-5 * float(np.abs(want).max()))


def test_small_images_are_summed_directly_and_say_so() -> None:
    program = compiled(video(64, (2, 2, 2)))
    told = [d for d in program.lir.trace.decisions if d.rule == "winograd"]
    assert not transforms(program) and [d.verdict for d in told] == [False, False]
    assert all(d.net_ps <= 0 for d in told)


@pytest.mark.parametrize(
    "more", [{"strides": (1, 2, 1)}, {"dilations": (1, 1, 2)}], ids=["stride", "dilation"]
)
def test_other_windows_are_not_considered(more: dict[str, Any]) -> None:
    program = compiled(video(64, (4, 40, 40), **more))
    assert not transforms(program) and not [d for d in program.lir.trace.decisions if d.rule == "winograd"]
