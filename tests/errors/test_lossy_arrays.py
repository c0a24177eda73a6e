"""Masked arrays, matrices, arrays of objects and of fields are refused wherever arrays come in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.driver import ArenaSlot, Buffer, HostArena
from rlx.errors import RlxError
from rlx.reference.interpreter import evaluate

ROW = np.array([[1.0, 2.0]], np.float32)
LOSSY: dict[str, tuple[Any, str]] = {
    "masked": (np.ma.masked_array(ROW, mask=[[False, True]]), "masked array.*filled"),
    "without a mask": (np.ma.masked_array(ROW), "masked array"),
    "matrix": (ROW.view(np.matrix), "matrix.*np.asarray"),
    "objects": (
        ROW.astype(object),
        "Python objects.*astype|give arrays and numbers|give an array of numbers|convert the array",
    ),
    "fields": (np.zeros((1, 2), [("a", "f4"), ("b", "i4")]), r"fields \(a, b\)|convert the array"),
}


def program() -> Any:
    g = rlx.Graph("p")
    g.output("y", g.input("x", (1, 2), "f32") * g.param("w", (1, 2), "f32", value=ROW))
    return rlx.compile(g, cache=False)


def _bind(x: Any) -> None:
    program().bind({"x": x}, {"y": np.zeros((1, 2), np.float32)})


def _bind_output(x: Any) -> None:
    program().bind({"x": ROW}, {"y": x})


def _body(x: Any) -> None:
    rlx.jit(lambda t: ops.cond(ops.sum(t) > 0.0, lambda: t, lambda: x))(ROW)


WAYS_IN: dict[str, Callable[[Any], Any]] = {
    "jit": lambda x: rlx.jit(lambda t: t + 1.0)(x),
    "jit list": lambda x: rlx.jit(lambda t: t[0] + 1.0)([x]),
    "closure": lambda x: rlx.jit(lambda t: t + x)(ROW),
    "grad": lambda x: rlx.grad(lambda t: ops.sum(t))(x),
    "vmap": lambda x: rlx.vmap(lambda t: t + 1.0)(x),
    "eager": lambda x: ops.add(x, ROW),
    "eager unary": lambda x: ops.exp(x),
    "eager sum": lambda x: ops.sum(x),
    "eager mean": lambda x: ops.mean(x),
    "eager reshape": lambda x: ops.reshape(x, (2,)),
    "eager concat": lambda x: ops.concat([x, ROW], 0),
    "branch": _body,
    "run": lambda x: program().run({"x": x}),
    "call": lambda x: program()(x),
    "trace": lambda x: program().trace({"x": x}),
    "bind": _bind,
    "bind output": _bind_output,
    "set_param": lambda x: program().set_param("w", x),
    "graph param": lambda x: rlx.Graph().param("w", (1, 2), "f32", value=x),
    "graph constant": lambda x: rlx.Graph().constant(x),
    "list of arrays": lambda x: rlx.Graph().constant([x, x]),
    "constant with dtype": lambda x: rlx.Graph().constant(x, "f32"),
    "graph state": lambda x: rlx.Graph().state("s", (1, 2), "f32", init=x),
    "reference": lambda x: evaluate(program().graph, {"x": x}, {"w": ROW}),
    "buffer": Buffer.of,
    "buffer write": lambda x: Buffer.empty((1, 2), "f32").write(x),
    "arena": lambda x: HostArena({0: ArenaSlot(0, "f32", (1, 2))}).write(0, x),
}


@pytest.mark.parametrize("kind", LOSSY)
@pytest.mark.parametrize("way", WAYS_IN)
def test_refused_in_words(way: str, kind: str) -> None:
    value, words = LOSSY[kind]
    with pytest.raises(RlxError, match=words):
        WAYS_IN[way](value)


def test_other_subclasses_pass(tmp_path: Any) -> None:
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=(1, 2))
    mapped[:] = ROW
    np.testing.assert_array_equal(rlx.jit(lambda t: t + 1.0)(mapped), ROW + 1)
