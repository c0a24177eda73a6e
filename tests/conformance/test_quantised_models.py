"""Models that ONNX Runtime's quantiser wrote: bytes from end to end, beside exact integer arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import exact_integers as exact
import rlx

pytestmark = pytest.mark.usefixtures("each_origin")

RNG = np.random.default_rng(31)


@pytest.fixture(autouse=True)
def _needs_onnxruntime(require: Any) -> None:
    require("onnx")
    require("onnxruntime")
    pytest.importorskip("onnxruntime.quantization")


class Net:
    """Writes an ONNX graph node by node."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.weights: list[Any] = []

    def op(self, kind: str, *inputs: str, **attrs: Any) -> str:
        from onnx import helper

        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], **attrs))
        return name

    def weight(self, value: Any) -> str:
        from onnx import numpy_helper

        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def normal(self, *shape: int) -> str:
        scale = np.sqrt(2 / max(np.prod(shape[1:]), 1))
        return self.weight((RNG.standard_normal(shape) * scale).astype(np.float32))

    def conv(self, x: str, into: int, out: int, window: int, stride: int = 1) -> str:
        pads = [window // 2] * 4
        return self.op(
            "Conv",
            x,
            self.normal(out, into, window, window),
            self.normal(out),
            pads=pads,
            strides=[stride] * 2,
        )

    def save(self, path: Path, shape: list[int], result: str) -> None:
        import onnx
        from onnx import TensorProto, helper

        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
        y = helper.make_empty_tensor_value_info(result)
        graph = helper.make_graph(self.nodes, "net", [x], [y], self.weights)
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)


def residual_net(path: Path) -> list[int]:
    """Bottlenecks with a pool before and a classifier behind them."""
    net, shape = Net(), [1, 3, 40, 40]
    x = net.op(
        "MaxPool",
        net.op("Relu", net.conv("x", 3, 32, 7, 2)),
        kernel_shape=[3, 3],
        strides=[2, 2],
        pads=[1] * 4,
    )
    for into, stride in ((32, 1), (64, 2)):
        y = net.op("Relu", net.conv(x, into, 24, 1))
        y = net.conv(net.op("Relu", net.conv(y, 24, 24, 3, stride)), 24, 64, 1)
        x = net.op("Relu", net.op("Add", y, net.conv(x, into, 64, 1, stride)))
    flat = net.op("Flatten", net.op("GlobalAveragePool", x))
    net.save(path, shape, net.op("Gemm", flat, net.normal(10, 64), net.normal(10), transB=1))
    return shape


def encoder(path: Path) -> list[int]:
    """One layer of attention and a feed-forward block over 24 tokens of 32 features, in 2 heads."""
    net, shape = Net(), [1, 24, 32]
    heads = net.weight(np.array([1, 24, 2, 16], np.int64))

    def linear(x: str, into: int, out: int) -> str:
        return net.op("Add", net.op("MatMul", x, net.normal(into, out)), net.normal(out))

    def head(x: str, perm: list[int]) -> str:
        return net.op("Transpose", net.op("Reshape", linear(x, 32, 32), heads), perm=perm)

    scores = net.op("MatMul", head("x", [0, 2, 1, 3]), head("x", [0, 2, 3, 1]))
    mixed = net.op("MatMul", net.op("Softmax", scores, axis=-1), head("x", [0, 2, 1, 3]))
    joined = net.op(
        "Reshape", net.op("Transpose", mixed, perm=[0, 2, 1, 3]), net.weight(np.array(shape, np.int64))
    )
    x = net.op("Add", "x", linear(joined, 32, 32))
    net.save(path, shape, net.op("Add", x, linear(net.op("Relu", linear(x, 32, 64)), 64, 32)))
    return shape


def reference(path: Path) -> Any:
    """ONNX's own evaluator, which sums in NumPy's integers, with the ops of ONNX Runtime that it lacks."""
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.op_run import OpRun

    def op(name: str, run: Callable[..., np.ndarray]) -> Any:
        body = {"op_domain": "com.microsoft", "_run": lambda self, *values, **attrs: (run(*values, **attrs),)}
        return type(name, (OpRun,), body)

    def add(a: Any, sa: Any, za: Any, b: Any, sb: Any, zb: Any, sy: Any, zy: Any) -> np.ndarray:
        return exact.quantised(exact.real(a, sa, za) + exact.real(b, sb, zb), sy, zy, zy.dtype)

    def average(x: Any, sx: Any, zx: Any, sy: Any, zy: Any, channels_last: int) -> np.ndarray:
        assert not channels_last
        return exact.quantised(exact.real(x, sx, zx).mean((2, 3), keepdims=True), sy, zy, zy.dtype)

    def softmax(x: Any, sx: Any, zx: Any, sy: Any, zy: Any, axis: int, opset: int) -> np.ndarray:
        assert axis in (-1, x.ndim - 1) and opset >= 13
        e = np.exp(exact.real(x, sx, zx))
        return exact.quantised(e / e.sum(-1, keepdims=True), sy, zy, zy.dtype)

    def gemm(a: Any, sa: Any, za: Any, b: Any, sb: Any, zb: Any, c: Any, sy: Any, zy: Any, **how: Any) -> Any:
        assert how["transB"] and not how.get("transA") and how.get("alpha", 1.0) == 1.0
        sums = exact.product(a, b.T, za.astype(np.int64), zb.astype(np.int64)) + c
        return exact.quantised(sums * (np.float64(sa) * sb), sy, zy, zy.dtype)

    ops = {"QLinearAdd": add, "QLinearGlobalAveragePool": average, "QLinearSoftmax": softmax, "QGemm": gemm}
    return ReferenceEvaluator(str(path), new_ops=[op(*each) for each in ops.items()])


@pytest.mark.parametrize("model", [residual_net, encoder])
@pytest.mark.parametrize("activations", ["QUInt8", "QInt8"])
@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
def test_quantised_models_agree(model: Any, activations: str, form: str, tmp_path: Path) -> None:
    """As near to the truth as a quantum here and there allows; every product in integers, no host thunk."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    shape = model(tmp_path / "f32.onnx")
    samples = [RNG.standard_normal(shape).astype(np.float32) for _ in range(3)]

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.rest = iter([{"x": s} for s in samples])

        def get_next(self) -> Any:
            return next(self.rest, None)

    path = tmp_path / "bytes.onnx"
    quantize_static(
        tmp_path / "f32.onnx", path, Reader(), quant_format=QuantFormat[form], per_channel=True,
        activation_type=QuantType[activations], weight_type=QuantType.QInt8,
    )  # fmt: skip
    session = reference(path)
    program = rlx.compile(rlx.from_onnx(str(path)))
    assert not program.stats["host_thunks"]
    products = [n for r in program.lir.mir.nodes for b in r.bodies for n in b.nodes if n.op.heavy]
    assert products and all(n.dtype.name == "i32" for n in products)
    for x in samples:
        (want,) = session.run(None, {"x": x})
        (got,) = program.run({"x": x}).values()
        assert np.max(np.abs(got - want)) <= 0.04 * np.max(np.abs(want))
