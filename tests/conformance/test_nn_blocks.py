"""The network blocks mean what ONNX says: each against ONNX's own reference on random operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlx import ops

onnx = pytest.importorskip("onnx")
helper = pytest.importorskip("onnx.helper")
reference = pytest.importorskip("onnx.reference")

rng = np.random.default_rng(7)


def random(*shape: int, low: float = -2.0, high: float = 2.0) -> np.ndarray:
    return rng.uniform(low, high, shape).astype(np.float32)


def onnx_run(
    kind: str, inputs: list[np.ndarray | None], outputs: int = 1, opset: int = 24, **attrs: Any
) -> Any:
    """Results of a one-node ONNX model; None is an input left out."""
    names = ["" if a is None else f"x{i}" for i, a in enumerate(inputs)]
    results = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(kind, names, results, **attrs)
    as_type = helper.np_dtype_to_tensor_dtype
    declared = [
        helper.make_tensor_value_info(n, as_type(a.dtype), a.shape)
        for n, a in zip(names, inputs, strict=True)
        if a is not None
    ]
    values = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, None) for n in results]
    graph = helper.make_graph([node], "one", declared, values)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    feed = {n: a for n, a in zip(names, inputs, strict=True) if a is not None}
    return reference.ReferenceEvaluator(model).run(None, feed)


def same(got: Any, want: Any, tolerance: float = 2e-6) -> None:
    got = got if isinstance(got, tuple) else (got,)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.shape == np.shape(b) and a.dtype == np.asarray(b).dtype
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


ACTIVATIONS: list[tuple[str, Callable[..., Any], dict[str, Any], dict[str, Any]]] = [
    ("Relu", ops.relu, {}, {}),
    ("LeakyRelu", ops.leaky_relu, {"alpha": 0.2}, {"alpha": 0.2}),
    ("Gelu", ops.gelu, {}, {}),
    ("Gelu", ops.gelu, {"approximate": "tanh"}, {"approximate": "tanh"}),
    ("Mish", ops.mish, {}, {}),
    ("Elu", ops.elu, {"alpha": 0.7}, {"alpha": 0.7}),
    ("Selu", ops.selu, {}, {}),
    ("Celu", ops.celu, {"alpha": 0.7}, {"alpha": 0.7}),
    ("Softplus", ops.softplus, {}, {}),
    ("Softsign", ops.softsign, {}, {}),
    ("HardSigmoid", ops.hard_sigmoid, {}, {}),
    ("HardSigmoid", ops.hard_sigmoid, {"alpha": 0.4, "beta": 0.6}, {"alpha": 0.4, "beta": 0.6}),
    ("HardSwish", ops.hard_swish, {}, {}),
    ("ThresholdedRelu", ops.thresholded_relu, {"alpha": 0.5}, {"alpha": 0.5}),
    ("Shrink", ops.shrink, {"lambd": 0.8, "bias": 0.3}, {"lambd": 0.8, "bias": 0.3}),
    ("Reciprocal", ops.reciprocal, {}, {}),
    ("Swish", ops.swish, {"alpha": 1.5}, {"alpha": 1.5}),
    ("Softmax", ops.softmax, {"axis": 1}, {"axis": 1}),
    ("LogSoftmax", ops.log_softmax, {"axis": 0}, {"axis": 0}),
]


@pytest.mark.parametrize("case", ACTIVATIONS, ids=lambda c: f"{c[0]}-{'-'.join(map(str, c[2]))}")
def test_activation(case: tuple[str, Callable[..., Any], dict[str, Any], dict[str, Any]]) -> None:
    kind, op, theirs, ours = case
    x = random(3, 17, low=-4, high=4)
    same(op(x, **ours), onnx_run(kind, [x], **theirs))


def test_prelu_and_clip() -> None:
    x, slope = random(2, 3, 5), random(3, 1)
    same(ops.prelu(x, slope), onnx_run("PRelu", [x, slope]))
    low, high = np.float32(-0.5), np.float32(0.75)
    same(ops.clip(x, low, high), onnx_run("Clip", [x, np.asarray(low), np.asarray(high)]))
    same(ops.clip(x, max=high), onnx_run("Clip", [x, None, np.asarray(high)]))


@pytest.mark.parametrize(
    ("kind", "op"),
    [
        ("ReduceMean", ops.mean),
        ("ReduceLogSumExp", ops.logsumexp),
        ("ReduceL1", ops.norm_l1),
        ("ReduceL2", ops.norm_l2),
        ("ReduceLogSum", ops.log_sum),
        ("ReduceSumSquare", ops.sum_square),
    ],
)
@pytest.mark.parametrize("keepdims", [False, True])
def test_reductions(kind: str, op: Callable[..., Any], keepdims: bool) -> None:
    x = random(3, 4, 5, low=0.1)
    for axes in ((0, 2), (-1,)):
        want = onnx_run(kind, [x, np.array(axes)], keepdims=int(keepdims))
        same(op(x, axis=axes, keepdims=keepdims), want, 1e-5)


def test_norms() -> None:
    x, scale, bias = random(2, 6, 5), random(6), random(6)
    last, shift = random(5), random(5)
    near = 1e-5
    want = onnx_run("LayerNormalization", [x, last, shift], axis=-1, epsilon=1e-4)
    same(ops.layer_norm(x, last, shift, eps=1e-4), want, near)
    both = random(6, 5)
    same(ops.layer_norm(x, both, axis=1), onnx_run("LayerNormalization", [x, both], axis=1), near)
    same(ops.rms_norm(x, last), onnx_run("RMSNormalization", [x, last], axis=-1), near)
    want = onnx_run("GroupNormalization", [x, scale, bias], num_groups=3)
    same(ops.group_norm(x, scale, bias, groups=3), want, near)
    same(ops.instance_norm(x, scale, bias), onnx_run("InstanceNormalization", [x, scale, bias]), near)
    image = random(5, 5, 3, 3)  # the reference takes the number of samples for that of channels
    for size in (3, 4):
        want = onnx_run("LRN", [image], size=size, alpha=0.3, beta=0.6)
        same(ops.lrn(image, size=size, alpha=0.3, beta=0.6), want, near)


def test_batch_norm() -> None:
    x, scale, bias, mean, var = random(4, 3, 5), random(3), random(3), random(3), random(3, low=0.2)
    operands = [x, scale, bias, mean, var]
    same(ops.batch_norm(*operands, eps=1e-3), onnx_run("BatchNormalization", operands, epsilon=1e-3), 1e-5)
    want = onnx_run("BatchNormalization", operands, outputs=3, training_mode=1, momentum=0.8)
    same(ops.batch_norm(*operands, training=True, momentum=0.8), want, 1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignore", [None, 1, -2])  # at -1 the reference forgets to correct the mean
def test_losses(reduction: str, weighted: bool, ignore: int | None) -> None:
    scores = random(3, 4, 2)
    labels = rng.integers(0, 4, (3, 2))
    if ignore is not None:
        labels[0, 0] = ignore
    weights = random(4, low=0.1) if weighted else None
    inputs = [scores, labels, *([] if weights is None else [weights])]
    attrs = {"reduction": reduction} | ({} if ignore is None else {"ignore_index": ignore})
    ours = {"ignore_index": ignore, "reduction": reduction}
    want = onnx_run("SoftmaxCrossEntropyLoss", inputs, **attrs)
    same(ops.cross_entropy(scores, labels, weights, **ours), want, 1e-5)
    want = onnx_run("NegativeLogLikelihoodLoss", inputs, **attrs)
    same(ops.nll_loss(scores, labels, weights, **ours), want, 1e-5)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({}, {}),
        ({"is_causal": 1}, {"causal": True}),
        ({"scale": 0.3}, {"scale": 0.3}),
        ({"softcap": 0.9}, {"softcap": 0.9}),
        ({"left_window_size": 1, "right_window_size": 2}, {"window": (1, 2)}),
        ({"is_causal": 1, "left_window_size": 2}, {"causal": True, "window": (2, -1)}),
    ],
)
@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("mask", ["none", "bool", "add"])
def test_attention(theirs: dict[str, Any], ours: dict[str, Any], heads: int, mask: str) -> None:
    q, k, v = random(2, heads, 3, 4), random(2, 2, 5, 4), random(2, 2, 5, 6)
    m = {"none": None, "bool": rng.random((2, 1, 3, 5)) < 0.5, "add": random(heads, 3, 5)}[mask]
    if mask == "bool":
        m[0, 0, 1] = False  # a query that sees nothing gives zeros
    want = onnx_run("Attention", [q, k, v, *([] if m is None else [m])], opset=25, **theirs)
    same(ops.attention(q, k, v, m, **ours), want, 1e-5)


def test_causal_attention_with_a_past_is_an_offset() -> None:
    q, k, v = random(1, 2, 3, 4), random(1, 2, 3, 4), random(1, 2, 3, 4)
    past_k, past_v = random(1, 2, 2, 4), random(1, 2, 2, 4)
    want = onnx_run("Attention", [q, k, v, None, past_k, past_v], is_causal=1)
    keys, values = np.concatenate([past_k, k], 2), np.concatenate([past_v, v], 2)
    same(ops.attention(q, keys, values, causal=True, offset=2), want, 1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [8, 4])
def test_rope(interleaved: bool, rotary: int) -> None:
    x = random(2, 3, 5, 8)
    positions = rng.integers(0, 9, (2, 5))
    cos, sin = ops.rope_tables(np.arange(9), rotary)
    attrs = {"interleaved": int(interleaved), "rotary_embedding_dim": 0 if rotary == 8 else rotary}
    if rotary != 8:
        attrs["num_heads"] = 3
    want = onnx_run("RotaryEmbedding", [x, cos, sin, positions], **attrs)
    same(ops.rope(x, positions=positions, rotary_dim=rotary, interleaved=interleaved), want, 1e-5)
    at = cos[positions][:, None], sin[positions][:, None]
    same(ops.rope(x, *at, interleaved=interleaved), want, 1e-5)
