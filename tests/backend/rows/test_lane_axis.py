"""Along which axis the lanes of a reduction run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import rlx
from emission import emit
from machines import executable, on_targets
from rlx import ops
from rlx.ir.graph import Graph, Node
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


def normalised(x: Node, axis: int) -> Node:
    centred = x - ops.mean(x, axis, keepdims=True)
    return centred / ops.sqrt(ops.mean(centred * centred, axis, keepdims=True) + 1e-5)


VIEWS: dict[str, tuple[tuple[int, ...], Callable[[Node], Node]]] = {
    "part of rows": ((40, 72), lambda x: ops.reshape(x[:, :64], (80, 32))),
    "turned": ((3, 24, 64), lambda x: ops.reshape(ops.transpose(x, (0, 2, 1)), (3, 2, 32, 24))),
    "turned, parts": ((24, 72), lambda x: ops.reshape(ops.transpose(x[:, :64], (1, 0)), (2, 32, 3, 8))),
    "mirrored": ((40, 64), lambda x: ops.reshape(x[::-1, ::-1][:, :48], (120, 16))),
}
"""Operands that a norm over an outer axis reads in another order than they are stored in."""


def norm_graph(view: str | None, shape: tuple[int, ...], axis: int, softmax: bool) -> Graph:
    g = Graph()
    x = g.input("x", shape, "f32")
    x = x if view is None else VIEWS[view][1](x)
    g.output("y", ops.softmax(x, axis) if softmax else normalised(x, axis))
    return g


@on_targets(executable())
@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("view", VIEWS)
def test_a_norm_over_an_outer_axis_of_a_view(target: Target, view: str, softmax: bool) -> None:
    """The same bits as for an operand that is stored as it is read."""
    shape, made = VIEWS[view]
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    direct = np.asarray(made(x))
    for axis in range(direct.ndim - 1):
        graphs = norm_graph(view, shape, axis, softmax), norm_graph(None, direct.shape, axis, softmax)
        got, plain = (
            rlx.compile(g, target=target.name, threads=2, cache=False).run({"x": data})["y"]
            for g, data in zip(graphs, (x, np.ascontiguousarray(direct)), strict=True)
        )
        np.testing.assert_array_equal(got, plain)
        np.testing.assert_allclose(got, evaluate(graphs[0], {"x": x})["y"], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("view", ["part of rows", "turned"])
@pytest.mark.parametrize("target", targets(), ids=lambda target: target.name)
def test_loads_of_such_a_norm_are_contiguous(target: Target, view: str) -> None:
    texts = emit(view, norm_graph(view, VIEWS[view][0], len(VIEWS[view][0]) - 2, False), target).kernels.texts
    assert not any("masked.gather" in text for text in texts)
