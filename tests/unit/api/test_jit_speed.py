"""A training step through rlx.jit with weights as arguments takes no longer than one with fixed sizes."""

from __future__ import annotations

import numpy as np
import pytest
from sample_training import loss_of, training_graph

import rlx
from measured import cpu_seconds


@pytest.mark.slow
def test_a_conv_nets_training_step() -> None:
    """bench/conv_training.py measures 1.00 to 1.03; other sizes as symbols took 55 times as long and more."""
    layers = 3
    graph, feed = training_graph(layers, batch=4, size=32, channels=32)
    weights = [value for name, value in feed.items() if name not in ("x", "wanted")]
    x, wanted = feed["x"], feed["wanted"]
    fixed = rlx.compile(graph, threads=1)
    step = rlx.jit(rlx.value_and_grad(loss_of(layers)), threads=1)
    step(weights, np.concatenate([x, x]), np.concatenate([wanted, wanted]))
    value, slopes = step(weights, x, wanted)
    want = list(fixed.run(feed).values())
    for got, known in zip([value, *slopes], want, strict=True):
        np.testing.assert_array_equal(got, known)
    of_jit = min(cpu_seconds(lambda: step(weights, x, wanted)) for _ in range(10))
    of_graph = min(cpu_seconds(lambda: fixed.run(feed)) for _ in range(10))
    assert of_jit < 1.3 * of_graph
