"""The fuzzer of programs: what it draws, that faults are found and shrunk, and a run with a fixed seed."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import rlx
from rlx import lower, ops
from rlx.errors import RlxError
from rlx.fuzz import case
from rlx.fuzz.bounds import Bounded, Follower
from rlx.fuzz.case import Finding
from rlx.fuzz.oracles import MAIN, MORE, check
from rlx.fuzz.programs.draw import Draw, NotHere
from rlx.fuzz.programs.grammar import draw_program, with_indices_in_range
from rlx.fuzz.programs.inputs import Values
from rlx.fuzz.programs.layers import attention
from rlx.fuzz.programs.program import TRANSFORMS, Input, Program, Step
from rlx.fuzz.programs.zoo_pieces import from_the_zoo, pieces
from rlx.fuzz.report import array_text, reproducer
from rlx.fuzz.shrink import candidates, shrink
from rlx.fuzz.to_onnx import CannotWrite, to_onnx
from rlx.ir.graph import Graph
from rlx.ir.op import get_op
from rlx.reference.interpreter import evaluate

DRAWN = [draw_program(6, number) for number in range(500)]
PLAIN = Input("x0", "f32", (3, 4), Values())


def test_a_seed_gives_the_same_programs_in_every_process() -> None:
    text = "from rlx.fuzz.programs.grammar import draw_program as draw\n"
    text += "print([repr(draw(6, i)) for i in range(40)])"
    command = [sys.executable, "-c", text]
    again = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert again.strip() == str([repr(p) for p in DRAWN[:40]])


def test_the_programs_are_not_all_alike() -> None:
    source = "\n".join(p.source() for p in DRAWN)
    assert len(set(re.findall(r"ops\.(\w+)", source)) | set(re.findall(r"op\('(\w+)'\)", source))) >= 170
    assert {way for p in DRAWN for way in p.ways} == {*MAIN, *MORE}
    assert {p.transform for p in DRAWN} == set(TRANSFORMS)
    assert len({x.dtype for p in DRAWN for x in p.inputs}) >= 12
    assert {0, 1, 2, 3, 7, 17} <= {n for p in DRAWN for x in p.inputs for n in p.shape(x)}
    assert any(x.weight for p in DRAWN for x in p.inputs) and any(p.others for p in DRAWN)


def test_a_wrong_value_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: whatever is computed with tanh is a little off."""

    def compile(graph, **options):  # type: ignore[no-untyped-def]
        class Off:
            def run(self, feed):  # type: ignore[no-untyped-def]
                out = evaluate(graph, feed)
                wrong = any(n.op.name == "tanh" for n in graph.nodes)
                return {k: v + np.float32(0.01) if wrong else v for k, v in out.items()}

        return Off()

    monkeypatch.setattr(case, "compile", compile)
    steps = (
        Step(("v1",), "x0 * 2.0"),
        Step(("v2",), "ops.sum(v1, axis=0)"),
        Step(("v3",), "ops.tanh(v2)"),
        Step(("v4",), "ops.transpose(v3 + x1)"),
    )
    inputs = (PLAIN, Input("x1", "f32", (5, 4), Values(), weight=True))
    program = Program(inputs, steps, ("v4", "v1"), ways=("static", "text"))
    found = check(program)
    assert found is not None and found.signature == ("static", "wrong value")
    small, finding = shrink(program, found, check)
    assert [s.text for s in small.steps] == [f"ops.tanh({small.inputs[0].name})"]
    assert small.ways == ("static",)
    text = reproducer(small, finding)
    assert "ops.tanh(" in text and "wrong value" in text and len(text.splitlines()) < 25
    exec(text, {})  # a program of its own


@pytest.mark.parametrize("way", [*MAIN, *MORE])
def test_every_way_runs(way: str) -> None:
    steps = (
        Step(("v1",), "ops.softmax(x0 * 2.0, axis=-1)"),
        Step(("v2",), "v1 @ ops.transpose(x0)"),
    )
    inputs = (Input("x0", "f32", ("n", 4), Values()),)
    program = Program(inputs, steps, ("v2", "v1"), {"n": 3}, {"n": 5}, ways=(way,))
    assert check(program) is None


def test_programs_are_written_as_onnx_models(require: Callable[..., None]) -> None:
    """Most of them, with shape arithmetic for open sizes; what they mean is another way's question."""
    require("onnx")
    written: Counter[str] = Counter()
    models, tried = 0, 0
    for p in DRAWN:
        if "onnx" in p.ways and not p.transform:
            tried += 1
            try:
                model = to_onnx(p.graph(() if p.asks_about_sizes else p.open_sizes(), weights=not p.others))
            except (CannotWrite, RlxError):
                continue
            models += 1
            written.update(n.op_type for n in model.graph.node)
    assert models > tried / 3 and len(written) > 40
    assert {"Shape", "Gather", "Reshape", "Expand", "MatMul", "Slice", "Where"} <= written.keys()


def test_names_of_an_onnx_model_are_its_own(require: Callable[..., None]) -> None:
    """Those of nodes are numbered too: whatever stands before a pad, its filling is another value."""
    require("onnx")
    for before in range(4):
        graph = Graph()
        x = [graph.input(f"x{i}", (3,), "f32") for i in range(before + 1)][-1]
        with graph.building():
            graph.output("y", ops.pad(x, [(1, 1)]))
        made = to_onnx(graph).graph
        names = [i.name for i in made.initializer] + [name for n in made.node for name in n.output]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("saturate", [None, True, False])
@pytest.mark.parametrize("to", ["f8e4m3fn", "f8e5m2", "f8e4m3fnuz", "f8e5m2fnuz", "f8e8m0", "bf16", "i8"])
def test_casts_mean_the_same_in_an_onnx_model(
    to: str, saturate: bool | None, require: Callable[..., None]
) -> None:
    """ONNX saturates every f8 format unless a flag says otherwise; RLX those without infinity."""
    require("onnx")
    values = np.array([np.inf, -np.inf, np.nan, 1e6, -1e6, 0.3, 500, 6e4, -0.0, 3e-9, 250], np.float32)
    graph = Graph()
    graph.output("y", ops.cast(graph.input("x", values.shape, "f32"), to, saturate=saturate))
    if to == "f8e8m0":
        with pytest.raises(CannotWrite, match="powers of two"):
            to_onnx(graph)
        return
    (wanted,) = evaluate(graph, {"x": values}).values()
    (found,) = evaluate(rlx.from_onnx(to_onnx(graph)), {"x": values}).values()
    np.testing.assert_array_equal(found.astype(np.float32), wanted.astype(np.float32))


def test_pieces_of_the_zoo_are_drawn() -> None:
    """From every model, and they are accepted as they stand."""
    assert len({piece["model"] for piece in pieces()}) >= 8
    d = Draw("zoo")
    made = 0
    for _ in range(40):
        try:
            made += bool(from_the_zoo(d))
        except NotHere:
            d = Draw(f"zoo {made}")
    assert made > 20


def test_every_shrunk_program_can_be_printed() -> None:
    """Numbers that an op needs are given, and fit a batch, too."""
    given = Input("x1", "i64", (2,), Values(given=(0, 1)))
    batched = Program(
        (PLAIN, given),
        (Step(("v2",), "ops.take(x0, x1, axis=0)"),),
        ("v2",),
        {"batch": 3},
        {"batch": 2},
        "vmap",
    )
    printed = 0
    for number, program in enumerate([batched, *DRAWN[:150]]):
        choose = random.Random(number)
        for _ in range(8):
            fewer = list(candidates(program))
            if not fewer:
                break
            program = choose.choice(fewer)
            compile(reproducer(program, Finding("static", "wrong value", "")), "reproducer", "exec")
            printed += 1
    assert printed > 500


def test_many_numbers_are_printed_as_their_generator() -> None:
    values = Values(low=-1.0, high=1.0)
    program = draw_program(1, 0)
    x = Input("x0", "f32", (40,), values)
    array = values.array("f32", (40,), (program.number, 0))
    np.testing.assert_array_equal(eval(array_text(program, 0, x, array)), array)


def test_no_infinite_keys_are_hidden() -> None:
    """What they do to a result is not specified; inputs without hidden keys may have them."""
    hidden, special = 0, 0
    for number in range(120):
        d = Draw(f"attention {number}")
        d.input(d.main, [2, 2, 3, 4], Values(special=True))
        try:
            attention(d)
        except NotHere:
            continue
        step, inputs = d.steps[-1], {x.name: x for x in d.inputs}
        read = [inputs[name] for name in sorted(step.names())]
        if "causal" in step.text or any(x.dtype == "bool" for x in read):
            hidden += 1
            assert not any(x.values.special for x in read)
        special += any(x.values.special for x in read)
    assert hidden > 20 and special > 5


def test_indices_fit_at_both_sets_of_sizes() -> None:
    x = Input("x0", "f32", ("n", 2), Values())
    ids = Input("x1", "i64", (8,), Values(0, 8))
    steps = (Step(("v2",), "ops.concat([x0, x0], axis=0)"), Step(("v3",), "ops.take(v2, x1, axis=0)"))
    program = Program((x, ids), steps, ("v3",), {"n": 9}, {"n": 2})
    made = with_indices_in_range(program, [("x1", "v2", 0)])
    assert made.inputs[1].values == Values(0, 3) and made.inputs[0] == x and made.others == {"n": 2}
    assert not with_indices_in_range(replace(program, others={"n": 0}), [("x1", "v2", 0)]).others


def test_a_comparison_of_what_may_be_equal_is_not_judged() -> None:
    """Both ends of an interval may differ from a number within it, as the middle may."""
    graph = Graph()
    x, y = graph.input("x", (3,), "f32"), graph.input("y", (3,), "f32")
    graph.set_outputs([x != y, x == y, x < y, x == x])
    feed = {
        "x": Bounded(np.array([1.0, 1.0, 1.0]), np.array([1e-6, 1e-6, 1e-6])),
        "y": Bounded(np.array([1.0, 1.0 + 1e-7, 1.1]), 0.0),
    }
    different, equal, less, same = Follower(lower(graph), feed, {}).outputs().values()
    for judged in (different, equal, less):
        np.testing.assert_array_equal(judged.error, [1, 1, 0])
    assert same.value.all() and not np.any(same.error)


def test_a_product_may_lose_small_factors_on_its_way() -> None:
    """The order of factors is free: 0 is right where the small ones come first, and so is the exact value."""
    graph = Graph()
    graph.set_outputs([ops.prod(graph.input("x", (4,), "f32"))])
    for factors, error in (
        ([1e-30, 1e-30, 1e30, 1e30], 1.0),
        ([1e30, 1e30, 1e-30, 1e-30], 1.0),
        ([2, 3, 4, 5], 0),
    ):
        feed = {"x": Bounded(np.array(factors, np.float64), 0.0)}
        (judged,) = Follower(lower(graph), feed, {}).outputs().values()
        assert judged.error >= error and (error or judged.error < 1e-3)


def test_errors_under_a_transform_may_have_any_signs() -> None:
    """Moved all one way, they would meet in coefficient 0 and leave the others as they are."""
    graph = Graph("fourier")
    graph.output("re", get_op("rfft_split")(graph.input("x", (16,), "f32"))[0])
    feed = {"x": Bounded(np.linspace(-1.0, 1.0, 16), np.full(16, 0.01))}
    (judged,) = Follower(lower(graph), feed, {}).outputs().values()
    assert (np.broadcast_to(judged.error, (9,)) >= 0.16).all()


def test_padding_counts_with_its_size() -> None:
    """Whatever its sign: products with it are rounded as others are."""
    graph = Graph("padded")
    x, w = graph.input("x", (1, 1, 3), "f32"), graph.input("w", (1, 1, 2), "f32")
    graph.set_outputs([ops.conv(x, w, padding=2, fill=-3)])
    feed = {"x": Bounded(np.ones((1, 1, 3)), 0.25), "w": Bounded(np.full((1, 1, 2), 0.3), 0.0)}
    (judged,) = Follower(lower(graph), feed, {}).outputs().values()
    outside, edge, inside = np.asarray(judged.error)[0, 0, :3]
    assert (
        0 < outside < 1e-5
        and edge == pytest.approx(0.075, rel=1e-3)
        and inside == pytest.approx(0.15, rel=1e-3)
    )


def test_errors_of_both_factors_multiply() -> None:
    """A deviation of equal numbers is 0 or a rounding, and so is its product with itself."""
    graph = Graph("outer")
    x = graph.input("x", (2,), "f32")
    graph.output("y", ops.einsum("i,j->ij", x, x))
    given = Bounded(np.array([0.0, 1.0]), np.array([1e-3, 1e-3]))
    error = np.asarray(Follower(lower(graph), {"x": given}, {}).outputs()["y"].error)
    assert 1e-6 <= error[0, 0] < 1.1e-6 and 2.001e-3 <= error[1, 1] < 2.01e-3


def test_an_unknown_error_in_a_sum_of_products_stays_unknown() -> None:
    """Also where the other factor is 0, and through the ops that follow."""
    g = Graph()
    x = g.input("x", (2,), "f32")
    g.output("y", ops.reshape(ops.matmul(x, np.float32([[0.0], [1.0]])), ()))
    given = Bounded(np.array([1.0, 2.0]), np.array([np.inf, 0.0]))
    assert np.isinf(Follower(lower(g), {"x": given}, {}).outputs()["y"].error).all()


@pytest.mark.parametrize("divide", [ops.div, ops.floor_div])
def test_a_quotient_by_what_may_be_zero_has_no_bound(divide: Callable[..., object]) -> None:
    graph = Graph("quotient")
    x, y = graph.input("x", (2,), "f32"), graph.input("y", (2,), "f32")
    graph.output("z", divide(x, y))
    feed = {"x": Bounded(np.ones(2)), "y": Bounded(np.array([0.001, 0.1]), np.array([0.004, 0.001]))}
    (judged,) = Follower(lower(graph), feed, {}).outputs().values()
    assert np.isinf(judged.error[0]) and judged.error[1] < 2


def test_a_quotient_of_what_is_not_known_has_no_bound() -> None:
    """Both ends of its interval are NaN."""
    graph = Graph("quotient")
    graph.output("z", ops.floor_div(graph.input("x", (2,), "f32"), 1.5))
    feed = {"x": Bounded(np.ones(2), np.array([np.inf, 0.1]))}
    (judged,) = Follower(lower(graph), feed, {}).outputs().values()
    assert np.isinf(judged.error[0]) and judged.error[1] < 2


def test_a_computed_size_of_one_stretches_too() -> None:
    graph = Graph("cut")
    x = graph.input("x", ("n",), "f32")
    graph.output("y", x[4:] + np.float32([1.0, 2.0]))
    feed = {"x": np.arange(5, dtype=np.float32)}
    (got,) = evaluate(case.as_run(graph, feed)[0], feed).values()
    np.testing.assert_array_equal(got, [5.0, 6.0])
    np.testing.assert_array_equal(rlx.compile(graph).run(feed)["y"], got)


def test_bounds_where_a_size_of_one_stretches() -> None:
    """The graph takes both sizes for equal; a run with 1 and 15 takes a variant, and so do the bounds."""
    graph = Graph("inner product")
    graph.set_outputs([ops.einsum("i,i->", graph.input("a", ("n",), "f32"), graph.input("b", ("m",), "f32"))])
    feed = {"a": np.ones(1, np.float32), "b": np.ones(15, np.float32)}
    (judged,) = case.bounds(graph, feed) or ()
    assert judged.value == 15


def test_what_raises_is_a_finding() -> None:
    program = Program((PLAIN,), (Step(("v1",), "x0.no_such_thing"),), ("v1",))
    found = check(program)
    assert isinstance(found, Finding) and "AttributeError" in found.kind


def test_what_is_refused_is_none() -> None:
    program = Program((PLAIN,), (Step(("v1",), "ops.reshape(x0, (5, 5))"),), ("v1",))
    assert check(program) is None


@pytest.mark.parametrize("transform", ["", "vmap"])
def test_an_axis_that_a_program_itself_lacks_is_none(transform: str) -> None:
    """Squeezed, a value may have no such axis at some sizes; that is no fault of RLX."""
    steps = (Step(("v1",), "ops.squeeze(x0)"), Step(("v2",), "v1 if v1.shape[1] > 8 else -v1"))
    x = Input("x0", "f32", ("n", "n"), Values())
    assert check(Program((x,), steps, ("v2",), {"n": 1, "batch": 2}, transform=transform)) is None


def test_a_crash_is_a_finding() -> None:
    from rlx.fuzz.worker import check_apart

    step = Step(("v1",), "__import__('os').kill(__import__('os').getpid(), 11)")
    found = check_apart(Program((PLAIN,), (step,), ("v1",)), "host")
    assert found is not None and found.kind == "the process ended by SIGSEGV"


@pytest.mark.parametrize("step", ["time.sleep(200)", "next(i for i in itertools.count() if i < 0)"])
def test_a_hang_is_a_finding(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it sleeps or works; what waits for its turn on a busy machine is not one."""
    from rlx.fuzz import worker

    monkeypatch.setattr(worker, "LOOK", 0.1)
    module, _, _ = step.removeprefix("next(i for i in ").partition(".")
    program = Program((PLAIN,), (Step(("v1",), step.replace(module, f"__import__('{module}')", 1)),), ("v1",))
    found = worker.check_apart(program, "host", seconds=6)
    assert found is not None and found.kind == "no answer within 6 s"


def test_the_command(tmp_path: Path) -> None:
    tally = f"{tmp_path}/tally.jsonl"
    command = [sys.executable, "-m", "rlx.fuzz", "files", "--programs", "40", "--seed", "3", "--tally", tally]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    with open(tally, encoding="utf-8") as file:
        assert '"programs": 40' in file.read()
