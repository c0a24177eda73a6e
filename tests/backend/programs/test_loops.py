"""Loops of known length as records: lengths, directions, carries, what a body reads, nesting, threads."""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.ir.graph import Graph, Node
from rlx.reference.interpreter import evaluate


def check(g: Graph, feed: dict[str, np.ndarray], native: bool = True) -> dict[str, np.ndarray]:
    """Run on one and on two threads: the reference's values, equal bits."""
    want = evaluate(g, feed)
    one, two = rlx.compile(g, threads=1), rlx.compile(g, threads=2)
    got = one.run(feed)
    for name, value in want.items():
        assert got[name].shape == value.shape and got[name].dtype == value.dtype
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-6)
        assert got[name].tobytes() == two.run(feed)[name].tobytes()
    if native:
        assert not one.stats["host_thunks"]
    return got


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


def cell(h: Node, x: Node) -> tuple[Node, Node]:
    new = ops.tanh(h * 0.5 + x)
    return new, new * 2.0


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3, 17])
def test_lengths_and_directions(length: int, reverse: bool) -> None:
    """Odd and even numbers of steps: carries alternate between two buffers, the last one is the result."""
    g = Graph("scan")
    last, every = ops.scan(cell, g.input("h", (5,), "f32"), g.input("x", (length, 5), "f32"), reverse=reverse)
    g.output("last", last)
    g.output("every", every)
    check(g, {"h": values(5), "x": values(length, 5, seed=1)})


def test_no_steps_hand_the_start_on() -> None:
    g = Graph("scan")
    last, every = ops.scan(cell, g.input("h", (5,), "f32"), g.input("x", ("n", 5), "f32"))
    g.output("last", last)
    g.output("every", every)
    program = rlx.compile(g, threads=2)
    h = values(5)
    for n in (0, 3, 0, 1):
        feed = {"h": h, "x": values(n, 5, seed=n)}
        got, want = program.run(feed), evaluate(g, feed)
        for name, value in want.items():
            assert got[name].shape == value.shape
            np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-6)


def test_symbolic_lengths_compile_once() -> None:
    g = Graph("scan")
    last, every = ops.scan(cell, g.input("h", ("m",), "f32"), g.input("x", ("n", "m"), "f32"))
    g.output("last", last)
    g.output("every", every)
    program = rlx.compile(g, threads=2)
    for n, m in ((3, 4), (1, 4), (40, 17), (2, 1)):
        feed = {"h": values(m), "x": values(n, m, seed=1)}
        got, want = program.run(feed), evaluate(g, feed)
        for name, value in want.items():
            np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-6)


def test_several_carries_that_swap() -> None:
    """A carry that becomes another must be read before it is overwritten."""
    g = Graph("swap")

    def step(state: tuple[Node, Node], x: Node) -> tuple[tuple[Node, Node], Node]:
        a, b = state
        return (b, a + b * x), a

    (a, b), seen = ops.scan(
        step, (g.input("a", (3,), "f32"), g.input("b", (3,), "f32")), g.input("x", (6, 3), "f32")
    )
    for name, node in {"a": a, "b": b, "seen": seen}.items():
        g.output(f"out_{name}", node)
    check(g, {"a": values(3), "b": values(3, seed=1), "x": values(6, 3, seed=2)})


def test_a_carry_that_stays() -> None:
    g = Graph("stays")
    (kept, total), _ = ops.scan(
        lambda s, x: ((s[0], s[1] + s[0] * x), x),
        (g.input("k", (4,), "f32"), g.input("t", (4,), "f32")),
        g.input("x", (5, 4), "f32"),
    )
    g.output("kept", kept)
    g.output("total", total)
    check(g, {"k": values(4), "t": values(4, seed=1), "x": values(5, 4, seed=2)})


def test_bodies_read_weights_constants_and_values_around_them() -> None:
    g = Graph("rnn")
    x, h = g.input("x", (7, 2, 6), "f32"), g.input("h", (2, 8), "f32")
    w = g.param("w", (6, 8), "f32", values(6, 8, seed=3))
    u = g.param("u", (8, 8), "f32", values(8, 8, seed=4))
    bias = ops.exp(g.input("b", (8,), "f32"))
    table = values(8, seed=5)

    def step(h: Node, x: Node) -> tuple[Node, Node]:
        new = ops.tanh(x @ w + h @ u + bias) * table
        return new, ops.softmax(new, axis=-1)

    last, every = ops.scan(step, h, x)
    g.output("last", last)
    g.output("every", every)
    check(g, {"x": values(7, 2, 6), "h": values(2, 8, seed=1), "b": values(8, seed=2)})


def test_scanned_views() -> None:
    """What is scanned over may itself be a view: transposed, cut, flipped."""
    g = Graph("views")
    x = g.input("x", (4, 9, 3), "f32")
    turned = ops.transpose(x, (1, 0, 2))[1:8]
    last, every = ops.scan(cell, g.input("h", (4, 3), "f32"), turned)
    g.output("last", last)
    g.output("every", ops.transpose(every, (1, 0, 2)))
    check(g, {"x": values(4, 9, 3), "h": values(4, 3, seed=1)})


def test_a_loop_in_a_loop() -> None:
    g = Graph("nested")

    def outer(h: Node, rows: Node) -> tuple[Node, Node]:
        last, _ = ops.scan(cell, h, rows)
        return last, last * 3.0

    last, every = ops.scan(outer, g.input("h", (3,), "f32"), g.input("x", (4, 5, 3), "f32"))
    g.output("last", last)
    g.output("every", every)
    check(g, {"h": values(3), "x": values(4, 5, 3, seed=1)}, native=False)


def test_two_loops_that_feed_each_other() -> None:
    g = Graph("pair")
    x, h = g.input("x", (6, 4), "f32"), g.input("h", (4,), "f32")
    first, every = ops.scan(cell, h, x)
    second, again = ops.scan(cell, first, every, reverse=True)
    g.output("y", second + first)
    g.output("again", again)
    check(g, {"x": values(6, 4), "h": values(4, seed=1)})


def test_outputs_of_a_loop_that_nothing_reads() -> None:
    g = Graph("last only")
    last, _ = ops.scan(cell, g.input("h", (4,), "f32"), g.input("x", (6, 4), "f32"))
    g.output("y", last * 2.0)
    check(g, {"x": values(6, 4), "h": values(4, seed=1)})


def test_gradients_of_loops() -> None:
    def loss(h: Any, x: Any) -> Any:
        last, every = ops.scan(cell, h, x)
        return ops.sum(last) + ops.sum(every * every)

    h, x = values(4).astype(np.float64), values(6, 4, seed=1).astype(np.float64)
    got = rlx.grad(loss, argnums=(0, 1))(h, x)
    value = rlx.jit(loss)
    for which, (array, gradient) in enumerate(zip((h, x), got, strict=True)):
        direction = np.random.default_rng(which).standard_normal(array.shape)
        moved = [
            value(*(a + sign * 1e-6 * direction if a is array else a for a in (h, x))) for sign in (1, -1)
        ]
        assert (moved[0] - moved[1]) / 2e-6 == pytest.approx((gradient * direction).sum(), rel=1e-5)


def test_many_threads_run_one_loop() -> None:
    g = Graph("scan")
    last, every = ops.scan(cell, g.input("h", (16,), "f32"), g.input("x", ("n", 16), "f32"))
    g.output("y", ops.sum(every, axis=0) + last)
    program = rlx.compile(g, threads=2)
    feeds = [{"h": values(16), "x": values(n, 16, seed=n)} for n in (5, 9, 30)]
    want = [rlx.compile(g, threads=1).run(f)["y"] for f in feeds]
    wrong: list[Any] = []

    def work(i: int) -> None:
        try:
            for _ in range(20):
                np.testing.assert_array_equal(program.run(feeds[i])["y"], want[i])
        except Exception as error:
            wrong.append(error)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert not wrong


# --- profiles


def events_of(program: rlx.CompiledProgram, x: np.ndarray) -> int:
    """Spans that a profiled run has on thread 0."""
    (run,) = program.trace({"x": x})
    mine = [s for s in run.spans if s.thread == 0]
    assert all(a.end_ns <= b.start_ns for a, b in pairwise(mine))
    assert run.start_ns <= mine[0].start_ns and mine[-1].end_ns <= run.end_ns
    return len(mine)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_profile_has_every_step_of_a_loop(threads: int) -> None:
    """As many events more for every two steps more (the body is there twice), pauses or not."""
    g = rlx.Graph("count")
    x = g.input("x", (), "f32")
    g.output("y", ops.while_loop(lambda c: c > 0.0, lambda c: c - 1.0, x))
    program = rlx.compile(g, threads=threads)
    two, four, many = (events_of(program, np.array(n, np.float32)) for n in (2, 4, 20_000))
    assert four >= two + 2 and many == two + 9_999 * (four - two)


def test_a_profile_has_every_step_of_a_scan() -> None:
    g = rlx.Graph("sums")
    x = g.input("x", ("n", 4), "f32")
    last, rows = ops.scan(lambda c, row: (ops.tanh(c + row), c), ops.zeros((4,), "f32"), x)
    g.output("y", last)
    g.output("rows", rows)
    program = rlx.compile(g, threads=1)
    counts = [events_of(program, np.ones((n, 4), np.float32)) for n in (10, 11, 40)]
    assert counts[1] > counts[0] and counts[2] == counts[0] + 30 * (counts[1] - counts[0])
