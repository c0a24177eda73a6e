"""States: updated in place where that is sound, by a recorded copy elsewhere; every interpreter agrees."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx
from rlx import ops
from rlx.api.compile import plan
from rlx.errors import GuardError, InputError, PlanError, ShapeError
from rlx.ir.graph import Graph
from rlx.ir.text.read import parse_graph
from rlx.plan.lir import LirModule
from rlx.plan.phase import Phase, derive_phases
from rlx.plan.predict import kernel_costs
from rlx.plan.states import why_copied
from rlx.reference.interpreter import Interpreter
from rlx.reference.lir import LirInterpreter

pytestmark = pytest.mark.usefixtures("each_origin")

Arrays = dict[str, np.ndarray]
Feed = Callable[[np.random.Generator], Arrays]


def appending() -> Graph:
    """A cache that grows by a row per step."""
    g = rlx.Graph("append")
    x, at = g.input("x", (2, 1, 4), "f32"), g.input("at", (), "i64")
    cache = g.state("cache", (2, 6, 4), "f32")
    new = ops.dynamic_update_slice(cache, x, [at], axes=(1,))
    g.set_state("cache", new)
    g.output("y", ops.sum(new, axis=1))
    return g


def feed(g: Graph, rng: np.random.Generator) -> Arrays:
    out = {}
    for n in g.inputs:
        if n.dtype.is_float:
            out[n.attrs["name"]] = rng.standard_normal(n.shape).astype(n.dtype.np)
        else:
            out[n.attrs["name"]] = rng.integers(0, 6, n.shape).astype(n.dtype.np)
    return out


def check_against_reference(g: Graph, steps: int = 4) -> LirModule:
    """Steps of the native program and of its plan against the interpreter, states and outputs."""
    program = rlx.compile(g)
    program.lir.plan.check()
    rng = np.random.default_rng(0)
    reference: Arrays = {}
    planned: Arrays = {}
    stream = program.stream()
    for _ in range(steps):
        inputs = feed(g, rng)
        run = Interpreter(g)
        want = run.run(inputs, states=reference)
        reference = run.new_states()
        lir = LirInterpreter(program.lir, poison=True)
        by_plan = lir.run(inputs, states=planned)
        planned = lir.states
        for name, value in stream.step(inputs).items():
            np.testing.assert_allclose(value, want[name], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(by_plan[name], want[name], rtol=1e-4, atol=1e-5)
        for name, value in reference.items():
            np.testing.assert_allclose(stream.state(name).read(), value, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(planned[name], value, rtol=1e-4, atol=1e-5)
    lir_module: LirModule = program.lir
    return lir_module


def test_an_append_is_written_into_the_slot_of_the_state() -> None:
    lir = check_against_reference(appending())
    state, new = lir.mir.states[0].input, lir.mir.states[0].output
    assert lir.plan.assignments[new.id] == lir.plan.assignments[state.id]
    assert lir.plan.shared[new.id] == state.id
    assert lir.plan.in_states() == {new.id: state.id}
    assert lir.plan.arena_size == 0
    assert len(lir.plan.schedule) == 2  # no copy
    (cost,) = [c for c in kernel_costs(lir) if c.node is new]
    assert cost.io.device_traffic_bytes == 2 * 2 * 4 * 4  # the row is read and written, the rest stays


def test_a_chain_of_updates_stays_in_place() -> None:
    g = rlx.Graph("chain")
    x, cache = g.input("x", (1, 4), "f32"), g.state("cache", (6, 4), "f32")
    once = ops.dynamic_update_slice(cache, x, [1], axes=(0,))
    twice = ops.dynamic_update_slice(once, x * 2.0, [3], axes=(0,))
    g.set_state("cache", twice)
    g.output("y", ops.sum(once))
    lir = check_against_reference(g)
    assert set(lir.plan.in_states().values()) == {lir.mir.states[0].input.id}
    assert len(lir.plan.in_states()) == 2


def test_an_old_value_that_is_read_later_costs_a_copy_which_explain_tells() -> None:
    g = rlx.Graph("swap")
    x = g.input("x", (3,), "f32")
    a = g.state("a", (3,), "f32", init=np.ones(3, np.float32))
    b = g.state("b", (3,), "f32", init=np.arange(3, dtype=np.float32))
    kept = g.state("kept", (3,), "f32", init=np.full(3, 5, np.float32))
    g.set_state("a", b)
    g.set_state("b", a)
    g.output("y", a * b + x + kept)
    lir = check_against_reference(g)
    page = rlx.compile(g).explain()
    assert re.search(r"state a: f32\[3\], replaced by a copy, %\d+: its new value lies in other memory", page)
    assert "state kept: f32[3], never replaced" in page
    assert [n.op.name for n in lir.mir.nodes].count("copy") == 3


def test_a_matrix_product_of_a_state_is_copied_and_an_elementwise_update_is_not() -> None:
    g = rlx.Graph("cell")
    w = g.param("w", (3, 3), "f32", value=np.eye(3, dtype=np.float32)[::-1].copy())
    h, c = g.state("h", (2, 3), "f32"), g.state("c", (2, 3), "f32")
    x = g.input("x", (2, 3), "f32")
    g.set_state("h", ops.tanh(h @ w + x))
    g.set_state("c", c * 0.5 + x)
    g.output("y", h + 0.0 * x)
    lir = check_against_reference(g)
    names = {s.name: s.output.op.name for s in lir.mir.states}
    assert names == {"h": "copy", "c": "region"}
    assert why_copied(lir.mir) == {"h": "the kernel that makes its new value reads the old one elsewhere"}


@pytest.mark.parametrize("others", [(), ("product",), ("old",), ("product", "old")], ids="-".join)
@pytest.mark.parametrize("output_first", [False, True])
def test_an_update_that_is_one_kernel_with_other_results_is_in_place(
    others: tuple[str, ...], output_first: bool
) -> None:
    """Results of one kernel may each replace what the kernel reads, if they are stored after that."""
    g = rlx.Graph("together")
    x = g.input("x", (20, 7), "f32")
    s, t = g.state("s", (20, 7), "f32"), g.state("t", (20, 7), "f32")
    new = s * 0.5 + x
    if output_first:
        g.output("y", ops.tanh(new))
    g.set_state("s", new)
    g.set_state("t", t * new + s if "product" in others else s + x * 2.0 if "old" in others else t - x)
    if not output_first:
        g.output("y", ops.tanh(new))
    if "old" in others:
        g.output("z", ops.exp(s) * x)
    lir = check_against_reference(g)
    assert [n.op.name for n in lir.mir.nodes].count("copy") == 0 and why_copied(lir.mir) == {}
    assert len(set(lir.plan.in_states().values())) == 2


def test_a_result_that_is_stored_first_does_not_hide_what_a_later_one_reads() -> None:
    g = rlx.Graph("hidden")
    x, s = g.input("x", (20, 7), "f32"), g.state("s", (20, 7), "f32")
    g.set_state("s", ops.exp(x) * 2.0)
    g.output("y", ops.exp(x) + s)
    check_against_reference(g)


def test_a_state_written_before_it_is_declared() -> None:
    g = rlx.Graph("late")
    y = ops.exp(g.input("x", (3,), "f32"))
    s = g.state("s", (3,), "f32")
    g.set_state("s", y)
    g.output("before", s + 0.0)
    check_against_reference(g)


def test_text_of_stateful_plans_reads_back() -> None:
    lir = plan(appending())
    again = LirModule.from_text(lir.to_text())
    assert again.fingerprint() == lir.fingerprint()
    assert again.plan.in_states() == lir.plan.in_states()
    g = parse_graph(str(appending()))
    assert [s.name for s in g.states] == ["cache"]


@pytest.mark.parametrize("spoil", ["slot", "life"])
def test_a_plan_that_moves_a_state_is_refused(spoil: str) -> None:
    lir = plan(appending())
    text = lir.to_text()
    new = lir.mir.states[0].output.id
    line = next(s for s in text.splitlines() if s.startswith(f"  slot %{new} "))
    other = line.replace("state 0", "state 64") if spoil == "slot" else line.replace("steps 0 1", "steps 0 0")
    assert other != line
    with pytest.raises(PlanError):
        LirModule.from_text(text.replace(line, other))


def test_states_are_replaced_by_values_of_their_own_type() -> None:
    g = rlx.Graph("wrong")
    g.state("s", (3,), "f32")
    with pytest.raises(ShapeError, match="state 's' is f32"):
        g.set_state("s", g.input("x", (4,), "f32"))
    with pytest.raises(InputError, match="no state 't'"):
        g.set_state("t", g.inputs[0])


def test_what_a_state_needs_is_steady_and_sampling_is_epilogue() -> None:
    g = rlx.Graph("phases")
    w = g.param("w", (4, 4), "f32", value=np.eye(4, dtype=np.float32))
    h = g.state("h", (1, 4), "f32")
    new = ops.tanh(h @ w)
    g.set_state("h", new)
    best = ops.argmax(new * 2.0, axis=1)
    g.output("best", best)
    seen = ops.exp(h)
    g.output("seen", seen)
    phases = derive_phases(g)
    assert phases.get(new.id) is Phase.STEADY_STATE
    assert phases.get(best.id) is Phase.EPILOGUE
    assert (
        phases.get(seen.id) is Phase.STEADY_STATE
    )  # it reads the old value, which ends with the steady part
    lir = plan(g)
    order = [lir.plan.phase_of(k) for k in lir.plan.schedule]
    assert order == sorted(order, key=list(Phase).index)


@st.composite
def stateful_graphs(draw: st.DrawFn) -> Graph:
    """States, inputs and values of one shape, combined at random; every state gets some value."""
    g = rlx.Graph("random")
    values = [g.input("x", (4, 4), "f32"), g.input("z", (4, 4), "f32")]
    names = [f"s{i}" for i in range(draw(st.integers(1, 3)))]
    values += [
        g.state(n, (4, 4), "f32", init=np.full((4, 4), i + 1, np.float32)) for i, n in enumerate(names)
    ]
    pick = st.deferred(lambda: st.integers(0, len(values) - 1))
    for _ in range(draw(st.integers(1, 8))):
        a, b = values[draw(pick)], values[draw(pick)]
        kind = draw(st.sampled_from(["add", "mul", "matmul", "update", "transpose", "tanh", "roll"]))
        if kind == "add":
            made = a + b
        elif kind == "mul":
            made = a * b * 0.25
        elif kind == "matmul":
            made = (a @ b) * 0.125
        elif kind == "update":
            row = draw(st.integers(0, 3))
            made = ops.dynamic_update_slice(a, b[1:3], [row], axes=(0,))
        elif kind == "transpose":
            made = a.T
        elif kind == "tanh":
            made = ops.tanh(a)
        else:
            made = ops.concat([a[1:], b[:1]], 0)
        values.append(made)
    for name in names:
        g.set_state(name, values[draw(pick)])
    for i in range(draw(st.integers(1, 2))):
        g.output(f"y{i}", values[draw(pick)])
    return g


@settings(max_examples=25, deadline=None)
@given(stateful_graphs())
def test_random_states_follow_the_reference(g: Graph) -> None:
    check_against_reference(g, steps=3)


def counting() -> Graph:
    g = rlx.Graph("count")
    n, step = g.input("n", ("b",), "f32"), g.input("step", ("b",), "f32")
    g.output("next", n + step)
    g.output("double", n * 2.0)
    return g


def test_inputs_that_take_an_output_become_states() -> None:
    g = counting().with_states({"n": "next"})
    assert list(g.outputs) == ["double"] and [n.attrs["name"] for n in g.inputs] == ["step"]
    stream = rlx.compile(g).stream()
    ones = np.ones(2, np.float32)
    assert [stream.step({"step": ones})["double"].tolist() for _ in range(3)] == [[0, 0], [2, 2], [4, 4]]


@pytest.mark.parametrize(
    ("pairs", "told"),
    [
        ({"m": "next"}, "no input 'm' to make a state of; it has: n, step"),
        ({"n": "nxt"}, "no output 'nxt' for state 'n'; it has: next, double"),
    ],
)
def test_pairs_that_do_not_exist_are_refused(pairs: dict[str, str], told: str) -> None:
    with pytest.raises(InputError, match=told):
        counting().with_states(pairs)


def test_pairs_of_other_types_are_refused() -> None:
    g = rlx.Graph("cast")
    g.output("y", ops.cast(g.input("x", (2,), "f32"), "i32"))
    with pytest.raises(InputError, match=r"state 'x' is f32\[2\], but 'y' is i32\[2\]"):
        g.with_states({"x": "y"})


def test_a_cache_that_grows_by_concatenation_is_no_state() -> None:
    g = rlx.Graph("grow")
    g.output("present", ops.concat([g.input("past", ("n", 2), "f32"), g.input("x", (1, 2), "f32")], 0))
    with pytest.raises(InputError, match=r"state 'past' is f32\[n,2\].*a state keeps its size"):
        g.with_states({"past": "present"})


def test_sizes_of_pairs_that_cannot_be_proved_equal_are_guards() -> None:
    g = rlx.Graph("other")
    x, z = g.input("x", ("n", 2), "f32"), g.input("z", ("m", 2), "f32")
    g.output("sum", ops.sum(x))
    g.output("y", z * 1.0)
    stream = rlx.compile(g.with_states({"x": "y"})).stream(sizes={"n": 3})
    assert [float(stream.step({"z": np.full((3, 2), i, np.float32)})["sum"]) for i in (1, 2, 3)] == [0, 6, 12]
    with pytest.raises(GuardError, match="which does not hold for m=4, n=3"):
        stream.step({"z": np.ones((4, 2), np.float32)})
