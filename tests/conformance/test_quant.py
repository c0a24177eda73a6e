"""Quantised ops against ONNX Runtime, which computes them in kernels of its own."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rlx import Graph, ops
from rlx.backend.reference.interpreter import evaluate
from rlx.errors import DTypeError, ShapeError
from rlx.transform.grad import gradient_graph

RNG = np.random.default_rng(11)


def by_onnxruntime(
    kind: str, operands: list[np.ndarray | None], outputs: int = 1, **attrs: Any
) -> list[np.ndarray]:
    import onnxruntime
    from onnx import helper

    given = {f"x{i}": a for i, a in enumerate(operands) if a is not None}
    names = [f"x{i}" if a is not None else "" for i, a in enumerate(operands)]
    results = [f"y{i}" for i in range(outputs)]
    graph = helper.make_graph(
        [helper.make_node(kind, names, results, **attrs)],
        "g",
        [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for n, a in given.items()
        ],
        [helper.make_empty_tensor_value_info(n) for n in results],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found: list[np.ndarray] = session.run(None, given)
    return found


@pytest.fixture(autouse=True)
def _needs_onnxruntime(require: Any) -> None:
    require("onnx")
    require("onnxruntime")


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
        (want,) = by_onnxruntime("QuantizeLinear", [x, scale, zero], axis=axis)
        got = ops.quantize(x, scale, zero, axis=axis)
        np.testing.assert_array_equal(got, want)
        (back,) = by_onnxruntime("DequantizeLinear", [want, scale, zero], axis=axis)
        np.testing.assert_array_equal(ops.dequantize(got, scale, zero, axis=axis), back)


def test_blocks() -> None:
    x, scale, zero = floats(4, 6), floats(4, 2, low=0.01, high=0.2), small(np.uint8, 4, 2)
    (want,) = by_onnxruntime("QuantizeLinear", [x, scale, zero], axis=1, block_size=3)
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
        for a, b in zip(
            ops.dynamic_quantize(x), by_onnxruntime("DynamicQuantizeLinear", [x], 3), strict=True
        ):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kinds", [(np.uint8, np.int8), (np.uint8, np.uint8)])
def test_matmul_integer(kinds: tuple[Any, Any]) -> None:
    a, b = whole(kinds[0], 3, 17), whole(kinds[1], 17, 4)
    for za, zb in ((None, None), (small(kinds[0]), None), (small(kinds[0]), small(kinds[1], 4))):
        (want,) = by_onnxruntime("MatMulInteger", [a, b, za, zb])
        np.testing.assert_array_equal(ops.matmul_integer(a, b, za, zb), want)


@pytest.mark.parametrize("columns", [(), (4,)])
def test_qlinear_matmul(columns: tuple[int, ...]) -> None:
    a, b = whole(np.uint8, 3, 17), whole(np.int8, 17, 4)
    operands = [
        a, np.float32(0.02), np.uint8(120),
        b, floats(*columns, low=0.01, high=0.05), np.zeros(columns, np.int8),
        np.float32(0.3), np.uint8(100),
    ]  # fmt: skip
    (want,) = by_onnxruntime("QLinearMatMul", [np.asarray(o) for o in operands])
    np.testing.assert_array_equal(ops.qlinear_matmul(*operands), want)


def test_conv_integer() -> None:
    x, w = whole(np.uint8, 2, 4, 6, 5), whole(np.uint8, 6, 2, 3, 2)
    zx, zw = np.asarray(np.uint8(7)), np.asarray(np.uint8(3))
    (want,) = by_onnxruntime("ConvInteger", [x, w, zx, zw], pads=[1, 0, 2, 1], strides=[2, 1], group=2)
    got = ops.conv_integer(x, w, zx, zw, strides=(2, 1), padding=((1, 2), (0, 1)), groups=2)
    np.testing.assert_array_equal(got, want)


def test_qlinear_conv() -> None:
    x, w = whole(np.uint8, 2, 4, 6, 5), whole(np.int8, 6, 4, 3, 3)
    bias = RNG.integers(-900, 900, 6).astype(np.int32)
    operands = [
        x, np.float32(0.02), np.uint8(120), w, floats(6, low=0.01, high=0.05), np.zeros(6, np.int8),
        np.float32(2.3), np.uint8(100), bias,
    ]  # fmt: skip
    (want,) = by_onnxruntime("QLinearConv", [np.asarray(o) for o in operands], pads=[1, 1, 1, 1])
    np.testing.assert_array_equal(ops.qlinear_conv(*operands, padding=1), want)


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
