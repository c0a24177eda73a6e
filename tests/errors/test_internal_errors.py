"""Bugs inside RLX are told as such: an InternalError with the graph in a file, never a KeyError."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest

import rlx
from rlx import Graph, ops
from rlx.crash_report import reports_crashes
from rlx.errors import InternalError, KernelError, RlxError
from rlx.ir.text.diff import structurally_equal
from rlx.ir.text.files import load
from rlx.ops.control.custom import unregister_op

X = np.ones((4, 64), np.float32)


def net() -> Graph:
    g = Graph("net")
    x = g.input("x", (4, 64), "f32")
    w = g.param("w", (64, 8), "f32", np.full((64, 8), 0.125, np.float32))
    g.output("y", ops.softmax(x @ w))
    return g


def function_in(file: str, module: str, source: str) -> Any:
    """A function whose code is in a file of somebody."""
    scope: dict[str, Any] = {"__name__": module}
    exec(compile(source, file, "exec"), scope)
    made = scope["fail"]
    assert isinstance(made, FunctionType)
    return made


FAILING = "def fail(*args, **kwargs):\n    raise {}"
fail = function_in(rlx.__file__, "rlx.part", FAILING.format("KeyError('at:f32(i1)')"))


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def told(error: InternalError, inside: str) -> str:
    """The file that the message names, after a look at the rest of it."""
    assert isinstance(error, RlxError) and isinstance(error.__cause__, KeyError)
    start = (
        rf"RLX failed inside {inside} \(KeyError: 'at:f32\(i1\)'\); this is a bug of RLX, not of your program"
    )
    assert re.match(start, error.message), error.message
    assert error.message.endswith("the whole traceback") and error.where[0].startswith("__init__.py:")
    (path,) = re.findall(r"open an issue with the (?:file|model) (\S+?),? ", error.message)
    return str(path)


@pytest.mark.parametrize(
    ("place", "inside"),
    [
        ("rlx.api.lowering.simplify_rules", "optimize"),
        ("rlx.api.lowering.expand_graph", "lower"),
        ("rlx.plan.build.Planner.plan", "plan"),
        ("rlx.codegen.cpu.build.emit_kernel", "compile"),  # in the thread that makes native code
    ],
)
def test_in_the_compiler(place: str, inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, fail)
    with pytest.raises(InternalError) as caught:
        rlx.optimize(net()) if inside == "optimize" else rlx.compile(net(), cache=False)
    saved = load(told(caught.value, inside))
    assert structurally_equal(saved, net()) and not saved.param_values


def test_while_a_function_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph as far as it was built."""
    softmax = ops.softmax

    def f(x: Any) -> Any:
        return softmax(ops.exp(x) * 2.0)

    monkeypatch.setattr(type(rlx.ir.op.get_op("softmax")), "infer", fail)
    with pytest.raises(InternalError) as caught:
        rlx.jit(f)(X)
    assert [n.op.name for n in load(told(caught.value, "the trace of f")).nodes] == [
        "input",
        "exp",
        "constant",
        "mul",
    ]


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: rlx.grad(lambda x: ops.sum(f(x))),
        lambda f: rlx.vmap(f),
        lambda f: lambda x: rlx.jvp(f, (x,), (x,)),
    ],
    ids=["grad", "vmap", "jvp"],
)
def test_in_transforms(transform: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlx.api.functions.backward", fail)
    monkeypatch.setattr("rlx.api.functions.batch_graph", fail)
    monkeypatch.setattr("rlx.api.functions.jvp_graph", fail)
    with pytest.raises(InternalError, match="RLX failed inside the trace of"):
        transform(ops.tanh)(X)


def test_at_run_time(monkeypatch: pytest.MonkeyPatch) -> None:
    program = rlx.compile(net())
    monkeypatch.setattr("rlx.runtime.memory.OutputPool.empty", fail)
    for run in (lambda: program(X), lambda: program.run({"x": X})):
        with pytest.raises(InternalError) as caught:
            run()
        assert structurally_equal(load(told(caught.value, "a run of 'net'")), net())
    with pytest.raises(InternalError, match="RLX failed inside a run of 'net'"):
        program.stream().step({"x": X})


def test_while_a_model_is_imported(monkeypatch: pytest.MonkeyPatch, require: Callable[[str], None]) -> None:
    """The model is saved without its weights; small tensors, such as shapes, stay."""
    require("onnx")
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    weights = [
        numpy_helper.from_array(np.ones((64, 8), np.float32), "w"),
        numpy_helper.from_array(np.array([8, -1]), "shape"),
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Reshape", ["a", "shape"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xy"]
    model = helper.make_model(helper.make_graph(nodes, "net", ends[:1], ends[1:], weights))
    broken = function_in(rlx.__file__, "rlx.part", FAILING.format("AssertionError('no such thing')"))
    monkeypatch.setattr("rlx.frontend.onnx.importer.Importer.nodes", broken)
    with pytest.raises(InternalError, match=r"inside the import of an ONNX model \(AssertionError") as caught:
        rlx.load(model)
    (path,) = re.findall(r"the file (\S+), which holds the model without its weights", caught.value.message)
    saved = onnx.load(path)
    assert [len(t.raw_data) for t in saved.graph.initializer] == [0, 16]


def test_while_a_file_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "net.rlx"
    rlx.compile(net()).save(path)
    monkeypatch.setattr("rlx.runtime.store.artifact.Artifact.find", fail)
    with pytest.raises(InternalError) as caught:
        rlx.load(path)
    assert told(caught.value, "load") == str(path)


# -- what passes


def test_refusals_and_errors_of_the_system_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(rlx.errors.ConfigError):
        rlx.compile(net(), assume={"seq": 3})
    full = function_in(rlx.__file__, "rlx.part", FAILING.format("OSError('no space left on device')"))
    monkeypatch.setattr("rlx.plan.build.Planner.plan", full)
    with pytest.raises(OSError, match="no space left"):
        rlx.compile(net())


@pytest.mark.parametrize("transform", [rlx.jit, rlx.vmap, lambda f: rlx.grad(f)], ids=["jit", "vmap", "grad"])
def test_errors_of_the_users_function_pass(transform: Callable[..., Any], tmp_path: Path) -> None:
    table: dict[str, int] = {}
    with pytest.raises(KeyError, match="'gain'"):
        transform(lambda x: ops.sum(x) * table["gain"])(X)
    with pytest.raises(ValueError, match="could not convert"):  # raised by Python for a line of the user
        transform(lambda x: ops.sum(x) * float("loud"))(X)
    with pytest.raises(ValueError, match="cannot reshape"):  # raised by NumPy for a line of the user
        transform(lambda x: ops.sum(x) + np.ones(3, np.float32).reshape(2, 2))(X)
    assert not list(tmp_path.glob("rlx-failed-*"))


def test_errors_of_the_users_op_pass(tmp_path: Path) -> None:
    def compute(x: np.ndarray) -> np.ndarray:
        raise LookupError("the table is not there")

    looked_up = rlx.register_op("looked_up", ref=compute)
    try:
        g = Graph("net")
        g.output("y", looked_up(g.input("x", (3,), "f32")))
        with pytest.raises(
            KernelError, match=r"%1 \(custom\) raised LookupError on the host: the table is not"
        ):
            rlx.compile(g)(np.ones(3, np.float32))
    finally:
        unregister_op("looked_up")
    assert not list(tmp_path.glob("rlx-failed-*"))


def test_warnings_as_errors_pass() -> None:
    warn = function_in(
        rlx.__file__, "rlx.part", "import warnings\ndef fail(graph):\n    warnings.warn('old')"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="old"):
            reports_crashes(warn)(net())


def test_a_graph_that_cannot_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first error is told all the same, and no empty file is left."""
    monkeypatch.setattr("rlx.plan.build.Planner.plan", fail)
    monkeypatch.setattr("rlx.ir.text.files.save", fail)
    with pytest.raises(InternalError, match="open an issue with the whole traceback"):
        rlx.compile(net())
    assert not list(tmp_path.glob("rlx-failed-*"))
