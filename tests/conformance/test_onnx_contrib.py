"""Ops of ONNX Runtime's own domain give what ONNX Runtime gives."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from conformance.onnx_nodes import check

RNG = np.random.default_rng(7)


def f32(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def u8(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape).astype(np.uint8)


def i8(*shape: int) -> np.ndarray:
    return RNG.integers(-128, 128, shape).astype(np.int8)


@pytest.mark.parametrize("op", ["Gelu", "QuickGelu"])
def test_gelu(op: str) -> None:
    check(op, f32(3, 17))


def test_gelu_with_bias() -> None:
    check("BiasGelu", f32(2, 3, 8), f32(8))
    check("FastGelu", f32(2, 3, 8), f32(8))
    check("FastGelu", f32(2, 3, 8))


def test_skip_layer_norm() -> None:
    check("SkipLayerNormalization", f32(2, 5, 16), f32(2, 5, 16), f32(16), f32(16), f32(16), epsilon=1e-5)
    check("SkipSimplifiedLayerNormalization", f32(2, 5, 16), f32(2, 5, 16), f32(16), epsilon=1e-5)


def test_embed_layer_norm() -> None:
    ids = RNG.integers(0, 9, (2, 4)).astype(np.int32)
    mask = np.array([[1, 1, 1, 0], [1, 1, 1, 1]], np.int32)
    tables = [f32(9, 8), f32(6, 8), f32(2, 8), f32(8), f32(8)]
    segments = np.zeros((2, 4), np.int32)
    check("EmbedLayerNormalization", ids, segments, *tables, mask, outputs=2, epsilon=1e-5)


@pytest.mark.parametrize("a", [False, True])
@pytest.mark.parametrize("b", [False, True])
def test_fused_matmul(a: bool, b: bool) -> None:
    left, right = (f32(2, 5, 3) if a else f32(2, 3, 5)), (f32(2, 4, 5) if b else f32(2, 5, 4))
    check("FusedMatMul", left, right, transA=int(a), transB=int(b), alpha=0.5)


def test_fused_matmul_with_batch_in_the_middle() -> None:
    check("FusedMatMul", f32(3, 2, 5), f32(2, 5, 4), transBatchA=1)


@pytest.mark.parametrize("points", [False, True])
def test_matmul_nbits(points: bool) -> None:
    k, n, block = 40, 6, 16
    blocks = -(-k // block)
    packed, scales = u8(n, blocks, block // 2), np.abs(f32(n * blocks))
    zero = u8(n * -(-blocks // 2)) if points else None
    arrays = [f32(3, k), packed, scales] + ([zero] if points else [])
    fixed = [1, 2, 3] if points else [1, 2]
    check("MatMulNBits", *arrays, fixed=fixed, K=k, N=n, bits=4, block_size=block, rtol=1e-3, atol=1e-3)


def test_fused_gemm_and_conv() -> None:
    check("FusedGemm", f32(3, 4), f32(4, 5), f32(5), activation="Relu", alpha=0.5)
    check("FusedConv", f32(1, 2, 6, 6), f32(3, 2, 3, 3), f32(3), activation="Relu", pads=[1, 1, 1, 1])


@pytest.mark.parametrize("interleaved", [0, 1])
def test_rotary_embedding(interleaved: int) -> None:
    ids = np.array([[0, 1, 2, 3], [2, 3, 4, 5]])
    angles = f32(10, 4)
    check(
        "RotaryEmbedding",
        f32(2, 4, 16),
        ids,
        np.cos(angles),
        np.sin(angles),
        interleaved=interleaved,
        num_heads=2,
    )


ONE, TWO = np.array(0.02, np.float32), np.array(0.05, np.float32)
ZU, ZI = np.array(120, np.uint8), np.array(3, np.int8)


@pytest.mark.parametrize("op", ["QLinearAdd", "QLinearMul"])
def test_qlinear_binary(op: str) -> None:
    check(op, u8(2, 9), ONE, ZU, u8(9), TWO, ZU, TWO, ZU, fixed=(1, 2, 4, 5, 6, 7), atol=1)
    check(op, i8(2, 9), ONE, ZI, i8(9), TWO, ZI, TWO, ZI, fixed=(1, 2, 4, 5, 6, 7), atol=1)


def test_qlinear_unary() -> None:
    small = np.array(1 / 256, np.float32)
    check("QLinearSigmoid", u8(2, 9), ONE, ZU, small, np.array(0, np.uint8), fixed=(1, 2, 3, 4), atol=1)
    check("QLinearLeakyRelu", u8(2, 9), ONE, ZU, TWO, ZU, fixed=(1, 2, 3, 4), alpha=0.1, atol=1)
    check(
        "QLinearSoftmax", u8(2, 9), TWO, ZU, small, np.array(0, np.uint8),
        fixed=(1, 2, 3, 4), axis=-1, opset=13, atol=1,
    )  # fmt: skip


def test_qlinear_pools() -> None:
    x = u8(1, 3, 6, 6)
    check("QLinearGlobalAveragePool", x, ONE, ZU, TWO, ZU, fixed=(1, 2, 3, 4), channels_last=0, atol=1)
    check("QLinearAveragePool", x, ONE, ZU, TWO, ZU, fixed=(1, 2, 3, 4), kernel_shape=[2, 2], atol=1)


def test_qlinear_concat() -> None:
    check(
        "QLinearConcat",
        ONE,
        ZU,
        u8(2, 3),
        TWO,
        ZU,
        u8(2, 4),
        ONE,
        ZU,
        fixed=(0, 1, 3, 4, 6, 7),
        axis=1,
        atol=1,
    )


def test_qgemm() -> None:
    bias = RNG.integers(-99, 99, 5).astype(np.int32)
    check("QGemm", u8(3, 4), ONE, ZU, u8(4, 5), TWO, ZU, bias, fixed=(1, 2, 3, 4, 5, 6), rtol=1e-3, atol=1e-4)


def test_integer_products() -> None:
    scale, zero = np.array([0.02], np.float32), np.array([3], np.uint8)
    check("DynamicQuantizeMatMul", f32(3, 8), u8(8, 5), scale, zero, fixed=(1, 2, 3), rtol=1e-3, atol=1e-3)
    check("MatMulIntegerToFloat", u8(3, 8), i8(8, 5), scale, scale, fixed=(1, 2, 3), rtol=1e-4, atol=1e-4)


def test_pools_with_channels_last() -> None:
    check("NhwcMaxPool", u8(1, 5, 6, 3), kernel_shape=[2, 2], strides=[2, 2], pads=[0, 0, 1, 1])
    pool = {"kernel_shape": [3, 2], "channels_last": 1}
    check("QLinearAveragePool", u8(1, 5, 6, 3), ONE, ZU, TWO, ZU, fixed=(1, 2, 3, 4), atol=1, **pool)


def test_attention_of_bytes() -> None:
    scale, zero = np.array(0.01, np.float32), np.array(128, np.uint8)
    mask = np.array([[1, 1, 1, 0], [1, 1, 1, 1]], np.int32)
    arrays = (u8(2, 4, 8), i8(8, 24), f32(24), scale, scale, mask, zero, np.array(0, np.int8))
    check("QAttention", *arrays, fixed=(1, 2, 3, 4, 6, 7), num_heads=2, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("per_gate", [False, True])
def test_lstm_with_weights_in_bytes(per_gate: bool) -> None:
    """ONNX Runtime rounds activations to bytes as well, which RLX does not: both are near the LSTM in f32."""
    shape = (2, 24) if per_gate else (2,)
    scales = [RNG.uniform(0.002, 0.004, shape).astype(np.float32) for _ in range(2)]
    zeros = [np.full(shape, z, np.uint8) for z in (128, 120)]
    w, r, bias = u8(2, 5, 24), u8(2, 6, 24), f32(2, 48)
    more = (None, None, None, None, scales[0], zeros[0], scales[1], zeros[1])
    arrays = (f32(7, 2, 5), w, r, bias, *more)
    how = {"hidden_size": 6, "direction": "bidirectional"}
    check("DynamicQuantizeLSTM", *arrays, fixed=(1, 2, 3, 8, 9, 10, 11), outputs=3, atol=0.03, **how)
