"""Wrong arguments of the functions that users call first: refused in words, at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.errors import (
    ConfigError,
    FormatError,
    GuardError,
    InputError,
    RlxError,
    ShapeError,
    TransformError,
    TypeMismatchError,
    VerifyError,
)
from rlx.ir.graph import Graph


def small() -> Graph:
    g = rlx.Graph("small")
    g.output("y", ops.exp(g.input("x", ("n", 4), "f32")))
    return g


@pytest.mark.parametrize("call", [rlx.compile, rlx.lower, rlx.optimize])
@pytest.mark.parametrize("given", [None, "model.onnx", np.ones(3)], ids=["None", "text", "array"])
def test_what_is_no_graph(call: Callable[..., Any], given: Any) -> None:
    with pytest.raises(
        TypeMismatchError, match=r"takes an rlx\.Graph, got a value of type \w+; rlx\.load takes files"
    ):
        call(given)


@pytest.mark.parametrize("threads", [0, -1, 2.5, "2", True])
def test_threads_that_are_no_number(threads: Any) -> None:
    with pytest.raises(ConfigError, match="is not a number of threads; give a whole number of at least 1"):
        rlx.compile(small(), threads=threads)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"assume": {"m": 3}}, "graph 'small' has no symbol 'm'; its symbols: n"),
        ({"assume": {"n": "many"}}, "the size of 'n' is 'many'; give a whole number"),
        ({"assume": "n=3"}, "is not a dict of symbol -> size; give for example"),
        ({"shardings": {"x": {}}}, "give mesh= too"),
        ({"budget": "lots"}, "is not a number of bytes"),
        ({"debug": "all"}, "unknown debug mode 'all'; use 'nan' or 'poison'"),
        ({"precision": "f7"}, "unknown precision 'f7'; use one of"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rlx.compile(small(), **options)


@pytest.mark.parametrize("array", [False, True], ids=["graph", "array"])
@pytest.mark.parametrize("axis", ["q", "rows", 1.5], ids=str)
@pytest.mark.parametrize(
    "call",
    [
        lambda x, axis: ops.softmax(x, axis=axis),
        lambda x, axis: ops.sum(x, axis=axis),
        lambda x, axis: ops.max(x, axis=(0, axis)),
        lambda x, axis: ops.concat([x, x], axis=axis),
        lambda x, axis: ops.transpose(x, (axis, 0)),
        lambda x, axis: ops.argmax(x, axis=axis),
        lambda x, axis: ops.cumsum(x, axis=axis),
        lambda x, axis: ops.expand_dims(x, axis),
        lambda x, axis: ops.moveaxis(x, 0, axis),
        lambda x, axis: ops.roll(x, 1, axis),
    ],
    ids=[
        *("softmax", "sum", "max", "concat", "transpose", "argmax", "cumsum", "expand_dims", "moveaxis"),
        "roll",
    ],
)
def test_what_is_no_axis(call: Callable[..., Any], axis: Any, array: bool) -> None:
    x = np.ones((2, 3), np.float32) if array else rlx.Graph().input("x", (2, 3), "f32")
    with pytest.raises(TypeMismatchError, match=rf": {axis!r} is not an axis; give a whole number"):
        call(x, axis)


def test_axes_of_numpy_are_axes() -> None:
    x = np.arange(6.0).reshape(2, 3)
    for axis in (np.int64(1), np.array(1), np.array([1]), [1], (-1,)):
        np.testing.assert_array_equal(ops.sum(x, axis=axis), x.sum(1))


@pytest.mark.parametrize("given", [None, 5, "", small()], ids=["None", "number", "nothing", "graph"])
def test_load_takes_a_path(given: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"rlx\.load takes the path of a model, zoo:ID or an ONNX model, not "
    ):
        rlx.load(given)


def test_a_graph_without_outputs() -> None:
    g = rlx.Graph("empty")
    g.input("x", (3,), "f32")
    with pytest.raises(
        VerifyError, match=r"graph 'empty' has no outputs.* add one: graph\.output\('y', node\)"
    ):
        rlx.compile(g)
    with pytest.raises(TransformError, match=r"nothing \(test_api_arguments\.py:\d+\) returns no array"):

        @rlx.jit
        def nothing(x: Any) -> None:
            return None

        nothing(np.ones(3))


@pytest.mark.parametrize("make", [lambda **o: rlx.jit(ops.exp, **o), rlx.jit], ids=["function", "decorator"])
def test_options_that_jit_does_not_know(make: Callable[..., Any]) -> None:
    """When it is made, not when it is called; as a decorator too."""
    with pytest.raises(ConfigError, match=r"jit: unknown option 'thread'; did you mean 'threads'\?"):
        make(thread=1)
    with pytest.raises(ConfigError, match="unknown option 'colours'; it takes static, dynamic, device, "):
        make(colours=True)


def test_jit_takes_a_function() -> None:
    with pytest.raises(TypeMismatchError, match=r"rlx\.jit takes a function, got a value of type int"):
        rlx.jit(3)


@pytest.mark.parametrize("convert", [int, float, bool, np.asarray])
def test_nodes_are_no_numbers(convert: Callable[[Any], Any]) -> None:
    x = rlx.Graph("g").input("x", (), "f32")
    with pytest.raises(TypeMismatchError, match=r"%0 \(input\) has no value while the graph is built; "):
        convert(x)


def test_sizes_and_paths_of_a_program() -> None:
    program = rlx.compile(small())
    for size in (-3, 2.5, "many"):
        with pytest.raises(GuardError, match=f"symbol 'n' of program 'small' cannot be {size!r}"):
            program.lir.specialize({"n": size})  # type: ignore[dict-item]
    with pytest.raises(InputError, match=r"explain\(binding=\{'n': 128\}\)"):
        program.explain({"n": 3})  # type: ignore[arg-type]
    with pytest.raises(FormatError, match=r"for example 'model\.rlx', not to None"):
        program.save(None)  # type: ignore[arg-type]


def test_what_a_graph_is_built_from() -> None:
    g = rlx.Graph("g")
    with pytest.raises(
        ShapeError, match=r"the shape of 'x' needs a tuple of sizes such as \(2, 'n'\), got 5"
    ):
        g.input("x", 5)  # type: ignore[arg-type]
    with pytest.raises(RlxError, match="expected a node of graph 'g', got int"):
        g.output("y", 5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (None, "run takes a dict of input name -> array, got a value of type NoneType"),
        ([np.ones((3, 4), np.float32)], "run takes a dict of input name -> array, got a value of type list"),
        ({}, "input 'x' of program 'small' is missing"),
        ({"x": "words"}, r"input 'x' is f32\[n,4\], got an array of <U5; give an array of numbers"),
        ({"x": None}, r"input 'x' is f32\[n,4\], got an array of object"),
        (
            {"x": [[1.0, 2.0], [3.0]]},
            r"input 'x' is f32\[n,4\], got a list whose rows differ in length; give an array",
        ),
        ({"x": np.ones((3, 4))}, "got dtype f64; cast it"),
    ],
)
def test_what_a_run_is_given(inputs: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        rlx.compile(small()).run(inputs)
