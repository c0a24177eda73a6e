"""The contract of LIR: every name that it promises, and the rules behind the names."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_models import bert

import rlx
from measured import units
from rlx import ops
from rlx.api.compile import plan
from rlx.errors import GuardError, PlanError, ShapeError
from rlx.ir.graph import Graph
from rlx.ir.op import Role
from rlx.ir.types import TupleType
from rlx.plan.lir import (
    ALIGNMENT,
    SPACES,
    LirBufferPlan,
    LirBufferSlot,
    LirFingerprint,
    LirIoManifest,
    LirModule,
    LirViewAlias,
)
from rlx.plan.phase import Phase, PhaseSchedule, derive_phases
from rlx.reference.lir import run_lir

TARGET = "x86-64-v3"


def program(f: Callable[..., Any], *shapes: tuple[Any, ...], **options: Any) -> LirModule:
    g = rlx.Graph("case")
    made = f(*(g.input(f"x{i}", s, "f32") for i, s in enumerate(shapes)))
    for i, y in enumerate(made if isinstance(made, tuple) else (made,)):
        g.output(f"y{i}", y)
    return plan(g, target=TARGET, **options)


def field_names(cls: type) -> list[str]:
    return [f.name for f in dataclasses.fields(cls)]


# -- names


def test_a_slot_is_offset_size_and_space() -> None:
    assert field_names(LirBufferSlot) == ["offset", "size", "space"]
    assert LirBufferSlot(0, 8) == LirBufferSlot(0, 8, "activation")
    assert SPACES == ("activation", "weight", "input", "output", "state", "ring", "heap", "scratch")
    for space in SPACES:
        assert LirBufferSlot(0, 8, space).space == space


def test_an_alias_is_root_offset_and_strides() -> None:
    assert field_names(LirViewAlias) == ["root", "byte_offset", "strides"]
    assert LirViewAlias(3, 64).strides is None


def test_a_manifest_is_inputs_params_outputs() -> None:
    assert field_names(LirIoManifest) == ["inputs", "params", "outputs"]


def test_a_plan_has_what_it_promises() -> None:
    p = program(lambda x: ops.cumsum(ops.cumsum(x, 0), 1), (8, 8)).plan
    facts = ("arena_size", "assignments", "schedule", "view_aliases", "phases", "io", "alignment")
    methods = ("sizes", "total_unshared_bytes", "bytes_saved", "slot", "is_view", "phase_of")
    for name in (*facts, "dynamic_symbols"):
        assert not callable(getattr(p, name)), name
    for name in (*methods, "nodes_in_phase", "lower_bound", "check"):
        assert callable(getattr(p, name)), name
    assert p.alignment == ALIGNMENT == 64
    assert set(p.sizes()) == set(SPACES) and p.sizes()["activation"] == p.arena_size


def test_a_module_has_what_it_promises() -> None:
    assert list(inspect.signature(LirModule).parameters)[:2] == ["mir", "buffers"]
    lir = program(lambda x: x + 1.0, ("n", 4))
    assert lir.plan is lir.buffers and lir.name == "case" and lir.arena_size == lir.plan.arena_size
    assert lir.as_graph() is lir.mir and lir.into_graph() is not lir.mir
    assert lir.has_dynamic_dims() and not lir.is_fully_static() and lir.dynamic_symbols() == ("n",)
    assert lir.plan.dynamic_symbols == ("n",)
    assert isinstance(lir.fingerprint(), LirFingerprint) and LirFingerprint.of(lir) == lir.fingerprint()
    assert len(lir.fingerprint()) == len(lir.code_key) == 64
    for name in ("to_text", "from_text", "save", "load", "specialize"):
        assert callable(getattr(LirModule, name)), name
    assert list(inspect.signature(LirModule.from_text).parameters) == ["text", "blobs"]


def test_phases_have_what_they_promise() -> None:
    assert {p.name for p in Phase} == {"PROLOGUE", "STEADY_STATE", "EPILOGUE"}
    for name in ("set", "get", "iter", "nodes_in", "nodes_in_ordered"):
        assert callable(getattr(PhaseSchedule, name)), name
    assert len(PhaseSchedule()) == 0


# -- sizes


def test_bytes_saved_is_never_below_zero() -> None:
    p = program(lambda x: ops.cumsum(ops.cumsum(x, 0), 1), (3, 3)).plan  # 36 bytes in a place of 64
    assert p.total_unshared_bytes() == 36 < p.arena_size == 64
    assert p.bytes_saved() == 0


def test_the_bound_counts_aligned_bytes_and_shared_storage_once() -> None:
    def f(x: Any) -> Any:
        first = ops.cumsum(x, 1)
        return ops.cumsum(ops.tanh(first), 0)  # tanh is written over what it reads

    p = program(f, (5, 5)).plan
    assert len(p.shared) == 1 and p.lower_bound() == p.arena_size == 128
    assert p.total_unshared_bytes() == 200


def test_aliases_are_not_counted() -> None:
    lir = program(lambda x: ops.cumsum(ops.transpose(ops.cumsum(x, 1)), 0), (16, 16))
    ((view, alias),) = lir.plan.view_aliases.items()
    assert lir.plan.is_view(view) and not lir.plan.is_view(alias.root)
    assert view not in lir.plan.assignments and lir.plan.slot(view) == lir.plan.slot(alias.root)
    assert lir.plan.total_unshared_bytes() == 16 * 16 * 4


def test_scratch_is_reported_per_thread() -> None:
    g = rlx.Graph("sorted")
    g.output("y", ops.sort(g.input("x", (64, 100), "f32"), axis=0))
    one, two = (rlx.compile(g, threads=n).memory()["scratch"] for n in (1, 2))
    assert two == 2 * one > 0


# -- views that cost nothing

FREE_VIEWS: list[tuple[str, Callable[[Any], Any]]] = [
    ("reshape", lambda x: ops.reshape(x, (4, 64))),
    ("cast to itself", lambda x: ops.cast(x, "f32")),
    ("slice of axis 0", lambda x: x[2:7]),
    ("transpose", lambda x: ops.transpose(x)),
    ("any slice", lambda x: x[:, 3:9]),
    ("broadcast", lambda x: ops.broadcast_to(x, (3, 16, 16))),
]


@pytest.mark.parametrize("case", FREE_VIEWS, ids=[c[0] for c in FREE_VIEWS])
def test_a_view_costs_no_storage_and_no_kernel(case: tuple[str, Callable[[Any], Any]]) -> None:
    lir = program(lambda x: ops.sum(ops.exp(case[1](ops.cumsum(x, 1)))), (16, 16))
    own = [n for n in lir.plan.assignments if lir.plan.assignments[n].space == "activation"]
    assert len(lir.plan.schedule) == 2 and len(own) == 1
    lir.plan.check()


# -- one node, one value


def test_a_node_with_several_results_has_no_storage_of_its_own() -> None:
    lir = program(lambda x: ops.top_k(ops.cumsum(x, 1), 3), (4, 16))
    many = [n for n in lir.mir.nodes if isinstance(n.type, TupleType)]
    assert many
    for node in many:
        assert node.id not in lir.plan.assignments
        results = [n for n in lir.mir.nodes if n.op.role is Role.RESULT and n.operands[0] is node]
        assert [n.attrs["index"] for n in results] == [0, 1]
        assert all(n.id in lir.plan.assignments for n in results)
    again = LirModule.from_text(lir.to_text())
    assert again.to_text() == lir.to_text()


# -- weights


def test_large_constants_are_blobs_in_text() -> None:
    def text_of(count: int) -> tuple[str, dict[str, np.ndarray]]:
        blobs: dict[str, np.ndarray] = {}
        lir = program(lambda x: x + np.arange(count, dtype=np.float32), (count,))
        return lir.to_text(blobs), blobs

    small, large = text_of(64), text_of(65)  # 256 bytes are written out, one more element is not
    assert "blob:" not in small[0] and not small[1]
    assert len(large[1]) == 1 and f"blob:{next(iter(large[1]))}" in large[0]


def test_large_initialisers_are_params_and_small_ones_constants(require: Callable[[str], None]) -> None:
    require("onnx")
    from onnx import TensorProto, helper, numpy_helper

    nodes = [helper.make_node("MatMul", ["x", "w"], ["t"]), helper.make_node("Add", ["t", "b"], ["y"])]
    value = helper.make_tensor_value_info
    weights = {"w": np.ones((16, 16), np.float32), "b": np.ones(16, np.float32)}
    graph = helper.make_graph(
        nodes,
        "linear",
        [value("x", TensorProto.FLOAT, ["n", 16])],
        [value("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(v, k) for k, v in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    g = rlx.from_onnx(model)
    assert list(g.params) == ["w"]  # 1 KiB; the bias has 64 bytes
    assert np.array_equal(g.param_values["w"], weights["w"])


def test_derived_weights_are_a_graph_in_the_plan() -> None:
    g = rlx.Graph("derived")
    w = g.param("w", (32, 32), "f32", np.eye(32, dtype=np.float32))
    g.output("y", g.input("x", ("n", 32), "f32") @ (ops.transpose(w) * 2.0))
    lir = plan(g, target=TARGET)
    assert lir.derived is not None and list(lir.derived.params) == ["w"]
    assert "weights graph" in lir.to_text()
    assert not any(n.op.name == "transpose" for n in lir.mir.nodes)  # nothing of it is left for a run


# -- digests


def test_a_manifest_has_the_names_of_users() -> None:
    """Weights are packed and merged; the plan still lists them under the names that users gave them."""
    g = Graph("named")
    x = g.input("x", (4, 64), "f32")
    for name in ("q", "k", "v"):
        g.output(name + "x", x @ g.param(name, (64, 64), "f32"))
    g.output("sum", x + g.param("b", (64,), "f32"))
    lir = plan(g, target="x86-64-v3")
    names = [name for name, _ in lir.plan.io.params]
    assert sorted(names) == ["b", "k", "q", "v"] and lir.derived is not None
    for name, node in lir.plan.io.params:
        assert lir.mir.nodes[node].op.role is Role.PARAM
        assert name in lir.plan.io.names_of(node).split(", ")
    again = LirModule.from_text(lir.to_text())
    assert again.plan.io == again.planner.plan({}).io == lir.specialize({}).plan.io == lir.plan.io


def test_the_compiler_version_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    lir = program(lambda x: x + 1.0, (4,))
    before = lir.fingerprint(), lir.code_key
    monkeypatch.setattr("rlx.plan.text.VERSION", "9.9.9")
    monkeypatch.setattr("rlx.plan.lir.VERSION", "9.9.9")
    assert before[0] != lir.fingerprint() and before[1] != lir.code_key


def test_the_code_key_knows_no_sizes_weights_or_threads() -> None:
    def with_weight(value: float, assume: int) -> LirModule:
        g = rlx.Graph("key")
        w = g.param("w", (16, 16), "f32", np.full((16, 16), value, np.float32))
        g.output("y", ops.tanh(g.input("x", ("n", 16), "f32") @ w))
        return plan(g, target=TARGET, assume={"n": assume})

    first = with_weight(1.0, 32)
    assert with_weight(2.0, 32).code_key == first.code_key
    assert with_weight(1.0, 48).code_key == first.code_key
    assert first.specialize({"n": 5}).code_key == first.code_key
    assert first.specialize({"n": 5}).fingerprint() != first.fingerprint()
    assert plan(first.unfused, target="x86-64-v4").code_key != first.code_key  # type: ignore[arg-type]


def test_a_new_size_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = rlx.compile(bert(1), assume={"batch": 1, "seq": 8})
    monkeypatch.setattr(
        "rlx.codegen.native.jit.compile_object", lambda *a: pytest.fail("code was made again")
    )
    for seq in (3, 17):
        ids = np.ones((2, seq), np.int64)
        compiled.run({"input_ids": ids, "attention_mask": ids})


# -- dynamic dims


def test_an_equality_is_proved_refuted_or_assumed() -> None:
    g = rlx.Graph("sizes")
    a, b = g.input("a", ("n", 4), "f32"), g.input("b", ("n", 4), "f32")
    a + b
    assert not g.constraints  # proved
    with pytest.raises(ShapeError):
        a + g.input("c", ("n", 5), "f32")  # refuted
    g.output("y", a + g.input("d", ("m", 4), "f32"))  # assumed
    (guard,) = g.constraints
    assert guard.describe() == "m equals n" or guard.describe() == "n equals m"
    lir = plan(g, target=TARGET)
    assert LirModule.from_text(lir.to_text()).mir.constraints == lir.mir.constraints
    with pytest.raises(GuardError, match=r"test_lir_contract\.py"):
        lir.specialize({"n": 3, "m": 4})


def test_sizes_of_zero_are_sizes() -> None:
    lir = program(lambda x: ops.sum(ops.cumsum(ops.exp(x), 0), axis=0), ("n", 4))
    p = lir.specialize({"n": 0}).plan
    p.check()
    got = run_lir(lir, {"x0": np.zeros((0, 4), np.float32)}, poison=True)["y0"]
    np.testing.assert_array_equal(got, np.zeros(4))


def test_one_segment_unless_data_or_the_host_decide() -> None:
    """A native program is one call; a size from data, or a host op, splits it."""

    def steps(g: Graph, **feed: np.ndarray) -> int:
        compiled = rlx.compile(g)
        compiled.run(feed)
        binding = dict.fromkeys(compiled.lir.dynamic_symbols(), 0)
        return len(compiled._make_context(binding).steps)

    x = np.array([1, 0, 2, 0], np.float32)
    native = rlx.Graph("native")
    v = native.input("x", (4,), "f32")
    native.output("y", ops.cumsum(ops.cumsum(ops.exp(v), 0), 0))
    assert steps(native, x=x) == 1
    split = rlx.Graph("split")
    v = split.input("x", (4,), "f32")
    split.output("y", ops.cumsum(ops.compress(v > 0.0, ops.cumsum(v, 0)), 0))
    assert steps(split, x=x) == 3  # before, the op that finds the size, after
    host = rlx.Graph("host")
    v = host.input("x", (4,), "f32")
    host.output("y", ops.cumsum(ops.unique(ops.cumsum(v, 0)), 0))
    assert steps(host, x=x) == 3


# -- loading


def test_loading_runs_verifier_and_check(tmp_path: Path) -> None:
    lir = program(lambda x: ops.cumsum(ops.cumsum(x, 0), 1), (16, 16))
    text = lir.to_text()
    with pytest.raises(PlanError):
        LirModule.from_text(text.replace("space activation 1024", "space activation 64"))
    with pytest.raises(rlx.errors.RlxError):
        LirModule.from_text(text.replace("f32[16,16]", "f32[16,17]", 1))


# -- specialize is quick


def test_specialize_is_quick(zoo_path: Callable[..., Path]) -> None:
    """A new binding of MiniLM in about 0.5 ms, the same one again in 5 us, each in units of a millisecond of
    interpreted work; ten times as much fails."""
    from rlx.zoo.minilm import load_graph

    lir = plan(load_graph(zoo_path("minilm").parent), target=TARGET)
    lengths = iter(range(5, 45, 2))
    assert units(lambda: lir.specialize({"batch": 2, "seq": next(lengths)}), rounds=20) < 5
    assert units(lambda: [lir.specialize({"batch": 2, "seq": 5}) for _ in range(100)]) < 5
    other = lir.specialize({"batch": 2, "seq": 5})
    assert other.code_key == lir.code_key and other.mir is lir.mir


def test_phases_are_kept_in_the_plan_and_its_text() -> None:
    lir = plan(bert(1), target=TARGET)
    for phase in Phase:
        expected = [n for n in lir.plan.schedule if derive_phases(lir.mir).get(n) is phase]
        assert lir.plan.nodes_in_phase(phase) == expected
    again = LirModule.from_text(lir.to_text()).plan
    assert dict(again.phases.iter()) == dict(lir.plan.phases.iter())
    assert again.nodes_in_phase(Phase.EPILOGUE)


def test_a_plan_may_be_made_by_hand() -> None:
    """All that `check` needs are slots, lifetimes and an order."""
    empty = LirIoManifest((), (), ())
    slots = {0: LirBufferSlot(0, 64), 1: LirBufferSlot(0, 64)}
    p = LirBufferPlan(slots, [0, 1], {}, PhaseSchedule(), empty, {0: (0, 1), 1: (1, 1)}, {"activation": 64})
    with pytest.raises(PlanError, match="%0 and %1 overlap"):
        p.check()
    p.lifetimes[0] = (0, 0)
    p.check()
