"""What samples cannot show about the network blocks: kinks, extremes, refusals, expansions of one kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.errors import GuardError, ShapeError
from rlx.ir.graph import Graph
from rlx.kernel.compose import compose
from rlx.kernel.nests import Nest
from rlx.kernel.scalar import LOADS, load_index
from rlx.ops.array.addressing import OutOfRangeError
from rlx.reference.interpreter import evaluate
from rlx.transform.expand import expand_graph
from rlx.transform.grad import vjp_graph


def build(f: Callable[..., Any], *shapes: tuple[Any, ...], kinds: tuple[str, ...] = ()) -> Graph:
    """A graph with inputs x0.. of these shapes (f32 unless said) and the results of f."""
    g = Graph("block")
    kinds = kinds or ("f32",) * len(shapes)
    inputs = [g.input(f"x{i}", s, k) for i, (s, k) in enumerate(zip(shapes, kinds, strict=True))]
    with g.building():
        made = f(*inputs)
        g.set_outputs(made if isinstance(made, tuple) else [made])
    return g


def slope(f: Callable[..., Any], x: list[float]) -> list[float]:
    """Derivative of an elementwise function."""
    g = vjp_graph(build(f, (len(x),)), ["x0"])
    feed = {"x0": np.array(x, np.float32), "ct_out0": np.ones(len(x), np.float32)}
    return [round(float(v), 6) for v in evaluate(g, feed)["grad_x0"]]


def test_gradients_at_kinks_and_far_out_are_finite() -> None:
    assert slope(ops.relu, [-1.0, 0.0, 2.0]) == [0.0, 0.0, 1.0]
    assert slope(ops.elu, [-1e30, 0.0, 1e30]) == [0.0, 1.0, 1.0]
    assert slope(ops.softplus, [-1e4, 0.0, 1e4]) == [0.0, 0.5, 1.0]
    assert slope(ops.log_sigmoid, [-1e4, 0.0, 1e4]) == [1.0, 0.5, 0.0]
    assert slope(ops.gelu, [-1e2, 0.0, 1e2]) == [0.0, 0.5, 1.0]


def test_nothing_overflows_on_the_way() -> None:
    big = np.array([1e4, -1e4], np.float32)
    assert ops.softplus(big).tolist() == [1e4, 0.0]
    assert ops.log_sigmoid(big).tolist() == [0.0, -1e4]
    for f in (ops.softplus, ops.log_sigmoid, ops.logsumexp, ops.log_softmax, ops.softmax):
        expanded = evaluate(expand_graph(build(f, (2,))), {"x0": big})["out0"]
        np.testing.assert_array_equal(expanded, f(big))
    pair = np.array([3e38], np.float32), np.array([4e37], np.float32)
    got = evaluate(expand_graph(build(ops.hypot, (1,), (1,))), {"x0": pair[0], "x1": pair[1]})["out0"]
    np.testing.assert_allclose(got, np.hypot(*pair), rtol=1e-6)


def test_statistics_of_integers_are_f64() -> None:
    x = np.array([[1, 2], [4, 8]], np.int32)
    for ours, theirs in ((ops.mean, np.mean), (ops.var, np.var), (ops.std, np.std)):
        got = ours(x, axis=0)
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, theirs(x, axis=0))


@pytest.mark.parametrize("bad", [-1, 4])
def test_expanded_embedding_and_losses_refuse_bad_ids(bad: int) -> None:
    lookup = expand_graph(build(ops.embedding, (4, 2), (3,), kinds=("f32", "i32")))
    table = np.ones((4, 2), np.float32)
    with pytest.raises(OutOfRangeError):
        evaluate(lookup, {"x0": table, "x1": np.array([0, bad, 1], np.int32)})
    loss = expand_graph(build(ops.cross_entropy, ("n", 4), ("n",), kinds=("f32", "i64")))
    with pytest.raises(OutOfRangeError):
        evaluate(loss, {"x0": np.ones((2, 4), np.float32), "x1": np.array([0, bad])})


def test_a_query_that_sees_nothing_gives_zeros_and_no_gradient() -> None:
    shape = (1, 1, 2, 3)
    g = build(
        lambda q, k, v, m: ops.attention(q, k, v, m),
        shape,
        shape,
        shape,
        (2, 2),
        kinds=("f32",) * 3 + ("bool",),
    )
    rng = np.random.default_rng(0)
    feed: dict[str, Any] = {f"x{i}": rng.standard_normal(shape).astype(np.float32) for i in range(3)}
    feed["x3"] = np.array([[False, False], [True, False]])
    out = evaluate(expand_graph(g), feed)["out0"]
    assert not out[0, 0, 0].any() and np.allclose(out[0, 0, 1], feed["x2"][0, 0, 0])
    grads = evaluate(vjp_graph(g, ["x0", "x1", "x2"]), {**feed, "ct_out0": np.ones(shape, np.float32)})
    assert all(np.isfinite(v).all() for v in grads.values())
    assert not grads["grad_x0"].any()  # one visible key: its weight is 1 whatever q is


def test_attention_of_symbolic_width_needs_a_scale() -> None:
    shape = (1, 2, "n", "k")
    with pytest.raises(ShapeError, match="give scale="):
        build(ops.attention, shape, shape, shape)
    build(lambda q, k, v: ops.attention(q, k, v, scale=0.5), shape, shape, shape)


def test_rope_keeps_lengths_and_depends_on_distance_only() -> None:
    rng = np.random.default_rng(3)
    q, k = (rng.standard_normal((6, 8)) for _ in range(2))
    for interleaved in (False, True):
        turned = ops.rope(np.stack([q, q]), interleaved=interleaved)
        np.testing.assert_allclose(np.linalg.norm(turned[0], axis=-1), np.linalg.norm(q, axis=-1))
        near = [
            float(np.sum(ops.rope(q[:1], positions=[i], interleaved=interleaved)
                         * ops.rope(k[:1], positions=[i + 3], interleaved=interleaved)))
            for i in (0, 5)
        ]  # fmt: skip
        np.testing.assert_allclose(near[0], near[1])


ONE_KERNEL: list[tuple[str, Callable[..., Any], list[tuple[Any, ...]]]] = [
    ("softmax", ops.softmax, [("n", 12, "m", "m")]),
    ("masked softmax", lambda x: ops.softmax(x, masked=True), [("n", "m")]),
    ("log_softmax", ops.log_softmax, [("n", "m")]),
    ("layer_norm", ops.layer_norm, [("n", "m", 384), (384,), (384,)]),
    ("rms_norm", ops.rms_norm, [("n", "m", 384), (384,)]),
    ("instance_norm", ops.instance_norm, [("n", 64, "m", "k"), (64,), (64,)]),
    ("batch_norm", ops.batch_norm, [("n", 64, "m", "k"), (64,), (64,), (64,), (64,)]),
    ("logsumexp", lambda x: ops.logsumexp(x, axis=-1), [("n", "m")]),
    ("var", lambda x: ops.var(x, axis=-1), [("n", "m")]),
    ("rope", ops.rope, [("n", 12, "m", 64), ("m", 32), ("m", 32)]),
    ("interleaved rope", lambda *a: ops.rope(*a, interleaved=True), [(2, 3, 4), (3, 2), (3, 2)]),
    ("swiglu", ops.swiglu, [("n", 64)]),
    ("lrn", lambda x: ops.lrn(x, 5), [("n", 8, "m", "k")]),
]


@pytest.mark.parametrize("case", ONE_KERNEL, ids=[c[0] for c in ONE_KERNEL])
def test_expansion_fits_one_loop_nest(case: tuple[str, Callable[..., Any], list[tuple[Any, ...]]]) -> None:
    _, f, shapes = case
    kernel = compose(expand_graph(build(f, *shapes)))
    assert isinstance(kernel, Nest)
    for body in (*(s.body for s in kernel.stats), *(s.body for s in kernel.stores)):
        for e in body.walk():
            assert e.prim not in LOADS or len(load_index(e)) == len(shapes[e.data])


def test_frozen_batch_norm_touches_x_twice() -> None:
    vector = (3,)
    g = expand_graph(build(ops.batch_norm, ("n", 3, "m"), vector, vector, vector, vector))
    depends = {g.inputs[0].id}
    for node in g.nodes:
        if any(o.id in depends for o in node.operands):
            depends.add(node.id)
    assert [g.nodes[i].op.name for i in sorted(depends)] == ["input", "mul", "add"]


def test_the_slope_of_a_convolution_without_a_window() -> None:
    """A mean of no elements is NaN, and so is its slope, in programs of known and of open sizes."""

    def f(x: Any, w: Any) -> Any:
        return rlx.ops.mean(rlx.ops.conv(x, w), axis=2)

    def slope(x: Any, w: Any) -> Any:
        return rlx.jvp(f, (x, w), (x, w))[1]

    x, w = np.ones((1, 2, 3), np.float32), np.ones((2, 2, 4), np.float32)
    assert np.isnan(rlx.jit(slope)(x, w)).all()
    assert not rlx.jit(rlx.grad(lambda x, w: rlx.ops.sum(rlx.ops.conv(x, w))))(x, w).any()


def test_a_scale_of_known_size_decides_an_open_one() -> None:
    g = Graph()
    g.output("y", ops.rms_norm(g.input("x", ("m", "n"), "f32"), g.param("w", (4,), "f32", np.ones(4, "f4"))))
    x = np.ones((2, 4), np.float32)
    program = rlx.compile(g, cache=False)
    np.testing.assert_allclose(program.run({"x": x})["y"], x, rtol=1e-5)
    with pytest.raises(GuardError, match="assumed 4 equals n"):
        program.run({"x": np.ones((2, 5), np.float32)})
    with pytest.raises(ShapeError, match="scale f32\\[4\\] does not broadcast"):
        ops.rms_norm(g.input("narrow", ("m", 1), "f32"), g.params["w"])


def test_a_variant_of_a_size_that_also_scales() -> None:
    """x[:1] has one element: a run fixes m, and then a scale of known size meets the open n."""
    g = Graph()
    x, w = g.input("x", ("m", "n"), "f32"), g.input("w", ("m",), "f32")
    g.output("y", ops.rms_norm(x, w) + (w - w[:1]))
    program = rlx.compile(g, cache=False)
    feed = {"x": np.ones((2, 2), np.float32), "w": np.array([1, 3], np.float32)}
    np.testing.assert_allclose(program.run(feed)["y"], [[1, 5], [1, 5]], rtol=1e-5)
