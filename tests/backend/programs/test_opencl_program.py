"""Programs on the OpenCL device: values, sizes, memory, host thunks, the discrete gate, and faults."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx import Graph, ops
from rlx.api.compile import plan
from rlx.codegen.opencl.build import OpenCLTarget, build_kernels
from rlx.cost import default_gate
from rlx.driver import DeviceLost, open_device
from rlx.errors import CompileError, InputError, KernelError, UnsupportedError
from rlx.ir.dtype import dtype
from rlx.reference.interpreter import evaluate
from rlx.runtime.device_context import DeviceContext
from rlx.runtime.execution import Given

Array = np.ndarray


@pytest.fixture(autouse=True)
def _opencl(require: Callable[[str], None]) -> Iterator[None]:
    require("opencl")
    table = sys.modules["rlx.ops.control.custom"]._FUNCTIONS  # ops registered by a test do not outlive it
    before = dict(table)
    yield
    table.clear()
    table.update(before)


def compiled(graph: Graph, **options: Any) -> Any:
    return rlx.compile(graph, device="opencl", **options)


def unary(kind: str, shape: tuple[Any, ...], f: Callable[[Any], Any]) -> Graph:
    g = Graph("unary")
    g.output("y", f(g.input("x", shape, kind)))
    return g


def all_patterns(kind: str) -> Array:
    return np.arange(1 << 16, dtype=np.uint16).view(dtype(kind).np)


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_half_precision_converts_every_pattern_exactly(kind: str) -> None:
    """Widening is exact; narrowing rounds to even, checked at every value and around every midpoint."""
    x = all_patterns(kind)
    program = compiled(unary(kind, ("n",), lambda v: ops.cast(v, "f32")))
    wide = program(x)
    want = x.astype(np.float32)
    np.testing.assert_array_equal(np.isnan(wide), np.isnan(want))
    np.testing.assert_array_equal(
        wide.view(np.uint32)[~np.isnan(want)], want.view(np.uint32)[~np.isnan(want)]
    )
    finite = np.sort(want[np.isfinite(want)])
    middle = ((finite[1:].astype(np.float64) + finite[:-1]) / 2).astype(np.float32)
    hard = np.concatenate(
        [want, middle, np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(-np.inf))]
    )
    hard = np.concatenate([hard, np.float32([65519, 65520, 1e9, -1e9, 3.4e38, 1e-8, 1e-40, -0.0])])
    narrow = compiled(unary("f32", ("n",), lambda v: ops.cast(v, kind)))(hard)
    with np.errstate(all="ignore"):
        expected = hard.astype(x.dtype)
    known = ~np.isnan(hard)
    np.testing.assert_array_equal(narrow.view(np.uint16)[known], expected.view(np.uint16)[known])
    assert np.isnan(narrow.astype(np.float32)[~known]).all()


@pytest.mark.parametrize("kind", ["f16", "bf16", "i16", "u16"])
def test_moves_keep_every_bit(kind: str) -> None:
    x = all_patterns(kind).reshape(256, 256)
    got = compiled(unary(kind, (256, 256), lambda v: ops.flip(v.T, axis=0)))(x)
    np.testing.assert_array_equal(got.view(np.uint16), np.ascontiguousarray(x.T[::-1]).view(np.uint16))


@pytest.mark.parametrize("kind", ["i8", "i64", "u16", "u32"])
def test_integers_wrap_and_division_by_zero_is_zero(kind: str) -> None:
    d = dtype(kind)
    edge = [d.min_value, d.max_value, 0, 1, 2, 7, d.max_value - 1, d.min_value + 1]
    x, y = (m.ravel().astype(d.np) for m in np.meshgrid(np.array(edge, d.np), np.array(edge, d.np)))
    g = Graph("division")
    a, b = g.input("x", ("n",), kind), g.input("y", ("n",), kind)
    for name in ("floor_div", "trunc_div", "mod", "fmod", "add", "mul", "maximum"):
        g.output(name, getattr(ops, name)(a, b))
    got, want = compiled(g).run({"x": x, "y": y}), evaluate(g, {"x": x, "y": y})
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)
    assert (got["floor_div"][y == 0] == 0).all() and (got["mod"][y == 0] == 0).all()


@pytest.mark.parametrize("kind", ["f32", "f64", "f16", "bf16"])
def test_nan_is_never_dropped(kind: str) -> None:
    x = np.array([[1, np.nan, -np.inf], [2, 3, np.inf], [-0.0, 0, -1]]).astype(dtype(kind).np)
    g = Graph("nan")
    v = g.input("x", (3, 3), kind)
    for name, y in {
        "relu": ops.relu(v),
        "max": ops.max(v, axis=1),
        "min": ops.min(v, axis=1),
        "argmax": ops.argmax(v, axis=1),
        "both": ops.maximum(v, v.T),
    }.items():
        g.output(name, y)
    got, want = compiled(g).run({"x": x}), evaluate(g, {"x": x})
    for name in want:
        np.testing.assert_array_equal(
            got[name].astype(np.float64), want[name].astype(np.float64), err_msg=name
        )


@pytest.mark.parametrize("kind", ["f64", "i32", "i64", "u64"])
def test_halves_are_rounded_once_from_wide_values(kind: str) -> None:
    """A little beside a midpoint: a detour through f32 would fall onto it and then go the wrong way."""
    if kind == "f64":
        middle = np.array([2049, 4098, 257, 65793, 1 + 2.0**-11, 1 + 2.0**-8])
        near = np.concatenate([middle * (1 + d) for d in (-(2.0**-40), 0, 2.0**-40)])
        x = np.concatenate([near, -near, [0, 1e-320, np.nan, np.inf, 1e300, -65520.0]])
    else:
        bits = dtype(kind).bits
        x = np.array([257 * 2 ** (bits - 10) + d for d in (-1, 0, 1)] + [2049, 65519, 65521], dtype(kind).np)
    g = Graph("narrow")
    v = g.input("x", ("n",), kind)
    g.output("f16", ops.cast(v, "f16"))
    g.output("bf16", ops.cast(v, "bf16"))
    got, want = compiled(g).run({"x": x}), evaluate(g, {"x": x})
    for name in want:
        np.testing.assert_array_equal(
            got[name].astype(np.float64), want[name].astype(np.float64), err_msg=name
        )


def test_floats_become_integers_by_saturation() -> None:
    x = np.float32([np.nan, np.inf, -np.inf, 1e30, -1e30, 2.9, -2.9, 2147483520.0, 0.0])
    g = Graph("casts")
    v = g.input("x", (9,), "f32")
    for kind in ("i8", "u8", "i32", "u32", "i64", "u64"):
        g.output(kind, ops.cast(v, kind))
    got, want = compiled(g).run({"x": x}), evaluate(g, {"x": x})
    for kind, value in want.items():
        np.testing.assert_array_equal(got[kind], value, err_msg=kind)


def test_a_device_without_f64_says_so_and_the_host_computes() -> None:
    g = unary("f64", (4,), lambda v: ops.exp(v))
    lir = plan(g, target="opencl-no-f64", device="opencl")
    (thunk,) = build_kernels(lir, OpenCLTarget(float64=False)).thunks.values()
    assert thunk.why == "dtype f64 needs cl_khr_fp64, which this OpenCL device has not"
    program = compiled(g, target="opencl-no-f64")
    np.testing.assert_allclose(program(np.arange(4.0)), np.exp(np.arange(4.0)))
    assert program.stats["kernels"] == 0


# --- programs -------------------------------------------------------------------------------------


def network() -> Graph:
    rng = np.random.default_rng(0)
    g = Graph("network")
    x = g.input("x", ("rows", 12), "f32")
    w = g.param("w", (12, 8), "f32", value=rng.standard_normal((12, 8), np.float32))
    b = g.param("b", (8,), "f32", value=rng.standard_normal(8, np.float32))
    g.output("y", ops.softmax(ops.gelu(x @ w + b), axis=-1))
    return g


def test_a_program_looks_like_any_other() -> None:
    program, cpu = compiled(network()), rlx.compile(network())
    x = np.random.default_rng(1).standard_normal((5, 12), np.float32)
    np.testing.assert_allclose(program(x), cpu(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(program.run({"x": x})["y"], cpu(x), rtol=1e-5, atol=1e-6)
    out = np.zeros((5, 8), np.float32)
    program.bind({"x": x}, {"y": out})()
    np.testing.assert_array_equal(out, program(x))
    assert program.stats["device"] == "opencl" and program.stats["sync_points"] == 1
    assert program.stats["host_thunks"] == [] and program.lir.options["device"] == "opencl"
    assert program.decisions and program.explain().startswith("network for opencl: 2 kernels")
    assert program.memory({"rows": 5})["input"] == 256 and program.memory({"rows": 5})["scratch"] == 0
    with pytest.raises(InputError, match="takes 1 inputs, got 0"):
        program()


def test_another_size_compiles_nothing() -> None:
    program = compiled(network())
    device: Any = open_device("opencl")
    known = set(device._kernels)
    for rows in (1, 3, 64, 0):
        x = np.full((rows, 12), 0.25, np.float32)
        np.testing.assert_allclose(program(x), evaluate(network(), {"x": x})["y"], rtol=1e-5, atol=1e-6)
    assert set(device._kernels) == known
    special = program.lir.specialize({"rows": 7})
    assert special.code_key == program.lir.code_key and special.buffers.binding == {"rows": 7}


def test_no_size_is_part_of_the_text() -> None:
    def text(rows: int, columns: int) -> str:
        g = unary("f32", (rows, columns), lambda v: ops.softmax(v.T * 3.0, axis=0))
        return build_kernels(plan(g, device="opencl"), OpenCLTarget()).text

    assert text(6, 10) == text(33, 129)
    assert "pragma OPENCL FP_CONTRACT OFF" in text(6, 10)


def test_the_arena_is_device_memory_of_the_planned_size() -> None:
    program = compiled(network())
    plan_ = program.plan_for({"rows": 16})
    context = program._make_context({"rows": 16})
    for space, arena in context.arenas.items():
        assert arena.device == "opencl" and arena.size_bytes() == plan_.sizes()[space]
    id = plan_.io.inputs[0][1]
    assert context.arenas["input"].byte_offset(id) == plan_.assignments[id].offset
    context.arenas["input"].write(id, np.ones((16, 12), np.float32))
    assert context.arenas["input"].read(id).sum() == 192


def test_kernels_touch_nothing_but_their_slots() -> None:
    """Sizes that fill no whole group or row of lanes; every byte that no value owns keeps its guard."""
    program = compiled(network())
    plan_ = program.plan_for({"rows": 7})
    context = program._make_context({"rows": 7})
    guards = {}
    for space, arena in context.arenas.items():
        free = np.ones(arena.size_bytes(), bool)
        for slot in plan_.assignments.values():
            if slot.space == space:
                free[slot.offset : slot.offset + slot.size] = False
        if space != "weight":
            arena.memory.write(0, np.full(arena.size_bytes(), 0xA5, np.uint8))
        guards[space] = (free, arena.memory.read(0, arena.size_bytes())[free])
    x = np.random.default_rng(3).standard_normal((7, 12), np.float32)
    (got,) = program.execute(context, Given([x], {}, {"rows": 7}))
    np.testing.assert_allclose(got, evaluate(network(), {"x": x})["y"], rtol=1e-5, atol=1e-6)
    for space, (free, before) in guards.items():
        after = context.arenas[space].memory.read(0, context.arenas[space].size_bytes())
        np.testing.assert_array_equal(after[free], before, err_msg=space)
    assert sum(len(before) for _, before in guards.values()) > 0


def test_lower_precision_agrees_with_the_host() -> None:
    x = np.random.default_rng(2).standard_normal((9, 12), np.float32)
    for precision in ("bf16", "f16"):
        got = compiled(network(), precision=precision)(x)
        np.testing.assert_allclose(got, rlx.compile(network(), precision=precision)(x), atol=4e-3)
        assert not np.array_equal(got, compiled(network())(x))


def test_params_may_change_and_must_be_there() -> None:
    g = Graph("scale")
    g.output("y", g.input("x", (3,), "f32") * g.param("w", (3,), "f32"))
    program = compiled(g)
    x = np.ones(3, np.float32)
    with pytest.raises(InputError, match="param 'w' has no value; give it one with set_param"):
        program(x)
    for value in (2, 5):
        program.set_param("w", np.full(3, value, np.float32))
        assert program(x).tolist() == [value] * 3


def test_sizes_that_depend_on_data() -> None:
    g = Graph("positive")
    x = g.input("x", ("n",), "f32")
    scaled = x * 2.0
    (where,) = ops.nonzero(scaled > 1.0)
    g.output("where", where)
    g.output("picked", ops.gather(scaled, where, axis=0) + 1.0)
    program = compiled(g)
    for seed in range(3):
        data = np.random.default_rng(seed).standard_normal(50).astype(np.float32)
        want = evaluate(g, {"x": data})
        for name, value in program.run({"x": data}).items():
            np.testing.assert_array_equal(value, want[name])


def test_states_are_uploaded_and_read_back() -> None:
    g = Graph("counter")
    total = g.state("total", (2,), "f32", init=np.array([10, 20], np.float32))
    new = total + g.input("x", (2,), "f32")
    g.set_state("total", new)
    g.output("y", new * 2.0)
    program = compiled(g)
    assert program(np.float32([1, 2])).tolist() == [22, 44]
    assert program(np.float32([1, 2])).tolist() == [22, 44]


def test_streams_keep_states_between_steps() -> None:
    g = Graph("cache")
    x, cache = g.input("x", (1, 4), "f32"), g.state("cache", (8, 4), "f32")
    count = g.state("count", (), "i64")
    new = ops.dynamic_update_slice(cache, x * 2.0, [ops.reshape(count, ())], axes=(0,))
    g.set_state("cache", new)
    g.set_state("count", count + 1)
    g.output("total", ops.sum(new, axis=0))
    streams = [p.stream() for p in (compiled(g), rlx.compile(g))]
    other = streams[0].program.stream()
    for step in range(4):
        row = np.full((1, 4), step + 1, np.float32)
        got, want = (s.step({"x": row}) for s in streams)
        np.testing.assert_array_equal(got["total"], want["total"])
        assert other.step({"x": -row})["total"][0] == -got["total"][0]
    assert streams[0].state("cache").buffer.device == "opencl"
    np.testing.assert_array_equal(streams[0].state("cache").read(), streams[1].state("cache").read())


def test_states_of_streams_stay_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps upload their inputs and nothing else; a state that is a transposed value is right, too."""
    g = Graph("turning")
    x, kept = g.input("x", (3, 3), "f32"), g.state("kept", (3, 3), "f32", init=np.eye(3, dtype=np.float32))
    other = g.state("other", (3, 3), "f32")
    g.set_state("kept", ops.transpose(kept + x, (1, 0)))
    g.set_state("other", kept)  # the old value of another state
    g.output("y", kept - other)
    uploaded: list[int] = []
    original = DeviceContext.upload

    def upload(self: DeviceContext, root: int, array: np.ndarray) -> None:
        uploaded.append(root)
        original(self, root, array)

    monkeypatch.setattr(DeviceContext, "upload", upload)
    ours, theirs = compiled(g).stream(), rlx.compile(g).stream()
    for step in range(4):
        given = {"x": np.arange(9, dtype=np.float32).reshape(3, 3) * (step + 1)}
        np.testing.assert_array_equal(ours.step(given)["y"], theirs.step(given)["y"])
    assert len(uploaded) == 4, "one input per step"
    for name in ("kept", "other"):
        np.testing.assert_array_equal(ours.state(name).read(), theirs.state(name).read())
    ours.reset()
    np.testing.assert_array_equal(ours.state("kept").read(), np.eye(3, dtype=np.float32))


def test_a_failed_step_leaves_states_on_the_device_as_they_were() -> None:
    g = Graph("picking")
    total, at = g.state("total", (2,), "f32"), g.input("at", (1,), "i64")
    new = total + ops.gather(g.input("x", (4,), "f32"), at)
    g.set_state("total", new)
    g.output("y", new)
    stream = compiled(g).stream()
    x = np.arange(4, dtype=np.float32)
    assert stream.step({"x": x, "at": np.array([3])})["y"].tolist() == [3, 3]
    with pytest.raises(KernelError):
        stream.step({"x": x, "at": np.array([9])})
    assert stream.state("total").read().tolist() == [3, 3]
    stream.reset()
    assert stream.step({"x": x, "at": np.array([2])})["y"].tolist() == [2, 2]


def test_several_threads_may_run_one_program() -> None:
    program = compiled(network())
    want = {n: evaluate(network(), {"x": np.full((n, 12), n / 9, np.float32)})["y"] for n in (2, 5, 8)}
    wrong: list[str] = []

    def work(n: int) -> None:
        for _ in range(5):
            got = program(np.full((n, 12), n / 9, np.float32))
            if not np.allclose(got, want[n], rtol=1e-5, atol=1e-6):
                wrong.append(f"{n} rows")

    threads = [threading.Thread(target=work, args=(n,)) for n in (2, 5, 8, 5)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_the_first_nan_is_named() -> None:
    g = unary("f32", (4,), lambda v: ops.sort(ops.log(v)) * 2.0)
    program = compiled(g, debug="nan")
    assert program(np.ones(4, np.float32)).tolist() == [0, 0, 0, 0]
    with pytest.raises(KernelError, match=r"kernel %\d+ \(log\) produced a NaN or infinity"):
        program(-np.ones(4, np.float32))


def test_minilm_agrees_with_the_host(zoo_path: Callable[..., Path]) -> None:
    from rlx.zoo.minilm import load_graph

    graph = load_graph(zoo_path("minilm").parent)
    sizes = {"batch": 2, "seq": 7}
    program, cpu = compiled(graph, assume=sizes), rlx.compile(graph, assume=sizes)
    assert program.stats["host_thunks"] == [] and program.stats["distinct_kernels"] < 20
    ids = np.random.default_rng(0).integers(100, 20000, (2, 7))
    mask = np.array([[1] * 7, [1] * 4 + [0] * 3])
    got, want = (p.run({"input_ids": ids, "attention_mask": mask}) for p in (program, cpu))
    for name in want:
        np.testing.assert_allclose(got[name], want[name], atol=2e-5, err_msg=name)


# --- host thunks and the gate ---------------------------------------------------------------------


def test_what_it_has_no_kernel_for_is_a_named_and_billed_host_thunk() -> None:
    g = unary("f32", ("n",), lambda v: ops.cumsum(v * 2.0, axis=0) + 1.0)
    program = compiled(g)
    x = np.arange(6, dtype=np.float32)
    np.testing.assert_array_equal(program(x), np.cumsum(x * 2) + 1)
    (thunk,) = program.stats["host_thunks"]
    assert (thunk["op"], thunk["why"]) == ("cumsum", "form Cumulate has no OpenCL kernel")
    assert program.stats["sync_points"] == 2
    page = program.explain()
    assert "runs on the host: form Cumulate has no OpenCL kernel" in page
    (line,) = [line for line in page.splitlines() if "cumsum ->" in line]
    assert float(line.split()[0]) > 14, "a wait of 14 us is part of its price"


def test_too_many_arguments_are_a_host_thunk() -> None:
    def joined(count: int) -> Graph:
        g = Graph("joined")
        g.output("y", ops.concat([g.input(f"x{i}", (i + 1,), "f32") for i in range(count)], axis=0) * 2.0)
        return g

    for count, why in (
        (20, None),
        (38, "bytes of arguments are more than the 1024"),
        (60, "61 operands and results"),
    ):
        program = compiled(joined(count))
        parts = [np.full(i + 1, i, np.float32) for i in range(count)]
        np.testing.assert_array_equal(program(*parts), np.concatenate(parts) * 2)
        reasons = [t["why"] for t in program.stats["host_thunks"]]
        assert (reasons == []) if why is None else any(why in r for r in reasons), reasons


def test_the_discrete_gate_decides_otherwise_than_the_host() -> None:
    """Two readers of a dear value: the host computes it twice, the device, whose arithmetic is slow beside
    its memory, stores it. Peaks of many spectra: the device reads back the small result only; for the host,
    which shares its memory, there is nothing to gain.
    """
    g = Graph("twice")
    e = ops.exp(g.input("x", (256, 256), "f32"))
    g.output("rows", ops.sum(e, axis=1))
    g.output("columns", ops.sum(e, axis=0))
    host, device = plan(g), plan(g, device="opencl")
    (kept,) = [d for d in host.decisions if d.rule == "recompute" and d.verdict]
    refused = [d for d in device.decisions if d.rule == "recompute" and not d.verdict]
    assert refused and refused[0].score_ps == kept.score_ps, "equal traffic, equal bandwidth"
    assert refused[0].compute_ps_added > kept.score_ps > kept.compute_ps_added

    g = Graph("peaks")
    _, power = ops.welch(g.input("x", (4096, 512), "f32"), nperseg=256)
    for name, peaks in zip(("at", "power"), ops.spectral_peaks(power, 3, 1 / 256), strict=True):
        g.output(name, peaks)
    (on_host,), (on_device,) = (p.trace.decisions for p in (plan(g), plan(g, device="opencl")))
    assert not on_host.verdict and "changes no IO" in on_host.reason
    assert on_device.verdict and "of readback" in on_device.reason and "1 host wait" in on_device.reason
    assert host.gate != device.gate and device.gate["unified_memory"] is False


def test_the_gate_of_the_device_can_be_measured() -> None:
    gate = compiled(network(), gate="calibrated").lir.gate
    assert gate["unified_memory"] is False and gate["min_gain_ns"] == default_gate("opencl").min_gain_ns
    assert 0 < gate["dispatch_ns"] <= gate["roundtrip_ns"]
    assert gate["host_readback_bw"] >= 0.1 and gate["memory_bw"] >= 0.1


def test_layouts_of_the_cpu_do_not_run() -> None:
    names = [name for name, _, *_ in plan(network(), device="opencl").trace.stages]
    assert not {"sparse weights", "lay out convolutions", "pack weights"} & set(names)
    text = str(plan(network(), device="opencl").mir)
    assert "panels" not in text


# --- refusals and faults --------------------------------------------------------------------------


def test_what_it_cannot_do_is_refused(tmp_path: Path) -> None:
    program = compiled(network())
    with pytest.raises(UnsupportedError, match="a program for opencl cannot be saved; compile for 'cpu'"):
        program.save(tmp_path / "x.rlx")
    with pytest.raises(UnsupportedError, match="decisions are measured on 'cpu' only"):
        program.explain(measure=True)
    with pytest.raises(UnsupportedError, match="has no traces"):
        program.trace({"x": np.ones((1, 12), np.float32)})
    with pytest.raises(UnsupportedError, match="debug='poison' watches host memory"):
        compiled(network(), debug="poison")
    with pytest.raises(
        UnsupportedError, match="device 'gpu' cannot run programs in this version; use 'cpu' or"
    ):
        rlx.compile(network(), device="gpu")
    with pytest.raises(CompileError, match="unknown OpenCL target 'x86-64-v3': choose host, opencl"):
        compiled(network(), target="x86-64-v3")


def test_an_index_out_of_range_is_named_and_later_runs_work() -> None:
    g = Graph("rows")
    table = g.input("table", (4, 3), "f32")
    g.output("y", ops.gather(table, g.input("at", ("n",), "i64"), axis=0) * 2.0)
    program = compiled(g)
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    for _ in range(2):
        with pytest.raises(
            KernelError, match=r"kernel %\d+ \(.*gather.*\): an index from data is out of range"
        ):
            program(rows, np.array([0, 4]))
        np.testing.assert_array_equal(program(rows, np.array([3, 0])), rows[[3, 0]] * 2)


def test_an_exception_inside_a_host_thunk_is_clear_and_later_runs_work() -> None:
    def fragile(x: Array) -> Array:
        if x[0] < 0:
            raise ValueError("negative")
        return x

    op = rlx.register_op("fragile", ref=fragile)
    g = unary("f32", (3,), lambda v: op(v * 2.0) + 1.0)
    program = compiled(g)
    for _ in range(2):
        with pytest.raises(
            KernelError, match=r"%\d+ \(custom\) raised ValueError on the host: negative"
        ) as e:
            program(-np.ones(3, np.float32))
        assert isinstance(e.value.__cause__, ValueError)
        assert program(np.ones(3, np.float32)).tolist() == [3, 3, 3]


@pytest.mark.parametrize("command", ["enqueue_copy", "enqueue_nd_range_kernel", "enqueue_marker"])
def test_a_lost_device_is_clear_and_later_runs_work(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyopencl

    program = compiled(network())
    x = np.ones((2, 12), np.float32)
    want, lost = program(x), open_device("opencl")

    def gone(*args: object, **options: object) -> None:
        code = pyopencl.status_code.DEVICE_NOT_AVAILABLE
        raise pyopencl.RuntimeError(pyopencl._cl._ErrorRecord(msg="gone", code=code, routine=command))

    with monkeypatch.context() as patch:
        patch.setattr(pyopencl, command, gone)
        with pytest.raises(DeviceLost, match="the OpenCL device was lost"):
            program(x)
    np.testing.assert_array_equal(program(x), want)
    assert lost.lost and open_device("opencl") is not lost
