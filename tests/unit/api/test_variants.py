"""Sizes that broadcast in some runs and are equal in others: a program and its variants."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.errors import GuardError
from rlx.ir.resize import with_sizes
from rlx.runtime import variants

pytestmark = pytest.mark.usefixtures("each_origin")


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).uniform(-1, 1, shape).astype(np.float32)


def summed() -> rlx.Graph:
    """tanh(a + b * w), where the rows of a and b may be as many, or one."""
    g = rlx.Graph("summed")
    a, b = g.input("a", ("N", 3), "f32"), g.input("b", ("M", 3), "f32")
    w = g.param("w", (3,), "f32", floats(3))
    g.output("y", ops.tanh(a + b * w))
    return g


def check(program: Any, w: np.ndarray) -> None:
    for n, m in ((1, 3), (3, 1), (2, 2), (1, 1), (1, 5), (4, 1), (1, 0), (0, 1)):
        a, b = floats(n, 3), floats(m, 3)
        want = np.tanh((a + b * w).astype(np.float64))
        got = program.run({"a": a, "b": b})["y"]
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


def test_a_size_of_one_broadcasts(tmp_path: Path) -> None:
    program = rlx.compile(summed())
    assert program.stats["variants"] == []
    check(program, floats(3))
    assert sorted(map(str, program.stats["variants"])) == ["{'M': 1}", "{'N': 1}"]
    program.set_param("w", np.array([1, 2, 3], np.float32))
    check(program, np.array([1, 2, 3], np.float32))
    program.save(tmp_path / "summed.rlx")
    again = rlx.load(tmp_path / "summed.rlx")
    check(again, np.array([1, 2, 3], np.float32))
    assert len(again.stats["variants"]) == 2


def test_sizes_that_fit_in_no_way_are_refused_as_before() -> None:
    program = rlx.compile(summed())
    with pytest.raises(GuardError, match="assumed M equals N, which does not hold for M=3, N=2"):
        program.run({"a": floats(2, 3), "b": floats(3, 3)})
    g = rlx.Graph("product")
    g.output("y", g.input("a", (2, "k"), "f32") @ g.input("b", ("j", 4), "f32"))
    with pytest.raises(GuardError, match="j equals k"):  # a product does not broadcast over what it sums
        rlx.compile(g).run({"a": floats(2, 1), "b": floats(3, 4)})
    assert program.stats["variants"] == []


def test_several_sizes_at_once() -> None:
    g = rlx.Graph("three")
    a, b, c = (g.input(name, (name, f"{name}2"), "f32") for name in "abc")
    g.output("y", ops.where(a > 0.0, b, c) + ops.sum(a * b, axis=1, keepdims=True))
    program = rlx.compile(g)
    rng = np.random.default_rng(0)
    for _ in range(40):
        shape = rng.integers(1, 4, 2)
        shapes = [tuple(int(d) if rng.integers(2) else 1 for d in shape) for _ in "abc"]
        x = {name: floats(*s) for name, s in zip("abc", shapes, strict=True)}
        want = np.where(x["a"] > 0, x["b"], x["c"]) + (x["a"] * x["b"]).sum(1, keepdims=True)
        got = program.run(x)["y"]
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert 3 < len(program.stats["variants"]) <= variants.MOST_VARIANTS


def test_assumptions_of_the_user_stay_in_variants() -> None:
    g = summed()
    from rlx.ir.dim import Constraint, sym

    g.assume(Constraint("min", sym("M"), 3, ("by hand",)))
    fixed = with_sizes(g, {"N": 1})
    assert [c.describe() for c in fixed.constraints] == ["M is at least 3"]
    program = rlx.compile(g)
    assert program.run({"a": floats(1, 3), "b": floats(4, 3)})["y"].shape == (4, 3)
    with pytest.raises(GuardError):
        program.run({"a": floats(1, 3), "b": floats(2, 3)})


def test_bodies_have_variants_too() -> None:
    g = rlx.Graph("branches")
    a, b = g.input("a", ("N",), "f32"), g.input("b", ("M",), "f32")
    g.output("y", ops.cond(ops.sum(b) > 0.0, lambda: ops.sum(a * b), lambda: ops.sum(a - b)))
    program = rlx.compile(g)
    for n, m in ((1, 4), (4, 1), (3, 3)):
        for sign in (1, -1):
            a_, b_ = floats(n), np.abs(floats(m)) * np.float32(sign)
            want = (a_ * b_).sum() if sign > 0 else (a_ - b_).sum()
            np.testing.assert_allclose(program.run({"a": a_, "b": b_})["y"], want, rtol=1e-5)


def test_threads_compile_a_variant_once(monkeypatch: pytest.MonkeyPatch) -> None:
    program, made = rlx.compile(summed()), []
    compiled = variants.Variants._compiled
    monkeypatch.setattr(variants.Variants, "_compiled", lambda *a: made.append(1) or compiled(*a))
    feed = {"a": floats(1, 3), "b": floats(5, 3)}
    threads = [threading.Thread(target=program.run, args=(feed,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_a_model_that_broadcasts_its_batches() -> None:
    parser = pytest.importorskip("onnx").parser
    model = parser.parse_model(
        '<ir_version: 9, opset_import: ["": 17]> g (float[A, 4] x, float[B, 4] z) => (float[C, 4] y)'
        "{ s = Add (x, z) y = Softmax (s) }"
    )
    program = rlx.compile(rlx.from_onnx(model))
    for n, m in ((1, 3), (3, 1), (2, 2)):
        x, z = floats(n, 4), floats(m, 4)
        e = np.exp((x + z).astype(np.float64))
        np.testing.assert_allclose(program.run({"x": x, "z": z})["y"], e / e.sum(1, keepdims=True), rtol=1e-6)


def test_short_rows_are_mirrored_more_than_once() -> None:
    """With an open size a row is taken to be longer than its padding."""
    g = rlx.Graph()
    g.output("y", rlx.ops.pad(g.input("x", (1, "m"), "f32"), ((0, 0), (0, 6)), "reflect"))
    program = rlx.compile(g, cache=False)
    for m in (8, 1, 3, 8):
        x = np.arange(m, dtype=np.float32)[None]
        np.testing.assert_array_equal(program.run({"x": x})["y"], np.pad(x, ((0, 0), (0, 6)), "reflect"))


def test_a_size_that_may_mean_two_is_refused() -> None:
    """m may mean the columns of x, or those of the quotient, which are more where m is 1."""
    g = rlx.Graph("rows")
    d, x = g.input("d", ("n",), "f32"), g.input("x", ("n", "m"), "f32")
    g.output("first", (x / d)[0])
    program = rlx.compile(g)
    assert program.run({"d": np.ones(3, np.float32), "x": floats(3, 3)})["first"].shape == (3,)
    with pytest.raises(GuardError, match="assumed m equals n"):
        program.run({"d": np.ones(3, np.float32), "x": floats(3, 1)})


def test_a_whole_axis_that_was_not_stretched_is_sliced() -> None:
    g = rlx.Graph("rows")
    d, x = g.input("d", ("n",), "f32"), g.input("x", ("n", "m"), "f32")
    g.output("quotient", x / d)
    g.output("first", x[0])
    program = rlx.compile(g)
    wide, given = np.full(3, 2, np.float32), floats(3, 1)
    out = program.run({"d": wide, "x": given})
    np.testing.assert_array_equal(out["quotient"], given / wide)
    np.testing.assert_array_equal(out["first"], given[0])
