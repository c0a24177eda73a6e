"""Ensembles of trees as scikit-learn, LightGBM and XGBoost export them (ai.onnx.ml before version 5)."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx import ops
from rlx.errors import ImportError_
from rlx.frontend.onnx.call import Call
from rlx.frontend.onnx.ml import EQ, GT, GTE, LEQ, LT, ML, NEQ, decisions
from rlx.frontend.onnx.registry import onnx_op

MOST_DEPTH = 5
"""Levels are written out, and kernels of more levels take too long to compile."""

MODES = {
    "BRANCH_LEQ": LEQ,
    "BRANCH_LT": LT,
    "BRANCH_GTE": GTE,
    "BRANCH_GT": GT,
    "BRANCH_EQ": EQ,
    "BRANCH_NEQ": NEQ,
    "LEAF": LEQ,  # a leaf leads to itself, whatever is compared
}


@onnx_op("TreeEnsembleRegressor", domain=ML)
def tree_ensemble_regressor(n: Call) -> Any:
    how = n.choice("aggregate_function", "SUM", ("SUM", "AVERAGE"))
    n.choice("post_transform", "NONE", ("NONE",))
    trees = len(set(n.attr("nodes_treeids")))
    total = summed(n, "target", int(n.attr("n_targets", 1)))
    base = np.array(n.attr("base_values", [0.0]), np.float32)
    return (total / float(trees) if how == "AVERAGE" else total) + n.constant(base)


@onnx_op("TreeEnsembleClassifier", domain=ML)
def tree_ensemble_classifier(n: Call) -> Any:
    text = n.attr("classlabels_strings", None)
    labels = n.attr("classlabels_int64s", None)
    if text and n.wants(0):
        raise ImportError_("labels that are text are not supported; make the scores the only output")
    many = len(text or labels)
    after = n.choice("post_transform", "NONE", ("NONE", "LOGISTIC", "SOFTMAX"))
    used = set(n.attr("class_ids"))
    single = many == 2 and used == {0}
    scores = summed(n, "class", 1 if single else many)
    scores = scores + n.constant(np.array(n.attr("base_values", [0.0]), np.float32))
    chances = min(n.attr("class_weights")) >= 0
    if many == 2 and len(used) == 1:  # one score decides between two classes
        last = scores if single else ops.slice_axis(scores, 1, 1, 1)
        picked = ops.reshape(ops.greater(last, 0.5 if chances else 0.0), (-1,))
    else:
        picked = ops.argmax(scores, axis=1)
    if single:  # what the first class has follows from it
        other = 1.0 - scores if chances else -scores
        scores = ops.concat([other, scores], 1)
    if after == "LOGISTIC" and not (single and chances):
        scores = ops.sigmoid(scores)
    if after == "SOFTMAX":
        scores = ops.softmax(scores, 1)
    label = None if text else ops.gather(n.constant(np.array(labels, np.int64)), ops.cast(picked, "i64"))
    return label, scores


def summed(n: Call, kind: str, many: int) -> Any:
    """[rows, many]: weights of the leaves that rows reach, summed over trees. All rows walk down all trees
    together: a step gathers each one's node and compares its feature."""
    x = ops.cast(n[0], "f32")
    trees, own = (n.attr(f"nodes_{k}ids") for k in ("tree", "node"))
    number = {key: i for i, key in enumerate(zip(trees, own, strict=True))}
    names = n.attr("nodes_modes")
    if not set(names) <= MODES.keys():
        raise ImportError_(f"a node has mode {(set(names) - MODES.keys()).pop()!r}, which RLX does not know")
    leaf = np.array([name == "LEAF" for name in names])
    here = np.arange(len(own))
    yes, no = (
        np.where(
            leaf, here, [number.get(key, 0) for key in zip(trees, n.attr(f"nodes_{k}nodeids"), strict=True)]
        )
        for k in ("true", "false")
    )
    modes = np.array([MODES[name] for name in names], np.int64)
    features = np.array(n.attr("nodes_featureids"), np.int64)
    splits = np.array(n.attr("nodes_values"), np.float32)
    tracks = np.array(n.attr("nodes_missing_value_tracks_true", [0] * len(own)), np.int64)
    n.attr("nodes_hitrates", None)
    inner = {*yes[~leaf].tolist(), *no[~leaf].tolist()}
    roots = np.array([i for i in here.tolist() if i not in inner], np.int64)
    at: Any = ops.broadcast_to(n.constant(roots), (x.shape[0], len(roots)))
    depth = depth_of(yes, no, leaf, roots)
    if depth > MOST_DEPTH:
        raise ImportError_(f"its trees are {depth} deep; RLX takes {MOST_DEPTH} levels at most")
    for _ in range(depth):
        value = ops.gather_elements(x, ops.gather(n.constant(features), at), axis=1)
        go = decisions(n, value, at, modes, splits, None)
        if tracks.any():
            missing = ops.equal(ops.gather(n.constant(tracks), at), 1)
            go = ops.logical_or(go, ops.logical_and(ops.is_nan(value), missing))
        at = ops.where(go, ops.gather(n.constant(yes), at), ops.gather(n.constant(no), at))
    weights = np.zeros((len(own), many), np.float32)
    places = zip(n.attr(f"{kind}_treeids"), n.attr(f"{kind}_nodeids"), strict=True)
    for key, target, weight in zip(places, n.attr(f"{kind}_ids"), n.attr(f"{kind}_weights"), strict=True):
        weights[number[key], target if many > 1 else 0] += weight
    return ops.sum(ops.gather(n.constant(weights), at), axis=1)


def depth_of(yes: np.ndarray, no: np.ndarray, leaf: np.ndarray, roots: np.ndarray) -> int:
    """Steps until everyone is at a leaf."""
    at, depth = roots, 0
    while not leaf[at].all():
        inner = at[~leaf[at]]
        at, depth = np.unique(np.concatenate([yes[inner], no[inner]])), depth + 1
        if depth > len(leaf):
            raise ImportError_("its trees have a cycle")
    return depth
