"""Quantised ops against exact integer arithmetic, and against the formulas of ONNX in NumPy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import exact_integers as exact
from rlx import Graph, ops
from rlx.errors import DTypeError, ShapeError
from rlx.reference.interpreter import evaluate
from rlx.transform.grad import gradient_graph

RNG = np.random.default_rng(11)


def floats(*shape: int, low: float = -4.0, high: float = 4.0) -> np.ndarray:
    return RNG.uniform(low, high, shape).astype(np.float32)


def whole(kind: Any, *shape: int) -> np.ndarray:
    info = np.iinfo(kind)
    return RNG.integers(info.min, info.max + 1, shape).astype(kind)


def small(kind: Any, *shape: int) -> np.ndarray:
    return RNG.integers(0, 9, shape).astype(kind)


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.uint16])
def test_quantize_and_back(kind: Any) -> None:
    for shape, axis in (((), 1), ((5,), 1), ((5,), -1)):
        x = floats(3, 4, 5) if axis == -1 else floats(3, 5, 2)
        scale, zero = floats(*shape, low=0.01, high=0.2), small(kind, *shape)
        spread = (-1,) if axis == -1 or not shape else (-1, 1)
        wide, high = scale.reshape(spread), zero.astype(np.int64).reshape(spread)
        got = ops.quantize(x, scale, zero, axis=axis)
        np.testing.assert_array_equal(got, exact.quantised(x, wide, high, kind))
        back = exact.real(got, wide, high).astype(np.float32)
        np.testing.assert_array_equal(ops.dequantize(got, scale, zero, axis=axis), back)


def test_blocks() -> None:
    x, scale, zero = floats(4, 6), floats(4, 2, low=0.01, high=0.2), small(np.uint8, 4, 2)
    want = exact.quantised(x, np.repeat(scale, 3, 1), np.repeat(zero.astype(np.int64), 3, 1), np.uint8)
    np.testing.assert_array_equal(ops.quantize(x, scale, zero, axis=1, block=3), want)


def test_f8_saturates_or_not() -> None:
    x = floats(40, low=-900, high=900)
    for saturate in (True, False):
        got = ops.quantize(x, np.float32(1.0), dtype="f8e5m2", saturate=saturate)
        assert got.dtype == ml_dtypes.float8_e5m2
    got = ops.quantize(np.array([1e9], np.float32), np.float32(1.0), dtype="f8e4m3fn")
    assert float(got[0]) == 448.0


def test_dynamic_quantize() -> None:
    for x in (floats(7, 5), floats(9, low=0.5), floats(9, high=-0.5)):
        low, high = min(x.min(), np.float32(0)), max(x.max(), np.float32(0))
        scale = (high - low) / np.float32(255)
        zero = np.rint(-low / scale).astype(np.uint8)
        want = exact.quantised(x, scale, np.int64(zero), np.uint8)
        for got, part in zip(ops.dynamic_quantize(x), (want, scale, zero), strict=True):
            np.testing.assert_array_equal(got, part)


@pytest.mark.parametrize("kinds", [(np.uint8, np.int8), (np.uint8, np.uint8), (np.int8, np.int8)])
def test_matmul_integer(kinds: tuple[Any, Any]) -> None:
    a, b = whole(kinds[0], 3, 17), whole(kinds[1], 17, 4)
    a[0], b[:, 0] = np.iinfo(kinds[0]).max, np.iinfo(kinds[1]).max  # pairs of products pass 16 bits
    for za, zb in ((None, None), (small(kinds[0]), None), (small(kinds[0]), small(kinds[1], 4))):
        want = exact.product(a, b, *(0 if z is None else z.astype(np.int64) for z in (za, zb)))
        np.testing.assert_array_equal(ops.matmul_integer(a, b, za, zb), want)


@pytest.mark.parametrize("columns", [(), (4,)])
def test_qlinear_matmul(columns: tuple[int, ...]) -> None:
    a, b = whole(np.uint8, 3, 17), whole(np.int8, 17, 4)
    a[0], b[:, 0] = 255, 127
    scale, scales, step = np.float32(0.02), floats(*columns, low=0.01, high=0.05), np.float32(0.3)
    zeros = np.zeros(columns, np.int8)
    got = ops.qlinear_matmul(a, scale, np.uint8(120), b, scales, zeros, step, np.uint8(100))
    real = exact.product(a, b, 120) * scale.astype(np.float64) * scales
    np.testing.assert_array_equal(got, exact.quantised(real, step, 100, np.uint8))


def test_conv_integer() -> None:
    x, w = whole(np.uint8, 2, 4, 6, 5), whole(np.uint8, 6, 2, 3, 2)
    where = {"strides": (2, 1), "padding": ((1, 2), (0, 1)), "groups": 2}
    got = ops.conv_integer(x, w, np.asarray(np.uint8(7)), np.asarray(np.uint8(3)), **where)
    np.testing.assert_array_equal(got, exact.convolution(x, w, 7, 3, **where))


def test_qlinear_conv() -> None:
    x, w = whole(np.uint8, 2, 4, 6, 5), whole(np.int8, 6, 4, 3, 3)
    x[0], w[0] = 255, 127
    bias = RNG.integers(-900, 900, 6).astype(np.int32)
    scale, scales, step = np.float32(0.02), floats(6, low=0.01, high=0.05), np.float32(2.3)
    given = [x, scale, np.uint8(120), w, scales, np.zeros(6, np.int8), step, np.uint8(100), bias]
    sums = exact.convolution(x, w, 120, padding=((1, 1), (1, 1))) + bias[:, None, None]
    real = sums * scale.astype(np.float64) * scales[:, None, None]
    np.testing.assert_array_equal(
        ops.qlinear_conv(*given, padding=1), exact.quantised(real, step, 100, np.uint8)
    )


def test_fake_quantize_has_a_straight_through_gradient() -> None:
    g = Graph()
    x, scale = g.input("x", (2, 3), "f64"), g.input("scale", (3,), "f64")
    zero = g.constant(np.array([0, 1, -2], np.int8))
    g.output("y", ops.sum(ops.fake_quantize(x, scale, zero, axis=1)))
    feed = {"x": np.array([[0.24, 99.0, -0.1], [-99.0, 0.31, 0.5]]), "scale": np.array([0.1, 0.2, 0.3])}
    grads = evaluate(gradient_graph(g, "y", ["x", "scale"]), feed)
    np.testing.assert_array_equal(grads["grad_x"], [[1, 0, 1], [0, 1, 1]])
    inside = np.array([[2 - 2.4, 0, 0 + 1 / 3], [0, 2 - 1.55, 2 - 5 / 3]])
    outside = np.array([[0, 126, 0], [-128, 0, 0]])
    np.testing.assert_allclose(grads["grad_scale"], (inside + outside).sum(0), atol=1e-12)


def test_fake_quantize_sums_the_gradient_of_a_block() -> None:
    g = Graph()
    x, scale = g.input("x", (5,), "f64"), g.input("scale", (2,), "f64")
    g.output("y", ops.sum(ops.fake_quantize(x, scale, dtype="i8", axis=0, block=3)))
    feed = {"x": np.array([99.0, 99.0, 0.0, 99.0, 0.0]), "scale": np.array([0.1, 0.2])}
    grads = evaluate(gradient_graph(g, "y", ["scale"]), feed)
    np.testing.assert_allclose(grads["grad_scale"], [254.0, 127.0])


def test_refusals() -> None:
    x, scale = np.zeros((2, 3), np.float32), np.ones(3, np.float32)
    with pytest.raises(ShapeError, match=r"scale f32\[3\] is not one number; give axis="):
        ops.quantize(x, scale)
    with pytest.raises(ShapeError, match=r"scale f32\[3\] is not \[2\], axis 0 of f32\[2,3\]"):
        ops.quantize(x, scale, axis=0)
    with pytest.raises(DTypeError, match=r"cannot quantise to i32; use an integer of at most 16 bits"):
        ops.quantize(x, np.float32(1.0), dtype="i32")
    with pytest.raises(DTypeError, match=r"operand i16\[2,2\] is not of i8 or u8"):
        ops.matmul_integer(np.zeros((2, 2), np.int16), np.zeros((2, 2), np.int8))
