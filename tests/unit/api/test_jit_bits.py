"""The bits of a call depend on its arguments, never on earlier calls.

Programs for known sizes, for symbols, and those that a history of calls leaves agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.ir.op import get_op

RNG = np.random.default_rng(1)
Calls = list[tuple[np.ndarray, ...]]
CASES: dict[str, tuple[Callable[..., Any], Callable[[], Calls]]] = {}


def made(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32)


def case(name: str, function: Callable[..., Any]) -> Callable[[Callable[[], Calls]], None]:
    def add(calls: Callable[[], Calls]) -> None:
        CASES[name] = (function, calls)

    return add


SMALL, WIDE = made(8, 3, 3, 3), made(64, 64, 3, 3)
WEIGHTS = made(64, 48)


def images(channels: int, *sizes: int, batch: int = 1) -> Iterator[np.ndarray]:
    return (made(batch, channels, n, n) for n in sizes)


def gradient(loss: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, w: rlx.grad(lambda w: ops.sum(ops.tanh(loss(x, w))))(w)


def conv(x: Any, w: Any) -> Any:
    return ops.conv(x, w, padding=1)


def two_convs(x: Any) -> Any:
    return ops.sum(ops.relu(conv(ops.relu(conv(x, WIDE)), WIDE)), axis=(2, 3))


case("conv, weights fixed", lambda x: conv(x, WIDE))(
    lambda: [(x,) for x in images(64, 3, 4, 6, 7, 12, 14, 28)]
)
case("conv, batches", lambda x: conv(x, WIDE))(lambda: [(made(n, 64, 7, 7),) for n in (2, 3, 8, 16)])
case("conv, weights given", conv)(lambda: [(x, WIDE) for x in images(64, 4, 7, 14)])
case("conv, few channels", conv)(lambda: [(x, SMALL) for x in images(3, 4, 5, 8, 14)])
case("conv of each channel", lambda x, w: ops.conv(x, w, padding=1, groups=32))(
    lambda: [(x, made(32, 1, 3, 3)) for x in images(32, 4, 7, 14)]
)
case("conv in f64", lambda x, w: ops.conv(x, w))(
    lambda: [
        (made(batch, 2, *image).astype(np.float64), made(8, 2, 2, 3).astype(np.float64))
        for batch, image in ((1, (2, 3)), (1, (3, 3)), (2, (2, 3)), (4, (2, 3)), (3, (9, 9)))
    ]
)
case("two convs", two_convs)(lambda: [(x,) for x in images(64, 4, 6, 7, 14)])
case("gradient of conv", gradient(conv))(
    lambda: [(x, made(16, 8, 3, 3)) for x in images(8, 4, 7, 8, batch=2)]
)


def constant(*shape: Any) -> Any:
    """A constant whose size the call decides."""
    return ops.sin(ops.broadcast_to(np.float32(0.3), shape))


for _columns in (1, 2, 3, 5, 40):
    case(
        f"a constant of open rows and {_columns} columns", lambda x, n=_columns: x @ constant(x.shape[-1], n)
    )(lambda: [(made(rows, n),) for rows in (1, 2, 5) for n in (4, 8, 16, 33, 100)])
    case(
        f"a constant of open columns and {_columns} rows", lambda x, n=_columns: constant(n, x.shape[0]) @ x
    )(lambda: [(made(*shape),) for n in (4, 8, 16, 33, 100) for shape in ((n,), (n, 1), (n, 5))])
case(
    "log_softmax of deviations",
    lambda x: ops.log_softmax(ops.std(x, axis=0, ddof=1, keepdims=True), axis=-1),
)(lambda: [(made(n, 40, 3, 2),) for n in (2, 3, 5, 8)])
case("fft", ops.fft)(lambda: [(made(4, n).astype(np.complex64),) for n in (7, 8, 60, 64, 100, 251, 1024)])
case("fft, rows", ops.fft)(lambda: [(made(n, 64).astype(np.complex64),) for n in (2, 3, 7, 8, 9, 17)])
case("rfft", ops.rfft)(lambda: [(made(4, n),) for n in (8, 100, 256, 1000)])
case("attention", ops.attention)(
    lambda: [
        (made(2, 4, n, 32), made(2, 4, s, 32), made(2, 4, s, 32))
        for n, s in ((1, 5), (1, 64), (2, 64), (3, 64), (4, 64), (17, 64), (64, 64), (5, 300), (1, 300))
    ]
)
case("matmul, rows", lambda a, b: a @ b)(
    lambda: [(made(n, 64), made(64, 48)) for n in (1, 2, 3, 4, 8, 17, 64)]
)
case("matmul, depth", lambda a, b: a @ b)(
    lambda: [(made(5, k), made(k, 7)) for k in (2, 3, 8, 100, 385, 3000)]
)
case("matmul, weights fixed", lambda a: a @ WEIGHTS)(lambda: [(made(n, 64),) for n in (1, 2, 3, 4, 8, 17)])
case("matmul by columns", lambda a, b: a @ b.T)(
    lambda: [(made(m, 64), made(n, 64)) for m in (1, 2, 3, 4, 17) for n in (2, 8, 9)]
)
case("matmul by columns, depth", lambda a, b: a @ b.T)(
    lambda: [(made(2, k), made(20, k)) for k in (2, 3, 15, 16, 17, 100)]
)
case("matrix and vector", lambda a, b: a @ b)(
    lambda: [(made(n, k), made(k)) for n in (2, 5) for k in (3, 64, 1000)]
)
case("inner product", lambda a, b: a @ b)(lambda: [(made(k), made(k)) for k in (2, 15, 16, 17, 100)])
case("gradient of a layer", gradient(lambda x, w: x @ w))(
    lambda: [(made(n, 24), made(24, k)) for n in (2, 4, 9) for k in (2, 8, 9)]
)
case("softmax", ops.softmax)(lambda: [(made(3, n),) for n in (1, 2, 15, 16, 17, 100, 1000)])
case("layer_norm", ops.layer_norm)(
    lambda: [(made(3, n), made(n), made(n)) for n in (2, 17, 511, 512, 1000, 5000)]
)
case("rms_norm", ops.rms_norm)(lambda: [(made(3, n), made(n)) for n in (2, 17, 512, 5000)])
case("group_norm", lambda x, s, o: ops.group_norm(x, s, o, 4))(
    lambda: [(made(n, 8, k, k), made(8), made(8)) for n in (2, 5) for k in (3, 14, 40)]
)
case("normalised", lambda x: (x - ops.mean(x)) / ops.std(x))(
    lambda: [(made(n),) for n in (3, 100, 511, 512, 3000)]
)
case("variance of planes", lambda x: ops.var(x, axis=(1, 2)))(
    lambda: [(made(3, k, n),) for k in (3, 100) for n in (2, 9, 17)]
)
case("sum", ops.sum)(lambda: [(made(n),) for n in (2, 17, 1000, 100000)])
case("sum of columns", lambda x: ops.sum(x, axis=0))(
    lambda: [(made(k, n),) for k in (33, 100) for n in (2, 8, 17)]
)
case("sum of planes of each channel", lambda x: ops.sum(x, axis=(0, 2)))(
    lambda: [(made(3, 4, n),) for n in (2, 100, 4096, 5000, 20000)]
)
case("mean of images of each channel", lambda x: ops.mean(x, axis=(0, 2, 3)))(
    lambda: [(made(2, 3, k, n),) for k in (3, 70) for n in (9, 80)]
)
case("conv, x and w of each example", rlx.vmap(lambda x, w: ops.conv(x, w, dilations=2)))(
    lambda: [(made(n, 1, 4, 7, 7), made(n, 3, 4, 3, 3)) for n in (2, 4, 9)]
)
case("gradient of conv for each example", rlx.vmap(gradient(conv), in_axes=(0, None)))(
    lambda: [(made(n, 1, 4, 6, 6), made(3, 4, 3, 3)) for n in (2, 4, 9)]
)
case("attention, written out", lambda q, k, v: ops.softmax(q @ ops.swapaxes(k, -1, -2) * 0.125) @ v)(
    lambda: [(made(2, n, d), made(2, 40, d), made(2, 40, d)) for n in (2, 5, 64) for d in (8, 16, 24)]
)


# Whether ops are one kernel depends on sizes: what is cheap to store is dear to compute again.


def steps_of_a_cell(x: Any, w: Any) -> Any:
    """A slope of a recurrent cell: it reads 1 - tanh(x)**2 and tanh(x)."""

    def run(x: Any, w: Any) -> Any:
        rows = ops.broadcast_to(x, (1, *x.shape))
        return ops.scan(lambda c, row: (ops.tanh(c @ w + row),) * 2, rows[0] * 0.5, rows)[1]

    return rlx.jvp(run, (x, w), (x * 0.5, w * 0.5))[1]


def distance(x: Any, y: Any) -> Any:
    return ops.tanh(x) - y


def halves(x: Any, y: Any) -> Any:
    d = distance(ops.cast(x, "bf16"), ops.cast(y, "bf16"))
    return ops.cast(ops.exp(d) @ d + ops.sin(d), "f32")


def exps_of_distances(x: Any) -> Any:
    d = x - ops.max(x, axis=-1, keepdims=True)
    return ops.exp(d) @ d + ops.exp(d)


def pairs_of(*sizes: int) -> Calls:
    return [(made(n, n), made(n, n)) for n in sizes]


case("slope of a cell", steps_of_a_cell)(lambda: pairs_of(9, 64, 100))
case("sums of products", lambda x, y: ops.sin(x) * x + (ops.sin(x) * x) @ y)(lambda: pairs_of(2, 5, 33, 300))
case("16-bit floats between ops", halves)(lambda: pairs_of(2, 5, 33, 128))
case(
    "sigmoid of a difference",
    lambda x, y: ops.sigmoid(distance(x, y)) @ distance(x, y) + ops.sigmoid(distance(x, y)),
)(lambda: pairs_of(2, 5, 33, 128))
case("distances from a maximum", exps_of_distances)(lambda: [(made(n, n),) for n in (2, 5, 33, 128)])


def slope_of_a_softmax(x: Any, w: Any) -> Any:
    """Its kernels divide by statistics of other kernels, depending on how they are fused."""
    return rlx.grad(lambda x: ops.sum(ops.sin(ops.softmax(ops.layer_norm(x, w[0], w[1])))))(x)


def curve_of_a_quotient(x: Any, y: Any) -> Any:
    """Known sizes fold the sum of a constant, which an open size leaves as a reduction."""

    def slope(x: Any) -> Any:
        return ops.sum(rlx.grad(lambda x: ops.sum(ops.sin(ops.sum(y, axis=1) / ops.sum(x, axis=1))))(x) * 0.5)

    return rlx.grad(slope)(x)


def sum_of_a_part(x: Any) -> Any:
    """With symbols nobody knows that rows of the part are rows in memory."""
    return ops.sum(ops.abs(ops.reshape(ops.reshape(x, (-1,))[:80], (4, 20)) + 1.0), axis=1)


def sum_of_a_transpose(x: Any) -> Any:
    turned = ops.transpose(x)
    return ops.sum(ops.tanh(turned) * ops.sum(turned, axis=1, keepdims=True), axis=1)


def sums_of_two_widths(x: Any) -> Any:
    wide = ops.cast(x, "f64")
    return ops.cast(ops.sum(x, axis=1), "f64") + ops.sum(wide * wide, axis=1)


def sum_over_two_axes(x: Any, y: Any) -> Any:
    return ops.sum(ops.tanh(x)[:, None] * y * ops.tanh(y[:1]), axis=(0, 1, 2)) + ops.sum(y, axis=(1, 2))[0]


case("gradient of softmax and norm", slope_of_a_softmax)(
    lambda: [(made(n, n), made(2, n)) for n in (2, 5, 33, 128)]
)
case(
    "gradient by an image of a convolution in steps",
    lambda x, w: rlx.grad(lambda x: ops.sum(ops.sin(ops.conv(x, w, strides=3, groups=2, padding=1))))(x),
)(lambda: [(made(1, 6, 2, n), made(4, 3, 2, 1)) for n in (2, 3, 7)])
case("second derivative of a quotient of sums", curve_of_a_quotient)(
    lambda: [(made(1, n, 1), made(1, n + 1, n + 1)) for n in (2, 5, 33)]
)
case("sum of a part", sum_of_a_part)(lambda: [(made(n, 2, 65),) for n in (2, 3, 31)])
case("sum of a transpose", sum_of_a_transpose)(lambda: [(made(n, n + 1),) for n in (2, 7, 40, 130)])
case("sums of two widths", sums_of_two_widths)(lambda: [(made(3, n),) for n in (2, 7, 40, 700)])
case("sum over two axes", sum_over_two_axes)(lambda: [(made(n, n), made(n, 3, n)) for n in (2, 7, 40)])
case("attention of examples with masks", rlx.vmap(ops.attention))(
    lambda: [
        (made(n, 2, 1, 3, 4), made(n, 2, 1, 5, 4), made(n, 2, 1, 5, 3), made(n, 3, 1) > 0) for n in (2, 17)
    ]
)


def bits(value: np.ndarray) -> bytes:
    return np.ascontiguousarray(value).tobytes()


@pytest.mark.parametrize("name", CASES)
def test_bits_do_not_depend_on_earlier_calls(name: str) -> None:
    function, calls = CASES[name]
    arguments = calls()
    want = [bits(rlx.jit(function)(*a)) for a in arguments]  # each by itself, for its sizes
    symbols, upwards, downwards = rlx.jit(function, dynamic=True), rlx.jit(function), rlx.jit(function)
    places = list(range(len(arguments)))
    histories = [(symbols, places), (upwards, places), (downwards, places[::-1]), (upwards, places)]
    wrong = [
        (which, [x.shape for x in arguments[i]])
        for which, (f, order) in zip(("dynamic", "upwards", "downwards", "again"), histories, strict=True)
        for i in order
        if bits(f(*arguments[i])) != want[i]
    ]
    assert not wrong


def test_a_size_that_decides_bits_is_a_number() -> None:
    f = rlx.jit(ops.fft, dynamic=True)
    for n in (8, 16, 8):
        f(made(2, n).astype(np.complex64))
    assert f.stats["traces"] == 2 and not f.stats["refused"]
    (why,) = f.stats["specialized"].values()
    assert why.startswith("is the length of a Fourier transform (at test_jit_bits.py:")
    assert f.program(made(2, 8).astype(np.complex64)).graph.symbols() == ("x_0",)


def test_a_number_of_examples_with_weights_of_their_own_is_a_number() -> None:
    f = rlx.jit(rlx.vmap(ops.conv), dynamic={"x": {0: "n"}, "w": {0: "n"}})
    for n in (2, 3, 2):
        f(made(n, 1, 4, 6), made(n, 3, 4, 3))
    assert f.stats["traces"] == 2 and not f.stats["refused"]
    assert all("read as a number at test_jit_bits.py:" in why for why in f.stats["specialized"].values())


def test_a_program_serves_sizes_that_are_fused_alike() -> None:
    f = rlx.jit(halves, dynamic=True)
    for n in (128, 130, 200, 5, 128, 6):
        f(made(n, n), made(n, n))
    assert f.stats["traces"] == 2


def test_a_program_serves_sizes_of_the_same_choices() -> None:
    f = rlx.jit(lambda x: conv(x, WIDE), dynamic=True)
    for size in (28, 29, 32, 4, 28, 56):
        f(made(1, 64, size, size))
    assert f.stats["traces"] == 2  # transforms of two sizes


def test_a_column_along_k() -> None:
    """A right operand of one column is stored along k, though k is its first axis."""
    rng = np.random.default_rng(1)

    def arguments(size: int) -> list[np.ndarray]:
        return [rng.standard_normal(s).astype(np.float32) for s in ((size, 1, size), (size, 1))]

    small, other = arguments(3), arguments(4)
    f = rlx.jit(lambda x, w: x @ w)
    first = f(*small).copy()
    f(*other)
    np.testing.assert_array_equal(f(*small), first)


def test_windows_that_fill_their_axis() -> None:
    """A pool whose result has one element along an axis adds as one that knows it."""
    rng = np.random.default_rng(1)
    f = rlx.jit(lambda x: rlx.ops.avg_pool(x, (3,), strides=1))
    f(rng.standard_normal((3, 3, 5)).astype(np.float32))
    f(rng.standard_normal((3, 3, 6)).astype(np.float32))
    x = (2 * rng.standard_normal((3, 3, 3))).astype(np.float32)
    alone = rlx.jit(lambda x: rlx.ops.avg_pool(x, (3,), strides=1))(x)
    np.testing.assert_array_equal(f(x), alone)


def test_a_size_that_a_loop_needs_is_a_number() -> None:
    """Its body assumes it, not the graph around; a program with a symbol there would be another one."""

    def f(rows: Any, w: Any) -> Any:
        carry, _ = ops.scan(lambda c, row: (ops.tanh(c @ w + row),) * 2, ops.zeros_like(rows[0]), rows)
        return carry

    jitted = rlx.jit(f, dynamic={"w": {1: "columns"}})
    jitted(made(4, 6), made(6, 6))
    assert jitted.program(made(4, 6), made(6, 6)).graph.symbols() == ()


def test_halves_are_rounded_whatever_shares_their_kernel() -> None:
    """A constant of a known size is in memory, one of an open size is computed: kernels are cut elsewhere."""

    def f(x: Any, y: Any) -> Any:
        return ops.cond(ops.sum(x) > 1.0, lambda a: ops.tanh(a * 0.5 + a), lambda a: -a, ops.logaddexp(y, x))

    def slope(x: Any, y: Any) -> Any:
        return ops.sum(rlx.grad(lambda x, y: ops.sum(ops.sin(ops.cast(f(x, y), "f32"))))(x, y) * 0.5)

    x = ops.cast(np.array([[[-0.49609375]], [[-1.671875]]], np.float32), "bf16")
    y = ops.cast(np.ones((1, 2), np.float32), "bf16")
    known, open_sizes = rlx.jit(rlx.grad(slope))(x, y), rlx.jit(rlx.grad(slope), dynamic=True)(x, y)
    np.testing.assert_array_equal(open_sizes.view(np.uint16), known.view(np.uint16))


def test_a_sum_over_a_part_of_open_size() -> None:
    """Indices of known sizes fold to shorter ones, so that two axes are one."""

    def f(x: Any, scale: Any) -> Any:
        part = ops.reshape(ops.reshape(x, (-1,))[:90], (3, 3, 5, 2))
        return get_op("instance_norm")(part, scale, ops.reshape(x, (-1,))[:3])

    g = rlx.vmap(f, in_axes=(0, None))
    x, ones = made(2, 65, 2), np.ones(3, np.float32)
    known = rlx.jit(g, target="x86-64")(x, ones)
    open_sizes = rlx.jit(g, target="x86-64", dynamic=True)(x, ones)
    np.testing.assert_array_equal(open_sizes, known)


def test_a_product_that_is_stored_in_another_order() -> None:
    """Its kernel sees three rows at a time, not all of them, and so adds along k."""
    each = rlx.vmap(lambda x, w: ops.einsum("tbk,nk->tbn", x, w), in_axes=(None, 0))
    x, w = made(65, 3, 65), made(3, 9, 65)
    for g in (each, lambda x, w: ops.transpose(each(x, w), (1, 0, 2, 3))):
        np.testing.assert_array_equal(rlx.jit(g, dynamic=True)(x, w), rlx.jit(g)(x, w))


def test_a_product_with_a_constant_of_open_size() -> None:
    """Of a known size it is a weight, stored as its product likes it; here it is on the left."""

    def slope(x: Any, w: Any) -> Any:
        return ops.sum(rlx.grad(lambda x, w: ops.sum(ops.sin(x @ w)), argnums=1)(x, w) * 0.5)

    g = rlx.grad(slope, argnums=1)
    first, second = (made(2, 8), made(8, 2)), (made(2, 15), made(15, 2))
    f = rlx.jit(g)
    f(*first)
    np.testing.assert_array_equal(f(*second), rlx.jit(g)(*second))
    np.testing.assert_array_equal(f(*first), rlx.jit(g)(*first))
