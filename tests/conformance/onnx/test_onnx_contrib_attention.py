"""Attention as exporters of language models write it (com.microsoft) gives what ONNX Runtime gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import rlx
from conformance.onnx_nodes import check, model_of, onnxruntime_results
from rlx import onnx_backend

RNG = np.random.default_rng(11)
NEAR = {"rtol": 1e-3, "atol": 1e-4}


def f32(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def i32(*numbers: Any) -> np.ndarray:
    return np.array(numbers, np.int32)


# -- Attention and MultiHeadAttention

MASKS = {
    "none": None,
    "keys": i32([1, 1, 1, 0, 0], [0, 1, 1, 1, 1]),
    "nothing seen": np.zeros((2, 5), np.int32),
    "queries and keys": RNG.integers(0, 2, (2, 5, 5)).astype(np.int32),
    "lengths": i32(3, 5),
    "ends and starts": i32(3, 5, 1, 2),
    "all": i32([1], [1]),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("causal", [0, 1])
def test_attention(mask: str, causal: int) -> None:
    x, w, bias = f32(2, 5, 16), f32(16, 48), f32(48)
    # 10000, the default, would round the scores to a thousandth where all keys are hidden
    filtered = {"mask_filter_value": -100.0} if mask == "nothing seen" else {}
    check("Attention", x, w, bias, MASKS[mask], num_heads=4, unidirectional=causal, **filtered, **NEAR)


@pytest.mark.parametrize("causal", [0, 1])
def test_attention_with_a_past(causal: int) -> None:
    x, w, bias, past = f32(2, 5, 16), f32(16, 48), f32(48), f32(2, 2, 4, 3, 4)
    seen = i32([1] * 8, [0, 0] + [1] * 6)
    how: dict[str, Any] = {"outputs": 2, "num_heads": 4, "unidirectional": causal, **NEAR}
    check("Attention", x, w, bias, None, past, **how)
    check("Attention", x, w, bias, seen, past, **how)
    check("Attention", x, w, bias, **how)
    free = {0: ("b", "s", 16), 4: (2, "b", 4, "p", 4)}
    check("Attention", x, w, bias, None, past, free=free, **how)


def test_attention_with_values_of_another_size() -> None:
    sizes = {"num_heads": 4, "qkv_hidden_sizes": [16, 16, 8], "scale": 0.3, "mask_filter_value": -2.0}
    check("Attention", f32(2, 5, 16), f32(16, 40), f32(40), MASKS["keys"], **sizes, **NEAR)


@pytest.mark.parametrize("mask", [None, MASKS["keys"], MASKS["lengths"]])
@pytest.mark.parametrize("width", [16, 24])
def test_multi_head_attention(mask: np.ndarray | None, width: int) -> None:
    q, k, v = f32(2, 3, 16), f32(2, 5, 16), f32(2, 5, width)
    check("MultiHeadAttention", q, k, v, f32(32 + width), mask, f32(1, 4, 3, 5), num_heads=4, **NEAR)
    check("MultiHeadAttention", q, k, v, None, mask, num_heads=4, scale=0.2, mask_filter_value=-3.0, **NEAR)


@pytest.mark.parametrize("causal", [0, 1])
def test_multi_head_attention_with_a_past(causal: int) -> None:
    q, k, v = (f32(2, 3, 16) for _ in range(3))
    past = f32(2, 4, 4, 4), f32(2, 4, 4, 4)
    how: dict[str, Any] = {"outputs": 3, "num_heads": 4, "unidirectional": causal, **NEAR}
    check("MultiHeadAttention", q, k, v, None, None, None, *past, **how)
    check("MultiHeadAttention", q, k, v, f32(48), None, f32(2, 1, 3, 7), *past, **how)
    free = dict.fromkeys(range(3), ("b", "s", 16)) | dict.fromkeys((6, 7), ("b", 4, "p", 4))
    check("MultiHeadAttention", q, k, v, None, None, None, *past, free=free, **how)


def test_keys_of_an_encoder_with_heads_in_front() -> None:
    q, k, v = f32(2, 3, 16), f32(2, 4, 5, 4), f32(2, 4, 5, 4)
    check("MultiHeadAttention", q, k, v, num_heads=4, **NEAR)
    check("MultiHeadAttention", q, k, v, f32(48), num_heads=4, **NEAR)


def test_packed_heads() -> None:
    """ONNX Runtime has these on GPUs only: they mean what separate tensors mean."""
    q, k, v, bias = f32(2, 5, 16), f32(2, 5, 16), f32(2, 5, 16), f32(48)
    want = check("MultiHeadAttention", q, k, v, bias, num_heads=4, **NEAR)[0]
    three, two = (np.stack([t.reshape(2, 5, 4, 4) for t in parts], axis=3) for parts in ((q, k, v), (k, v)))
    for arrays in ((three, None, None, bias), (q, two, None, bias)):
        model = model_of("MultiHeadAttention", arrays, num_heads=4)
        got = onnx_backend.run_model(model, [a for a in arrays if a is not None])[0]
        np.testing.assert_allclose(got, want, **NEAR)


# -- GroupQueryAttention


def group_query(
    batch: int = 2,
    new: int = 1,
    past: int = 4,
    lengths: Any = None,
    heads: int = 4,
    few: int = 2,
    dim: int = 16,
    packed: bool = False,
    pairs: int = 0,
    room: int = 0,
    kind: Any = np.float32,
    more: dict[int, np.ndarray] | None = None,
) -> tuple[list[Any], dict[str, Any]]:
    """Inputs and attributes: `past` old tokens in a cache with `room`, turned by `pairs` of features."""

    def made(*shape: int) -> np.ndarray:
        return f32(*shape).astype(kind)

    total = past + new
    last = [total - 1] * batch if lengths is None else [n - 1 for n in lengths]
    caches = [made(batch, few, room or past, dim) if room or past else None for _ in range(2)]
    angles = f32(32, pairs)
    turns = [f(angles).astype(kind) for f in (np.cos, np.sin)] if pairs else [None, None]
    if packed:
        rows = [made(batch, new, (heads + 2 * few) * dim), None, None]
    else:
        rows = [made(batch, new, h * dim) for h in (heads, few, few)]
    arrays = [*rows, *caches, i32(*last), np.array(total, np.int32), *turns, *[None] * 7]
    for i, array in (more or {}).items():
        arrays[i] = array
    while arrays[-1] is None:
        arrays.pop()
    return arrays, {"num_heads": heads, "kv_num_heads": few, "do_rotary": int(pairs > 0)}


GROUPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a token": ({}, {}),
    "one head for all": ({"few": 1}, {}),
    "as many heads": ({"few": 4, "heads": 4}, {}),
    "a prompt": ({"past": 0, "new": 7}, {}),
    "packed": ({"packed": True}, {}),
    "packed and turned": ({"packed": True, "pairs": 8}, {"rotary_interleaved": 1}),
    "turned": ({"pairs": 8}, {}),
    "turned in part": ({"pairs": 8, "dim": 32}, {}),
    "turned by positions": ({"pairs": 8, "more": {9: np.array([[7], [3]])}}, {}),
    "items of other lengths": ({"lengths": (5, 3), "pairs": 8}, {}),
    "a prompt after a past": ({"batch": 1, "new": 3, "pairs": 8}, {}),
    "a window": ({"past": 6}, {"local_window_size": 2}),
    "a window over a prompt": ({"past": 0, "new": 7}, {"local_window_size": 3}),
    "a window of other lengths": ({"past": 6, "lengths": (7, 4)}, {"local_window_size": 2}),
    "capped scores": ({}, {"softcap": 1.5}),
    "a scale": ({}, {"scale": 0.3}),
    "room in the cache": ({"room": 12, "pairs": 8}, {}),
    "room and other lengths": ({"room": 12, "lengths": (5, 2)}, {}),
    "an added mask": ({"more": {10: f32(2, 1, 1, 5)}}, {}),
    "an added mask and a cap": ({"more": {10: f32(1, 4, 1, 5)}}, {"softcap": 2.0}),
    "a smooth softmax": ({}, {"smooth_softmax": 1}),
    "sinks": ({"more": {11: f32(4)}, "past": 6}, {"local_window_size": 3}),
    "all seen": ({"past": 0, "new": 5, "lengths": (5, 3)}, {"causal": 0}),
    "half precision": ({"kind": np.float16, "pairs": 8}, {}),
}


@pytest.mark.parametrize("case", GROUPS)
def test_group_query_attention(case: str) -> None:
    how, attrs = GROUPS[case]
    arrays, sizes = group_query(**how)
    near = {"rtol": 2e-2, "atol": 2e-3} if "kind" in how else NEAR
    check("GroupQueryAttention", *arrays, fixed=(6,), outputs=3, **sizes, **attrs, **near)


def test_a_prompt_with_padding_behind_it() -> None:
    """Rows of padding mean nothing; ONNX Runtime and RLX fill them differently."""
    arrays, sizes = group_query(past=0, new=5, lengths=(5, 3), pairs=8)
    model = model_of("GroupQueryAttention", arrays, (6,), 3, **sizes)
    feed = {f"x{i}": a for i, a in enumerate(arrays) if a is not None and i != 6}
    want = onnxruntime_results(model, feed)
    got = onnx_backend.run_model(model, list(feed.values()))
    for w, g in zip(want, got, strict=True):
        np.testing.assert_allclose(g[0], w[0], **NEAR)
        real = np.s_[1, :3] if w.ndim == 3 else np.s_[1, :, :3]
        np.testing.assert_allclose(g[real], w[real], **NEAR)


def test_normalised_queries_and_keys() -> None:
    """ONNX Runtime has these on GPUs only: as it computes them from normalised queries and keys."""
    weights = f32(16), f32(16)
    arrays, sizes = group_query(pairs=8, more={14: weights[0], 15: weights[1]})

    def normal(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        heads = x.reshape(*x.shape[:2], -1, 16)
        mean = np.mean(heads * heads, axis=-1, keepdims=True)
        return (heads / np.sqrt(mean + 1e-5) * weight).reshape(x.shape)

    by_hand = [normal(arrays[0], weights[0]), normal(arrays[1], weights[1]), *arrays[2:9]]
    model = model_of("GroupQueryAttention", by_hand, (6,), 3, **sizes)
    want = onnxruntime_results(model, {f"x{i}": a for i, a in enumerate(by_hand) if i != 6})
    model = model_of("GroupQueryAttention", arrays, (6,), 3, qk_norm_epsilon=1e-5, **sizes)
    got = onnx_backend.run_model(model, [a for i, a in enumerate(arrays) if a is not None and i != 6])
    for w, g in zip(want, got, strict=True):
        np.testing.assert_allclose(g, w, **NEAR)


# -- what is refused

REFUSED: dict[str, tuple[str, list[Any], dict[str, Any], str]] = {
    "shared buffers": (
        "Attention",
        [f32(2, 1, 16), f32(16, 48), f32(48), None, f32(2, 2, 4, 8, 4), None, i32(3)],
        {"num_heads": 4, "past_present_share_buffer": 1, "outputs": 2},
        "shares its buffer",
    ),
    "a shared buffer by its attribute": (
        "Attention",
        [f32(2, 1, 16), f32(16, 48), f32(48)],
        {"num_heads": 4, "past_present_share_buffer": 1},
        "shares its buffer",
    ),
    "positions of a product": (
        "Attention",
        [f32(2, 1, 16), f32(16, 48), f32(48)],
        {"num_heads": 4, "do_rotary": 1},
        "do_rotary is not supported",
    ),
    "scores": ("MultiHeadAttention", [f32(2, 3, 16)] * 3, {"num_heads": 4, "outputs": 4}, "output of scores"),
    "beams": (
        "MultiHeadAttention",
        [*[f32(2, 1, 16)] * 3, *[None] * 6, np.zeros((2, 1, 3), np.int32)],
        {"num_heads": 4},
        "cache_indirection",
    ),
    "a cache of bytes": (
        "GroupQueryAttention",
        group_query()[0],
        {"k_quant_type": "PER_TENSOR"},
        "quantised",
    ),
    "a cache of a window": (
        "GroupQueryAttention",
        group_query()[0],
        {"sliding_window_cache": 1},
        "window_cache",
    ),
    "what nobody knows": (
        "GroupQueryAttention",
        group_query()[0],
        {"colour": 1},
        "'colour' is not supported",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_words(case: str) -> None:
    op, arrays, how, words = REFUSED[case]
    if op == "GroupQueryAttention":
        how = {"fixed": (6,), "outputs": 3, "num_heads": 4, "kv_num_heads": 2, **how}
    with pytest.raises(rlx.errors.ModelImportError, match=words) as caught:
        rlx.from_onnx(model_of(op, arrays, **how))
    assert f"node 'the {op}'" in str(caught.value)
