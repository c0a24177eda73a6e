"""Sums and products of integers: 64 bits as in NumPy, `dtype` chooses, ONNX keeps its dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx
from gemm_harness import every_target
from rlx import ops
from rlx.ir.graph import Graph
from rlx.reference.interpreter import evaluate
from rlx.target.cpu import Target

KINDS = ["bool", "i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64"]
SUMS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "sum": (ops.sum, np.sum),
    "prod": (ops.prod, np.prod),
    "cumsum": (ops.cumsum, np.cumsum),
    "cumprod": (ops.cumprod, np.cumprod),
    "mean": (ops.mean, np.mean),
}


def values(kind: str) -> np.ndarray:
    """Elements whose sums and products leave the narrow dtypes."""
    rng, d = np.random.default_rng(5), rlx.ir.dtype.dtype(kind)
    if d.is_bool:
        return rng.integers(0, 2, (5, 70)).astype(bool)
    low, high = max(int(d.min_value), -(2**31)), min(int(d.max_value), 2**31)
    return rng.integers(low, high, (5, 70), endpoint=True).astype(d.np)


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("kind", KINDS)
def test_eager_as_numpy(kind: str, name: str) -> None:
    ours, numpy = SUMS[name]
    x = values(kind)
    for axis in (None, 0, 1):
        got, want = ours(x, axis=axis), numpy(x, axis=axis)
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


@every_target
@pytest.mark.parametrize("name", ["sum", "prod", "cumsum", "cumprod"])
def test_native_as_numpy(name: str, target: Target) -> None:
    ours, numpy = SUMS[name]
    for kind in KINDS:
        for chosen in (None, "i8", "u16", kind):
            if chosen == "bool":
                continue
            g = Graph("sums")
            x = g.input("x", (5, 70), kind)
            for axis in (0, 1):
                g.output(f"y{axis}", ours(x, axis=axis, dtype=chosen))
            data = values(kind)
            got = rlx.compile(g, target=target.name, cache=False).run({"x": data})
            expected = None if chosen is None else rlx.ir.dtype.dtype(chosen).np
            for axis in (0, 1):
                want = numpy(data, axis=axis, dtype=expected)
                assert got[f"y{axis}"].dtype == want.dtype, (kind, chosen)
                np.testing.assert_array_equal(got[f"y{axis}"], want, err_msg=f"{kind} {chosen}")


def test_opencl_as_numpy(require: Callable[[str], None]) -> None:
    require("opencl")
    for kind in ("bool", "i8", "u8", "i32"):
        g = Graph("sums")
        x = g.input("x", (5, 70), kind)
        g.output("sum", ops.sum(x, axis=1))
        g.output("prod", ops.prod(x, axis=0))
        data = values(kind)
        got = rlx.compile(g, device="opencl", cache=False).run({"x": data})
        np.testing.assert_array_equal(got["sum"], data.sum(1))
        np.testing.assert_array_equal(got["prod"], data.prod(0))


def test_absolute_values_and_squares() -> None:
    x = np.array([-128, 127, -128], np.int8)
    assert ops.norm_l1(x) == 383 and ops.sum_square(x) == 2 * 128**2 + 127**2
    assert ops.norm_l1(x, dtype="i8") == np.int8(127)  # -128 has no opposite in 8 bits
    assert ops.sum_square(x, dtype="i8") == np.int8(1)


def test_floats_choose_too() -> None:
    x = np.full(4096, 0.1, np.float16)
    assert ops.sum(x).dtype == np.float16
    np.testing.assert_allclose(ops.sum(x, dtype="f32"), x.sum(dtype=np.float32), rtol=1e-6)
    gradient = rlx.grad(lambda x: ops.sum(x * x, dtype="f64"))(np.array([1.5, -2.0], np.float32))
    assert gradient.dtype == np.float32
    np.testing.assert_array_equal(gradient, [3.0, -4.0])


def test_batched() -> None:
    x = values("u8")
    np.testing.assert_array_equal(rlx.vmap(ops.sum)(x), x.sum(1))
    np.testing.assert_array_equal(rlx.vmap(lambda row: ops.cumsum(row, dtype="u8"))(x), x.cumsum(1, np.uint8))


def test_contractions_keep_their_dtype() -> None:
    x = np.full((2, 3), 100, np.int8)
    for equation in ("ij->i", "ij->", "ij->j"):
        assert ops.einsum(equation, x).dtype == np.int8
        np.testing.assert_array_equal(ops.einsum(equation, x), np.einsum(equation, x))


@pytest.mark.parametrize(
    "op", ["ReduceSum", "ReduceProd", "ReduceL1", "ReduceSumSquare", "CumSum", "EmbedLayerNormalization"]
)
def test_onnx_keeps_its_dtype(op: str, require: Callable[[str], None]) -> None:
    require("onnx")
    import onnx
    from onnx import TensorProto, helper

    x = np.array([[2**30, 2**30, 2**30, 5], [7, 2**16, 2**16, -9]], np.int32)
    first = helper.make_tensor_value_info("x", TensorProto.INT32, list(x.shape))
    result = helper.make_tensor_value_info("y", TensorProto.INT32, None)
    axes = onnx.numpy_helper.from_array(np.array(1 if op == "CumSum" else [1], np.int64), "axes")
    if op == "EmbedLayerNormalization":
        names = ["words", "places", "scale", "shift"]
        tables = [np.ones(s, np.float32) for s in ((8, 4), (4, 4), (4,), (4,))]
        inputs = ["ids", "", "words", "places", "", "scale", "shift", "x"]
        held = [onnx.numpy_helper.from_array(t, n) for t, n in zip(tables, names, strict=True)]
        held.append(onnx.numpy_helper.from_array(np.zeros((2, 4), np.int32), "ids"))
        node = helper.make_node(op, inputs, ["normal", "y"], domain="com.microsoft")
    else:
        held, node = [axes], helper.make_node(op, ["x", "axes"], ["y"])
    versions = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "g", [first], [result], held)
    model = helper.make_model(graph, opset_imports=versions)
    got = rlx.compile(rlx.from_onnx(model), cache=False).run({"x": x})["y"]
    wide = x.astype(np.int64)
    want = {
        "ReduceProd": wide.prod(1, keepdims=True),
        "ReduceL1": np.abs(wide).sum(1, keepdims=True),
        "ReduceSumSquare": (wide * wide).sum(1, keepdims=True),
        "CumSum": wide.cumsum(1),
        "EmbedLayerNormalization": wide.sum(1),
    }.get(op, wide.sum(1, keepdims=True))
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, want.astype(np.int32))


def test_reference_interpreter_agrees() -> None:
    g = Graph("sums")
    x = g.input("x", (5, 70), "i8")
    g.output("y", ops.sum(x, axis=1) + ops.prod(x, axis=1))
    data = values("i8")
    np.testing.assert_array_equal(evaluate(g, {"x": data})["y"], data.sum(1) + data.prod(1))
