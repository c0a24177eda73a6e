"""debug="poison": native programs run as planned, and a plan or kernel that is wrong is stopped by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from random_programs import random_program
from sample_models import bert, bert_inputs

import rlx
from rlx import ops
from rlx.errors import ConfigError, KernelError
from rlx.ir.graph import Graph
from rlx.plan.lir import LirBufferPlan
from rlx.runtime.program import CompiledProgram

FEED = {"x": np.random.default_rng(0).standard_normal((16, 16), np.float32)}


def two_readers() -> Graph:
    """One value that two kernels read, one after the other."""
    g = rlx.Graph("two")
    x = ops.cumsum(g.input("x", (16, 16), "f32"), axis=1)
    y = ops.cumsum(x, axis=0)
    g.output("y", ops.cumsum(y, axis=1) + ops.cumsum(x, axis=1, reverse=True))
    return g


def with_plan(change: Callable[[LirBufferPlan], None]) -> CompiledProgram:
    """The program above, run by a plan that was tampered with after it was proven."""
    program: CompiledProgram = rlx.compile(two_readers(), debug="poison")
    p = program.lir.plan
    bad = replace(
        p,
        assignments=dict(p.assignments),
        lifetimes=dict(p.lifetimes),
        schedule=list(p.schedule),
        shared=dict(p.shared),
    )
    change(bad)
    program._plans[()] = bad
    return program


def test_a_sound_program_computes_the_same_bits() -> None:
    want = rlx.compile(two_readers()).run(FEED)["y"]
    np.testing.assert_array_equal(rlx.compile(two_readers(), debug="poison").run(FEED)["y"], want)


def freed_early(p: LirBufferPlan) -> None:
    first = p.schedule[0]
    p.lifetimes[first] = (0, 1)


def placed_together(p: LirBufferPlan) -> None:
    first, second = p.schedule[:2]
    p.assignments[second] = p.assignments[first]


def too_late(p: LirBufferPlan) -> None:
    p.schedule.reverse()


BROKEN: list[tuple[Callable[[LirBufferPlan], None], str]] = [
    (freed_early, r"kernel %\d+ \(.*\) reads %\d+, which is freed, or was never written.*test_debug\.py"),
    (placed_together, r"writes %\d+ over %\d+, which is still needed"),
    (too_late, r"reads %\d+, which is freed, or was never written"),
]


@pytest.mark.parametrize("case", BROKEN, ids=[c[0].__name__ for c in BROKEN])
def test_a_broken_plan_is_stopped(case: tuple[Callable[[LirBufferPlan], None], str]) -> None:
    with pytest.raises(KernelError, match=case[1]):
        with_plan(case[0]).run(FEED)


def test_without_poison_the_same_broken_plan_gives_a_lucky_result() -> None:
    """Which is why the mode exists."""
    program = with_plan(freed_early)
    program.debug = None
    assert np.isfinite(program.run(FEED)["y"]).all()


@pytest.mark.parametrize(
    ("offset", "text"), [(0, "wrote at byte 0 of the arena, which is free"), (1023, "wrote past the end")]
)
def test_a_kernel_that_writes_where_it_must_not_is_stopped(
    offset: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stray byte, as a wrong kernel would leave it: in free memory, or behind the end of a result."""
    g = rlx.Graph("stray")
    x = ops.cumsum(g.input("x", (15, 17), "f32"), axis=1)
    g.output("y", ops.cumsum(ops.cumsum(x, axis=0), axis=1))
    program = rlx.compile(g, debug="poison")
    run_step = CompiledProgram._run_unwatched
    last = program.lir.plan.schedule[-1] if offset == 0 else program.lir.plan.schedule[0]

    def stray(self: CompiledProgram, context: Any, step: Any) -> Any:
        done = run_step(self, context, step)
        if step.nodes == (last,):
            slots = context.plan.assignments
            first = slots[context.plan.schedule[0]].offset
            context.arena.array[first + offset] = 0
        return done

    monkeypatch.setattr(CompiledProgram, "_run_unwatched", stray)
    with pytest.raises(KernelError, match=text):
        program.run({"x": np.ones((15, 17), np.float32)})


def test_elements_that_no_kernel_wrote_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    g = rlx.Graph("holes")
    g.output("y", ops.cumsum(g.input("x", (8, 8), "f32"), axis=1))
    program = rlx.compile(g, debug="poison")
    monkeypatch.setattr(CompiledProgram, "_run_unwatched", lambda self, context, step: ({}, None))
    with pytest.raises(KernelError, match=r"did not write 64 of 64 elements of %\d+"):
        program.run({"x": np.ones((8, 8), np.float32)})


def test_an_encoder_runs_poisoned() -> None:
    g, feed = bert(2), bert_inputs()
    want, got = rlx.compile(g).run(feed), rlx.compile(g, debug="poison").run(feed)
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value)


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_run_poisoned(seed: int) -> None:
    g, feed = random_program(seed, symbolic=bool(seed % 2))
    want, got = rlx.compile(g).run(feed), rlx.compile(g, debug="poison").run(feed)
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value)


def test_sizes_from_data_are_followed() -> None:
    g = Graph("some")
    x = g.input("x", (6,), "f32")
    kept = ops.cumsum(x, axis=0)
    g.output("y", ops.cumsum(ops.compress(x > 0.0, x) * 2.0, axis=0))
    g.output("z", ops.cumsum(kept * 2.0, axis=0))
    program = rlx.compile(g, debug="poison")
    x_in = np.array([1, -1, 2, -2, 3, 0], np.float32)
    got = program.run({"x": x_in})
    np.testing.assert_array_equal(got["y"], [2, 6, 12])
    np.testing.assert_allclose(got["z"], np.cumsum(2 * np.cumsum(x_in)))


def test_convolutions_and_loops_run_poisoned() -> None:
    g = Graph("mixed")
    x = g.input("x", (2, 3, 9, 9), "f32")
    w = g.param("w", (8, 3, 3, 3), "f32", np.random.default_rng(1).standard_normal((8, 3, 3, 3), np.float32))
    y = ops.max_pool(ops.relu(ops.conv(x, w, padding=1)), (3, 3), strides=2)
    last, stacked = ops.scan(lambda c, i: (ops.tanh(c * 0.5 + i), c), ops.sum(y, axis=0) * 0.0, y)
    g.output("last", last)
    g.output("all", stacked)
    feed = {"x": np.random.default_rng(2).standard_normal((2, 3, 9, 9), np.float32)}
    want, got = rlx.compile(g).run(feed), rlx.compile(g, debug="poison").run(feed)
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value)


def test_branches_and_open_loops_run_poisoned() -> None:
    """Their bodies have memory of their own in the arena."""
    g = Graph("branches")
    x = ops.cumsum(g.input("x", (8, 8), "f32"), axis=1)
    y = ops.cond(ops.sum(x) > 0.0, lambda: ops.cumsum(ops.exp(-x), axis=0), lambda: x * 2.0)
    z = ops.while_loop(lambda v: ops.sum(v) < 50.0, lambda v: ops.cumsum(v, axis=1) + 0.5, y * 0.0 + 0.1)
    g.output("y", y)
    g.output("z", ops.cumsum(z, axis=0) + x)
    for sign in (1.0, -1.0):
        feed = {"x": sign * np.random.default_rng(2).random((8, 8), np.float32)}
        want, got = rlx.compile(g).run(feed), rlx.compile(g, debug="poison").run(feed)
        for name, value in want.items():
            np.testing.assert_array_equal(got[name], value)


@pytest.mark.parametrize("mode", ["nan", "poison"])
def test_bound_buffers_are_watched_too(mode: str) -> None:
    program = rlx.compile(two_readers(), debug=mode)
    out = {"y": np.empty((16, 16), np.float32)}
    program.bind(FEED, out)()
    np.testing.assert_array_equal(out["y"], rlx.compile(two_readers()).run(FEED)["y"])
    bad = {"x": np.full((16, 16), np.inf, np.float32)}
    if mode == "nan":
        with pytest.raises(KernelError, match="produced a NaN or infinity"):
            program.bind(bad, out)()


def test_a_program_is_not_made_for_an_unknown_mode() -> None:
    with pytest.raises(ConfigError, match="unknown debug mode 'gdb'; use 'nan' or 'poison'"):
        rlx.compile(two_readers(), debug="gdb")
