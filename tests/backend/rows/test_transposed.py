"""Maps that read along one axis and write along another: blocks, ragged edges, dtypes, fused neighbours."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest

import rlx
from gemm_harness import every_target
from rlx import ops
from rlx.ir.dtype import dtype as as_dtype
from rlx.ir.graph import Graph
from rlx.reference.interpreter import evaluate
from rlx.target.cpu import Target

EDGES = (1, 2, 7, 8, 15, 16, 17, 33, 64)


def counted(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    """Every element different (as far as the dtype can tell)."""
    return (np.arange(int(np.prod(shape))).reshape(shape) % 127).astype(dtype)


def check(g: Graph, feed: dict[str, np.ndarray], **options: Any) -> None:
    want = evaluate(g, feed)
    one, three = (rlx.compile(g, threads=t, **options).run(feed) for t in (1, 3))
    for name, value in want.items():
        np.testing.assert_array_equal(one[name], value)
        assert one[name].tobytes() == three[name].tobytes()


@every_target
def test_every_edge(target: Target) -> None:
    """One compiled program with run-time sizes: whole blocks, ragged rows, ragged columns, both."""
    g = Graph("turn")
    g.output("y", ops.transpose(g.input("x", ("n", "m"), "f32"), (1, 0)) * 2.0)
    program = rlx.compile(g, target=target.name, threads=2)
    for n in EDGES:
        for m in EDGES:
            x = counted((n, m))
            np.testing.assert_array_equal(program(x), x.T * 2)


@pytest.mark.parametrize("perm", list(permutations(range(3))), ids=str)
def test_every_permutation_of_three_axes(perm: tuple[int, ...]) -> None:
    g = Graph("turn")
    g.output("y", ops.transpose(g.input("x", (5, 19, 34), "f32"), perm) + 1.0)
    check(g, {"x": counted((5, 19, 34))})


@every_target
@pytest.mark.parametrize("dtype", ["f64", "f16", "bf16", "i8", "u8", "i16", "i32", "i64", "bool"])
def test_dtypes(target: Target, dtype: str) -> None:
    g = Graph("turn")
    x = g.input("x", (37, 21), dtype)
    turned = ops.transpose(x, (1, 0))
    g.output("y", ops.logical_not(turned) if dtype == "bool" else turned + turned)
    check(g, {"x": counted((37, 21), as_dtype(dtype).np)}, target=target.name)


def test_turned_and_straight_operands_meet() -> None:
    """One kernel reads one operand across and others along, a scalar and a row that broadcasts."""
    g = Graph("mix")
    a, b = g.input("a", (40, 23), "f32"), g.input("b", (23, 40), "f32")
    row, column = g.input("row", (40,), "f32"), g.input("column", (23, 1), "f32")
    g.output("y", ops.transpose(a, (1, 0)) * b + row - column * 2.0)
    check(
        g,
        {
            "a": counted((40, 23)),
            "b": counted((23, 40)),
            "row": counted((40,)),
            "column": counted((23, 1)),
        },
    )


def test_two_operands_turned_the_same_way() -> None:
    g = Graph("two")
    a, b = (g.input(n, (3, 50, 18), "f32") for n in "ab")
    g.output("y", ops.transpose(a, (0, 2, 1)) - ops.transpose(b, (0, 2, 1)) * 3.0)
    check(g, {"a": counted((3, 50, 18)), "b": counted((3, 50, 18))})


def test_two_operands_turned_differently() -> None:
    g = Graph("two")
    a, b = g.input("a", (18, 9, 20), "f32"), g.input("b", (9, 20, 18), "f32")
    g.output("y", ops.transpose(a, (1, 2, 0)) + ops.transpose(ops.transpose(b, (1, 0, 2)), (1, 0, 2)))
    check(g, {"a": counted((18, 9, 20)), "b": counted((9, 20, 18))})


def test_a_cut_of_a_turned_operand() -> None:
    g = Graph("cut")
    x = g.input("x", (50, 44), "f32")
    g.output("y", ops.transpose(x, (1, 0))[3:40, 5:45] * 2.0)
    g.output("flipped", ops.flip(ops.transpose(x, (1, 0)), 1) + 1.0)
    check(g, {"x": counted((50, 44))})


def test_padding_around_a_turned_operand() -> None:
    g = Graph("pad")
    x = g.input("x", (20, 35), "f32")
    g.output("y", ops.pad(ops.transpose(x, (1, 0)), [(1, 2), (3, 0)]) * 2.0)
    check(g, {"x": counted((20, 35))})


def test_heads_of_attention_are_moved() -> None:
    g = Graph("heads")
    x = g.input("x", (2, "s", 4 * 16), "f32")
    s = x.shape[1]
    heads = ops.transpose(ops.reshape(x, (2, s, 4, 16)), (0, 2, 3, 1))
    g.output("y", heads * 0.5)
    program = rlx.compile(g, threads=2)
    for n in (1, 5, 16, 39):
        value = counted((2, n, 64))
        want = value.reshape(2, n, 4, 16).transpose(0, 2, 3, 1) * np.float32(0.5)
        np.testing.assert_array_equal(program(value), want)
