"""Along which axis the lanes of a reduction run."""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from emission import emit
from machines import executable, on_targets
from rlx import ops
from rlx.ir.graph import Graph
from rlx.reference.interpreter import evaluate
from rlx.target.cpu import Target, targets


def sum_of_planes(planes: int, columns: int | str = 96) -> Graph:
    """Sums over the last axis of a transposed operand: neighbours in memory are along a kept axis."""
    g = Graph()
    x = g.input("x", (planes, 5, columns), "f32")
    g.output("y", ops.sum(ops.transpose(x * x, (1, 2, 0)), 2))
    return g


@pytest.mark.parametrize("target", targets(), ids=lambda target: target.name)
def test_a_sum_of_two_terms_follows_its_loads(target: Target) -> None:
    """Their order does not show in the bits. Lanes along an axis of two elements would be mostly empty."""
    for columns in (96, "n"):
        texts = emit("planes", sum_of_planes(2, columns), target).kernels.texts
        assert not any("masked.gather" in text for text in texts)


def test_longer_sums_add_along_their_own_axis() -> None:
    """There the order of additions shows, and must not depend on what shares the kernel."""
    texts = emit("planes", sum_of_planes(3), targets()[0]).kernels.texts
    assert any("masked.gather" in text for text in texts)


@on_targets(executable())
@pytest.mark.parametrize("planes", [2, 3])
def test_sums_of_planes(target: Target, planes: int) -> None:
    graph = sum_of_planes(planes, "n")
    x = np.random.default_rng(0).standard_normal((planes, 5, 37)).astype(np.float32)
    got = rlx.compile(graph, target=target.name, threads=2, cache=False).run({"x": x})["y"]
    np.testing.assert_allclose(got, evaluate(graph, {"x": x})["y"], rtol=1e-6)
    if planes == 2:
        np.testing.assert_array_equal(got, x[0] * x[0] + x[1] * x[1])
