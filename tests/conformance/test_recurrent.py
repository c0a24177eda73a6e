"""Recurrent layers against ONNX Runtime: directions, lengths, initial states, peepholes, activations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from conformance.ort_session import open_session
from rlx import ops

STEPS, BATCH, INPUTS, HIDDEN = 5, 3, 4, 6
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
LENS = np.array([5, 2, 4], np.int32)

CASES: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    ("RNN", (), {}),
    ("RNN", ("bias", "lens", "initial_h"), {"direction": "bidirectional"}),
    ("RNN", ("bias",), {"direction": "reverse", "activations": ["Relu"], "clip": 0.5}),
    ("RNN", ("bias",), {"activations": ["Affine"], "alpha": [0.5], "beta": [0.1]}),
    ("RNN", ("bias",), {"activations": ["LeakyRelu"]}),
    ("RNN", ("bias",), {"activations": ["ThresholdedRelu"], "alpha": [0.2]}),
    ("RNN", ("bias",), {"activations": ["ScaledTanh"], "alpha": [1.2], "beta": [0.7]}),
    ("RNN", ("bias",), {"activations": ["Elu"], "alpha": [0.6]}),
    ("RNN", ("bias",), {"activations": ["Softplus"]}),
    ("GRU", (), {}),
    ("GRU", ("bias", "lens", "initial_h"), {"direction": "bidirectional"}),
    ("GRU", ("bias", "lens", "initial_h"), {"direction": "bidirectional", "linear_before_reset": True}),
    ("GRU", ("bias",), {"direction": "reverse", "clip": 0.4}),
    ("GRU", ("bias",), {"clip": 0.4, "linear_before_reset": True}),
    ("GRU", ("bias",), {"activations": ["HardSigmoid", "Softsign"]}),
    ("LSTM", (), {}),
    ("LSTM", ("bias", "lens", "initial_h", "initial_c", "peephole"), {"direction": "bidirectional"}),
    ("LSTM", ("bias", "peephole"), {"direction": "reverse", "clip": 0.3}),
    ("LSTM", ("bias", "peephole"), {"input_forget": True}),
    (
        "LSTM",
        ("bias",),
        {"activations": ["HardSigmoid", "ScaledTanh", "Elu"], "alpha": [0.3, 1.1, 0.8], "beta": [0.4, 0.9]},
    ),
]


def operands(kind: str, extras: tuple[str, ...], sides: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    gates = GATES[kind]
    shapes = {
        "x": (STEPS, BATCH, INPUTS),
        "w": (sides, gates * HIDDEN, INPUTS),
        "r": (sides, gates * HIDDEN, HIDDEN),
        "bias": (sides, 2 * gates * HIDDEN),
        "initial_h": (sides, BATCH, HIDDEN),
        "initial_c": (sides, BATCH, HIDDEN),
        "peephole": (sides, 3 * HIDDEN),
    }
    made = {name: rng.uniform(-1, 1, shape).astype(np.float32) for name, shape in shapes.items()}
    made["lens"] = LENS
    return {name: made[name] for name in ("x", "w", "r", *extras)}


def by_onnxruntime(kind: str, given: dict[str, np.ndarray], attrs: dict[str, Any]) -> list[np.ndarray]:
    from onnx import TensorProto, helper

    order = ["x", "w", "r", "bias", "lens", "initial_h", "initial_c", "peephole"]
    order = order if kind == "LSTM" else order[:6]
    names = [name if name in given else "" for name in order]
    renamed = {"alpha": "activation_alpha", "beta": "activation_beta"}
    onnx_attrs = {renamed.get(k, k): int(v) if isinstance(v, bool) else v for k, v in attrs.items()}
    outputs = ["y", "h", "c"][: 3 if kind == "LSTM" else 2]
    node = helper.make_node(kind, names, outputs, hidden_size=HIDDEN, **onnx_attrs)
    kinds = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.int32): TensorProto.INT32}
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info(n, kinds[a.dtype], a.shape) for n, a in given.items()],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)
    session = open_session(model)
    found: list[np.ndarray] = session.run(None, given)
    return found


@pytest.mark.parametrize("case", CASES, ids=[f"{k}-{i}" for i, (k, _, _) in enumerate(CASES)])
def test_layers_are_those_of_onnxruntime(
    case: tuple[str, tuple[str, ...], dict[str, Any]], require: Any
) -> None:
    require("onnx")
    require("onnxruntime")
    kind, extras, attrs = case
    given = operands(kind, extras, 2 if attrs.get("direction") == "bidirectional" else 1)
    want = by_onnxruntime(kind, given, attrs)
    got = getattr(ops, kind.lower())(**given, **attrs)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def test_batch_first_moves_axes_only() -> None:
    given = operands("LSTM", ("initial_h", "initial_c"), 1)
    want = ops.lstm(**given)
    turned = {
        k: np.swapaxes(v, 0, 1) if k in ("x", "initial_h", "initial_c") else v for k, v in given.items()
    }
    y, h, c = ops.lstm(**turned, batch_first=True)
    np.testing.assert_array_equal(y, np.moveaxis(want[0], 2, 0))
    np.testing.assert_array_equal(np.stack([h, c]), np.stack([np.swapaxes(e, 0, 1) for e in want[1:]]))
