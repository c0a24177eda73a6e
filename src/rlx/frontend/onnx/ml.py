"""Classical models (ai.onnx.ml): label encoders, trees, small feature ops."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx import ops
from rlx.errors import ImportError_
from rlx.frontend.onnx.call import Call
from rlx.frontend.onnx.registry import onnx_op
from rlx.frontend.onnx.value import Strings

ML = "ai.onnx.ml"


@onnx_op("ArrayFeatureExtractor", domain=ML)
def array_feature_extractor(n: Call) -> Any:
    x, at = n[0], ops.reshape(n[1], (-1,))
    picked = ops.gather(x, at, x.rank - 1)
    return picked if x.rank > 1 else ops.expand_dims(picked, 0)


@onnx_op("Binarizer", domain=ML)
def binarizer(n: Call) -> Any:
    x = n[0]
    return ops.cast(ops.greater(x, n.constant(n.attr("threshold", 0.0), x.dtype)), x.dtype)


@onnx_op("Scaler", domain=ML)
def scaler(n: Call) -> Any:
    x = ops.cast(n[0], "f32")
    offset, scale = (
        np.array(n.attr(name, [value]), np.float32) for name, value in (("offset", 0), ("scale", 1))
    )
    return (x - n.constant(offset)) * n.constant(scale)


@onnx_op("Normalizer", domain=ML)
def normalizer(n: Call) -> Any:
    x = ops.cast(n[0], "f32")
    norm = {"MAX": lambda v: ops.max(v, -1, True), "L1": lambda v: ops.norm_l1(v, -1, True)}
    kind = n.choice("norm", "MAX", ("MAX", "L1", "L2"))
    return x / norm.get(kind, lambda v: ops.norm_l2(v, -1, True))(x)


@onnx_op("LinearRegressor", domain=ML)
def linear_regressor(n: Call) -> Any:
    x = ops.cast(n[0], "f32")
    targets = int(n.attr("targets", 1))
    weights = np.array(n.attr("coefficients"), np.float32).reshape(targets, -1)
    if n.choice("post_transform", "NONE", ("NONE",)):
        y = ops.matmul(x, n.constant(weights.T))
    bias = n.attr("intercepts", None)
    return y if bias is None else y + n.constant(np.array(bias, np.float32))


# -- label encoder


def table_side(n: Call, side: str) -> np.ndarray | None:
    """keys_* or values_* as an array, whichever type is given."""
    if n.has(f"{side}_tensor"):
        return np.asarray(n.attr(f"{side}_tensor"))
    for kind, to in (("strings", object), ("int64s", np.int64), ("floats", np.float32)):
        if n.has(f"{side}_{kind}"):
            return np.array(n.attr(f"{side}_{kind}"), dtype=to)
    return None


@onnx_op("LabelEncoder", domain=ML)
def label_encoder_of_classes(n: Call) -> Any:
    classes = n.attr("classes_strings")
    if isinstance(n.value(0), Strings):
        numbers = np.arange(len(classes), dtype=np.int64)
        return encoded(
            n, np.array(classes, dtype=object), numbers, np.array(n.attr("default_int64", -1), np.int64)
        )
    missing = np.array(n.attr("default_string", "_Unused"), dtype=object)
    return encoded(n, np.arange(len(classes)), np.array(classes, dtype=object), missing)


@onnx_op("LabelEncoder", domain=ML, since=2)
def label_encoder(n: Call) -> Any:
    keys, values = table_side(n, "keys"), table_side(n, "values")
    if keys is None or values is None:
        raise ImportError_("its keys or values are missing")
    if values.dtype == object:
        missing = np.array(n.attr("default_string", "_Unused"), dtype=object)
    elif values.dtype.kind == "i":
        missing = np.array(n.attr("default_int64", -1)).astype(values.dtype)
    else:
        missing = np.array(n.attr("default_float", -0.0)).astype(values.dtype)
    if n.has("default_tensor"):
        missing = np.asarray(n.attr("default_tensor")).reshape(-1)[0]
    return encoded(n, keys, values, np.asarray(missing))


def encoded(n: Call, keys: np.ndarray, values: np.ndarray, missing: np.ndarray) -> Any:
    """Each element replaced by what the table says."""
    if isinstance(n.value(0), Strings) or values.dtype == object:
        n.on_host("text exists on the host only")
        given = n.strings(0) if isinstance(n.value(0), Strings) else n.array(0)
        found = dict(zip(keys.tolist(), values.tolist(), strict=True))
        out = [found.get(item, missing.item()) for item in given.reshape(-1).tolist()]
        made = np.array(out, dtype=values.dtype).reshape(given.shape)
        return Strings(made) if made.dtype == object else n.constant(made)
    x = n[0]
    hit = ops.equal(ops.expand_dims(x, x.rank), n.constant(keys.astype(x.dtype.np)))
    if keys.dtype.kind == "f" and np.isnan(keys).any():
        nan = ops.logical_and(ops.expand_dims(ops.is_nan(x), x.rank), n.constant(np.isnan(keys)))
        hit = ops.logical_or(hit, nan)
    at = ops.argmax(ops.cast(hit, "i32"), axis=x.rank)
    return ops.where(ops.any(hit, x.rank), ops.gather(n.constant(values), at), n.constant(missing))


# -- trees

LEQ, LT, GTE, GT, EQ, NEQ, MEMBER = range(7)
COMPARE = {
    LEQ: ops.less_equal,
    LT: ops.less,
    GTE: ops.greater_equal,
    GT: ops.greater,
    EQ: ops.equal,
    NEQ: ops.not_equal,
}


@onnx_op("TreeEnsemble", domain=ML, since=5)
def tree_ensemble(n: Call) -> Any:
    """All rows walk down all trees together: a step gathers each one's node and compares its feature."""
    x = n[0]
    features, modes = (np.array(n.attr(k), np.int64) for k in ("nodes_featureids", "nodes_modes"))
    splits = np.asarray(n.attr("nodes_splits"))
    yes, no = (np.array(n.attr(f"nodes_{k}nodeids"), np.int64) for k in ("true", "false"))
    yes_leaf, no_leaf = (np.array(n.attr(f"nodes_{k}leafs"), np.int64) for k in ("true", "false"))
    roots = np.array(n.attr("tree_roots"), np.int64)
    count = len(features)
    # one numbering for inner nodes (0 ..) and leaves (count ..); a leaf leads to itself
    leaves = np.asarray(n.attr("leaf_weights"))
    targets = np.array(n.attr("leaf_targetids"), np.int64)
    own = np.arange(count, count + len(leaves))
    yes, no = np.concatenate([yes + count * yes_leaf, own]), np.concatenate([no + count * no_leaf, own])
    pad = len(leaves)
    features, modes = np.pad(features, (0, pad)), np.pad(modes, (0, pad))
    splits = np.pad(splits, (0, pad))
    sets = membership_sets(modes, n.attr("membership_values", None), x.dtype.np)
    missing = np.pad(np.array(n.attr("nodes_missing_value_tracks_true", [0] * count), np.int64), (0, pad))
    n.attr("nodes_hitrates", None)
    depth = tree_depth(yes, no, roots, count)
    at: Any = ops.broadcast_to(n.constant(roots), (x.shape[0], len(roots)))
    for _ in range(depth):
        value = ops.gather_elements(x, ops.gather(n.constant(features), at), axis=1)
        go = decisions(n, value, at, modes, splits, sets)
        if missing.any():
            tracks = ops.equal(ops.gather(n.constant(missing), at), 1)
            go = ops.logical_or(go, ops.logical_and(ops.is_nan(value), tracks))
        at = ops.where(go, ops.gather(n.constant(yes), at), ops.gather(n.constant(no), at))
    return aggregated(n, ops.sub(at, count), leaves, targets)


def membership_sets(modes: np.ndarray, values: Any, kind: Any) -> np.ndarray | None:
    """[nodes, largest set]: the sets of nodes that test membership, filled up with NaN."""
    if values is None or not (modes == MEMBER).any():
        return None
    flat = np.asarray(values, kind)
    ends = np.flatnonzero(np.isnan(flat))
    parts = [p[~np.isnan(p)] for p in np.split(flat, ends + 1)][: int((modes == MEMBER).sum())]
    out = np.full((len(modes), max(1, max(map(len, parts)))), np.nan, kind)
    for node, part in zip(np.flatnonzero(modes == MEMBER), parts, strict=True):
        out[node, : len(part)] = part
    return out


def tree_depth(yes: np.ndarray, no: np.ndarray, roots: np.ndarray, count: int) -> int:
    """Steps until everyone is at a leaf."""
    at, depth = set(roots.tolist()), 0
    while any(i < count for i in at):
        at = {int(k) for i in at if i < count for k in (yes[i], no[i])}
        depth += 1
        if depth > count:
            raise ImportError_("its trees have a cycle")
    return depth


def decisions(n: Call, value: Any, at: Any, modes: np.ndarray, splits: np.ndarray, sets: Any) -> Any:
    """Whether each row takes the true branch of the node it is at."""
    split = ops.gather(n.constant(splits.astype(value.dtype.np)), at)
    mode = ops.gather(n.constant(modes), at)
    go: Any = None
    for kind in sorted(set(modes.tolist())):
        if kind == MEMBER:
            members = ops.gather(n.constant(sets), at)
            hit = ops.any(ops.equal(ops.expand_dims(value, value.rank), members), axis=value.rank)
        elif kind in COMPARE:
            hit = COMPARE[kind](value, split)
        else:
            raise ImportError_(f"a node has mode {kind}, which RLX does not know")
        go = hit if go is None else ops.where(ops.equal(mode, kind), hit, go)
    return go


def aggregated(n: Call, leaf: Any, leaves: np.ndarray, targets: np.ndarray) -> Any:
    """Weights of the leaves reached, per target over all trees."""
    how = int(n.attr("aggregate_function", 1))
    many = int(n.attr("n_targets", 1))
    after = int(n.attr("post_transform", 0))
    if after != 0:
        raise ImportError_(f"post_transform {after} is not supported")
    weight = ops.expand_dims(ops.gather(n.constant(leaves), leaf), 2)
    mine = ops.equal(ops.expand_dims(ops.gather(n.constant(targets), leaf), 2), ops.iota((many,)))
    if how in (0, 1):
        total = ops.sum(ops.where(mine, weight, n.constant(0, leaves.dtype)), axis=1)
        return total / float(leaf.shape[1]) if how == 0 else total
    bound = np.inf if how == 2 else -np.inf
    spread = ops.where(mine, weight, n.constant(bound, leaves.dtype))
    best = (ops.min if how == 2 else ops.max)(spread, axis=1)
    return ops.where(ops.is_inf(best), n.constant(0, leaves.dtype), best)
