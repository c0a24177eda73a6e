"""What type checkers know about calls: mypy checks each `assert_type`, and the tests run the same lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_type

import numpy as np

import rlx
from rlx import ops
from rlx.ir.dim import Dim
from rlx.ir.node import Node
from rlx.runtime.program import CompiledProgram


def graph_of_two() -> tuple[rlx.Graph, Node, Node]:
    g = rlx.Graph("typed")
    return g, g.input("x", (2, 3), "f32"), g.input("y", (3, 4), "f32")


def test_an_op_called_on_nodes_is_a_node() -> None:
    _, x, y = graph_of_two()
    for made in (
        assert_type(ops.exp(x), Node),
        assert_type(ops.add(x, 1.0), Node),
        assert_type(ops.add(1.0, x), Node),
        assert_type(ops.where(x > 0, 1.0, x), Node),
        assert_type(ops.matmul(x, y), Node),
        assert_type(x @ y, Node),
        assert_type(2 * x + x.T[0, 0], Node),
    ):
        assert isinstance(made, Node)


def test_a_function_of_nodes_is_a_node() -> None:
    _, x, y = graph_of_two()
    for made in (
        assert_type(ops.reshape(x, (3, -1)), Node),
        assert_type(ops.softmax(x, axis=0), Node),
        assert_type(ops.sum(x, axis=1, keepdims=True), Node),
        assert_type(ops.mean(x), Node),
        assert_type(ops.max(x, 1), Node),
        assert_type(ops.layer_norm(x), Node),
        assert_type(ops.linear(x, y), Node),
        assert_type(ops.linear(np.ones((5, 3), np.float32), y), Node),
        assert_type(ops.gather(np.ones(3, np.float32), ops.argmax(x, 1)), Node),
        assert_type(ops.cast(x, "f64"), Node),
        assert_type(ops.clip(x, 0.0), Node),
    ):
        assert isinstance(made, Node)


def test_without_a_node_the_type_is_open() -> None:
    found = assert_type(ops.exp(np.zeros(2)), Any)  # an array here, a node inside a function that is traced
    assert isinstance(found, np.ndarray)
    inside: list[object] = []

    def traced(x: Node) -> Node:
        inside.append(ops.exp(np.zeros(2)))
        return x

    rlx.jit(traced)(np.zeros(2))
    assert isinstance(inside[0], Node)


def test_sizes_are_dims() -> None:
    _, x, _ = graph_of_two()
    assert assert_type(x.shape, tuple[Dim, ...]) == (2, 3)
    assert assert_type(x.rank, int) == 2


def test_compile_and_load_give_programs(tmp_path: Path) -> None:
    g, x, _ = graph_of_two()
    g.output("z", ops.exp(x))
    program = assert_type(rlx.compile(g), CompiledProgram)
    program.save(tmp_path / "typed.rlx")
    loaded = assert_type(rlx.load(tmp_path / "typed.rlx"), CompiledProgram)
    assert isinstance(program, CompiledProgram)
    assert isinstance(loaded, CompiledProgram)


def test_lists_are_arrays() -> None:
    assert ops.imag([1.0, 2.0]).tolist() == [0.0, 0.0]
    assert ops.real([1.0, 2.0]).tolist() == ops.conj([1.0, 2.0]).tolist() == [1.0, 2.0]
    assert ops.flip([1, 2, 3]).tolist() == [3, 2, 1]
    assert ops.windows([1, 2, 3], (2,)).tolist() == [[1, 2], [2, 3]]
    assert ops.conv([[[1.0, 2.0, 3.0]]], [[[1.0, 1.0]]]).tolist() == [[[3.0, 5.0]]]
    assert ops.max_pool([[[1.0, 3.0, 2.0]]], 2).tolist() == [[[3.0, 3.0]]]
    assert ops.full((2,), [7]).tolist() == [7, 7]
