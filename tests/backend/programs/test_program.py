"""The compiled program as its users see it: inputs, threads, fixed buffers, sizes from data, states."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.errors import InputError, KernelError, RlxError
from rlx.ir.graph import Graph
from rlx.reference.interpreter import evaluate


def mlp() -> Graph:
    """Symbolic rows, a weight and a bias, a fused epilogue and a row kernel."""
    rng = np.random.default_rng(0)
    g = Graph("mlp")
    x = g.input("x", ("n", 24), "f32")
    w = g.param("w", (24, 40), "f32", rng.standard_normal((24, 40), np.float32))
    b = g.param("b", (40,), "f32", rng.standard_normal(40, np.float32))
    h = ops.gelu(x @ w + b)
    g.output("y", ops.softmax(h, axis=-1))
    g.output("h", h)
    return g


def rows(n: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, 24), np.float32)


def together(*work: Callable[[], Any]) -> None:
    """Run functions in threads of their own; the first exception is raised here."""
    failed: list[BaseException] = []

    def guarded(f: Callable[[], Any]) -> None:
        try:
            f()
        except BaseException as error:
            failed.append(error)

    workers = [threading.Thread(target=guarded, args=(f,)) for f in work]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    if failed:
        raise failed[0]


# --- inputs and outputs


def test_outputs_by_name_and_in_order() -> None:
    g = mlp()
    program, x = rlx.compile(g, threads=2), rows(5)
    want = evaluate(g, {"x": x})
    got = program.run({"x": x})
    assert list(got) == ["y", "h"]
    y, h = program(x)
    for name, again in (("y", y), ("h", h)):
        np.testing.assert_allclose(got[name], want[name], rtol=2e-5, atol=1e-6)
        np.testing.assert_array_equal(again, got[name])


def test_results_belong_to_the_caller() -> None:
    program, x = rlx.compile(mlp(), threads=1), rows(5)
    first = program(x)[0]
    kept = first.copy()
    second = program(rows(5, seed=2))[0]
    assert not np.shares_memory(first, second)
    np.testing.assert_array_equal(first, kept)
    first[...] = 0
    np.testing.assert_array_equal(program(x)[0], kept)


def test_any_memory_order_is_taken() -> None:
    program, x = rlx.compile(mlp(), threads=1), rows(6)
    want = program(x)[0]
    for same in (np.asfortranarray(x), np.repeat(x, 2, axis=0)[::2], x.tolist()):
        given = np.asarray(same, np.float32)
        np.testing.assert_array_equal(program(given)[0], want)
    unaligned = np.zeros(x.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(x.shape)
    unaligned[...] = x
    np.testing.assert_array_equal(program(unaligned)[0], want)


def test_the_bits_do_not_depend_on_the_number_of_threads() -> None:
    g = mlp()
    want = rlx.compile(g, threads=1)(rows(67))
    for threads in (2, 3):
        for a, b in zip(rlx.compile(g, threads=threads)(rows(67)), want, strict=True):
            np.testing.assert_array_equal(a, b)


def test_empty_and_changing_sizes() -> None:
    g = mlp()
    program = rlx.compile(g, threads=2)
    for n in (3, 0, 1, 130, 3, 17, *range(20, 32)):
        got, want = program.run({"x": rows(n)}), evaluate(g, {"x": rows(n)})
        for name, value in want.items():
            np.testing.assert_allclose(got[name], value, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({}, "input 'x' of program 'mlp' is missing"),
        ({"x": rows(2), "z": rows(2)}, "unknown input 'z'; program 'mlp' has: x"),
        ({"x": rows(2).astype(np.float64)}, r"input 'x' is f32\[n,24\], got dtype f64; cast it"),
        ({"x": rows(2)[:, :23]}, r"input 'x'.*\[n,24\].*\[2,23\]"),
        ({"x": rows(2)[0]}, r"input 'x'.*\[24\]"),
    ],
    ids=["missing", "unknown", "dtype", "size", "rank"],
)
def test_refused_inputs(inputs: dict[str, np.ndarray], said: str) -> None:
    program = rlx.compile(mlp(), threads=1)
    with pytest.raises(InputError, match=said):
        program.run(inputs)
    assert program(rows(2))[0].shape == (2, 40)  # a refusal changes nothing


def test_refused_calls() -> None:
    program = rlx.compile(mlp(), threads=1)
    with pytest.raises(InputError, match="takes 1 inputs, got 2"):
        program(rows(1), rows(1))
    with pytest.raises(InputError, match="symbol 'n' needs a size"):
        program.memory()


def test_two_inputs_must_agree_on_a_size() -> None:
    g = Graph("pair")
    g.output("y", g.input("a", ("n",), "f32") + g.input("b", ("n",), "f32"))
    program = rlx.compile(g)
    with pytest.raises(InputError, match="'b'"):
        program(np.ones(2, np.float32), np.ones(3, np.float32))


# --- many threads of Python


def test_one_program_in_many_threads() -> None:
    """Runs of different sizes at the same time, on a pool of two native threads."""
    g = mlp()
    program = rlx.compile(g, threads=2)
    sizes = (1, 3, 8, 33, 100)
    want = {n: rlx.compile(g, threads=1)(rows(n, n)) for n in sizes}

    def work(n: int) -> None:
        x = rows(n, n)
        for _ in range(25):
            for a, b in zip(program(x), want[n], strict=True):
                np.testing.assert_array_equal(a, b)

    together(*(lambda n=n: work(n) for n in sizes), *(lambda: work(8) for _ in range(2)))


def test_programs_of_many_threads_share_the_pool() -> None:
    programs = [rlx.compile(mlp(), threads=2) for _ in range(3)]
    want = programs[0](rows(40))[0]

    def work(program: Any) -> None:
        for _ in range(25):
            np.testing.assert_array_equal(program(rows(40))[0], want)

    together(*(lambda p=p: work(p) for p in programs))


def test_a_failing_run_does_not_disturb_its_neighbours() -> None:
    g = Graph("pick")
    table = g.param("table", (10, 4), "f32", np.arange(40, dtype=np.float32).reshape(10, 4))
    g.output("y", ops.take(table, g.input("ids", ("n",), "i64"), axis=0) * 2.0)
    program = rlx.compile(g, threads=2)
    good, bad = np.array([0, 9, 3]), np.array([0, 10, 3])

    def right() -> None:
        for _ in range(30):
            np.testing.assert_array_equal(program(good)[1], np.arange(36, 40) * 2)

    def wrong() -> None:
        for _ in range(30):
            with pytest.raises(KernelError, match="index"):
                program(bad)

    together(right, wrong, right, wrong)


# --- fixed buffers


def test_bound_buffers_are_read_and_written_in_place() -> None:
    program = rlx.compile(mlp(), threads=2)
    x, y, h = rows(7), np.empty((7, 40), np.float32), np.empty((7, 40), np.float32)
    run = program.bind({"x": x}, {"y": y, "h": h})
    run()
    np.testing.assert_array_equal(y, program(x)[0])
    x[...] = rows(7, seed=9)
    run()
    np.testing.assert_array_equal(y, program(x)[0])
    np.testing.assert_array_equal(h, program(x)[1])


@pytest.mark.parametrize("shift", [0, 1, 64, 4096])
@pytest.mark.parametrize("size", [5, 64])
@pytest.mark.parametrize(
    "body",
    [
        lambda x: x * 2.0 + 1.0,
        lambda x: x @ ops.transpose(x),
        lambda x: ops.transpose(x) * 1.0,
        lambda x: ops.cumsum(ops.flip(x, 0), axis=0),
        lambda x: ops.softmax(x, axis=0) + ops.sum(x, axis=1, keepdims=True),
    ],
    ids=["map", "product", "transpose", "scan", "rows"],
)
def test_a_bound_output_may_lie_over_an_input(body: Callable[[Any], Any], size: int, shift: int) -> None:
    """The plain result, wherever in the input's memory it is written, time after time."""
    g = Graph("over")
    g.output("y", body(g.input("x", (size, size), "f32")))
    program = rlx.compile(g, threads=2)
    count = size * size
    for begin, end in ((0, shift), (shift, 0)):
        memory = np.zeros(count + shift, np.float32)
        x, y = (memory[at : at + count].reshape(size, size) for at in (begin, end))
        run = program.bind({"x": x}, {"y": y})
        for seed in range(2):
            x[...] = np.random.default_rng(seed).random((size, size), np.float32)
            want = program(x)
            run()
            np.testing.assert_array_equal(y, want)


def test_a_bound_output_may_lie_over_the_input_of_another_kernel() -> None:
    g = Graph("turn")
    n = 200_000
    a, b = g.input("a", (n,), "f32"), g.input("b", (n,), "f32")
    g.output("p", ops.cumsum(a, axis=0))
    g.output("q", ops.cumsum(b, axis=0))
    program = rlx.compile(g, threads=2)
    rng = np.random.default_rng(0)
    first, second = rng.random(n, np.float32), rng.random(n, np.float32)
    wanted = program.run({"a": first, "b": second})
    out = np.empty(n, np.float32)
    spoilt = first.copy()
    program.bind({"a": spoilt, "b": second}, {"p": out, "q": spoilt})()
    assert (out == wanted["p"]).all()
    assert (spoilt == wanted["q"]).all()


def test_outputs_that_cannot_be_bound_are_refused() -> None:
    program = rlx.compile(mlp(), threads=1)
    x, memory = rows(7), np.zeros(7 * 40 + 279, np.float32)
    y, h = memory[:280].reshape(7, 40), memory[279:].reshape(7, 40)
    with pytest.raises(InputError, match="outputs 'y' and 'h' share memory"):
        program.bind({"x": x}, {"y": y, "h": h})
    fixed = np.zeros((7, 40), np.float32)
    fixed.flags.writeable = False
    with pytest.raises(InputError, match="output 'h' is an array that cannot be written to"):
        program.bind({"x": x}, {"y": y, "h": fixed})


def test_bound_buffers_stay_alive() -> None:
    def make() -> tuple[Callable[[], None], np.ndarray, np.ndarray]:
        x, y, h = rows(7), np.empty((7, 40), np.float32), np.empty((7, 40), np.float32)
        want = rlx.compile(mlp(), threads=1)(x)[0]
        return rlx.compile(mlp(), threads=1).bind({"x": x}, {"y": y, "h": h}), y, want

    run, y, want = make()
    gc.collect()
    run()
    np.testing.assert_array_equal(y, want)


def test_bindings_of_one_program_are_independent() -> None:
    program = rlx.compile(mlp(), threads=2)
    made = []
    for seed in range(3):
        x, y, h = rows(5, seed), np.empty((5, 40), np.float32), np.empty((5, 40), np.float32)
        made.append((program.bind({"x": x}, {"y": y, "h": h}), y, program(x)[0]))
    together(*(lambda run=run: [run() for _ in range(20)] for run, _, _ in made))
    for _, y, want in made:
        np.testing.assert_array_equal(y, want)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": None}, "input 'x' of program 'mlp' is missing"),
        ({"y": None}, "output 'y' of program 'mlp' is missing"),
        ({"y": np.empty((7, 41), np.float32)}, "output 'y'"),
        ({"y": np.empty((8, 40), np.float32)}, "output 'y'"),
        ({"h": np.empty((7, 40), np.float64)}, "output 'h' is f32"),
        ({"x": np.asfortranarray(rows(7))}, "input 'x' is not contiguous"),
    ],
    ids=["no input", "no output", "columns", "rows", "dtype", "order"],
)
def test_refused_bindings(change: dict[str, Any], said: str) -> None:
    buffers: dict[str, Any] = {
        "x": rows(7),
        "y": np.empty((7, 40), np.float32),
        "h": np.empty((7, 40), np.float32),
    }
    buffers = {k: v for k, v in (buffers | change).items() if v is not None}
    outputs = {k: buffers.pop(k) for k in ("y", "h") if k in buffers}
    with pytest.raises(InputError, match=said):
        rlx.compile(mlp(), threads=1).bind(buffers, outputs)


# --- weights


def test_a_new_weight_reaches_kernels_and_packed_copies() -> None:
    g = mlp()
    program, x = rlx.compile(g, threads=1), rows(4)
    before = program(x)[1]
    w = np.random.default_rng(5).standard_normal((24, 40), np.float32)
    program.set_param("w", w)
    g.param_values["w"] = w
    want = evaluate(g, {"x": x})["h"]
    np.testing.assert_allclose(program(x)[1], want, rtol=2e-5, atol=1e-6)
    assert not np.allclose(before, want)


@pytest.mark.parametrize(
    ("name", "value"), [("v", np.zeros((24, 40), np.float32)), ("w", np.zeros((24, 41), np.float32))]
)
def test_refused_weights(name: str, value: np.ndarray) -> None:
    program = rlx.compile(mlp(), threads=1)
    before = program(rows(2))[0]
    with pytest.raises(RlxError, match=f"'{name}'"):
        program.set_param(name, value)
    np.testing.assert_array_equal(program(rows(2))[0], before)


def test_weights_without_values_are_named_together() -> None:
    """Under the names that the user gave them, though kernels read packed copies."""
    g = Graph("net")
    x = g.input("x", (3, 24), "f32")
    g.output("y", ops.relu(x @ g.param("w", (24, 40), "f32")) @ g.param("v", (40, 8), "f32"))
    program = rlx.compile(g, threads=1)
    with pytest.raises(InputError, match="params 'v', 'w' have no values; give them values with set_param"):
        program(rows(3))
    program.set_param("v", np.ones((40, 8), np.float32))
    with pytest.raises(InputError, match="param 'w' has no value; give it one with set_param"):
        program(rows(3))


# --- sizes that data decide


def test_sizes_from_data() -> None:
    """What is kept is known only at run time; what follows is planned for it, anew for every run."""
    g = Graph("positive")
    x = g.input("x", ("n",), "f32")
    kept = ops.compress(x > 0.0, x, axis=0)
    g.output("scaled", ops.exp(kept) * 2.0)
    g.output("total", ops.sum(kept))
    g.output("all", x * 3.0)
    program = rlx.compile(g, threads=2)
    for values in ([1, -1, 2, -3, 4], [-1, -2, -3, -4, -5], [1, 2, 3, 4, 5], [], [-1.0, 7.0]):
        array = np.array(values, np.float32)
        got, want = program.run({"x": array}), evaluate(g, {"x": array})
        for name, value in want.items():
            assert got[name].shape == value.shape
            np.testing.assert_allclose(got[name], value, rtol=1e-6)


def test_sizes_from_data_that_depend_on_each_other() -> None:
    g = Graph("twice")
    x = g.input("x", ("n",), "i64")
    once = ops.unique(x)
    values = once[0] if isinstance(once, tuple) else once
    g.output("y", ops.compress(values > 2, values, axis=0) * 10)
    program = rlx.compile(g, threads=1)
    for array in (np.array([5, 1, 5, 3, 3]), np.array([1, 2]), np.array([9, 8, 7, 9])):
        np.testing.assert_array_equal(
            program.run({"x": array})["y"], [v * 10 for v in np.unique(array) if v > 2]
        )


def test_sizes_from_data_in_many_threads() -> None:
    g = Graph("positive")
    x = g.input("x", ("n",), "f32")
    g.output("y", ops.compress(x > 0.0, x, axis=0) * 2.0)
    program = rlx.compile(g, threads=2)

    def work(seed: int) -> None:
        x = np.random.default_rng(seed).standard_normal(50).astype(np.float32)
        for _ in range(15):
            np.testing.assert_array_equal(program(x), x[x > 0] * 2)

    together(*(lambda s=s: work(s) for s in range(4)))


# --- host thunks and errors


def test_host_thunks_are_named_with_their_reason() -> None:
    g = Graph("u")
    x = g.input("x", (5,), "i64")
    made = ops.unique(x + 1)
    g.output("y", (made[0] if isinstance(made, tuple) else made) * 2)
    program = rlx.compile(g, threads=1)
    assert [t["op"] for t in program.stats["host_thunks"]] == ["unique"]
    assert all(t["why"] for t in program.stats["host_thunks"])
    np.testing.assert_array_equal(program(np.array([3, 1, 3, 2, 1])), [4, 6, 8])
    with pytest.raises(InputError, match="use run"):
        program.bind({"x": np.zeros(5, np.int64)}, {"y": np.zeros(3, np.int64)})


def test_an_index_out_of_range_names_the_kernel_and_the_line() -> None:
    g = Graph("pick")
    g.output("y", ops.take(g.input("x", (4,), "f32"), g.input("i", (2,), "i64"), axis=0))
    program = rlx.compile(g)
    with pytest.raises(KernelError, match=r"index.*test_program\.py"):
        program(np.ones(4, np.float32), np.array([0, 4]))
    np.testing.assert_array_equal(program(np.arange(4, dtype=np.float32), np.array([3, 0])), [3, 0])


def test_debug_finds_the_first_nan() -> None:
    g = Graph("roots")
    x = g.input("x", (4,), "f32")
    g.output("y", ops.sum(ops.sqrt(x)))
    program = rlx.compile(g, debug="nan")
    assert program(np.ones(4, np.float32)) == 4
    with pytest.raises(KernelError, match=r"NaN or infinity.*test_program\.py"):
        program(np.array([1, -1, 1, 1], np.float32))


# --- states


def test_a_run_starts_from_the_initial_state() -> None:
    g = Graph("counter")
    total = g.state("total", (2,), "f32", init=np.array([10, 20], np.float32))
    new = total + g.input("x", (2,), "f32")
    g.set_state("total", new)
    g.output("y", new)
    program = rlx.compile(g)
    for _ in range(2):
        np.testing.assert_array_equal(program(np.ones(2, np.float32)), [11, 21])
    with pytest.raises(InputError, match="use run"):
        program.bind({"x": np.ones(2, np.float32)}, {"y": np.ones(2, np.float32)})


def test_states_change_together_at_the_end_of_a_run() -> None:
    """One state takes the old value of the other; a third is fed by what was computed."""
    g = Graph("rotate")
    a = g.state("a", (2,), "f32", init=np.array([1, 1], np.float32))
    b = g.state("b", (2,), "f32", init=np.array([2, 2], np.float32))
    g.state("c", (2,), "f32")
    g.set_state("a", b)
    g.set_state("b", a)
    g.set_state("c", a * 10.0 + b)
    g.output("y", a - b)
    program = rlx.compile(g)
    states = program.initial_states({})
    for a_now, c_now in ((2, 12), (1, 21), (2, 12)):
        program._run([], states)
        assert [v[0] for v in states.values()] == [a_now, 3 - a_now, c_now]


# --- facts


def test_memory_is_known_before_the_first_run() -> None:
    program = rlx.compile(mlp(), threads=2)
    small, large = program.memory({"n": 4}), program.memory({"n": 400})
    assert small.keys() == large.keys()
    assert sum(large.values()) > sum(small.values()) > 0


def test_profile_names_every_kernel() -> None:
    program = rlx.compile(mlp(), threads=2)
    spans = program.profile({"x": rows(9)}, rounds=2)
    assert len(spans) == program.stats["kernels"]
    assert all(time >= 0 and program.describe(node) for node, time in spans)
