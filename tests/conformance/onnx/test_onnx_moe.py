"""Mixtures of experts (com.microsoft) give what ONNX Runtime gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import rlx
from conformance.onnx_nodes import check, model_of
from rlx import onnx_backend

RNG = np.random.default_rng(3)
EXPERTS, TOKENS, NEAR = 4, 5, {"rtol": 1e-3, "atol": 1e-4}
SWIGLU: dict[str, Any] = {"activation_type": "swiglu", "activation_alpha": 1.702, "activation_beta": 1.0}


def f32(*shape: int) -> np.ndarray:
    return (RNG.standard_normal(shape) * 0.5).astype(np.float32)


def u8(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape).astype(np.uint8)


def scales(*shape: int) -> np.ndarray:
    return RNG.uniform(0.01, 0.1, shape).astype(np.float32)


@pytest.mark.parametrize("normal", [0, 1])
@pytest.mark.parametrize("kind", ["relu", "gelu", "silu", "identity"])
def test_experts(kind: str, normal: int) -> None:
    weights = f32(EXPERTS, 6, 8), f32(EXPERTS, 6), f32(EXPERTS, 8, 6), f32(EXPERTS, 8)
    how = {"k": 2, "activation_type": kind, "normalize_routing_weights": normal}
    check("MoE", f32(TOKENS, 8), f32(TOKENS, EXPERTS), *weights, **how, **NEAR)


def test_open_sizes_and_no_bias() -> None:
    arrays = f32(2, 3, 8), f32(6, EXPERTS), f32(EXPERTS, 6, 8), None, f32(EXPERTS, 8, 6)
    free = {0: ("b", "s", 8), 1: ("n", EXPERTS)}
    check("MoE", *arrays, fixed=(2, 4), free=free, k=3, activation_type="silu", **NEAR)


def test_gates_beside_values() -> None:
    """Interleaved; halves and a layer of their own, which ONNX Runtime has on GPUs only, mean the same."""
    x, router, w, bias = f32(TOKENS, 8), f32(TOKENS, EXPERTS), f32(EXPERTS, 12, 8), f32(EXPERTS, 12)
    last = f32(EXPERTS, 8, 6), f32(EXPERTS, 8)
    how = {"k": 2, "swiglu_limit": 0.7, "normalize_routing_weights": 1, **SWIGLU}
    want = check("MoE", x, router, w, bias, *last, swiglu_fusion=1, **how, **NEAR)[0]
    gate, value, gate_bias, value_bias = w[:, ::2], w[:, 1::2], bias[:, ::2], bias[:, 1::2]
    halves = np.concatenate([gate, value], 1), np.concatenate([gate_bias, value_bias], 1)
    for arrays, fusion in (
        ([x, router, *halves, *last], 2),
        ([x, router, gate, gate_bias, *last, value, value_bias], 0),
    ):
        model = model_of("MoE", arrays, swiglu_fusion=fusion, **how)
        np.testing.assert_allclose(onnx_backend.run_model(model, arrays)[0], want, **NEAR)


def quantised(bits: int, block: int, points: bool) -> tuple[list[Any], dict[str, Any]]:
    per, width = 8 // bits, 32
    groups = (width // block,) if block else ()
    arrays: list[Any] = [None] * 14
    arrays[0], arrays[1] = f32(TOKENS, width), f32(TOKENS, EXPERTS)
    arrays[2], arrays[3] = u8(EXPERTS, 2 * width, width // per), scales(EXPERTS, 2 * width, *groups)
    arrays[4] = f32(EXPERTS, 2 * width)
    arrays[5], arrays[6] = u8(EXPERTS, width, width // per), scales(EXPERTS, width, *groups)
    arrays[7] = f32(EXPERTS, width)
    if points:
        packed = groups[0] // per
        arrays[11], arrays[12] = u8(EXPERTS, 2 * width, packed), u8(EXPERTS, width, packed)
    while arrays[-1] is None:
        arrays.pop()
    fixed = [i for i in (2, 3, 5, 6, 11, 12) if i < len(arrays)]
    how = {"k": 2, "expert_weight_bits": bits, "swiglu_fusion": 1, "swiglu_limit": 7.0, **SWIGLU}
    how |= {"block_size": block} if block else {}
    return arrays, {"fixed": fixed, "normalize_routing_weights": 1, **how}


@pytest.mark.parametrize(
    ("bits", "block", "points"), [(4, 0, False), (4, 16, False), (4, 16, True), (8, 0, False)]
)
def test_experts_of_few_bits(bits: int, block: int, points: bool) -> None:
    arrays, how = quantised(bits, block, points)
    check("QMoE", *arrays, **how, **NEAR)


@pytest.mark.parametrize("points", [False, True])
def test_blocks_of_bytes(points: bool) -> None:
    """ONNX Runtime rounds activations to bytes there; this is the same in floats."""
    arrays, how = quantised(8, 16, points)

    def real(i: int) -> np.ndarray:
        zero = arrays[11 if i == 2 else 12].astype(np.float32) if points else np.float32(128)
        per_code = np.repeat(np.broadcast_to(zero, arrays[i + 1].shape), 16, axis=2)
        return (arrays[i] - per_code) * np.repeat(arrays[i + 1], 16, axis=2)

    plain = [arrays[0], arrays[1], real(2), arrays[4], real(5), arrays[7]]
    same = {k: v for k, v in how.items() if k not in ("fixed", "expert_weight_bits", "block_size")}
    want = check("MoE", *plain, **same, **NEAR)[0]
    got = onnx_backend.run_model(
        model_of("QMoE", arrays, **how),
        [a for i, a in enumerate(arrays) if a is not None and i not in how["fixed"]],
    )[0]
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"use_sparse_mixer": 1}, "use_sparse_mixer"),
        ({"activation_type": "mish"}, "'mish'"),
        ({"activation_type": "swiglu"}, "swiglu needs"),
    ],
)
def test_refused_in_words(how: dict[str, Any], words: str) -> None:
    arrays = [f32(TOKENS, 8), f32(TOKENS, EXPERTS), f32(EXPERTS, 6, 8), None, f32(EXPERTS, 8, 6)]
    with pytest.raises(rlx.errors.ModelImportError, match=words) as caught:
        rlx.from_onnx(model_of("MoE", arrays, k=1, **how))
    assert "node 'the MoE'" in str(caught.value)
