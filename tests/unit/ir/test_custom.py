"""Ops that users register: on arrays, in graphs, compiled, differentiated, batched, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import pytest

import rlx
from rlx import Graph, ops
from rlx.errors import GradientError, OpAttributeError, RlxError, TypeMismatchError, UnknownOpError
from rlx.ir.text.read import parse_graph
from rlx.kernel.form import Map
from rlx.kernel.scalar import axes, call, const, load
from rlx.reference.interpreter import evaluate
from rlx.transform.grad import gradient_graph
from rlx.transform.vmap import batch_graph


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    table = sys.modules["rlx.ops.control.custom"]._FUNCTIONS  # rlx.ops.custom itself is the function
    before = dict(table)
    yield
    table.clear()
    table.update(before)


def test_a_registered_op_runs_on_arrays_and_in_graphs() -> None:
    clamp = rlx.register_op("clamp", ref=lambda x, top: np.minimum(x, x.dtype.type(top)))
    x = np.array([1, 5, 9], np.float32)
    np.testing.assert_array_equal(clamp(x, top=4), [1, 4, 4])
    np.testing.assert_array_equal(ops.custom("clamp", x, top=4), [1, 4, 4])
    g = Graph()
    g.output("y", clamp(g.input("x", ("n",), "f32"), top=4) * 2.0)
    np.testing.assert_array_equal(evaluate(g, {"x": x})["y"], [2, 8, 8])
    assert str(parse_graph(str(g))) == str(g)


def test_without_a_native_form_it_is_a_named_host_thunk() -> None:
    sums = rlx.register_op("running_total", ref=lambda x: np.cumsum(x, -1, dtype=x.dtype))
    g = Graph()
    g.output("y", sums(g.input("x", (2, "n"), "f32") * 2.0) + 1.0)
    program = rlx.compile(g)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(program(x), np.cumsum(x * 2, -1) + 1)
    (thunk,) = program.stats["host_thunks"]
    assert thunk["op"] == "custom" and "'running_total' was registered without a native form" in thunk["why"]


def test_a_native_form_is_compiled() -> None:
    triple = rlx.register_op(
        "triple",
        ref=lambda x: x * 3,
        native=lambda x: Map(x.shape, call("mul", load(0, axes(x.rank), x.dtype), const(3, x.dtype))),
    )
    g = Graph()
    g.output("y", triple(g.input("x", ("n",), "f32")) + 1.0)
    program = rlx.compile(g)
    assert program.stats["host_thunks"] == []
    np.testing.assert_array_equal(program(np.array([1, 2], np.float32)), [4, 7])


def test_gradient_and_batching() -> None:
    cube = rlx.register_op("cube", ref=lambda x: x**3, vjp=lambda g, y, x: [g * x * x * 3.0])
    g = Graph()
    g.output("y", ops.sum(cube(g.input("x", (3,), "f64"))))
    x = np.array([1.0, -2.0, 0.5])
    np.testing.assert_allclose(evaluate(gradient_graph(g, "y", ["x"]), {"x": x})["grad_x"], 3 * x * x)
    rows = np.stack([x, x + 1])
    np.testing.assert_allclose(evaluate(batch_graph(g, {"x": 0}, 2), {"x": rows})["y"], (rows**3).sum(1))


def test_what_is_missing_is_said() -> None:
    plain = rlx.register_op("plain", ref=lambda x: x)
    g = Graph()
    x = g.input("x", (), "f64")
    g.output("y", plain(x))
    with pytest.raises(
        GradientError, match="'plain' was registered without a gradient; give register_op its vjp"
    ):
        gradient_graph(g, "y", ["x"])
    with pytest.raises(RlxError, match="'plain' is registered already"):
        rlx.register_op("plain", ref=lambda x: x)
    with pytest.raises(UnknownOpError, match="no op is registered as 'plan'"):
        ops.custom("plan", x)
    with pytest.raises(OpAttributeError, match="needs numbers, texts, dtypes and tuples of them, got object"):
        plain(x, how=object())
    with pytest.raises(
        TypeMismatchError,
        match="'plain' has no operand to infer its type from; give register_op an infer rule",
    ):
        plain()
    text = str(g)
    ops.unregister_op("plain")
    with pytest.raises(RlxError, match="no op is registered as 'plain'"):
        parse_graph(text)
    rlx.register_op("plain", ref=lambda x: -x, version="2")
    with pytest.raises(
        RlxError, match="the graph needs version '' of 'plain', but version '2' is registered"
    ):
        parse_graph(text)
