"""Sizes that are assumed for symbols meet what the graph needs; what is assumed by hand is checked."""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from rlx import Graph, ops
from rlx.cost.io import assumed_binding
from rlx.errors import ConfigError
from rlx.reference.interpreter import evaluate


def dilated(dilation: int) -> Graph:
    g = Graph()
    x, w = g.input("x", (1, 1, "size"), "f32"), g.input("w", (1, 1, "window"), "f32")
    g.output("y", ops.relu(ops.conv(x, w, dilations=dilation)))
    return g


@pytest.mark.parametrize("dilation", [1, 2, 5])
def test_a_window_of_unknown_size_fits_its_image(dilation: int) -> None:
    g = dilated(dilation)
    binding = assumed_binding(g)
    assert all(c.check(binding) for c in g.constraints)
    feed = {"x": np.arange(12, dtype=np.float32)[None, None], "w": np.ones((1, 1, 3), np.float32)}
    got = rlx.compile(g, cache=False).run(feed)["y"]
    np.testing.assert_array_equal(got, evaluate(g, feed)["y"])


def test_sizes_that_the_graph_refuses_are_not_assumed() -> None:
    told = r"assume: the graph needs that size is at least 2\*window-2, .* for size=5, window=7"
    with pytest.raises(ConfigError, match=told):
        rlx.compile(dilated(2), assume={"size": 5, "window": 7})


@pytest.mark.parametrize("batch", [1, "n"])
def test_a_convolution_without_windows(batch: int | str) -> None:
    """A window that fits nowhere, by less than a stride: an empty result, and nothing to emit."""
    g = Graph()
    x, w = g.input("x", (batch, 4, 5, 5), "f32"), g.input("w", (2, 4, 3, 3), "f32")
    g.output("y", ops.conv(x, w, dilations=3, strides=2))
    feed = {"x": np.ones((1, 4, 5, 5), np.float32), "w": np.ones((2, 4, 3, 3), np.float32)}
    assert rlx.compile(g, cache=False).run(feed)["y"].shape == (1, 2, 0, 0)
