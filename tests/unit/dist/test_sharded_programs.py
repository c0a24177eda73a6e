"""Sharded programs, compiled and run on ranks that are threads or processes, against the whole program."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_programs import random_program

import rlx
from machines import another
from rlx import ops
from rlx.dist import Mesh, Partial, RankFailed, Shard, TransportError, run_threads
from rlx.dist.program import RankProgram
from rlx.errors import ConfigError, InputError, UnsupportedError
from rlx.ir.graph import Graph, Node
from rlx.plan.text import parse_module
from rlx.reference.interpreter import evaluate
from sharded_runs import Arrays, Placements, assert_parts, feeds, random_shardings

TP = Mesh({"tp": 2})


def on_ranks(mesh: Mesh, work: Callable[[Any, int], Any], heap: int = 1 << 20) -> list[Any]:
    return run_threads(mesh.size, lambda t: work(t, int(t.this_rank)), heap_size=heap, timeout=120)


def run_sharded(graph: Graph, mesh: Mesh, shardings: Placements, inputs: Arrays) -> list[Arrays]:
    given = feeds(inputs, shardings, mesh)

    def work(transport: Any, rank: int) -> Arrays:
        program = rlx.compile(graph, threads=1, mesh=mesh, shardings=shardings, transport=transport)
        first = program.run(given[rank])
        again = program.run(given[rank])
        for name, value in first.items():
            np.testing.assert_array_equal(value, again[name])
        return first

    return on_ranks(mesh, work)


def mlp(rows: Any = 8) -> tuple[Graph, Arrays, Placements]:
    """Two layers, the first cut by columns, the second by rows."""
    rng = np.random.default_rng(0)
    g = Graph("mlp")
    x = g.input("x", (rows, 16), "f32")

    def weight(name: str, *shape: int) -> Node:
        return g.param(name, shape, "f32", rng.standard_normal(shape).astype(np.float32) / 4)

    hidden = ops.gelu(x @ weight("up", 16, 64) + weight("up_bias", 64))
    g.output("y", hidden @ weight("down", 64, 16) + weight("down_bias", 16))
    shardings: Placements = {
        "up": {"tp": Shard(1)},
        "up_bias": {"tp": Shard(0)},
        "down": {"tp": Shard(0)},
    }
    return g, {"x": rng.standard_normal((8, 16)).astype(np.float32)}, shardings


def test_tensor_parallel_layers_equal_the_whole() -> None:
    g, inputs, shardings = mlp("n")
    assert_parts(run_sharded(g, TP, shardings, inputs), rlx.compile(g).run(inputs), {}, TP, 1e-5)


def test_each_rank_holds_its_part_and_operands_lie_in_the_heap() -> None:
    g, _, shardings = mlp()
    whole = rlx.compile(g, threads=1).stats["weights"]

    def work(transport: Any, rank: int) -> None:
        program = rlx.compile(g, threads=1, mesh=TP, shardings=shardings, transport=transport)
        assert program.stats["weights"] < 0.55 * whole
        assert program.stats["host_thunks"] == []
        (met,) = program.stats["collectives"]
        assert met["what"] == "all_reduce sum over 'tp' (2 ranks)"
        assert met["bytes"] == program.stats["bytes_moved"] == 8 * 16 * 4
        plan = program.lir.plan
        plan.check()
        node = program.graph.nodes[met["node"]]
        assert plan.slot(node.id).space == plan.slot(node.operands[0].id).space == "heap"
        assert plan.slot(node.id).offset == plan.slot(node.operands[0].id).offset  # in place
        assert program.memory()["heap"] == 8 * 16 * 4
        page = program.explain()
        assert "Ranks: tp = 2; 1 collective, each rank receives 512 B in a run" in page
        assert re.search(r"all_reduce sum over 'tp': %\d+ dot_general .* Partial\('sum'\) -> Replicate", page)
        assert "runs on the host" not in page

    on_ranks(TP, work)


def test_plans_with_a_heap_survive_text() -> None:
    g, _, shardings = mlp("n")

    def work(transport: Any, rank: int) -> tuple[str, str]:
        lir = rlx.compile(g, threads=1, mesh=TP, shardings=shardings, transport=transport).lir
        blobs: dict[str, np.ndarray] = {}
        again = parse_module(lir.to_text(blobs), blobs)
        again.specialize({"n": 5}).plan.check()
        return lir.code_key, lir.fingerprint()

    first, second = on_ranks(TP, work)
    assert first == second  # one program for all ranks


def test_set_param_takes_the_whole_value() -> None:
    g, inputs, shardings = mlp()
    value = np.random.default_rng(9).standard_normal((64, 16)).astype(np.float32)

    def work(transport: Any, rank: int) -> Arrays:
        program = rlx.compile(g, threads=1, mesh=TP, shardings=shardings, transport=transport)
        program.set_param("down", value)
        with pytest.raises(InputError, match=r"param 'down' has the whole shape \(64, 16\), got \(32, 16\)"):
            program.set_param("down", value[:32])
        return program.run(inputs)

    whole = rlx.compile(g)
    whole.set_param("down", value)
    assert_parts(on_ranks(TP, work), whole.run(inputs), {}, TP, 1e-5)


@pytest.mark.parametrize("here", [True, False], ids=["code for this machine", "compiled again"])
def test_sharded_programs_are_saved_and_loaded(here: bool, tmp_path: Path) -> None:
    g, inputs, shardings = mlp()
    value = np.random.default_rng(9).standard_normal((64, 16)).astype(np.float32)
    path, target = tmp_path / "mlp.rlx", "host" if here else another()

    def work(transport: Any, rank: int) -> Arrays:
        given: dict[str, Any] = {"threads": 1, "transport": transport}
        made = rlx.compile(g, mesh=TP, shardings=shardings, target=target, **given)
        made.save(path)
        program = rlx.load(path, **given)
        assert isinstance(program, RankProgram)
        assert program.stats["collectives"] == made.stats["collectives"]
        assert program.stats["weights"] <= made.stats["weights"] and bool(program.notes) is not here
        assert "Inserted where placements disagreed" in program.explain()
        for name, got in program.run(inputs).items():
            np.testing.assert_allclose(got, made.run(inputs)[name], rtol=1e-5, atol=1e-5)
        program.set_param("down", value)
        return program.run(inputs)

    whole = rlx.compile(g)
    whole.set_param("down", value)
    assert_parts(on_ranks(TP, work), whole.run(inputs), {}, TP, 1e-5)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mlp.0of2.rlx", "mlp.1of2.rlx"]
    with pytest.raises(TransportError, match=r"rank 0 of 1 has no file mlp\.0of1\.rlx.*mlp\.1of2\.rlx"):
        rlx.load(path)
    with pytest.raises(TransportError, match="is of rank 1 of 2, this is rank 0 of 1"):
        rlx.load(tmp_path / "mlp.1of2.rlx")
    with pytest.raises(ConfigError, match="weight_budget cannot be changed"):
        rlx.load(tmp_path / "mlp.0of2.rlx", weight_budget="1MiB")


def test_bound_buffers_and_growing_shapes() -> None:
    g, _, shardings = mlp("n")
    whole, rng = rlx.compile(g), np.random.default_rng(1)
    batches = [rng.standard_normal((n, 16)).astype(np.float32) for n in (3, 40, 5, 300)]

    def work(transport: Any, rank: int) -> None:
        program = rlx.compile(g, threads=1, mesh=TP, shardings=shardings, transport=transport)
        for x in (*batches, *batches):
            np.testing.assert_allclose(program(x), whole(x), rtol=1e-5, atol=1e-5)
        out = np.empty((40, 16), np.float32)
        run = program.bind({"x": batches[1]}, {"y": out})
        run()
        run()
        np.testing.assert_allclose(out, whole(batches[1]), rtol=1e-5, atol=1e-5)

    on_ranks(TP, work)


def train_graph() -> Graph:
    """Loss and gradients of a small network for a batch."""
    g = Graph("train")
    x, y = g.input("x", ("n", 8), "f32"), g.input("y", ("n", 4), "f32")
    up, down = g.input("up", (8, 16), "f32"), g.input("down", (16, 4), "f32")
    g.output("loss", ops.mean((ops.tanh(x @ up) @ down - y) ** 2.0))
    from rlx.transform.grad import gradient_graph

    return gradient_graph(g, "loss", ["up", "down"])


def test_data_parallel_gradients_are_those_of_the_joint_batch() -> None:
    rng = np.random.default_rng(0)
    shapes = {"x": (12, 8), "y": (12, 4), "up": (8, 16), "down": (16, 4)}
    inputs = {k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}
    mesh = Mesh({"dp": 3})
    shardings: Placements = {"x": {"dp": Shard(0)}, "y": {"dp": Shard(0)}}
    g = train_graph()
    assert_parts(run_sharded(g, mesh, shardings, inputs), rlx.compile(g).run(inputs), {}, mesh, 1e-6)


def test_a_training_step_on_two_ranks_gives_the_weights_of_the_joint_batch() -> None:
    rng = np.random.default_rng(4)
    weights = {"up": rng.standard_normal((8, 16)), "down": rng.standard_normal((16, 4))}
    weights = {k: v.astype(np.float32) / 4 for k, v in weights.items()}
    x, y = (rng.standard_normal((32, n)).astype(np.float32) for n in (8, 4))

    def loss(w: Any, x: Any, y: Any) -> Any:
        return ops.mean((ops.relu(x @ w["up"]) @ w["down"] - y) ** 2.0)

    def updated(w: Any, x: Any, y: Any, average: Callable[[Any], Any]) -> Any:
        _, gradients = rlx.value_and_grad(loss)(w, x, y)
        return {k: w[k] - 0.1 * average(g) for k, g in gradients.items()}

    def work(transport: Any, rank: int) -> Any:
        def average(g: Any) -> Any:
            return ops.all_reduce(g, axis="dp", ranks=2, kind="mean")

        step = rlx.jit(
            lambda w, x, y: updated(w, x, y, average), mesh=Mesh({"dp": 2}), transport=transport, threads=1
        )
        own, mine = weights, slice(16 * rank, 16 * rank + 16)
        for _ in range(3):
            own = step(own, x[mine], y[mine])
        return own

    alone = rlx.jit(lambda w, x, y: updated(w, x, y, lambda g: g), threads=1)
    want = weights
    for _ in range(3):
        want = alone(want, x, y)
    first, second = on_ranks(Mesh({"dp": 2}), work)
    for name in want:
        np.testing.assert_array_equal(first[name], second[name])
        np.testing.assert_allclose(first[name], want[name], rtol=0, atol=1e-6)


def test_minilm_on_two_ranks(zoo_path: Callable[..., Path]) -> None:
    from rlx.zoo.minilm import load_graph, tensor_parallel

    graph = load_graph(Path(zoo_path("minilm")).parent)
    shardings = tensor_parallel(graph)
    rng = np.random.default_rng(0)
    inputs = {"input_ids": rng.integers(0, 30_000, (2, 24)), "attention_mask": np.ones((2, 24), np.int64)}
    inputs["attention_mask"][1, 10:] = 0
    whole = rlx.compile(graph, threads=1)
    want, weights = whole.run(inputs), whole.stats["weights"]

    def work(transport: Any, rank: int) -> Arrays:
        program = rlx.compile(graph, threads=1, mesh=TP, shardings=shardings, transport=transport)
        assert program.stats["weights"] < 0.51 * weights
        assert program.stats["host_thunks"] == []
        assert len(program.stats["collectives"]) == 13  # embeddings, and two sums for each of six layers
        return program.run(inputs)

    for out in on_ranks(TP, work, heap=8 << 20):
        for name, value in want.items():
            assert np.abs(out[name] - value).max() <= 1e-5


def test_collectives_written_by_hand() -> None:
    g = Graph("manual")
    x = g.input("x", (4, 6), "f32")
    over: dict[str, Any] = {"axis": "tp", "ranks": 2}
    g.output("mean", ops.all_reduce(x, kind="mean", **over))
    g.output("all", ops.all_gather(ops.tanh(x), dim=1, **over))
    g.output("part", ops.reduce_scatter(x * 2.0, dim=1, kind="max", **over))
    g.output("turned", ops.all_to_all(x, split=0, concat=1, **over))
    with g.building():
        g.output("first", ops.broadcast(x, root=1, **over) + ops.cast(ops.rank_index(**over), "f32"))
    rng = np.random.default_rng(0)
    given = [{"x": rng.standard_normal((4, 6)).astype(np.float32)} for _ in range(2)]
    a, b = (each["x"] for each in given)

    def work(transport: Any, rank: int) -> Arrays:
        return rlx.compile(g, threads=1, mesh=TP, transport=transport).run(given[rank])

    for rank, out in enumerate(on_ranks(TP, work)):
        np.testing.assert_array_equal(out["mean"], (a + b) / 2)
        np.testing.assert_allclose(out["all"], np.tanh(np.concatenate([a, b], 1)), rtol=1e-5)
        np.testing.assert_array_equal(out["part"], np.split(np.maximum(2 * a, 2 * b), 2, 1)[rank])
        np.testing.assert_array_equal(
            out["turned"], np.concatenate([np.split(v, 2, 0)[rank] for v in (a, b)], 1)
        )
        np.testing.assert_array_equal(out["first"], b + np.float32(rank))


def test_two_axes_of_two_ranks() -> None:
    g, inputs, shardings = mlp()
    mesh = Mesh({"dp": 2, "tp": 2})
    shardings = {**shardings, "x": {"dp": Shard(0)}, "y": {"dp": Shard(0)}}
    got = run_sharded(g, mesh, shardings, inputs)
    assert_parts(got, rlx.compile(g).run(inputs), shardings, mesh, 1e-5)


def test_states_are_cut_too() -> None:
    g = Graph("counter")
    x = g.input("x", (4,), "f32")
    total = g.state("total", (4,), "f32", np.arange(4, dtype=np.float32))
    g.set_state("total", total + x)
    g.output("y", total + x)
    shardings: Placements = {"total": {"tp": Shard(0)}, "x": {"tp": Shard(0)}}
    inputs = {"x": np.ones(4, np.float32)}
    want = {"y": np.arange(4, dtype=np.float32) + 1}
    assert_parts(run_sharded(g, TP, shardings, inputs), want, {}, TP, 0)


def test_streams_of_ranks_keep_their_parts_of_states() -> None:
    g = Graph("decode")
    rng = np.random.default_rng(2)
    x, total = g.input("x", (4, 8), "f32"), g.state("total", (4, 6), "f32")
    grown = total + x @ g.param("into", (8, 6), "f32", rng.standard_normal((8, 6)).astype(np.float32))
    g.set_state("total", grown)
    g.output("y", grown @ g.param("back", (6, 2), "f32", rng.standard_normal((6, 2)).astype(np.float32)))
    steps = [{"x": rng.standard_normal((4, 8)).astype(np.float32)} for _ in range(3)]
    shardings: Placements = {"into": {"tp": Shard(1)}, "total": {"tp": Shard(1)}, "back": {"tp": Shard(0)}}

    def work(transport: Any, rank: int) -> list[Arrays]:
        stream = rlx.compile(g, threads=1, mesh=TP, shardings=shardings, transport=transport).stream()
        return [stream.step(given) for given in steps]

    whole, got = rlx.compile(g, threads=1).stream(), on_ranks(TP, work)
    for number, given in enumerate(steps):
        assert_parts([own[number] for own in got], whole.step(given), {}, TP, 1e-5)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("axes", [{"a": 2}, {"a": 2, "b": 2}], ids=["two ranks", "four ranks"])
def test_random_programs_run_natively_on_ranks(seed: int, axes: dict[str, int]) -> None:
    graph, inputs = random_program(seed + 100)
    mesh = Mesh(axes)
    shardings = random_shardings(graph, mesh, np.random.default_rng(seed))
    got = run_sharded(graph, mesh, shardings, inputs)
    assert_parts(got, evaluate(graph, inputs), shardings, mesh, 2e-4)


def test_a_rank_that_fails_is_named_to_the_others() -> None:
    g, inputs, shardings = mlp()
    seen: dict[int, BaseException] = {}

    def work(transport: Any, rank: int) -> None:
        program = rlx.compile(g, threads=1, mesh=TP, shardings=shardings, transport=transport)
        program.run(inputs)
        if rank == 1:
            raise ValueError("out of cheese")
        try:
            program.run(inputs)
        except RankFailed as e:
            seen[rank] = e
            raise

    with pytest.raises((ValueError, RankFailed)):
        on_ranks(TP, work)
    assert "rank 1 failed: ValueError: out of cheese" in str(seen[0])


def test_refusals() -> None:
    g, inputs, shardings = mlp()
    with pytest.raises(
        TransportError, match=r"has 2 ranks, but the transport has 1; start the job with `rlx launch -n 2`"
    ):
        rlx.compile(g, mesh=TP, shardings=shardings)
    manual = Graph()
    manual.output("y", ops.all_reduce(manual.input("x", (4,), "f32"), axis="tp", ranks=2))
    with pytest.raises(
        UnsupportedError, match="is a collective of the 2 ranks of axis 'tp'; compile with mesh="
    ):
        rlx.compile(manual)
    with pytest.raises(UnsupportedError, match="weight_budget and mesh cannot be combined"):
        rlx.compile(g, mesh=TP, shardings=shardings, weight_budget="1MiB")

    def small_heap(transport: Any, rank: int) -> None:
        program = rlx.compile(g, threads=1, mesh=TP, shardings=shardings, transport=transport)
        with pytest.raises(TransportError, match="needs 512 bytes of heap per rank, the job has 256"):
            program.run(inputs)

    on_ranks(TP, small_heap, heap=256)
    assert Partial() != Partial("max")


SCRIPT = """
import sys, numpy as np, rlx
from rlx import ops
from rlx.dist import Mesh, Shard, init
g = rlx.Graph()
x = g.input("x", ("n", 16), "f32")
w = np.arange(16 * 8, dtype=np.float32).reshape(16, 8) / 100
g.output("y", ops.softmax(x @ g.param("w", (16, 8), "f32", w)))
program = rlx.compile(g, threads=1, mesh=Mesh({"tp": 2}), shardings={"w": {"tp": Shard(0)}})
for n in (2, 50, 3):
    x = np.random.default_rng(n).standard_normal((n, 16)).astype(np.float32)
    np.testing.assert_allclose(program(x), rlx.compile(g, threads=1)(x), rtol=1e-5, atol=1e-6)
sys.stdout.write(f"rank {init().this_rank} fine {len(program.stats['collectives'])}\\n")
"""


def launched(script: Path) -> str:
    """What a script prints on two ranks."""
    start = (
        f"import sys; from rlx.cli.main import main; sys.exit(main(['launch', '-n', '2', {str(script)!r}]))"
    )
    patient = {**os.environ, "RLX_DIST_TIMEOUT": "300"}
    done = subprocess.run(
        [sys.executable, "-c", start], capture_output=True, text=True, timeout=600, check=False, env=patient
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


NATIVE = """
import numpy as np, rlx
from rlx import ops
from rlx.dist import Mesh, init
transport = init()
over = {"axis": "r", "ranks": 2}
g = rlx.Graph()
x = g.input("x", ("n", 6), "f32")
h = x * 2.0
g.output("sum", ops.all_reduce(h, **over) + 1.0)
g.output("most", ops.all_reduce(x, kind="max", **over) + 1.0)
g.output("all", ops.all_gather(h, dim=1, **over) + 1.0)
g.output("columns", ops.reduce_scatter(h, dim=1, **over) + 1.0)
wide = g.input("wide", (8, 6), "f32")
g.output("part", ops.reduce_scatter(wide * 4.0, **over) + 1.0)
g.output("turned", ops.all_to_all(wide * 5.0, split=0, concat=1, **over) + 1.0)
program = rlx.compile(g, threads=2, mesh=Mesh({"r": 2}))
c, d = (np.random.default_rng(r + 9).standard_normal((8, 6)).astype(np.float32) for r in range(2))
for n in (1, 7, 200, 7):
    a, b = (np.random.default_rng(r + n).standard_normal((n, 6)).astype(np.float32) for r in range(2))
    for _ in range(20):
        out = program.run({"x": (a, b)[transport.this_rank], "wide": (c, d)[transport.this_rank]})
    np.testing.assert_array_equal(out["sum"], 2 * a + 2 * b + 1)
    np.testing.assert_array_equal(out["most"], np.maximum(a, b) + 1)
    np.testing.assert_array_equal(out["all"], np.concatenate([2 * a, 2 * b], 1) + 1)
    half = slice(3 * transport.this_rank, 3 * transport.this_rank + 3)
    np.testing.assert_array_equal(out["columns"], (2 * a + 2 * b)[:, half] + 1)
    mine = slice(4 * transport.this_rank, 4 * transport.this_rank + 4)
    np.testing.assert_array_equal(out["part"], (4 * c + 4 * d)[mine] + 1)
    np.testing.assert_array_equal(out["turned"], np.concatenate([5 * c[mine], 5 * d[mine]], 1) + 1)
    (context,) = program._free[(n,)]
    assert len(context.native_meetings) == len(program.stats["collectives"]) == 6, context.steps
    assert len(context.steps) == 1
"""


def test_collectives_between_processes_are_kernels(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(NATIVE)
    launched(script)


FAULT = """
import os, time, numpy as np, rlx
from rlx import ops
from rlx.dist import Mesh, RankFailed, Timeout, TransportError, init
transport = init(timeout=300)
g = rlx.Graph()
x = g.input("x", (256, 64), "f32")
g.output("y", ops.tanh(ops.all_reduce(x * 2.0, axis="r", ranks=2)))
program = rlx.compile(g, threads=THREADS, mesh=Mesh({"r": 2}))
x = np.full((256, 64), 0.1 * (transport.this_rank + 1), np.float32)
out = np.empty_like(x)
run = program.bind({"x": x}, {"y": out})
for _ in range(200):
    run()
np.testing.assert_allclose(out, np.tanh(0.6), rtol=1e-6)
if transport.this_rank == 1:
    FATE
transport._state.timeout = DEADLINE
begin = time.monotonic()
try:
    run()
except (RankFailed, Timeout, TransportError) as e:
    print("named after", round(time.monotonic() - begin), "s:", type(e).__name__, e, flush=True)
"""


# Until the other rank has given up and gone.
LATE = """while transport._why_gone(0) is None: time.sleep(0.05)
    os._exit(0)"""


@pytest.mark.parametrize(
    ("fate", "told"),
    [
        ("os._exit(3)", r"named after \d+ s: RankFailed .*rank 1 died"),
        ("raise ValueError('out of cheese')", r"named after \d+ s: RankFailed .*rank 1 failed: ValueError"),
        (LATE, r"named after \d+ s: Timeout .*rank 1 is late"),
        (
            "transport.barrier()",
            "TransportError the ranks made different calls: rank 0 called all_reduce",
        ),
    ],
    ids=["dies", "raises", "is late", "does something else"],
)
def test_native_meetings_name_who_is_missing(fate: str, told: str, tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    late = fate is LATE  # who is gone is noticed without a deadline
    script.write_text(
        FAULT.replace("FATE", fate)
        .replace("THREADS", "2" if late else "1")
        .replace("DEADLINE", "2" if late else "300")
    )
    command = ["launch", "--no-bind", "-n", "2", str(script)]
    start = f"""
import sys
from rlx.cli.main import main
from rlx.dist import launch
launch.GRACE_SECONDS = 120  # however long the survivor takes to speak
sys.exit(main({command!r}))"""
    done = subprocess.run(
        [sys.executable, "-c", start], capture_output=True, text=True, timeout=600, check=False
    )
    assert re.search(told, done.stdout), done.stdout + done.stderr


def test_the_page_about_ranks_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "ranks.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.S):
        exec(block, names)
    assert "tp = 2; 1 collective, each rank receives" in capsys.readouterr().out
    (first, _), (second, _) = names["results"]
    np.testing.assert_array_equal(first, second)
    assert names["w"].shape == (4, 2)


def test_examples_run() -> None:
    folder = Path(__file__).parents[3] / "examples"
    assert "weights of a rank: 50% of the whole" in launched(folder / "tensor_parallel.py")
    assert "sums inserted by the compiler: after 5 steps" in launched(folder / "data_parallel.py")


def test_ranks_that_are_processes(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    told = launched(script)
    assert "rank 0 fine 1" in told and "rank 1 fine 1" in told
