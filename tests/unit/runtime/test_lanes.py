"""Quick runs of small programs give what others give, and refuse what they refuse."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.errors import InputError, KernelError
from rlx.runtime.native.lane import LARGEST

RNG = np.random.default_rng(5)


def layer(n: Any = 3, threads: int = 1) -> rlx.CompiledProgram:
    """y = x @ w + b, z = x * 2."""
    g = rlx.Graph("layer")
    x, b = g.input("x", (n, 4), "f32"), g.input("b", (5,), "f32")
    w = g.param("w", (4, 5), "f32", np.arange(20, dtype=np.float32).reshape(4, 5))
    g.output("y", x @ w + b)
    g.output("z", x * 2.0)
    return rlx.compile(g, threads=threads)


def feed(n: int = 3) -> dict[str, np.ndarray]:
    return {"x": RNG.integers(-9, 9, (n, 4)).astype(np.float32), "b": np.ones(5, np.float32)}


def check(found: dict[str, np.ndarray], given: dict[str, Any], w: Any = None) -> None:
    x = np.asarray(given["x"], np.float32)
    w = np.arange(20, dtype=np.float32).reshape(4, 5) if w is None else w
    assert list(found) == ["y", "z"]
    np.testing.assert_array_equal(found["y"], x @ w + given["b"])
    np.testing.assert_array_equal(found["z"], x * 2)


def contexts(program: rlx.CompiledProgram) -> list[Any]:
    """All contexts that a program keeps."""
    lanes = [lane.context for lane in program._lanes._idle]
    return lanes + [c for free in program._free.values() for c in free]


@pytest.mark.parametrize("threads", [1, 2])
def test_runs_are_quick_from_the_second_on(threads: int) -> None:
    program, given = layer(threads=threads), feed()
    check(program.run(given), given)
    (lane,) = program._lanes._idle
    for _ in range(3):
        given = feed()
        check(program.run(given), given)
        y, z = program(given["x"], given["b"])
        check({"y": y, "z": z}, given)
    assert program._lanes._idle == [lane]
    assert program.has_run


def test_results_are_the_callers() -> None:
    program, given = layer(), feed()
    results = [program.run(given) for _ in range(3)]
    for found in results:
        found["y"][:] = -1.0
    check(program.run(given), given)
    assert all((found["y"] == -1.0).all() and found["y"].flags.owndata for found in results)
    given["x"][:] = 7.0  # inputs are read when the run begins, each time
    check(program.run(given), given)


def test_what_a_lane_does_not_take_goes_the_long_way() -> None:
    """Buffers, strides, other mappings, arrays that may not be written: all run, in one context."""
    program, given = layer(), feed()
    program.run(given)
    strided = np.repeat(given["x"], 2, 1)[:, ::2]
    locked = given["x"].copy()
    locked.flags.writeable = False
    others: list[Any] = [memoryview(given["x"]), strided, locked, np.asfortranarray(given["x"])]
    for x in others:
        check(program.run({"x": x, "b": given["b"]}), given)
        check(program.run({"b": given["b"], "x": x}), given)
    mapping = type("Mapping", (dict,), {})(given)
    check(program.run(mapping), given)
    assert len(contexts(program)) == 1


def test_errors_are_those_of_the_first_run() -> None:
    given = feed()
    wrong: list[Any] = [
        {"x": given["x"]},
        {**given, "c": given["b"]},
        {"x": given["x"], "c": given["b"]},
        {**given, "x": given["x"].astype(np.float64)},
        {**given, "x": given["x"][:2]},
        {**given, "x": given["x"][None]},
        {**given, "x": None},
        [given["x"], given["b"]],
        None,
    ]
    for bad in wrong:
        messages = []
        for runs in (0, 1, 3):
            program = layer()
            for _ in range(runs):
                program.run(given)
            with pytest.raises(InputError) as caught:
                program.run(bad)
            messages.append(str(caught.value))
            check(program.run(given), given)
        assert len(set(messages)) == 1, messages


def test_a_new_value_of_a_param_counts() -> None:
    program, given = layer(), feed()
    for scale in (1.0, 3.0, -2.0):
        w = np.arange(20, dtype=np.float32).reshape(4, 5) * np.float32(scale)
        program.set_param("w", w)
        for _ in range(3):
            check(program.run(given), given, w)


def test_sizes_that_change() -> None:
    """Lanes are for sizes that come twice in a row; the others share contexts as before."""
    program = layer("n")
    for n in (3, 3, 3, 2, 3, 2, 2, 2, 5, 5, 3):
        given = feed(n)
        check(program.run(given), given)
    given = feed(3)
    program.run(given)
    assert len(program._lanes._idle) == 1
    assert len(contexts(program)) <= 4


def test_an_error_of_a_kernel_is_told_and_forgotten() -> None:
    g = rlx.Graph("rows")
    table = g.constant(np.arange(12, dtype=np.float32).reshape(4, 3))
    g.output("y", rlx.ops.gather(table, g.input("i", (2,), "i64")))
    program = rlx.compile(g, threads=1)
    good, bad = np.array([3, 0]), np.array([3, 4])
    for _ in range(3):
        np.testing.assert_array_equal(program.run({"i": good})["y"][0], [9, 10, 11])
        assert program._lanes._idle
        with pytest.raises(KernelError, match="out of range"):
            program.run({"i": bad})


def test_threads_have_lanes_of_their_own() -> None:
    program = layer()
    failures: list[object] = []
    start = threading.Barrier(6)

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        start.wait()
        for _ in range(300):
            given = {"x": rng.integers(-9, 9, (3, 4)).astype(np.float32), "b": np.full(5, seed, np.float32)}
            try:
                check(program.run(given), given)
            except Exception as e:
                failures.append(e)
                return

    crowd = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for t in crowd:
        t.start()
    for t in crowd:
        t.join()
    assert not failures
    assert len(contexts(program)) <= 6


def test_large_arrays_have_none() -> None:
    g = rlx.Graph("large")
    n = LARGEST // 4 + 1
    g.output("y", g.input("x", (n,), "f32") + 1.0)
    program = rlx.compile(g, threads=1)
    x = np.ones(n, np.float32)
    for _ in range(3):
        assert (program.run({"x": x})["y"] == 2).all()
    assert not program._lanes._idle


def test_states_and_debug_modes_have_none() -> None:
    g = rlx.Graph("sums")
    total = g.state("total", (), "f32") + g.input("x", (), "f32")
    g.set_state("total", total)
    g.output("y", total * 1.0)
    program = rlx.compile(g, threads=1)
    for _ in range(3):
        assert program.run({"x": np.array(2.0, np.float32)})["y"] == 2
    assert not program._lanes._idle
    h = rlx.Graph("watched")
    h.output("y", h.input("x", (3,), "f32") + 1.0)
    watched = rlx.compile(h, threads=1, debug="poison")
    for _ in range(3):
        watched.run({"x": np.ones(3, np.float32)})
    assert not watched._lanes._idle


def test_a_program_that_nobody_needs_is_freed() -> None:
    program, given = layer(), feed()
    for _ in range(3):
        program.run(given)
    gc.collect()
    gc.disable()
    try:
        seen = weakref.ref(program._lanes._idle[0].context)
        del program
        assert seen() is None
    finally:
        gc.enable()
