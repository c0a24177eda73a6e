"""Sizes that data decide: bounds, memory planned for them, guards about them, and what waits for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.api.compile import plan
from rlx.errors import BudgetError, GuardError, PlanError
from rlx.ir.dim import Dim, sym
from rlx.ir.graph import Graph
from rlx.ir.symbols import found_by_data
from rlx.ir.types import type_symbols
from rlx.plan.explain import explain
from rlx.plan.lir import LirModule, LirSegment
from rlx.plan.memory.placer import Placer
from rlx.reference.interpreter import evaluate
from rlx.reference.lir import LirInterpreter, run_lir

TARGET = "x86-64-v3"


def selected() -> tuple[Graph, str]:
    """Elements of 24 that are positive, and a sum with what was there before; the symbol of their number."""
    g = rlx.Graph("selected")
    x = g.input("x", (4, 6), "f32")
    running = ops.cumsum(ops.reshape(x, (24,)), 0)
    some = ops.compress(ops.reshape(x, (24,)) > 0.0, running) * 2.0
    g.output("y", ops.cumsum(some, 0))
    g.output("z", ops.sum(ops.tanh(some)) + running)
    (name,) = found_by_data(g)
    return g, name


def test_a_size_from_data_has_a_slot_at_its_bound() -> None:
    g, name = selected()
    lir = plan(g, target=TARGET)
    assert found_by_data(lir.mir) == {name: 24} and lir.plan.binding == {name: 24}
    for node, slot in lir.plan.assignments.items():
        if name in type_symbols(lir.mir.nodes[node].type):
            assert slot.size == 24 * lir.mir.nodes[node].dtype.itemsize
    lir.plan.check()
    again = LirModule.from_text(lir.to_text())
    assert found_by_data(again.mir) == {name: 24} and again.to_text() == lir.to_text()


def feeds() -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Inputs with none, some and all elements positive, and both results."""
    for limit in (-9.0, 0.0, 9.0, 0.3):
        x = np.random.default_rng(0).uniform(-1, 1, (4, 6)).astype(np.float32) + np.float32(limit)
        running = np.cumsum(x.reshape(-1))
        some = running[x.reshape(-1) > 0] * 2
        yield x, np.cumsum(some), np.tanh(some.astype(np.float64)).sum() + running


def test_runs_of_all_sizes_share_one_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is known before the first run, and no run plans."""
    g, _ = selected()
    compiled = rlx.compile(g)
    before = compiled.memory()
    assert before["activation"] == compiled.lir.arena_size
    next_run = iter(feeds())
    x, y, _ = next(next_run)
    np.testing.assert_allclose(compiled.run({"x": x})["y"], y, rtol=1e-5)
    monkeypatch.setattr(Placer, "plan", lambda *a: pytest.fail("a run was planned"))
    for x, y, z in next_run:
        got = compiled.run({"x": x})
        assert got["y"].shape == y.shape
        np.testing.assert_allclose(got["y"], y, rtol=1e-5)
        np.testing.assert_allclose(got["z"], z, rtol=1e-4)


def test_the_oracle_keeps_values_in_place_when_a_size_is_found() -> None:
    g, name = selected()
    run = LirInterpreter(plan(g, target=TARGET), poison=True)
    for x, y, z in feeds():
        got = run.run({"x": x})
        run.plan.check()
        assert run.plan.binding == {name: len(y)}
        assert run.plan.arena_size == run.module.plan.arena_size
        np.testing.assert_allclose(got["y"], y, rtol=1e-5)
        np.testing.assert_allclose(got["z"], z, rtol=1e-4)


def test_segments_say_what_runs_in_one_piece() -> None:
    g, name = selected()
    lir = plan(g, target=TARGET)
    pieces = lir.segments()
    assert [k for s in pieces for k in s.kernels] == lir.plan.schedule
    (finder,) = [s for s in pieces if s.defines]
    assert finder.defines == (name,) and len(finder.kernels) == 1 and not finder.on_host
    assert f"%{finder.kernels[0]} finds {name} (at most 24)" in explain(lir)
    static = rlx.Graph("static")
    static.output("y", ops.cumsum(static.input("x", (4, 4), "f32"), 1))
    assert len(plan(static, target=TARGET).segments()) == 1
    first = lir.plan.schedule[0]
    assert lir.segments(on_host=[first])[0] == LirSegment((first,), on_host=True)


def test_what_finds_a_size_lives_as_long_as_the_size_is_needed() -> None:
    g = rlx.Graph("counted")
    x = g.input("x", (3, "m"), "f32")
    with g.building():
        count = ops.nonzero(x)[0].shape[0]
        ops.unique(x, axis=0)  # m is its operand's, and its own size nobody has
        y = ops.iota((count,))
    g.output("y", y)
    alive = {g.nodes[i].op.name for i in g.live()}
    assert "nonzero" in alive and "unique" not in alive
    g.set_outputs({"z": ops.exp(x)})
    assert {g.nodes[i].op.name for i in g.live()} == {"input", "exp"}


def test_what_needs_a_size_waits_for_it() -> None:
    """Also where no value is read: positions up to a number that data decides."""
    g = rlx.Graph("positions")
    x = g.input("x", ("n",), "f32")
    with g.building():
        count = ops.nonzero(x)[0].shape[0]
        g.output("y", ops.cumsum(ops.iota((count,)) * 2, 0))
    lir = plan(g, target=TARGET)
    lir.plan.check()
    backwards = dataclasses.replace(lir.plan, schedule=lir.plan.schedule[1:] + lir.plan.schedule[:1])
    with pytest.raises(PlanError, match=r"%\d+ runs before %\d+, which finds its size"):
        backwards.check()
    x_in = np.array([1, 0, 2, 0, 3], np.float32)
    np.testing.assert_array_equal(rlx.compile(g).run({"x": x_in})["y"], [0, 2, 6])
    np.testing.assert_array_equal(run_lir(lir, {"x": x_in}, poison=True)["y"], [0, 2, 6])


def doubled_until_large() -> Graph:
    """A loop that stacks as many rows as it takes to reach 100: nothing bounds their number."""
    g = rlx.Graph("unbounded")
    x = g.input("x", ("n",), "f32")
    _, rows = ops.loop(lambda i, c: (ops.less(c, 100.0), c * 2.0, c + 1.0), ops.sum(x))
    g.output("y", ops.cumsum(ops.exp(rows * -0.01), 0))
    return g


def test_a_size_without_a_bound_splits_the_program() -> None:
    """It is planned again when the size is known."""
    g = doubled_until_large()
    assert list(found_by_data(g).values()) == [None]
    compiled = rlx.compile(g)
    for values in ([1.0, -1.0, 2.0], [3.0, 70.0], [0.25], [1.0] * 40):
        array = np.array(values, np.float32)
        want = evaluate(g, {"x": array})["y"]
        np.testing.assert_allclose(compiled.run({"x": array})["y"], want, rtol=1e-5)
        np.testing.assert_allclose(run_lir(compiled.lir, {"x": array}, poison=True)["y"], want, rtol=1e-5)
    with pytest.raises(GuardError, match="symbol 'trips0' of program 'unbounded' has no size"):
        compiled.lir.specialize({"n": 4})


def selected_of_any() -> tuple[Graph, str, str]:
    """What is positive among n x m, and of that what is below 1: a size, and one that it bounds."""
    g = rlx.Graph("selected")
    x = g.input("x", ("n", "m"), "f32")
    flat = ops.reshape(x, (x.tensor.numel,))
    some = ops.cumsum(ops.compress(flat > 0.0, flat), 0)
    g.output("y", ops.cumsum(some * 2.0, 0))
    g.output("z", ops.cumsum(ops.compress(some < 1.0, some), 0))
    first, second = sorted(found_by_data(g), key=lambda s: int(s.rpartition("_")[2]))
    return g, first, second


def test_a_size_from_data_of_symbolic_size_is_bounded_by_its_expression() -> None:
    g, first, second = selected_of_any()
    n, m = sym("n"), sym("m")
    lir = plan(g, target=TARGET, assume={"n": 3, "m": 5})
    assert found_by_data(lir.mir) == {first: n * m, second: n * m}
    assert lir.plan.binding == {"n": 3, "m": 5, first: 15, second: 15}
    again = LirModule.from_text(lir.to_text())
    assert found_by_data(again.mir) == found_by_data(lir.mir) and again.to_text() == lir.to_text()
    placed = lir.specialize({"n": 4, "m": 9})
    placed.plan.check()
    for node, slot in placed.plan.assignments.items():
        value = lir.mir.nodes[node]
        if {first, second} & set(type_symbols(value.type)):
            assert slot.size == 36 * value.dtype.itemsize
    assert placed.plan.lower_bound() == placed.arena_size > lir.arena_size
    assert f"finds {first} (at most m*n)" in explain(placed)
    with pytest.raises(GuardError, match="symbol 'm' of program 'selected' has no size"):
        lir.specialize({"n": 4})


def test_memory_for_selections_is_known_and_checked_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    g, _, _ = selected_of_any()
    compiled = rlx.compile(g)
    sizes = {"n": 4, "m": 9}
    need = compiled.memory(sizes)["activation"]
    assert need == compiled.lir.specialize(sizes).arena_size
    x = np.random.default_rng(0).standard_normal((4, 9), np.float32) * 0.2
    with monkeypatch.context() as patch:
        want = evaluate(g, {"x": x})
        np.testing.assert_allclose(compiled.run({"x": x})["z"], want["z"], rtol=1e-5)
        patch.setattr(Placer, "plan", lambda *a: pytest.fail("a run was planned"))
        for shift in (-9.0, 0.1, 9.0):  # none, some and all elements are positive
            moved = x + np.float32(shift)
            got, want = compiled.run({"x": moved}), evaluate(g, {"x": moved})
            for name, value in want.items():
                np.testing.assert_allclose(got[name], value, rtol=1e-5)
    tight = rlx.compile(g, assume=sizes, budget=need)
    tight.run({"x": x})
    tight.lir.specialize({"n": 2, "m": 9})
    with pytest.raises(BudgetError):  # though little of it may be needed
        tight.lir.specialize({"n": 40, "m": 90})


@pytest.mark.parametrize("shape", [(9,), ("n",)])
def test_guards_of_a_size_from_data_wait_until_it_is_known(shape: tuple[Dim, ...]) -> None:
    g = rlx.Graph("five")
    x = g.input("x", shape, "f32")
    g.output("y", ops.cumsum(ops.compress(x > 0.0, x) + np.arange(5, dtype=np.float32), 0))
    lir = plan(g, target=TARGET)
    compiled = [rlx.compile(g), rlx.compile(g, debug="poison")]
    good = np.array([1, -1, 2, -1, 3, -2, 4, -3, 5], np.float32)
    for values, holds in ((good, True), (-good, False), (good, True), (-abs(good), False)):
        for run in (lambda feed: run_lir(lir, feed, poison=True), *(p.run for p in compiled)):
            if holds:
                np.testing.assert_array_equal(run({"x": values})["y"], [1, 4, 9, 16, 25])
            else:
                with pytest.raises(GuardError, match=r"assumed 5 equals nonzero_\d+, which does not hold"):
                    run({"x": values})
