"""Branches and loops as records of the native program: values, threads, nesting, weights, memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.api.compile import plan
from rlx.errors import KernelError, PlanError, RlxError
from rlx.fuzz.bounds import assert_by_table
from rlx.ir.graph import Graph, Node
from rlx.plan.lir import LirBufferSlot, LirModule
from rlx.reference.interpreter import evaluate
from rlx.reference.lir import run_lir

pytestmark = pytest.mark.usefixtures("each_origin")

Feed = dict[str, Any]


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


def check(g: Graph, *feeds: Feed) -> None:
    """One program per number of threads, all feeds: the reference's values, equal bits, no host thunk."""
    one, two, spoilt = (
        rlx.compile(g, **how) for how in ({"threads": 1}, {"threads": 2}, {"debug": "poison"})
    )
    assert not one.stats["host_thunks"]
    lir = plan(g)
    lir.plan.check()
    for feed in (*feeds, *reversed(feeds)):
        want, got = evaluate(g, feed), one.run(feed)
        assert_by_table(g, feed, got, want)
        assert_by_table(g, feed, run_lir(lir, feed, poison=True), want)
        for other in (two, spoilt):
            again = other.run(feed)
            assert all(got[name].tobytes() == again[name].tobytes() for name in want)


def weighted(g: Graph, name: str, *shape: int) -> Node:
    w = g.param(name, shape, "f32")
    g.set_param(name, values(*shape, seed=len(name)))
    return w


def branching(n: Any = 40) -> Graph:
    """Both branches read weights, one of them the other's too."""
    g = Graph("branching")
    x, p = g.input("x", (n, 24), "f32"), g.input("p", (), "bool")
    u, w = weighted(g, "u", 24, 33), weighted(g, "weight", 24, 33)
    y, z = ops.cond(
        p,
        lambda a: (ops.tanh(a @ w), a * 2.0),
        lambda a: (ops.softmax((a + 1.0) @ w, axis=-1) @ ops.transpose(u, (1, 0)) @ u, ops.exp(a)),
        x,
    )
    g.output("y", y)
    g.output("z", z + 1.0)
    return g


@pytest.mark.parametrize("n", [1, 40, "n"])
def test_branches_with_weights(n: Any) -> None:
    rows = (1, 17, 40) if n == "n" else (n,)
    check(branching(n), *({"x": values(r, 24), "p": np.array(p)} for r in rows for p in (True, False)))


def test_weights_of_branches_are_packed_outside() -> None:
    lir = plan(branching())
    assert lir.derived is not None and len(lir.derived.outputs) >= 2
    (node,) = (n for n in lir.mir.nodes if len(n.bodies) == 2)
    weights = [o for o in node.operands if o.op.role.name == "PARAM"]
    assert weights and all(o.attrs["name"].startswith("derived:") for o in weights)


def test_a_new_value_of_a_param_reaches_the_branches() -> None:
    g = branching()
    program = rlx.compile(g)
    feed = {"x": values(40, 24), "p": np.array(True)}
    program.run(feed)
    changed = values(24, 33, seed=99)
    program.set_param("weight", changed)
    want = evaluate(g, feed, {**g.param_values, "weight": changed})
    np.testing.assert_allclose(program.run(feed)["y"], want["y"], rtol=1e-5, atol=1e-6)


def test_the_condition_may_be_computed_or_an_input() -> None:
    g = Graph("abs")
    x = g.input("x", (5,), "f32")
    g.output("y", ops.cond(ops.sum(x) < 0.0, lambda a: -a, lambda a: a, x))
    check(g, {"x": values(5) - 2}, {"x": values(5) + 2})


def collatz(limit: int | None = None) -> Graph:
    g = Graph("collatz")
    n = g.input("n", (), "i64")

    def step(carry: tuple[Node, Node]) -> tuple[Node, Node]:
        value, steps = carry
        odd = ops.equal(ops.mod(value, 2), 1)
        return ops.cond(odd, lambda v: v * 3 + 1, lambda v: v // 2, value), steps + 1

    value, steps = ops.while_loop(lambda c: c[0] > 1, step, (n, g.constant(np.array(0))), max_trips=limit)
    g.output("value", value)
    g.output("steps", steps)
    return g


def test_a_loop_with_a_branch_inside() -> None:
    """Odd and even numbers of steps, and none: results end in one of two places."""
    check(collatz(), *({"n": np.array(n)} for n in (1, 2, 3, 7, 27, 97)))


def test_a_bound_on_steps() -> None:
    check(collatz(5), *({"n": np.array(n)} for n in (1, 2, 27)))


@pytest.mark.parametrize("n", [3, "n"])
def test_loops_with_trips_from_data(n: Any) -> None:
    g = Graph("power")
    x, trips, go = g.input("x", (n, 8), "f32"), g.input("trips", (), "i64"), g.input("go", (), "bool")
    w = weighted(g, "w", 8, 8)
    (last, number), _ = ops.loop(
        lambda i, c: (i < 5, (ops.tanh(c[0] @ w) + c[1].astype("f32"), c[1] + i), None),
        (x, g.constant(np.array(0))),
        trips=trips,
        go=go,
    )
    g.output("y", last * 2.0)
    g.output("number", number)
    rows = (1, 20) if n == "n" else (n,)
    check(
        g,
        *(
            {"x": values(r, 8), "trips": np.array(t), "go": np.array(on)}
            for r in rows
            for t, on in ((0, True), (1, True), (2, True), (9, True), (-1, True), (4, False))
        ),
    )


def test_carries_that_swap() -> None:
    g = Graph("fibonacci")
    a, b, most = g.input("a", (3,), "f32"), g.input("b", (3,), "f32"), g.input("most", (), "f32")
    x, y = ops.while_loop(lambda c: ops.max(c[0]) < most, lambda c: (c[1], c[0] + c[1]), (a, b))
    g.output("x", x)
    g.output("y", y)
    check(
        g, *({"a": values(3) ** 2, "b": values(3, seed=1) ** 2, "most": np.float32(m)} for m in (0, 3, 9, 40))
    )


def nested(inner: Callable[[Node], Node]) -> Graph:
    """A scan over rows whose body branches into `inner`."""
    g = Graph("nested")
    x, h = g.input("x", ("n", 6), "f32"), g.input("h", (6,), "f32")

    def step(carry: Node, row: Node) -> tuple[Node, Node]:
        new = ops.cond(ops.sum(row) > 0.0, lambda c: inner(c + row), lambda c: c * 0.5, carry)
        return new, new + row

    last, every = ops.scan(step, h, x)
    g.output("last", last)
    g.output("every", every)
    return g


def halved(x: Node) -> Node:
    made: Node = ops.while_loop(lambda c: ops.max(ops.abs(c)) > 0.25, lambda c: c * 0.5, x)
    return made


@pytest.mark.parametrize("inner", [ops.tanh, halved], ids=["kernel", "loop"])
def test_nesting(inner: Callable[[Node], Node]) -> None:
    check(nested(inner), *({"x": values(n, 6, seed=n), "h": values(6)} for n in (0, 1, 4, 9)))


def test_a_scan_inside_a_loop() -> None:
    g = Graph("sums")
    x, most = g.input("x", (4, 3), "f32"), g.input("most", (), "f32")

    def step(c: Node) -> Node:
        _, sums = ops.scan(lambda total, row: (total + row, total + row), ops.zeros((3,), "f32"), c)
        made: Node = sums * 1.25
        return made

    g.output("y", ops.while_loop(lambda c: ops.max(ops.abs(c)) < most, step, x))
    check(g, *({"x": values(4, 3), "most": np.float32(m)} for m in (0.0, 1.0, 10.0, 500.0)))


def test_loops_of_no_steps_need_no_host() -> None:
    g = Graph("none")
    last, every = ops.scan(
        lambda h, x: (ops.tanh(h + x), h), g.input("h", (5,), "f32"), g.input("x", ("n", 5), "f32")
    )
    g.output("last", last)
    g.output("every", every)
    check(g, *({"h": values(5), "x": values(n, 5)} for n in (0, 3, 0)))


def test_sizes_that_data_decide_stay_on_the_host_and_are_named() -> None:
    g = Graph("rows")
    x = g.input("x", (4,), "f32")
    _, rows = ops.loop(lambda i, c: (ops.sum(c) < 9.0, c + 1.0, c), x, trips=g.input("trips", (), "i64"))
    g.output("y", rows)
    program = rlx.compile(g)
    (thunk,) = program.stats["host_thunks"]
    assert thunk["why"] == "how many rows it stacks depends on data"
    feed = {"x": values(4), "trips": np.array(5)}
    np.testing.assert_allclose(program.run(feed)["y"], evaluate(g, feed)["y"], rtol=1e-6)


def test_programs_with_branches_are_saved_and_bound(tmp_path: Any) -> None:
    program = rlx.compile(branching("n"))
    program.save(tmp_path / "b.rlx")
    again = rlx.load(tmp_path / "b.rlx")
    for n, p in ((3, True), (5, False)):
        feed = {"x": values(n, 24), "p": np.array(p)}
        want = program.run(feed)
        out = {name: np.empty_like(a) for name, a in want.items()}
        run = again.bind(feed, out)
        run()
        assert all(out[name].tobytes() == want[name].tobytes() for name in want)
        feed["p"][...] = not p
        run()
        assert out["y"].tobytes() == program.run(feed)["y"].tobytes()


# -- the plan knows


def test_plans_of_bodies_are_written_and_read() -> None:
    for g in (branching("n"), collatz(), nested(halved)):
        lir = plan(g, assume={"n": 5})
        again = LirModule.from_text(lir.to_text())
        assert again.to_text() == lir.to_text() and again.fingerprint() == lir.fingerprint()
        for n in (1, 12):
            assert again.planner.plan({"n": n} if lir.dynamic_symbols() else {}) is not None


def test_workspace_is_part_of_the_arena() -> None:
    lir = plan(nested(halved), assume={"n": 5})
    (work,) = lir.plan.work.values()
    assert lir.plan.arena_size >= work.slot.offset + work.slot.size
    assert lir.plan.lower_bound() >= work.slot.size
    assert work.carries == 1 and work.bodies[0].work


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda slot: LirBufferSlot(slot.offset, slot.size - 64), "its bodies need"),
        (lambda slot: LirBufferSlot(slot.offset + 8, slot.size), "workspace"),
        (lambda slot: LirBufferSlot(1 << 30, slot.size), "its bodies need"),
        (lambda slot: LirBufferSlot(slot.offset, slot.size, "state"), "its bodies need"),
    ],
)
def test_a_workspace_in_the_wrong_place_is_found(change: Any, message: str) -> None:
    lir = plan(nested(halved), assume={"n": 5})
    ((node, work),) = lir.plan.work.items()
    from dataclasses import replace

    broken = replace(lir.plan, work={node: replace(work, slot=change(work.slot))})
    with pytest.raises(PlanError, match=message):
        broken.check()


def test_a_workspace_over_a_value_is_found() -> None:
    from dataclasses import replace

    g = Graph("two")
    x, p = g.input("x", (64,), "f32"), g.input("p", (), "bool")
    a = ops.softmax(x, axis=-1)
    y = ops.cond(p, lambda v: ops.softmax(v, axis=-1) @ ops.zeros((64, 8), "f32"), lambda v: v[:8] * 2.0, a)
    g.output("y", ops.softmax(y, axis=-1))
    lir = plan(g)
    ((node, work),) = lir.plan.work.items()
    value = next(o.id for o in lir.mir.nodes[node].operands if o.id in lir.plan.lifetimes)
    slot = LirBufferSlot(lir.plan.assignments[value].offset, work.slot.size)
    sizes = {**lir.plan.space_sizes, "activation": 1 << 20}
    broken = replace(lir.plan, work={node: replace(work, slot=slot)}, space_sizes=sizes)
    with pytest.raises(PlanError, match="overlap"):
        broken.check()
    with pytest.raises(PlanError, match="no workspace"):
        replace(lir.plan, work={}).check()


def test_explain_shows_the_kernels_of_bodies() -> None:
    program = rlx.compile(nested(halved))
    page = program.explain()
    for line in ("then:", "else:", "map: mul", "loop ->"):
        assert line in page
    (node,) = (program.graph.nodes[k] for k in program.lir.plan.schedule)
    assert program.describe(node) == f"%{node.id} (scan)"
    assert program.stats["kernels"] == 5


# -- loops that take long


def counting() -> Graph:
    g = Graph("counting")
    start, most = g.input("start", (), "i64"), g.input("most", (), "i64")
    g.output("y", ops.while_loop(lambda c: c < most, lambda c: c + 1, start))
    return g


@pytest.mark.parametrize("threads", [1, 2])
def test_a_loop_that_pauses_goes_on_where_it_was(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlx.runtime.native.driver import NativeProgram

    entered: list[int] = []
    enter = NativeProgram._enter
    monkeypatch.setattr(NativeProgram, "_enter", lambda self: (entered.append(1), enter(self))[1])
    program = rlx.compile(counting(), threads=threads)
    most, runs = 100_000, 0
    while len(entered) == runs:  # a run entered once was over before the first pause was due
        most, runs = 4 * most, runs + 1
        assert program.run({"start": np.array(0), "most": np.array(most)})["y"] == most


@pytest.mark.parametrize("threads", [1, 2])
def test_an_endless_loop_can_be_interrupted(threads: int) -> None:
    import signal

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    program = rlx.compile(counting(), threads=threads)
    old = signal.signal(signal.SIGALRM, stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            program.run({"start": np.array(0), "most": np.array(1 << 60)})
    finally:
        signal.signal(signal.SIGALRM, old)
    assert program.run({"start": np.array(3), "most": np.array(10)})["y"] == 10


# -- traced functions: every dim is a symbol


def bounded(x: Any, w: Any) -> Any:
    y = ops.cond(ops.sum(x) > 0.0, lambda a: ops.tanh(a @ w), lambda a: (a @ w) * 2.0, x)
    z = ops.while_loop(lambda c: ops.sum(c * c) > 1.0, lambda c: c * 0.5, y, max_trips=8)
    return ops.sum(z * z)


@pytest.mark.parametrize("sign", [1, -1])
def test_gradients_run_natively(sign: int) -> None:
    step = rlx.jit(rlx.value_and_grad(bounded, argnums=(1,)))
    x, w = np.abs(values(4, 6)) * np.float32(sign), values(6, 5, seed=1)
    _, (slope,) = step(x, w)
    assert not step.program(x, w).stats["host_thunks"]
    toward, eps = values(6, 5, seed=2), np.float32(1e-2)
    change = (step(x, w + eps * toward)[0] - step(x, w - eps * toward)[0]) / (2 * eps)
    np.testing.assert_allclose((slope * toward).sum(), change, rtol=1e-2, atol=1e-3)


def test_assumptions_of_bodies_are_guards() -> None:
    """Sizes that only a body wants equal: other ones are refused when they come, not when it is compiled."""
    g = Graph("guarded")
    x, w = g.input("x", (3, "a"), "f32"), g.input("w", ("b", 4), "f32")
    p = g.input("p", (), "bool")
    g.output("y", ops.cond(p, lambda: x @ w, lambda: ops.zeros((3, 4), "f32")))
    program = rlx.compile(g)
    feed = {"x": values(3, 5), "w": values(5, 4), "p": np.array(True)}
    np.testing.assert_allclose(program.run(feed)["y"], feed["x"] @ feed["w"], rtol=1e-5, atol=1e-6)
    with pytest.raises(RlxError, match="equal"):
        program.run({**feed, "w": values(6, 4)})


def test_branches_of_a_saved_program_keep_their_own_guards(tmp_path: Path) -> None:
    """A run needs the sizes of the branch that it takes, no others, whichever file the program comes from."""
    g = rlx.Graph("either")
    x, even = g.input("x", ("n",), "f32"), g.input("even", (), "bool")
    four, six = (lambda: ops.sum(ops.reshape(x, (2, 2)))), (lambda: ops.max(ops.reshape(x, (2, 3))))
    g.output("y", ops.cond(even, four, six))
    fresh = rlx.compile(g)
    fresh.save(tmp_path / "either.rlx")
    for program in (fresh, rlx.load(tmp_path / "either.rlx")):
        for count, first, want in ((4, True, 6.0), (6, False, 5.0)):
            feed = {"x": np.arange(count, dtype=np.float32), "even": np.array(first)}
            assert program.run(feed)["y"] == want
            with pytest.raises(KernelError, match=r"chose a branch that assumes other sizes.*equals n"):
                program.run({**feed, "even": np.array(not first)})
