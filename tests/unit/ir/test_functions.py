"""jit, grad, value_and_grad, jvp and vmap of Python functions: what they specialise on, nest and refuse."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.errors import GradientError, RlxError, TransformError


def vector(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


# --- jit: when a new trace is made


@pytest.mark.parametrize(
    "other",
    [vector(1.0, 2.0).astype(np.float64), vector(1.0, 2.0)[None], [vector(1.0, 2.0)]],
    ids=["dtype", "rank", "tree"],
)
def test_another_kind_of_argument_is_traced_anew(other: Any) -> None:
    f = rlx.jit(lambda x: (x[0] if isinstance(x, list) else x) * 2.0)
    f(vector(1.0, 2.0))
    got = f(other)
    array = other[0] if isinstance(other, list) else other
    np.testing.assert_array_equal(got, array * 2)
    assert got.dtype == array.dtype and f.stats["traces"] == 2


def test_a_bias_that_is_broadcast_has_a_gradient() -> None:

    def loss(w, b, x):
        return ops.mean(ops.relu(ops.conv(x, w, padding=((1, 1), (1, 1))) + b) ** 2)

    rng = np.random.default_rng(0)
    w, x = rng.standard_normal((8, 3, 3, 3), np.float32), rng.standard_normal((2, 3, 6, 6), np.float32)
    b = rng.standard_normal((8, 1, 1), np.float32)
    step = rlx.jit(rlx.value_and_grad(loss, argnums=(0, 1)))
    value, (dw, db) = step(w, b, x)
    y = np.maximum(ops.conv(x, w, padding=((1, 1), (1, 1))) + b, 0)
    np.testing.assert_allclose(value, np.mean(y**2), rtol=1e-5)
    np.testing.assert_allclose(db[:, 0, 0], (2 * y / y.size).sum((0, 2, 3)), rtol=1e-4, atol=1e-6)
    assert dw.shape == w.shape
    with pytest.raises(RlxError, match=r"add: shapes \[2,8,6,6\] and \[7,1,1\] do not broadcast"):
        step(w, rng.standard_normal((7, 1, 1), np.float32), x)


def test_a_size_read_as_a_number_is_specialised_with_its_line() -> None:
    f = rlx.jit(lambda x: sum((x[i] for i in range(x.shape[0])), start=ops.sum(x) * 0.0))
    assert f(vector(1, 2, 3)) == 6
    assert f(vector(1, 2)) == 3
    assert f.stats["traces"] == 2
    assert any(
        "read as a number" in why and "test_functions" in why for why in f.stats["specialized"].values()
    )


def test_static_arguments_by_place_and_name() -> None:
    @rlx.jit(static=(1, "power"))
    def f(x: Any, times: int, power: int = 1) -> Any:
        for _ in range(times):
            x = x * x if power == 2 else x + 1.0
        return x

    np.testing.assert_array_equal(f(vector(1, 2), 2), [3, 4])
    np.testing.assert_array_equal(f(vector(1, 2), 3), [4, 5])
    np.testing.assert_array_equal(f(vector(1, 2), 1, power=2), [1, 4])
    np.testing.assert_array_equal(f(vector(1, 2), 1, 2), [1, 4])
    np.testing.assert_array_equal(f(vector(2, 3), times=1, power=2), [4, 9])
    before = f.stats["traces"]
    np.testing.assert_array_equal(f(vector(3, 4), 2), [5, 6])
    assert f.stats["traces"] == before


@pytest.mark.parametrize(("first", "second"), [(1, True), (1, 1.0), (0.0, -0.0), ((1, 2), (1.0, 2))])
def test_static_values_that_only_compare_equal_are_told_apart(first: Any, second: Any) -> None:
    f = rlx.jit(lambda x, how: ops.full((2,), 0.0, "f32") + x + float(str(how) == str(second)), static=(1,))
    assert f(vector(0, 0), first).tolist() == [0, 0]
    assert f(vector(0, 0), second).tolist() == [1, 1]


def test_static_arguments_must_be_hashable() -> None:
    f = rlx.jit(lambda x, how: x, static=(1,))
    with pytest.raises(TransformError, match="must be hashable"):
        f(vector(1), [1, 2])


def test_static_names_must_exist() -> None:
    with pytest.raises(TransformError, match="'tims'"):
        rlx.jit(lambda x, times: x, static=("tims",))
    with pytest.raises(TransformError, match="argument 2"):
        rlx.jit(lambda x, times: x, static=(2,))


# --- jit: values


def test_nested_arguments_and_results() -> None:
    @rlx.jit
    def f(params: dict[str, Any], pair: tuple[Any, list[Any]], *, scale: Any) -> Any:
        x, (y, z) = pair
        return {"sum": params["w"] * x + params["b"], "rest": [y * scale, (z, None)], "one": 1.0}

    got = f({"w": vector(2), "b": vector(1)}, (vector(3), [vector(4), vector(5)]), scale=2.0)
    assert sorted(got) == ["one", "rest", "sum"]
    assert got["sum"] == 7 and got["rest"][0] == 8 and got["rest"][1][0] == 5 and got["rest"][1][1] is None
    assert got["one"] == 1.0 and isinstance(got["rest"], list) and isinstance(got["rest"][1], tuple)


def test_results_may_be_arguments_and_repeat() -> None:
    x = vector(1, 2)
    same, again, double, double_again = rlx.jit(lambda x: (x, x, x * 2.0, x * 2.0))(x)
    for got in (same, again):
        np.testing.assert_array_equal(got, x)
        assert not np.shares_memory(got, x)
    np.testing.assert_array_equal(double, [2, 4])
    np.testing.assert_array_equal(double_again, [2, 4])


def test_no_arguments() -> None:
    np.testing.assert_array_equal(rlx.jit(lambda: ops.iota((3,), 0, "i64") * 2)(), [0, 2, 4])


def test_a_jitted_function_inside_another_is_part_of_it() -> None:
    inner = rlx.jit(lambda x: ops.tanh(x))
    outer = rlx.jit(lambda x: inner(x) * inner(x + 1.0))
    x = vector(0.5)
    np.testing.assert_allclose(outer(x), np.tanh(x) * np.tanh(x + 1), rtol=1e-6)
    assert inner.stats["traces"] == 0


def test_threads_may_share_a_jitted_function() -> None:
    f = rlx.jit(lambda x: ops.sum(x * x))
    wrong: list[Any] = []

    def work(size: int) -> None:
        x = np.full((size,), 2.0, np.float32)
        try:
            wrong.extend(size for _ in range(20) if f(x) != 4.0 * size)
        except Exception as error:
            wrong.append(error)

    workers = [threading.Thread(target=work, args=(n,)) for n in (3, 100, 1000, 7)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert not wrong


# --- gradients


def test_gradients_have_the_tree_of_the_argument() -> None:
    def loss(params: dict[str, Any], x: Any) -> Any:
        return ops.sum(ops.tanh(x @ params["w"] + params["layers"][0]))

    w, b, x = np.ones((2, 3)) * 0.1, np.zeros(3), np.array([[1.0, 2.0]])
    got = rlx.grad(loss)({"w": w, "layers": [b]}, x)
    slope = 1 - np.tanh(0.3) ** 2
    np.testing.assert_allclose(got["layers"][0], np.full(3, slope))
    np.testing.assert_allclose(got["w"], np.outer(x[0], np.full(3, slope)))


def test_several_arguments_and_auxiliary_results() -> None:
    def f(x: Any, y: Any) -> Any:
        return ops.sum(x * y), {"x": x + 1.0}

    (value, aux), (dx, dy) = rlx.value_and_grad(f, argnums=(0, 1), has_aux=True)(
        np.array([1.0, 2.0]), np.array([3.0, 4.0])
    )
    assert value == 11
    np.testing.assert_array_equal(aux["x"], [2, 3])
    np.testing.assert_array_equal(dx, [3, 4])
    np.testing.assert_array_equal(dy, [1, 2])


def test_an_unused_argument_has_a_zero_gradient() -> None:
    np.testing.assert_array_equal(rlx.grad(lambda x, y: ops.sum(y), 0)(np.ones(3), np.ones(2)), np.zeros(3))


def test_a_closure_over_the_same_value_is_a_constant() -> None:
    def outer(x: Any) -> Any:
        return rlx.grad(lambda y: ops.sum(x * y))(x)  # d/dy only: x, not 2x

    np.testing.assert_array_equal(rlx.jit(outer)(np.array([3.0])), [3.0])


def test_what_grad_refuses() -> None:
    with pytest.raises(GradientError, match="returns a scalar"):
        rlx.grad(lambda x: x * 2.0)(np.ones(3))
    with pytest.raises(GradientError, match="only for floating point"):
        rlx.grad(lambda x: ops.sum(ops.cast(x, "f32")))(np.arange(3))


# --- jvp, vmap and compositions


def test_jvp_of_nested_arguments() -> None:
    value, slope = rlx.jvp(
        lambda p: p["a"] * p["b"],
        ({"a": np.array([2.0]), "b": np.array([5.0])},),
        ({"a": np.array([1.0]), "b": np.array([10.0])},),
    )
    assert value == 10 and slope == 25


def test_jvp_needs_as_many_tangents_as_primals() -> None:
    with pytest.raises(TransformError, match="1 primals but 2 tangents"):
        rlx.jvp(lambda x: x, (np.ones(1),), (np.ones(1), np.ones(1)))


def test_jvp_of_the_same_function_is_compiled_once() -> None:
    calls = []

    def f(x: Any) -> Any:
        calls.append(1)
        return x * x

    for i in range(3):
        value, slope = rlx.jvp(f, (np.array([float(i)]),), (np.array([1.0]),))
        assert value == i * i and slope == 2 * i
    first = len(calls)
    rlx.jvp(f, (np.array([9.0]),), (np.array([1.0]),))
    assert len(calls) == first


def test_vmap_axes() -> None:
    x = np.arange(6.0).reshape(2, 3)
    row = rlx.vmap(lambda v, w: ops.sum(v * w), in_axes=(0, None))(x, np.ones(3))
    np.testing.assert_array_equal(row, x.sum(1))
    column = rlx.vmap(lambda v: ops.sum(v), in_axes=1)(x)
    np.testing.assert_array_equal(column, x.sum(0))
    last = rlx.vmap(lambda v: ops.sum(v), in_axes=-1)(x)
    np.testing.assert_array_equal(last, x.sum(0))
    moved = rlx.vmap(lambda v: v * 2.0, out_axes=1)(x)
    np.testing.assert_array_equal(moved, x.T * 2)


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("size", [2, "n"])
def test_vmap_of_the_right_side_of_a_product(size: int | str, columns: int) -> None:
    """Examples are columns of one product, and lie apart in the result, even if each has one column only."""
    g = rlx.Graph("product")
    x, w = g.input("x", (2, 4), "f32"), g.input("w", (size, 4, columns), "f32")
    with g.building():
        g.output("y", rlx.vmap(lambda x, w: x @ w, in_axes=(None, 0))(x, w))
    a = np.arange(8, dtype=np.float32).reshape(2, 4)
    b = np.arange(8 * columns, dtype=np.float32).reshape(2, 4, columns)
    np.testing.assert_array_equal(rlx.compile(g).run({"x": a, "w": b})["y"], a @ b)


def test_vmap_of_a_constant_result_repeats_it() -> None:
    got = rlx.vmap(lambda v: (v, ops.full((2,), 7.0, "f64")))(np.ones(3))
    np.testing.assert_array_equal(got[1], np.full((3, 2), 7.0))


def test_what_vmap_refuses() -> None:
    with pytest.raises(TransformError, match="2 arguments but 1 in_axes"):
        rlx.vmap(lambda x, y: x, in_axes=(0,))(np.ones(2), np.ones(2))
    with pytest.raises(TransformError, match="out of range"):
        rlx.vmap(lambda x: x, in_axes=2)(np.ones(2))
    with pytest.raises(TransformError, match="no argument has an axis"):
        rlx.vmap(lambda x: x, in_axes=None)(np.ones(2))
    with pytest.raises(RlxError):
        rlx.vmap(lambda x, y: x + y)(np.ones((3, 1)), np.ones((4, 1)))


def test_transforms_nest() -> None:
    x = np.array([0.3, -0.7, 1.1])

    def f(v: Any) -> Any:
        return ops.sum(ops.sin(v) * v)

    first, second = np.cos(x) * x + np.sin(x), 2 * np.cos(x) - np.sin(x) * x
    gradient = rlx.grad(f)
    np.testing.assert_allclose(gradient(x), first)
    np.testing.assert_allclose(rlx.grad(lambda v: ops.sum(gradient(v)))(x), second)
    per_element = rlx.vmap(rlx.grad(lambda s: ops.sin(s) * s))
    np.testing.assert_allclose(per_element(x), first)
    np.testing.assert_allclose(rlx.vmap(rlx.grad(rlx.grad(lambda s: ops.sin(s) * s)))(x), second)
    value, slope = rlx.jvp(gradient, (x,), (np.ones(3),))
    np.testing.assert_allclose(value, first)
    np.testing.assert_allclose(slope, second)
    np.testing.assert_allclose(rlx.jit(rlx.vmap(rlx.grad(rlx.jit(lambda s: ops.sin(s) * s))))(x), first)
    hessian = rlx.vmap(lambda d: rlx.jvp(gradient, (x,), (d,))[1])(np.eye(3))
    np.testing.assert_allclose(hessian, np.diag(second), atol=1e-12)
    grad_of_vmap = rlx.grad(lambda v: ops.sum(rlx.vmap(lambda s: ops.sin(s) * s)(v)))
    np.testing.assert_allclose(grad_of_vmap(x), first)


def test_nested_vmap_is_an_outer_product() -> None:
    a, b = np.arange(3.0), np.arange(4.0)
    table = rlx.vmap(lambda x: rlx.vmap(lambda y: x * y)(b))(a)
    np.testing.assert_array_equal(table, np.outer(a, b))


def test_functions_may_read_values_around_them() -> None:
    x = np.array([0.3, -0.7, 1.1])

    def weighted(scale: Any) -> Any:
        """sum(scale * x * x), mapped over x, with the scale from outside."""
        return ops.sum(rlx.vmap(lambda v: scale * v * v)(x))

    assert rlx.jit(weighted)(np.float64(2)) == pytest.approx(2 * (x * x).sum())
    assert rlx.grad(weighted)(np.float64(2)) == pytest.approx((x * x).sum())

    def slope_at(scale: Any) -> Any:
        return rlx.jvp(lambda v: ops.sin(v * scale), (x,), (np.ones(3),))[1]

    np.testing.assert_allclose(rlx.jit(slope_at)(np.float64(2)), 2 * np.cos(2 * x))
    np.testing.assert_allclose(rlx.vmap(slope_at)(np.array([1.0, 2.0]))[1], 2 * np.cos(2 * x))
    same = rlx.vmap(lambda a: rlx.vmap(lambda b: a)(x))(np.array([1.0, 2.0]))
    np.testing.assert_array_equal(same, [[1, 1, 1], [2, 2, 2]])


def test_per_example_gradients() -> None:
    w, x = np.linspace(0, 1, 6).reshape(3, 2), np.random.default_rng(0).standard_normal((5, 3))
    one = rlx.grad(lambda w, v: ops.sum(ops.tanh(v @ w)))
    got = rlx.vmap(one, in_axes=(None, 0))(w, x)
    for i in range(5):
        np.testing.assert_allclose(got[i], one(w, x[i]), rtol=1e-12)


def test_transforms_of_nodes_of_a_graph_built_by_hand() -> None:
    g = rlx.Graph()
    x = g.input("x", (3, 2), "f32")
    g.output("sums", rlx.vmap(lambda row: ops.sum(row * row))(x))
    g.output("slope", rlx.grad(lambda x: ops.sum(x * x))(x))
    given = np.arange(6, dtype=np.float32).reshape(3, 2)
    sums, slope = rlx.compile(g).run({"x": given}).values()
    np.testing.assert_array_equal(sums, (given**2).sum(1))
    np.testing.assert_array_equal(slope, 2 * given)
