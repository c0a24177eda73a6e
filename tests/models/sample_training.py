"""A small convolutional network and its gradients, as one training step computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import rlx
from rlx import ops
from rlx.ir.graph import Graph


def loss_of(layers: int) -> Callable[[list[Any], Any, Any], Any]:
    """The loss of a network: that many convolutions with a kernel and a bias each, then a dense layer."""

    def loss(weights: list[Any], x: Any, wanted: Any) -> Any:
        h = x
        for i in range(layers):
            kernel, bias = weights[2 * i : 2 * i + 2]
            h = ops.relu(ops.conv(h, kernel, padding=((1, 1), (1, 1))) + bias)
        h = ops.reshape(ops.avg_pool(h, (4, 4), strides=(4, 4)), (x.shape[0], -1))
        error = h @ weights[-2] + weights[-1] - wanted
        return ops.mean(error * error)

    return loss


def training_graph(
    layers: int = 4, batch: int = 2, size: int = 16, channels: int = 8, classes: int = 10
) -> tuple[Graph, dict[str, np.ndarray]]:
    """conv, relu ..., pool, dense; loss and gradients of all weights. And inputs for it."""
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(layers):
        shapes[f"kernel{i}"] = (channels, channels if i else 3, 3, 3)
        shapes[f"bias{i}"] = (channels, 1, 1)
    shapes["dense"], shapes["offset"] = (channels * (size // 4) ** 2, classes), (classes,)

    g = Graph("training")
    with g.building():
        weights = [g.input(name, shape, "f32") for name, shape in shapes.items()]
        x = g.input("x", (batch, 3, size, size), "f32")
        wanted = g.input("wanted", (batch, classes), "f32")
        value, grads = rlx.value_and_grad(loss_of(layers))(weights, x, wanted)
    g.output("loss", value)
    for name, grad in zip(shapes, grads, strict=True):
        g.output(f"d_{name}", grad)
    rng = np.random.default_rng(0)
    feed = {name: (rng.standard_normal(s) / 10).astype(np.float32) for name, s in shapes.items()}
    feed["x"] = rng.standard_normal((batch, 3, size, size)).astype(np.float32)
    feed["wanted"] = rng.standard_normal((batch, classes)).astype(np.float32)
    return g, feed
