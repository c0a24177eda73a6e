"""Chains of kernels in slices: found, proved, placed for any sizes, and run with the same bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sample_models import bert, bert_inputs

import rlx
from rlx import ops
from rlx.api.compile import plan
from rlx.errors import TypeMismatchError
from rlx.ir.dim import sym
from rlx.ir.graph import Graph
from rlx.ir.op import Level, get_op
from rlx.ir.types import parse_type
from rlx.ir.verify import verify
from rlx.kernel.form import Strides
from rlx.kernel.rowwise import view_keeps_rows
from rlx.plan.lir import LirModule
from rlx.plan.memory.certificate import OverBudgetError
from rlx.plan.memory.slices import slices_of
from rlx.plan.memory.split import find_chains
from rlx.reference.lir import run_lir


def feed_forward(rows: int | str = 96, width: int = 32, layers: int = 2) -> Graph:
    """matmul, gelu, matmul, residual and norm, as in a transformer."""
    g, rng = Graph("ffn"), np.random.default_rng(0)
    x = g.input("x", (rows, width), "f32")
    one, zero = g.constant(np.ones(width, np.float32)), g.constant(np.zeros(width, np.float32))
    for i in range(layers):
        up = g.param(f"up{i}", (width, 4 * width), "f32", rng.standard_normal((width, 4 * width), np.float32))
        down = g.param(
            f"down{i}", (4 * width, width), "f32", rng.standard_normal((4 * width, width), np.float32)
        )
        x = ops.layer_norm(x + ops.gelu(x @ up) @ down, one, zero)
    g.output("y", x)
    return g


def convolutions(batch: int = 6) -> Graph:
    g, rng = Graph("convs"), np.random.default_rng(0)
    x, channels = g.input("x", (batch, 3, 16, 16), "f32"), 3
    for i in range(3):
        w = g.param(
            f"w{i}", (16, channels, 3, 3), "f32", rng.standard_normal((16, channels, 3, 3), np.float32)
        )
        x, channels = ops.relu(ops.conv(x, w, padding=((1, 1), (1, 1)))), 16
    x = ops.reshape(ops.max_pool(x, (2, 2), strides=(2, 2)), (batch, -1))
    dense = g.param("dense", (16 * 64, 10), "f32", rng.standard_normal((16 * 64, 10), np.float32))
    g.output("y", ops.softmax(x @ dense, axis=-1))
    return g


def random_inputs(g: Graph, **sizes: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    shapes = {n.attrs["name"]: n.tensor.bind(sizes) for n in g.inputs}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def slices(lir: LirModule) -> list[tuple[int, int]]:
    """(kernels, slices) of every chain."""
    found = [(work, slices_of(lir.plan, lir.mir.nodes[node])) for node, work in lir.plan.work.items()]
    return [(len(work.bodies[0].schedule), cut.count) for work, cut in found if cut is not None]


@pytest.mark.usefixtures("each_origin")
@pytest.mark.parametrize("make", [feed_forward, convolutions])
@pytest.mark.parametrize("share", [0.7, 0.4])
def test_programs_of_fixed_sizes_are_cut_with_the_same_bits(make: object, share: float) -> None:
    g = make()  # type: ignore[operator]
    feed = random_inputs(g)
    free = rlx.compile(g)
    budget = int(free.lir.arena_size * share)
    held = rlx.compile(g, budget=budget)
    assert held.lir.arena_size <= budget
    assert slices(held.lir) and slices(held.lir)[0][1] > 1 and not held.stats["host_thunks"]
    held.lir.plan.check()
    verify(held.lir.mir, Level.MIR)
    np.testing.assert_array_equal(held.run(feed)["y"], free.run(feed)["y"])
    # The oracle multiplies by BLAS, whose bits depend on the number of rows.
    planned, exact = run_lir(held.lir, feed, poison=True), run_lir(free.lir, feed)
    np.testing.assert_allclose(planned["y"], exact["y"], rtol=1e-4, atol=1e-4)


def test_the_least_budget_of_a_cut_program_works() -> None:
    with pytest.raises(OverBudgetError) as caught:
        plan(feed_forward(), budget=100)
    least = caught.value.least
    assert least < plan(feed_forward()).arena_size // 3
    assert any("workspace of slices" in v.type for v in caught.value.alive)
    assert plan(feed_forward(), budget=least).arena_size == least


def test_sizes_decide_how_many_slices_there_are() -> None:
    g = feed_forward("n")
    lir = plan(g, assume={"n": 64}, budget="40KiB")
    counts = []
    for n in (1, 16, 64, 100, 1000):
        try:
            at = lir.specialize({"n": n})
        except OverBudgetError as refusal:
            assert n == 1000 and refusal.least > 40 << 10
            continue
        at.plan.check()
        assert at.arena_size <= 40 << 10 and at.code_key == lir.code_key
        counts.append(slices(at)[0][1])
    assert counts[0] == 1 and counts == sorted(counts) and counts[-1] > 2


@pytest.mark.parametrize("n", [0, 1, 5, 61, 64])
def test_the_last_slice_may_be_shorter(n: int) -> None:
    g = feed_forward("n")
    feed = random_inputs(g, n=n)
    held = rlx.compile(g, budget="16KiB", assume={"n": 64})
    np.testing.assert_array_equal(held.run(feed)["y"], rlx.compile(g).run(feed)["y"])
    planned = run_lir(held.lir, feed, poison=True)["y"]
    np.testing.assert_allclose(planned, held.run(feed)["y"], rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("each_origin")
@pytest.mark.parametrize("seq", [48, "seq"])
def test_a_sequence_of_one_batch_is_cut(seq: int | str) -> None:
    g, rng = Graph("prompt"), np.random.default_rng(0)
    x = g.input("x", (1, seq, 32), "f32")
    for i in range(2):
        up = g.param(f"up{i}", (32, 128), "f32", rng.standard_normal((32, 128), np.float32))
        down = g.param(f"down{i}", (128, 32), "f32", rng.standard_normal((128, 32), np.float32))
        x = x + ops.gelu(x @ up) @ down
    g.output("y", x)
    sizes = {"seq": 48} if seq == "seq" else {}
    free = rlx.compile(g, assume=sizes)
    budget = free.memory(sizes)["activation"] * 6 // 10
    held = rlx.compile(g, assume=sizes, budget=budget)
    assert held.memory(sizes)["activation"] <= budget and slices(held.lir)[0][1] > 1
    held.lir.plan.check()
    verify(held.lir.mir, Level.MIR)
    feed = {"x": rng.standard_normal((1, 48, 32), np.float32)}
    np.testing.assert_array_equal(held.run(feed)["y"], free.run(feed)["y"])
    planned = run_lir(held.lir, feed, poison=True)["y"]
    np.testing.assert_allclose(planned, free.run(feed)["y"], rtol=1e-4, atol=1e-3)


@pytest.mark.usefixtures("each_origin")
def test_attention_is_cut_along_the_batch() -> None:
    g, sizes = bert(2), {"batch": 6, "seq": 16}
    free = rlx.compile(g, assume=sizes)
    budget = free.memory(sizes)["activation"] * 7 // 10
    held = rlx.compile(g, assume=sizes, budget=budget)
    assert held.memory(sizes)["activation"] <= budget
    feed = bert_inputs(6, 16)
    want, got = free.run(feed), held.run(feed)
    for name in want:
        np.testing.assert_array_equal(got[name], want[name])
    run_lir(held.lir, feed, poison=True)
    assert "kernels run in 2 slices of 3 rows, of batch = 6" in held.explain()


def test_size_inputs_that_are_cut_along_are_laid_out_anew() -> None:
    # A run at another size must not go on with the slices of the largest: they would write past the output.
    g, rng = Graph("sized"), np.random.default_rng(0)
    n = g.size("n", 64)
    x = ops.softmax(ops.slice_axis(g.input("x", (64, 32), "f32"), 0, 0, n))
    for i in range(2):
        up = g.param(f"up{i}", (32, 128), "f32", rng.standard_normal((32, 128), np.float32))
        down = g.param(f"down{i}", (128, 32), "f32", rng.standard_normal((128, 32), np.float32))
        x = ops.gelu(x @ up) @ down
    g.output("y", x)  # the chain itself writes the output
    free, held = rlx.compile(g), rlx.compile(g, budget="12KiB")
    verify(held.lir.mir, Level.MIR)  # the symbol has its bounds everywhere
    assert held.lir.planner.inner
    given = rng.standard_normal((64, 32), np.float32)
    for size in (64, 10, 33, 64, 1, 0):
        feed = {"n": size, "x": given}
        np.testing.assert_array_equal(held.run(feed)["y"], free.run(feed)["y"])
        out = np.full((64, 32), 7, np.float32)
        held.bind({"n": np.empty((size, 0), np.int8), "x": given}, {"y": out[:size]})()
        assert (out[size:] == 7).all()  # nothing beyond the rows there are


def test_debug_modes_see_through_slices() -> None:
    g = feed_forward("n")
    feed = random_inputs(g, n=40)
    held = rlx.compile(g, budget="16KiB", debug="poison")
    np.testing.assert_array_equal(held.run(feed)["y"], rlx.compile(g).run(feed)["y"])


def test_cut_programs_are_saved_and_read(tmp_path: Path) -> None:
    g = feed_forward("n")
    feed = random_inputs(g, n=50)
    held = rlx.compile(g, budget="16KiB", assume={"n": 64})
    back = LirModule.from_text(held.lir.to_text(blobs := {}), blobs)
    assert back.fingerprint() == held.lir.fingerprint()
    assert slices(back.specialize({"n": 50})) == slices(held.lir.specialize({"n": 50}))
    held.save(tmp_path / "ffn.rlx")
    loaded = rlx.load(tmp_path / "ffn.rlx")
    np.testing.assert_array_equal(loaded.run(feed)["y"], held.run(feed)["y"])
    assert loaded.memory({"n": 50}) == held.memory({"n": 50})


def chains_of(g: Graph) -> list[int]:
    lir = plan(g, target="x86-64-v3")
    found = find_chains(
        lir.mir, lir.plan.schedule, lir.planner.phases, lir.planner.binding, set(lir.plan.schedule)
    )
    return [len(c.members) for c in found]


def test_what_mixes_rows_is_not_cut() -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((8, 8), np.float32)

    def program(mix: object) -> Graph:
        g = Graph("mix")
        x = g.input("x", (12, 8), "f32") @ g.constant(w)
        g.output("y", mix(x) @ g.constant(w))  # type: ignore[operator]
        return g

    assert chains_of(program(lambda x: ops.softmax(x, axis=1))) == [3]
    for mix in (
        lambda x: ops.softmax(x, axis=0),  # reduces over rows
        lambda x: ops.flip(x, axis=0),  # moves rows
        lambda x: x - ops.slice_axis(x, 0, 0, 1),  # reads another row
        lambda x: ops.cumsum(x, axis=0),
        lambda x: x * ops.reshape(ops.cast(ops.arange(12), "f32"), (12, 1)),  # the number of the row
    ):
        assert not chains_of(program(mix)), mix


def test_views_keep_rows_or_do_not() -> None:
    root = parse_type("f32[rows,4,6]")
    half, turned = parse_type("f32[rows,4,3]"), parse_type("f32[rows,6,4]")
    assert view_keeps_rows(Strides(3, (24, 6, 1)), half, root, "rows")
    assert view_keeps_rows(Strides(0, (24, 1, 6)), turned, root, "rows")
    assert view_keeps_rows(Strides(0, (6, 1)), parse_type("f32[4*rows,6]"), root, "rows")
    assert not view_keeps_rows(Strides(24 * sym("rows"), (-24, 6, 1)), root, root, "rows")  # backwards
    assert not view_keeps_rows(Strides(0, (6, 24, 1)), root, root, "rows")
    assert view_keeps_rows(Strides(0, (0, 1)), parse_type("f32[rows,6]"), parse_type("f32[6]"), "rows")


def test_a_body_that_has_rows_elsewhere_is_refused() -> None:
    body = Graph("body")
    body.set_outputs([abs(body.input("x", (2, "rows"), "f32"))])
    g = Graph("g")
    x = g.input("x", (2, 6), "f32")
    attrs = {"symbol": "rows", "size": 6, "sliced": 1}
    with pytest.raises(TypeMismatchError, match="has no axis of rows rows in front"):
        g.add(get_op("slices"), [x], {**attrs, "axes": (0, 0)}, (body,))
    behind = Graph("body")
    behind.set_outputs([abs(behind.input("x", (1, "rows"), "f32"))])
    with pytest.raises(TypeMismatchError, match=r"axes are \(0, 0\), but its body has rows along \(1, 1\)"):
        g.add(get_op("slices"), [x[:1]], {**attrs, "axes": (0, 0)}, (behind,))


def test_minilm_fits_seventy_percent(zoo_path: object) -> None:
    from rlx.zoo.minilm import load_graph

    g = load_graph(zoo_path("minilm").parent)  # type: ignore[operator]
    sizes = {"batch": 32, "seq": 128}
    free = rlx.compile(g, assume=sizes)
    budget = free.memory(sizes)["activation"] * 7 // 10
    held = rlx.compile(g, assume=sizes, budget=budget)
    assert held.memory(sizes)["activation"] <= budget
    held.lir.specialize(sizes).plan.check()
    rng = np.random.default_rng(0)
    mask = np.ones((32, 128), np.int64)
    mask[3, 70:] = 0
    feed = {"input_ids": rng.integers(0, 30000, (32, 128)), "attention_mask": mask}
    want, got = free.run(feed), held.run(feed)
    for name in want:
        np.testing.assert_array_equal(got[name], want[name])
