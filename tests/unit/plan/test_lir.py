"""LIR: what a plan promises, the proof of it, its text and its two digests."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_programs import random_program
from sample_models import bert, bert_inputs

import rlx
from rlx import ops
from rlx.api.compile import plan
from rlx.errors import FormatError, GuardError, ParseError, PlanError, RlxError
from rlx.ir.dtype import dtype
from rlx.ir.graph import Graph
from rlx.ir.op import Role
from rlx.plan.files import write_text
from rlx.plan.lir import (
    LirBufferPlan,
    LirBufferSlot,
    LirIoManifest,
    LirModule,
    LirViewAlias,
)
from rlx.plan.phase import Phase, PhaseSchedule, derive_phases
from rlx.reference.lir import LirInterpreter, run_lir

TARGET = "x86-64-v3"


@pytest.fixture(scope="module")
def model() -> LirModule:
    return plan(bert(2), target=TARGET)


# -- slots and spaces


def test_a_slot_names_its_space_or_is_refused() -> None:
    assert LirBufferSlot(64, 8).space == "activation"
    with pytest.raises(PlanError, match="space 'stack' is unknown"):
        LirBufferSlot(0, 8, "stack")
    with pytest.raises(PlanError, match="not valid"):
        LirBufferSlot(-64, 8)


def test_manifest_lists_what_goes_in_and_out_in_order() -> None:
    g = Graph()
    x, w = g.input("x", (2,), "f32"), g.param("w", (2,), "f32")
    g.output("sum", x + w)
    g.output("product", x * w)
    io = LirIoManifest.collect(g)
    assert io.inputs == (("x", 0),) and io.params == (("w", 1),)
    assert io.outputs == (("sum", 2), ("product", 3))


def test_sizes_say_every_space(model: LirModule) -> None:
    sizes = model.plan.sizes()
    assert list(sizes) == ["activation", "weight", "input", "output", "state", "ring", "heap", "scratch"]
    assert sizes["activation"] == model.arena_size > 0
    assert sizes["input"] == 2 * 128 * 8


def test_bytes_saved_is_what_sharing_saves(model: LirModule) -> None:
    total = sum(s.size for s in model.plan.assignments.values() if s.space == "activation")
    assert model.plan.total_unshared_bytes() == total
    assert model.plan.bytes_saved() == total - model.arena_size > 0


def test_views_have_the_slot_of_their_root(model: LirModule) -> None:
    for node, alias in model.plan.view_aliases.items():
        assert model.plan.is_view(node) and not model.plan.is_view(alias.root)
        assert model.plan.slot(node) == model.plan.slot(alias.root)
    with pytest.raises(PlanError, match="%9999 has no slot"):
        model.plan.slot(9999)


def test_the_arena_meets_its_bound_for_many_sizes(model: LirModule) -> None:
    for batch, seq in ((1, 128), (32, 128), (3, 17), (1, 1), (64, 5)):
        p = model.specialize({"batch": batch, "seq": seq}).plan
        p.check()
        assert p.arena_size <= 1.03 * p.lower_bound()


def test_a_result_takes_the_place_of_a_dying_operand() -> None:
    g = Graph()
    x = g.input("x", (64, 64), "f32")
    big = ops.cumsum(x, axis=1)
    g.output("y", ops.cumsum(ops.tanh(big), axis=0))
    p = plan(g).plan
    assert len(p.shared) == 1
    ((node, place),) = p.shared.items()
    assert p.slot(node) == p.slot(place)
    assert p.lower_bound() == p.arena_size == 64 * 64 * 4


NOT_IN_PLACE: list[tuple[str, Callable[[Any], Any]]] = [
    ("read elsewhere too", lambda x: x + ops.flip(x, 1)),
    ("another shape", lambda x: ops.sum(x, axis=1)),
    ("wider elements", lambda x: ops.cast(x, "f64")),
    ("stored in another order", lambda x: ops.transpose(ops.transpose(x) * 2.0) * 1.0 + ops.transpose(x)),
]


@pytest.mark.parametrize("case", NOT_IN_PLACE, ids=[c[0] for c in NOT_IN_PLACE])
def test_storage_is_not_taken_over_from(case: tuple[str, Callable[[Any], Any]]) -> None:
    g = Graph()
    first = ops.cumsum(g.input("x", (32, 32), "f32"), axis=1)
    g.output("y", ops.cumsum(case[1](first), axis=0))
    lir = plan(g)
    taken = {lir.plan.shared[n] for n in lir.plan.shared}
    assert lir.plan.schedule[0] not in taken
    feed = {"x": np.random.default_rng(0).standard_normal((32, 32), np.float32)}
    got = rlx.compile(g).run(feed)["y"]
    np.testing.assert_allclose(got, run_lir(lir, feed, poison=True)["y"], rtol=1e-4, atol=1e-4)


# -- the proof


def broken(model: LirModule, change: Callable[[LirBufferPlan], None]) -> LirBufferPlan:
    p = model.plan
    copy = replace(
        p,
        assignments=dict(p.assignments),
        schedule=list(p.schedule),
        view_aliases=dict(p.view_aliases),
        lifetimes=dict(p.lifetimes),
        space_sizes=dict(p.space_sizes),
        shared=dict(p.shared),
    )
    change(copy)
    return copy


def overlap(p: LirBufferPlan) -> None:
    values = [n for n in p.lifetimes if n not in p.shared and n not in p.shared.values()]
    a = values[0]
    b = next(n for n in values[1:] if p.lifetimes[n][0] <= p.lifetimes[a][1] and n != a)
    p.assignments[b] = replace(p.assignments[b], offset=p.assignments[a].offset)


def late(p: LirBufferPlan) -> None:
    p.schedule.reverse()


def short_life(p: LirBufferPlan) -> None:
    node = next(n for n, (first, last) in p.lifetimes.items() if last > first)
    p.lifetimes[node] = (p.lifetimes[node][0], p.lifetimes[node][1] - 1)


def unaligned(p: LirBufferPlan) -> None:
    node = next(iter(p.lifetimes))
    p.assignments[node] = replace(p.assignments[node], offset=4)


def outside(p: LirBufferPlan) -> None:
    p.space_sizes["activation"] //= 2


def lost_kernel(p: LirBufferPlan) -> None:
    del p.schedule[3]


def wrong_size(p: LirBufferPlan) -> None:
    node = next(iter(p.lifetimes))
    p.assignments[node] = replace(p.assignments[node], size=8)


def claimed_storage(p: LirBufferPlan) -> None:
    """Says that it takes over a place that is not free yet."""
    place = next(iter(p.shared.values()))
    p.lifetimes[place] = (p.lifetimes[place][0], p.lifetimes[place][1] + 1)


BROKEN: list[tuple[Callable[[LirBufferPlan], None], str]] = [
    (overlap, r"%\d+ and %\d+ overlap: bytes \d+ to \d+ and \d+ to \d+ are both alive at step \d+"),
    (late, r"%\d+ reads %\d+ before it is written"),
    (short_life, r"%\d+ is used in steps \d+ to \d+, but lives from"),
    (unaligned, r"%\d+ is at offset 4, which is not aligned to 64"),
    (outside, r"%\d+ ends at byte \d+ of the activation space, which has \d+"),
    (lost_kernel, r"before it is written"),
    (wrong_size, r"%\d+ is \w+\[.*\], \d+ bytes, but its slot has 8"),
    (claimed_storage, r"%\d+ and %\d+ overlap"),
]


@pytest.mark.parametrize("case", BROKEN, ids=[c[0].__name__ for c in BROKEN])
def test_check_names_the_nodes(case: tuple[Callable[[LirBufferPlan], None], str], model: LirModule) -> None:
    model.plan.check()
    with pytest.raises(PlanError, match=case[1]):
        broken(model, case[0]).check()


@pytest.mark.parametrize("alias", [(16, None), (0, (1, 9)), (-4, None), (0, (-1, 1))])
def test_a_view_lies_inside_its_root(alias: tuple[int, tuple[int, ...] | None]) -> None:
    g = Graph()
    x = ops.cumsum(g.input("x", (8, 8), "f32"), axis=1)
    g.output("y", ops.cumsum(ops.transpose(x), axis=0))
    p = plan(g).plan
    p.check()
    ((node, view),) = p.view_aliases.items()
    p.view_aliases[node] = LirViewAlias(view.root, *alias)
    with pytest.raises(PlanError, match=rf"%{node} reads bytes -?\d+ to \d+ of %{view.root}, which has 256"):
        p.check()


def test_poison_shows_what_a_plan_gets_wrong() -> None:
    """A value that is freed too early does not survive by luck."""
    g = Graph()
    x = ops.cumsum(g.input("x", (16, 16), "f32"), axis=1)
    g.output("y", ops.cumsum(x, axis=0) + ops.cumsum(x, axis=1))
    lir = plan(g)
    feed = {"x": np.ones((16, 16), np.float32)}
    assert np.isfinite(run_lir(lir, feed, poison=True)["y"]).all()
    first = lir.plan.schedule[0]
    lir.plan.lifetimes[first] = (0, 1)
    run = LirInterpreter(lir, poison=True)
    assert not np.isfinite(run.run(feed)["y"]).all()


def test_the_interpreter_follows_data_dependent_sizes() -> None:
    g = Graph()
    x = g.input("x", (6,), "f32")
    g.output("y", ops.compress(x > 0.0, x) * 2.0)
    feed = {"x": np.array([1, -1, 2, -2, 3, 0], np.float32)}
    np.testing.assert_array_equal(run_lir(plan(g), feed, poison=True)["y"], [2, 4, 6])


# -- sizes


def test_specialize_only_places(model: LirModule) -> None:
    other = model.specialize({"batch": 2, "seq": 40})
    assert other.mir is model.mir and other.plan.schedule == model.plan.schedule
    assert other.code_key == model.code_key and other.fingerprint() != model.fingerprint()
    assert other.plan.binding == {"batch": 2, "seq": 40}
    assert model.specialize({"batch": 2, "seq": 40}).plan is other.plan
    with pytest.raises(GuardError, match="symbol 'seq'"):
        model.specialize({"batch": 2})


def test_dynamic_dims_are_told(model: LirModule) -> None:
    assert model.has_dynamic_dims() and not model.is_fully_static()
    assert model.dynamic_symbols() == ("batch", "seq")
    g = Graph()
    g.output("y", abs(g.input("x", (2,), "f32")))
    assert plan(g).is_fully_static()


def test_guards_are_checked_when_sizes_are_known() -> None:
    g = Graph()
    g.output("y", g.input("a", ("n",), "f32") + g.input("b", ("m",), "f32"))
    lir = plan(g)
    lir.specialize({"n": 4, "m": 4})
    with pytest.raises(GuardError, match=r"m equals n.*m=5, n=4.*test_lir.py"):
        lir.specialize({"n": 4, "m": 5})


# -- phases


def test_phases_of_a_stream() -> None:
    g = Graph()
    prompt = g.input("prompt", (4,), "f32", once=True)
    x = g.input("x", (4,), "f32")
    w = g.param("w", (4, 4), "f32")
    ready = ops.exp(prompt)
    logits = (x + ready) @ w
    best, _ = ops.top_k(logits, 1)
    g.output("y", best)
    phases = derive_phases(g)
    assert phases.get(ready.id) is Phase.PROLOGUE
    assert phases.get(logits.id) is Phase.STEADY_STATE
    assert phases.get(best.id) is Phase.EPILOGUE
    assert phases.get(x.id) is Phase.PROLOGUE  # feeding an input is not running it
    assert len(phases) == len(g) and phases.nodes_in(Phase.EPILOGUE) >= {best.id}
    assert dict(phases.iter())[logits.id] is Phase.STEADY_STATE


def test_without_a_heavy_step_all_is_steady() -> None:
    g = Graph()
    x = g.input("x", (4,), "f32")
    y = ops.exp(x)
    g.output("y", y)
    assert derive_phases(g).get(y.id) is Phase.STEADY_STATE


def test_the_plan_keeps_phases_and_what_the_prologue_made() -> None:
    g = Graph()
    prompt = g.input("prompt", (64, 64), "f32", once=True)
    x = g.input("x", (64, 64), "f32")
    once = ops.cumsum(prompt, axis=0)
    y = ops.cumsum(x @ once, axis=0)
    g.output("y", ops.cumsum(y @ once, axis=1))
    p = plan(g).plan
    (first,) = p.nodes_in_phase(Phase.PROLOGUE)
    assert p.phase_of(first) is Phase.PROLOGUE
    assert p.lifetimes[first] == (0, len(p.schedule) - 1)
    order = p.nodes_in_phase(Phase.STEADY_STATE)
    assert order == [n for n in p.schedule if n in order]
    p.check()


def test_phase_schedule_orders_by_the_schedule() -> None:
    s = PhaseSchedule()
    for n in (1, 2, 3):
        s.set(n, Phase.EPILOGUE)
    assert s.nodes_in_ordered(Phase.EPILOGUE, [3, 1, 2]) == [3, 1, 2]


# -- text and files


def test_text_reads_back_to_the_same_text(model: LirModule) -> None:
    blobs: dict[str, np.ndarray] = {}
    text = model.to_text(blobs)
    again = LirModule.from_text(text, blobs)
    assert again.to_text() == text
    assert again.fingerprint() == model.fingerprint() and again.code_key == model.code_key
    assert list(again.decisions) == list(model.decisions)
    other = {"batch": 2, "seq": 12}
    assert again.specialize(other).arena_size == model.specialize(other).arena_size


def test_many_programs_read_back() -> None:
    for seed in range(30):
        lir = plan(random_program(seed, symbolic=bool(seed % 2))[0])
        blobs: dict[str, np.ndarray] = {}
        text = lir.to_text(blobs)
        assert LirModule.from_text(text, blobs).to_text() == text


def test_files_hold_weights_too(model: LirModule, tmp_path: Path) -> None:
    path = tmp_path / "bert.plan"
    model.save(path)
    feed = bert_inputs()
    want, got = run_lir(model, feed), run_lir(LirModule.load(path), feed)
    assert all(np.array_equal(want[k], got[k]) for k in want)


def test_text_files_have_their_blobs_beside_them(tmp_path: Path) -> None:
    """Loading a text, too, verifies it and proves its plan."""
    g = Graph()
    value = np.arange(600, dtype=np.float32).astype(dtype("bf16").np)
    g.output("y", g.input("x", (600,), "bf16") + g.constant(value))
    lir, path = plan(g, target=TARGET), tmp_path / "a.plan"
    write_text(lir, path)
    again = LirModule.load(path)
    assert again.to_text() == lir.to_text() and again.fingerprint() == lir.fingerprint()
    text = path.read_text()
    path.write_text(re.sub(r"slot (%\d+) output 0", r"slot \1 output 64", text))
    with pytest.raises(FormatError, match=r"does not hold a valid plan: %\d+ ends at byte 1264"):
        LirModule.load(path)
    path.write_text(text)
    for blob in (tmp_path / "a.plan.blobs").iterdir():
        blob.unlink()
    with pytest.raises(FormatError, match="is not among the blobs given"):
        LirModule.load(path)


def test_the_record_of_stages_and_rewrites_is_kept(model: LirModule) -> None:
    again = LirModule.from_text(model.to_text())
    assert again.trace.stages == model.trace.stages and again.trace.firings == model.trace.firings
    assert again.trace.decisions == model.trace.decisions
    assert all(d.ops for d in again.decisions)
    assert again.decisions.why_not(*again.decisions[0].region[:2])


BAD_RECORDS = ['stage "expand" many', 'firing {"rule": "x"}', "firing []", "earlier {}", "stage"]


@pytest.mark.parametrize("line", BAD_RECORDS)
def test_records_that_say_nothing_are_refused(line: str, model: LirModule) -> None:
    with pytest.raises((ParseError, FormatError)):
        LirModule.from_text(model.to_text() + line + "\n")


def test_odd_dtypes_survive_a_file(tmp_path: Path) -> None:
    g = Graph()
    value = np.arange(600, dtype=np.float32).astype(dtype("bf16").np)
    g.output("y", g.input("x", (600,), "bf16") * g.param("w", (600,), "bf16", value) + g.constant(value))
    plan(g).save(tmp_path / "p")
    feed = {"x": np.ones(600, dtype("bf16").np)}
    np.testing.assert_array_equal(
        run_lir(LirModule.load(tmp_path / "p"), feed)["y"], run_lir(plan(g), feed)["y"]
    )


DAMAGE: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("other file", lambda b: b"PK" + b[2:], "not a plan file; it should begin with the bytes RLXPLAN"),
    ("version", lambda b: b[:8] + b"\x09\0\0\0" + b[12:], "format version 9"),
    ("flipped bit", lambda b: b[:-9] + bytes([b[-9] ^ 1]) + b[-8:], "checksum"),
    ("truncated", lambda b: b[:-100], "truncated or damaged"),
    ("empty", lambda b: b"", "not a plan file; it should begin with the bytes RLXPLAN"),
]


@pytest.mark.parametrize("case", DAMAGE, ids=[c[0] for c in DAMAGE])
def test_damaged_files_are_refused(
    case: tuple[str, Callable[[bytes], bytes], str], model: LirModule, tmp_path: Path
) -> None:
    path = tmp_path / "x.plan"
    model.save(path)
    path.write_bytes(case[1](path.read_bytes()))
    with pytest.raises(FormatError, match=case[2]):
        LirModule.load(path)


EDITS: list[tuple[str, str, str, type[RlxError], str]] = [
    ("no head", "rlx plan 1", "rlx plan 2", ParseError, "not a plan of format 1"),
    (
        "offset moved",
        "slot %33 activation ",
        "slot %33 activation 3",
        PlanError,
        r"%33 (ends at|and|is at)|overlap",
    ),
    ("order lost", "order %31 ", "order ", PlanError, "before it is written"),
    ("unknown word", "  alignment 64", "  alignement 64", ParseError, "not a line of a plan"),
    ("unknown node", "order %31", "order %99999", ParseError, "not a node of the graph"),
    ("not closed", "plan {", "plan {\n  alignment 64 {", ParseError, "line"),
]


@pytest.mark.parametrize("case", EDITS, ids=[c[0] for c in EDITS])
def test_edited_texts_are_checked(case: tuple[str, str, str, type[RlxError], str], model: LirModule) -> None:
    _, old, new, error, match = case
    text = model.to_text()
    assert old in text
    with pytest.raises(error, match=match):
        LirModule.from_text(text.replace(old, new, 1))


# -- digests


def test_the_display_name_does_not_count() -> None:
    def named(name: str, factor: float = 2.0) -> LirModule:
        g = rlx.Graph(name)
        g.output("y", g.input("x", ("n", 3), "f32") * factor)
        return plan(g, target=TARGET)

    assert named("a").fingerprint() == named("b").fingerprint()
    assert named("a").code_key == named("b").code_key
    assert named("a").fingerprint() != named("a", 2.5).fingerprint()
    assert named("a").code_key != named("a", 2.5).code_key


def test_weights_count_by_type_and_constants_by_content() -> None:
    def with_weight(value: float, constant: float) -> str:
        g = rlx.Graph()
        w = g.param("w", (3,), "f32", np.full(3, value, np.float32))
        g.output("y", g.input("x", (3,), "f32") * w + np.full(3, constant, np.float32))
        return plan(g, target=TARGET).fingerprint()

    assert with_weight(1, 1) == with_weight(2, 1) != with_weight(1, 2)


@pytest.mark.parametrize("option", ["target", "gate", "option", "offset", "order", "binding", "phase"])
def test_everything_in_a_plan_counts(option: str, model: LirModule) -> None:
    other = replace(model, buffers=broken(model, lambda p: None))
    if option == "target":
        other.target = "x86-64-v4"
    elif option == "gate":
        other.gate = {**model.gate, "dispatch_ns": 201}
    elif option == "option":
        other.options = {"precision": "bf16"}
    elif option == "offset":
        unaligned(other.buffers)
    elif option == "order":
        late(other.buffers)
    elif option == "binding":
        other.buffers.binding = {"batch": 2, "seq": 128}
    else:
        other.buffers.phases = PhaseSchedule()
    assert other.fingerprint() != model.fingerprint()


def test_module_gives_its_graph(model: LirModule) -> None:
    assert model.name == "minilm" and model.as_graph() is model.mir
    own = model.into_graph()
    assert own is not model.mir and str(own) == str(model.mir)
    assert any(n.op.role is Role.REGION for n in own.nodes)


def test_what_a_kernel_of_an_edited_text_assumes_is_a_guard() -> None:
    """A slice with another step reads outside of its axis at the sizes that the plan is for."""
    g = rlx.Graph("edited")
    g.output("y", ops.exp(g.input("x", ("m",), "f32"))[:-1] * 2.0)
    text = plan(g).to_text()
    assert "steps=(1,)" in text
    again = LirModule.from_text(text.replace("steps=(1,)", "steps=(3,)"))
    assert again.specialize({"m": 1}).plan.binding == {"m": 1}
    with pytest.raises(GuardError, match="does not hold for m=128"):
        again.specialize({"m": 128})
