"""Graphs and programs through pickle, copy and processes that are spawned: by the bytes of their files."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_graphs import GRAPHS

import rlx
from rlx.codegen.native import jit
from rlx.dist import Mesh, Shard, run_threads
from rlx.errors import FormatError, UnsupportedError
from rlx.ir.text.write import graph_text
from rlx.runtime.store.artifact import ArtifactWarning

X = np.arange(8, dtype=np.float32).reshape(2, 4)


def through_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


WAYS = [through_pickle, copy.copy, copy.deepcopy]


def network() -> rlx.Graph:
    g = rlx.Graph("net")
    x = g.input("x", ("n", 4), "f32")
    w = g.param("w", (4, 3), "f32", np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3))
    g.output("y", rlx.ops.softmax(x @ w))
    return g


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", GRAPHS)
def test_graphs(name: str, way: Callable[[Any], Any]) -> None:
    graph = GRAPHS[name]()
    made = way(graph)
    assert made is not graph and graph_text(made) == graph_text(graph)
    for kind in ("param_values", "state_values"):
        before, after = getattr(graph, kind), getattr(made, kind)
        assert before.keys() == after.keys()
        for key in before:
            np.testing.assert_array_equal(before[key], after[key])


@pytest.mark.parametrize("way", WAYS)
def test_a_graph_that_is_not_finished(way: Callable[[Any], Any]) -> None:
    graph = rlx.Graph("begun")
    state = graph.state("s", (2,), "f32")
    x = graph.input("x", (2,), "f32")
    _ = x + state  # nobody reads it yet
    made = way(graph)
    made.output("y", made.nodes[-1] * 2.0)
    assert len(graph) == 3 and not graph.outputs and list(made.outputs) == ["y"]


def test_copies_are_graphs_of_their_own() -> None:
    graph = network()
    shallow, deep = copy.copy(graph), copy.deepcopy(graph)
    assert shallow.param_values["w"] is graph.param_values["w"]
    assert not np.shares_memory(deep.param_values["w"], graph.param_values["w"])
    deep.set_param("w", np.zeros((4, 3), np.float32))
    shallow.output("z", shallow.nodes[-1] * 2.0)
    assert list(graph.outputs) == ["y"] and graph.param_values["w"].any()


@pytest.mark.parametrize("way", [through_pickle, copy.deepcopy])
def test_nodes_go_with_their_graph(way: Callable[[Any], Any]) -> None:
    graph = network()
    made, node = way((graph, graph.outputs["y"]))
    assert node is made.outputs["y"]
    assert copy.copy(graph.outputs["y"]) is graph.outputs["y"]


def test_a_damaged_graph_is_refused() -> None:
    data = pickle.dumps(network())
    with pytest.raises(FormatError, match="a pickled graph: part 'source' does not match its checksum"):
        pickle.loads(data.replace(b"softmax", b"softmin"))


@pytest.mark.parametrize("way", WAYS)
def test_programs(way: Callable[[Any], Any]) -> None:
    program = rlx.compile(network(), threads=1, debug="nan")
    want = program(X)
    way(program)  # compiles what the runtime needs to read bytes, if no test has done so before
    before = jit.llvm_compiles
    made = way(program)
    assert (made.threads, made.debug, made.lir.target) == (1, "nan", program.lir.target)
    np.testing.assert_array_equal(made(X), want)
    assert jit.llvm_compiles == before, "its code is in its bytes"
    made.set_param("w", np.zeros((4, 3), np.float32))
    np.testing.assert_array_equal(program(X), want)
    np.testing.assert_array_equal(way(made)(X), np.full((2, 3), np.float32(1) / np.float32(3)))


@pytest.mark.parametrize("way", WAYS)
def test_programs_with_states_and_streamed_weights(way: Callable[[Any], Any]) -> None:
    g = rlx.Graph("sums")
    total = g.state("total", (), "f32", np.float32(10)) + g.input("x", (), "f32")
    g.set_state("total", total)
    g.output("y", total * 1.0)
    stream = way(rlx.compile(g)).stream()
    assert [float(stream.step({"x": np.float32(x)})["y"]) for x in (1, 2)] == [11.0, 13.0]

    g = rlx.Graph("streamed")
    x = g.input("x", (1, 256), "f32")
    for i in range(4):
        values = np.random.default_rng(i).standard_normal((256, 256)).astype(np.float32) / 16
        x = rlx.ops.tanh(x @ g.param(f"w{i}", (256, 256), "f32", values))
    g.output("y", x)
    given = np.ones((1, 256), np.float32)
    program = rlx.compile(g, weight_budget="600KiB")
    made = way(program)
    assert made.stats["streaming"]
    for _ in range(2):
        np.testing.assert_array_equal(made(given), program(given))


def test_no_file_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program = rlx.compile(network())
    made = through_pickle(program)
    made(X)
    assert not list(tmp_path.iterdir())


def test_code_of_somebody_else_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = rlx.compile(network())
    data, want = pickle.dumps(program), program(X)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("RLX_CACHE", str(tmp_path / "cache"))
    with pytest.warns(ArtifactWarning, match="not signed by this user"):
        made = pickle.loads(data)
    np.testing.assert_array_equal(made(X), want)


def test_code_for_another_machine_is_not_looked_for() -> None:
    program = rlx.compile(network())
    make, (data, _, *options) = program.__reduce__()
    made = make(data, "aarch64", *options)
    np.testing.assert_array_equal(made(X), program(X))


def test_states_in_memory_of_the_process_are_refused() -> None:
    g = rlx.Graph("sums")
    total = g.state("total", (), "f32") + g.input("x", (), "f32")
    g.set_state("total", total)
    g.output("y", total * 1.0)
    program = rlx.compile(g, states={})
    with pytest.raises(UnsupportedError, match="keeps its states in memory of this process"):
        pickle.dumps(program)


def test_programs_of_ranks_are_refused() -> None:
    def work(transport: Any) -> None:
        mesh = Mesh({"tp": 2})
        program = rlx.compile(network(), mesh=mesh, shardings={"w": {"tp": Shard(0)}}, transport=transport)
        with pytest.raises(UnsupportedError, match=r"one rank's part .* rlx.load the file there"):
            copy.copy(program)

    run_threads(2, work, heap_size=1 << 20, timeout=120)


SPAWNED = """
import multiprocessing, sys
import numpy as np
import rlx

def work(graph, program, x):
    made = program(x)
    compiled = "llvmlite" in sys.modules
    return made, rlx.compile(graph)(x), compiled

if __name__ == "__main__":
    g = rlx.Graph("net")
    w = g.param("w", (4, 3), "f32", np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3))
    g.output("y", rlx.ops.softmax(g.input("x", ("n", 4), "f32") @ w))
    program, x = rlx.compile(g), np.arange(8, dtype=np.float32).reshape(2, 4)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        made, again, compiled = pool.apply(work, (g, program, x))
    assert (made == program(x)).all() and (again == made).all()
    print("compiler in the child:", compiled)
"""


def test_processes_that_are_spawned(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(SPAWNED)
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=300, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "compiler in the child: False\n"
