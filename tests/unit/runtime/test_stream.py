"""Streams: states that survive steps, phases, once inputs, size inputs, handles, files."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.driver import BufferHandle
from rlx.errors import GuardError, InputError, KernelError
from rlx.ir.graph import Graph
from rlx.plan.phase import Phase
from rlx.reference.interpreter import Interpreter

pytestmark = pytest.mark.usefixtures("each_origin")


def summing() -> Graph:
    g = rlx.Graph("sums")
    total = g.state("total", (3,), "f32", init=np.array([1, 2, 3], np.float32)) + g.input("x", (3,), "f32")
    g.set_state("total", total)
    g.output("y", total * 2.0)
    return g


def caching(most: int = 16, heads: int = 2, depth: int = 8) -> Graph:
    """Rows are appended to a cache at position `past`; only the filled part is read."""
    g = rlx.Graph("cache")
    past = g.size("past", maximum=most - 1)
    x = g.input("x", (heads, 1, depth), "f32")
    cache = g.state("cache", (heads, most, depth), "f32")
    with g.building():
        at = ops.dim_value(past)
    new = ops.dynamic_update_slice(cache, x, [at], axes=(1,))
    g.set_state("cache", new)
    seen = new[:, : past + 1]
    scores = ops.softmax(ops.sum(seen * x, axis=2))
    g.output("y", ops.sum(seen * scores.reshape(heads, past + 1, 1), axis=1))
    return g


def predicting() -> Graph:
    """A once input that is prepared by a product, a recurrent state, logits, and a choice after them."""
    g = rlx.Graph("choice")
    rng = np.random.default_rng(1)
    w = g.param("w", (4, 4), "f32", value=rng.standard_normal((4, 4)).astype(np.float32))
    context = ops.tanh(g.input("context", (2, 4), "f32", once=True) @ w)
    h = g.state("h", (2, 4), "f32")
    new = ops.tanh((h + context + g.input("x", (2, 4), "f32")) @ w)
    g.set_state("h", new)
    g.output("context_out", context * 1.0)
    g.output("best", ops.argmax(new * 3.0, axis=1))
    return g


def ones(value: float = 1.0) -> np.ndarray:
    return np.full(3, value, np.float32)


def test_a_run_begins_with_the_initial_state_and_a_stream_goes_on() -> None:
    program = rlx.compile(summing())
    for _ in range(2):
        np.testing.assert_array_equal(program.run({"x": ones()})["y"], [4, 6, 8])
    stream = program.stream()
    np.testing.assert_array_equal(stream.step({"x": ones()})["y"], [4, 6, 8])
    np.testing.assert_array_equal(stream.step({"x": ones()})["y"], [6, 8, 10])
    np.testing.assert_array_equal(stream.state("total").read(), [3, 4, 5])
    stream.reset()
    np.testing.assert_array_equal(stream.step({"x": ones()})["y"], [4, 6, 8])


def test_the_view_of_a_state_is_its_memory() -> None:
    stream = rlx.compile(summing()).stream()
    view = stream.state("total").buffer.numpy()
    stream.step({"x": ones()})
    np.testing.assert_array_equal(view, [2, 3, 4])
    view[:] = 0
    np.testing.assert_array_equal(stream.step({"x": ones(5)})["y"], [10, 10, 10])


def test_handles_bound_at_compile_survive_runs() -> None:
    handle = BufferHandle("total", (3,), "f32")
    program = rlx.compile(summing(), states={"total": handle})
    for i in range(1, 4):
        np.testing.assert_array_equal(program.run({"x": ones()})["y"], ones(2 * i))
    np.testing.assert_array_equal(handle.read(), ones(3))
    assert program.states["total"] is handle
    np.testing.assert_array_equal(program.stream().step({"x": ones()})["y"], [4, 6, 8])  # a state of its own
    shared = program.stream(states={"total": handle})
    np.testing.assert_array_equal(shared.step({"x": ones()})["y"], ones(8))


@pytest.mark.parametrize(
    ("handles", "told"),
    [
        ({"sum": BufferHandle("sum", (3,), "f32")}, "no state 'sum'"),
        ({"total": BufferHandle("total", (4,), "f32")}, r"state 'total' is f32\[3\]"),
        ({"total": BufferHandle("total", (3,), "f64")}, r"its handle f64\[3\]"),
    ],
)
def test_handles_that_do_not_fit_are_refused(handles: dict[str, BufferHandle], told: str) -> None:
    program = rlx.compile(summing())
    with pytest.raises(InputError, match=told):
        program.stream(states=handles)


def test_wrong_inputs_are_refused_and_change_nothing() -> None:
    stream = rlx.compile(summing()).stream()
    stream.step({"x": ones()})
    for wrong, told in (
        ({}, "'x'.*is missing"),
        ({"x": ones(), "z": ones()}, "'z' is not an input of every step"),
        ({"x": np.ones(4, np.float32)}, "got"),
        ({"x": np.ones(3)}, "dtype"),
    ):
        with pytest.raises(InputError, match=told):
            stream.step(wrong)
    np.testing.assert_array_equal(stream.state("total").read(), [2, 3, 4])
    with pytest.raises(InputError, match="no state 'other'"):
        stream.state("other")


def test_two_interleaved_streams_do_not_disturb_each_other() -> None:
    program, rng = rlx.compile(caching()), np.random.default_rng(0)
    streams = [program.stream() for _ in range(2)]
    g = caching()
    states: list[dict[str, np.ndarray]] = [{}, {}]
    for step in range(12):
        for which, stream in enumerate(streams):
            if which and step % 3 == 0:
                continue  # the second one falls behind
            past = step if which == 0 else step - 1 - step // 3
            x = rng.standard_normal((2, 1, 8)).astype(np.float32)
            run = Interpreter(g)
            want = run.run({"x": x, "past": past}, states=states[which])["y"]
            states[which] = run.new_states()
            np.testing.assert_allclose(stream.step({"x": x, "past": past})["y"], want, rtol=2e-5, atol=1e-6)
    for stream, state in zip(streams, states, strict=True):
        np.testing.assert_array_equal(stream.state("cache").read(), state["cache"])


def test_streams_from_several_threads() -> None:
    program = rlx.compile(caching(), threads=1)
    data = np.random.default_rng(0).standard_normal((4, 12, 2, 1, 8)).astype(np.float32)

    def walk(which: int) -> list[np.ndarray]:
        stream = program.stream()
        return [stream.step({"x": data[which, i], "past": i})["y"] for i in range(12)]

    want = [walk(which) for which in range(4)]
    got: dict[int, list[np.ndarray]] = {}
    threads = [threading.Thread(target=lambda w=w: got.setdefault(w, walk(w))) for w in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for which in range(4):
        for a, b in zip(got[which], want[which], strict=True):
            np.testing.assert_array_equal(a, b)


def test_another_size_makes_no_new_plan() -> None:
    program = rlx.compile(caching())
    stream, x = program.stream(), np.ones((2, 1, 8), np.float32)
    stream.step({"x": x, "past": 0})
    context = stream._context
    for past in range(1, 16):
        stream.step({"x": x, "past": past})
    assert stream._context is context
    assert len(program._plans) == 1
    assert program.memory({"past": 3}) == program.memory({"past": 15})


def test_sizes_beyond_their_bound_are_refused() -> None:
    stream = rlx.compile(caching()).stream()
    x = np.ones((2, 1, 8), np.float32)
    stream.step({"x": x, "past": np.empty((2, 0), np.int8)})  # as an array without elements
    for wrong in (16, -1):
        with pytest.raises(GuardError, match="size 'past' is"):
            stream.step({"x": x, "past": wrong})
    stream.step({"x": x, "past": np.int64(3)})


def test_sizes_that_need_a_plan_of_their_own_get_one() -> None:
    """The rest of a buffer shrinks as the size grows, so room for the largest size would not do."""
    g = rlx.Graph("rest")
    n = g.size("n", maximum=10)
    s = g.state("s", (10, 2), "f32", init=np.arange(20, dtype=np.float32).reshape(10, 2))
    g.set_state("s", s + 1.0)
    rest = ops.slice_axis(s, 0, n, 10 - n)
    g.output("y", ops.exp(rest * -1.0) @ ops.exp(ops.transpose(rest)))
    program, stream = rlx.compile(g), None
    assert program._sizes is not None and program._sizes.room == {}
    stream, states = program.stream(), {}
    for n_now in (3, 9, 0, 10, 3):
        run = Interpreter(g)
        want = run.run({"n": n_now}, states=states)["y"]
        states = run.new_states()
        np.testing.assert_allclose(stream.step({"n": n_now})["y"], want, rtol=1e-4)


def test_host_thunks_and_moving_views_of_weights_see_the_size_in_force() -> None:
    g = rlx.Graph("moving")
    n = g.size("n", maximum=7)
    table = g.param("table", (8, 3), "f32", value=np.arange(24, dtype=np.float32).reshape(8, 3))
    total = g.state("total", (1, 3), "f32")
    row = ops.slice_axis(table, 0, n, 1)
    found = ops.unique(ops.slice_axis(table, 0, 0, n + 1))
    g.set_state("total", total + row)
    g.output("y", total * row)
    g.output("top", ops.max(found[0] if isinstance(found, (tuple, list)) else found))
    program = rlx.compile(g)
    stream, states = program.stream(), {}
    for n_now in (2, 5, 0, 7):
        run = Interpreter(g)
        want = run.run({"n": n_now}, states=states)
        states = run.new_states()
        got = stream.step({"n": n_now})
        for name, value in want.items():
            np.testing.assert_allclose(got[name], value)


def test_the_prologue_runs_once_and_the_epilogue_when_asked() -> None:
    g = predicting()
    program = rlx.compile(g)
    phases = [s.phase for s in program.acquire({}).steps]
    assert phases == [Phase.PROLOGUE, Phase.STEADY_STATE, Phase.EPILOGUE]
    rng = np.random.default_rng(0)
    context = rng.standard_normal((2, 4)).astype(np.float32)
    stream = program.stream({"context": context})
    given, context = context.copy(), context.fill(0)  # the stream keeps what it was given
    states: dict[str, np.ndarray] = {}
    for step in range(6):
        x = rng.standard_normal((2, 4)).astype(np.float32)
        run = Interpreter(g)
        want = run.run({"context": given, "x": x}, states=states)
        states = run.new_states()
        got = stream.step({"x": x}, epilogue=step % 2 == 0)
        assert ("best" in got) == (step % 2 == 0)
        np.testing.assert_allclose(got["context_out"], want["context_out"], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(stream.state("h").read(), states["h"], rtol=1e-4, atol=1e-5)
        if "best" in got:
            np.testing.assert_array_equal(got["best"], want["best"])


def test_new_weights_reach_streams_that_run() -> None:
    g = predicting()
    program = rlx.compile(g)
    once, x = {"context": np.ones((2, 4), np.float32)}, np.ones((2, 4), np.float32)
    stream = program.stream(once)
    stream.step({"x": x})
    weight = np.random.default_rng(5).standard_normal((4, 4)).astype(np.float32)
    state = {"h": stream.state("h").read()}
    program.set_param("w", weight)
    run = Interpreter(g)
    want = run.run({**once, "x": x}, {"w": weight}, state)
    got = stream.step({"x": x})
    np.testing.assert_allclose(got["context_out"], want["context_out"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(stream.state("h").read(), run.new_states()["h"], rtol=1e-5, atol=1e-6)


def test_once_inputs_are_given_to_the_stream_only() -> None:
    program = rlx.compile(predicting())
    context = np.ones((2, 4), np.float32)
    with pytest.raises(InputError, match=r"'context' .* is read once per stream"):
        program.stream()
    with pytest.raises(InputError, match="'x' is not an input declared once"):
        program.stream({"context": context, "x": context})
    with pytest.raises(InputError, match=r"'context' is not an input of every step"):
        program.stream({"context": context}).step({"x": context, "context": context})


def growing() -> Graph:
    """Steps of any length over a prologue whose result must outlive a change of sizes."""
    g = rlx.Graph("growing")
    w = g.param("w", (4, 4), "f32", value=np.eye(4, dtype=np.float32))
    base = ops.tanh(g.input("base", (1, 4), "f32", once=True) @ w) + 1.0
    x = g.input("x", ("n", 4), "f32")
    seen = g.state("seen", (1, 4), "f32")
    total = seen + ops.sum(x @ w + base, axis=0, keepdims=True)
    g.set_state("seen", total)
    g.output("y", (x + base) * total)
    return g


def test_results_of_the_prologue_follow_a_stream_to_other_sizes() -> None:
    g, rng = growing(), np.random.default_rng(0)
    base = rng.standard_normal((1, 4)).astype(np.float32)
    stream = rlx.compile(g).stream({"base": base})
    states: dict[str, np.ndarray] = {}
    for n in (2, 5, 2, 1, 0, 7, 5):
        x = rng.standard_normal((n, 4)).astype(np.float32)
        run = Interpreter(g)
        want = run.run({"base": base, "x": x}, states=states)["y"]
        states = run.new_states()
        np.testing.assert_allclose(stream.step({"x": x})["y"], want, rtol=1e-4, atol=1e-5)


def test_states_of_symbolic_size_are_found_with_the_first_step() -> None:
    g = rlx.Graph("batch")
    new = g.state("s", ("batch", 2), "f32") + g.input("x", ("batch", 2), "f32")
    g.set_state("s", new)
    g.output("y", new * 1.0)
    program = rlx.compile(g)
    stream = program.stream()
    with pytest.raises(InputError, match="the size of state 's' is known with the first step"):
        stream.state("s")
    for i in (1, 2):
        np.testing.assert_array_equal(
            stream.step({"x": np.ones((3, 2), np.float32)})["y"], np.full((3, 2), i)
        )
    with pytest.raises(InputError, match="batch"):
        stream.step({"x": np.ones((4, 2), np.float32)})
    assert program.stream(sizes={"batch": 5}).state("s").shape == (5, 2)


def test_a_step_that_fails_halfway_spoils_its_own_stream_only() -> None:
    g = rlx.Graph("rows")
    i = g.input("i", (1,), "i64")
    table = g.param("table", (4, 2), "f32", value=np.arange(8, dtype=np.float32).reshape(4, 2))
    count = g.state("count", (1, 2), "f32")
    new = ops.exp(count * 0.0) + count
    g.set_state("count", new)
    g.output("y", ops.gather(table, i, 0) + new)
    program = rlx.compile(g)
    stream, other = program.stream(), program.stream()
    good, bad = {"i": np.array([2])}, {"i": np.array([9])}
    stream.step(good)
    other.step(good)
    with pytest.raises(KernelError):
        stream.step(bad)
    with pytest.raises(InputError, match=r"failed halfway; call reset\(\)"):
        stream.step(good)
    np.testing.assert_array_equal(other.step(good)["y"], [[6, 7]])
    stream.reset()
    np.testing.assert_array_equal(stream.step(good)["y"], [[5, 6]])


@pytest.mark.parametrize("debug", ["nan", "poison"])
def test_debug_modes_step_too(debug: str) -> None:
    stream = rlx.compile(predicting(), debug=debug).stream({"context": np.ones((2, 4), np.float32)})
    plain = rlx.compile(predicting()).stream({"context": np.ones((2, 4), np.float32)})
    for i in range(3):
        x = np.full((2, 4), i, np.float32)
        np.testing.assert_array_equal(stream.step({"x": x})["best"], plain.step({"x": x})["best"])
    cached = rlx.compile(caching(), debug=debug).stream()
    for i in range(3):
        cached.step({"x": np.ones((2, 1, 8), np.float32), "past": i})


@pytest.mark.parametrize("make", [summing, caching, predicting])
def test_stateful_programs_in_files(make: type, tmp_path: Path) -> None:
    g: Graph = make()
    program = rlx.compile(g)
    program.save(tmp_path / "p.rlx")
    loaded = rlx.load(tmp_path / "p.rlx")
    once = {"context": np.ones((2, 4), np.float32)} if make is predicting else {}
    streams = [p.stream(once) for p in (program, loaded)]
    for i in range(3):
        inputs = {
            n.attrs["name"]: i if n.attrs["name"] == "past" else np.full(n.shape, i, np.float32)
            for n in g.inputs
            if not n.attrs["once"]
        }
        one, other = (s.step(inputs) for s in streams)
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])
    assert streams[0].states == streams[1].states
    told = [
        [line for line in p.explain().splitlines() if line.startswith("  state ")] for p in (program, loaded)
    ]
    assert told[0] == told[1] and len(told[0]) == len(program.graph.states)
    assert loaded._sizes is None or loaded._sizes.room == {"past": 15}


def test_a_stream_of_a_program_without_states() -> None:
    g = rlx.Graph("plain")
    g.output("y", g.input("x", (3,), "f32") * 2.0)
    stream = rlx.compile(g).stream()
    np.testing.assert_array_equal(stream.step({"x": ones()})["y"], ones(2))
    assert stream.states == ()


def test_large_states_are_one_behind_the_other() -> None:
    """So the last huge page of each is not its own; those of other streams and given handles are apart."""
    g, size = rlx.Graph("large"), (3 << 20) // 4
    for name in ("a", "b", "c"):
        g.set_state(name, g.state(name, (size,), "f32") + g.input(f"x{name}", (1,), "f32"))
    g.set_state("small", g.state("small", (3,), "f32") + 1.0)
    g.output("y", g.state_inputs["a"] * 2.0)
    program, given = rlx.compile(g), BufferHandle("b", (size,), "f32")
    first, second = program.stream(states={"b": given}), program.stream()
    x = {f"x{name}": np.full(1, i, np.float32) for i, name in enumerate("abc", 1)}
    for stream in (first, second):
        stream.step(x)
        for name in "abc":
            assert (stream.state(name).read() == x[f"x{name}"]).all()
    places = {name: second.state(name).buffer for name in ("a", "b", "c", "small")}
    assert [places[name].address - places["a"].address for name in "abc"] == [0, 3 << 20, 6 << 20]
    assert places["a"].memory is places["c"].memory is not places["small"].memory
    buffers = [first.state(name).buffer for name in "abc"] + [places["a"]]
    assert len({id(buffer.memory) for buffer in buffers}) == 3 and buffers[0].memory is buffers[2].memory
