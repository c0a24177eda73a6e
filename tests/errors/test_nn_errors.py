"""What the network blocks say when operands do not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.errors import DTypeError, OpAttributeError, RlxError, ShapeError, TypeMismatchError
from rlx.ir.op import get_op
from rlx.ops.array.addressing import OutOfRangeError


def f(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


IDS = np.array([0, 1])

CASES: list[tuple[Callable[[], Any], type[RlxError], str]] = [
    (lambda: ops.gelu(IDS), DTypeError, "gelu: operand i64[2] is not of a real floating-point dtype"),
    (lambda: ops.prelu(f(2, 3), f(2)), ShapeError, "prelu: shapes [2,3] and [2] do not broadcast"),
    (
        lambda: ops.gelu(f(2), approximate="fast"),
        OpAttributeError,
        "gelu: attribute 'approximate' needs one of",
    ),
    (lambda: ops.clip(f(2), np.ones(2)), DTypeError, "clip: operands f32[2], f64[2] have different dtypes"),
    (
        lambda: ops.resize(f(0), (10,)),
        ShapeError,
        "resize: axis 0 of f32[0] has no elements, so it cannot be enlarged to 10",
    ),
    (
        lambda: ops.conv_transpose(f(1, 1, 3), f(1, 1, 0)),
        ShapeError,
        "conv_transpose: a window of size 0 is empty",
    ),
    (lambda: ops.mean(f(2, 3), axis=2), ShapeError, "mean: axis 2 is out of range for rank 2"),
    (lambda: ops.var(f(2, 3), axis=(1, -1)), ShapeError, "var: axes (1, -1) name an axis twice"),
    (
        lambda: ops.linear(f(2, 3), f(4, 5)),
        ShapeError,
        "linear: x f32[2,3] has 3 features, w f32[4,5] takes 4",
    ),
    (
        lambda: ops.linear(f(2, 3), f(3)),
        ShapeError,
        "linear: x f32[2,3] needs an axis and w f32[3] needs two",
    ),
    (lambda: ops.linear(f(2, 3), f(3, 4), f(3)), ShapeError, "linear: shapes [3] and [4] do not broadcast"),
    (lambda: ops.linear(f(2, 3), f(3, 1), f(4)), ShapeError, "linear: bias f32[4] is not [1], the features"),
    (lambda: ops.softmax(f(2), axis=1), ShapeError, "softmax: axis 1 is out of range for rank 1"),
    (
        lambda: ops.embedding(f(3), IDS),
        ShapeError,
        "embedding: table f32[3] needs two axes, rows and features",
    ),
    (
        lambda: ops.embedding(f(3, 2), f(1)),
        DTypeError,
        "embedding: operand f32[1] is not of an integer dtype",
    ),
    (
        lambda: ops.embedding(f(3, 2), [-1]),
        OutOfRangeError,
        "embedding: id -1 is out of range for a table of 3",
    ),
    (
        lambda: ops.embedding(f(3, 2), [3]),
        OutOfRangeError,
        "embedding: id 3 is out of range for a table of 3",
    ),
    (
        lambda: ops.swiglu(f(2, 3)),
        ShapeError,
        "swiglu: the last axis of f32[2,3] cannot be split into two halves",
    ),
    (lambda: ops.dropout(f(2), rate=1.0), OpAttributeError, "dropout: rate 1.0 is not in [0, 1)"),
    (lambda: ops.layer_norm(f(2, 3), bias=f(3)), TypeMismatchError, "layer_norm: a bias needs a scale"),
    (
        lambda: ops.layer_norm(f(2, 3), f(2, 2, 3)),
        ShapeError,
        "layer_norm: scale f32[2,2,3] does not broadcast",
    ),
    (
        lambda: ops.batch_norm(f(2, 3), *[f(2)] * 4),
        ShapeError,
        "batch_norm: scale f32[2] is not [3], the channels",
    ),
    (lambda: ops.group_norm(f(2, 3), f(3), f(3), 2), ShapeError, "do not split into 2 groups"),
    (
        lambda: ops.instance_norm(f(2, 3), f(3), f(3)),
        ShapeError,
        "instance_norm: x f32[2,3] needs axes after batch and channels to average",
    ),
    (lambda: ops.lrn(f(2, 3), size=0), OpAttributeError, "lrn: size 0 is not at least 1"),
    (
        lambda: ops.attention(f(1, 2, 3), f(1, 2, 3), f(1, 2, 3)),
        ShapeError,
        "attention: q f32[1,2,3] is not [batch",
    ),
    (
        lambda: ops.attention(*qkv(3, 2)),
        ShapeError,
        "attention: the 3 heads of q f32[1,3,4,8] do not split evenly",
    ),
    (
        lambda: ops.attention(*qkv(2, 2), f(3, 3)),
        ShapeError,
        "attention: mask f32[3,3] does not broadcast to the scores [1,2,4,5]",
    ),
    (
        lambda: get_op("grid_sample")(f(1, 1, 0, 2), f(1, 1, 1, 2), mode="nearest", padding="border"),
        ShapeError,
        "grid_sample: x f32[1,1,0,2] has no pixels to read",
    ),
    (lambda: ops.attention(*qkv(2, 2), IDS), DTypeError, "attention: mask i64[2] is neither bool nor"),
    (
        lambda: ops.attention(*qkv(2, 2), window=(1,)),
        OpAttributeError,
        "attention: window (1,) is not (left, right)",
    ),
    (
        lambda: ops.attention(*qkv(2, 2), softcap=-1.0),
        OpAttributeError,
        "attention: softcap -1.0 is negative",
    ),
    (
        lambda: ops.rope(f(3, 4), f(3, 4), f(3, 4)),
        ShapeError,
        "rope: cos f32[3,4] has 4 angles; x f32[3,4] has 4",
    ),
    (
        lambda: ops.rope(f(3, 4), f(3, 2)),
        TypeMismatchError,
        "rope: give either both cos and sin, or positions",
    ),
    (lambda: ops.rope(f(3, 5)), ShapeError, "rope_tables: dim 5 is not an even number"),
    (
        lambda: ops.cross_entropy(f(2, 3), np.array([0])),
        ShapeError,
        "cross_entropy: labels i64[1] do not match scores",
    ),
    (lambda: ops.cross_entropy(f(2, 3), IDS, f(2)), ShapeError, "weights f32[2] are not one per class"),
    (
        lambda: ops.nll_loss(f(2, 3), np.array([0, 3])),
        OutOfRangeError,
        "nll_loss: label 3 is out of range for 3",
    ),
    (
        lambda: ops.nll_loss(f(2, 3), IDS, reduction="all"),
        OpAttributeError,
        "nll_loss: attribute 'reduction' needs",
    ),
    (
        lambda: ops.sample_tokens(ops.random_key(1), f(2, 0)),
        ShapeError,
        "sample_tokens: logits f32[2,0] have nothing to choose from",
    ),
    (
        lambda: get_op("dft")(f(1, 0, 2), axis=1),
        ShapeError,
        "dft: axis 1 of f32[1,0,2] has no elements to transform",
    ),
    (
        lambda: get_op("stft")(f(0), nperseg=4, noverlap=2, nfft=4, boundary="odd"),
        ShapeError,
        "stft: f32[0] has no elements to continue at its ends",
    ),
    (
        lambda: ops.welch(rlx.Graph().input("x", ("n",), "f32"), nperseg=4, average="median"),
        ShapeError,
        "welch: the median of segments of f32[n] needs a known length; use average='mean'",
    ),
]


def qkv(heads: int, kv_heads: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return f(1, heads, 4, 8), f(1, kv_heads, 5, 8), f(1, kv_heads, 5, 8)


@pytest.mark.parametrize("case", CASES, ids=[c[2][:40] for c in CASES])
def test_message(case: tuple[Callable[[], Any], type[RlxError], str]) -> None:
    call, kind, text = case
    with pytest.raises(kind) as caught:
        call()
    assert text in str(caught.value)
