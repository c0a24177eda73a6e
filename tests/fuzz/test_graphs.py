"""Random well-typed graphs: verifier, text, files, expansion and gradients agree on every one of them."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings

import rlx
from random_graphs import graphs
from rlx.ir.graph import Graph
from rlx.ir.op import Level
from rlx.ir.text.diff import graph_diff, structurally_equal
from rlx.ir.text.files import load, save
from rlx.ir.text.read import parse_graph
from rlx.ir.text.write import graph_text
from rlx.ir.verify import verify
from rlx.reference.interpreter import evaluate
from rlx.transform.expand import expand_graph
from rlx.transform.grad import gradient_graph, is_differentiable_dtype

Feed = dict[str, np.ndarray]


def runs(count: int) -> settings:
    """So many examples, or as many as the profile says if that is more (--hypothesis-profile=explore)."""
    return settings(max_examples=max(count, settings().max_examples), suppress_health_check=list(HealthCheck))


def bound(graph: Graph) -> Graph:
    """Every symbol is the size of some input axis, or the constraints could not be checked."""
    known = {s for n in graph.inputs for d in n.shape if not isinstance(d, int) for s in [str(d)]}
    assert set(graph.symbols()) <= known
    return graph


@runs(250)
@given(graphs())
def test_graphs_verify_print_and_parse(made: tuple[Graph, Feed]) -> None:
    graph = bound(made[0])
    verify(graph, Level.HIR)
    blobs: dict[str, np.ndarray] = {}
    text = graph_text(graph, blobs=blobs)
    again = parse_graph(text, blobs)
    assert graph_text(again) == text
    verify(again, Level.HIR)
    assert structurally_equal(graph, again) and graph_diff(graph, again) == ""


@runs(250)
@given(graphs())
def test_the_reference_agrees_after_expansion(made: tuple[Graph, Feed]) -> None:
    graph, feed = made
    want = evaluate(graph, feed)
    mir = verify(expand_graph(graph), Level.MIR)
    got = evaluate(mir, feed)
    assert list(got) == list(want)
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=2e-4, atol=2e-4, err_msg=str(graph))
    again = parse_graph(graph_text(mir, blobs=(blobs := {})), blobs)
    again.param_values = mir.param_values
    for name, value in evaluate(again, feed).items():
        np.testing.assert_array_equal(value, got[name])


@runs(60)
@given(graphs())
def test_files_keep_the_meaning(made: tuple[Graph, Feed]) -> None:
    graph, feed = made
    with tempfile.TemporaryDirectory() as folder:
        save(graph, Path(folder) / "g")
        again = load(Path(folder) / "g")
    want = evaluate(graph, feed)
    for name, value in evaluate(again, feed).items():
        np.testing.assert_array_equal(value, want[name])


def scalar(graph: Graph) -> Graph:
    """One number from all floating-point outputs, each element with a weight of its own."""
    total = None
    for node in list(graph.outputs.values()):
        if is_differentiable_dtype(node):
            part = rlx.ops.sum(rlx.ops.sin(node * 1.25 + 0.3))
            total = part if total is None else total + part
    assert total is not None
    graph.set_outputs({"loss": total})
    return graph


@runs(200)
@given(graphs(smooth=True, most=6))
def test_gradients_are_finite_differences(made: tuple[Graph, Feed]) -> None:
    graph, feed = scalar(made[0]), made[1]
    names = list(feed)
    gradient = gradient_graph(graph, "loss", names)
    verify(gradient, Level.HIR)
    parse_graph(graph_text(gradient, blobs=(blobs := {})), blobs)
    got = evaluate(gradient, feed)
    np.testing.assert_allclose(got["value"], evaluate(graph, feed)["loss"], rtol=1e-9)
    rng = np.random.default_rng(5)
    for name in names:
        direction = rng.standard_normal(feed[name].shape)
        step = 1e-5
        up = evaluate(graph, {**feed, name: feed[name] + step * direction})["loss"]
        down = evaluate(graph, {**feed, name: feed[name] - step * direction})["loss"]
        slope = float((up - down) / (2 * step))
        found = float(np.sum(got[f"grad_{name}"] * direction))
        scale = 1 + abs(slope) + float(np.abs(got[f"grad_{name}"]).sum())
        assert abs(found - slope) <= 2e-5 * scale, (
            f"{name}: {found}, but finite differences say {slope}\n{graph}"
        )


def test_the_graphs_are_not_all_alike() -> None:
    seen: set[str] = set()

    @runs(250)
    @given(graphs())
    def draw(made: tuple[Graph, Feed]) -> None:
        seen.update(n.op.name for n in made[0].nodes)

    draw()
    assert len(seen) >= 35, sorted(seen)
