"""Ensembles of trees (ai.onnx.ml) give what ONNX Runtime gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper  # noqa: E402

import rlx  # noqa: E402
from conformance.ort_session import open_session  # noqa: E402
from rlx.frontend.onnx.ml import trees  # noqa: E402

pytestmark = pytest.mark.usefixtures("each_origin")

# tree 0: x0 <= 0.5 ? (x1 <= -0.2 ? leaf 3 : leaf 4) : leaf 2; tree 1: x2 <= 0 ? leaf 1 : leaf 2
NODES: dict[str, Any] = {
    "nodes_treeids": [0, 0, 0, 0, 0, 1, 1, 1],
    "nodes_nodeids": [0, 1, 2, 3, 4, 0, 1, 2],
    "nodes_featureids": [0, 1, 0, 0, 0, 2, 0, 0],
    "nodes_values": [0.5, -0.2, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
    "nodes_modes": ["BRANCH_LEQ", "BRANCH_LEQ", "LEAF", "LEAF", "LEAF", "BRANCH_LEQ", "LEAF", "LEAF"],
    "nodes_truenodeids": [1, 3, 0, 0, 0, 1, 0, 0],
    "nodes_falsenodeids": [2, 4, 0, 0, 0, 2, 0, 0],
    "nodes_missing_value_tracks_true": [0, 1, 0, 0, 0, 1, 0, 0],
}
TREES, LEAVES = [0, 0, 0, 1, 1], [2, 3, 4, 1, 2]


def check(op: str, outputs: list[tuple[str, int]], nodes: dict[str, Any] = NODES, **attrs: Any) -> None:
    node = helper.make_node(op, ["x"], [name for name, _ in outputs], domain="ai.onnx.ml", **nodes, **attrs)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3])
    results = [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 1)]
    model = helper.make_model(helper.make_graph([node], op, [x], results), opset_imports=opsets, ir_version=8)
    rows = np.random.default_rng(3).standard_normal((40, 3)).astype(np.float32)
    rows[::7, 1] = np.nan
    session = open_session(model)
    want = session.run(None, {"x": rows})
    program = rlx.compile(rlx.from_onnx(model))
    assert not program.stats["host_thunks"]
    got = program.run({"x": rows})
    for (name, _), w in zip(outputs, want, strict=True):
        assert got[name].dtype == w.dtype
        np.testing.assert_allclose(got[name], w, rtol=1e-5, atol=1e-6)


def test_regressor() -> None:
    weights = {
        "target_treeids": TREES,
        "target_nodeids": LEAVES,
        "target_weights": [1.0, -2.0, 0.5, 3.0, 0.25],
    }
    one = {"target_ids": [0] * 5, "n_targets": 1, "base_values": [0.5]}
    check("TreeEnsembleRegressor", [("y", TensorProto.FLOAT)], **weights, **one)
    check(
        "TreeEnsembleRegressor",
        [("y", TensorProto.FLOAT)],
        **weights,
        target_ids=[0, 1, 1, 0, 1],
        n_targets=2,
    )


@pytest.mark.parametrize("after", ["NONE", "LOGISTIC", "SOFTMAX"])
def test_classifier_of_several_classes(after: str) -> None:
    weights = {"class_treeids": TREES, "class_nodeids": LEAVES, "class_weights": [0.7, 0.1, 0.5, 0.9, 0.25]}
    how = {"class_ids": [0, 1, 2, 0, 1], "classlabels_int64s": [10, 20, 30], "post_transform": after}
    outputs = [("label", TensorProto.INT64), ("scores", TensorProto.FLOAT)]
    check("TreeEnsembleClassifier", outputs, **weights, **how)


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize(("after", "low"), [("NONE", 0.1), ("NONE", -0.6), ("LOGISTIC", -0.6)])
def test_classifier_of_two_classes_with_one_score(after: str, low: float, at: int) -> None:
    weights = {"class_treeids": TREES, "class_nodeids": LEAVES, "class_weights": [0.4, low, 0.2, 0.5, 0.05]}
    how = {"class_ids": [at] * 5, "classlabels_int64s": [0, 1], "post_transform": after}
    outputs = [("label", TensorProto.INT64), ("scores", TensorProto.FLOAT)]
    check("TreeEnsembleClassifier", outputs, **weights, **how)


def test_deep_trees() -> None:
    """Twelve levels: a chain that leaves to the right at every node, written once, walked in a loop."""
    depth = 12
    leaf = ["BRANCH_LEQ", "LEAF"] * depth + ["LEAF"]  # nodes 2k are inner, 2k + 1 what is right of them
    inner = [mode != "LEAF" for mode in leaf]
    nodes = {
        "nodes_treeids": [0] * len(leaf),
        "nodes_nodeids": list(range(len(leaf))),
        "nodes_featureids": [i % 3 for i in range(len(leaf))],
        "nodes_values": [1.5 - 0.2 * i * b for i, b in enumerate(inner)],
        "nodes_modes": leaf,
        "nodes_truenodeids": [(i + 2) * b for i, b in enumerate(inner)],
        "nodes_falsenodeids": [(i + 1) * b for i, b in enumerate(inner)],
    }
    ends = [i for i, b in enumerate(inner) if not b]
    targets = {
        "target_treeids": [0] * len(ends),
        "target_nodeids": ends,
        "target_ids": [0] * len(ends),
        "target_weights": [float(i) for i in ends],
        "n_targets": 1,
    }
    check("TreeEnsembleRegressor", [("y", TensorProto.FLOAT)], nodes=nodes, **targets)


def ragged(mode: str, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Seven trees of up to four levels, some a single leaf, whose nodes all compare in one way; a few splits
    are values that rows have."""
    rng = np.random.default_rng(seed)
    nodes: dict[str, list[Any]] = {key: [] for key in NODES if key != "nodes_missing_value_tracks_true"}
    ends: list[tuple[int, int]] = []
    for tree in range(7):
        level, count = [0], 1
        for depth in range(5):
            following: list[int] = []
            for own in level:
                inner = depth < 4 and (depth == 0 or rng.random() < 0.6) and tree != 3
                values = [tree, own, 0, 0.0, "LEAF", 0, 0]
                if inner:
                    split = float(rng.choice([0.0, 0.5, *rng.standard_normal(3)]))
                    values[2:] = [int(rng.integers(3)), split, mode, count, count + 1]
                    following += [count, count + 1]
                    count += 2
                else:
                    ends.append((tree, own))
                for column, value in zip(nodes.values(), values, strict=True):
                    column.append(value)
            level = following
    targets = {
        "target_treeids": [tree for tree, _ in ends],
        "target_nodeids": [own for _, own in ends],
        "target_ids": [int(i) for i in rng.integers(0, 2, len(ends))],
        "target_weights": [float(w) for w in rng.standard_normal(len(ends))],
        "n_targets": 2,
    }
    return nodes, targets


@pytest.mark.parametrize("mode", ["LEQ", "LT", "GTE", "GT", "EQ", "NEQ"])
@pytest.mark.parametrize("seed", [0, 1])
def test_small_trees_are_filled_up_to_one_depth(
    mode: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, targets = ragged(f"BRANCH_{mode}", seed)
    outputs = [("y", TensorProto.FLOAT)]
    made: list[int | None] = []
    levels = trees.Forest.levels

    def noted(self: trees.Forest) -> list[np.ndarray] | None:
        found = levels(self)
        made.append(None if found is None else len(found) - 1)
        return found

    monkeypatch.setattr(trees.Forest, "levels", noted)
    check("TreeEnsembleRegressor", outputs, nodes=nodes, **targets)
    monkeypatch.setattr(trees, "DEEPEST", 3)  # deeper ones are walked in a loop
    check("TreeEnsembleRegressor", outputs, nodes=nodes, **targets)
    assert set(made) == {4, None}
