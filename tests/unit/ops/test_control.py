"""Control flow as users call it: traced functions, closures, gradients through loops, batching of each."""

from __future__ import annotations

import numpy as np
import pytest

from rlx import Graph, ops
from rlx.errors import GradientError, RlxError, ShapeError, TransformError, TypeMismatchError
from rlx.ir.graph import Node
from rlx.reference.interpreter import evaluate
from rlx.transform.expand import expand_graph
from rlx.transform.grad import gradient_graph
from rlx.transform.vmap import batch_graph

RNG = np.random.default_rng(0)


def numeric_gradient(g: Graph, feed: dict[str, np.ndarray], name: str, output: str = "y") -> np.ndarray:
    out = np.zeros_like(feed[name])
    for i in np.ndindex(out.shape):
        ends = []
        for step in (1e-6, -1e-6):
            moved = feed[name].copy()
            moved[i] += step
            ends.append(evaluate(g, {**feed, name: moved})[output])
        out[i] = (ends[0] - ends[1]) / 2e-6
    return out


def check_gradient(g: Graph, feed: dict[str, np.ndarray], *names: str) -> Graph:
    made = gradient_graph(g, "y", names)
    got = evaluate(made, feed)
    np.testing.assert_allclose(got["value"], evaluate(g, feed)["y"])
    for name in names:
        np.testing.assert_allclose(got[f"grad_{name}"], numeric_gradient(g, feed, name), rtol=1e-5, atol=1e-7)
    return made


def count(g: Graph, name: str) -> int:
    return sum(n.op.name == name for n in g.nodes)


def test_scan_closes_over_outer_nodes_and_differentiates_by_all() -> None:
    g = Graph()
    w, h, xs = g.input("w", (3, 3), "f64"), g.input("h", (3,), "f64"), g.input("xs", (5, 3), "f64")
    doubled = w * 2.0
    last, all_ = ops.scan(lambda h, x: (ops.tanh(h @ doubled + x), h * x), h, xs)
    g.output("y", ops.sum(last) + ops.sum(all_ * all_))
    feed = {n: RNG.standard_normal(s) * 0.5 for n, s in (("w", (3, 3)), ("h", (3,)), ("xs", (5, 3)))}
    made = check_gradient(g, feed, "w", "h", "xs")
    assert count(made, "scan") == 2, "one scan forwards, which saves the carries, and one back"


def test_gradients_of_weights_are_one_contraction_after_the_scan() -> None:
    g = Graph()
    w, h, xs = g.input("w", (3, 4), "f64"), g.input("h", (2, 3), "f64"), g.input("xs", (5, 2, 3), "f64")
    last, _ = ops.scan(lambda h, x: (ops.tanh((h @ w)[:, 1:] + x), None), h, xs)
    g.output("y", ops.sum(last * last))
    feed = {n: RNG.standard_normal(s) for n, s in (("w", (3, 4)), ("h", (2, 3)), ("xs", (5, 2, 3)))}
    made = check_gradient(g, feed, "w")
    back = [n for n in made.nodes if n.op.name == "scan"][-1]
    assert not any(b.tensor.shape == (3, 4) for b in back.bodies[0].outputs.values()), (
        "no sum of w's gradient inside"
    )
    assert count(made, "dot_general") == 1


def test_scan_of_scan_has_a_gradient() -> None:
    g = Graph()
    x, k = g.input("x", (3, 4), "f64"), g.input("k", (), "f64")

    def inner(c: Node, v: Node) -> tuple[Node, Node]:
        return c * k + ops.sin(v), c

    def outer(c: Node, row: Node) -> tuple[Node, Node]:
        end, seen = ops.scan(inner, c, row, reverse=True)
        return end, ops.sum(seen)

    end, sums = ops.scan(outer, k, x)
    g.output("y", end * ops.sum(sums))
    check_gradient(g, {"x": RNG.standard_normal((3, 4)), "k": np.array(0.7)}, "x", "k")


def test_scan_takes_trees_and_numbers() -> None:
    xs = {"a": np.arange(3.0), "b": np.ones((3, 2))}
    carry, ys = ops.scan(
        lambda c, x: ((c[0] + 1, c[1] + x["a"]), [x["b"] * x["a"], None]), (0, np.array(0.0)), xs
    )
    assert int(carry[0]) == 3 and float(carry[1]) == 3.0
    assert ys[0].shape == (3, 2) and ys[1] is None


def test_unrolled_scan_is_the_scan() -> None:
    xs = RNG.standard_normal((4, 2))

    def step(c: Node, x: Node) -> tuple[Node, Node]:
        return c * 0.5 + x, ops.exp(c)

    for reverse in (False, True):
        plain = ops.scan(step, np.zeros(2), xs, reverse=reverse)
        flat = ops.scan(step, np.zeros(2), xs, reverse=reverse, unroll=True)
        for a, b in zip(plain, flat, strict=True):
            np.testing.assert_allclose(a, b)


def test_scan_refuses_a_carry_that_changes() -> None:
    with pytest.raises(
        ShapeError, match=r"scan: carry 0 enters the body as f64\[2\], but leaves it as f64\[2,2\]"
    ):
        ops.scan(lambda c, x: (ops.reshape(c, (2, 1)) * c, None), np.zeros(2), length=3)
    with pytest.raises(TypeMismatchError, match=r"must return the tuple \(carry, y\)"):
        ops.scan(lambda c, x: c, np.zeros(2), length=3)
    with pytest.raises(TypeMismatchError, match="give length"):
        ops.scan(lambda c, x: (c, c), np.zeros(2))


def test_a_body_may_not_use_another_graph() -> None:
    other = Graph("other").input("x", (2,), "f64")
    g = Graph("main")
    c = g.input("c", (2,), "f64")
    with pytest.raises(RlxError, match="belongs to graph 'other', which does not enclose the body"):
        ops.scan(lambda c, x: (c + other, None), c, length=2)


def test_cond_runs_one_branch_and_differentiates() -> None:
    g = Graph()
    x, k = g.input("x", (3,), "f64"), g.input("k", (3,), "f64")
    big = ops.sum(x) > 0.0
    a, b = ops.cond(big, lambda v: (v * k, 2.0), lambda v: (ops.exp(v), ops.sum(k)), x)
    g.output("y", ops.sum(a) * b)
    for sign in (1.0, -1.0):
        feed = {"x": sign * np.array([0.5, 0.2, 0.3]), "k": np.array([1.0, 2.0, 3.0])}
        check_gradient(g, feed, "x", "k")


def test_cond_refuses_different_results() -> None:
    x = np.zeros(3)
    with pytest.raises(
        TypeMismatchError, match=r"cond: result 0 is f64\[3\] in one body and f64\[\] in the other"
    ):
        ops.cond(np.array(True), lambda v: v + 1.0, lambda v: ops.sum(v), x)
    with pytest.raises(TypeMismatchError, match=r"return \* and \(\*, \*\)"):
        ops.cond(np.array(True), lambda v: v, lambda v: (v, v), x)
    with pytest.raises(TypeMismatchError, match=r"its condition is bool\[3\]; it must be a single bool"):
        ops.cond(np.array([True] * 3), lambda v: v, lambda v: v, x)


def test_batched_condition_selects_per_element() -> None:
    g = Graph()
    p, x = g.input("p", (), "bool"), g.input("x", (2,), "f64")
    g.output("y", ops.cond(p, lambda v: v * 2.0, lambda v: -v, x))
    made = batch_graph(g, {"p": 0, "x": 0}, 3)
    pick, values = np.array([True, False, True]), RNG.standard_normal((3, 2))
    want = np.where(pick[:, None], values * 2, -values)
    np.testing.assert_allclose(evaluate(made, {"p": pick, "x": values})["y"], want)


def test_while_loop_counts_and_batches_with_different_trips() -> None:
    g = Graph()
    x = g.input("x", (), "f64")
    steps, value = ops.while_loop(lambda c: c[1] < 100.0, lambda c: (c[0] + 1, c[1] * 3.0), (0, x))
    g.output("steps", steps)
    g.output("value", value)
    xs = np.array([1.0, 50.0, 200.0])
    want = [evaluate(g, {"x": np.asarray(v)}) for v in xs]
    got = evaluate(batch_graph(g, {"x": 0}, 3), {"x": xs})
    for name in ("steps", "value"):
        np.testing.assert_allclose(got[name], np.stack([w[name] for w in want]))
    assert got["steps"].tolist() == [5, 1, 0]


def test_batched_trip_counts() -> None:
    g = Graph()
    n, x = g.input("n", (), "i64"), g.input("x", (2,), "f64")
    g.output("y", ops.loop(lambda i, c: (True, c * 2.0, None), x, trips=n)[0])
    got = evaluate(batch_graph(g, {"n": 0, "x": None}, 3), {"n": np.array([0, 3, 1]), "x": np.ones(2)})["y"]
    np.testing.assert_array_equal(got, np.array([[1, 1], [8, 8], [2, 2]]))


def test_while_loop_with_a_bound_has_a_gradient() -> None:
    g = Graph()
    x, k = g.input("x", (), "f64"), g.input("k", (), "f64")
    g.output("y", ops.while_loop(lambda c: c < 20.0, lambda c: c * k + 1.0, x, max_trips=12))
    check_gradient(g, {"x": np.array(1.5), "k": np.array(1.7)}, "x", "k")


def test_while_loop_without_a_bound_says_why_it_has_no_gradient() -> None:
    g = Graph()
    x = g.input("x", (), "f64")
    g.output("y", ops.while_loop(lambda c: c < 20.0, lambda c: c * 2.0, x))
    with pytest.raises(GradientError, match="give max_trips to while_loop or loop, or use scan"):
        gradient_graph(g, "y", ["x"])


def test_loop_of_known_length_is_a_scan() -> None:
    g = Graph()
    x = g.input("x", ("n", 2), "f64")
    with g.building():
        rows = ops.dim_value("n")
    for trips in (4, rows):
        ops.loop(lambda i, c: (True, c * 2.0, i), ops.sum(x), trips=trips)
    assert count(g, "scan") == 2 and count(g, "loop") == 0
    carry, ys = ops.loop(lambda i, c: (True, c + i, c), 0, trips=4)
    assert int(carry) == 6 and ys.tolist() == [0, 0, 1, 3]


def test_loop_that_stacks_until_it_stops() -> None:
    g = Graph()
    x, limit = g.input("x", (2,), "f64"), g.input("limit", (), "f64")
    carry, ys = ops.loop(lambda i, c: (ops.sum(c) < limit, c * 2.0, c), x, trips=10)
    g.output("carry", carry)
    g.output("ys", ys)
    got = evaluate(g, {"x": np.array([1.0, 1.0]), "limit": np.array(9.0)})
    assert got["ys"].tolist() == [[1, 1], [2, 2], [4, 4], [8, 8]]
    assert str(ys.shape[0]) == "trips0"
    with pytest.raises(TransformError, match="another number of steps for each element"):
        batch_graph(g, {"x": 0, "limit": None}, 3)


def test_loop_that_stacks_has_a_gradient() -> None:
    g = Graph()
    x = g.input("x", (), "f64")
    carry, ys = ops.loop(lambda i, c: (c < 9.0, c * c, c * 3.0), x, trips=6)
    g.output("y", carry + ops.sum(ys * ys))
    check_gradient(g, {"x": np.array(1.3)}, "x")


def test_bodies_are_expanded_too() -> None:
    g = Graph()
    x = g.input("x", (2, 3), "f64")
    g.output("y", ops.scan(lambda c, r: (ops.softmax(c + r), ops.gelu(r)), np.zeros(3), x)[1])
    flat = expand_graph(g)
    inside = [n for s in flat.nodes for b in s.bodies for n in b.nodes]
    assert inside and all(n.op.level == "mir" for n in inside)
    feed = {"x": RNG.standard_normal((2, 3))}
    np.testing.assert_allclose(evaluate(flat, feed)["y"], evaluate(g, feed)["y"])
