"""Random graphs run natively: the values of the reference, the same bits for any number of threads."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, given, settings

import rlx
from random_graphs import graphs
from rlx.ir.graph import Graph
from rlx.reference.interpreter import evaluate

EXAMPLES = 300


@settings(max_examples=max(EXAMPLES, settings().max_examples), suppress_health_check=list(HealthCheck))
@given(graphs())
def test_native_code_is_the_reference(made: tuple[Graph, dict[str, np.ndarray]]) -> None:
    graph, feed = made
    want = evaluate(graph, feed)
    one = rlx.compile(graph, threads=1).run(feed)
    two = rlx.compile(graph, threads=2).run(feed)
    for name, value in want.items():
        got = one[name]
        assert got.dtype == value.dtype and got.shape == value.shape
        np.testing.assert_allclose(got, value, rtol=2e-5, atol=2e-5)
        assert got.tobytes() == two[name].tobytes(), "the bits depend on the number of threads"
