"""Convolution kernels against the definition in f64: geometries, layouts, epilogues, targets, threads, guard
pages.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx
from conv_harness import Case, compiled, in_turn
from gemm_harness import F32_TARGETS, Guarded, assert_f32_targets_stand_for_all, code_of
from rlx.fuzz.bounds import assert_by_table
from rlx.ir.graph import Graph, Node
from rlx.ir.op import get_op
from rlx.ops import avg_pool, concat, conv, conv_transpose, max_pool, mean, relu, sigmoid
from rlx.ops.storage.packing import from_blocks, to_blocks
from rlx.ops.storage.winograd import WinogradLayout, transform_kernel
from rlx.reference.interpreter import evaluate
from rlx.target.cpu import Target

EPS = 2.0**-23
SYMBOLIC = {"static": False, "symbolic": True}
BY_TARGET = {target.name: target for target in F32_TARGETS}

CASES = [
    Case((1, 3, 8, 8), (4, 3, 3, 3), {"padding": 1}),
    Case((2, 16, 14, 14), (32, 16, 3, 3), {"padding": 1}),
    Case((1, 17, 9, 23), (37, 17, 3, 3), {"padding": ((0, 2), (1, 0)), "strides": (2, 1)}),
    Case((1, 8, 20, 20), (48, 4, 3, 3), {"padding": 2, "dilations": 2, "groups": 2}),
    Case((2, 5, 33), (24, 5, 5), {"padding": 2, "strides": 2}),
    Case(
        (1, 5, 6, 7, 8),
        (16, 5, 3, 2, 3),
        {"padding": ((1, 1), (0, 1), (1, 1)), "strides": (1, 2, 1), "dilations": (2, 1, 1)},
    ),
    Case((1, 3, 40, 37), (64, 3, 7, 7), {"padding": 3, "strides": 2}),
    Case((1, 16, 7, 7), (16, 16, 1, 1), {"strides": 2}),
    Case((2, 16, 7, 7), (40, 16, 1, 1)),
    Case((1, 12, 9, 9), (12, 1, 3, 3), {"groups": 12, "padding": 1}),
    Case((1, 33, 9, 11), (33, 1, 3, 3), {"groups": 33, "padding": 1, "strides": 2}),
    Case((2, 6, 9, 9), (12, 2, 3, 3), {"groups": 3, "padding": 1}),
    Case((1, 2, 5, 5), (16, 2, 3, 3), {"padding": ((-1, 0), (0, -1))}),
    Case((0, 2, 5, 5), (16, 2, 3, 3), {"padding": 1}),
    Case((1, 2, 3, 3), (16, 2, 5, 5), {"padding": 4}),
    Case((1, 1, 1, 1), (1, 1, 1, 1)),
    Case((1, 9, 70), (6, 3, 4), {"groups": 3, "padding": 2, "strides": 3}),
    Case((1, 300, 1, 500), (40, 300, 1, 3), {"padding": ((0, 0), (1, 1)), "strides": (1, 2)}),
]


@dataclass
class Problem:
    """A graph relu(conv + bias + residual) with its inputs, result in f64, and the tolerance of every
    element.
    """

    graph: Graph
    feed: dict[str, np.ndarray]
    want: np.ndarray
    tolerance: np.ndarray


def problem(case: Case, seed: int = 0) -> Problem:
    rng = np.random.default_rng(seed)
    draw = lambda shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    x, w, b = draw(case.x), draw(case.w), draw(case.w[0])
    exact = conv(*(a.astype(np.float64) for a in (x, w, b)), **case.more)
    size = conv(*(np.abs(a).astype(np.float64) for a in (x, w, b)), **case.more)
    residual = draw(exact.shape)
    g = rlx.Graph("case")
    y = conv(
        g.input("x", case.shape, "f32"),
        g.param("w", w.shape, "f32"),
        g.param("b", b.shape, "f32"),
        **case.more,
    )
    g.output("y", relu(y + g.input("r", y.shape, "f32")))
    g.set_param("w", w)
    g.set_param("b", b)
    depth = int(np.prod(case.w[1:]))
    tolerance = 2 * depth * EPS * (size + np.abs(residual))
    return Problem(g, {"x": x, "r": residual}, np.maximum(exact + residual, 0), tolerance)


@pytest.mark.parametrize(
    ("case", "symbolic", "target"), in_turn({str(case): case for case in CASES}, SYMBOLIC, BY_TARGET)
)
def test_convolution_is_its_definition(case: Case, symbolic: bool, target: Target) -> None:
    """Between pages that cannot be read, at the end of one and at the begin of the other."""
    p, guarded, outs = problem(replace(case, symbolic=symbolic)), Guarded(), []
    for threads, at_end in ((1, True), (3, False)):
        inputs = {name: guarded.copy(a, at_end) for name, a in p.feed.items()}
        outs.append(guarded.copy(np.zeros(p.want.shape, np.float32), at_end))
        compiled(p.graph, target, threads).bind(inputs, {"y": outs[-1]})()
    assert np.all(np.abs(outs[0] - p.want) <= p.tolerance)
    np.testing.assert_array_equal(*outs)


@pytest.mark.parametrize("dtype", ["f64", "f16", "bf16", "i32"])
def test_other_dtypes(dtype: str) -> None:
    g = rlx.Graph("other")
    y = conv(g.input("x", (1, 4, 6, 7), dtype), g.input("w", (6, 2, 3, 2), dtype), padding=1, groups=2)
    g.output("y", y)
    rng = np.random.default_rng(0)
    feed = {n.attrs["name"]: rng.integers(-4, 5, n.shape).astype(n.dtype.np) for n in g.inputs}
    got, want = compiled(g).run(feed)["y"], evaluate(g, feed)["y"]
    np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64))  # small integers are exact


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_geometry(data: st.DataObject) -> None:
    rank = data.draw(st.integers(1, 3))
    each = lambda low, high: tuple(data.draw(st.integers(low, high)) for _ in range(rank))  # noqa: E731
    groups = data.draw(st.sampled_from([1, 1, 2, 3]))
    window, strides, dilations = each(1, 4), each(1, 3), each(1, 2)
    padding = tuple((data.draw(st.integers(-1, 3)), data.draw(st.integers(-1, 3))) for _ in range(rank))
    reach = [(k - 1) * d + 1 for k, d in zip(window, dilations, strict=True)]
    spatial = tuple(
        max(data.draw(st.integers(1, 20 if rank < 3 else 7)), r - lo - hi, 1)
        for r, (lo, hi) in zip(reach, padding, strict=True)
    )
    per_in, per_out = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 40))
    images = data.draw(st.integers(1, 2))
    more = {"strides": strides, "padding": padding, "dilations": dilations, "groups": groups}
    case = Case(
        (images, per_in * groups, *spatial),
        (per_out * groups, per_in, *window),
        more,
        symbolic=data.draw(st.booleans()),
    )
    p = problem(case)
    got = compiled(p.graph, threads=2).run(p.feed)["y"]
    assert np.all(np.abs(got - p.want) <= p.tolerance)


# ---- chains of images in blocked channels


class Net:
    """A network under construction: parameters are drawn as they are asked for."""

    def __init__(self, seed: int = 0) -> None:
        self.graph, self.rng, self.count = rlx.Graph("net"), np.random.default_rng(seed), 0

    def param(self, *shape: int) -> Node:
        name, self.count = f"p{self.count}", self.count + 1
        made = self.graph.param(name, shape, "f32")
        scale = 1 / np.sqrt(np.prod(shape[1:])) if len(shape) > 1 else 0.1
        self.graph.set_param(name, (self.rng.standard_normal(shape) * scale).astype(np.float32))
        return made

    def conv(self, x: Node, channels: int, size: int = 3, **more: Any) -> Node:
        groups = more.get("groups", 1)
        w = self.param(channels, int(x.shape[1]) // groups, *(size,) * (x.rank - 2))
        made: Node = conv(x, w, self.param(channels), **{"padding": size // 2, **more})
        return made


def bottleneck(net: Net, x: Node) -> Node:
    y = relu(net.conv(x, 32, 1))
    y = relu(net.conv(y, 32, strides=2))
    made: Node = relu(net.conv(y, 64, 1) + net.conv(x, 64, 1, strides=2))
    return made


def swish(net: Net, x: Node) -> Node:
    y = net.conv(x, 48)
    y = y * sigmoid(y)
    made: Node = net.conv(y, 16, 1)
    return made


def odd_channels(net: Net, x: Node) -> Node:
    y = relu(net.conv(x, 37))
    y = relu(net.conv(y, 23) * 0.5)
    made: Node = net.conv(y, 41, 1)
    return made


def pools(net: Net, x: Node) -> Node:
    y = max_pool(relu(net.conv(x, 32)), (3, 3), strides=2, padding=1)
    y = avg_pool(net.conv(y, 48), (2, 2), strides=1)
    made: Node = mean(relu(net.conv(y, 32)), axis=(2, 3))
    return made


def joined(net: Net, x: Node) -> Node:
    y = relu(net.conv(x, 32))
    z = concat([relu(net.conv(y, 16)), relu(net.conv(y, 32, 1)), y], axis=1)
    y = net.conv(relu(z * net.param(80, 1, 1)), 32, 1)
    made: Node = y * mean(y, axis=(2, 3), keepdims=True)
    return made


def grouped(net: Net, x: Node) -> Node:
    y = relu(net.conv(x, 64))
    y = relu(net.conv(y, 64, groups=2))
    y = relu(net.conv(y, 64, groups=64))
    made: Node = net.conv(relu(net.conv(y, 64, groups=16)), 24, 1)
    return made


def mobile(net: Net, x: Node) -> Node:
    y = relu(net.conv(x, 37, 1))
    y = relu(net.conv(y, 37, groups=37, strides=2))
    y = net.conv(y, 32, 1)
    y = net.conv(relu(net.conv(y, 32, 5, groups=32, dilations=2, padding=((4, 0), (3, 4)))), 48, 1)
    made: Node = net.conv(y, 48, 7, groups=48, padding=5) * 2.0
    return made


def signal(net: Net, x: Node) -> Node:
    line = x.reshape(x.shape[0], 16, -1) if isinstance(x.shape[0], int) else mean(x, axis=2)
    y = relu(net.conv(line, 32, 3))
    y = relu(net.conv(y, 32, 5, groups=32))
    made: Node = net.conv(y, 20, 3, strides=2)
    return made


def turned(net: Net, x: Node) -> Node:
    y = relu(net.conv(x, 32))
    y = conv_transpose(y, net.param(32, 16, 3, 3), strides=2, padding=1)
    made: Node = net.conv(y, 16) + y
    return made


def both_read(net: Net, x: Node) -> Node:
    y = net.conv(x, 32)
    net.graph.output("y", y)
    made: Node = (
        net.conv(relu(y), 32).reshape(int(x.shape[0]), -1) if isinstance(x.shape[0], int) else net.conv(y, 32)
    )
    return made


NETS = [bottleneck, swish, odd_channels, pools, joined, grouped, mobile, signal, turned, both_read]


def chain(build: Any, symbolic: bool) -> Net:
    net = Net()
    x = net.graph.input("x", ("n", 16, "h", "w") if symbolic else (2, 16, 13, 18), "f32")
    net.graph.output("z", build(net, x))
    return net


@pytest.mark.parametrize(
    ("build", "symbolic", "target"), in_turn({net.__name__: net for net in NETS}, SYMBOLIC, BY_TARGET)
)
def test_chains_of_convolutions(build: Any, symbolic: bool, target: Target) -> None:
    net = chain(build, symbolic)
    feed = {"x": np.random.default_rng(1).standard_normal((2, 16, 13, 18)).astype(np.float32)}
    want = evaluate(net.graph, feed)
    runs = [compiled(net.graph, target, threads).run(feed) for threads in (1, 2, 3)]
    for name, value in want.items():
        np.testing.assert_allclose(runs[0][name], value, rtol=1e-4, atol=2e-5)
        for other in runs[1:]:
            np.testing.assert_array_equal(runs[0][name], other[name])


@pytest.mark.parametrize("build", NETS, ids=lambda f: f.__name__)
def test_code_of_f32_needs_no_instructions_for_narrow_types(build: Any) -> None:
    graph = chain(build, symbolic=True).graph
    assert_f32_targets_stand_for_all(functools.partial(code_of, graph))


# ---- Winograd

WINOGRAD_PADDING = {"same": ((1, 1), (1, 1)), "odd": ((0, 2), (1, 0)), "wide": ((0, 0), (2, 2))}
WINOGRAD_CHANNELS = [(16, 80), (32, 24), (48, 32), (16, 75)]  # full blocks and lanes, and parts of both
WINOGRAD_IMAGES = [(1, 8, 8), (2, 7, 9), (1, 1, 1), (3, 13, 30), (1, 57, 5), (1, 10, 9), (2, 5, 6)]


@pytest.mark.parametrize(
    ("m", "padding", "channels", "target"),
    in_turn(
        {"2": 2, "4": 4},
        WINOGRAD_PADDING,
        {f"{depth}to{out}": (depth, out) for depth, out in WINOGRAD_CHANNELS},
        BY_TARGET,
    ),
)
def test_winograd_is_the_convolution(m: int, padding: Any, channels: tuple[int, int], target: Target) -> None:
    """Kernels in Winograd's layout, whatever the cost model says; run-time sizes, relu, residual."""
    (depth, out), lanes, rng = channels, target.lanes("f32"), np.random.default_rng(0)
    unpack = get_op("unpack_winograd")
    layout = WinogradLayout(m, out, depth, 2 * lanes, lanes)
    g = rlx.Graph("winograd")
    x = g.input("x", ("n", depth // lanes, "h", "w", lanes), "f32")
    w = g.param("w", (out, depth, 3, 3), "f32")
    attrs = {k: getattr(layout, k) for k in unpack.attrs}
    kernel = unpack(transform_kernel(w, layout), **attrs)
    y = conv(from_blocks(x, depth), kernel, g.param("b", (out,), "f32"), padding=padding)
    r = g.input("r", (y.shape[0], -(-out // lanes), *y.shape[2:], lanes), "f32")
    g.output("y", to_blocks(relu(y + from_blocks(r, out)), lanes))
    weights, bias = (rng.standard_normal(s).astype(np.float32) for s in ((out, depth, 3, 3), (out,)))
    g.set_param("w", weights)
    g.set_param("b", bias)
    programs = [compiled(g, target, threads) for threads in (1, 3)]
    for n, *spatial in WINOGRAD_IMAGES:
        if any(d + sum(p) < 3 for d, p in zip(spatial, padding, strict=True)):
            continue
        image = rng.standard_normal((n, depth, *spatial)).astype(np.float32)
        exact = conv(*(a.astype(np.float64) for a in (image, weights, bias)), padding=padding)
        size = conv(*(np.abs(a).astype(np.float64) for a in (image, weights, bias)), padding=padding)
        residual = rng.standard_normal(exact.shape).astype(np.float32)
        guarded = Guarded()
        feed = {
            "x": guarded.copy(to_blocks(image, lanes), True),
            "r": guarded.copy(to_blocks(residual, lanes), True),
        }
        want = to_blocks(np.maximum(exact + residual, 0), lanes)
        tolerance = to_blocks(2 * 9 * depth * EPS * (size + np.abs(residual)), lanes)
        outs = [guarded.copy(np.zeros(want.shape, np.float32), True) for _ in programs]
        for program, result in zip(programs, outs, strict=True):
            program.bind(feed, {"y": result})()
        assert np.all(np.abs(outs[0] - want) <= tolerance)
        np.testing.assert_array_equal(*outs)


def test_one_object_serves_every_size() -> None:
    net = Net()
    net.graph.output("z", bottleneck(net, net.graph.input("x", ("n", 16, "h", "w"), "f32")))
    program = compiled(net.graph, threads=2)
    for n, h, w in [(1, 1, 1), (1, 2, 29), (3, 17, 5), (1, 56, 56), (2, 3, 64)]:
        feed = {"x": np.random.default_rng(1).standard_normal((n, 16, h, w)).astype(np.float32)}
        want = evaluate(net.graph, feed)["z"]
        np.testing.assert_allclose(program.run(feed)["z"], want, rtol=1e-4, atol=2e-5)


def test_winograd_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    net.graph.output("z", net.conv(net.graph.input("x", (1, 32, 28, 28), "f32"), 32))
    names = []
    for value in ("1", "0"):
        monkeypatch.setenv("RLX_WINOGRAD", value)
        regions = compiled(net.graph).lir.mir.nodes
        names.append({n.op.name for region in regions for body in region.bodies for n in body.nodes})
    assert "unpack_winograd" in names[0] and "unpack_winograd" not in names[1]


@pytest.mark.parametrize("target", F32_TARGETS, ids=lambda t: t.name)
@pytest.mark.parametrize("size, padding", [(1, 1), (3, 1), (3, 2), (5, 2)])
def test_padding_meets_weights_that_are_not_finite(size: int, padding: int, target: Target) -> None:
    """0 times NaN or infinity is NaN: at the edges of blocked images as anywhere."""
    rng = np.random.default_rng(size)
    weights = rng.standard_normal((16, 1, size, size)).astype(np.float32)
    weights[3, 0, 0, 0], weights[5, 0, -1, -1] = np.nan, np.inf
    g = Graph("depthwise")
    first = g.param("first", (16, 16, 1, 1), "f32", rng.standard_normal((16, 16, 1, 1)).astype(np.float32))
    blocked = conv(g.input("x", (1, 16, 6, 6), "f32"), first)
    g.output("y", conv(blocked, g.param("w", weights.shape, "f32", weights), padding=padding, groups=16))
    feed = {"x": rng.standard_normal((1, 16, 6, 6)).astype(np.float32)}
    want = evaluate(g, feed)
    got = rlx.compile(g, target=target.name, cache=False).run(feed)
    np.testing.assert_array_equal(np.isnan(got["y"]), np.isnan(want["y"]))
    assert_by_table(g, feed, got, want)


@pytest.mark.parametrize("target", F32_TARGETS, ids=lambda t: t.name)
@pytest.mark.parametrize("channels", [16, 21])
@pytest.mark.parametrize("strides", [1, 2])
def test_padding_that_is_left_out_meets_weights_that_are_not_finite(
    channels: int, strides: int, target: Target
) -> None:
    """Planes and lines of padding are not multiplied. Only their NaNs show, and change no other channel."""
    rng = np.random.default_rng(channels)
    finite = rng.choice([-1e-30, 1e-30, -0.0, 0.0], size=(40, channels, 3, 3, 2)).astype(np.float32)
    wild = finite.copy()
    wild[3, 0, 0, 1, 0], wild[5, -1, -1, 2, -1], wild[39, 2, 1, 0, 1] = np.nan, np.inf, -np.inf
    feed = {"x": rng.choice([-1e-30, 1e-30, -0.0, 0.0], size=(1, channels, 4, 5, 6)).astype(np.float32)}
    results = []
    for weights in (finite, wild):
        g = Graph("planes")
        w = g.param("w", weights.shape, "f32", weights)
        y = conv(g.input("x", feed["x"].shape, "f32"), w, padding=((1, 2), (1, 1), (0, 1)), strides=strides)
        g.output("y", y)
        got, want = compiled(g, target, 2, cache=False).run(feed)["y"], evaluate(g, feed)["y"]
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
        results.append(np.delete(got, [3, 5, 39], axis=1).view(np.int32))
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("target", F32_TARGETS, ids=lambda t: t.name)
def test_a_weight_that_is_not_finite_leaves_other_channels_alone(target: Target) -> None:
    """Sums of products that underflow are -0 here and there, whatever the weights of their neighbours are."""
    rng = np.random.default_rng(0)
    one = np.eye(16, dtype=np.float32).reshape(16, 16, 1, 1)
    finite = rng.choice([-1e-30, 1e-30, -0.0, 0.0], size=(16, 1, 5, 5)).astype(np.float32)
    spoilt = finite.copy()
    spoilt[3, 0, 0, 0], spoilt[5, 0, -1, -1] = np.nan, -np.inf
    feed = {"x": rng.choice([-1e-30, 1e-30, -0.0, 0.0], size=(1, 16, 6, 6)).astype(np.float32)}
    results = []
    for weights in (finite, spoilt):
        g = Graph("depthwise")
        blocked = conv(g.input("x", (1, 16, 6, 6), "f32"), g.param("first", one.shape, "f32", one))
        g.output("y", conv(blocked, g.param("w", weights.shape, "f32", weights), padding=2, groups=16))
        got, want = rlx.compile(g, target=target.name, cache=False).run(feed)["y"], evaluate(g, feed)["y"]
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
        results.append(np.delete(got, [3, 5], axis=1).view(np.int32))
    np.testing.assert_array_equal(*results)
    assert (results[0] < 0).any() == target.has_fma  # else a product of -0 is added to 0


@pytest.mark.parametrize("target", F32_TARGETS, ids=lambda t: t.name)
@pytest.mark.parametrize(("size", "stride", "dilation"), [(3, 1, 1), (5, 1, 1), (5, 2, 1), (3, 1, 2)])
def test_depthwise_edges(size: int, stride: int, dilation: int, target: Target) -> None:
    """Images with few lines, all of them at an edge, and so wide that edges are summed in strips."""
    rng = np.random.default_rng(size)
    weights = rng.standard_normal((16, 1, size, size)).astype(np.float32)
    first = rng.standard_normal((16, 16, 1, 1)).astype(np.float32)
    g = Graph("edges")
    blocked = conv(g.input("x", (1, 16, "h", "w"), "f32"), g.param("first", first.shape, "f32", first))
    kernel = g.param("w", weights.shape, "f32", weights)
    pad = dilation * (size // 2)
    g.output("y", conv(blocked, kernel, strides=stride, padding=pad, dilations=dilation, groups=16))
    program = rlx.compile(g, target=target.name, cache=False)
    for h, w in ((1, 40), (2, 29), (3, 7), (9, 23)):
        feed = {"x": rng.standard_normal((1, 16, h, w)).astype(np.float32)}
        assert_by_table(g, feed, program.run(feed), evaluate(g, feed))
