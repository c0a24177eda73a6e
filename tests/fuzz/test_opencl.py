"""Random graphs on the OpenCL device: the values of the reference, the same bits from run to run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import rlx
from random_graphs import graphs
from rlx.ir.graph import Graph
from rlx.reference.interpreter import evaluate

Made = tuple[Graph, dict[str, np.ndarray]]


def check(graph: Graph, feed: dict[str, np.ndarray]) -> None:
    want = evaluate(graph, feed)
    program = rlx.compile(graph, device="opencl")
    got, again = program.run(feed), program.run(feed)
    for name, value in want.items():
        assert got[name].dtype == value.dtype and got[name].shape == value.shape
        np.testing.assert_allclose(got[name], value, rtol=2e-5, atol=2e-5)
        assert got[name].tobytes() == again[name].tobytes(), "two runs differ"


@settings(max_examples=5, suppress_health_check=list(HealthCheck))
@given(made=graphs())
def test_the_device_is_the_reference(made: Made, require: Callable[[str], None]) -> None:
    require("opencl")
    check(*made)


@pytest.mark.slow
@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(made=graphs())
def test_the_device_is_the_reference_on_many_graphs(made: Made, require: Callable[[str], None]) -> None:
    require("opencl")
    check(*made)
