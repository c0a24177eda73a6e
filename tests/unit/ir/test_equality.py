"""`==` and `!=` on traced values: elementwise, as in NumPy."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx
from rlx import Graph, ops
from rlx.errors import DTypeError, RlxError, ShapeError, TypeMismatchError

X = np.array([[0.0, 1.0, -0.0], [np.nan, 2.0, np.inf]], np.float32)
Y = np.array([[0.0, 2.0, 0.0], [np.nan, 2.0, -np.inf]], np.float32)


def equal(a: Any, b: Any) -> Any:
    return a == b


def differ(a: Any, b: Any) -> Any:
    return a != b


COMPARE = pytest.mark.parametrize("compare", [equal, differ])


@COMPARE
@pytest.mark.parametrize(
    "other",
    [Y, Y[0], Y[:, :1], np.float32(2), np.float64(2), 2, 2.0, True, np.array(2, np.float32)],
    ids=["array", "row", "column", "f32", "f64", "int", "float", "bool", "0-d"],
)
def test_it_compares_elements(compare: Callable[[Any, Any], Any], other: Any) -> None:
    want = compare(X, other)
    both = (rlx.jit(lambda a: compare(a, other)), rlx.jit(lambda a: compare(other, a)))
    for f in both:
        got = f(X)
        assert got.dtype == bool
        np.testing.assert_array_equal(got, want)


@COMPARE
def test_values_compared_with_themselves(compare: Callable[[Any, Any], Any]) -> None:
    same = rlx.jit(lambda a, b: ops.mean(ops.cast(compare(a, b), "f32")))
    y = np.arange(4, dtype=np.float32)
    assert same(y, y) == (compare is equal)
    np.testing.assert_array_equal(
        rlx.jit(lambda a: compare(a, a))(X), compare(X, X)
    )  # NaN differs from itself


@COMPARE
@pytest.mark.parametrize("dtype", [np.int8, np.uint64, np.int64, bool, np.complex64, np.float64, np.float16])
def test_every_dtype(compare: Callable[[Any, Any], Any], dtype: Any) -> None:
    a, b = np.array([0, 1, 1, 0]).astype(dtype), np.array([0, 1, 0, 1]).astype(dtype)
    np.testing.assert_array_equal(rlx.jit(compare)(a, b), compare(a, b))


@COMPARE
def test_under_transforms(compare: Callable[[Any, Any], Any]) -> None:
    def masked(a: Any, b: Any) -> Any:
        return ops.where(compare(a, b), a * 3.0, a)

    want = np.where(compare(X, Y), X * 3, X)
    slope = np.where(compare(X, Y), 3, 1).astype(np.float32)
    np.testing.assert_array_equal(rlx.vmap(masked)(X, Y), want)
    np.testing.assert_array_equal(rlx.jit(rlx.vmap(masked))(X, Y), want)
    np.testing.assert_array_equal(
        rlx.vmap(masked, in_axes=(0, None))(X, Y[0]), np.where(compare(X, Y[0]), X * 3, X)
    )
    np.testing.assert_array_equal(rlx.grad(lambda a: ops.sum(masked(a, Y)))(X), slope)
    np.testing.assert_array_equal(rlx.vmap(rlx.grad(lambda a, b: ops.sum(masked(a, b))))(X, Y), slope)
    _, change = rlx.jvp(masked, (X, Y), (np.ones_like(X), np.ones_like(Y)))
    np.testing.assert_array_equal(change, slope)
    np.testing.assert_array_equal(masked(X, Y), want)  # arrays: NumPy's own


def test_in_bodies_of_control_flow() -> None:
    def count(row: Any) -> Any:
        def step(carry: Any, x: Any) -> Any:
            return carry + ops.cast(x == 2.0, "f32"), x != 2.0

        return ops.scan(step, np.float32(0), row)

    total, rest = rlx.jit(count)(Y[0])
    assert total == 1
    np.testing.assert_array_equal(rest, Y[0] != 2)
    pick = rlx.jit(lambda a, b: ops.cond(ops.all(a == b), lambda: a, lambda: -b))
    np.testing.assert_array_equal(pick(Y[0], Y[0]), Y[0])
    np.testing.assert_array_equal(pick(Y[0], Y[0] + 1), -(Y[0] + 1))


def test_nodes_of_a_graph() -> None:
    g = Graph()
    x = g.input("x", ("n",), "f32")
    g.set_outputs(
        {"one": x == 1.0, "size": x.shape[0] == ops.cast(x, "i64"), "other": ops.cast(x, "i64") != x.shape[0]}
    )
    values = np.array([1, 2, 3], np.float32)
    got = rlx.compile(g).run({"x": values})
    np.testing.assert_array_equal(got["one"], values == 1)
    np.testing.assert_array_equal(got["size"], values == 3)
    np.testing.assert_array_equal(got["other"], values != 3)


def test_none_is_no_value() -> None:
    """`x == None` is plainly False, so that it takes the branch that `x is None` takes."""
    f = rlx.jit(lambda x, b=None: x if b == None else x + b)  # noqa: E711
    np.testing.assert_array_equal(f(Y[0]), Y[0])
    np.testing.assert_array_equal(f(Y[0], Y[0]), Y[0] * 2)
    np.testing.assert_array_equal(rlx.jit(lambda x: x if x != None else -x)(Y[0]), Y[0])  # noqa: E711


@pytest.mark.parametrize("other", ["x", {}, object(), {1.0}])
def test_what_is_no_array_is_refused(other: Any) -> None:
    kind = type(other).__name__
    with pytest.raises(
        TypeMismatchError, match=f"an operand of type {kind} is neither a node, an array nor a number"
    ):
        rlx.jit(lambda x: x == other)(X)


def test_the_rules_of_other_operators_hold() -> None:
    with pytest.raises(DTypeError, match="different dtypes; cast one"):
        rlx.jit(lambda a, b: a == b)(X, X.astype(np.float64))
    with pytest.raises(DTypeError, match="300 does not fit u8"):
        rlx.jit(lambda a: a != 300)(np.zeros(2, np.uint8))
    with pytest.raises(ShapeError, match="do not broadcast"):
        rlx.jit(lambda a, b: a == b)(X, X[:, :2])
    one, other = Graph(), Graph()
    a, b = one.input("a", (2,), "f32"), other.input("b", (2,), "f32")
    said = []
    for compare in (operator.add, equal, differ):
        with pytest.raises(RlxError) as refusal:
            compare(a, b)
        said.append(re.sub(r"^\w+: | \(at .*\)$", "", str(refusal.value)))
    assert len(set(said)) == 1


@pytest.mark.parametrize(
    "ask",
    [
        lambda a, b: a if a == b else b,
        lambda a, b: a if a != b else b,
        lambda a, b: a if a in [b, a] else b,
        lambda a, b: [b, a].index(a),
        lambda a, b: a if (a, 1) == (b, 1) else b,
        lambda a, b: a if not a == b else b,
        lambda a, b: a == b and a,
    ],
)
def test_one_answer_for_all_elements_is_refused(ask: Callable[[Any, Any], Any]) -> None:
    with pytest.raises(TypeMismatchError, match=r"use rlx\.ops\.where or rlx\.ops\.cond; == and != compare"):
        rlx.jit(ask)(X, Y)


def test_nodes_are_keys_by_identity() -> None:
    g = Graph()
    nodes = [g.input(f"x{i}", (2,), "f32") for i in range(2000)]
    places = {n: i for i, n in enumerate(nodes)}
    assert all(places[n] == i for i, n in enumerate(nodes)) and len(set(nodes)) == 2000
    assert len({hash(n) for n in nodes}) == 2000 and nodes[0] in set(nodes)
    twin = Graph()
    twins = [twin.input(f"x{i}", (2,), "f32") for i in range(2000)]  # the same numbers in another graph
    assert not any(n in places for n in twins) and len({*nodes, *twins}) == 4000
    assert len(g.nodes) == 2000 and len(twin.nodes) == 2000
