"""Images in blocked channels: squeeze and excite, channels that do not fill their last block, epilogues."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.api.compile import plan
from rlx.ir.graph import Graph, Node
from rlx.reference.interpreter import evaluate


def weight(g: Graph, name: str, *shape: int) -> Node:
    made = g.param(name, shape, "f32")
    g.set_param(name, np.random.default_rng(len(name)).uniform(-0.5, 0.5, shape).astype(np.float32))
    return made


def hard_swish(x: Node) -> Node:
    made: Node = x * ops.clip(x + 3.0, 0.0, 6.0) / 6.0
    return made


def excited(channels: int, batch: Any = "n") -> Graph:
    """A block of MobileNetV3: expand, depthwise, squeeze, excite, project."""
    g = Graph("excited")
    x = g.input("x", (batch, 16, "h", 10), "f32")
    wide = hard_swish(ops.conv(x, weight(g, "expand", channels, 16, 1, 1)))
    deep = ops.conv(wide, weight(g, "depth", channels, 1, 3, 3), padding=((1, 1), (1, 1)), groups=channels)
    deep = hard_swish(deep + weight(g, "bias of depth", channels, 1, 1))
    mean = ops.mean(deep, axis=(2, 3), keepdims=True)
    scale = ops.clip(ops.conv(mean, weight(g, "excite", channels, channels, 1, 1)) + 0.5, 0.0, 1.0)
    g.output("y", ops.conv(deep * scale, weight(g, "project", 24, channels, 1, 1)))
    return g


def run(g: Graph, *feeds: dict[str, np.ndarray]) -> None:
    one, two, spoilt = rlx.compile(g, threads=1), rlx.compile(g, threads=2), rlx.compile(g, debug="poison")
    for feed in feeds:
        got, want = one.run(feed), evaluate(g, feed)
        for name, value in want.items():
            largest = float(np.abs(value).max())  # sums of Winograd's transforms are as exact as this allows
            np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-5 * largest)
            assert got[name].tobytes() == two.run(feed)[name].tobytes() == spoilt.run(feed)[name].tobytes()


def image(*shape: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(0).uniform(-2, 2, shape).astype(np.float32)}


@pytest.mark.parametrize("channels", [32, 40, 88])
def test_squeeze_and_excite(channels: int) -> None:
    run(excited(channels), image(1, 16, 6, 10), image(3, 16, 1, 10))


@pytest.mark.parametrize("channels", [32, 40])
def test_it_stays_in_blocks(channels: int) -> None:
    """What is read by the pool and by the excited product is stored once, in blocks, by the convolution."""
    lir = plan(excited(channels), target="x86-64-v4")
    blocks = [n for n in lir.mir.nodes if n.op.role.name == "REGION" and n.rank == 5 and n.shape[-1] == 16]
    assert len(blocks) >= 3 and all(n.shape[1] == -(-channels // 16) for n in blocks)
    planar = [
        n for n in lir.mir.nodes if n.op.role.name == "REGION" and n.rank == 4 and n.shape[1] == channels
    ]
    assert all(n.shape[2:] == (1, 1) for n in planar), "no image is moved to planes"


def test_lanes_that_nobody_reads_stay_finite() -> None:
    """0 / 0 in the lanes after the last channel would spoil the next convolution: not done in blocks."""
    g = Graph("quotient")
    x = g.input("x", (1, 16, 6, 6), "f32")
    a = ops.conv(x, weight(g, "a", 40, 16, 1, 1))
    b = ops.conv(x, weight(g, "bb", 40, 16, 1, 1))
    ratio = ops.abs(a) / (ops.abs(b))
    g.output("y", ops.conv(ratio, weight(g, "out", 32, 40, 1, 1)))
    g.output(
        "z",
        ops.conv(ops.log(ops.abs(a)) + ops.sum(a, axis=(2, 3), keepdims=True), weight(g, "o", 32, 40, 1, 1)),
    )
    feed = image(1, 16, 6, 6)
    got = rlx.compile(g).run(feed)
    for name, value in evaluate(g, feed).items():
        assert np.isfinite(value).all()
        np.testing.assert_allclose(got[name], value, rtol=1e-3, atol=1e-3)


def test_nearest_neighbours_stay_in_blocks() -> None:
    """An image that is repeated to twice its size and added to another, as in a feature pyramid."""
    g = Graph("pyramid")
    x = g.input("x", (1, 16, "h", "w"), "f32")
    fine = ops.conv(x, weight(g, "fine", 32, 16, 3, 3), padding=((1, 1), (1, 1)))
    coarse = ops.conv(x, weight(g, "coarse", 32, 16, 2, 2), strides=(2, 2))
    h, w = coarse.shape[2:]
    tall = ops.broadcast_to(ops.reshape(coarse, (1, 32, h, 1, w)), (1, 32, h, 2, w))
    wide = ops.broadcast_to(ops.reshape(tall, (1, 32, 2 * h, w, 1)), (1, 32, 2 * h, w, 2))
    near = ops.reshape(wide, (1, 32, 2 * h, 2 * w))
    g.output("y", ops.conv(fine + near, weight(g, "last", 24, 32, 3, 3), padding=((1, 1), (1, 1))))
    lir = plan(g, target="x86-64-v4")
    images = [n for n in lir.mir.nodes if n.op.role.name == "REGION" and n.rank == 4 and n.shape[1] == 32]
    assert not images, "no image is moved to planes"
    run(g, image(1, 16, 8, 12), image(1, 16, 2, 4))


def test_pooled_lanes_that_nobody_reads_stay_finite() -> None:
    """Lanes behind the last channel hold -1 here: their root, after pooling, must not reach a convolution."""
    g = Graph("pooled")
    x = g.input("x", (1, 16, 6, 6), "f32")
    a = ops.abs(ops.conv(x, weight(g, "a", 40, 16, 1, 1)))
    shared = a + ops.sum(a, axis=(2, 3), keepdims=True) - 1.0
    pooled = ops.max_pool(ops.maximum(shared, -1.0), (2, 2))
    g.output("y", ops.conv(ops.sqrt(pooled), weight(g, "out", 32, 40, 1, 1)))
    feed = {"x": image(1, 16, 6, 6)["x"] + np.float32(4)}
    want, got = evaluate(g, feed)["y"], rlx.compile(g).run(feed)["y"]
    assert np.isfinite(want).all()
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


def test_a_gather_reads_planes_not_blocks() -> None:
    """A resize to a size that is computed reads rows by index, and is no part of a convolution's kernel."""
    g = Graph("gathered")
    x = g.input("x", (1, 16, "h", 10), "f32")
    y = ops.relu(ops.conv(x, weight(g, "a", 32, 16, 3, 3)))
    rows = ops.gather(y, g.input("at", ("k",), "i64"), 2)
    g.output("y", ops.conv(rows, weight(g, "b", 16, 32, 1, 1)) + 1.0)
    g.output("z", ops.conv(y, weight(g, "cc", 16, 32, 1, 1)))
    image = np.random.default_rng(1).normal(size=(1, 16, 9, 10)).astype(np.float32)
    run(g, {"x": image, "at": np.array([0, 0, 3, 6, 1])})
