"""rlx.jit and sizes: which calls share a program, and that a traced function sees sizes as they are."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.api.jit import MAX_PROGRAMS, JitWarning
from rlx.errors import ConfigError, InputError, RlxError, ShapeError


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


# --- which calls share a program


def test_the_first_call_sees_plain_ints() -> None:
    seen: list[Any] = []
    rlx.jit(lambda x: seen.append(x.shape) or x)(ones(3, 4))
    assert seen == [(3, 4)] and all(type(n) is int for n in seen[0])


def test_a_size_that_changes_becomes_a_symbol() -> None:
    f = rlx.jit(lambda x, w: ops.softmax(x @ w, axis=-1))
    for rows in (4, 3, 17, 8):
        np.testing.assert_allclose(f(ones(rows, 4), ones(4, 5)), np.full((rows, 5), 0.2), rtol=1e-6)
    assert f.stats["traces"] == 2
    first, second = f.stats["why"]
    assert first.startswith("first call") and second == "x.shape[0] is 3, was 4, a symbol from now on"
    (x, w) = f.program(ones(9, 4), ones(4, 5)).inputs
    assert (str(x.type), str(w.type)) == ("f32[x_0,4]", "f32[4,5]")  # equal to 4 by chance, so still 4


def test_sizes_that_must_be_equal_become_one_symbol() -> None:
    f = rlx.jit(lambda a, b: a + b)
    for n in (3, 2, 7):
        np.testing.assert_array_equal(f(ones(n), ones(n)), np.full(n, 2))
    assert f.stats["traces"] == 2
    assert [str(n.type) for n in f.program(ones(5), ones(5)).inputs] == ["f32[a_0]", "f32[a_0]"]
    with pytest.raises(ShapeError, match=r"add: shapes \[2\] and \[3\] do not broadcast"):
        f(ones(2), ones(3))
    assert f.stats["traces"] == 2


def test_sizes_0_and_1_have_programs_of_their_own() -> None:
    f = rlx.jit(lambda a, b: ops.sum(a + b))
    for n in (5, 1, 6, 0, 1, 0, 9):
        assert f(ones(5), ones(1)) == 10 and f(ones(n), ones(n)) == 2 * n
    assert f.stats["traces"] == 5  # (5, 1), (5, 5), (1, 1), (6, 6) for all others, (0, 0)
    assert "(0 and 1 have programs of their own)" in f.stats["why"][2]


def test_a_broadcast_size_is_not_mixed_up_with_a_symbol() -> None:
    f = rlx.jit(lambda a, b: a + b)
    np.testing.assert_array_equal(f(ones(3), ones(1)), np.full(3, 2))
    np.testing.assert_array_equal(f(ones(2), ones(2)), np.full(2, 2))
    np.testing.assert_array_equal(f(ones(4), ones(1)), np.full(4, 2))
    np.testing.assert_array_equal(f(ones(6), ones(1)), np.full(6, 2))
    assert f.stats["traces"] == 3


def test_dynamic_asks_for_symbols_at_once() -> None:
    f = rlx.jit(lambda x, w: x @ w, dynamic={"x": {0: "batch"}})
    for rows in (2, 3, 4):
        np.testing.assert_array_equal(f(ones(rows, 3), ones(3, 2)), np.full((rows, 2), 3))
    assert f.stats["traces"] == 1 and f.program(ones(2, 3), ones(3, 2)).graph.symbols() == ("batch",)
    f(ones(1, 3), ones(3, 2))
    assert f.stats["traces"] == 2
    g = rlx.jit(lambda x, w: x @ w, dynamic=True)
    for n in (2, 3, 4):
        np.testing.assert_array_equal(g(ones(n, n), ones(n, 5)), np.full((n, 5), n))
    assert g.stats["traces"] == 1
    both = rlx.jit(lambda x, y: (x, y), dynamic={"x": {0: "n"}, 1: {-1: "n"}})
    with pytest.raises(InputError, match=r"'n' is 2 in x.shape\[0\], but 3 in y.shape\[0\]"):
        both(ones(2), ones(3))


@pytest.mark.parametrize(
    ("dynamic", "text"),
    [({"z": {0: "n"}}, "dynamic names 'z'"), ({3: {0: "n"}}, "dynamic names 3"), ("x", "give True, or axes")],
)
def test_what_dynamic_refuses(dynamic: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        rlx.jit(lambda x: x, dynamic=dynamic)


def test_an_axis_that_dynamic_names_must_exist() -> None:
    with pytest.raises(InputError, match="axis 2 of x, which has rank 1"):
        rlx.jit(lambda x: x, dynamic={"x": {2: "n"}})(ones(3))


def test_options_are_checked_when_the_function_is_made() -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'thread'.*threads"):
        rlx.jit(lambda x: x, thread=1)


# --- what a function may ask about sizes


@pytest.mark.parametrize(
    "pick",
    [
        lambda n: n == 4,
        lambda n: n != 4,
        lambda n: n in (1, 4),
        lambda n: {4: True}.get(n, False),
        lambda n: n > 4,
        lambda n: n >= 4.5,
        lambda n: n < np.int64(5),
        lambda n: 4 <= n,
        lambda n: (n, 3) == (4, 3),
        lambda n: n % 2 == 0,
        lambda n: bool(n - 4),
        lambda n: np.equal(n, 4),
        lambda n: np.int64(4) == n,
        lambda n: np.int64(4) != n,
        lambda n: max(n, 5) == 5,
    ],
)
def test_comparisons_of_sizes_are_true(pick: Any) -> None:
    """Whichever sizes came before, in jit, grad and vmap; at most one program per answer."""
    f = rlx.jit(lambda x: x if pick(x.shape[0]) else -x)
    slope = rlx.grad(lambda x: ops.sum(x if pick(x.shape[0]) else -x))
    per_row = rlx.vmap(lambda x: x if pick(x.shape[0]) else -x)
    for n in (4, 3, 5, 4, 6, 7, 9, 4, 3):
        want = ones(n) if pick(n) else -ones(n)
        np.testing.assert_array_equal(f(ones(n)), want)
        np.testing.assert_array_equal(slope(ones(n)), want)
        np.testing.assert_array_equal(per_row(ones(2, n)), want[None].repeat(2, 0))


def test_comparisons_in_bodies_and_compositions() -> None:
    factors = {3: 2.0, 4: 7.0}

    def pick(x: Any) -> Any:
        return x * factors.get(x.shape[-1], 1.0) if x.shape[-1] in (3, 4, 5) else -x

    def along(x: Any) -> Any:
        return ops.scan(lambda total, row: (total + pick(row), pick(row)), x[0] * 0.0, x)[1]

    functions = {
        "scan": rlx.jit(along),
        "cond": rlx.jit(lambda x: ops.cond(ops.sum(x) > 0, lambda: pick(x), lambda: x)),
        "jvp": rlx.jit(lambda x: rlx.jvp(pick, (x,), (x,))[1]),
        "vmap of grad": rlx.vmap(rlx.grad(lambda row: ops.sum(pick(row)))),
        "grad of vmap": rlx.grad(lambda x: ops.sum(rlx.vmap(pick)(x))),
        "grad of scan": rlx.grad(lambda x: ops.sum(along(x))),
        "vmap of jvp": rlx.vmap(lambda row: rlx.jvp(pick, (row,), (row,))[1]),
        "jit in vmap": rlx.jit(rlx.vmap(rlx.jit(pick))),
        "grad of grad": rlx.grad(lambda x: ops.sum(rlx.grad(lambda y: ops.sum(pick(y) * y) / 2.0)(x))),
    }
    for name, f in functions.items():
        for n in (3, 4, 5, 3, 6, 4, 7):
            want = np.full((2, n), factors.get(n, 1.0) if n in (3, 4, 5) else -1.0)
            np.testing.assert_array_equal(f(ones(2, n)), want, err_msg=f"{name} of {n}")


@pytest.mark.parametrize("dynamic", [False, True])
def test_squeeze_drops_the_axes_that_eager_drops(dynamic: bool) -> None:
    f = rlx.jit(ops.squeeze, dynamic=dynamic)
    for shape in ((2, 3, 1), (1, 3, 1), (2, 1, 1), (1, 1, 1), (4, 5, 1), (1, 6, 2), (7, 1, 8)):
        assert f(ones(*shape)).shape == ops.squeeze(ones(*shape)).shape == np.squeeze(ones(*shape)).shape


def test_squeeze_asks_about_sizes_that_ops_have_made() -> None:
    """A size of 1 that a window leaves of a symbol is dropped, and only for calls where it is 1."""

    def f(x: Any) -> Any:
        return ops.squeeze(ops.avg_pool(x, window=(3, 2), strides=(3, 2)))

    jitted = rlx.jit(f, dynamic=True)
    for shape in ((1, 1, 3, 1), (1, 1, 4, 3), (1, 1, 6, 5), (2, 1, 3, 4), (1, 1, 3, 1)):
        assert jitted(ones(*shape)).shape == f(ones(*shape)).shape


def test_a_comparison_is_a_guard_with_its_line() -> None:
    f = rlx.jit(lambda x: x if x.shape[0] > 4 else -x)
    for n in (2, 3, 4, 8, 9, 10):
        np.testing.assert_array_equal(f(ones(n)), ones(n) if n > 4 else -ones(n))
    assert f.stats["traces"] == 3
    below, above = f.stats["answers"]
    assert below.startswith("4 is at least x_0, asked at test_jit_sizes.py:")
    assert above.startswith("x_0 is at least 5, asked at test_jit_sizes.py:")


@pytest.mark.parametrize(
    "value",
    [
        lambda x: x / np.sqrt(x.shape[-1]),
        lambda x: x * len(x),
        lambda x: x * x.shape[0],
        lambda x: ops.sum(x) / x.shape[0],
        lambda x: x * x.shape[0] ** -0.5,
        lambda x: x * (x.shape[0] / 2),
        lambda x: x * float(x.shape[0]),
        lambda x: sum((x[i] for i in range(x.shape[0])), start=0.0 * x[0]),
        lambda x: x + np.zeros(x.shape, np.float32),
        lambda x: x * 0.5 * x.shape[0],
        lambda x: x - x[:1],
        lambda x: x.shape[0],
        lambda x: x[: x.shape[0] // 2] if x.shape[0] > 1 else x,
    ],
)
def test_reading_a_size(value: Any) -> None:
    f = rlx.jit(value)
    for n in (4, 5, 3, 5, 1):
        x = numbers(n)
        np.testing.assert_allclose(f(x), value(x), rtol=1e-6)


def test_a_read_fixes_the_size_for_that_program() -> None:
    f = rlx.jit(lambda x: sum((x[i] for i in range(x.shape[0])), start=ops.sum(x) * 0.0))
    assert [f(ones(n)) for n in (3, 2, 4, 3, 2)] == [3, 2, 4, 3, 2]
    assert f.stats["traces"] == 3
    assert f.stats["specialized"]["x.shape[0]"].startswith("read as a number at test_jit_sizes.py:")


def test_a_size_from_data_is_not_compared_by_structure() -> None:
    f = rlx.jit(lambda x: x if ops.nonzero(x)[0].shape[0] == 2 else -x)
    with pytest.raises(ShapeError, match="found in data"):
        f(ones(3))


def test_where_symbols_are_refused_each_size_compiles_by_itself() -> None:
    def f(x: Any) -> Any:
        if not isinstance(x.shape[0], int):
            raise ValueError("no symbols here")
        return x * 2.0

    g = rlx.jit(f)
    for n in (2, 3, 4, 3):
        np.testing.assert_array_equal(g(ones(n)), np.full(n, 2))
    assert g.stats["traces"] == 3
    assert g.stats["refused"] == [
        "x.shape[0] cannot be symbols, so each size is compiled separately: no symbols here"
    ]


def test_the_calls_that_symbols_refused() -> None:
    """Functions of which an earlier version, with symbols from the first call, refused every call."""
    rng = np.random.default_rng(0)

    def made(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    key = ops.random_key(7)
    w, b = made(8, 6), made(6)
    group = made(8), made(8)
    calls: list[tuple[Any, Any]] = [
        (ops.linear, lambda n: (made(n, 8), w, b)),
        (ops.attention, lambda n: (made(n, 2, 5, 4), made(n, 2, 5, 4), made(n, 2, 5, 4))),
        (lambda x, s, o: ops.group_norm(x, s, o, 4), lambda n: (made(n, 8, 3, 3), *group)),
        (lambda k, x: x + ops.normal(k, x.shape), lambda n: (key, made(n, 3))),
        (ops.rope, lambda n: (made(2, n, 8),)),
    ]
    for function, arguments in calls:
        f = rlx.jit(function)
        for n in (3, 4, 6, 1):
            args = arguments(n)
            np.testing.assert_allclose(f(*args), function(*args), rtol=2e-5, atol=2e-6)


# --- how many programs, and when


def test_the_least_recently_used_program_goes_with_one_warning() -> None:
    f = rlx.jit(lambda x: x * float(x.shape[0]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in range(2, MAX_PROGRAMS + 5):
            f(ones(n))
            f(ones(2))
    (warning,) = [w for w in caught if issubclass(w.category, JitWarning)]
    text = str(warning.message)
    assert "more than 16 programs" in text and "read as a number at test_jit_sizes.py:" in text
    assert warning.filename == __file__
    made = f.stats["traces"]
    f(ones(2))
    assert f.stats["traces"] == made
    f(ones(3))  # went first: all others were used later
    assert f.stats["traces"] == made + 1


def test_threads_that_call_a_cold_function_compile_it_once() -> None:
    calls = []

    def f(x: Any) -> Any:
        calls.append(1)
        return x * 2.0

    g, start, wrong = rlx.jit(f), threading.Barrier(8), []

    def work() -> None:
        start.wait()
        if not np.array_equal(g(ones(3)), np.full(3, 2)):
            wrong.append(1)

    workers = [threading.Thread(target=work) for _ in range(8)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert len(calls) == 1 and g.stats["traces"] == 1 and not wrong


def test_an_error_of_the_function_is_told_in_sizes() -> None:
    f = rlx.jit(lambda x, w: x @ w)
    f(ones(2, 3), ones(3, 4))
    with pytest.raises(RlxError, match="matmul: argument 0 has 3 columns, argument 1 has 4 rows"):
        f(ones(5, 3), ones(4, 4))
