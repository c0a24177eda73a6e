"""Ops of ONNX Runtime's own domain give what ONNX Runtime gives."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import exact_integers as exact
import rlx
from conformance.onnx_nodes import check, model_of
from rlx import onnx_backend, ops

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


@pytest.mark.parametrize("skip", [(2, 5, 16), (1, 5, 16), (5, 16)])
def test_skip_layer_norm(skip: tuple[int, ...]) -> None:
    x, scale, bias = f32(2, 5, 16), f32(16), f32(16)
    check("SkipLayerNormalization", x, f32(*skip), scale, f32(16), bias, outputs=(0, 3), epsilon=1e-5)
    check("SkipLayerNormalization", x, f32(*skip), scale)
    check("SkipSimplifiedLayerNormalization", x, f32(*skip), scale, bias, outputs=(0, 3), epsilon=1e-5)
    check("SkipSimplifiedLayerNormalization", x, f32(*skip), scale, outputs=(0, 3))
    flat = f32(5, 16), f32(5, 16)
    check("SkipSimplifiedLayerNormalization", *flat, scale, bias, free={0: ("n", 16), 1: ("n", 16)})


def test_simplified_layer_norm() -> None:
    """Of the first domain, though ONNX knows nothing of it; the second output is the inverse deviation."""
    x, where = f32(2, 3, 16), {"domain": "", "version": 17, "outputs": 2}
    check("SimplifiedLayerNormalization", x, f32(16), epsilon=1e-3, **where)
    check("SimplifiedLayerNormalization", x, f32(3, 16), axis=1, **where)
    half, near = x.astype(np.float16), {"rtol": 1e-2, "atol": 1e-3}
    check("SimplifiedLayerNormalization", half, f32(16).astype(np.float16), **where, **near)
    check("SimplifiedLayerNormalization", half, f32(16), **where, **near)


def test_moments_of_a_skip_norm() -> None:
    """ONNX Runtime declares these outputs and leaves them out."""
    x, skip, scale = f32(2, 5, 16), f32(2, 5, 16), f32(16)
    model = model_of("SkipLayerNormalization", [x, skip, scale], outputs=4, epsilon=1e-3)
    _, mean, inverse, total = onnx_backend.run_model(model, [x, skip, scale])
    np.testing.assert_allclose(mean, total.mean(-1, keepdims=True), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(inverse, 1 / np.sqrt(total.var(-1, keepdims=True) + 1e-3), rtol=1e-4)


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


IDS = np.array([[0, 1, 2], [2, 3, 9]])
ROTARY: dict[str, tuple[tuple[int, ...], np.ndarray, dict[str, int]]] = {
    "flat": ((2, 3, 16), IDS, {}),
    "heads given": ((2, 3, 16), IDS, {"num_heads": 2}),
    "heads in front": ((2, 2, 3, 8), IDS, {}),
    "one first position": ((2, 3, 16), np.array([4]), {}),
    "in part": ((2, 3, 32), IDS, {"num_heads": 2, "rotary_embedding_dim": 8}),
    "in part, heads in front": ((2, 2, 3, 16), IDS, {"num_heads": 2, "rotary_embedding_dim": 8}),
}


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("case", ROTARY)
def test_rotary_embedding(case: str, interleaved: int) -> None:
    shape, ids, how = ROTARY[case]
    angles = f32(10, 4)
    x, cos, sin = f32(*shape), np.cos(angles), np.sin(angles)
    check("RotaryEmbedding", x, ids, cos, sin, interleaved=interleaved, **how)
    half = [t.astype(np.float16) for t in (x, cos, sin)]
    near = {"rtol": 1e-2, "atol": 1e-3}
    check("RotaryEmbedding", half[0], ids, *half[1:], interleaved=interleaved, **how, **near)
    if ids.ndim == 2 and (len(shape) == 4 or "num_heads" in how):  # ONNX's own op has other rules
        if len(shape) == 4:
            how = {k: v for k, v in how.items() if k != "num_heads"}
        check("RotaryEmbedding", x, cos, sin, ids, domain="", version=23, interleaved=interleaved, **how)


def test_rotary_embedding_with_more_angles_than_it_turns() -> None:
    arrays = [f32(2, 3, 32), IDS, f32(10, 8), f32(10, 8)]
    with pytest.raises(rlx.errors.ModelImportError, match="needs 4 angles") as caught:
        rlx.from_onnx(model_of("RotaryEmbedding", arrays, num_heads=2, rotary_embedding_dim=8))
    assert "node 'the RotaryEmbedding'" in str(caught.value)


# -- rows of few bits

PICKED = np.array([[0, 3, 2], [8, 8, -1]])
ROWS = {"gather_axis": 0, "quantize_axis": 1, "block_size": 16}


@pytest.mark.parametrize("kind", [np.float32, np.float16])
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(("bits", "width"), [(4, 64), (4, 48), (4, 40), (8, 32), (8, 40)])
def test_rows_of_bytes(bits: int, width: int, fixed: bool, kind: Any) -> None:
    per, blocks = 8 // bits, -(-width // 16)
    data, scales, zeros = u8(9, width // per), f32(9, blocks).astype(kind), u8(9, -(-blocks // per))
    near = {"rtol": 1e-2} if kind is np.float16 else {}
    for arrays in ((data, PICKED, scales), (data, PICKED, scales, zeros)):
        constant = [i for i in range(len(arrays)) if i != 1 and fixed]
        check("GatherBlockQuantized", *arrays, fixed=constant, bits=bits, **ROWS, **near)
    check("GatherBlockQuantized", data, PICKED, scales, free={1: ("b", "s")}, bits=bits, **ROWS, **near)


@pytest.mark.parametrize("kind", [ml_dtypes.int4, ml_dtypes.uint4])
def test_rows_of_half_bytes(kind: Any) -> None:
    def codes(*shape: int) -> np.ndarray:
        return RNG.integers(-8, 8, shape).astype(np.int8).astype(kind)

    op = "GatherBlockQuantized"
    check(op, codes(9, 32), PICKED, f32(9, 2), fixed=(0, 2), **ROWS)
    check(op, codes(9, 32), PICKED, f32(9, 2), codes(9, 2), fixed=(0, 2, 3), **ROWS)
    turned = ROWS | {"gather_axis": 1, "quantize_axis": 0}
    check(op, codes(40, 5), np.array([4, 0]), f32(3, 5), codes(3, 5), fixed=(0, 2, 3), **turned)
    check(op, codes(3, 40, 5), np.array([[2, 0]]), f32(3, 3, 5), codes(3, 3, 5), fixed=(0, 2, 3), **ROWS)


# -- integers: the oracle is exact arithmetic, ONNX Runtime's depends on the machine

ONE, TWO = np.array(0.02, np.float32), np.array(0.05, np.float32)
ZU, ZI = np.array(120, np.uint8), np.array(3, np.int8)
SMALL, ZERO = np.array(1 / 256, np.float32), np.array(0, np.uint8)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize(("op", "combine"), [("QLinearAdd", np.add), ("QLinearMul", np.multiply)])
def test_qlinear_binary(op: str, combine: Any) -> None:
    for draw, zero in ((u8, ZU), (i8, ZI)):
        a, b, z = draw(2, 9), draw(9), int(zero)
        found = combine(exact.real(a, ONE, z), exact.real(b, TWO, z))
        want = [exact.quantised(found, TWO, z, zero.dtype)]
        check(op, a, ONE, zero, b, TWO, zero, TWO, zero, fixed=(1, 2, 4, 5, 6, 7), atol=1, want=want)


@pytest.mark.parametrize(
    ("op", "function", "scales", "zeros", "how"),
    [
        ("QLinearSigmoid", sigmoid, (ONE, SMALL), (ZU, ZERO), {}),
        ("QLinearLeakyRelu", lambda x: np.where(x < 0, 0.1 * x, x), (ONE, TWO), (ZU, ZU), {"alpha": 0.1}),
        ("QLinearSoftmax", softmax, (TWO, SMALL), (ZU, ZERO), {"axis": -1, "opset": 13}),
    ],
)
def test_qlinear_unary(op: str, function: Any, scales: Any, zeros: Any, how: dict[str, Any]) -> None:
    x = u8(2, 9)
    found = function(exact.real(x, scales[0], int(zeros[0])))
    want = [exact.quantised(found, scales[1], int(zeros[1]), np.uint8)]
    given = (scales[0], zeros[0], scales[1], zeros[1])
    check(op, x, *given, fixed=(1, 2, 3, 4), atol=1, want=want, **how)


def averages(x: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Of all windows over the last two axes, quantised as the tests below ask."""
    windows = np.lib.stride_tricks.sliding_window_view(exact.real(x, ONE, 120), (rows, columns), (-2, -1))
    return exact.quantised(windows.mean((-2, -1)), TWO, 120, np.uint8)


def test_qlinear_pools() -> None:
    x, given = u8(1, 3, 6, 6), (ONE, ZU, TWO, ZU)
    how = {"fixed": (1, 2, 3, 4), "atol": 1}
    check("QLinearGlobalAveragePool", x, *given, channels_last=0, want=[averages(x, 6, 6)], **how)
    check("QLinearAveragePool", x, *given, kernel_shape=[2, 2], want=[averages(x, 2, 2)], **how)


def test_qlinear_concat() -> None:
    a, b = u8(2, 3), u8(2, 4)
    joined = np.concatenate([exact.real(a, TWO, 120), exact.real(b, ONE, 120)], 1)
    want = [exact.quantised(joined, ONE, 120, np.uint8)]
    given = (ONE, ZU, a, TWO, ZU, b, ONE, ZU)
    check("QLinearConcat", *given, fixed=(0, 1, 3, 4, 6, 7), axis=1, atol=1, want=want)


def test_qgemm() -> None:
    bias = RNG.integers(-99, 99, 5).astype(np.int32)
    a, b = u8(3, 4), u8(4, 5)
    sums = exact.product(a, b, 120, 120) + bias
    want = [(sums * float(ONE) * float(TWO)).astype(np.float32)]
    given = (a, ONE, ZU, b, TWO, ZU, bias)
    check("QGemm", *given, fixed=(1, 2, 3, 4, 5, 6), rtol=1e-3, atol=1e-4, want=want)


def test_integer_products() -> None:
    scale, zero = np.array([0.02], np.float32), np.array([3], np.uint8)
    x, w = f32(3, 8), u8(8, 5)
    levels, step, middle = ops.dynamic_quantize(x)
    sums = exact.product(levels, w, int(middle), 3)
    want = [(sums * float(step) * float(scale[0])).astype(np.float32)]
    given = (x, w, scale, zero)
    check("DynamicQuantizeMatMul", *given, fixed=(1, 2, 3), rtol=1e-3, atol=1e-3, want=want)
    a, b = u8(3, 8), i8(8, 5)
    a[0], b[:, 0] = 255, 127  # pairs of products pass 16 bits
    want = [(exact.product(a, b) * float(scale[0]) ** 2).astype(np.float32)]
    check("MatMulIntegerToFloat", a, b, scale, scale, fixed=(1, 2, 3), rtol=1e-4, atol=1e-4, want=want)


def test_pools_with_channels_last() -> None:
    x, pads = u8(1, 5, 6, 3), ((0, 0), (0, 1), (0, 1), (0, 0))
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(x, pads), (2, 2), (1, 2))[:, ::2, ::2]
    how = {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [0, 0, 1, 1]}
    check("NhwcMaxPool", x, want=[windows.max((-2, -1))], **how)
    want = [np.moveaxis(averages(np.moveaxis(x, -1, 1), 3, 2), 1, -1)]
    how = {"kernel_shape": [3, 2], "channels_last": 1}
    check("QLinearAveragePool", x, ONE, ZU, TWO, ZU, fixed=(1, 2, 3, 4), atol=1, want=want, **how)


def test_attention_of_bytes() -> None:
    scale, zero = np.array(0.01, np.float32), np.array(128, np.uint8)
    mask = np.array([[1, 1, 1, 0], [1, 1, 1, 1]], np.int32)
    x, w, bias = u8(2, 4, 8), i8(8, 24), f32(24)
    q, k, v = np.split(exact.product(x, w, 128) * float(scale) ** 2 + bias, 3, -1)
    heads = [np.moveaxis(part.reshape(2, 4, 2, 4), 2, 1) for part in (q, k, v)]
    scores = heads[0] @ np.swapaxes(heads[1], -1, -2) / 2 + np.where(mask, 0, -np.inf)[:, None, None]
    want = [np.moveaxis(softmax(scores) @ heads[2], 1, 2).reshape(2, 4, 8).astype(np.float32)]
    given = (x, w, bias, scale, scale, mask, zero, np.array(0, np.int8))
    check("QAttention", *given, fixed=(1, 2, 3, 4, 6, 7), num_heads=2, rtol=1e-3, atol=1e-4, want=want)


def byte_product(x: np.ndarray, weight: np.ndarray, scale: np.ndarray, zero: int) -> np.ndarray:
    """x rounded to u8 as DynamicQuantizeLinear does, times levels of weights: exact integers, then scaled."""
    low, high = np.float32(min(x.min(), 0)), np.float32(max(x.max(), 0))
    step = np.float32(high - low if high > low else 1) / np.float32(255)
    start = np.clip(np.rint(-low / step), 0, 255)
    levels = np.clip(np.rint(x / step) + start, 0, 255)
    sums = (levels.astype(np.int64) - int(start)) @ (weight.astype(np.int64) - zero)
    return sums.astype(np.float32) * (step * scale)


def byte_lstm(
    x: np.ndarray, weights: Any, bias: np.ndarray, first: Any = None, lens: Any = None
) -> tuple[np.ndarray, ...]:
    """One direction: all hidden states, the last one, the last cell; gates in the order i o f c."""
    w, r = weights
    steps, batch, _ = x.shape
    zeros = np.zeros((batch, r[0].shape[0]), np.float32)
    hidden, cell = (zeros, zeros) if first is None else first
    active = np.arange(steps)[:, None] < (np.full(batch, steps) if lens is None else lens)
    every = []
    for row, now in zip(byte_product(x, *w) + bias, active[:, :, None], strict=True):
        i, o, f, c = np.split((row + byte_product(hidden, *r)).astype(np.float64), 4, -1)
        new = (sigmoid(f) * cell + sigmoid(i) * np.tanh(c)).astype(np.float32)
        out = (sigmoid(o) * np.tanh(new)).astype(np.float32)
        every.append(np.where(now, out, 0))
        hidden, cell = np.where(now, out, hidden), np.where(now, new, cell)
    return np.stack(every).astype(np.float32), hidden, cell


@pytest.mark.parametrize("per_gate", [False, True])
@pytest.mark.parametrize("kind", [np.uint8, np.int8])
def test_lstm_with_weights_in_bytes(per_gate: bool, kind: type) -> None:
    """The input as a whole, and the state at every step, are rounded to bytes, and bytes are multiplied."""
    shape = (2, 24) if per_gate else (2,)
    scales = [RNG.uniform(0.002, 0.004, shape).astype(np.float32) for _ in range(2)]
    points = (128, 120) if kind is np.uint8 else (0, 0)
    zeros = [np.full(shape, z, kind) for z in points]
    some = u8 if kind is np.uint8 else i8
    x, w, r, bias = f32(7, 2, 5), some(2, 5, 24), some(2, 6, 24), f32(2, 48)
    parts = []
    for way in range(2):
        weights = [(b[way], s[way], z) for b, s, z in zip((w, r), scales, points, strict=True)]
        found = byte_lstm(x[::-1] if way else x, weights, bias[way, :24] + bias[way, 24:])
        parts.append((found[0][::-1] if way else found[0], *found[1:]))
    every, last, cell = zip(*parts, strict=True)
    want = [np.stack(every, 1), np.stack(last), np.stack(cell)]
    given = (x, w, r, bias, None, None, None, None, scales[0], zeros[0], scales[1], zeros[1])
    how = {"hidden_size": 6, "direction": "bidirectional"}
    fixed = (1, 2, 3, 8, 9, 10, 11)
    check("DynamicQuantizeLSTM", *given, fixed=fixed, outputs=3, want=want, **how)
    check("DynamicQuantizeLSTM", *given, fixed=fixed, outputs=3, **how)  # what ONNX Runtime gives


def test_byte_lstm_with_states_and_lengths() -> None:
    """Sequences end at different steps, and states are given; ended sequences keep theirs."""
    x, w, r, bias = f32(6, 3, 5), i8(1, 5, 24), i8(1, 6, 24), f32(1, 48)
    scales = [RNG.uniform(0.002, 0.004, (1, 24)).astype(np.float32) for _ in range(2)]
    zero, lens = np.zeros((1, 24), np.int8), np.array([6, 2, 4], np.int32)
    first = [0.5 * f32(1, 3, 6) for _ in range(2)]
    weights = [(b[0], s[0], 0) for b, s in zip((w, r), scales, strict=True)]
    found = byte_lstm(x, weights, bias[0, :24] + bias[0, 24:], [s[0] for s in first], lens)
    want = [found[0][:, None], found[1][None], found[2][None]]
    given = (x, w, r, bias, lens, *first, None, scales[0], zero, scales[1], zero)
    fixed = (1, 2, 3, 8, 9, 10, 11)
    check("DynamicQuantizeLSTM", *given, fixed=fixed, outputs=3, want=want, hidden_size=6)
    peephole = f32(1, 18)
    with_peephole = (*given[:4], None, *first, peephole, *given[8:])
    check("DynamicQuantizeLSTM", *with_peephole, fixed=(*fixed, 7), outputs=3, hidden_size=6)


@pytest.mark.parametrize("missing", ["w_scale", "r_scale"])
def test_byte_lstm_refuses_what_it_does_not_know(missing: str) -> None:
    x, w, r = f32(2, 1, 3), i8(1, 16, 3), i8(1, 16, 4)
    scales = dict.fromkeys(("w_scale", "r_scale"), np.ones((1, 16), np.float32))
    with pytest.raises(rlx.errors.TypeMismatchError, match=missing):
        ops.dynamic_quantize_lstm(x, w, r, **(scales | {missing: None}))
    with pytest.raises(rlx.errors.DTypeError, match="must be f32"):
        halves = {k: v.astype(np.float16) for k, v in scales.items()}
        ops.dynamic_quantize_lstm(x.astype(np.float16), w, r, **halves)
    with pytest.raises(rlx.errors.DTypeError, match="not of the dtype of w"):
        ops.dynamic_quantize_lstm(x, w, r, **scales, w_zero_point=np.zeros((1, 16), np.uint8))
    with pytest.raises(rlx.errors.DTypeError, match="not of i8 or u8"):
        ops.dynamic_quantize_lstm(x, w.astype(np.float32), r, **scales)
